"""GELU on the device, element by element: x · Φ(x), Φ the normal distribution, or PyTorch's form of it by tanh.

The library's erf takes both of its branches and some thirty instructions an element, so that PyTorch's and Inductor's
kernels compute longer than they wait for memory (74 and 71 µs for 2 × 103 MB on an H200, which moves them in 49). For
16-bit numbers a rational form of the tail is exact beyond their rounding: Φ(−a) = φ(a) · (b₁t + … + b₅t⁵), t = 1 / (1 +
p·a), within 7.5e-8 of the truth (Abramowitz and Stegun, 26.2.17). Taken from the tail, small results keep their digits.
"""

from __future__ import annotations

import os

import triton.language as tl

from ridgeline.kernels.function import jit

ERF = tl.constexpr(0)
TANH = tl.constexpr(1)
DIRECT = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Inverses and powers of two as the one instruction that each is on a GPU; compilers put checks around them."""


@jit
def inverse(x):
    """1 / x to float32's last digit but one; zero of what is infinite."""
    if DIRECT:
        x = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = 1.0 / x
    return x


@jit
def power_of_two(x):
    """2ˣ to float32's last digit but one; nothing smaller than its normal numbers."""
    if DIRECT:
        x = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = tl.exp2(x)
    return x


@jit
def tail(x):
    """Φ(−|x|) and φ(x), both as float32 has them but for 7.5e-8; zero where x is infinite."""
    t = inverse(1.0 + 0.2316419 * tl.abs(x))
    power = power_of_two(-0.7213475204444817 * (x * x))
    series = 0.7107068706716199 + t * (-0.7265760130580615 + t * 0.5307027142649737)
    return power * (t * (0.1274147958962986 + t * (-0.14224836829963933 + t * series))), 0.3989422804014327 * power


@jit
def gelu_of(x, KIND: tl.constexpr):
    """x · Φ(x) and its derivative."""
    if KIND == ERF:
        small, density = tail(x)
        share = tl.where(x < 0.0, small, 1.0 - small)
        y = x * share  # NaN stays one, and minus infinity becomes one, as in PyTorch
        slope = share + x * density
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, and as that it loses nothing where it is small
        e = power_of_two(x * (-2.302208198144325 - 0.1029432395800235 * (x * x)))
        s = inverse(1.0 + e)
        y = x * s
        # 1 - s as e·s: a difference from one would be off by its last bit, times twenty at x = 4
        slope = s + y * (tl.minimum(e, 1e34) * s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return y, slope


@jit
def forward_part(x_at, y_at, inside, KIND: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        y, _ = gelu_of(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), KIND)
        tl.store(y_at, y.to(y_at.dtype.element_ty), mask=inside)
    else:
        y, _ = gelu_of(tl.load(x_at).to(tl.float32), KIND)
        tl.store(y_at, y.to(y_at.dtype.element_ty))


@jit
def backward_part(dy_at, x_at, dx_at, inside, KIND: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        _, slope = gelu_of(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), KIND)
        dx = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx_at, dx.to(dx_at.dtype.element_ty), mask=inside)
    else:
        _, slope = gelu_of(tl.load(x_at).to(tl.float32), KIND)
        dx = tl.load(dy_at).to(tl.float32) * slope
        tl.store(dx_at, dx.to(dx_at.dtype.element_ty))


@jit
def gelu_forward(x_ptr, y_ptr, num, KIND: tl.constexpr, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    """UNALIGNED: elements end inside an access. Whole blocks have no mask then, and accesses that are as wide."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if UNALIGNED:
        if start + BLOCK <= num:
            forward_part(x_ptr + at, y_ptr + at, at < num, KIND, False)
        else:
            forward_part(x_ptr + at, y_ptr + at, at < num, KIND, True)
    else:
        forward_part(x_ptr + at, y_ptr + at, at < num, KIND, True)


@jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, num, KIND: tl.constexpr, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if UNALIGNED:
        if start + BLOCK <= num:
            backward_part(dy_ptr + at, x_ptr + at, dx_ptr + at, at < num, KIND, False)
        else:
            backward_part(dy_ptr + at, x_ptr + at, dx_ptr + at, at < num, KIND, True)
    else:
        backward_part(dy_ptr + at, x_ptr + at, dx_ptr + at, at < num, KIND, True)
