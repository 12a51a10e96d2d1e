"""What a benchmark's own harness does with an optimized model: results are eager's, as planned, and nothing is kept."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import ridgeline
from ridgeline.engine.drop_in import RunsEagerly

CLOSE = 2e-3
"""Of the largest value: convolutions are rounded to TensorFloat-32, by eager PyTorch too."""
SOURCE = """
import torch
from torch import nn
import torch.nn.functional as F

class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(1024, 1024), nn.BatchNorm1d(1024)

    def forward(self, x):
        return F.gelu(self.norm(self.layer(x))) * 2.0

class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(8, 32, 3)

    def forward(self, x):
        return F.mish(self.layer(x)).mean((2, 3))

class Function(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)
"""
SIZES = {"Product": (512, 1024), "Convolution": (16, 8, 64, 64), "Function": (512, 4096)}


class Bench:
    """A model that was read and run, another with the same weights, and inputs by seed."""

    def __init__(self, name: str) -> None:
        names: dict[str, Any] = {}
        exec(SOURCE, names)
        torch.manual_seed(0)
        self.model, self.twin, self.size = names[name]().cuda(), names[name]().cuda(), SIZES[name]

    def inputs(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.rand(self.size, device="cuda")

    def agrees(self, fast: Any, seed: int) -> Any:
        x = self.inputs(seed)
        self.twin.load_state_dict(self.model.state_dict())
        meant, found = self.twin(x), fast(x)
        assert (found - meant).abs().max() <= CLOSE * meant.abs().max()
        for own, theirs in zip(self.model.buffers(), self.twin.buffers()):
            torch.testing.assert_close(own, theirs, rtol=CLOSE, atol=CLOSE)
        return found


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Any:
    rounds = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = rounds


@pytest.mark.parametrize("name", SIZES)
def test_a_model_is_used_as_harnesses_use_it(name: str) -> None:
    bench = Bench(name)
    fast = ridgeline.optimize(bench.model, [bench.inputs(1)], budget_s=12, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunsEagerly)
        with torch.no_grad():
            kept = [bench.agrees(fast, seed) for seed in (1, 2, 3)]
            copies = [each.clone() for each in kept]
            bench.agrees(fast, 4)
            assert all(map(torch.equal, kept, copies))
        bench.agrees(fast, 5)  # gradients on
        with torch.inference_mode():
            bench.agrees(fast, 6)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            bench.agrees(fast, 7)
        torch.cuda.current_stream().wait_stream(side)
        torch.backends.cuda.matmul.allow_tf32 = False  # as it is anyway
        changed = {key: value * 1.5 for key, value in bench.model.state_dict().items() if value.is_floating_point()}
        bench.model.load_state_dict(changed, strict=False)
        with torch.no_grad():
            bench.agrees(fast, 8)
            torch._dynamo.reset()
            bench.agrees(fast, 9)
    assert not fast.fallbacks


def test_nothing_is_kept_of_models_that_nobody_holds() -> None:
    """A harness takes one problem after the other, and the device has room for a few of them."""
    bench = Bench("Product")
    fast = ridgeline.optimize(bench.model, (bench.inputs(1),), budget_s=12, use_cache=False)
    with torch.no_grad():
        bench.agrees(fast, 2)
    gone = weakref.ref(bench.model)
    del fast, bench
    gc.collect()
    assert gone() is None
