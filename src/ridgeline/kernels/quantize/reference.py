"""Quantization as it is meant; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
LEAST = 1e-12


def quantized(x: Tensor, kind: str, per: str, block: int, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q, scale) with x ≈ q · scale, the largest of each tensor, row or block at the end of the type's range."""
    blocks = x.reshape(1, -1) if per == "tensor" else x.reshape(-1, block if per == "block" else x.shape[-1])
    top = LARGEST[kind]
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(LEAST) / top if given is None else given.reshape(1, 1)
    y = blocks / scale
    q = (y.round() if kind == "int8" else y).clamp(-top, top).to(getattr(torch, kind))
    return q.reshape(x.shape), scale.reshape(scale_shape(x.shape, per, block))


def scale_shape(shape: torch.Size, per: str, block: int) -> tuple[int, ...]:
    if per == "tensor":
        return ()
    return *shape[:-1], 1 if per == "row" else shape[-1] // block


def restored(q: Tensor, scale: Tensor) -> Tensor:
    """What the quantized numbers stand for."""
    wide = q.to(scale.dtype)
    if scale.dim() == 0:
        return wide * scale
    return (wide.reshape(*q.shape[:-1], scale.shape[-1], -1) * scale.unsqueeze(-1)).reshape(q.shape)


def eager(x: Tensor, kind: str, per: str, block: int) -> Tensor:
    return restored(*quantized(x.float(), kind, per, block))


def meant(x: Tensor, kind: str, per: str, block: int) -> Tensor:
    """Without rounding: what both are compared with."""
    return x


def half_range(x: Tensor, kind: str, per: str, block: int) -> Tensor:
    """Scales twice too large: one bit of precision thrown away."""
    scale = 2 * quantized(x, kind, per, block)[1]
    groups = x.reshape(1, -1) if per == "tensor" else x.reshape(-1, block if per == "block" else x.shape[-1])
    y = groups / scale.reshape(-1, 1)
    q = (y.round() if kind == "int8" else y).to(getattr(torch, kind)).to(x.dtype)
    return (q * scale.reshape(-1, 1)).reshape(x.shape)


def truncated(x: Tensor, kind: str, per: str, block: int) -> Tensor:
    """Rounded toward zero."""
    q, scale = quantized(x, kind, per, block)
    over = restored(q, scale).abs() > x.abs()
    wide = q.to(x.dtype)
    nearer = torch.where(
        over, wide * (1 - 2.0**-3 if kind != "int8" else 1) - (wide.sign() if kind == "int8" else 0), wide
    )
    return restored(nearer, scale)


def dequantized_wrong_row(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Every row with its neighbor's scale."""
    return restored(q, scale.roll(1, 0))
