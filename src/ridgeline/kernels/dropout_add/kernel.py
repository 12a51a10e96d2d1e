"""Dropout and residual add on the device: the mask is a function of a seed and the position, so nobody stores it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropout_add_forward(x_ptr, residual_ptr, seed_ptr, y_ptr, num, p, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(tl.load(seed_ptr), at) >= p
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    y = tl.where(keep, x * scale, 0.0) + residual
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def dropout_backward(dy_ptr, seed_ptr, dx_ptr, num, p, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(tl.load(seed_ptr), at) >= p
    dy = tl.load(dy_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, tl.where(keep, dy * scale, 0.0).to(dx_ptr.dtype.element_ty), mask=at < num)
