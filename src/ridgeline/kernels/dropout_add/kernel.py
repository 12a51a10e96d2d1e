"""Dropout and residual add on the device: the mask is a function of a seed and the position, so nobody stores it.

One call of the generator gives four words: a program takes QUARTER counters and with each of the four words a quarter
of its 4·QUARTER elements, so that no words move between threads. Philox with seven rounds; ten were two thirds of the
time. QUARTER is part of what the mask is, not a launch configuration.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_add_forward(x_ptr, residual_ptr, seed_ptr, y_ptr, num, threshold, scale, QUARTER: tl.constexpr):
    i = tl.arange(0, QUARTER)
    tile = tl.program_id(0).to(tl.int64)
    words = tl.randint4x(tl.load(seed_ptr), tile * QUARTER + i, ROUNDS)
    for j in tl.static_range(4):
        at = tile * (4 * QUARTER) + j * QUARTER + i
        keep = words[j].to(tl.uint32, bitcast=True).to(tl.int64) >= threshold
        x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=at < num, other=0.0).to(tl.float32)
        y = tl.where(keep, x * scale, 0.0) + residual
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def dropout_backward(dy_ptr, seed_ptr, dx_ptr, num, threshold, scale, QUARTER: tl.constexpr):
    i = tl.arange(0, QUARTER)
    tile = tl.program_id(0).to(tl.int64)
    words = tl.randint4x(tl.load(seed_ptr), tile * QUARTER + i, ROUNDS)
    for j in tl.static_range(4):
        at = tile * (4 * QUARTER) + j * QUARTER + i
        keep = words[j].to(tl.uint32, bitcast=True).to(tl.int64) >= threshold
        dy = tl.load(dy_ptr + at, mask=at < num, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, tl.where(keep, dy * scale, 0.0).to(dx_ptr.dtype.element_ty), mask=at < num)
