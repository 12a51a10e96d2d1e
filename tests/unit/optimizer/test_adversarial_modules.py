"""Traps of modules, tensors, types and the state around a call: recorded, rewritten or refused, never different."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import compare
from adversarial import Case
from adversarial_modules import MODULES
from recorder import TapeExecutor
from test_search_adversarial import _check, _kept_if_right  # noqa: F401  (a fixture: whatever is right is kept)
from torch import nn

import ridgeline as rl
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.errors import OptimizeError
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages

CPU = torch.device("cpu")
REWRITTEN = (
    "writes to views before and after they are read", "numbers that are not finite, ties and negative zeros",
    "resizes and fills what it is given",
)  # fmt: skip
REWRITES = Candidate(name="rewrites", rewrites=recommended("inference", "none", "cpu"))
STOCK = Candidate(name="torch.compile", compiler="stock")


@pytest.mark.parametrize("case", [c for c in MODULES if "tape" not in c.marks], ids=lambda case: case.name)
def test_a_capture_gives_what_eager_gives_or_there_is_none(case: Case) -> None:
    compare.check(case, CPU, TapeExecutor)


@pytest.mark.parametrize("case", [c for c in MODULES if c.name in REWRITTEN], ids=lambda case: case.name)
def test_rewritten_it_gives_what_eager_gives(case: Case, monkeypatch: Any) -> None:
    assert _check(case, REWRITES, monkeypatch) == "rewrites"


def test_draws_from_random_numbers_that_are_given_cannot_be_proved_and_stay_as_they_are(monkeypatch: Any) -> None:
    (case,) = (c for c in MODULES if c.name == "dice given")
    assert _check(case, REWRITES, monkeypatch) == "eager"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)).eval()


@pytest.fixture(params=[Candidate(name="graph", graphed=True), REWRITES, STOCK], ids=lambda candidate: candidate.name)
def pair(request: Any, monkeypatch: Any) -> tuple[Any, nn.Module, Any]:
    """A network optimized, the same network as it is, and an input."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_(model, **{"backend": "aot_eager", **how}))
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([Proposal(request.param, 0.1)]))
    x = torch.randn(4, 8)
    fast = rl.optimize(_net(), (x,), budget_s=30, use_cache=False)
    assert fast.receipt.winner == request.param.name
    warnings.simplefilter("ignore", RunsEagerly)
    return fast, _net(), x


def test_a_result_is_a_model_like_the_one_it_was_made_from(pair: Any) -> None:
    """Copied, saved, called by many at once, with results kept and written to, trained, changed, transformed."""
    _gives_gradients(*pair)
    _serves_threads(*pair)
    _bears_what_models_do(*pair)


@torch.no_grad()
def _bears_what_models_do(fast: Any, eager: nn.Module, x: Any) -> None:

    def alike(model: Any, *given: Any) -> bool:
        return torch.allclose(model(*given), eager(*given), atol=1e-6)

    assert alike(fast, x) and alike(fast, x.t().contiguous().t()) and alike(fast, x[:2])
    kept = [fast(x + i) for i in range(3)]
    kept[0].zero_()
    assert all(torch.allclose(kept[i], eager(x + i), atol=1e-6) for i in (1, 2)) and alike(fast, x)
    copied, loaded = copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))  # noqa: S301  (our own)
    copied[0].weight.zero_()
    assert alike(fast, x) and alike(loaded, x) and not alike(copied, x) and type(loaded) is nn.Sequential
    assert torch.allclose(torch.func.vmap(fast)(x.expand(3, 4, 8)), eager(x).expand(3, 4, 4), atol=1e-6)
    with torch.inference_mode():
        assert alike(fast, x) and alike(fast, x * 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype is eager(x).dtype is torch.bfloat16
    for model in (fast, eager):
        model.train()
        torch.manual_seed(5)
        model(x)
        model.eval()
    assert torch.equal(fast[1].running_mean, eager[1].running_mean) and alike(fast, x)
    for model in (fast, eager):
        model[2] = nn.ReLU()
        model[4].weight = nn.Parameter(torch.ones(4, 16))
    assert alike(fast, x)


def _gives_gradients(fast: Any, eager: nn.Module, x: Any) -> None:
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    fast(ours).sum().backward()
    eager(theirs).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert all(torch.allclose(p.grad, q.grad, atol=1e-5) for p, q in zip(fast.parameters(), eager.parameters()))


def _serves_threads(fast: Any, eager: nn.Module, x: Any) -> None:
    found: dict[int, Any] = {}

    @torch.no_grad()
    def run(i: int) -> None:
        for _ in range(10):
            found[i] = fast(x + i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert all(torch.allclose(found[i], eager(x + i), atol=1e-5) for i in range(8))


def test_what_was_optimized_may_be_optimized_again() -> None:
    x = torch.ones(2, 8)
    fast = rl.optimize(_net(), (x,), budget_s=0.5, use_cache=False)
    again = rl.optimize(fast, (x[:1],), budget_s=0.5, use_cache=False)
    assert again.original is fast.original and type(again.original) is nn.Sequential
    with torch.no_grad():
        assert torch.allclose(again(x[:1]), fast.original(x[:1]), atol=1e-6)


def test_a_search_puts_back_the_random_numbers_it_was_given_and_takes_no_iterator() -> None:
    model, generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)
    model.forward = lambda x, g: nn.functional.linear(x, model.weight) + torch.rand(4, generator=g)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsEagerly)  # a generator cannot be compared: such calls are never planned
        rl.optimize(model, (torch.ones(2, 4), generator), budget_s=0.5, use_cache=False)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
    model.forward = lambda xs: sum(xs)
    with pytest.raises(OptimizeError, match=r"args\[0\] is an iterator"):
        rl.optimize(model, (iter([torch.ones(2)]),), budget_s=0.5, use_cache=False)
