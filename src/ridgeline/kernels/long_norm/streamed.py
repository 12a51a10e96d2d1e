"""Long rows of float32 on Hopper, in Gluon: norms, lengths and softmax of rows that pass through shared memory once.

Shapes: R rows, C columns, S shares of a row. As in ``softmax/streamed.py`` a program holds a share of a row at a time
in one of SLOTS places of shared memory while copies fill the others; programs tell each other two numbers about their
shares, and finish a row one turn later, when the others' have long arrived. All of them are on the device at once.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.row_stream import PLAIN, columns, spread, sum_of, word_of, words_when_there

NORM, MEAN_SIZE, LENGTH, SOFTMAX, LOG_SOFTMAX = (gl.constexpr(kind) for kind in range(5))
LOWEST = gl.constexpr(-3.4028234663852886e38)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon_jit
def about_share(x, c, left, num, KIND: gl.constexpr, EVEN: gl.constexpr, SIZE: gl.constexpr):
    """Two numbers about a share: mean and squares about it, the sum of sizes or squares, or the largest and the sum of
    powers. What is past its end was copied as zeros."""
    if KIND >= SOFTMAX:
        if not EVEN:
            x = gl.where(c < left, x, float("-inf"))
        a = gl.maximum(gl.max(gl.max(x, axis=0), axis=0), LOWEST)
        b = sum_of(gl.exp2((x - a) * LOG2_E), SIZE)
    elif KIND == NORM:
        a = sum_of(x, SIZE) / num
        off = x - a
        if not EVEN:
            off = gl.where(c < left, off, 0.0)
        b = sum_of(off * off, SIZE)
    else:
        a = sum_of(gl.abs(x) if KIND == MEAN_SIZE else x * x, SIZE)
        b = a
    return a, b


@gluon_jit
def about_row(k, a, b, cols, length, num_shares, eps, KIND: gl.constexpr):
    """What is taken from every element of a row and what the rest is multiplied by, or divided by of softmax."""
    real = k < num_shares
    if KIND == NORM:
        num = gl.where(real, gl.minimum(length, cols - k * length), 0).to(gl.float32)
        shift = gl.sum(gl.where(real, num * a, 0.0), axis=0) / cols
        off = gl.where(real, a - shift, 0.0)
        spread_of = gl.sum(gl.where(real, b, 0.0) + num * off * off, axis=0) / cols
        scale = gl.rsqrt(spread_of + eps)
    elif KIND >= SOFTMAX:
        shift = gl.max(gl.where(real, a, LOWEST), axis=0)
        total = gl.sum(gl.where(real, b * gl.exp2((a - shift) * LOG2_E), 0.0), axis=0)
        total = gl.where(total < 0.5, 0.0, total)  # nothing but −inf: what is left is the words' lowest bits
        scale = 1.0 / total if KIND == SOFTMAX else gl.log(total)
    else:
        total = gl.sum(gl.where(real, a, 0.0), axis=0)
        shift = 0.0
        scale = cols / total if KIND == MEAN_SIZE else 1.0 / gl.sqrt_rn(total)
    return shift, scale


@gluon_jit
def finished(x, shift, scale, KIND: gl.constexpr):
    if KIND == SOFTMAX:
        y = gl.exp2((x - shift) * LOG2_E) * scale
    elif KIND == LOG_SOFTMAX:
        y = x - shift - scale
    else:
        y = (x - shift) * scale if KIND == NORM else x * scale
    return y


@gluon_jit
def of_channels(ptr, first, c, row, positions, channels, period):
    """The numbers of a share's channels, of which it touches two at most."""
    group = (row % period).to(gl.int32) * channels
    one = first // positions
    two = gl.minimum(one + 1, channels - 1)
    a = gl.load(ptr + group + one)
    b = gl.load(ptr + group + two)
    return gl.where(c < (one + 1) * positions - first, a, b)


@gluon_jit
def long_norm_streamed(
    x_ptr,  # [R, C]
    weight_ptr,  # one a column, or one a channel of POSITIONS columns
    bias_ptr,
    y_ptr,
    word_ptr,  # [R, S] two numbers of each share, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    positions,
    channels,  # of a row
    period,  # rows after which channels begin again
    eps,
    KIND: gl.constexpr,
    WEIGHT: gl.constexpr,
    BIAS: gl.constexpr,
    CHANNELS: gl.constexpr,
    EVEN: gl.constexpr,  # every share fills its place
    MEET: gl.constexpr,  # always: shorter rows are other kernels'
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """What a share says of its row, then, one turn later, its results."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = CHUNKS * BLOCK
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    smem = gl.allocate_shared_memory(gl.float32, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    at = group.to(gl.int64) * cols + first
    step = num_groups.to(gl.int64) * cols
    word_row = word_ptr + group.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    for turn in gl.static_range(SLOTS - LAG):
        there = c < gl.where(turn < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(turn), x_ptr + at + turn * step + c, mask=there)
        async_copy.commit_group()
    for turn in range(num_turns + LAG):
        async_copy.wait_group(SLOTS - LAG - 1)
        x = smem.index(turn % SLOTS).load(L)
        a, b = about_share(x, c, left, left.to(gl.float32), KIND, EVEN, SIZE)
        if turn < num_turns:
            gl.atomic_xchg(word_row + turn * word_step + share, word_of(a, b), sem="relaxed")
        done = turn - LAG
        if done >= 0:
            k, ones, twos = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
            shift, scale = about_row(k, ones, twos, cols, length, num_shares, eps, KIND)
            before = smem.index((turn + SLOTS - LAG) % SLOTS).load(L)
            y = finished(before, shift, scale, KIND)
            row = group + done * num_groups
            if CHANNELS:
                if WEIGHT:
                    y *= of_channels(weight_ptr, first, c, row, positions, channels, period)
                if BIAS:
                    y += of_channels(bias_ptr, first, c, row, positions, channels, period)
            else:
                if WEIGHT:
                    y *= gl.load(weight_ptr + first + c, mask=c < left, other=0.0)
                if BIAS:
                    y += gl.load(bias_ptr + first + c, mask=c < left, other=0.0)
            gl.store(y_ptr + at + done * step + c, y, mask=c < left)
        ahead = done + SLOTS
        there = c < gl.where(ahead < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(ahead % SLOTS), x_ptr + at + ahead * step + c, mask=there)
        async_copy.commit_group()
