"""Dropout and residual add on the device: the mask is a function of a seed and the position, so nobody stores it.

One call of the generator gives four words, eight numbers of 16 bits: a tile has EIGHTH counters and with each of the
eight numbers an eighth of its 8·EIGHTH elements, so that nothing moves between threads. Philox with seven rounds; ten
were two thirds of the time when a word was an element's. EIGHTH is part of what the mask is, not a launch
configuration.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

ROUNDS = tl.constexpr(7)


@jit
def fetched(ptr, at, num, SHIFTED: tl.constexpr):
    """SHIFTED: elements end inside an access, of which all is read."""
    wide: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth if SHIFTED else 1
    return tl.load(ptr + at, mask=at // wide * wide < num, other=0.0)


@jit
def placed(EIGHTH: tl.constexpr, PARTS: tl.constexpr):
    """A program's first element, its counters, and their places in the tile: all of its counters, or a part."""
    program = tl.program_id(0).to(tl.int64)
    i = (program % PARTS) * (EIGHTH // PARTS) + tl.arange(0, EIGHTH // PARTS)
    tile = program // PARTS
    return tile * (8 * EIGHTH), tile * EIGHTH + i, i


@jit
def number_of(words, J: tl.constexpr):
    """The J-th of eight numbers: the lower halves of four words, then the upper ones."""
    word = words[J % 4].to(tl.uint32, bitcast=True)
    return word >> 16 if J >= 4 else word & 0xFFFF


@jit
def kept(ptr, start, i, values, num, EIGHTH: tl.constexpr, SHIFTED: tl.constexpr):
    """A program's results: without a mask where a tile is whole, so that accesses are wide wherever the last ends."""
    if SHIFTED:
        if start + 8 * EIGHTH <= num:
            for j in tl.static_range(8):
                tl.store(ptr + start + j * EIGHTH + i, values[j].to(ptr.dtype.element_ty))
        else:
            for j in tl.static_range(8):
                at = start + j * EIGHTH + i
                tl.store(ptr + at, values[j].to(ptr.dtype.element_ty), mask=at < num)
    else:
        for j in tl.static_range(8):
            at = start + j * EIGHTH + i
            tl.store(ptr + at, values[j].to(ptr.dtype.element_ty), mask=at < num)


@jit
def dropout_add_forward(
    x_ptr, residual_ptr, seed_ptr, y_ptr, num, threshold, scale, EIGHTH: tl.constexpr, PARTS: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    start, counter, i = placed(EIGHTH, PARTS)
    seed = tl.load(seed_ptr)
    xs = ()
    residuals = ()
    for j in tl.static_range(8):  # asked for before the words are made, which wait for the seed
        xs = xs + (fetched(x_ptr, start + j * EIGHTH + i, num, SHIFTED),)
        residuals = residuals + (fetched(residual_ptr, start + j * EIGHTH + i, num, SHIFTED),)
    words = tl.randint4x(seed, counter, ROUNDS)
    ys = ()
    for j in tl.static_range(8):
        keep = number_of(words, j) >= threshold.to(tl.uint32)
        ys = ys + (tl.where(keep, xs[j].to(tl.float32) * scale, 0.0) + residuals[j].to(tl.float32),)
    kept(y_ptr, start, i, ys, num, EIGHTH, SHIFTED)


@jit
def dropout_backward(
    dy_ptr, seed_ptr, dx_ptr, num, threshold, scale, EIGHTH: tl.constexpr, PARTS: tl.constexpr, SHIFTED: tl.constexpr
):
    start, counter, i = placed(EIGHTH, PARTS)
    seed = tl.load(seed_ptr)
    dys = ()
    for j in tl.static_range(8):
        dys = dys + (fetched(dy_ptr, start + j * EIGHTH + i, num, SHIFTED),)
    words = tl.randint4x(seed, counter, ROUNDS)
    dxs = ()
    for j in tl.static_range(8):
        keep = number_of(words, j) >= threshold.to(tl.uint32)
        dxs = dxs + (tl.where(keep, dys[j].to(tl.float32) * scale, 0.0),)
    kept(dx_ptr, start, i, dxs, num, EIGHTH, SHIFTED)
