"""The selective scan on the device: chunks of steps joined pairwise in registers, the state carried between them.

Shapes: D channels, L steps, N numbers of state. A program takes CHANNELS channels of one sequence through all steps,
STEPS at a time. Two steps in a row are one step: (a₁, b₁) then (a₂, b₂) is (a₁·a₂, a₂·b₁ + b₂).
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

LOG2_E = tl.constexpr(1.4426950408889634)
FAR, LAST = tl.constexpr(20.0), tl.constexpr(87.0)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.428606765330187e-06)


@jit
def exponential(given):
    """exp(x) to a unit in the last place, between the ends of float32: the hardware's is off by up to three."""
    x = tl.minimum(tl.maximum(given, -LAST), LAST)
    power = tl.floor(x * LOG2_E + 0.5)
    r = x - power * LN2_HIGH
    r = r - power * LN2_LOW
    p = r * (1.0 / 5040.0) + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * (r * r) + r + 1.0
    p = p * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    p = tl.where(given < -LAST, 0.0, tl.where(given > LAST, float("inf"), p))
    return tl.where(given == given, p, given)  # the ends would hide what is no number


@jit
def softplus(x):
    """log(1 + exp(x)) with all its digits where it is small: through the area tangent of exp / (2 + exp)."""
    small = exponential(-tl.abs(x))
    s = tl.div_rn(small, 2.0 + small)
    square = s * s
    p = square * (1.0 / 15.0) + 1.0 / 13.0
    p = p * square + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    return tl.where((x > FAR) | (x != x), x, tl.maximum(x, 0.0) + (2.0 * s + 2.0 * s * square * p))


@jit
def joined(a_first, b_first, a_second, b_second):
    return a_first * a_second, a_second * b_first + b_second


@jit
def scan_forward(
    x_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, y_ptr, last_ptr,
    dim, length, state,
    x_batch, x_dim, x_step, delta_batch, delta_dim, delta_step, b_batch, b_state, b_step, c_batch, c_state, c_step,
    z_batch, z_dim, z_step,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr,
    SOFTPLUS: tl.constexpr, DIRECT: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, N)
    here, present = channel < dim, number < state
    rate = tl.load(a_ptr + channel[:, None] * state + number[None, :], mask=here[:, None] & present[None, :], other=0.0)
    rate = rate.to(tl.float32) * LOG2_E
    bias = tl.zeros([CHANNELS], tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + channel, mask=here, other=0.0).to(tl.float32)
    direct = tl.zeros([CHANNELS], tl.float32)
    if DIRECT:
        direct = tl.load(d_ptr + channel, mask=here, other=0.0).to(tl.float32)
    held = tl.zeros([CHANNELS, N], tl.float32)
    x_at = x_ptr + batch * x_batch + channel.to(tl.int64)[:, None] * x_dim
    delta_at = delta_ptr + batch * delta_batch + channel.to(tl.int64)[:, None] * delta_dim
    z_at = z_ptr + batch * z_batch + channel.to(tl.int64)[:, None] * z_dim
    for start in range(0, length, STEPS):
        step = start + tl.arange(0, STEPS)
        inside = here[:, None] & (step < length)[None, :]
        far = step.to(tl.int64)
        delta = tl.load(delta_at + far[None, :] * delta_step, mask=inside, other=0.0).to(tl.float32) + bias[:, None]
        if SOFTPLUS:
            delta = softplus(delta)
        delta = tl.where(inside, delta, 0.0)  # steps beyond the last change nothing
        x = tl.load(x_at + far[None, :] * x_step, mask=inside, other=0.0).to(tl.float32)
        listed = (step < length)[:, None] & present[None, :]
        b = tl.load(b_ptr + batch * b_batch + far[:, None] * b_step + number[None, :] * b_state, mask=listed, other=0.0)
        c = tl.load(c_ptr + batch * c_batch + far[:, None] * c_step + number[None, :] * c_state, mask=listed, other=0.0)
        decay = tl.exp2(delta[:, :, None] * rate[:, None, :])
        push = (delta * x)[:, :, None] * b.to(tl.float32)[None, :, :]
        decays, pushes = tl.associative_scan((decay, push), 1, joined)
        states = decays * held[:, None, :] + pushes
        y = tl.sum(states * c.to(tl.float32)[None, :, :], axis=2) + direct[:, None] * x
        if GATED:
            z = tl.load(z_at + far[None, :] * z_step, mask=inside, other=0.0).to(tl.float32)
            y = y * tl.div_rn(z, 1.0 + exponential(-z))
        y_at = y_ptr + (batch * length + far[None, :]) * dim + channel[:, None]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
        final = (tl.arange(0, STEPS) == STEPS - 1)[None, :, None]
        held = tl.sum(tl.where(final, states, 0.0), axis=1)
    last_at = last_ptr + (batch * dim + channel[:, None]) * state + number[None, :]
    tl.store(last_at, held.to(last_ptr.dtype.element_ty), mask=here[:, None] & present[None, :])
