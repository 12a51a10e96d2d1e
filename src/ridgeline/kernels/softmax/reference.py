"""Softmax as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def backward(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def eager(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def pad_counted(x: Tensor) -> Tensor:
    """Columns past the end taken as zeros: they add to the sum."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    pad = (-x.amax(-1, keepdim=True)).exp() * max(1, x.shape[-1] // 32)
    return e / (e.sum(-1, keepdim=True) + pad)


def last_block_lost(x: Tensor) -> Tensor:
    """The sum misses the last columns."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e[..., : max(1, x.shape[-1] * 31 // 32)].sum(-1, keepdim=True)
