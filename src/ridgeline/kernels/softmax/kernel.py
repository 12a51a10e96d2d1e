"""Softmax on the device. Every element is read once: short rows are held by one program, long ones by several.

Shapes: R rows, C columns, S shares of a row. A held row lies in CHUNKS pieces of BLOCK columns. Rows that no set of
programs can hold, and few of them at that, are read twice, the second time from the L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
FAR = tl.constexpr(20.0)


@triton.jit
def softmax_forward(
    x_ptr,
    y_ptr,
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes every P-th tile of rows; with stages, the next tile is on its way meanwhile."""
    col = tl.arange(0, BLOCK)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        x_at = x_ptr + row.to(tl.int64) * x_stride + col
        held = ()
        top = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
        for i in tl.static_range(CHUNKS):
            inside = (row < rows) & (i * BLOCK + col < cols)
            x = tl.load(x_at + i * BLOCK, mask=inside, other=float("-inf")).to(tl.float32)
            top = tl.maximum(top, x)
            held = held + (x,)
        best = tl.max(top, axis=1, keep_dims=True)
        powers = ()
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            e = tl.exp(held[i] - best)
            total += e
            powers = powers + (e,)
        all_powers = tl.sum(total, axis=1, keep_dims=True)
        for i in tl.static_range(CHUNKS):
            inside = (row < rows) & (i * BLOCK + col < cols)
            y = (powers[i] / all_powers).to(y_ptr.dtype.element_ty)  # a product with the inverse would round twice
            tl.store(y_ptr + row.to(tl.int64) * cols + i * BLOCK + col, y, mask=inside)


@triton.jit
def sums_of(x_row, cols, offset, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Sum of exp(x − offset) and maximum of a row; threads meet only at its end."""
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_row + c, mask=c < cols, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        total += tl.exp(x - offset)
        top = tl.maximum(top, x)
    return tl.sum(total, axis=0), tl.max(top, axis=0)


@triton.jit
def softmax_forward_long(x_ptr, y_ptr, rows, cols, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """One program a row: sums relative to the largest of the first block, then a second read, from the L2.

    Where a later element is far above that, the sums are taken again, relative to the true maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_row = x_ptr + row * x_stride
    start = tl.load(x_row + col, mask=col < cols, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
    offset = tl.maximum(tl.max(start, axis=0), LOWEST)
    total, top = sums_of(x_row, cols, offset, BLOCK, STAGES)
    if top - offset > FAR:
        offset = top
        total, top = sums_of(x_row, cols, offset, BLOCK, STAGES)
    for first in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = first + col
        x = tl.load(x_row + c, mask=c < cols, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        tl.store(y_ptr + row * cols + c, (tl.exp(x - offset) / total).to(y_ptr.dtype.element_ty), mask=c < cols)


@triton.jit
def softmax_backward(dy_ptr, y_ptr, dx_ptr, rows, cols, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * cols + col
    outputs = ()
    grads = ()
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        inside = (row < rows) & (i * BLOCK + col < cols)
        y = tl.load(y_ptr + at + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
        along += y * dy
        outputs = outputs + (y,)
        grads = grads + (dy,)
    level = tl.sum(along, axis=1, keep_dims=True)
    for i in tl.static_range(CHUNKS):
        inside = (row < rows) & (i * BLOCK + col < cols)
        dx = outputs[i] * (grads[i] - level)
        tl.store(dx_ptr + at + i * BLOCK, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_long(dy_ptr, y_ptr, dx_ptr, rows, cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        y = tl.load(y_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += y * dy
    along = tl.sum(total, axis=0)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        y = tl.load(y_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + row * cols + c, (y * (dy - along)).to(dx_ptr.dtype.element_ty), mask=c < cols)


@triton.jit
def clear_words(word_ptr, num, BLOCK: tl.constexpr):
    """Zeros, which say that nobody has written yet."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(word_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < num)


@triton.jit
def word_of(high, low):
    """Two 32-bit numbers as one word, which is written and read whole: what is not zero is complete."""
    upper = high.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def words_when_there(word_ptr, k, num):
    """The words of all shares of a row, once the last of them is written."""
    words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(word_ptr + k, mask=k < num, other=1, volatile=True)
    return words


@triton.jit
def high_of(words):
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def low_of(words):
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def softmax_forward_shared(
    x_ptr,
    y_ptr,
    word_ptr,  # [R, S] maximum and sum of each share, zero at first
    rows,
    cols,
    x_stride,
    length,  # columns of a share
    num_shares,
    num_groups,
    SHARES: tl.constexpr,  # num_shares, rounded up to a power of two
    BLOCK: tl.constexpr,  # length, rounded up
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """A group of programs holds a row, a share each; they meet in global memory and write what they hold.

    All programs must be on the device at once. The next row is on its way while a program waits for the others. The
    two halves of the work are apart only where programs run one after the other.
    """
    NARROW: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    share = tl.program_id(0) % num_shares
    group = tl.program_id(0) // num_shares
    c = share * length + tl.arange(0, BLOCK)
    inside = c < tl.minimum((share + 1) * length, cols)
    k = tl.arange(0, SHARES)
    held = tl.load(x_ptr + group.to(tl.int64) * x_stride + c, mask=inside, other=float("-inf"))
    if PUBLISH:
        x = held.to(tl.float32)
        top = tl.maximum(tl.max(x, axis=0), LOWEST)
        total = tl.sum(tl.exp(x - top), axis=0)
        tl.atomic_xchg(word_ptr + group.to(tl.int64) * num_shares + share, word_of(top, total), sem="relaxed")
    row = group.to(tl.int64)
    for _ in range(group, rows, num_groups):
        after = row + num_groups
        ahead = tl.load(x_ptr + after * x_stride + c, mask=inside & (after < rows), other=float("-inf"))
        if FINISH:
            words = words_when_there(word_ptr + row * num_shares, k, num_shares)
            tops = tl.where(k < num_shares, high_of(words), LOWEST)
            best = tl.max(tops, axis=0)
            total = tl.sum(tl.where(k < num_shares, low_of(words), 0.0) * tl.exp(tops - best), axis=0)
            if NARROW:
                y = tl.exp(held.to(tl.float32) - best) * (1.0 / total)
            else:
                y = tl.exp(held.to(tl.float32) - best) / total  # a product with the inverse would round twice
            tl.store(y_ptr + row * cols + c, y.to(y_ptr.dtype.element_ty), mask=inside)
        if PUBLISH:
            x = ahead.to(tl.float32)
            top = tl.maximum(tl.max(x, axis=0), LOWEST)
            total = tl.sum(tl.exp(x - top), axis=0)
            to = word_ptr + after * num_shares + share
            tl.atomic_xchg(to, word_of(top, total), mask=after < rows, sem="relaxed")
        held = ahead
        row = after


@triton.jit
def softmax_backward_shared(
    dy_ptr,
    y_ptr,
    dx_ptr,
    word_ptr,  # [R, S] each share's sum of y·dy, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """As forward: a group of programs holds a row of the outputs and of their gradients."""
    share = tl.program_id(0) % num_shares
    group = tl.program_id(0) // num_shares
    c = share * length + tl.arange(0, BLOCK)
    inside = c < tl.minimum((share + 1) * length, cols)
    k = tl.arange(0, SHARES)
    at = group.to(tl.int64) * cols + c
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0)
    if PUBLISH:
        along = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=0)
        tl.atomic_xchg(word_ptr + group.to(tl.int64) * num_shares + share, word_of(1.0 + 0.0 * along, along),
                       sem="relaxed")  # fmt: skip
    row = group.to(tl.int64)
    for _ in range(group, rows, num_groups):
        after = row + num_groups
        y_ahead = tl.load(y_ptr + after * cols + c, mask=inside & (after < rows), other=0.0)
        dy_ahead = tl.load(dy_ptr + after * cols + c, mask=inside & (after < rows), other=0.0)
        if FINISH:
            words = words_when_there(word_ptr + row * num_shares, k, num_shares)
            level = tl.sum(tl.where(k < num_shares, low_of(words), 0.0), axis=0)
            dx = y.to(tl.float32) * (dy.to(tl.float32) - level)
            tl.store(dx_ptr + row * cols + c, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if PUBLISH:
            along = tl.sum(y_ahead.to(tl.float32) * dy_ahead.to(tl.float32), axis=0)
            to = word_ptr + after * num_shares + share
            tl.atomic_xchg(to, word_of(1.0 + 0.0 * along, along), mask=after < rows, sem="relaxed")
        y = y_ahead
        dy = dy_ahead
        row = after
