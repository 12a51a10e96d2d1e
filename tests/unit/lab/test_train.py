"""The driver of training races: processes take turns on one device, and short searches try what rows rest on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lab.optimize.train import Turn, _fewer


def test_whoever_is_named_first_has_the_device_first(tmp_path: Path) -> None:
    lock, served = str(tmp_path / "lock"), []
    holder = Turn(lock, 9)
    holder.take()

    def wait(rank: int) -> None:
        turn = Turn(lock, rank)
        turn.take()
        served.append(rank)
        turn.give()
        turn.file.close()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (3, 1, 2)]
    for thread in threads:
        thread.start()
    while len(list((tmp_path / "lock.queue").iterdir())) < len(threads):
        time.sleep(0.01)
    (tmp_path / "lock.queue" / "0000.999999999").touch()  # one that was ended while it waited
    holder.give()
    holder.file.close()
    for thread in threads:
        thread.join(timeout=1800)
    assert served == [1, 2, 3]


@pytest.mark.parametrize(("recordable", "tried"), [
    (True, ["graph", "blocks + graph", "torch.compile", "torch.compile + graph"]),
    (False, ["graph", "torch.compile", "torch.compile + graph"])])  # fmt: skip
def test_a_search_of_few_candidates_tries_what_rows_rest_on(recordable: bool, tried: list[str]) -> None:
    """A detector, of which nothing can be recorded, had its torch.compile withheld, and was returned as eager."""
    pytest.importorskip("torch")
    from ridgeline.optimizer.backend import Report
    from ridgeline.optimizer.search.candidate import Built, Candidate
    from ridgeline.optimizer.search.facts import Facts
    from ridgeline.optimizer.search.order import Stages

    class Search:
        best, entries = Built(Candidate(name="eager"), lambda: None, Report()), {}
        problem: Any = type("Problem", (), {"model": None})()

        def record(self, built: Any, status: str, reason: str) -> None:
            self.entries[built.candidate.name] = _entry(status)

    facts = Facts(mode="train", cuda=True, eager_s=0.02, groups=("blocks",), num_leaves=50, unlike_frac=0.5,  # type: ignore[arg-type]
                  has_conv=True, substitutable=(), unmasked=False, has_cache=False,
                  forecast=None, budget_s=60.0)  # fmt: skip
    search, found = Search(), []
    for proposal in _fewer(Stages.proposals)(Stages(facts), search):
        found.append(proposal.candidate.name)
        failed = proposal.candidate.graphed and not recordable
        search.entries[proposal.candidate.name] = _entry("failed" if failed else "slower")
    assert found == tried


def _entry(status: str) -> Any:
    return type("Entry", (), {"status": status, "measured_s": 1.0, "reason": "", "rewrites": {}})
