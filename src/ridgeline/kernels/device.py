"""Pieces of device code that several kernels share."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.function import jit

USUAL = tl.constexpr("")  # what the L2 does with lines of which it is told nothing


@jit
def let_next_start(EARLY: tl.constexpr):
    """Lets the kernel launched after this one start while this one ends; that one waits for results itself."""
    if EARLY:
        gdc_launch_dependents()


@jit
def wait_for_last(DEPENDENT: tl.constexpr):
    """Until the kernel launched before this one is done and its results can be read."""
    if DEPENDENT:
        gdc_wait()


@jit
def row_start(row, stride, UNALIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """Where a row starts; where rows are unaligned, where the access begins in which it does."""
    start = row.to(tl.int64) * stride
    return start // VECTOR * VECTOR if UNALIGNED else start


@jit
def row_lead(row, stride, VECTOR: tl.constexpr):
    """How many elements of a row's first access belong to the row before."""
    return (row.to(tl.int64) * stride % VECTOR).to(tl.int32)


@jit
def load_part(
    at,
    position,
    there,
    lead,
    end,
    I: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    OTHER: tl.constexpr = 0.0,
    POLICY: tl.constexpr = USUAL,
):
    """Positions lead to end of a row, of which this is piece I of CHUNKS, and OTHER elsewhere.

    An access holds an element of the row or is not made, so that nothing is read but the neighbors' elements.
    """
    if UNALIGNED:
        x = tl.load(at, mask=there & (position // VECTOR * VECTOR < end), other=OTHER, eviction_policy=POLICY)
        if I == 0 or I >= CHUNKS - 2:  # a row's length less than an access more or less decides where it ends
            x = tl.where((position >= lead) & (position < end), x, OTHER)
        return x
    else:
        return tl.load(at, mask=there & (position < end), other=OTHER, eviction_policy=POLICY)


@jit
def store_part(
    to,
    value,
    position,
    there,
    lead,
    end,
    I: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr = USUAL,
):
    """Positions lead to end of a row: whole accesses at once, what is left of the first and the last one by one."""
    if UNALIGNED:
        access = position // VECTOR * VECTOR
        if I == 0 or I >= CHUNKS - 2:  # a row's length less than an access more or less decides where it ends
            whole = (access >= lead) & (access + VECTOR <= end)
            tl.store(to, value, mask=there & whole, eviction_policy=POLICY)
            tl.store(to, value, mask=there & (position >= lead) & (position < end) & (whole == 0))
        else:
            tl.store(to, value, mask=there & (access < end), eviction_policy=POLICY)
    else:
        tl.store(to, value, mask=there & (position < end), eviction_policy=POLICY)


@jit
def column_part(at, position, lead, end, UNALIGNED: tl.constexpr):
    """What a vector of columns has at positions lead to end of a row."""
    inside = (position >= lead) & (position < end) if UNALIGNED else position < end
    return tl.load(at + position - lead, mask=inside, other=0.0)


@jit
def whole_part(start, cols, VECTOR: tl.constexpr):
    """Of a row that starts inside an access: elements before its first whole access, and those in whole accesses."""
    lead = ((VECTOR - start % VECTOR) % VECTOR).to(tl.int32)
    return lead, (cols - lead) // VECTOR * VECTOR


@jit
def ends_of(lead, whole, cols, VECTOR: tl.constexpr):
    """Columns of such a row that lie in no whole access, at most VECTOR − 1 at either end, and which of them there are.

    They are loaded and stored one by one, a lane each, and what is between them needs no mask but at its end.
    """
    k = tl.arange(0, 2 * VECTOR)
    at = tl.where(k < VECTOR, k, lead + whole + k - VECTOR)
    return at, tl.where(k < VECTOR, k < lead, at < cols)


@jit
def load_whole(
    at, c, whole, I: tl.constexpr, CHUNKS: tl.constexpr, OTHER: tl.constexpr = 0.0, POLICY: tl.constexpr = USUAL
):
    """Piece I of a row's whole accesses: only the last one may end early."""
    if I == CHUNKS - 1:
        return tl.load(at, mask=c < whole, other=OTHER, eviction_policy=POLICY)
    else:
        return tl.load(at, eviction_policy=POLICY)


@jit
def store_whole(to, value, c, whole, I: tl.constexpr, CHUNKS: tl.constexpr):
    if I == CHUNKS - 1:
        tl.store(to, value, mask=c < whole)
    else:
        tl.store(to, value)


@jit
def copy_shifted(
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    copies_ptr,  # [2, V, width] weight and bias, each from its first elements on: copy k starts at element k
    cols,
    width,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers of columns as unaligned rows need them: a copy for every place where one can start, each
    of which starts with an access. A few of them stay in the caches."""
    let_next_start(EARLY)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1)
    to = copies_ptr + k * width + c
    if HAS_WEIGHT:
        tl.store(to, tl.load(weight_ptr + c + k, mask=c + k < cols, other=0.0), mask=c < width)
    if HAS_BIAS:
        b = tl.load(bias_ptr + c + k, mask=c + k < cols, other=0.0)
        tl.store(to + tl.num_programs(1) * width, b, mask=c < width)


@jit
def share_pitch(cols):
    """Numbers from one program's share of column sums to the next: shares start with an access of four."""
    return (cols + 3) // 4 * 4


@jit
def reduce_partials(
    partial_ptr,  # [1 or 2, P, C] fp32
    out_ptr,  # [C]
    second_ptr,  # [C], of the second array where there is one
    num_partials,
    cols,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNALIGNED: tl.constexpr,  # columns are no multiple of four, but shares lie as if they were
    DEPENDENT: tl.constexpr,
):
    """out[c] = sum over p of partial[p, c], in a fixed order: the second half of a deterministic column sum.

    The grid's second dimension picks one of two stacked arrays.
    """
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    pitch = share_pitch(cols) if UNALIGNED else cols
    start = partial_ptr + which * num_partials * pitch
    acc = tl.zeros([PARTS, BLOCK], tl.float32)
    wait_for_last(DEPENDENT)
    for first in range(0, num_partials, PARTS):
        at = first + part
        inside = (at[:, None] < num_partials) & (col[None, :] < pitch)  # what is past the columns is not stored
        acc += tl.load(start + at[:, None].to(tl.int64) * pitch + col[None, :], mask=inside, other=0.0)
    total = tl.sum(acc, axis=0)
    if which == 0:
        tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)
    else:
        tl.store(second_ptr + col, total.to(second_ptr.dtype.element_ty), mask=col < cols)


@jit
def clear_words(word_ptr, num, BLOCK: tl.constexpr):
    """Zeros, which say that nobody has written yet."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(word_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < num)


@jit
def write_addresses(
    table_ptr,  # [N] int64
    start,
    a00,
    a01,
    a02,
    a03,
    a04,
    a05,
    a06,
    a07,
    a08,
    a09,
    a10,
    a11,
    a12,
    a13,
    a14,
    a15,
    a16,
    a17,
    a18,
    a19,
    a20,
    a21,
    a22,
    a23,
    a24,
    a25,
    a26,
    a27,
    a28,
    a29,
    a30,
    a31,
):
    """Thirty-two addresses into a table: they travel as arguments, so that a captured graph carries them along."""
    to = table_ptr + start
    tl.store(to + 0, a00)
    tl.store(to + 1, a01)
    tl.store(to + 2, a02)
    tl.store(to + 3, a03)
    tl.store(to + 4, a04)
    tl.store(to + 5, a05)
    tl.store(to + 6, a06)
    tl.store(to + 7, a07)
    tl.store(to + 8, a08)
    tl.store(to + 9, a09)
    tl.store(to + 10, a10)
    tl.store(to + 11, a11)
    tl.store(to + 12, a12)
    tl.store(to + 13, a13)
    tl.store(to + 14, a14)
    tl.store(to + 15, a15)
    tl.store(to + 16, a16)
    tl.store(to + 17, a17)
    tl.store(to + 18, a18)
    tl.store(to + 19, a19)
    tl.store(to + 20, a20)
    tl.store(to + 21, a21)
    tl.store(to + 22, a22)
    tl.store(to + 23, a23)
    tl.store(to + 24, a24)
    tl.store(to + 25, a25)
    tl.store(to + 26, a26)
    tl.store(to + 27, a27)
    tl.store(to + 28, a28)
    tl.store(to + 29, a29)
    tl.store(to + 30, a30)
    tl.store(to + 31, a31)
