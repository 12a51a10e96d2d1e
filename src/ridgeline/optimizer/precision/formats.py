"""Formats of a quantized linear layer: where each is available, how a weight is converted, and how it runs.

| format | weight | input | for |
|---|---|---|---|
| tf32 | as it is | as it is; the tensor cores round both to 10 bits | float32 |
| bf16 | bfloat16 | bfloat16 | float32 |
| fp8 | float8 with a scale per output | float8 with a scale per row, quantized at run time | more than 16 rows |
| int8 | signed bytes with a scale per output | as it is | at most 16 rows, half precision |
| int4 | four bits with a scale for every 128 | as it is | at most 16 rows, half precision |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels import quantize, quantize_weight, quantized_linear
from ridgeline.kernels.quantize import reference
from ridgeline.kernels.quantized_linear.config import GROUP, MAX_ROWS
from ridgeline.kernels.tensorfloat import products_in, products_round

FP8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Shape:
    """A linear layer as it is called: rows, outputs, columns, dtype and device."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class Format:
    """A format: where it is available, how a weight is converted, and how it runs."""

    name: str
    summary: str
    takes: Callable[[Shape], bool]
    make: Callable[[Tensor], tuple[Tensor, ...]]
    run: Callable[..., Tensor]  # (x, *made, bias)

    def __call__(self, x: Tensor, made: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.run(x, *made, bias)


def options(shape: Shape) -> list[Format]:
    """The formats available for a layer."""
    # Smaller weights are not what a GEMM's time depends on.
    if shape.n * shape.k < 1 << 16:
        return []
    return [each for each in FORMATS.values() if each.takes(shape)]


def _takes_fp8(shape: Shape) -> bool:
    able = shape.device != "cuda" or torch.cuda.get_device_capability() >= (8, 9)
    return able and shape.rows > MAX_ROWS and shape.n % 16 == 0 and shape.k % 16 == 0


@torch.library.custom_op("ridgeline_optimizer::tf32_linear", mutates_args=())
def _tf32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cuda":
        return F.linear(_rounded(x), _rounded(weight), bias)
    with products_in("tf32"):
        return F.linear(x, weight, bias)


@_tf32.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def tf32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of float32 tensors, which the tensor cores may round to 10 bits."""
    return _tf32(x, weight, bias)


def _rounded(x: Tensor) -> Tensor:
    """float32 rounded to TensorFloat-32, which drops 13 bits."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in bfloat16, returned in the type of its input."""
    own = None if bias is None else bias.to(torch.bfloat16)
    return F.linear(x.to(torch.bfloat16), weight, own).to(x.dtype)


@torch.library.custom_op("ridgeline_optimizer::fp8_linear", mutates_args=())
def _fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type != "cuda":
        full = reference.restored(*quantize(rows, FP8)) @ reference.restored(weight, scale).t()
        full = full if bias is None else full + bias
        return full.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
    q, own = quantize(rows, FP8)
    added = None if bias is None else bias.to(torch.bfloat16)
    y = torch._scaled_mm(q, weight.t(), scale_a=own, scale_b=scale.t(), bias=added, out_dtype=torch.bfloat16,
                         use_fast_accum=True)  # fmt: skip
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@_fp8.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in float8, with a scale per row of the input and per output of the weight; [N, K] and [N, 1]."""
    return _fp8(x, weight, scale, bias)


FORMATS = {
    each.name: each
    for each in (
        Format("tf32", "factors rounded to 10 bits by the tensor cores",
               lambda s: s.dtype == torch.float32 and s.device == "cuda" and not products_round(),
               lambda w: (w.detach(),), tf32_linear),
        Format("bf16", "bfloat16", lambda s: s.dtype == torch.float32, lambda w: (w.detach().to(torch.bfloat16),),
               bf16_linear),
        Format("fp8", "float8, a scale a row and an output", _takes_fp8, lambda w: quantize(w.detach(), FP8),
               fp8_linear),
        Format("int8", "weight of 8 bits, a scale an output",
               lambda s: s.rows <= MAX_ROWS and s.dtype in HALVES and s.k % 16 == 0,
               lambda w: quantize_weight(w, 8), quantized_linear),
        Format("int4", "weight of 4 bits, a scale for every 128",
               lambda s: s.rows <= MAX_ROWS and s.dtype in HALVES and s.k % GROUP == 0,
               lambda w: quantize_weight(w, 4), quantized_linear),
    )
}  # fmt: skip
WEIGHT_ONLY = ("int8", "int4")
