"""Softmax on the device. Rows of up to 32k columns are held in registers and read once; longer ones are read twice.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def softmax_forward(x_ptr, y_ptr, rows, cols, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=1, keep_dims=True)
    e = tl.exp(x - top)
    y = e / tl.sum(e, axis=1, keep_dims=True)
    tl.store(y_ptr + row.to(tl.int64) * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_forward_long(x_ptr, y_ptr, rows, cols, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """One program a row: a running maximum and sums relative to it, then a second read, from the L2."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_row = x_ptr + row * x_stride
    top = LOWEST  # finite, so that a block of −inf is never compared with another: exp(−inf + inf) is NaN
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_row + c, mask=c < cols, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    scale = 1.0 / tl.sum(total, axis=0)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_row + c, mask=c < cols, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        tl.store(y_ptr + row * cols + c, (tl.exp(x - top) * scale).to(y_ptr.dtype.element_ty), mask=c < cols)


@triton.jit
def softmax_backward(dy_ptr, y_ptr, dx_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < cols)
    at = row.to(tl.int64) * cols + col
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(y * dy, axis=1, keep_dims=True)
    tl.store(dx_ptr + at, (y * (dy - along)).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_long(dy_ptr, y_ptr, dx_ptr, rows, cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        y = tl.load(y_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += y * dy
    along = tl.sum(total, axis=0)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        y = tl.load(y_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + row * cols + c, (y * (dy - along)).to(dx_ptr.dtype.element_ty), mask=c < cols)
