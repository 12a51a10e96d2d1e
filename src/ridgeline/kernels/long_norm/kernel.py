"""Rows of a megabyte and more: several programs take a row, and read it a second time while the L2 still has it.

Each program publishes two numbers about its share of a row, goes on with the next row, and then finishes the share
before, whose row is known by then. Between its two readings of a share a program reads one other: what all of them hold
so is a fraction of the L2. All programs must be on the device at once.

Shapes: R rows, C columns, S shares of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

NORM, MEAN_SIZE, LENGTH, SOFTMAX, LOG_SOFTMAX = (tl.constexpr(kind) for kind in range(5))


@triton.jit
def clear_published(word_ptr, num, BLOCK: tl.constexpr):
    """Zeros, which say that nobody has written yet."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(word_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < num)


@triton.jit
def published(number):
    """A float32 with a bit above it, as one word, which is written and read whole: what is not zero is complete."""
    return (number.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)


@triton.jit
def read_when_there(word_ptr, k, num):
    """The numbers of all shares of a row, once the last of them is written."""
    words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def long_norm_rows(
    x_ptr,
    weight_ptr,  # one a column, or one a channel of POSITIONS columns
    bias_ptr,
    y_ptr,
    word_ptr,  # [R, 2, S], zero at first
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
            tl.atomic_xchg(word_ptr + (2 * row) * num_shares + share, published(a), sem="relaxed")
            tl.atomic_xchg(word_ptr + (2 * row + 1) * num_shares + share, published(b), sem="relaxed")
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


@triton.jit
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


@triton.jit
def finish_share(
    x_ptr, weight_ptr, bias_ptr, y_ptr, word_ptr, row, cols, first, last, num_shares, positions, channels, period, eps,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A share scaled by what its whole row says."""
    k = tl.arange(0, SHARES)
    one = read_when_there(word_ptr + (2 * row) * num_shares, k, num_shares)
    two = read_when_there(word_ptr + (2 * row + 1) * num_shares, k, num_shares)
    real = k < num_shares
    x_row = x_ptr + row * cols
    shift = 0.0
    scale = 1.0
    if KIND == NORM:
        off = tl.sum(tl.where(real, one, 0.0), 0) / cols
        spread = tl.sum(tl.where(real, two, 0.0), 0) / cols - off * off
        shift = tl.load(x_row) + off
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
    for start in range(first, last, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < last
        x = tl.load(x_row + c, mask=inside, other=0.0, eviction_policy="evict_first")
        if KIND == SOFTMAX:
            y = tl.exp(x - shift) * scale
        elif KIND == LOG_SOFTMAX:
            y = x - shift
        else:
            y = (x - shift) * scale if KIND == NORM else x * scale
        at = (row % period).to(tl.int32) * channels + c // positions if CHANNELS else c
        if WEIGHT:
            y *= tl.load(weight_ptr + at, mask=inside, other=0.0)
        if BIAS:
            y += tl.load(bias_ptr + at, mask=inside, other=0.0)
        tl.store(y_ptr + row * cols + c, y, mask=inside)
