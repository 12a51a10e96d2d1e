"""The cross layer as it is meant; as PyTorch users write it; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the product with its bias, the low-rank projection)."""
    inner = x if down is None else x @ down.mT
    u = inner @ weight.mT
    u = u if bias is None else u + bias
    return x0 * u + x, u, x.new_empty(0) if down is None else inner


def backward(dy: Tensor, u: Tensor, x0: Tensor, want_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the product, of x0, of the bias)."""
    du = dy * x0
    return du, dy * u, du.sum(0) if want_bias else du.new_empty(0)


def low_rank_backward(
    dy: Tensor, x0: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(gradient of the product, of x0, of x, of the projection, of the bias)."""
    u = inner @ weight.mT
    du, dx0, db = backward(dy, u if bias is None else u + bias, x0, want_bias)
    d_inner = du @ weight
    return du, dx0, d_inner @ down + dy, d_inner, db


def eager(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None = None) -> Tensor:
    return x0 * F.linear(x if down is None else F.linear(x, down), weight, bias) + x


def meant(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None = None) -> Tensor:
    return forward(x0, x, weight, bias, down)[0]


def no_residual(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None = None) -> Tensor:
    return meant(x0, x, weight, bias, down) - x


def bias_outside(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor | None = None) -> Tensor:
    """The bias added after the product with x0."""
    return meant(x0, x, weight, torch.zeros_like(bias), down) + bias
