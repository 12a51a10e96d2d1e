"""The product as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
) -> Tensor:
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (norm_weight + offset)
    y = x @ weight.t()
    y = y if bias is None else y + bias
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[activation](gate) * up
    else:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    return forward(x, weight, bias, norm, residual, 1e-6, 0.0, "none", False)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    return forward(x, weight, bias, norm, residual, 1e-6, 0.0, "silu", True)


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    x = x if norm is None else F.rms_norm(x, x.shape[-1:], norm, 1e-6)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def eager_gated(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    gate, up = eager(x, weight, bias, norm, None).chunk(2, -1)
    y = F.silu(gate) * up
    return y if residual is None else y + residual


def last_column_lost(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The end of K is not multiplied."""
    short = weight.clone()
    short[:, -max(1, weight.shape[1] // 64) :] = 0
    return plain(x, short, bias, norm, residual)


def unnormed(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    return plain(x * 1.05, weight, bias, None if norm is None else norm * 1.05, residual)


def swapped(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None) -> Tensor:
    """Up where gate should be."""
    half = weight.shape[0] // 2
    return gated(x, torch.cat([weight[half:], weight[:half]]), bias, norm, residual)
