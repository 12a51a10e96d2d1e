"""The quantizing norm as it is meant; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.rms_norm import reference as norm

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
CHECKED = (
    (3, 64, 0), (33, 1024, 128), (17, 5120, 0), (5, 4096, 128), (8200, 6144, 128), (8201, 739, 0), (8200, 3386, 0),
)  # fmt: skip
"""Rows, columns and block of what quantizing norms are checked on."""


def quantized(y: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    """(q, scale) with y ≈ q · scale, the largest of each row or block at the end of the type's range."""
    shape = y.shape
    blocks = y.reshape(-1, 1, shape[-1]) if not group else y.reshape(-1, shape[-1] // group, group)
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST[kind]
    q = blocks / scale
    q = (q.round() if kind == "int8" else q).to(getattr(torch, kind))
    return q.reshape(shape), scale.reshape(*shape[:-1], -1)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    h = x if residual is None else x + residual
    q, scale = quantized(norm.rms_norm(h, weight, eps, offset), kind, group)
    return q, scale, (x.new_empty(0) if residual is None else h)


def restored(q: Tensor, scale: Tensor) -> Tensor:
    """What the quantized numbers stand for."""
    blocks = q.float().reshape(*q.shape[:-1], scale.shape[-1], -1)
    return (blocks * scale.float().unsqueeze(-1)).reshape(q.shape)


def eager(x: Tensor, weight: Tensor, kind: str, group: int) -> Tensor:
    return restored(*quantized(norm.eager(x.float(), weight.float(), 1e-6), kind, group))


def raced(x: Tensor, weight: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    """What PyTorch users write: normalize, then quantize."""
    return quantized(norm.eager(x, weight, 1e-6), kind, group)


def meant(x: Tensor, weight: Tensor, kind: str, group: int) -> Tensor:
    """Without rounding: what both are compared with."""
    return norm.rms_norm(x, weight, 1e-6)


def wrong_row(x: Tensor, weight: Tensor, kind: str, group: int) -> Tensor:
    """Every row with its neighbor's scale."""
    q, scale = quantized(norm.rms_norm(x, weight, 1e-6), kind, group)
    return restored(q, scale.roll(1, 0))
