"""Squared ReLU on the device, element by element."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squared(x):
    x = x.to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # NaN stays one
    return x * x


@triton.jit
def slope_of(x, dy):
    x = x.to(tl.float32)
    return tl.where(x < 0.0, 0.0, 2.0 * x * dy.to(tl.float32))


@triton.jit
def relu2_forward(x_ptr, y_ptr, num, BLOCK: tl.constexpr):
    """Whole blocks need no mask, and have wide accesses whatever the number of elements is a multiple of."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= num:
        tl.store(y_ptr + at, squared(tl.load(x_ptr + at)).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + at, mask=at < num, other=0.0)
        tl.store(y_ptr + at, squared(x).to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def relu2_backward(dy_ptr, x_ptr, dx_ptr, num, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= num:
        dx = slope_of(tl.load(x_ptr + at), tl.load(dy_ptr + at))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + at, mask=at < num, other=0.0)
        dy = tl.load(dy_ptr + at, mask=at < num, other=0.0)
        tl.store(dx_ptr + at, slope_of(x, dy).to(dx_ptr.dtype.element_ty), mask=at < num)
