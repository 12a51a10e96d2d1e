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
from adversarial import CASES, Case, Lambda
from recorder import TapeExecutor

import ridgeline as rl
from ridgeline.engine.replay import inference as graphed
from ridgeline.errors import OptimizeError
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search import timing as measure
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.last_race import LastRace
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.search import Search

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
    monkeypatch.setattr(LastRace, "hardly_gains", lambda self, timed: False)
    last_race = LastRace.last_race

    def undecided(self: LastRace) -> Any:
        monkeypatch.setattr(measure.Comparison, "ahead", property(lambda self: False))
        return last_race(self)

    monkeypatch.setattr(LastRace, "last_race", undecided)


def _check(case: Case, candidate: Candidate, monkeypatch: Any) -> str:
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(candidate, 0.1)]))
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
def test_captured_or_left_alone_it_gives_what_eager_gives(case: Case, monkeypatch: Any) -> None:
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
    with pytest.raises(OptimizeError, match="the model itself fails on these inputs: ValueError") as raised:
        rl.optimize(model, args, kwargs, budget_s=5, use_cache=False)
    assert isinstance(raised.value.__cause__, case.raises) and "\n" not in str(raised.value)


REMAKES = {
    "turned": lambda m, x: m.inner(x.t_().t()), "resized": lambda m, x: m.inner(x.resize_(2, 8)),
    "given a dim": lambda m, x: m.inner(x.unsqueeze_(0)), "given other memory": lambda m, x: m.inner(x.set_(x + 1)),
    "asked for gradients": lambda m, x: m.inner(x.requires_grad_()).detach(),
}  # fmt: skip


@pytest.mark.parametrize("forward", REMAKES.values(), ids=REMAKES)
def test_a_model_that_makes_something_else_of_its_input_is_left_alone_and_so_is_the_input(forward: Any) -> None:
    """The search called it twice with what it was given, and the second call was given something else."""
    model, x = Lambda(forward), torch.randn(4, 8)
    kept, stride = x.clone(), x.stride()
    fast = rl.optimize(model, (x,), budget_s=2, use_cache=False)
    assert fast.receipt.winner == "eager" and any("of an input in place" in note for note in fast.receipt.notes)
    assert torch.equal(x, kept) and x.stride() == stride and not x.requires_grad
    ours, theirs = kept.clone(), kept.clone()
    torch.testing.assert_close(fast(ours), model(theirs))
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and torch.equal(ours, theirs)
