"""Dropout and residual add on the device: the mask is a function of a seed and the position, so nobody stores it.

One call of the generator gives four words, eight numbers of 16 bits, and these are of eight elements that lie together:
a thread makes the numbers of what it reads in one access, and nothing moves between threads. Where each of four words
was of an element far from the others, masks went through shared memory, behind seven barriers. Philox with seven
rounds; ten were two thirds of the time when a word was an element's.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

ROUNDS = tl.constexpr(7)
TOGETHER = tl.constexpr(8)


@jit
def placed(COUNTERS: tl.constexpr):
    """A program's counters, and the elements of each."""
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    return counter, counter[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]


@jit
def fetched(ptr, at, num, SHIFTED: tl.constexpr):
    """SHIFTED: elements end inside an access, of which all is read."""
    wide: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth if SHIFTED else 1
    return tl.load(ptr + at, mask=at // wide * wide < num, other=0.0)


@jit
def numbers(seed, counter, COUNTERS: tl.constexpr):
    """Eight numbers a counter: the lower and the upper half of each of its words."""
    a, b, c, d = tl.randint4x(seed, counter, ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNTERS, 4]).to(tl.uint32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [COUNTERS, TOGETHER])


@jit
def kept(ptr, at, values, num, COUNTERS: tl.constexpr, SHIFTED: tl.constexpr):
    """A program's results: without a mask where they are whole, so that accesses are wide wherever the last ends."""
    values = values.to(ptr.dtype.element_ty)
    if SHIFTED:
        if (tl.program_id(0).to(tl.int64) + 1) * (COUNTERS * TOGETHER) <= num:
            tl.store(ptr + at, values)
        else:
            tl.store(ptr + at, values, mask=at < num)
    else:
        tl.store(ptr + at, values, mask=at < num)


@jit
def dropout_add_forward(
    x_ptr, residual_ptr, seed_ptr, y_ptr, num, threshold, scale, COUNTERS: tl.constexpr, SHIFTED: tl.constexpr
):
    counter, at = placed(COUNTERS)
    seed = tl.load(seed_ptr)
    x = fetched(x_ptr, at, num, SHIFTED)  # asked for before the words are made, which wait for the seed
    residual = fetched(residual_ptr, at, num, SHIFTED)
    keep = numbers(seed, counter, COUNTERS) >= threshold.to(tl.uint32)
    y = tl.where(keep, x.to(tl.float32) * scale, 0.0) + residual.to(tl.float32)
    kept(y_ptr, at, y, num, COUNTERS, SHIFTED)


@jit
def dropout_backward(
    dy_ptr, seed_ptr, dx_ptr, num, threshold, scale, COUNTERS: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    counter, at = placed(COUNTERS)
    seed = tl.load(seed_ptr)
    dy = fetched(dy_ptr, at, num, SHIFTED)
    keep = numbers(seed, counter, COUNTERS) >= threshold.to(tl.uint32)
    kept(dx_ptr, at, tl.where(keep, dy.to(tl.float32) * scale, 0.0), num, COUNTERS, SHIFTED)
