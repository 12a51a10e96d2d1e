"""The quantizing LayerNorm as it is meant; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.rms_norm_quant.reference import CHECKED, LARGEST, quantized, restored

__all__ = ["CHECKED", "LARGEST", "restored"]


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    h = x if residual is None else x + residual
    q, scale = quantized(normed(h, weight, bias, eps), kind, group)
    return q, scale, (x.new_empty(0) if residual is None else h)


def eager(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> Tensor:
    return restored(*quantized(normed(x.float(), weight.float(), bias.float(), 1e-5), kind, group))


def raced(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    """What PyTorch users write: normalize, then quantize."""
    return quantized(normed(x, weight, bias, 1e-5), kind, group)


def meant(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> Tensor:
    """Without rounding: what both are compared with."""
    return normed(x, weight, bias, 1e-5)


def wrong_row(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> Tensor:
    """Every row with its neighbor's scale."""
    q, scale = quantized(normed(x, weight, bias, 1e-5), kind, group)
    return restored(q, scale.roll(1, 0))


def bias_lost(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> Tensor:
    """The bias is added after the scale was found, and so not at all."""
    return restored(*quantized(normed(x, weight, None, 1e-5), kind, group))
