"""Extremes along a dim that is not the last: programs go down their columns, many rows at a time.

A place is found as the largest of words that hold the element, as an integer of the same order, above the place counted
backwards: of equal elements the first wins, and what is no number wins over all, as in PyTorch.
Shapes: x [O, R, I], out [O, I].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def extreme_of(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered_bits(x):
    """An integer that is larger where the number is; zeros are equal, and what is no number is above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def extreme_rows(
    x_ptr,
    out_ptr,
    rows,
    inner,
    num_blocks,  # of columns
    LARGEST: tl.constexpr,
    PLACE: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    outer = (tl.program_id(0) // num_blocks).to(tl.int64)
    i = tl.program_id(0) % num_blocks * BI + tl.arange(0, BI)
    start = x_ptr + outer * rows * inner
    if PLACE:
        best = tl.full([BR, BI], -0x8000000000000000, tl.int64)
    else:
        best = tl.full([BR, BI], float("-inf"), tl.float32)
    for first in range(0, rows, BR):
        r = first + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (i < inner)[None, :]
        x = tl.load(start + r[:, None] * inner + i[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        x = x if LARGEST else -x
        if PLACE:
            word = (ordered_bits(x).to(tl.int64) << 32) + (0x7FFFFFFF - r)[:, None].to(tl.int64)
            best = tl.maximum(best, tl.where(inside, word, -0x8000000000000000))
        else:
            best = extreme_of(best, tl.where(inside, x, float("-inf")))
    out = out_ptr + outer * inner + i
    if PLACE:
        found = tl.max(best, 0)
        tl.store(out, 0x7FFFFFFF - (found & 0xFFFFFFFF), mask=i < inner)
    else:
        value = tl.reduce(best, 0, extreme_of)
        tl.store(out, value if LARGEST else -value, mask=i < inner)
