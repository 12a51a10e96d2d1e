"""GELU on the device, element by element: x · Φ(x), Φ the normal distribution, or PyTorch's form of it by tanh.

The library's erf takes both of its branches and some thirty instructions an element, so that PyTorch's and Inductor's
kernels compute longer than they wait for memory (74 and 71 µs for 2 × 103 MB on an H200, which moves them in 49). For
16-bit numbers a rational form of the tail is exact beyond their rounding: Φ(−a) = φ(a) · (b₁t + … + b₅t⁵), t = 1 / (1 +
p·a), within 7.5e-8 of the truth (Abramowitz and Stegun, 26.2.17). Taken from the tail, small results keep their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

ERF = tl.constexpr(0)
TANH = tl.constexpr(1)
FAR = tl.constexpr(13.0)
"""From here on Φ is one to float32."""


@triton.jit
def tail(a):
    """Φ(−a) and φ(a) for a ≥ 0, both as float32 has them but for 7.5e-8."""
    t = 1.0 / (1.0 + 0.2316419 * a)
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * a * a)
    series = 1.781477937 + t * (-1.821255978 + t * 1.330274429)
    return density * (t * (0.319381530 + t * (-0.356563782 + t * series))), density


@triton.jit
def gelu_of(x, KIND: tl.constexpr):
    """x · Φ(x) and its derivative."""
    if KIND == ERF:
        a = tl.abs(x)
        small, density = tail(a)
        y = tl.where(x > FAR, x, tl.where(x < 0.0, 0.0, x) - a * small)  # NaN stays one, and infinity infinite
        slope = tl.where(x < 0.0, small, 1.0 - small) + x * density
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, and as that it loses nothing where it is small
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1.0 / (1.0 + tl.exp(-u))
        y = x * s
        slope = s + y * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return y, slope


@triton.jit
def gelu_forward(x_ptr, y_ptr, num, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    y, _ = gelu_of(x, KIND)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, num, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < num, other=0.0).to(tl.float32)
    _, slope = gelu_of(x, KIND)
    tl.store(dx_ptr + at, (dy * slope).to(dx_ptr.dtype.element_ty), mask=at < num)
