"""Models and loops whose behavior hangs on something far away, recorded as CUDA graphs: as eager, or refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "optimizer"))

import adversarial_backward
import adversarial_distant_state
import adversarial_queries
import compare
from adversarial import Case

from ridgeline.engine.capture.cuda_graph import CudaExecutor

CASES = (*adversarial_distant_state.CASES, *adversarial_queries.QUERY_CASES)
HELD = [case for case in CASES if "host" not in case.marks and case.state]
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")]


def _executor() -> CudaExecutor:
    return CudaExecutor(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adversarial_distant_state, "FILE", tmp_path / "scale")
    monkeypatch.setattr(adversarial_queries, "FLAG", tmp_path / "flag")
    adversarial_distant_state.reset()
    adversarial_queries.reset()
    adversarial_backward.reset()
    yield
    adversarial_distant_state.reset()
    adversarial_queries.reset()
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", HELD, ids=[case.name for case in HELD])
def test_a_hazard_gives_what_it_gives_eagerly(case: Case) -> None:
    """Recorded or not: what may be recorded here is another matter than on the host."""
    device = torch.device("cuda", 0)
    eager, model = compare.build(case, device), compare.build(case, device)
    before = compare.snapshot(model)
    fast, _, graphed = compare.optimize(case, model, device, _executor())
    assert compare.alike(compare.snapshot(model), before, exact=True), "recording left a trace"
    with torch.no_grad():
        kept = [compare._call(case, eager, fast, device, call) for call in range(1, compare.NUM_CALLS + 1)]
    assert all(compare.alike(ours, theirs, exact=exact) for ours, theirs, exact in kept)
    assert graphed is None or not case.refused, "was recorded, though it must not be"


@pytest.mark.parametrize("case", adversarial_backward.BACKWARD_CASES, ids=lambda case: case.name)
def test_a_backward_case_leaves_what_it_leaves_eagerly(case: adversarial_backward.Trial) -> None:
    where = SimpleNamespace(device=torch.device("cuda", 0), executor=_executor, exact=False)
    what, said = adversarial_backward.outcome(case, where)
    assert what == "refused" or not case.refused, f"{what}: {said}"
