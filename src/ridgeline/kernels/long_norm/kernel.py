"""Rows of a megabyte and more: several programs take a row, and read it a second time while the L2 still has it.

Each program publishes two numbers about its share of a row, goes on with the next row, and then finishes the share
before, whose row is known by then. Between its two readings of a share a program reads one other: what all of them hold
so is a fraction of the L2. All programs must be on the device at once. Where all of them together hold a row and the
next in registers, nothing is read twice.

Shapes: R rows, C columns, S shares of a row.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

NORM, MEAN_SIZE, LENGTH, SOFTMAX, LOG_SOFTMAX = (tl.constexpr(kind) for kind in range(5))


@jit
def clear_published(word_ptr, num, BLOCK: tl.constexpr):
    """Zeros, which say that nobody has written yet."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(word_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < num)


@jit
def tell(word_ptr, a, b):
    """Two float32 numbers as one word, which is written and read whole: what is not zero is complete. A second number
    that is zero is told as the least that is not."""
    low = b.to(tl.int32, bitcast=True)
    low = tl.where(low == 0, 1, low).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, (a.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low, sem="relaxed")


@jit
def read_when_there(word_ptr, k, num):
    """The two numbers of all shares of a row, once the last of them is written."""
    words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    one = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return one, words.to(tl.int32).to(tl.float32, bitcast=True)


@jit
def both(a, b, c, d):
    return a + c, b + d


@jit
def long_norm_rows(
    x_ptr,
    weight_ptr,  # one a column, or one a channel of POSITIONS columns
    bias_ptr,
    y_ptr,
    word_ptr,  # [R, S], zero at first
    rows,
    cols,
    length,  # of a share
    num_shares,
    num_groups,  # rows at a time
    positions,
    channels,  # of a row
    period,  # rows after which channels begin again
    eps,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,  # whether weights are of channels
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Two halves of the work, apart only where programs run one after the other."""
    share = tl.program_id(0) % num_shares
    first = share * length
    last = tl.minimum(first + length, cols)
    row = (tl.program_id(0) // num_shares).to(tl.int64)
    for turn in range(tl.program_id(0) // num_shares, rows, num_groups):
        if PUBLISH:
            a, b = about_share(x_ptr + row * cols, first, last, KIND, BLOCK)
            tell(word_ptr + row * num_shares + share, a, b)
        if FINISH and turn >= num_groups:
            finish_share(
                x_ptr, weight_ptr, bias_ptr, y_ptr, word_ptr, row - num_groups, cols, first, last, num_shares,
                positions, channels, period, eps, KIND, WEIGHT, BIAS, CHANNELS, SHARES, BLOCK,
            )  # fmt: skip
        row += num_groups
    if FINISH:
        finish_share(
            x_ptr, weight_ptr, bias_ptr, y_ptr, word_ptr, row - num_groups, cols, first, last, num_shares,
            positions, channels, period, eps, KIND, WEIGHT, BIAS, CHANNELS, SHARES, BLOCK,
        )  # fmt: skip


@jit
def about_share(x_row, first, last, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Two numbers about a share: sums about the row's first element, sizes, squares, or largest and exponentials."""
    softmax: tl.constexpr = KIND >= SOFTMAX
    one = tl.zeros([BLOCK], tl.float32)
    two = tl.zeros([BLOCK], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    origin = tl.load(x_row)
    for start in range(first, last, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < last
        if softmax:
            x = tl.load(x_row + c, mask=inside, other=float("-inf"))
            higher = tl.maximum(top, tl.max(x, 0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            one = one * tl.exp(top - shift) + tl.exp(x - shift)
            top = higher
        elif KIND == NORM:
            x = tl.where(inside, tl.load(x_row + c, mask=inside, other=0.0) - origin, 0.0)
            one += x
            two += x * x
        else:
            x = tl.load(x_row + c, mask=inside, other=0.0)
            one += tl.abs(x) if KIND == MEAN_SIZE else x * x
    return (top, tl.sum(one, 0)) if softmax else (tl.sum(one, 0), tl.sum(two, 0))


@jit
def finish_share(
    x_ptr, weight_ptr, bias_ptr, y_ptr, word_ptr, row, cols, first, last, num_shares, positions, channels, period, eps,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A share scaled by what its whole row says."""
    x_row = x_ptr + row * cols
    shift, scale = about_row(word_ptr, row, tl.load(x_row), cols, num_shares, eps, KIND, SHARES)
    for start in range(first, last, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < last
        x = tl.load(x_row + c, mask=inside, other=0.0, eviction_policy="evict_first")
        y = scaled(x, shift, scale, KIND)
        at = (row % period).to(tl.int32) * channels + c // positions if CHANNELS else c
        if WEIGHT:
            y *= tl.load(weight_ptr + at, mask=inside, other=0.0)
        if BIAS:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0)
        tl.store(y_ptr + row * cols + c, y, mask=inside)


@jit
def scaled(x, shift, scale, KIND: tl.constexpr):
    if KIND == SOFTMAX:
        y = tl.exp(x - shift) * scale
    elif KIND == LOG_SOFTMAX:
        y = x - shift
    else:
        y = (x - shift) * scale if KIND == NORM else x * scale
    return y


@jit
def about_row(word_ptr, row, origin, cols, num_shares, eps, KIND: tl.constexpr, SHARES: tl.constexpr):
    """What is taken from every element of a row and what the rest is multiplied by, once all its shares have told."""
    k = tl.arange(0, SHARES)
    one, two = read_when_there(word_ptr + row * num_shares, k, num_shares)
    real = k < num_shares
    shift = 0.0
    scale = 1.0
    if KIND == NORM:
        total, squares = tl.reduce((tl.where(real, one, 0.0), tl.where(real, two, 0.0)), 0, both)
        off = total / cols
        spread = squares / cols - off * off
        shift = origin + off
        scale = tl.rsqrt(tl.where(spread < 0, 0.0, spread) + eps)
    elif KIND == MEAN_SIZE:
        scale = cols / tl.sum(tl.where(real, one, 0.0), 0)
    elif KIND == LENGTH:
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(real, one, 0.0), 0))
    else:
        shift = tl.max(tl.where(real, one, float("-inf")), 0)
        level = tl.where(one == float("-inf"), 0.0, tl.exp(one - shift))
        total = tl.sum(tl.where(real, two * level, 0.0), 0)
        if KIND == SOFTMAX:
            scale = 1.0 / total
        else:
            shift += tl.log(total)
    return shift, scale


@jit
def long_norm_held(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    word_ptr,  # [R, S], zero at first
    rows,
    cols,
    num_shares,
    num_groups,  # rows at a time, not more than there are
    positions,
    channels,
    period,
    eps,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHARES: tl.constexpr,
    WHOLE: tl.constexpr,  # whether a share lies in one channel
    BLOCK: tl.constexpr,  # columns of a share
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """Shares that stay in registers: the next row's is on its way while that of the row before is finished."""
    EMPTY: tl.constexpr = float("-inf") if KIND >= SOFTMAX else 0.0
    share = tl.program_id(0) % num_shares
    first = share * BLOCK
    c = first + tl.arange(0, BLOCK)
    inside = c < cols
    row = (tl.program_id(0) // num_shares).to(tl.int64)
    x = tl.load(x_ptr + row * cols + c, mask=inside, other=EMPTY)
    origin = tl.load(x_ptr + row * cols)
    if PUBLISH:
        tell_share(x, origin, inside, word_ptr, row, share, num_shares, KIND)
    for _turn in range(tl.program_id(0) // num_shares + num_groups, rows, num_groups):
        later = tl.load(x_ptr + (row + num_groups) * cols + c, mask=inside, other=EMPTY)
        later_origin = tl.load(x_ptr + (row + num_groups) * cols)
        if FINISH:
            finish_held(x, origin, first, c, inside, weight_ptr, bias_ptr, y_ptr, word_ptr, row, cols, num_shares,
                        positions, channels, period, eps, KIND, WEIGHT, BIAS, CHANNELS, SHARES, WHOLE)  # fmt: skip
        if PUBLISH:
            tell_share(later, later_origin, inside, word_ptr, row + num_groups, share, num_shares, KIND)
        x = later
        origin = later_origin
        row += num_groups
    if FINISH:
        finish_held(x, origin, first, c, inside, weight_ptr, bias_ptr, y_ptr, word_ptr, row, cols, num_shares,
                    positions, channels, period, eps, KIND, WEIGHT, BIAS, CHANNELS, SHARES, WHOLE)  # fmt: skip


@jit
def tell_share(x, origin, inside, word_ptr, row, share, num_shares, KIND: tl.constexpr):
    """The two numbers about a share, as ``about_share`` has them."""
    if KIND >= SOFTMAX:
        a = tl.max(x, 0)
        b = tl.sum(tl.exp(x - tl.where(a == float("-inf"), 0.0, a)), 0)
    elif KIND == NORM:
        off = tl.where(inside, x - origin, 0.0)
        a, b = tl.reduce((off, off * off), 0, both)
    else:
        a = tl.sum(tl.abs(x) if KIND == MEAN_SIZE else x * x, 0)
        b = a
    tell(word_ptr + row * num_shares + share, a, b)


@jit
def finish_held(
    x, origin, first, c, inside, weight_ptr, bias_ptr, y_ptr, word_ptr, row, cols, num_shares, positions, channels,
    period, eps, KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr,
    SHARES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    shift, scale = about_row(word_ptr, row, origin, cols, num_shares, eps, KIND, SHARES)
    y = scaled(x, shift, scale, KIND)
    if WHOLE:
        channel = (row % period).to(tl.int32) * channels + first // positions
        y = y * tl.load(weight_ptr + channel) if WEIGHT else y
        y = y + tl.load(bias_ptr + channel) if BIAS else y
    else:
        at = (row % period).to(tl.int32) * channels + c // positions if CHANNELS else c
        y = y * tl.load(weight_ptr + at, mask=inside, other=0.0) if WEIGHT else y
        y = y + tl.load(bias_ptr + at, mask=inside, other=0.0) if BIAS else y
    tl.store(y_ptr + row * cols + c, y, mask=inside, eviction_policy="evict_first")
