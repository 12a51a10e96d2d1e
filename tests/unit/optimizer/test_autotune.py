"""Races between ways to compute one thing, without a device: who is taken when, and who is left out."""

import threading
import time
from typing import Any

import pytest
import torch

from ridgeline.engine import autotune as contest
from ridgeline.engine.autotune import Contest

CPU = torch.device("cpu")


def ways(log: list[str], *names: str) -> dict[str, Any]:
    def way(name: str) -> Any:
        return lambda: log.append(name) or torch.tensor(names.index(name))

    return {name: way(name) for name in names}


def test_without_a_device_the_first_way_is_taken() -> None:
    log: list[str] = []
    assert int(Contest().run("key", ways(log, "library", "ours"), CPU)) == 0 and log == ["library"]


@pytest.mark.parametrize(("ours_s", "winner"), [(0.5, "ours"), (0.995, "library"), (2.0, "library")])
def test_another_way_wins_only_by_a_margin_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch, ours_s: float, winner: str
) -> None:
    monkeypatch.setattr(contest, "may_time", lambda device: True)
    monkeypatch.setattr(contest, "timed", lambda found, device: {"library": 1.0, "ours": ours_s})
    race, log = Contest(), []
    race.run("key", ways(log, "library", "ours"), CPU)
    monkeypatch.setattr(contest, "timed", lambda found, device: pytest.fail("raced again"))
    race.run("key", ways(log, "library", "ours"), CPU)
    assert log == [winner] * 2 and race.won == {"key": winner}


def test_a_way_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def broken() -> Any:
        raise RuntimeError("out of shared memory")

    found = contest.runnable({"library": lambda: torch.tensor(1), "ours": broken}, CPU)
    assert list(found) == ["library"]


def test_plans_are_made_beside_each_other_without_gradients_and_one_that_fails_stops_nobody() -> None:
    together, made = threading.Barrier(2, timeout=1800), []

    def plan(name: str) -> None:
        together.wait()
        made.append((name, torch.is_grad_enabled()))
        if name == "b":
            raise RuntimeError("no such tile")

    contest.prepared([lambda: plan("a"), lambda: plan("b")])
    assert sorted(made) == [("a", False), ("b", False)]


def test_the_device_waits_until_the_host_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a way that the host takes long for, no more is counted than the device takes."""
    log: list[Any] = []

    class Event:
        def __init__(self, **options: Any) -> None:
            self.at = 0

        def record(self, stream: Any) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles), raising=False)
    assert contest._seconds(lambda: log.append("way") or time.sleep(1e-3), CPU) == 4e-3
    assert [each for each in log if not isinstance(each, int)] == ["way", "event", "way", "event", "wait"]
    assert log[1] >= 1e-3 * contest.CYCLES_PER_S  # before the first event
    assert contest._head_start(1.0) == contest._head_start(0.1) < 0.01 * contest.CYCLES_PER_S  # a slow host is not all
