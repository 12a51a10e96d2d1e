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
    seed = tl.load(seed_ptr)
    xs = ()
    residuals = ()
    for j in tl.static_range(4):  # asked for before the words are made, which wait for the seed
        at = tile * (4 * QUARTER) + j * QUARTER + i
        xs = xs + (tl.load(x_ptr + at, mask=at < num, other=0.0),)
        residuals = residuals + (tl.load(residual_ptr + at, mask=at < num, other=0.0),)
    words = tl.randint4x(seed, tile * QUARTER + i, ROUNDS)
    for j in tl.static_range(4):
        at = tile * (4 * QUARTER) + j * QUARTER + i
        keep = words[j].to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32)
        y = tl.where(keep, xs[j].to(tl.float32) * scale, 0.0) + residuals[j].to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def dropout_backward(dy_ptr, seed_ptr, dx_ptr, num, threshold, scale, QUARTER: tl.constexpr):
    i = tl.arange(0, QUARTER)
    tile = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    dys = ()
    for j in tl.static_range(4):
        at = tile * (4 * QUARTER) + j * QUARTER + i
        dys = dys + (tl.load(dy_ptr + at, mask=at < num, other=0.0),)
    words = tl.randint4x(seed, tile * QUARTER + i, ROUNDS)
    for j in tl.static_range(4):
        at = tile * (4 * QUARTER) + j * QUARTER + i
        keep = words[j].to(tl.uint32, bitcast=True) >= threshold.to(tl.uint32)
        dx = tl.where(keep, dys[j].to(tl.float32) * scale, 0.0)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < num)
