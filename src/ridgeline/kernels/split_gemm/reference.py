"""The product as it is meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

from torch import Tensor


def forward(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    y = a @ b
    return y if bias is None else y + bias


def eager(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return forward(a, b, bias)


def one_half(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """High parts alone."""
    return forward(a.half().to(a.dtype), b.half().to(b.dtype), bias)


def unscaled(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Low parts of one factor left out."""
    return forward(a, b.half().to(b.dtype), bias)


def last_term_lost(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    shorter = a.clone()
    shorter[..., -1] = 0
    return forward(shorter, b, bias)
