"""Dropout and residual add on the device: the mask is a function of a seed and the position, so nobody stores it.

One call of the generator gives four words, eight numbers of 16 bits, and these are of eight elements that lie together:
a thread makes the numbers of what it reads in one access, or in two (PARTS) of four-byte elements, and nothing moves
between threads. Where each of four words was of an element far from the others, masks went through shared memory,
behind seven barriers. Philox with seven rounds; ten were two thirds of the time when a word was an element's.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

ROUNDS = tl.constexpr(7)
TOGETHER = tl.constexpr(8)


@jit
def places(counter, PART: tl.constexpr, PARTS: tl.constexpr):
    """The elements of a part of every counter."""
    WIDE: tl.constexpr = TOGETHER // PARTS
    return counter[:, None] * TOGETHER + tl.arange(0, WIDE)[None, :] + PART * WIDE


@jit
def fetched(ptr, at, num, UNALIGNED: tl.constexpr):
    """UNALIGNED: elements end inside an access, of which all is read."""
    wide: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth if UNALIGNED else 1
    return tl.load(ptr + at, mask=at // wide * wide < num, other=0.0)


@jit
def numbers(a, b, c, d, PART: tl.constexpr, PARTS: tl.constexpr, COUNTERS: tl.constexpr):
    """A part of the eight numbers of every counter: the lower and the upper half of each of its four words."""
    if PARTS == 1:
        chosen = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNTERS, 4])
    elif PART == 0:
        chosen = tl.join(a, b)
    else:
        chosen = tl.join(c, d)
    chosen = chosen.to(tl.uint32, bitcast=True)
    return tl.reshape(tl.join(chosen & 0xFFFF, chosen >> 16), [COUNTERS, TOGETHER // PARTS])


@jit
def kept(ptr, at, values, num, COUNTERS: tl.constexpr, UNALIGNED: tl.constexpr):
    """A program's results: without a mask where they are whole, so that accesses are wide wherever the last ends."""
    values = values.to(ptr.dtype.element_ty)
    if UNALIGNED:
        if (tl.program_id(0).to(tl.int64) + 1) * (COUNTERS * TOGETHER) <= num:
            tl.store(ptr + at, values)
        else:
            tl.store(ptr + at, values, mask=at < num)
    else:
        tl.store(ptr + at, values, mask=at < num)


@jit
def dropout_add_forward(
    x_ptr, residual_ptr, seed_ptr, y_ptr, num, threshold, scale, COUNTERS: tl.constexpr, PARTS: tl.constexpr,
    UNALIGNED: tl.constexpr,
):  # fmt: skip
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    seed = tl.load(seed_ptr)
    xs = ()
    residuals = ()
    for part in tl.static_range(PARTS):  # asked for before the words are made, which wait for the seed
        at = places(counter, part, PARTS)
        xs = xs + (fetched(x_ptr, at, num, UNALIGNED),)
        residuals = residuals + (fetched(residual_ptr, at, num, UNALIGNED),)
    a, b, c, d = tl.randint4x(seed, counter, ROUNDS)
    for part in tl.static_range(PARTS):
        keep = numbers(a, b, c, d, part, PARTS, COUNTERS) >= threshold.to(tl.uint32)
        y = tl.where(keep, xs[part].to(tl.float32) * scale, 0.0) + residuals[part].to(tl.float32)
        kept(y_ptr, places(counter, part, PARTS), y, num, COUNTERS, UNALIGNED)


@jit
def dropout_backward(
    dy_ptr,
    seed_ptr,
    dx_ptr,
    num,
    threshold,
    scale,
    COUNTERS: tl.constexpr,
    PARTS: tl.constexpr,
    UNALIGNED: tl.constexpr,
):
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    seed = tl.load(seed_ptr)
    dys = ()
    for part in tl.static_range(PARTS):
        dys = dys + (fetched(dy_ptr, places(counter, part, PARTS), num, UNALIGNED),)
    a, b, c, d = tl.randint4x(seed, counter, ROUNDS)
    for part in tl.static_range(PARTS):
        keep = numbers(a, b, c, d, part, PARTS, COUNTERS) >= threshold.to(tl.uint32)
        dx = tl.where(keep, dys[part].to(tl.float32) * scale, 0.0)
        kept(dx_ptr, places(counter, part, PARTS), dx, num, COUNTERS, UNALIGNED)
