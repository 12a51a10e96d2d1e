"""Memory, state, types and changes between calls, recorded in inference and in training: as eager, or a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import compare
from adversarial_callers import CallerCase
from adversarial_memory import MEMORY, STEPS, summed
from recorder import TapeExecutor
from test_adversarial_callers import _compare, _model, _played, _recorded

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay import inference as graphed
from ridgeline.engine.replay import training
from ridgeline.engine.replay.training import graph_training
from ridgeline.errors import NotGraphable

pytestmark = pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """No garbage is collected before every recording, which no tape minds: that is most of the time."""
    for module in (graphed, training):
        monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_captured_calls_are_eagers(case: CallerCase) -> None:
    wanted = _played(case, _model(case))
    model = _model(case)
    before = compare.snapshot(model)
    fast, recording, reason = _recorded(case, model)
    assert compare.alike(compare.snapshot(model), before, exact=True), "recording left a trace"
    _compare(_played(case, fast), wanted, exact=True)
    assert recording.replays or fast.fallbacks if recording is not None else reason


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_captured_steps_are_eagers(case: CallerCase) -> None:
    wanted = _played(case, _model(case))
    model, (args, kwargs) = _model(case), case.inputs()
    before = compare.snapshot(model)
    try:
        recording: Any = graph_training(model, args, kwargs, model, loss=summed, executor=TapeExecutor())
        plans, reason = [Plan(recording.signature, recording)], ""
    except NotGraphable as error:
        recording, plans, reason = None, [], str(error)
    assert compare.alike(compare.snapshot(model), before, exact=True), "recording left a trace"
    _compare(_played(case, Optimized(model, plans, mode="train")), wanted, exact=True)
    assert recording.replays if recording is not None else reason


def test_most_of_them_are_captured_and_none_is_there_twice() -> None:
    for cases in (MEMORY, STEPS):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names) >= 80
