"""Ops of engines that PyTorch has no single op for, written ``engine::name`` in programs and recipes.

Each is a plain function on tensors of any device, and means the same everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import EngineError, nearest

OPS: dict[str, Callable[..., Any]] = {}


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a function as an op of engines, under its own name."""
    assert function.__name__ not in OPS
    OPS[function.__name__] = function
    return function


def function_of(name: str) -> Callable[..., Any]:
    if name not in OPS:
        raise EngineError(f"engines have no op engine::{name[:40]}{nearest(name, OPS)}")
    return OPS[name]


def names_of(name: str) -> set[str]:
    return set(inspect.signature(function_of(name)).parameters)


@op
def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in bfloat16, returned in the type of its input."""
    return F.linear(x.to(torch.bfloat16), weight, bias).to(x.dtype)


@op
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, inverse: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product of signed bytes: the input times ``inverse`` (one number, or one a channel) is rounded to bytes, and
    the integer sums are scaled, one scale an output. A row that does not fit into bytes with these scales is made
    smaller as a whole, and its sums larger: no value is clipped."""
    rows = x.reshape(-1, x.shape[-1]) * inverse
    over = (torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True) / 127).clamp_min_(1.0)
    q = (rows / over).round_().to(torch.int8)
    num = q.shape[0]
    if q.device.type == "cuda" and num <= 16:  # what cuBLAS's integer product takes
        q = F.pad(q, (0, 0, 0, 17 - num))
    sums = torch._int_mm(q, weight.t())[:num].to(scale.dtype) * over
    y = sums * scale if bias is None else torch.addcmul(bias, sums, scale)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@op
def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, inverse: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product of float8 (e4m3) numbers with a static scale for the input and one an output."""
    rows = (x.reshape(-1, x.shape[-1]) * inverse).clamp_(-448, 448).to(torch.float8_e4m3fn)
    if rows.device.type == "cuda":
        one = torch.ones((), device=x.device)
        y = torch._scaled_mm(rows, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    else:
        y = rows.float() @ weight.float().t()
    y = y * scale if bias is None else torch.addcmul(bias, y, scale)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@op
def int4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, inverse: Tensor | None = None, bias: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:  # fmt: skip
    """A product with a weight of four bits, two a byte, with a scale for each group of a row's columns; the input is
    rotated before if the weight was, and multiplied by ``inverse`` if its channels were scaled."""
    given = x if inverse is None else x * inverse
    given = hadamard(given, rotation) if rotation else given
    return F.linear(given, int4_restored(weight, scale).to(x.dtype), bias)


@op
def int4_restored(weight: Tensor, scale: Tensor) -> Tensor:
    """What four-bit numbers stand for."""
    low, high = (weight & 15).to(torch.int8) - 8, (weight >> 4).to(torch.int8) - 8
    wide = torch.stack((low, high), -1).reshape(weight.shape[0], -1).to(scale.dtype)
    return (wide.reshape(*scale.shape, -1) * scale.unsqueeze(-1)).reshape(weight.shape[0], -1)


@op
def int4_packed(q: Tensor) -> Tensor:
    """Numbers of -8 to 7, two a byte."""
    pairs = (q.to(torch.int16) + 8).reshape(q.shape[0], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


@op
def row_scale(weight: Tensor, most: float, group: int = 0) -> Tensor:
    """The largest magnitude of each row, or of each group of a row's columns, over the largest number of a format."""
    blocks = weight.reshape(weight.shape[0], -1, group) if group else weight
    return blocks.abs().amax(-1).clamp_min(torch.finfo(weight.dtype).tiny) / most


@op
def rounded(weight: Tensor, scale: Tensor, most: int) -> Tensor:
    """A weight as signed bytes; ``scale`` has one number a row or a group."""
    groups = scale if scale.dim() == 2 else scale.unsqueeze(1)
    blocks = weight.reshape(weight.shape[0], groups.shape[1], -1)
    q = (blocks / groups.unsqueeze(-1)).round().clamp(-most - (most == 7), most)
    return q.reshape(weight.shape).to(torch.int8)


@op
def as_float8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale.unsqueeze(1)).to(torch.float8_e4m3fn)


@op
def hadamard(x: Tensor, size: int) -> Tensor:
    """Blocks of ``size`` channels rotated by a Hadamard matrix; twice is the input again."""
    if size < 2 or size & (size - 1) or x.shape[-1] % size:
        raise EngineError(f"engine::hadamard: blocks of {size} do not divide {x.shape[-1]} channels")
    y = x.reshape(-1, size)
    width = 1
    while width < size:
        y = y.reshape(-1, size // (2 * width), 2, width)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2)
        y, width = y.reshape(-1, size), 2 * width
    return (y * size**-0.5).reshape(x.shape)
