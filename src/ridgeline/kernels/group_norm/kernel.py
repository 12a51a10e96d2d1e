"""GroupNorm on the device, with SiLU fused behind it where asked.

Shapes: N samples, C channels, G groups of C/G channels, H positions (all spatial dims), S stretches of a group.
A group is one stretch of memory of (C/G)·H elements; images have few and long groups, so several programs share one.
Short groups are a program's each and are read once, whatever their channels are multiples of.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
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


@jit
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


@jit
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


@jit
def channel_part(ptr, channel, GIVEN: tl.constexpr):
    """A number a channel, as it is stored; any where there are none."""
    return tl.load(ptr + channel) if GIVEN else channel


@jit
def lines_asked(
    weight_ptr, bias_ptr, begin, member, per_group, magic, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    STRADDLE: tl.constexpr,
):  # fmt: skip
    """Of accesses that begin there in a group: their first channel, its weight and bias, and those of the next one."""
    inside = tl.umulhi(begin.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    channel = member + tl.minimum(inside, per_group - 1)
    after = member + tl.minimum(inside + 1, per_group - 1) if STRADDLE else channel
    w = channel_part(weight_ptr, channel, HAS_WEIGHT)
    b = channel_part(bias_ptr, channel, HAS_BIAS)
    return inside, w, b, channel_part(weight_ptr, after, HAS_WEIGHT), channel_part(bias_ptr, after, HAS_BIAS)


@jit
def line_of(w, b, mean, rstd, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What a channel's elements are multiplied by, and what is added then."""
    scale = (w * 0).to(tl.float32) + rstd
    if HAS_WEIGHT:
        scale = w.to(tl.float32) * rstd
    shift = -mean * scale
    if HAS_BIAS:
        shift += b.to(tl.float32)
    return scale[:, None], shift[:, None]


@jit
def lines_of(
    asked, begin, positions, mean, rstd, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, STRADDLE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Factors and shifts of accesses that begin there in a group, whose elements are of one channel or of two."""
    inside, w, b, next_w, next_b = asked
    scale, shift = line_of(w, b, mean, rstd, HAS_WEIGHT, HAS_BIAS)
    if STRADDLE:
        next_scale, next_shift = line_of(next_w, next_b, mean, rstd, HAS_WEIGHT, HAS_BIAS)
        own = tl.arange(0, VECTOR)[None, :] < ((inside + 1) * positions - begin)[:, None]
        scale = tl.where(own, scale, next_scale)
        shift = tl.where(own, shift, next_shift)
    return scale, shift


@jit
def group_norm_flat(
    x_ptr,  # [N·G, length]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,
    mean_ptr,  # [N·G] fp32
    rstd_ptr,
    length,
    groups,
    per_group,
    positions,  # VECTOR at least: an access has elements of two channels at most
    magic,  # 2³² / positions, rounded up: the upper half of a product with it is a quotient
    inverse,  # of the length
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STRADDLE: tl.constexpr,  # accesses may have elements of two channels
    CHUNKS: tl.constexpr,
    ACCESSES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A group a program, read once, wherever its channels start."""
    BLOCK: tl.constexpr = ACCESSES * VECTOR
    row = tl.program_id(0)
    first = tl.arange(0, ACCESSES) * VECTOR
    at = first[:, None] + tl.arange(0, VECTOR)[None, :]
    start = row.to(tl.int64) * length
    held = ()
    level = tl.zeros([ACCESSES, VECTOR], tl.float32)
    for i in tl.static_range(CHUNKS):
        held = held + (tl.load(x_ptr + start + i * BLOCK + at, mask=at < length - i * BLOCK, other=0.0),)
    for i in tl.static_range(CHUNKS):
        level += held[i].to(tl.float32)
    mean = tl.sum(tl.sum(level, axis=1), axis=0) * inverse
    square = tl.zeros([ACCESSES, VECTOR], tl.float32)
    for i in tl.static_range(CHUNKS):
        off = held[i].to(tl.float32) - mean
        if i == CHUNKS - 1:
            off = tl.where(at < length - i * BLOCK, off, 0.0)
        square += off * off
    rstd = tl.rsqrt(tl.sum(tl.sum(square, axis=1), axis=0) * inverse + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    member = row % groups * per_group
    asked = lines_asked(weight_ptr, bias_ptr, first, member, per_group, magic, HAS_WEIGHT, HAS_BIAS, STRADDLE)
    for i in tl.static_range(CHUNKS):
        begin = first + i * BLOCK
        scale, shift = lines_of(asked, begin, positions, mean, rstd, HAS_WEIGHT, HAS_BIAS, STRADDLE, VECTOR)
        if i + 1 < CHUNKS:  # asked for before this piece is written, which no read may overtake
            begin += BLOCK
            asked = lines_asked(weight_ptr, bias_ptr, begin, member, per_group, magic, HAS_WEIGHT, HAS_BIAS, STRADDLE)
        y = held[i].to(tl.float32) * scale + shift
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(y_ptr + start + i * BLOCK + at, y.to(y_ptr.dtype.element_ty), mask=at < length - i * BLOCK)


@jit
def group_norm_walk(
    x_ptr,  # [N·G, length]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,
    mean_ptr,  # [N·G] fp32
    rstd_ptr,
    length,
    groups,
    per_group,
    positions,
    magic,
    inverse,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STRADDLE: tl.constexpr,
    STAGES: tl.constexpr,
    ACCESSES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """As group_norm_flat, for a group that registers do not hold: it is read again at once, from the L2. Its moments
    are relative to its first block's mean: nothing large is subtracted from anything large."""
    BLOCK: tl.constexpr = ACCESSES * VECTOR
    row = tl.program_id(0)
    first = tl.arange(0, ACCESSES) * VECTOR
    at = first[:, None] + tl.arange(0, VECTOR)[None, :]
    start = row.to(tl.int64) * length
    head = tl.load(x_ptr + start + at, mask=at < length, other=0.0).to(tl.float32)
    center = tl.sum(tl.sum(head, axis=1), axis=0) / tl.minimum(length, BLOCK)
    level = tl.zeros([ACCESSES, VECTOR], tl.float32)
    square = tl.zeros([ACCESSES, VECTOR], tl.float32)
    for done in tl.range(0, length, BLOCK, num_stages=STAGES):
        there = at < length - done
        x = tl.load(x_ptr + start + done + at, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        off = tl.where(there, x - center, 0.0)
        level += off
        square += off * off
    shift_sum = tl.sum(tl.sum(level, axis=1), axis=0)
    off_mean = shift_sum * inverse
    mean = center + off_mean
    spread = tl.maximum(tl.sum(tl.sum(square, axis=1), axis=0) - shift_sum * off_mean, 0.0)
    rstd = tl.rsqrt(spread * inverse + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    member = row % groups * per_group
    for done in tl.range(0, length, BLOCK, num_stages=STAGES):
        there = at < length - done
        x = tl.load(x_ptr + start + done + at, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        begin = first + done
        asked = lines_asked(weight_ptr, bias_ptr, begin, member, per_group, magic, HAS_WEIGHT, HAS_BIAS, STRADDLE)
        scale, shift = lines_of(asked, begin, positions, mean, rstd, HAS_WEIGHT, HAS_BIAS, STRADDLE, VECTOR)
        y = x * scale + shift
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(y_ptr + start + done + at, y.to(y_ptr.dtype.element_ty), mask=there)


@jit
def through_silu(dy, normed, w, b, SILU: tl.constexpr):
    """The gradient before the activation."""
    if SILU:
        z = normed * w + b
        s = 1.0 / (1.0 + tl.exp(-z))
        dy *= s * (1.0 + z * (1.0 - s))
    return dy


@jit
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


@jit
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


@jit
def group_norm_tile(
    dy_ptr,  # [N·G, C/G, H]
    x_ptr,
    weight_ptr,  # [C]
    bias_ptr,
    mean_ptr,  # [N·G]
    rstd_ptr,
    dx_ptr,
    sums_ptr,  # [2, N·C] fp32: of dy·normed and of dy
    lines,
    groups,
    per_group,
    positions,
    inverse,  # of a group's length
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PER_GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A group of the backward pass a program, a channel a line: x and dy are read once and held."""
    row = tl.program_id(0)
    c = tl.arange(0, PER_GROUP)
    member = c < per_group
    channel = row % groups * per_group + c
    line = row.to(tl.int64) * per_group + c
    col = tl.arange(0, WIDTH)[None, :]
    start = row.to(tl.int64) * per_group * positions
    at = c[:, None] * positions + col
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    w = tl.full([PER_GROUP], 1.0, tl.float32)
    b = tl.zeros([PER_GROUP], tl.float32)
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + channel, mask=member, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias_ptr + channel, mask=member, other=0.0).to(tl.float32)
    held = ()
    for i in tl.static_range(CHUNKS):
        there = member[:, None] & (col < positions - i * WIDTH)
        x = tl.load(x_ptr + start + i * WIDTH + at, mask=there, other=0.0)
        held = held + (x, tl.load(dy_ptr + start + i * WIDTH + at, mask=there, other=0.0))
    along = tl.zeros([PER_GROUP, WIDTH], tl.float32)
    level = tl.zeros([PER_GROUP, WIDTH], tl.float32)
    grads = ()
    for i in tl.static_range(CHUNKS):
        normed = (held[2 * i].to(tl.float32) - mean) * rstd
        dy = through_silu(held[2 * i + 1].to(tl.float32), normed, w[:, None], b[:, None], SILU)
        along += dy * normed
        level += dy
        grads = grads + (dy,)
    along_sum = tl.sum(along, axis=1)
    level_sum = tl.sum(level, axis=1)
    tl.store(sums_ptr + line, along_sum, mask=member)
    tl.store(sums_ptr + lines + line, level_sum, mask=member)
    by_x = tl.sum(tl.where(member, along_sum * w, 0.0), axis=0) * inverse * rstd
    offset = tl.sum(tl.where(member, level_sum * w, 0.0), axis=0) * inverse * rstd
    for i in tl.static_range(CHUNKS):
        normed = (held[2 * i].to(tl.float32) - mean) * rstd
        dx = grads[i] * (w * rstd)[:, None] - (normed * by_x + offset)
        there = member[:, None] & (col < positions - i * WIDTH)
        tl.store(dx_ptr + start + i * WIDTH + at, dx.to(dx_ptr.dtype.element_ty), mask=there)


@jit
def group_norm_backward_walk(
    dy_ptr,  # [N·G, C/G, H]
    x_ptr,
    weight_ptr,  # [C]
    bias_ptr,
    mean_ptr,  # [N·G]
    rstd_ptr,
    dx_ptr,
    sums_ptr,  # [2, N·pieces of a channel, C] fp32: of dy·normed and of dy
    all_sums,
    groups,
    per_group,
    positions,
    inverse,  # of a group's length
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PIECES: tl.constexpr,  # of WIDTH columns, of a channel
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As group_norm_tile, for a group that registers do not hold: tile by tile, then once more at once, from the L2."""
    row = tl.program_id(0)
    c = tl.arange(0, LINES)
    col = tl.arange(0, WIDTH)[None, :]
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    member = row % groups * per_group
    start = row.to(tl.int64) * per_group * positions
    place = (row // groups).to(tl.int64) * PIECES * groups * per_group + member
    tiles = tl.cdiv(per_group, LINES) * PIECES
    slopes = tl.zeros([LINES], tl.float32)
    shifts = tl.zeros([LINES], tl.float32)
    for tile in tl.range(0, tiles):
        line = tile // PIECES * LINES + c
        piece = tile % PIECES
        own = line < per_group
        there = own[:, None] & (col < positions - piece * WIDTH)
        at = line[:, None] * positions + piece * WIDTH + col
        x = tl.load(x_ptr + start + at, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + start + at, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        w = tl.full([LINES], 1.0, tl.float32)
        b = tl.zeros([LINES], tl.float32)
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + member + line, mask=own, other=0.0).to(tl.float32)
        if HAS_BIAS:
            b = tl.load(bias_ptr + member + line, mask=own, other=0.0).to(tl.float32)
        normed = (x - mean) * rstd
        dy = through_silu(dy, normed, w[:, None], b[:, None], SILU)
        along = tl.sum(dy * normed, axis=1)
        level = tl.sum(dy, axis=1)
        to = sums_ptr + place + piece.to(tl.int64) * (groups * per_group) + line
        tl.store(to, along, mask=own)
        tl.store(to + all_sums, level, mask=own)
        slopes += tl.where(own, along * w, 0.0)
        shifts += tl.where(own, level * w, 0.0)
    by_x = tl.sum(slopes, axis=0) * inverse * rstd
    offset = tl.sum(shifts, axis=0) * inverse * rstd
    for tile in tl.range(0, tiles):
        line = tile // PIECES * LINES + c
        piece = tile % PIECES
        own = line < per_group
        there = own[:, None] & (col < positions - piece * WIDTH)
        at = line[:, None] * positions + piece * WIDTH + col
        x = tl.load(x_ptr + start + at, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + start + at, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.full([LINES], 1.0, tl.float32)
        b = tl.zeros([LINES], tl.float32)
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + member + line, mask=own, other=0.0).to(tl.float32)
        if HAS_BIAS:
            b = tl.load(bias_ptr + member + line, mask=own, other=0.0).to(tl.float32)
        normed = (x - mean) * rstd
        dy = through_silu(dy, normed, w[:, None], b[:, None], SILU)
        dx = dy * (w * rstd)[:, None] - (normed * by_x + offset)
        tl.store(dx_ptr + start + at, dx.to(dx_ptr.dtype.element_ty), mask=there)
