"""GroupNorm with channels last as it is meant, and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool) -> Tensor:
    y = F.group_norm(x, groups, weight, bias, eps)
    return (F.silu(y) if silu else y).contiguous(memory_format=torch.channels_last)


def of_channels(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool) -> Tensor:
    """Every channel by itself."""
    return forward(x, x.shape[1], weight, bias, eps, silu)


def plain(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool) -> Tensor:
    """The activation forgotten, or not."""
    return forward(x, groups, weight, bias, eps, not silu)
