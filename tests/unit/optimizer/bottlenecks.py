"""A block of convolutions with batch norms that have seen something, which tests of rewrites share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Bottleneck(nn.Module):
    """As in ResNet: reduced, seen, widened, added, each with its norm."""

    def __init__(self, channels: int, inner: int, act: nn.Module) -> None:
        super().__init__()
        self.reduce, self.see = nn.Conv2d(channels, inner, 1, bias=False), nn.Conv2d(inner, inner, 3, padding=1)
        self.widen, self.act = nn.Conv2d(inner, channels, 1), act
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, channels))

    def forward(self, x: Any) -> Any:
        y = self.act(self.norms[0](self.reduce(x)))
        y = self.act(self.norms[1](self.see(y)))
        y = self.norms[2](self.widen(y))
        y += x
        return self.act(y)


def settled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            module.weight.data.normal_()
            module.bias.data.normal_()
    return model.eval().bfloat16().to(memory_format=torch.channels_last)
