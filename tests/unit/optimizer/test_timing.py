"""Interleaved timing decides what is faster, and says when it cannot."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import simulated_clock as clock

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.search.timing import MIN_ROUNDS, Timed, Track, compare


class Runner:
    def __init__(self, call) -> None:
        self.call, self.log = call, []

    @contextlib.contextmanager
    def switched(self):
        self.log.append("on")
        yield self.call
        self.log.append("off")


def _track(model: nn.Module | None = None, *args: torch.Tensor, mode: str = "infer") -> Track:
    made = Track(model or nn.Identity(), Inputs(args or (torch.ones(2),)), mode, None, torch.device("cpu"))
    made.settle(made.model)
    return made


def test_twice_as_fast_is_decided() -> None:
    slow, fast = Timed((2.0, 2.1, 1.9, 2.0, 2.2)), Timed((1.0, 1.0, 1.1, 1.0, 0.9))
    found = compare(slow, fast)
    assert found.faster and not found.slower and found.low > 1.5 and found.speedup == pytest.approx(2.0, rel=0.1)
    assert compare(fast, slow).slower


def test_equal_times_are_not_decided() -> None:
    a = Timed((1.0, 1.1, 0.9, 1.05, 0.95, 1.0))
    b = Timed((1.1, 0.9, 1.0, 0.95, 1.05, 1.0))
    assert not compare(a, b).decided


def test_a_consistent_difference_below_the_noise_is_no_difference() -> None:
    a = Timed(tuple(1.002 + 0.0001 * i for i in range(10)))
    b = Timed(tuple(1.0 + 0.0001 * i for i in range(10)))
    assert not compare(a, b).decided


def test_drift_cancels_in_pairs() -> None:
    drift = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
    found = compare(Timed(tuple(1.2 * d for d in drift)), Timed(tuple(drift)))
    assert found.speedup == pytest.approx(1.2) and found.faster


def test_contenders_take_turns_and_are_switched_around_them() -> None:
    slow, fast = Runner(lambda x: clock.sleep(2e-3)), Runner(lambda x: clock.sleep(2e-4))
    found = _track().race({"slow": slow, "fast": fast}, 0.2, [("slow", "fast")])
    assert len(found["slow"].seconds) == len(found["fast"].seconds) >= MIN_ROUNDS
    assert compare(found["slow"], found["fast"]).faster
    assert slow.log[::2] == ["on"] * (len(slow.log) // 2), "off after every turn"


def test_a_race_stops_when_it_is_decided() -> None:
    slow, fast = Runner(lambda x: clock.sleep(5e-3)), Runner(lambda x: clock.sleep(1e-4))
    found = _track().race({"slow": slow, "fast": fast}, 10.0, [("slow", "fast")])
    assert len(found["slow"].seconds) == MIN_ROUNDS


class Writing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def test_what_a_call_writes_to_its_inputs_is_put_back_after_every_turn() -> None:
    x = torch.zeros(3)
    track = _track(Writing(), x)
    assert track.mutates
    track.race({"eager": Runner(track.model)}, 0.05)
    assert torch.equal(x, torch.zeros(3))


def test_results_are_let_go_of_before_the_backward_whose_memory_is_measured() -> None:
    alive: list[bool] = []

    class Worded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            loss, held = logits.exp().sum(), weakref.ref(logits)
            loss.register_hook(lambda grad: alive.append(held() is not None))
            return {"loss": loss, "logits": logits}

    model = Worded()
    made = Track(model, Inputs((torch.ones(1, 2),)), "train", None, torch.device("cpu"))
    made.run(model, made.inputs)
    assert alive == [False]


def test_training_turns_leave_no_gradients() -> None:
    model = nn.Linear(3, 2)
    track = _track(model, torch.randn(4, 3), mode="train")
    track.turn_s(model, 2)
    assert all(p.grad is None for p in model.parameters())


class Held:
    """A cache: a tensor that is written in place, and what Python counts beside it."""

    def __init__(self) -> None:
        self.values, self.entries = torch.zeros(4), [torch.ones(2)]
        self.num_calls = 0


def _filled(cache: Held) -> None:
    cache.values.add_(1)


def _counted(cache: Held) -> None:
    cache.values.add_(1)
    cache.num_calls += 1


def _appended(cache: Held) -> None:
    cache.entries.append(torch.ones(2))


def _rebound(cache: Held) -> None:
    cache.values = cache.values + 1


@pytest.mark.parametrize(("call", "stays"), [(_filled, True), (_counted, False), (_appended, False), (_rebound, False)])
def test_a_cache_that_calls_leave_as_it_is_goes_round_and_any_other_is_new_every_time(call, stays) -> None:
    cache, seen = Held(), []
    track = Track(nn.Identity(), Inputs((cache,)), "infer", None, torch.device("cpu"))
    track.settle(call)

    def watched(given: Held) -> None:
        assert given.num_calls == 0 and len(given.entries) == 1 and not given.values.any()
        seen.append(given)
        call(given)

    for _ in range(3):
        track.turn_s(watched, 1)
    assert (len({id(each) for each in seen}) == 1) is stays
    assert cache.num_calls == 0 and len(cache.entries) == 1 and not cache.values.any()


def test_a_contender_that_marks_the_cache_spoils_it_for_nobody_else() -> None:
    track = Track(nn.Identity(), Inputs((Held(),)), "infer", None, torch.device("cpu"))
    track.settle(_filled)
    seen = []
    for call in (_appended, _counted, lambda cache: seen.append((cache.num_calls, len(cache.entries)))):
        track.turn_s(call, 1)
    assert seen == [(0, 1)]


def test_a_turn_of_a_loop_is_several_calls_where_the_time_is_enough_for_them() -> None:
    """Also of a model that counts: a loop does not put its state back after every step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    track = _track(model, torch.randn(8, 4), mode="train")
    assert track.mutates
    turns: list[int] = []
    track.about_s = lambda call: 0.1  # type: ignore[method-assign]
    track.turn_s = lambda call, num: turns.append(num) or 0.1  # type: ignore[func-returns-value,method-assign]
    for budget_s, num in ((100.0, 3), (0.5, 1)):
        turns.clear()
        track.race({"eager": Runner(model)}, budget_s, least_calls=3)
        assert set(turns) == {num}
    turns.clear()
    track.race({"eager": Runner(model)}, 100.0)
    assert set(turns) == {1}
