"""Searches run on a clock that counts what candidates are expected to take: no outcome depends on the machine's speed."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _expected_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from contextlib import nullcontext

    from ridgeline.optimizer.receipt import SKIPPED
    from ridgeline.optimizer.search import search as searching
    from ridgeline.optimizer.search.search import Search

    spent: dict[int, float] = {}
    climb = Search._climb

    def climbed(self: Search, rung: Any, ladder: Any) -> None:
        climb(self, rung, ladder)
        entry = self.entries.get(rung.candidate.name)
        if entry is not None and entry.status != SKIPPED:
            spent[id(self)] = spent.get(id(self), 0.0) + rung.cost_s + 0.5

    monkeypatch.setattr(Search, "_climb", climbed)
    monkeypatch.setattr(Search, "left_s", lambda self: self.problem.budget_s - spent.get(id(self), 0.2))
    monkeypatch.setattr(searching, "within", lambda seconds, importing=True: nullcontext())
