"""Quantization on the device: scales from the largest element, held in registers where a row fits.

Shapes: R rows of C columns with a scale each (blocks are rows of a reshaped tensor), N elements, P programs.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import let_next_start, wait_for_last
from ridgeline.kernels.function import jit

ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a float32 to the nearest even integer
LEAST = tl.constexpr(1e-12)


@jit
def rounded(y, INTEGER: tl.constexpr, CLAMPED: tl.constexpr, largest, q_ptr):
    """The low byte of 1.5 · 2²³ + y is y, rounded: a conversion would be four times slower. fp8's saturate."""
    if INTEGER:
        if CLAMPED:
            y = tl.minimum(tl.maximum(y, -largest), largest)
        y = (y + ROUNDER).to(tl.int32, bitcast=True)
    return y.to(q_ptr.dtype.element_ty)


@jit
def quantize_rows(
    x_ptr,  # [R, C], rows x_stride apart
    q_ptr,  # [R, C]
    scale_ptr,  # [R] fp32
    rows,
    cols,
    x_stride,
    largest,
    INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program holds ROWS rows in CHUNKS pieces."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    x_at = x_ptr + row.to(tl.int64) * x_stride + col
    held = ()
    top = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        inside = (row < rows) & (i * BLOCK + col < cols)
        x = tl.load(x_at + i * BLOCK, mask=inside, other=0.0)
        top = tl.maximum(top, tl.abs(x.to(tl.float32)))
        held = held + (x,)
    most = tl.maximum(tl.max(top, axis=1, keep_dims=True), LEAST)
    by = tl.div_rn(largest, most)
    tl.store(scale_ptr + row, tl.div_rn(most, largest), mask=row < rows)
    for i in tl.static_range(CHUNKS):
        inside = (row < rows) & (i * BLOCK + col < cols)
        y = rounded(held[i].to(tl.float32) * by, INTEGER, False, largest, q_ptr)
        tl.store(q_ptr + row.to(tl.int64) * cols + i * BLOCK + col, y, mask=inside)


@jit
def quantize_long_rows(
    x_ptr, q_ptr, scale_ptr, rows, cols, x_stride, largest, INTEGER: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows that do not fit in registers: read once for the scale and once more, from the L2."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_last")
        top = tl.maximum(top, tl.abs(x.to(tl.float32)))
    most = tl.maximum(tl.max(top, axis=0), LEAST)
    by = tl.div_rn(largest, most)
    tl.store(scale_ptr + row, tl.div_rn(most, largest))
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_first")
        y = rounded(x.to(tl.float32) * by, INTEGER, False, largest, q_ptr)
        tl.store(q_ptr + row * cols + c, y, mask=c < cols)


@jit
def largest_shares(x_ptr, share_ptr, n, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest magnitude of every P-th block; the first half of a scale for a whole tensor."""
    col = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(first, n // BLOCK * BLOCK, step, num_stages=1):
        x = tl.load(x_ptr + tl.multiple_of(start, 16) + col, eviction_policy="evict_last")
        top = tl.maximum(top, tl.abs(x.to(tl.float32)))
    if tl.program_id(0) == 0:
        at = n // BLOCK * BLOCK + col
        top = tl.maximum(top, tl.abs(tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)))
    let_next_start(EARLY)
    tl.store(share_ptr + tl.program_id(0), tl.max(top, axis=0))


@jit
def scale_of_shares(
    share_ptr,  # [P] largest magnitudes
    scale_ptr,  # [] fp32
    by_ptr,  # [] fp32: what elements are multiplied with
    num_shares,
    largest,
    SHARES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The scale of a whole tensor, worked out once: every program of the next kernel reads one number."""
    let_next_start(DEPENDENT)
    i = tl.arange(0, SHARES)
    wait_for_last(DEPENDENT)
    most = tl.maximum(tl.max(tl.load(share_ptr + i, mask=i < num_shares, other=0.0), axis=0), LEAST)
    tl.store(scale_ptr, tl.div_rn(most, largest))
    tl.store(by_ptr, tl.div_rn(largest, most))


@jit
def quantize_all(
    x_ptr,  # [N]
    q_ptr,  # [N]
    by_ptr,  # [] fp32: what elements are multiplied with, or the scale that is given
    n,
    largest,
    GIVEN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One scale for everything."""
    block = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)  # the end of x was read last and is in the L2
    at = tl.multiple_of(block * BLOCK, 16) + tl.arange(0, BLOCK)
    whole = (block + 1) * BLOCK <= n
    if whole:  # asked for before the scale is known: the two arrive together
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    wait_for_last(DEPENDENT)
    by = tl.load(by_ptr)
    if GIVEN:
        by = tl.div_rn(1.0, by)
    y = rounded(x.to(tl.float32) * by, INTEGER, GIVEN, largest, q_ptr)
    if whole:
        tl.store(q_ptr + at, y)
    else:
        tl.store(q_ptr + at, y, mask=at < n)


@jit
def dequantize_rows(
    q_ptr,  # [R, C]
    scale_ptr,  # [R]
    x_ptr,  # [R, C]
    rows,
    cols,
    blocks,  # along a row
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0) // blocks
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    at = row.to(tl.int64) * cols + col
    inside = (row < rows) & (col < cols)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    x = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)


@jit
def dequantize_all(q_ptr, scale_ptr, x_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = tl.multiple_of(block * BLOCK, 16) + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    if (block + 1) * BLOCK <= n:
        tl.store(x_ptr + at, (tl.load(q_ptr + at).to(tl.float32) * scale).to(x_ptr.dtype.element_ty))
    else:
        x = tl.load(q_ptr + at, mask=at < n, other=0.0).to(tl.float32) * scale
        tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=at < n)
