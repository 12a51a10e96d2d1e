"""Squared ReLU on the device, element by element."""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def squared(x):
    x = x.to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # NaN stays one
    return x * x


@jit
def sloped(x, dy):
    x = x.to(tl.float32)
    return tl.where(x < 0.0, 0.0, 2.0 * x * dy.to(tl.float32))


@jit
def forward_masked(x_at, y_at, inside):
    tl.store(y_at, squared(tl.load(x_at, mask=inside, other=0.0)).to(y_at.dtype.element_ty), mask=inside)


@jit
def backward_masked(dy_at, x_at, dx_at, inside):
    dx = sloped(tl.load(x_at, mask=inside, other=0.0), tl.load(dy_at, mask=inside, other=0.0))
    tl.store(dx_at, dx.to(dx_at.dtype.element_ty), mask=inside)


@jit
def relu2_forward(x_ptr, y_ptr, num, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    """UNALIGNED: elements end inside an access. Whole blocks have no mask then, and accesses that are as wide."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if UNALIGNED:
        if start + BLOCK <= num:
            tl.store(y_ptr + at, squared(tl.load(x_ptr + at)).to(y_ptr.dtype.element_ty))
        else:
            forward_masked(x_ptr + at, y_ptr + at, at < num)
    else:
        forward_masked(x_ptr + at, y_ptr + at, at < num)


@jit
def relu2_backward(dy_ptr, x_ptr, dx_ptr, num, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if UNALIGNED:
        if start + BLOCK <= num:
            dx = sloped(tl.load(x_ptr + at), tl.load(dy_ptr + at))
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty))
        else:
            backward_masked(dy_ptr + at, x_ptr + at, dx_ptr + at, at < num)
    else:
        backward_masked(dy_ptr + at, x_ptr + at, dx_ptr + at, at < num)
