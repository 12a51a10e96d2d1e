"""The few largest elements of every row, one after another, out of registers.

An element and its place are one whole number, ordered as the element is, that of the first of equal elements being the
larger: the largest number of a row is found, written down and taken out, as often as elements are asked for. PyTorch
goes over rows of this length eight times and sorts what it has found.
Shapes: x [R, N], out [R, K].
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def ordered(x, LARGEST: tl.constexpr, WIDE: tl.constexpr):
    """Bits as a whole number that is ordered as the elements are; what is no number is larger than all."""
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        bits = tl.where(x != x, 0x7FFFFFFF, bits).to(tl.int64)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        bits = bits ^ ((bits >> 15) & 0x7FFF)
        wide = x.to(tl.float32)  # the interpreter compares bfloat16 with itself bit by bit, and finds numbers alone
        bits = tl.where(wide != wide, 0x7FFF, bits)
    return bits if LARGEST else -1 - bits


@jit
def topmost_places(
    x_ptr,
    out_ptr,
    n,
    k,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,  # elements of 32 bits, whose numbers have 64
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BN)
    x = tl.load(x_ptr + row * n + place, mask=place < n, other=0.0, eviction_policy="evict_first")
    if WIDE:
        number = (ordered(x, LARGEST, WIDE) << 32) | (0xFFFFFFFF - place.to(tl.int64))
        gone = tl.full((BN,), -0x8000000000000000, tl.int64)
    else:
        number = (ordered(x, LARGEST, WIDE) << 16) | (0xFFFF - place)
        gone = tl.full((BN,), -0x80000000, tl.int32)
    number = tl.where(place < n, number, gone)
    turn = tl.arange(0, BK)
    found = tl.zeros((BK,), tl.int64)
    for i in range(k):
        top = tl.max(number, 0)
        at = 0xFFFFFFFF - (top & 0xFFFFFFFF) if WIDE else (0xFFFF - (top & 0xFFFF)).to(tl.int64)
        found = tl.where(turn == i, at, found)
        number = tl.where(number == top, gone, number)
    tl.store(out_ptr + row * k + turn, found, mask=turn < k)
