"""Gated units on the device: act(gate) · up, element by element.

Shapes: R rows, C columns; contiguous inputs come as one long row.
"""

from __future__ import annotations

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU_ERF = tl.constexpr(2)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """act(x) and its derivative."""
    if KIND == SILU:
        s = 1.0 / (1.0 + tl.exp(-x))
        y = x * s
        slope = s + y * (1.0 - s)
    elif KIND == GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, and as that it loses nothing where it is small
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1.0 / (1.0 + tl.exp(-u))
        y = x * s
        slope = s + y * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return y, slope


@triton.jit
def gated_forward(
    gate_ptr, up_ptr, out_ptr, cols, gate_stride, up_stride, blocks_per_row, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks_per_row
    col = (pid % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    y, _ = activation(gate, KIND)
    tl.store(out_ptr + row * cols + col, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    cols,
    gate_stride,
    up_stride,
    blocks_per_row,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks_per_row
    col = (pid % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    at = row * cols + col
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y, slope = activation(gate, KIND)
    tl.store(dgate_ptr + at, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, (dy * y).to(dup_ptr.dtype.element_ty), mask=inside)
