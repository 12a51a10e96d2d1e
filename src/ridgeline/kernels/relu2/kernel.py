"""Squared ReLU on the device, element by element."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relu2_forward(x_ptr, y_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # NaN stays one
    tl.store(y_ptr + at, (x * x).to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def relu2_backward(dy_ptr, x_ptr, dx_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    dx = tl.where(x < 0.0, 0.0, 2.0 * x * dy)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < num)
