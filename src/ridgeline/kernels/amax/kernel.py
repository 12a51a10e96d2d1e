"""Extremes along a dim that is not the last: programs go down their columns, many rows at a time.

Of equal elements the first place is found, and what is no number wins over all, as in PyTorch.
Shapes: x [O, R, I], out [O, I].
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def extreme_of(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def is_further(x, best, LARGEST: tl.constexpr):
    """Whether an element takes another's place: it is further out, or no number and the other is one."""
    x = x.to(tl.float32)  # the interpreter compares bfloat16 with itself bit by bit, and finds numbers alone
    out = x > best if LARGEST else x < best
    return out | ((x != x) & (best == best))


@jit
def further_largest(x, at, y, there):
    """The larger of two elements and its place; of equal ones, and of two that are no numbers, the first."""
    alike = (x == y) | ((x != x) & (y != y))
    taken = is_further(x, y, True) | (alike & (at < there))
    return tl.where(taken, x, y), tl.where(taken, at, there)


@jit
def further_smallest(x, at, y, there):
    """The smaller of two, as above."""
    alike = (x == y) | ((x != x) & (y != y))
    taken = is_further(x, y, False) | (alike & (at < there))
    return tl.where(taken, x, y), tl.where(taken, at, there)


@jit
def step_of(x_at, row, i, rows, inner, least):
    """Rows of a step; past the end what nothing is behind."""
    inside = (row < rows)[:, None] & (i < inner)[None, :]
    return tl.load(x_at, mask=inside, other=least, eviction_policy="evict_first")


@jit
def extreme_places(
    x_ptr,
    out_ptr,
    rows,
    inner,
    num_blocks,  # of columns
    LARGEST: tl.constexpr,
    AHEAD: tl.constexpr,  # whether the next rows are asked for before these are compared
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    """Every thread keeps the best of its rows and where that was: a comparison and two choices an element."""
    outer = (tl.program_id(0) // num_blocks).to(tl.int64)
    i = tl.program_id(0) % num_blocks * BI + tl.arange(0, BI)
    row = tl.arange(0, BR)
    x_at = x_ptr + outer * rows * inner + row[:, None] * inner + i[None, :]
    least = float("-inf") if LARGEST else float("inf")
    best = tl.full([BR, BI], least, tl.float32)
    place = tl.broadcast_to(row[:, None], [BR, BI])  # where nothing is further out, the first row of each
    if AHEAD:
        x = step_of(x_at, row, i, rows, inner, least)
    for first in range(0, rows, BR):
        if AHEAD:
            x_at += BR * inner
            later = step_of(x_at, first + BR + row, i, rows, inner, least)
        else:
            x = step_of(x_at, first + row, i, rows, inner, least)
            x_at += BR * inner
        taken = is_further(x, best, LARGEST)
        best = tl.where(taken, x, best)
        place = tl.where(taken, (first + row)[:, None], place)
        if AHEAD:
            x = later
    if LARGEST:
        _, found = tl.reduce((best, place), 0, further_largest)
    else:
        _, found = tl.reduce((best, place), 0, further_smallest)
    tl.store(out_ptr + outer * inner + i, found.to(tl.int64), mask=i < inner)


@jit
def extreme_rows(
    x_ptr,
    out_ptr,
    rows,
    inner,
    num_blocks,  # of columns
    LARGEST: tl.constexpr,
    AHEAD: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
):
    outer = (tl.program_id(0) // num_blocks).to(tl.int64)
    i = tl.program_id(0) % num_blocks * BI + tl.arange(0, BI)
    row = tl.arange(0, BR)
    x_at = x_ptr + outer * rows * inner + row[:, None] * inner + i[None, :]
    best = tl.full([BR, BI], float("-inf"), tl.float32)
    least = float("-inf") if LARGEST else float("inf")
    if AHEAD:
        x = step_of(x_at, row, i, rows, inner, least)
    for first in range(0, rows, BR):
        if AHEAD:
            x_at += BR * inner
            later = step_of(x_at, first + BR + row, i, rows, inner, least)
        else:
            x = step_of(x_at, first + row, i, rows, inner, least)
            x_at += BR * inner
        number = x.to(tl.float32)  # 16 bits wait as they lie; the interpreter knows no bfloat16 below zero
        best = extreme_of(best, number if LARGEST else -number)
        if AHEAD:
            x = later
    value = tl.reduce(best, 0, extreme_of)
    tl.store(out_ptr + outer * inner + i, value if LARGEST else -value, mask=i < inner)
