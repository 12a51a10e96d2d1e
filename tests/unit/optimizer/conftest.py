"""Searches run on a clock that counts what candidates are expected to take, so that no outcome depends on speed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import simulated_clock


@pytest.fixture(autouse=True)
def _expected_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from contextlib import nullcontext

    from ridgeline.engine.replay import inference
    from ridgeline.optimizer.precision import sensitivity
    from ridgeline.optimizer.receipt import SKIPPED
    from ridgeline.optimizer.search import budget, timing
    from ridgeline.optimizer.search import search as searching
    from ridgeline.optimizer.search.budget import Budget
    from ridgeline.optimizer.search.search import Search
    from ridgeline.optimizer.training import optimizer_update

    spent: dict[int, float] = {}
    evaluate = Search._evaluate

    def evaluated(self: Search, proposal: Any, stages: Any) -> None:
        evaluate(self, proposal, stages)
        entry = self.entries.get(proposal.candidate.name)
        if entry is not None and entry.status != SKIPPED:
            spent[id(self)] = spent.get(id(self), 0.0) + proposal.cost_s + 0.5

    monkeypatch.setattr(Search, "_evaluate", evaluated)
    monkeypatch.setattr(Budget, "left_s", lambda self: (
        self.search.problem.budget_s - spent.get(id(self.search), 0.2)))
    for module in (budget, timing, inference, optimizer_update, sensitivity):
        monkeypatch.setattr(module, "time", simulated_clock)
    monkeypatch.setattr(searching, "within", lambda seconds, importing=True: nullcontext())
