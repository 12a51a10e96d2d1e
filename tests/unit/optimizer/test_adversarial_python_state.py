"""State around calls, in functions and in odd inputs: recorded, rewritten or refused, never different."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import adversarial_python_state
import compare
from adversarial import Case
from adversarial_python_state import PYTHON_STATE
from recorder import TapeExecutor
from test_search_adversarial import _check, _kept_if_right  # noqa: F401  (a fixture: whatever is right is kept)
from torch import nn
from torch.autograd import forward_ad

import ridgeline as rl
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages

CPU = torch.device("cpu")
REWRITES = Candidate(name="rewrites", rewrites=recommended("inference", "none", "cpu"))
GRAPH = Candidate(name="graph", graphed=True)
REWRITTEN = (
    "a context variable", "counts in a default of its forward", "switches a part to training and back",
    "sets a gradient", "writes to a weight, a buffer lies in it", "an embedding that caps its own weight",
    "equal values of other types", "pieces of nothing",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: Any) -> Any:
    monkeypatch.setenv(adversarial_python_state.VARIABLE, "1")
    adversarial_python_state.SCALE.set(1.0)
    adversarial_python_state.LOCAL.scale = 1.0
    adversarial_python_state._logged.__defaults__[0].clear()
    warnings.simplefilter("ignore", UserWarning)
    yield
    adversarial_python_state._global_hook(None, 0)


@pytest.mark.parametrize("case", PYTHON_STATE, ids=lambda case: case.name)
def test_a_capture_gives_what_eager_gives_or_there_is_none(case: Case) -> None:
    if "default of" in case.name:  # eager's own calls would count too: it is enough that it is not recorded
        _, reason, recorded = compare.optimize(case, compare.build(case, CPU), CPU, TapeExecutor())
        assert recorded is None and case.refused in reason
    else:
        compare.check(case, CPU, TapeExecutor)


@pytest.mark.parametrize("case", [c for c in PYTHON_STATE if c.name in REWRITTEN], ids=lambda case: case.name)
def test_rewritten_it_gives_what_eager_gives(case: Case, monkeypatch: Any) -> None:
    if case.name == "counts in a default of its forward":
        model = compare.build(case, CPU)
        monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(REWRITES, 0.1)]))
        x = torch.randn(4, 8)
        with torch.no_grad():
            rl.optimize(model, (x,), budget_s=30, use_cache=False)
            assert torch.allclose(model(x), model.inner(x)) and torch.allclose(model(x), 2 * model.inner(x))
    else:
        assert _check(case, REWRITES, monkeypatch) == "rewrites"


def _optimized(model: nn.Module, x: Any, candidate: Candidate, monkeypatch: Any) -> Any:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_(model, **{"backend": "aot_eager", **how}))
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(candidate, 0.1)]))
    warnings.simplefilter("ignore", RunsEagerly)
    with torch.no_grad():
        return rl.optimize(model, (x,), budget_s=30, use_cache=False)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval().requires_grad_(False)


@pytest.mark.parametrize("candidate", [GRAPH, Candidate(name="torch.compile", compiler="stock")], ids=lambda c: c.name)
def test_what_looks_into_a_call_sees_the_model(candidate: Candidate, monkeypatch: Any) -> None:
    """Tangents are carried through, traces and graphs hold what the model computes, results may be fed back."""
    eager, x, tangent = _net(), torch.randn(4, 8), torch.randn(4, 8)
    fast = _optimized(_net(), x, candidate, monkeypatch)
    assert fast.receipt.winner == candidate.name
    with torch.no_grad(), forward_ad.dual_level():
        ours, theirs = (forward_ad.unpack_dual(m(forward_ad.make_dual(x, tangent))) for m in (fast, eager))
        assert torch.allclose(ours.tangent, theirs.tangent, atol=1e-6)
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        traced = torch.jit.trace(fast, (x,), check_trace=False), make_fx(lambda y: fast(y))(x)
        assert all(torch.allclose(call(x + 1), eager(x + 1), atol=1e-6) for call in traced)
        fed, meant = x, x
        for _ in range(3):
            fed, meant = fast(fed), eager(meant)
        assert torch.allclose(fed, meant, atol=1e-6)


class Doubling(nn.Module):
    """Doubles what it is given, in place, and multiplies it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        x.mul_(2)
        return self.inner(x)


def test_an_input_that_is_the_models_own_memory_is_not_copied_apart_from_it(monkeypatch: Any) -> None:
    eager, model = Doubling(), Doubling()
    fast = _optimized(model, torch.randn(8, 8), GRAPH, monkeypatch)
    assert fast.receipt.winner == "graph"
    with torch.no_grad():
        assert torch.equal(fast(model.inner.weight.data), eager(eager.inner.weight.data))
    assert torch.equal(model.inner.weight, eager.inner.weight)
    assert any("model's own memory" in reason for reason in fast.fallbacks)


def test_a_large_input_that_is_negated_lazily_is_not_read_where_it_lies(monkeypatch: Any) -> None:
    values = torch.randn(512, 512, dtype=torch.complex64)
    fast = _optimized(nn.ReLU(), values.imag, GRAPH, monkeypatch)
    for given in (values.imag, values.conj().imag, values.imag):
        assert torch.equal(fast(given), given.relu())


class Rounding(nn.Module):
    """What is left of numbers after a much larger one was added and taken away again: mostly rounding."""

    def forward(self, x: Any) -> Any:
        return (1e5 + x) - 1e5


def test_what_hangs_on_its_rounding_is_not_computed_in_another_order() -> None:
    from ridgeline.engine.example_inputs import Inputs, State
    from ridgeline.optimizer.search.judge import Prover, Subject

    model, x = Rounding(), 0.05 * torch.randn(64, 256)
    subject = Subject(model, Inputs((x,), {}), "infer", lambda output: output, State(model))
    prover = Prover(subject)
    assert prover.judge(model)

    def otherwise(x: Any) -> Any:
        return ((4e4 + x) + 6e4) - 1e5

    verdict = prover.judge(otherwise)
    assert not verdict and "amplifies rounding" in verdict.reason


@pytest.mark.parametrize("off", [5e-6, 5e-5])
def test_pytorchs_own_compiler_may_be_a_hundred_thousandth_off_and_ours_may_not(off: float) -> None:
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.backend import Report
    from ridgeline.optimizer.search.candidate import Built
    from ridgeline.optimizer.search.problem import Problem
    from ridgeline.optimizer.search.search import Search

    model = _net()
    search = Search(Problem(model=model, inputs=Inputs((torch.randn(64, 8),), {}), mode="infer", device=CPU))
    search.random, search.eager_s = False, 1e-3

    def nearly(x: Any) -> Any:
        return model(x) * (1 + off)

    stock = Built(Candidate(name="torch.compile", compiler="stock"), nearly, Report())
    assert bool(search.prove(stock)) is (off < 1e-5)
    assert not search.prove(Built(Candidate(name="rewrites"), nearly, Report()))
