"""Short calls on a device: past the guards they give what the model gives, and searches of them measure every rival."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.nn.functional as F
from torch import nn

import ridgeline
from ridgeline.engine.replay.compiled import shortcut
from ridgeline.optimizer.backend import compiled


class Chained(nn.Module):
    """A product and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(512, 512)

    def forward(self, x: Any) -> Any:
        return F.gelu(F.mish(self.fc(x)) * 2.0)


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_past_the_guards_results_are_the_same_and_weights_are_read_anew(compiler: str) -> None:
    model = Chained().cuda()
    x = torch.randn(256, 512, device="cuda")
    fast = shortcut(compiled(model, rewrites=(), compiler=compiler), (x,), {}, model)
    with torch.no_grad():
        for scale in (1.0, 3.0):
            model.fc.weight.mul_(scale)
            as_right(fast(scale * x), model, scale * x)
        model.fc.weight.data = model.fc.weight.data.clone() * 2
        as_right(fast(x), model, x)
    assert len(fast.misses) == 1


def as_right(found: Any, model: nn.Module, x: Any) -> None:
    """Twice as far from float64 as the model itself, and one rounding."""
    meant = copy.deepcopy(model).double()(x.double())
    apart = [(each.double() - meant).norm() / meant.norm() for each in (found, model(x))]
    assert apart[0] <= 2 * apart[1] + 1e-7


def test_a_search_of_a_short_call_has_every_rival_in_its_receipt() -> None:
    model = Chained().cuda()
    x = torch.randn(256, 512, device="cuda")
    fast = ridgeline.optimize(model, (x,), budget_s=40, use_cache=False)
    tried = {entry.name: entry for entry in fast.receipt.entries}
    assert {"eager", "torch.compile", "compiled"} <= {name for name, entry in tried.items() if entry.measured_s}
    assert fast.receipt.over_best > 0.98
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
