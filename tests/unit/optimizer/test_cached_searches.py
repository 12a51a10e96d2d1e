"""Cached searches: a winner that was compiled is built by its first call, and given up where it no longer holds."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

import ridgeline as rl
from ridgeline.engine.deferred import Later
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.optimizer import memo as cache
from ridgeline.optimizer import request
from ridgeline.optimizer.receipt import SKIPPED, Entry
from ridgeline.optimizer.search import search as searching
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.timing import Timed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).reshape(4, 8).reshape(4, 8))


@pytest.fixture(autouse=True)
def eager_takes(tmp_path: Path, monkeypatch: Any) -> Callable[[float], None]:
    """Rewritten the model takes a millisecond, as it is four, or what is said instead."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = [4e-3]
    proposal = Proposal(Candidate(name="rewrites", rewrites=("identity", "views")), 0.1)
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([proposal]))
    monkeypatch.setattr(searching.Track, "race", lambda self, runners, *given, **limits: {
        name: Timed((eager[0] if name == "eager" else 1e-3,) * 12) for name in runners})

    def takes(seconds: float) -> None:
        eager[0] = seconds

    return takes


def _optimized(x: Tensor) -> tuple[Any, nn.Module]:
    gc.collect()
    model = Net().eval()
    return rl.optimize(model, (x,), budget_s=60), model


def _cached(x: Tensor) -> tuple[Any, nn.Module]:
    first = _optimized(x)[0]
    assert first.receipt.winner == "rewrites" and not first.receipt.cached, str(first.receipt)
    del first
    fast, model = _optimized(x)
    assert fast.receipt.cached and isinstance(fast.plans[0].call, Later)
    return fast, model


def test_a_cached_receipt_says_when_it_was_made_and_the_first_call_builds_it() -> None:
    x = torch.randn(4, 8)
    fast, model = _cached(x)
    assert f"cached: searched on {fast.receipt.searched_at}, not now" in str(fast.receipt)
    assert fast.receipt.searched_at.endswith("UTC") and fast.receipt.to_dict()["cached"] is True
    assert any("built and checked at its first call" in note for note in fast.receipt.notes)
    with torch.no_grad():
        found = fast(x)
        assert not isinstance(fast.plans[0].call, Later), "calls go straight to what was built"
        torch.testing.assert_close(found, model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fast(x), found)


def test_a_winner_that_no_longer_agrees_is_given_up_with_a_word(monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    fast, model = _cached(x)
    monkeypatch.setattr(request, "_agrees", lambda *given: False)
    with torch.no_grad(), pytest.warns(RunsEagerly, match="no longer agrees"):
        found = fast(x)
    with torch.no_grad():
        assert torch.equal(found, model(x)) and torch.equal(fast(x), found)
    assert not list(cache.folder().glob("*.json")), "the search is forgotten"


def test_a_winner_that_cannot_be_built_is_given_up_with_the_reason(monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    fast, model = _cached(x)

    def fails(*given: Any, **more: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(request, "build", fails)
    with torch.no_grad(), pytest.warns(RunsEagerly, match="no compiler here"):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize(("seconds", "cached"), [(3e-3, True), (7e-3, True), (9e-3, False), (1.5e-3, False)])
def test_a_search_is_dropped_where_eager_takes_another_time_now(
    seconds: float, cached: bool, eager_takes: Callable[[float], None]
) -> None:
    x = torch.randn(4, 8)
    _cached(x)
    eager_takes(seconds)
    again = _optimized(x)[0].receipt
    assert again.cached is cached
    assert any("was dropped: eager takes" in note for note in again.notes) is not cached


@pytest.mark.parametrize(("price_s", "kept"), [(20.0, False), (None, False), (300.0, True)])
def test_a_search_that_ran_out_of_time_is_not_cached(price_s: float | None, kept: bool, monkeypatch: Any) -> None:
    """What takes longer than the whole budget is skipped by every search of it; all else another search may try."""
    made = request.search

    def hurried(problem: Any) -> Any:
        outcome = made(problem)
        skipped = Entry(name="torch.compile + graph", changes=(), status=SKIPPED, price_s=price_s)
        return replace(outcome, receipt=replace(outcome.receipt, entries=(*outcome.receipt.entries, skipped)))

    monkeypatch.setattr(request, "search", hurried)
    x = torch.randn(4, 8)
    _, model = _optimized(x)
    assert bool(list(cache.folder().glob("*.json"))) is kept
    assert rl.optimize(model, (x,), budget_s=60).receipt.cached is kept


def test_importing_the_optimizer_does_not_import_the_tracer() -> None:
    import subprocess
    import sys

    code = "import sys, ridgeline.optimizer.request; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=True)
    assert done.stdout.strip() == "False"
