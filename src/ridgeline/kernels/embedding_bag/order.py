"""Rows of indices put in order on the device, equal ones as they stood: few by counting pairs, many digit by digit.

PyTorch's sort is a dozen launches from Python, for keys of 32 bits whatever the tables' size; these are one, or two or
three for every eight bits that rows have, and calls that launch nothing else repeat themselves without Python.
Shapes: N indices, C blocks of them, BINS values of a digit.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import let_next_start, wait_for_last
from ridgeline.kernels.function import jit


@jit
def embedding_pairs(
    key_ptr,  # [N]
    bag_ptr,  # [N] i32
    sorted_ptr,  # [N]
    order_ptr,  # [N] i32: where each sorted key stood, or its bag
    num_indices,
    num_rows,
    BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A key's place is how many are smaller, and how many before it are equal. BLOCK divides WIDE."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
    first = tl.program_id(0) * BLOCK
    mine = first + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + mine, mask=mine < num_indices, other=0)
    lane = tl.arange(0, WIDE)
    middle = first // WIDE * WIDE
    below = tl.zeros([BLOCK, WIDE], tl.int32)
    for start in range(0, middle, WIDE):
        other = tl.load(key_ptr + start + lane)
        below += (other[None, :] <= key[:, None]).to(tl.int32)
    at = middle + lane
    other = tl.load(key_ptr + at, mask=at < num_indices, other=num_rows + 1)  # more than any key
    equal = (other[None, :] == key[:, None]) & (at[None, :] < mine[:, None])
    below += ((other[None, :] < key[:, None]) | equal).to(tl.int32)
    for start in range(middle + WIDE, num_indices, WIDE):
        at = start + lane
        other = tl.load(key_ptr + at, mask=at < num_indices, other=num_rows + 1)
        below += (other[None, :] < key[:, None]).to(tl.int32)
    place = tl.sum(below, axis=1)
    tl.store(sorted_ptr + place, key, mask=mine < num_indices)
    told = tl.load(bag_ptr + mine, mask=mine < num_indices, other=0) if BAGS else mine
    tl.store(order_ptr + place, told, mask=mine < num_indices)


@jit
def embedding_digits(
    key_ptr,  # [N]
    count_ptr,  # [C, BINS] i32
    num_indices,
    shift,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """How often a block has each value of a digit."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + at, mask=at < num_indices, other=0)
    digit = ((key >> shift) & (BINS - 1)).to(tl.int32)
    found = tl.histogram(digit, BINS, mask=at < num_indices)
    tl.store(count_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@jit
def embedding_before(
    count_ptr,  # [C, BINS] i32
    before_ptr,  # [C, BINS] i32
    total_ptr,  # [BINS] i32
    num_blocks,
    BINS: tl.constexpr,
    SHARE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """How often the blocks before each have a value, and how often all have it: SHARE values a program."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
    bin = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    past = tl.zeros([SHARE], tl.int32)
    for first in range(0, num_blocks, AT_ONCE):
        of = first + tl.arange(0, AT_ONCE)[:, None]
        at = of * BINS + bin[None, :]
        count = tl.load(count_ptr + at, mask=of < num_blocks, other=0)
        tl.store(before_ptr + at, tl.cumsum(count, axis=0) - count + past[None, :], mask=of < num_blocks)
        past += tl.sum(count, axis=0)
    tl.store(total_ptr + bin, past)


@jit
def embedding_scatter(
    key_ptr,  # [N]
    order_ptr,  # [N] i32
    count_ptr,  # [C, BINS] i32
    before_ptr,  # [C, BINS] i32
    total_ptr,  # [BINS] i32
    sorted_ptr,  # [N]
    placed_ptr,  # [N] i32
    num_indices,
    num_blocks,
    shift,
    FIRST: tl.constexpr,
    COUNTED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block's keys by one digit: behind all smaller digits, and behind the same digit of the blocks before it, which
    are COUNTED already, or few enough to be counted by every block."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
    block = tl.program_id(0)
    bin = tl.arange(0, BINS)
    if COUNTED:
        everywhere = tl.load(total_ptr + bin)
        earlier = tl.load(before_ptr + block * BINS + bin)
    else:
        total = tl.zeros([AT_ONCE, BINS], tl.int32)
        before = tl.zeros([AT_ONCE, BINS], tl.int32)
        for first in range(0, num_blocks, AT_ONCE):
            of = first + tl.arange(0, AT_ONCE)[:, None]
            count = tl.load(count_ptr + of * BINS + bin[None, :], mask=of < num_blocks, other=0)
            total += count
            before += tl.where(of < block, count, 0)
        everywhere = tl.sum(total, axis=0)
        earlier = tl.sum(before, axis=0)
    own = tl.load(count_ptr + block * BINS + bin)
    start = tl.cumsum(everywhere, axis=0) - everywhere + earlier
    start -= tl.cumsum(own, axis=0) - own  # a key's place in its sorted block is added to this
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    key = tl.load(key_ptr + at, mask=at < num_indices, other=0)
    digit = ((key >> shift) & (BINS - 1)).to(tl.int32)
    packed = tl.sort(tl.where(at < num_indices, digit, BINS) * BLOCK + lane)
    digit = packed // BLOCK
    there = digit < BINS
    to = tl.gather(start, tl.minimum(digit, BINS - 1), 0) + lane
    source = block * BLOCK + packed % BLOCK
    tl.store(sorted_ptr + to, tl.load(key_ptr + source, mask=there, other=0), mask=there)
    placed = source
    if not FIRST:
        placed = tl.load(order_ptr + source, mask=there, other=0)
    tl.store(placed_ptr + to, placed, mask=there)
