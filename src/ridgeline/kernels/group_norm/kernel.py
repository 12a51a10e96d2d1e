"""GroupNorm on the device, with SiLU fused behind it where asked.

Shapes: N samples, C channels, G groups of C/G channels, H positions (all spatial dims), S stretches of a group.
A group is one stretch of memory of (C/G)·H elements; images have few and long groups, so several programs share one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_norm_stats(
    x_ptr,  # [N·G, length]
    part_ptr,  # [3, N·G, S] fp32: count, mean and squared deviations of a stretch
    rows,
    length,
    stretch,
    num_stretches,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Moments of a stretch, relative to its first block's mean: nothing large is subtracted from anything large."""
    pid = tl.program_id(0)
    row = (pid // num_stretches).to(tl.int64)
    first = (pid % num_stretches) * stretch
    last = tl.minimum(first + stretch, length)
    col = tl.arange(0, BLOCK)
    x_row = x_ptr + row * length
    start = tl.load(x_row + first + col, mask=first + col < last, other=0.0).to(tl.float32)
    center = tl.sum(start, axis=0) / tl.minimum(last - first, BLOCK)
    off = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(first, last, BLOCK, num_stages=STAGES):
        c = at + col
        d = tl.load(x_row + c, mask=c < last, other=0.0).to(tl.float32) - center
        d = tl.where(c < last, d, 0.0)
        off += d
        squares += d * d
    count = (last - first).to(tl.float32)
    shift = tl.sum(off, axis=0) / count
    to = part_ptr + pid
    step = rows.to(tl.int64) * num_stretches
    tl.store(to, count)
    tl.store(to + step, center + shift)
    tl.store(to + 2 * step, tl.maximum(tl.sum(squares, axis=0) - shift * shift * count, 0.0))


@triton.jit
def group_norm_merge(part_ptr, mean_ptr, rstd_ptr, rows, length, num_stretches, eps, STRETCHES: tl.constexpr):
    """The stretches of one group merged into its mean and deviation."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, STRETCHES)
    at = part_ptr + row * num_stretches + s
    step = rows.to(tl.int64) * num_stretches
    count = tl.load(at, mask=s < num_stretches, other=0.0)
    means = tl.load(at + step, mask=s < num_stretches, other=0.0)
    spreads = tl.load(at + 2 * step, mask=s < num_stretches, other=0.0)
    mean = tl.sum(count * means, axis=0) / length
    off = means - mean
    var = tl.sum(spreads + count * off * off, axis=0) / length
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, tl.rsqrt(var + eps))


@triton.jit
def group_norm_apply(
    x_ptr,  # [N·C, H]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    mean_ptr,  # [N·G]
    rstd_ptr,
    y_ptr,
    channels,
    per_group,
    positions,
    blocks,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One channel's block of positions. Last things first: they were read last, and are still in the L2."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    line = pid // blocks
    at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    group = line // per_group
    channel = line % channels
    scale = tl.load(rstd_ptr + group)
    shift = -tl.load(mean_ptr + group) * scale
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + channel).to(tl.float32)
        scale *= w
        shift *= w
    if HAS_BIAS:
        shift += tl.load(bias_ptr + channel).to(tl.float32)
    x = tl.load(x_ptr + line * positions + at, mask=at < positions, other=0.0).to(tl.float32)
    y = x * scale + shift
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + line * positions + at, y.to(y_ptr.dtype.element_ty), mask=at < positions)


@triton.jit
def through_silu(dy, normed, w, b, SILU: tl.constexpr):
    """The gradient before the activation."""
    if SILU:
        z = normed * w + b
        s = 1.0 / (1.0 + tl.exp(-z))
        dy *= s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def group_norm_channel_sums(
    dy_ptr,  # [N·C, H]
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,  # [2, N·C] fp32: of dy·normed and of dy
    lines,
    channels,
    per_group,
    positions,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    group = line // per_group
    channel = line % channels
    mean = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    w = 1.0
    b = 0.0
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + channel).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias_ptr + channel).to(tl.float32)
    col = tl.arange(0, BLOCK)
    along = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, positions, BLOCK, num_stages=STAGES):
        at = start + col
        normed = (tl.load(x_ptr + line * positions + at, mask=at < positions, other=0.0).to(tl.float32) - mean) * rstd
        dy = tl.load(dy_ptr + line * positions + at, mask=at < positions, other=0.0).to(tl.float32)
        dy = through_silu(dy, normed, w, b, SILU)
        along += dy * normed
        level += dy
    tl.store(sums_ptr + line, tl.sum(along, axis=0))
    tl.store(sums_ptr + lines + line, tl.sum(level, axis=0))


@triton.jit
def group_norm_dx(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,  # [2, N·C]
    dx_ptr,
    lines,
    channels,
    per_group,
    positions,
    blocks,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One channel's block of positions; the sums of its group are a handful of numbers. Last things first."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    line = pid // blocks
    at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    group = line // per_group
    channel = line % channels
    mean = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    c = tl.arange(0, PER_GROUP)
    member = c < per_group
    along = tl.load(sums_ptr + group * per_group + c, mask=member, other=0.0)
    level = tl.load(sums_ptr + lines + group * per_group + c, mask=member, other=0.0)
    w = 1.0
    b = 0.0
    if HAS_WEIGHT:
        ws = tl.load(weight_ptr + (group * per_group) % channels + c, mask=member, other=0.0).to(tl.float32)
        along *= ws
        level *= ws
        w = tl.load(weight_ptr + channel).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias_ptr + channel).to(tl.float32)
    length = (per_group * positions).to(tl.float32)
    slope = tl.sum(along, axis=0) / length
    shift = tl.sum(level, axis=0) / length
    normed = (tl.load(x_ptr + line * positions + at, mask=at < positions, other=0.0).to(tl.float32) - mean) * rstd
    dy = tl.load(dy_ptr + line * positions + at, mask=at < positions, other=0.0).to(tl.float32)
    dy = through_silu(dy, normed, w, b, SILU)
    dx = (dy * w - normed * slope - shift) * rstd
    tl.store(dx_ptr + line * positions + at, dx.to(dx_ptr.dtype.element_ty), mask=at < positions)
