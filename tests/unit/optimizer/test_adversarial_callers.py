"""What a caller may do with an optimized model and around it: as eager does, or as the model itself with a reason."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import compare
import numpy as np
from adversarial_arguments import ARGUMENTS
from adversarial_callers import CallerCase
from adversarial_changes import CHANGES_BETWEEN_CALLS
from adversarial_hidden_state import HIDDEN_STATE
from recorder import TapeExecutor
from test_search_adversarial import _kept_if_right  # noqa: F401  (a fixture: whatever is right is kept)
from torch import nn

import ridgeline as rl
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay import inference as graphed
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages

STRAIGHT = Candidate(name="straight", rewrites=recommended("inference", "none", "cpu"), straight=True)
TRACED = (
    "a dictionary put in another order", "layers in another order", "a view of a dictionary",
    "an attribute that is negative zero later", "an event that is set", "an object with another dictionary",
    "a global function's own variable", "complex zeros of either sign", "a weight laid out otherwise",
    "hooks of all kinds, that come and go", "an error in the middle, and calls after it",
)  # fmt: skip


def _seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    np.random.seed(value)


def _model(case: CallerCase) -> Any:
    case.reset()
    case.inputs()
    _seed(7)
    return case.model().train(case.train)


def _around(case: CallerCase) -> Any:
    return contextlib.nullcontext() if case.grad else torch.no_grad()


def _played(case: CallerCase, call: Any) -> list[Any]:
    """What a script sees, errors and random numbers after it included."""
    _seed(11)
    seen: list[Any] = []
    with _around(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seen += case.script(call)
        except Exception as error:
            seen.append((type(error), str(error)))
    return [*seen, random.random(), torch.rand(2), np.random.rand()]


def _recorded(case: CallerCase, model: Any) -> tuple[Any, Graphed | None, str]:
    args, kwargs = case.inputs()
    try:
        with _around(case), case.around():
            recording = graph_inference(model, args, kwargs, model, executor=TapeExecutor())
    except NotGraphable as error:
        return Optimized(model), None, str(error)
    return Optimized(model, [Plan(recording.signature, recording)]), recording, ""


def _compare(found: list[Any], wanted: list[Any], *, exact: bool) -> None:
    assert len(found) == len(wanted), f"{found[-4:]} instead of {wanted[-4:]}"
    for number, (ours, theirs) in enumerate(zip(found, wanted)):
        assert compare.alike(ours, theirs, exact=exact), f"number {number} differs: {ours} instead of {theirs}"
        assert compare.aliases(ours) == compare.aliases(theirs), f"number {number} shares other memory"


@pytest.fixture(autouse=True)
def _as_before(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No garbage is collected before every recording, which no tape minds: that is four fifths of the time."""
    monkeypatch.setattr(graphed, "gc", SimpleNamespace(collect=lambda: 0))
    yield
    for case in [held for held in request.node.callspec.params.values() if isinstance(held, CallerCase)]:
        case.reset()


@pytest.mark.parametrize("case", [*HIDDEN_STATE, *ARGUMENTS, *CHANGES_BETWEEN_CALLS], ids=lambda case: case.name)
def test_a_capture_is_not_caught_out(case: CallerCase) -> None:
    wanted = _played(case, _model(case))
    model = _model(case)
    before = compare.snapshot(model) if case.snap else {}
    fast, recording, reason = _recorded(case, model)
    assert compare.alike(compare.snapshot(model) if case.snap else {}, before, exact=True), "recording left a trace"
    _compare(_played(case, fast), wanted, exact=True)
    assert recording.replays or fast.fallbacks if recording is not None else reason


TRACED_CASES = [each for each in (*HIDDEN_STATE, *ARGUMENTS, *CHANGES_BETWEEN_CALLS) if each.name in TRACED]


@pytest.mark.parametrize("case", TRACED_CASES, ids=lambda case: case.name)
def test_compiled_code_without_its_guards_is_not_caught_out(case: CallerCase, monkeypatch: Any) -> None:
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(STRAIGHT, 0.1)]))
    wanted = _played(case, _model(case))
    model, (args, kwargs) = _model(case), case.inputs()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        fast = rl.optimize(model, args, kwargs, budget_s=30, use_cache=False)
    assert fast.receipt.winner in ("straight", "eager")
    _compare(_played(case, fast), wanted, exact=False)


@pytest.mark.parametrize("case", [HIDDEN_STATE[0]], ids=["all"])
def test_every_case_has_a_name_of_its_own(case: CallerCase) -> None:
    names = [case.name for case in (*HIDDEN_STATE, *ARGUMENTS, *CHANGES_BETWEEN_CALLS)]
    assert len(set(names)) == len(names) >= 200
    assert isinstance(case.model(), nn.Module)
