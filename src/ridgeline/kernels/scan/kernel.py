"""Cumulative sums and products: blocks of a row scanned one after the other, what came before carried along.

Shapes: x [R, C, I], scanned along C; I is 1 where the scanned dim is the last.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def scan_times(a, b):
    return a * b


@jit
def scan_rows(
    x_ptr,
    keep_ptr,  # flags of the same shape that x is multiplied by
    y_ptr,
    cols,
    inner,
    PRODUCT: tl.constexpr,
    KEPT: tl.constexpr,
    REVERSE: tl.constexpr,
    EXCLUSIVE: tl.constexpr,  # element c holds what comes before it, the first one nothing
    BC: tl.constexpr,
    BI: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row, in blocks of one dim where BI is 1, or BI neighboring ones."""
    EMPTY: tl.constexpr = 1.0 if PRODUCT else 0.0
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * cols * inner
    keep_row = keep_ptr + row * cols * inner
    y_row = y_ptr + row * cols * inner
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    carried = tl.full([1], EMPTY, tl.float32) if BI == 1 else tl.full([1, BI], EMPTY, tl.float32)
    step = 1 if BI == 1 else inner
    for first in tl.range(0, cols, BC, num_stages=STAGES):
        begin = cols - first - BC if REVERSE else first
        c = begin + tl.arange(0, BC)
        inside = (c >= 0) & (c < cols)
        at = c
        if BI > 1:
            inside = inside[:, None] & (i < inner)[None, :]
            at = c[:, None] * inner + i[None, :]
        x = tl.load(x_row + at, mask=inside, other=EMPTY).to(tl.float32)
        if KEPT:
            x *= tl.load(keep_row + at, mask=inside, other=1).to(tl.float32)
        if PRODUCT:
            y = tl.cumprod(x, 0, reverse=REVERSE) * carried
            carried *= tl.reduce(x, 0, scan_times, keep_dims=True)
        else:
            y = tl.cumsum(x, 0, reverse=REVERSE) + carried
            carried += tl.sum(x, 0, keep_dims=True)
        if EXCLUSIVE:
            last = (c > 0) if REVERSE else (c < cols - 1)
            there = inside & (last if BI == 1 else last[:, None])
            tl.store(y_row + at + (-step if REVERSE else step), y, mask=there)
        else:
            tl.store(y_row + at, y, mask=inside)
    if EXCLUSIVE:
        edge = (cols - 1) * step if REVERSE else 0
        tl.store(y_row + edge + i, tl.full([BI], EMPTY, tl.float32), mask=i < inner)
