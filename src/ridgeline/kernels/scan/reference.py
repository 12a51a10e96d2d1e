"""Scans as they are meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    y = x if keep is None else x * keep
    y = y.flip(dim) if reverse else y
    first = y.narrow(dim, 0, 1)
    if exclusive:
        empty = torch.ones_like(first) if product else torch.zeros_like(first)
        y = torch.cat([empty, y.narrow(dim, 0, y.shape[dim] - 1)], dim)
    y = y.cumprod(dim) if product else y.cumsum(dim)
    return y.flip(dim) if reverse else y


eager = forward


def backwards(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    """From the wrong end."""
    return forward(x, keep, dim, product, not reverse, exclusive)


def late(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    """One element behind, or ahead."""
    return forward(x, keep, dim, product, reverse, not exclusive)
