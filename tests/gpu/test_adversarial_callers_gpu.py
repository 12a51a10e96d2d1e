"""What a caller may do with a recorded model and around it, recorded as CUDA graphs: as eager does, or as the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "optimizer"))

import adversarial_callers
import test_adversarial_callers
from adversarial_arguments import ARGUMENTS
from adversarial_callers import CallerCase, of, x
from adversarial_hidden_state import HIDDEN_STATE

from ridgeline.engine.capture.cuda_graph import CudaExecutor
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.errors import NotGraphable

DEVICE = torch.device("cuda", 0)
CHOSEN = (
    "a dictionary put in another order", "an ordered dictionary, moved to its end", "layers in another order",
    "named layers in another order", "parameters in another order", "a view of a dictionary",
    "an attribute that is negative zero later", "a global that is negative zero later", "a view of bytes",
    "an array of C's", "a number shared with other processes", "an event that is set", "a cycle",
    "an object with another dictionary", "an object of another class later",
    "an object in a context variable, another later", "a list of the thread's", "a descriptor that changes",
    "a global function's own variable", "a static method's own variable", "a function by type, another later",
    "an object that is a default", "a built-in name taken later", "words of the command line",
    "which thread it runs in", "a flag of a backend", "complex zeros of either sign", "sets in another order",
    "words of a class of their own", "rows before an input, by strides", "what lies between an input's elements",
    "an input marked", "tensors as keys", "many results kept and written to", "views of results kept",
    "results fed back", "results that share memory, one written to",
)  # fmt: skip
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")]


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adversarial_callers, "DEVICE", DEVICE)
    yield
    torch.cuda.synchronize()


def _recorded(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            recording = graph_inference(model, args, kwargs, model, executor=CudaExecutor(DEVICE))
    except NotGraphable:
        return Optimized(model)
    return Optimized(model, [Plan(recording.signature, recording)])


CHOSEN_CASES = [case for case in (*HIDDEN_STATE, *ARGUMENTS) if case.name in CHOSEN]


@pytest.mark.parametrize("case", CHOSEN_CASES, ids=lambda case: case.name)
def test_a_recording_is_not_caught_out(case: CallerCase) -> None:
    try:
        wanted = test_adversarial_callers._played(case, test_adversarial_callers._model(case).to(DEVICE))
        model = test_adversarial_callers._model(case).to(DEVICE)
        args, kwargs = case.inputs()
        found = test_adversarial_callers._played(case, _recorded(model, args, kwargs))
        test_adversarial_callers._compare(found, wanted, exact=False)
    finally:
        case.reset()


def test_memory_that_somebody_keeps_of_a_result_is_not_written_to() -> None:
    model = of(lambda m, y: m.inner(y))().to(DEVICE)
    fast = _recorded(model, (x(),), {})
    with torch.no_grad():
        wanted = [model(x(i)) for i in range(6)]
        kept = []
        for i in range(6):
            result = fast(x(i))
            kept.append((result.untyped_storage(), result.storage_offset()))
            del result
        fast(x(9))
        found = [torch.empty(0, device=DEVICE).set_(memory, start, (4, 8), (8, 1)) for memory, start in kept]
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs)
