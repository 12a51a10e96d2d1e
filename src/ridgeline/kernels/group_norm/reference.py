"""GroupNorm as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _channels(x: Tensor, values: Tensor) -> Tensor:
    """A value a channel, shaped to multiply ``x``."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _normed(x: Tensor, groups: int, mean: Tensor, rstd: Tensor) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    return ((grouped - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)


def forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.reshape(x.shape[0], groups, -1)
    mean = grouped.mean(-1)
    rstd = torch.rsqrt((grouped - mean.unsqueeze(-1)).square().mean(-1) + eps)
    y = _normed(x, groups, mean, rstd)
    y = y if weight is None else y * _channels(x, weight)
    y = y if bias is None else y + _channels(x, bias)
    return (F.silu(y) if silu else y), mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    normed = _normed(x, groups, mean, rstd)
    if silu:
        z = normed if weight is None else normed * _channels(x, weight)
        z = z if bias is None else z + _channels(x, bias)
        s = torch.sigmoid(z)
        dy = dy * s * (1 + z * (1 - s))
    rest = [0, *range(2, x.dim())]
    dw, db = (dy * normed).sum(rest), dy.sum(rest)
    g = (dy if weight is None else dy * _channels(x, weight)).reshape(x.shape[0], groups, -1)
    n = normed.reshape(g.shape)
    dx = (g - n * (g * n).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx.reshape(x.shape), dw, db


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return forward(x, groups, weight, bias, eps, False)[0]


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return forward(x, groups, weight, bias, eps, True)[0]


def eager(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def eager_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def one_group(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """All channels as one group."""
    return forward(x, 1, weight, bias, eps, False)[0]


def silu_ignored(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return group_norm(x, groups, weight, bias, eps)
