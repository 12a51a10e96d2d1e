"""Small models and engines that the tests of engine files share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.engine.file.engine import Engine


class Attention(nn.Module):
    """A small encoder layer with a residual, attention and a gated product."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.gate, self.down = nn.Linear(dim, 64), nn.Linear(dim, 64), nn.Linear(64, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))
        return {"hidden": x + self.down(nn.functional.silu(self.gate(x)) * self.up(x)), "pooled": x.mean(1)}


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10)).eval()


def convolutional(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3),
                          nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(16, 10))  # fmt: skip
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def attention(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Attention().eval()


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files this machine made is remembered in the test's own folder."""
    monkeypatch.setenv("RIDGELINE_ENGINES", str(tmp_path / "engines"))


@pytest.fixture
def engine() -> Engine:
    return rl.build(perceptron(), (torch.randn(4, 16),), shapes={"batch": (1, 8)}, level=0, name="perceptron")


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    return engine.save(tmp_path / "m.ridge")
