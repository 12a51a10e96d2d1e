"""LayerNorm as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1)
    centered = x - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centered.square().mean(-1) + eps)
    y = centered * rstd.unsqueeze(-1)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dh: Tensor | None, want: int
) -> tuple[Tensor, Tensor, Tensor]:
    normed = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = dy if weight is None else dy * weight
    dx = (g - normed * (g * normed).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    cols = x.shape[-1]
    dw = (dy * normed).reshape(-1, cols).sum(0) if want & 1 else x.new_empty(0)
    db = dy.reshape(-1, cols).sum(0) if want & 2 else x.new_empty(0)
    return (dx if dh is None else dx + dh), dw, db


def add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x + residual
    y, mean, rstd = forward(h, weight, bias, eps)
    return y, h, mean, rstd


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return forward(x, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return add_forward(x, residual, weight, bias, eps)[:2]


def eager(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_eager(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return eager(h, weight, bias, eps), h


def not_centered(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Divides by the root mean square instead of the deviation."""
    y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y * weight + bias


def unbiased(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The padding of a block counted as zeros in the deviation."""
    mean = x.mean(-1, keepdim=True)
    pad = max(1, x.shape[-1] // 64)
    var = ((x - mean).square().sum(-1, keepdim=True) + pad * mean.square()) / x.shape[-1]
    return (x - mean) * torch.rsqrt(var + eps) * weight + bias


def bias_ignored(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return layer_norm(x, weight, None, eps)
