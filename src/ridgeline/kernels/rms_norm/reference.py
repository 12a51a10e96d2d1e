"""RMSNorm as it is meant, in the precision of its inputs; PyTorch's own form of it; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    y = x * rstd.unsqueeze(-1)
    return (y if weight is None else y * (weight + offset)), rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dh: Tensor | None, offset: float, want_dw: bool
) -> tuple[Tensor, Tensor]:
    normed = x * rstd.unsqueeze(-1)
    g = dy if weight is None else dy * (weight + offset)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    dw = (dy * normed).reshape(-1, x.shape[-1]).sum(0) if want_dw else x.new_empty(0)
    return (dx if dh is None else dx + dh), dw


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    h = x + residual
    return forward(h, weight, eps, offset)[0], h, torch.rsqrt(h.square().mean(-1) + eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return forward(x, weight, eps, offset)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return add_forward(x, residual, weight, eps, 0.0)[:2]


def eager(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_eager(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    h = x + residual
    return eager(h, weight, eps), h


def padded_mean(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divides by one column too many."""
    cols = x.shape[-1]
    y = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / (cols + max(1, cols // 64)) + eps)
    return y if weight is None else y * weight


def last_column_lost(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Never writes the last element of a row."""
    y = rms_norm(x, weight, eps).clone()
    y[..., -1] = 0
    return y


def weight_ignored(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, None, eps)


def residual_ignored(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return rms_norm(x, weight, eps), x + residual
