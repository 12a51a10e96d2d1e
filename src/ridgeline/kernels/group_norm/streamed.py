"""GroupNorm of large images on Hopper, in Gluon: groups pass through shared memory and are read once.

Shapes as in kernel.py; a group is a row of (C/G)·H elements, cut into S shares as softmax cuts its rows (see there).
H is a multiple of BLOCK, so that a piece of BLOCK elements lies in one channel. What bounds these kernels is
instructions (an SM issues 41 a lane while memory moves a 16-bit element of both inputs of the backward pass
and of its result): pieces are as long as a warp has of a share, groups are counted along and not divided, SiLU's slope
is computed once and waits in shared memory.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.row_stream import (
    PLAIN,
    by_piece,
    columns,
    halves,
    join_cluster,
    let_next_start,
    paired,
    sigmoid,
    sum_of,
    told_by_cluster,
    two_sigmoids,
    widened,
    word_of,
    words_when_there,
)


@gluon_jit
def piece_starts(first, CHUNKS: gl.constexpr, BLOCK: gl.constexpr, L: gl.constexpr):
    """Where in the group each piece of a share starts."""
    return first + gl.arange(0, CHUNKS, gl.SliceLayout(1, L)) * BLOCK


@gluon_jit
def channel_numbers(pointer, channel, GIVEN: gl.constexpr, OTHER: gl.constexpr):
    """One number a piece: of its channel, or the same for all."""
    if GIVEN:
        return gl.load(pointer + channel).to(gl.float32)
    return (channel * 0).to(gl.float32) + OTHER


@gluon_jit
def through_silu(dy, z, PAIRED: gl.constexpr):
    """The gradient before the activation: its slope is s + s·(z − zs)."""
    s = sigmoid(z, PAIRED)
    return dy * (s + s * (z - z * s))


@gluon_jit
def both_added(a, b, more_a, more_b):
    """Two sums at once: warps meet once for both."""
    return a + more_a, b + more_b


@gluon_jit
def further(member, hop, groups):
    """The group of a sample that is ``hop`` groups further: in the next sample where this one ends."""
    at = member + hop
    return gl.where(at >= groups, at - groups, at)


@gluon_jit
def ask_piece(x_at, place, turn, num_turns, step, access, width, I: gl.constexpr, PIECE: gl.constexpr):
    """Asks for piece I of a program's group; after its last group for nothing, which comes as zeros."""
    there = access < gl.where(turn < num_turns, width, 0) - I * PIECE
    async_copy.async_copy_global_to_shared(place, x_at + turn * step + I * PIECE, mask=there)


@gluon_jit
def group_norm_whole(
    x_ptr,  # [N·G, length of a group] of 16 bits
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,
    mean_ptr,  # [N·G] fp32
    rstd_ptr,
    rows,
    cols,
    groups,
    per_group,
    positions,  # a multiple of 8: an access lies in one channel
    eps,
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    CHUNKS: gl.constexpr,  # any number: no piece but the last is filled up
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """A group a program: it waits in shared memory and is held in registers; its place is free as soon as it is."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NUM_WARPS, 1], [1, 0])  # accesses, words of one
    A: gl.constexpr = gl.SliceLayout(1, L)
    PIECE: gl.constexpr = BLOCK // 2
    ACCESSES: gl.constexpr = PIECE // 4
    places = ()  # one a piece: what is copied to one never waits for another
    for _ in gl.static_range(CHUNKS):
        places = places + (gl.allocate_shared_memory(gl.int32, [SLOTS, ACCESSES, 4], PLAIN),)  # type: ignore[assignment]
    start = gl.program_id(0)
    num_programs = gl.num_programs(0)
    num_turns = (rows - start + num_programs - 1) // num_programs
    width = cols // 2
    first = gl.arange(0, ACCESSES, A) * 4
    c = first[:, None] + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    access = first[:, None] + gl.zeros([ACCESSES, 4], gl.int32, L)
    x_words = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    y_words = y_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    at = start.to(gl.int64) * width + c
    step = num_programs.to(gl.int64) * width
    for turn in gl.static_range(SLOTS):
        for i in gl.static_range(CHUNKS):
            ask_piece(x_words + at, places[i].index(turn), turn, num_turns, step, access, width, i, PIECE)
        async_copy.commit_group()
    slot = start * 0
    member = start % groups
    hop = num_programs % groups
    for turn in range(num_turns):
        row = start + turn * num_programs
        async_copy.wait_group(SLOTS - 1)
        held = ()
        level = gl.zeros([ACCESSES, 4], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            low, high = halves(places[i].index(slot).load(L), BF16)
            level += low + high
            held = held + (low, high)
        for i in gl.static_range(CHUNKS):
            ask_piece(x_words + at, places[i].index(slot), turn + SLOTS, num_turns, step, access, width, i, PIECE)
        async_copy.commit_group()
        mean = sum_of(level, PIECE) / cols
        square = gl.zeros([ACCESSES, 4], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            low = held[2 * i] - mean
            high = held[2 * i + 1] - mean
            if i == CHUNKS - 1:
                low = gl.where(access < width - i * PIECE, low, 0.0)
                high = gl.where(access < width - i * PIECE, high, 0.0)
            square += low * low + high * high
        rstd = gl.rsqrt(sum_of(square, PIECE) / cols + eps)
        gl.store(mean_ptr + row, mean)
        gl.store(rstd_ptr + row, rstd)
        channel = member * per_group + gl.minimum(first * 2, cols - 1) // positions
        w = channel_numbers(weight_ptr, channel, HAS_WEIGHT, 1.0)
        b = channel_numbers(bias_ptr, channel, HAS_BIAS, 0.0)
        for i in gl.static_range(CHUNKS):
            scale = w * rstd
            shift = b - mean * scale
            if i + 1 < CHUNKS:  # asked for before this piece is written, which no read may overtake
                channel = member * per_group + gl.minimum(first * 2 + (i + 1) * BLOCK, cols - 1) // positions
                w = channel_numbers(weight_ptr, channel, HAS_WEIGHT, 1.0)
                b = channel_numbers(bias_ptr, channel, HAS_BIAS, 0.0)
            low = held[2 * i] * scale[:, None] + shift[:, None]
            high = held[2 * i + 1] * scale[:, None] + shift[:, None]
            if SILU:
                s, t = two_sigmoids(low, high)
                low *= s
                high *= t
            there = access < width - i * PIECE
            gl.store(y_words + at + turn * step + i * PIECE, paired(low, high, BF16), mask=there)
        member = further(member, hop, groups)
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)


@gluon_jit
def group_norm_streamed(
    x_ptr,  # [N·G, length of a group]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,
    mean_ptr,  # [N·G] fp32
    rstd_ptr,
    word_ptr,  # [N·G, S] mean and squared deviations of each share, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    groups,
    per_group,
    positions,
    eps,
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PAIRED: gl.constexpr,  # two sigmoids an inverse
    EVEN: gl.constexpr,  # every share fills its place
    MEET: gl.constexpr,
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Moments of a share relative to its own mean, then, one turn later where groups are shared, its results."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = by_piece(VECTOR, BLOCK, NUM_WARPS)
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    start = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - start + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    at = start.to(gl.int64) * cols + first + c
    step = num_groups.to(gl.int64) * cols
    word_row = word_ptr + start.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    inside = gl.minimum(piece_starts(first, CHUNKS, BLOCK, L), cols - 1) // positions
    member = start % groups
    hop = num_groups % groups
    for turn in gl.static_range(SLOTS - LAG):
        there = c < gl.where(turn < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(turn), x_ptr + at + turn * step, mask=there)
        async_copy.commit_group()
    for turn in range(num_turns + LAG):
        done = turn - LAG
        row = start + done * num_groups
        channel = member * per_group + inside
        member = gl.where(done >= 0, further(member, hop, groups), member)
        w = channel_numbers(weight_ptr, channel, HAS_WEIGHT, 1.0)  # long before they are needed
        b = channel_numbers(bias_ptr, channel, HAS_BIAS, 0.0)
        async_copy.wait_group(SLOTS - LAG - 1)
        x = widened(smem.index(turn % SLOTS).load(L))  # what is past the end was copied as zeros
        mean = sum_of(x, CHUNKS * BLOCK) / left
        off = x - mean
        if not EVEN:
            off = gl.where(c < left, off, 0.0)
        spreads = sum_of(off * off, CHUNKS * BLOCK)
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(mean, spreads), sem="relaxed")
            if done >= 0:
                k, means, parts = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                counts = gl.where(k < num_shares, gl.minimum(length, cols - k * length), 0).to(gl.float32)
                mean = gl.sum(counts * means, axis=0) / cols
                parts = gl.where(k < num_shares, parts + counts * (means - mean) * (means - mean), 0.0)
                spreads = gl.sum(parts, axis=0)
        if LAG:
            x = widened(smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
        rstd = gl.rsqrt(spreads / cols + eps)
        if done >= 0:
            if share == 0:
                gl.store(mean_ptr + row, mean)
                gl.store(rstd_ptr + row, rstd)
        scale = w * rstd
        shift = b - mean * scale
        y = x * scale[:, None] + shift[:, None]
        if SILU:
            y *= sigmoid(y, PAIRED)
        gl.store(y_ptr + at + done * step, y.to(y_ptr.dtype.element_ty), mask=c < gl.where(done >= 0, left, 0))
        ahead = done + SLOTS
        there = c < gl.where(ahead < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(ahead % SLOTS), x_ptr + at + ahead * step, mask=there)
        async_copy.commit_group()


@gluon_jit
def first_mean(x_ptr, NUM_WARPS: gl.constexpr):
    """The mean of a share's first 32 numbers: of n numbers, that of any 32 is at most √(n/32) deviations from that of
    all, so that squares of differences from it lose at most a factor of n/32 of float32's 2²⁴."""
    k = gl.arange(0, 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    return gl.sum(gl.load(x_ptr + k).to(gl.float32), axis=0) * (1 / 32)


@gluon_jit
def next_channel(channel, rest, whole, part, positions):
    """Where an access lies that is so many whole channels and a part further: its channel, and where in it."""
    rest += part
    over = rest >= positions
    return channel + whole + over.to(gl.int32), gl.where(over, rest - positions, rest)


@gluon_jit
def group_norm_packed(
    x_ptr,  # [N, G, length of a group] of 16 bits
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,
    mean_ptr,  # [N·G] fp32
    rstd_ptr,
    length,  # of a share, of which a group has SHARES
    per_group,
    positions,  # a multiple of 8: an access lies in one channel
    whole,  # channels in BLOCK elements, and the part of one that is left
    part,
    inverse,  # of a share's length
    eps,
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PAIRED: gl.constexpr,  # two sigmoids an inverse
    SHARES: gl.constexpr,  # programs of a group, which are a cluster
    CHUNKS: gl.constexpr,  # any number: no piece but the last is filled up
    SHARED: gl.constexpr,  # the first pieces wait in shared memory, the others in registers
    BLOCK: gl.constexpr,
    FULL: gl.constexpr,  # pieces that every share fills
    READS: gl.constexpr,  # what the L2 is told of what is read
):
    """A group or a share of it a program, asked for at once and held as it came, two numbers a word; none has a next
    group to wait for.

    Several CTAs per SM overlap: one's group comes while another's results are computed and written. Those
    of a group start together and tell each other their moments through shared memory.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NUM_WARPS, 1], [1, 0])  # accesses, words of one
    A: gl.constexpr = gl.SliceLayout(1, L)
    PIECE: gl.constexpr = BLOCK // 2
    ACCESSES: gl.constexpr = PIECE // 4
    if SHARES > 1:
        room = join_cluster(SHARES)
    places = ()
    for _ in gl.static_range(SHARED):
        places = places + (gl.allocate_shared_memory(gl.int32, [ACCESSES, 4], PLAIN),)  # type: ignore[assignment]
    member = gl.program_id(0) // SHARES
    row = gl.program_id(1) * (gl.num_programs(0) // SHARES) + member
    share = gl.program_id(0) % SHARES
    width = length // 2
    first = gl.arange(0, ACCESSES, A) * 4
    c = first[:, None] + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    access = first[:, None] + gl.zeros([ACCESSES, 4], gl.int32, L)
    start = (row.to(gl.int64) * SHARES + share) * length
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start // 8 * 4 + c
    y_at = y_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start // 8 * 4 + c
    for i in gl.static_range(SHARED):
        async_copy.async_copy_global_to_shared(places[i], x_at + i * PIECE)
    async_copy.commit_group()
    pivot = first_mean(x_ptr + start, NUM_WARPS)
    held = ()
    for i in gl.static_range(SHARED, CHUNKS):
        if i < FULL:
            held = held + (gl.load(x_at + i * PIECE, eviction_policy=READS),)  # type: ignore[assignment]
        else:
            there = access < width - i * PIECE
            held = held + (gl.load(x_at + i * PIECE, mask=there, other=0, eviction_policy=READS),)  # type: ignore[assignment]
    level = gl.zeros([ACCESSES, 4], gl.float32, L)
    square = gl.zeros([ACCESSES, 4], gl.float32, L)
    for i in gl.static_range(SHARED, CHUNKS):
        low, high = halves(held[i - SHARED], BF16)
        low -= pivot
        high -= pivot
        if i >= FULL:
            low = gl.where(access < width - i * PIECE, low, 0.0)
            high = gl.where(access < width - i * PIECE, high, 0.0)
        level += low + high
        square += low * low + high * high
    async_copy.wait_group(0)
    for i in gl.static_range(SHARED):
        low, high = halves(places[i].load(L), BF16)
        low -= pivot
        high -= pivot
        level += low + high
        square += low * low + high * high
    total, spreads = gl.reduce((level.reshape([PIECE]), square.reshape([PIECE])), 0, both_added)
    off = total * inverse
    mean = pivot + off
    spreads = (spreads - total * off) * inverse
    if SHARES > 1:
        k, means, parts = told_by_cluster(room, mean, spreads, SHARES, NUM_WARPS)
        mean = gl.sum(means, axis=0) * (1 / SHARES)
        parts += gl.where(k < SHARES, (means - mean) * (means - mean), 0.0)
        spreads = gl.sum(parts, axis=0) * (1 / SHARES)
    rstd = gl.rsqrt(spreads + eps)
    if share == 0:
        gl.store(mean_ptr + row, mean)
        gl.store(rstd_ptr + row, rstd)
    inside = share * length + first * 2
    channel = inside // positions
    rest = inside - channel * positions
    member *= per_group
    w = channel_numbers(weight_ptr, member + gl.minimum(channel, per_group - 1), HAS_WEIGHT, 1.0)
    b = channel_numbers(bias_ptr, member + gl.minimum(channel, per_group - 1), HAS_BIAS, 0.0)
    for i in gl.static_range(CHUNKS):
        scale = (w * rstd)[:, None]
        shift = b[:, None] - mean * scale
        if i + 1 < CHUNKS:  # asked for before this piece is written, which no read may overtake
            channel, rest = next_channel(channel, rest, whole, part, positions)
            at = member + gl.minimum(channel, per_group - 1)
            w = channel_numbers(weight_ptr, at, HAS_WEIGHT, 1.0)
            b = channel_numbers(bias_ptr, at, HAS_BIAS, 0.0)
        if i < SHARED:
            low, high = halves(places[i].load(L), BF16)
        else:
            low, high = halves(held[i - SHARED], BF16)
        low = low * scale + shift
        high = high * scale + shift
        if SILU:
            if PAIRED:
                s, t = two_sigmoids(low, high)
            else:
                s = sigmoid(low, False)
                t = sigmoid(high, False)
            low *= s
            high *= t
        if i < FULL:
            gl.store(y_at + i * PIECE, paired(low, high, BF16))
        else:
            gl.store(y_at + i * PIECE, paired(low, high, BF16), mask=access < width - i * PIECE)


@gluon_jit
def silu_slopes(low, high, w, b, PAIRED: gl.constexpr):
    """Slopes of SiLU behind two tiles of normed numbers, a channel a line."""
    low = low * w + b
    high = high * w + b
    if PAIRED:
        s, t = two_sigmoids(low, high)
    else:
        s = sigmoid(low, False)
        t = sigmoid(high, False)
    return s + s * (low - low * s), t + t * (high - high * t)


@gluon_jit
def group_norm_backward_packed(
    dy_ptr,  # [N, G, length] of 16 bits, as x
    x_ptr,
    weight_ptr,  # [C]
    bias_ptr,
    mean_ptr,  # [N·G]
    rstd_ptr,
    dx_ptr,
    sums_ptr,  # [2, N·pieces of a channel, C] fp32: of dy·normed and of dy
    length,  # of a group
    per_group,
    positions,  # a multiple of a piece
    inverse,  # of the length
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PAIRED: gl.constexpr,
    CHUNKS: gl.constexpr,  # accesses of a lane; a warp's are one stretch
    PER: gl.constexpr,  # of which so many are a piece, which lies in one channel
    EVEN: gl.constexpr,  # every warp has all of its pieces
    EARLY: gl.constexpr,  # the sums are added by a kernel that starts while this one ends
):
    """A group a program and no next one. x and dy wait in shared memory, so that programs need few registers and many
    share an SM; the gradient before the activation takes dy's place, in its type, as PyTorch has it. Sums of
    pieces are what the weights' gradients are made of."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NUM_WARPS, 1], [1, 0])  # warps, words of one
    PIECE: gl.constexpr = PER * 256
    member = gl.program_id(0)
    groups = gl.num_programs(0)
    sample = gl.program_id(1)
    row = sample * groups + member
    warp = gl.arange(0, NUM_WARPS, gl.SliceLayout(1, L)) * (CHUNKS * 256)
    c = (warp // 2)[:, None] + gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    own = warp[:, None] + gl.zeros([NUM_WARPS, 128], gl.int32, L)
    start = row.to(gl.int64) * length // 8 * 4
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start + c
    dy_at = dy_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start + c
    dx_at = dx_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + start + c
    places = ()
    for i in gl.static_range(CHUNKS):
        place = gl.allocate_shared_memory(gl.int32, [NUM_WARPS, 128], PLAIN)
        other = gl.allocate_shared_memory(gl.int32, [NUM_WARPS, 128], PLAIN)
        if EVEN:
            async_copy.async_copy_global_to_shared(place, x_at + i * 128)
            async_copy.async_copy_global_to_shared(other, dy_at + i * 128)
        else:
            there = own < length - i * 256
            async_copy.async_copy_global_to_shared(place, x_at + i * 128, mask=there)
            async_copy.async_copy_global_to_shared(other, dy_at + i * 128, mask=there)
        places = places + (place, other)  # type: ignore[assignment]
    async_copy.commit_group()
    mean = gl.load(mean_ptr + row)
    rstd = gl.load(rstd_ptr + row)
    pieces = positions // PIECE
    channels = groups * per_group
    all_sums = gl.num_programs(1).to(gl.int64) * pieces * channels
    slopes = gl.zeros([NUM_WARPS], gl.float32, gl.SliceLayout(1, L))
    shifts = gl.zeros([NUM_WARPS], gl.float32, gl.SliceLayout(1, L))
    async_copy.wait_group(0)
    first = warp // positions
    channel = first
    piece = (warp - channel * positions) // PIECE
    begun = piece
    for j in gl.static_range(CHUNKS // PER):
        at = member * per_group + gl.minimum(channel, per_group - 1)
        w = channel_numbers(weight_ptr, at, HAS_WEIGHT, 1.0)
        b = channel_numbers(bias_ptr, at, HAS_BIAS, 0.0)
        along = gl.zeros([NUM_WARPS, 128], gl.float32, L)
        level = gl.zeros([NUM_WARPS, 128], gl.float32, L)
        for i in gl.static_range(j * PER, (j + 1) * PER):
            low, high = halves(places[2 * i].load(L), BF16)
            low = low * rstd - mean * rstd
            high = high * rstd - mean * rstd
            dy, more = halves(places[2 * i + 1].load(L), BF16)
            if SILU:
                s, t = silu_slopes(low, high, w[:, None], b[:, None], PAIRED)
                dy *= s
                more *= t
                places[2 * i + 1].store(paired(dy, more, BF16))
            along += dy * low + more * high
            level += dy + more
        along_sum = gl.sum(along, axis=1)
        level_sum = gl.sum(level, axis=1)
        to = sums_ptr + sample.to(gl.int64) * (pieces * channels) + piece * channels + at
        gl.store(to, along_sum, mask=warp < length - j * PIECE)
        gl.store(to + all_sums, level_sum, mask=warp < length - j * PIECE)
        slopes += along_sum * w
        shifts += level_sum * w
        over = piece + 1 == pieces
        channel += over.to(gl.int32)
        piece = gl.where(over, 0, piece + 1)
    let_next_start(EARLY)
    slope, shift = gl.reduce((slopes, shifts), 0, both_added)
    by_x = slope * inverse * (rstd * rstd)
    offset = mean * by_x - shift * inverse * rstd
    gl.thread_barrier()  # what is read before it is read again behind it: kept, it would take registers
    channel = first
    piece = begun
    for j in gl.static_range(CHUNKS // PER):
        at = member * per_group + gl.minimum(channel, per_group - 1)
        scale = (channel_numbers(weight_ptr, at, HAS_WEIGHT, 1.0) * rstd)[:, None]
        for i in gl.static_range(j * PER, (j + 1) * PER):
            low, high = halves(places[2 * i].load(L), BF16)
            dy, more = halves(places[2 * i + 1].load(L), BF16)
            low = dy * scale + (offset - low * by_x)
            high = more * scale + (offset - high * by_x)
            if EVEN:
                gl.store(dx_at + i * 128, paired(low, high, BF16))
            else:
                gl.store(dx_at + i * 128, paired(low, high, BF16), mask=own < length - i * 256)
        over = piece + 1 == pieces
        channel += over.to(gl.int32)
        piece = gl.where(over, 0, piece + 1)


@gluon_jit
def within(c, col, end, STEP: gl.constexpr, BLOCK: gl.constexpr):
    """What of a share's places is before its end, and not behind the end of a piece."""
    if STEP < BLOCK:
        return (c < end) & (col < STEP)
    else:
        return c < end


@gluon_jit
def group_norm_backward_streamed(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    sums_ptr,  # [2, N·pieces of a channel, C] fp32: of dy·normed and of dy
    word_ptr,  # [N·G, S] both sums of each share, weighted, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    groups,
    per_group,
    positions,
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PAIRED: gl.constexpr,
    KEPT: gl.constexpr,  # the gradient before the activation takes dy's place, in dy's type, as PyTorch has it
    EARLY: gl.constexpr,  # the sums are added by a kernel that starts while this one ends
    STEP: gl.constexpr,  # elements of a piece, whose place has BLOCK
    MEET: gl.constexpr,
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Sums of every piece, which the weights' gradients are made of, then dx. Past the end everything is zero."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = by_piece(VECTOR, BLOCK, NUM_WARPS)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    start = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - start + num_groups - 1) // num_groups
    col = gl.arange(0, BLOCK, gl.SliceLayout(0, L))[None, :]
    c = gl.arange(0, CHUNKS, gl.SliceLayout(1, L))[:, None] * STEP + col
    at = start.to(gl.int64) * cols + first + c
    step = num_groups.to(gl.int64) * cols
    word_row = word_ptr + start.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    begins = piece_starts(first, CHUNKS, STEP, L)
    real = begins < first + left
    inside = gl.minimum(begins, cols - 1) // positions
    pieces = positions // STEP
    piece = begins % positions // STEP
    all_sums = (rows // groups).to(gl.int64) * pieces * groups * per_group
    for turn in gl.static_range(SLOTS - LAG):
        there = within(c, col, gl.where(turn < num_turns, left, 0), STEP, BLOCK)
        async_copy.async_copy_global_to_shared(x_smem.index(turn), x_ptr + at + turn * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(turn), dy_ptr + at + turn * step, mask=there)
        async_copy.commit_group()
    member = start % groups
    sample = start // groups
    hop = num_groups % groups
    leap = num_groups // groups
    channel = member * per_group + inside
    w = channel_numbers(weight_ptr, channel, HAS_WEIGHT, 1.0)
    b = channel_numbers(bias_ptr, channel, HAS_BIAS, 0.0)
    mean = gl.load(mean_ptr + start)
    rstd = gl.load(rstd_ptr + start)
    w_done = w + 0.0  # not the same values: see row_stream.py
    b_done = b + 0.0
    mean_done = mean + 0.0
    rstd_done = rstd + 0.0
    for turn in range(num_turns + LAG):
        channel = member * per_group + inside
        following = start + gl.minimum(turn + 1, num_turns - 1) * num_groups  # its numbers are asked for a turn ahead
        member_next = further(member, hop, groups)
        channel_next = member_next * per_group + inside
        w_next = channel_numbers(weight_ptr, channel_next, HAS_WEIGHT, 1.0)
        b_next = channel_numbers(bias_ptr, channel_next, HAS_BIAS, 0.0)
        mean_next = gl.load(mean_ptr + following)
        rstd_next = gl.load(rstd_ptr + following)
        async_copy.wait_group(SLOTS - LAG - 1)
        x = widened(x_smem.index(turn % SLOTS).load(L))
        dy = widened(dy_smem.index(turn % SLOTS).load(L))
        normed = x * rstd - mean * rstd
        if SILU:
            dy = through_silu(dy, normed * w[:, None] + b[:, None], PAIRED)
        along = gl.sum(dy * normed, axis=1)
        level = gl.sum(dy, axis=1)
        if turn < num_turns:
            to = sums_ptr + (sample.to(gl.int64) * pieces + piece) * (groups * per_group) + channel
            gl.store(to, along, mask=real)
            gl.store(to + all_sums, level, mask=real)
        sample += leap + (member_next < member).to(gl.int32)
        slope, shift = gl.reduce((along * w, level * w), 0, both_added)
        done = turn - LAG
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(slope, shift), sem="relaxed")
            if done >= 0:
                k, slopes, shifts = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                slope = gl.sum(gl.where(k < num_shares, slopes, 0.0), axis=0)
                shift = gl.sum(gl.where(k < num_shares, shifts, 0.0), axis=0)
        if LAG:
            if KEPT:
                dy_smem.index(turn % SLOTS).store(dy.to(dy_ptr.dtype.element_ty))
            x = widened(x_smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
            dy = widened(dy_smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
            if SILU and not KEPT:
                scale = w_done * rstd_done
                offset = b_done - mean_done * scale
                dy = through_silu(dy, x * scale[:, None] + offset[:, None], PAIRED)
        else:
            w_done = w
            mean_done = mean
            rstd_done = rstd
        by_x = slope / cols * (rstd_done * rstd_done)
        offset = mean_done * by_x - shift / cols * rstd_done
        dx = dy * (w_done * rstd_done)[:, None] + (offset - x * by_x)
        w_done = w
        b_done = b
        mean_done = mean
        rstd_done = rstd
        w = w_next
        b = b_next
        mean = mean_next
        rstd = rstd_next
        member = member_next
        written = within(c, col, gl.where(done >= 0, left, 0), STEP, BLOCK)
        gl.store(dx_ptr + at + done * step, dx.to(dx_ptr.dtype.element_ty), mask=written)
        ahead = done + SLOTS
        there = within(c, col, gl.where(ahead < num_turns, left, 0), STEP, BLOCK)
        async_copy.async_copy_global_to_shared(x_smem.index(ahead % SLOTS), x_ptr + at + ahead * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(ahead % SLOTS), dy_ptr + at + ahead * step, mask=there)
        async_copy.commit_group()
    let_next_start(EARLY)
