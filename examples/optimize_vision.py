"""A convolutional network: ``python examples/optimize_vision.py``. Channels last, folded norms and a graph do it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import ridgeline as rl


class Residual(nn.Module):
    """Two convolutions with norms around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(inner)))


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    cuda = torch.cuda.is_available()
    width, depth, batch, size = (256, 12, 64, 56) if cuda else (16, 2, 2, 14)
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.device("cuda" if cuda else "cpu"):
        blocks = [Residual(width) for _ in range(depth)]
        model = nn.Sequential(
            nn.Conv2d(3, width, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )
        return model.to(dtype).eval(), (torch.randn(batch, 3, size, size, dtype=dtype),), {}


def main(budget_s: float = 120.0) -> None:
    model, args, kwargs = make()
    fast = rl.optimize(model, args, kwargs, budget_s=budget_s)
    print(fast.receipt)
    print("another batch size runs as the model itself:", fast(args[0][:1]).shape)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
