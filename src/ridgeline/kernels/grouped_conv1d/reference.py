"""A convolution along a sequence as it is meant, and kernels that would be wrong."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    return F.conv1d(x, w, bias, padding=padding, groups=groups).transpose(1, 2).contiguous().transpose(1, 2)


def turned(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    """The taps in the other order."""
    return forward(x, w.flip(2), bias, padding, groups)


def biasless(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    """The bias lost."""
    return forward(x, w, None, padding, groups)
