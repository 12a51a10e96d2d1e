"""A remembered winner that was compiled is built by its first call, and given up where it no longer holds."""

from __future__ import annotations

import gc
import time
import warnings
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


class Slow(nn.Module):
    """Sleeps unless it is traced: what is compiled wins beyond doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(4e-3)
        return self.layer(self.layer(x).reshape(4, 8).reshape(4, 8))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    torch._dynamo.reset()


def _first(x: Tensor) -> None:
    fast = rl.optimize(Slow().eval(), (x,), budget_s=6)
    assert fast.receipt.winner in ("rewrites", "torch.compile") and not fast.receipt.cached, fast.receipt
    del fast
    gc.collect()


def _remembered(x: Tensor) -> tuple[Any, nn.Module]:
    model = Slow().eval()
    fast = rl.optimize(model, (x,), budget_s=6)
    assert fast.receipt.cached and isinstance(fast.plans[0].call, Later)
    return fast, model


def test_remembering_builds_nothing_and_the_first_call_does() -> None:
    x = torch.randn(4, 8)
    _first(x)
    fast, model = _remembered(x)
    assert any("built and looked over when it is first called" in note for note in fast.receipt.notes)
    with torch.no_grad():
        found = fast(x)
        assert not isinstance(fast.plans[0].call, Later), "calls go straight to what was built"
        torch.testing.assert_close(found, model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fast(x), found)


def test_a_winner_that_no_longer_agrees_is_given_up_with_a_word(monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    _first(x)
    fast, model = _remembered(x)
    monkeypatch.setattr(request, "_agrees", lambda *given: False)
    with torch.no_grad(), pytest.warns(RunsEagerly, match="no longer agrees"):
        found = fast(x)
    with torch.no_grad():
        assert torch.equal(found, model(x)) and torch.equal(fast(x), found)
    assert not list(cache.folder().glob("*.json")), "the search is forgotten"


def test_a_winner_that_cannot_be_built_is_given_up_with_the_reason(monkeypatch: Any) -> None:
    x = torch.randn(4, 8)
    _first(x)
    fast, model = _remembered(x)

    def fails(*given: Any, **more: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(request, "build", fails)
    with torch.no_grad(), pytest.warns(RunsEagerly, match="no compiler here"):
        assert torch.equal(fast(x), model(x))


def test_importing_the_optimizer_does_not_import_the_tracer() -> None:
    import subprocess
    import sys

    code = "import sys, ridgeline.optimizer.request; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
