"""The norm of a list as it is meant; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


def clipped(tensors: Sequence[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """(norm, tensors scaled so that their norm is at most max_norm)."""
    total = norm(tensors)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    return total, [(t if t.dtype == torch.float64 else t.float()).mul(factor).to(t.dtype) for t in tensors]


def eager(tensors: Sequence[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """``clip_grad_norm_`` over parameters that have these gradients."""
    params = []
    for t in tensors:
        p = torch.nn.Parameter(torch.empty_like(t))
        p.grad = t.clone()
        params.append(p)
    total = torch.nn.utils.clip_grad_norm_(params, max_norm)
    return total, [p.grad for p in params if p.grad is not None]


def one_lost(tensors: Sequence[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """The last tensor does not count."""
    total = norm(tensors[:-1])
    return total, [t * (max_norm / (total + 1e-6)).clamp(max=1.0) for t in tensors]


def tail_unscaled(tensors: Sequence[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """The last element of each tensor is forgotten."""
    total, found = clipped(tensors, max_norm)
    for t, kept in zip(found, tensors, strict=True):
        t.view(-1)[-1:] = kept.view(-1)[-1:]
    return total, found
