"""The Triton kernels of ``expert_rows``: a program a token, whole rows at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine(
    place_ptr, y_ptr, out_ptr, weight_ptr, cols, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """From place and weights [T, K] and y [T K, cols] to out [T, cols]."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        at = tl.load(place_ptr + token * K + j)
        y = tl.load(y_ptr + at * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weight_ptr + token * K + j).to(tl.float32)
        total += y
    tl.store(out_ptr + token * cols + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def spread(
    place_ptr, x_ptr, rows_ptr, y_ptr, weight_ptr, dweight_ptr, cols,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From x [T, cols] to rows [T K, cols]; weighted, also the weights' gradient from y [T K, cols]."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * cols + col, mask=col < cols, other=0.0)
    for j in tl.static_range(K):
        at = tl.load(place_ptr + token * K + j)
        row = x
        if WEIGHTED:
            wide = x.to(tl.float32)
            y = tl.load(y_ptr + at * cols + col, mask=col < cols, other=0.0).to(tl.float32)
            tl.store(dweight_ptr + token * K + j, tl.sum(wide * y, axis=0).to(dweight_ptr.dtype.element_ty))
            row = wide * tl.load(weight_ptr + token * K + j).to(tl.float32)
        tl.store(rows_ptr + at * cols + col, row.to(rows_ptr.dtype.element_ty), mask=col < cols)
