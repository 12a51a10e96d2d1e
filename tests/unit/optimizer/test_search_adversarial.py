"""Models made to catch an optimizer out, through the whole search: what comes back behaves as eager does."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import compare
from adversarial import CASES, Case
from recorder import TapeExecutor

import ridgeline as rl
from ridgeline.optimizer import graphed, measure
from ridgeline.optimizer.candidate import Candidate
from ridgeline.optimizer.ladder import Ladder, Rung, recommended
from ridgeline.optimizer.search import Search

CPU = torch.device("cpu")
LEFT_ALONE = ("an expanded input, written to",)
"""What a call writes to one number in several places cannot be put back after a turn."""
TRACED = (
    "writes to a view of its input", "returns views of one result", "overlapping inputs, written to", "noise",
    "one tensor given three times, written to", "dtypes that promote", "counts in a buffer", "replaces a buffer",
    "counts in Python", "branches on values", "dropout in training", "modules in lists", "a cache that grows",
    "parameters updated", "a module replaced", "a hook added later",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _kept_if_right(monkeypatch: Any) -> None:
    """Whatever is proved right is kept, however slow: it is results that are looked at here."""
    monkeypatch.setattr(graphed, "executor_for", lambda given: TapeExecutor())
    monkeypatch.setattr(measure.Comparison, "faster", property(lambda self: True))
    monkeypatch.setattr(measure.Comparison, "slower", property(lambda self: False))
    monkeypatch.setattr(measure, "MAX_ROUNDS", 1)
    monkeypatch.setattr(Search, "_is_eager", lambda self, built: False)
    monkeypatch.setattr(Search, "_hardly_gains", lambda self, timed: False)
    last_race = Search._last_race

    def undecided(self: Search) -> Any:
        monkeypatch.setattr(measure.Comparison, "ahead", property(lambda self: False))
        return last_race(self)

    monkeypatch.setattr(Search, "_last_race", undecided)


def _check(case: Case, candidate: Candidate, monkeypatch: Any) -> str:
    monkeypatch.setattr(Ladder, "rungs", lambda self, search: iter([Rung(candidate, 0.1)]))
    eager, model = compare.build(case, CPU), compare.build(case, CPU)
    before = compare.snapshot(model)
    args, kwargs = compare.inputs(case, CPU, 0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with case.around(CPU):
            fast = rl.optimize(model, args, kwargs, budget_s=30, use_cache=False)
        assert compare.alike(compare.snapshot(model), before, exact=True), "the search left a trace"
        for call in range(1, 4):
            compare._call(replace(case, exact=False), eager, fast, CPU, call)
    return fast.receipt.winner


@pytest.mark.parametrize("case", [c for c in CASES if c.raises is None], ids=lambda case: case.name)
def test_recorded_or_left_alone_it_gives_what_eager_gives(case: Case, monkeypatch: Any) -> None:
    if "transformers" in case.marks:
        pytest.importorskip("transformers")
    winner = _check(case, Candidate(name="graph", graphed=True), monkeypatch)
    assert winner == ("eager" if case.refused or case.name in LEFT_ALONE else "graph")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in TRACED], ids=lambda case: case.name)
def test_traced_and_rewritten_it_gives_what_eager_gives(case: Case, monkeypatch: Any) -> None:
    chosen = recommended("inference", "none", "cpu")
    assert _check(case, Candidate(name="rewrites", rewrites=chosen), monkeypatch) == "rewrites"


def test_a_model_that_cannot_run_says_so_itself(monkeypatch: Any) -> None:
    (case,) = [c for c in CASES if c.raises is not None and not c.refused] or [c for c in CASES if c.raises is not None]
    model = compare.build(case, CPU)
    args, kwargs = compare.inputs(case, CPU, 1)
    with pytest.raises(case.raises):
        model(*args, **kwargs)
    with pytest.raises(case.raises):
        rl.optimize(model, args, kwargs, budget_s=5, use_cache=False)
