"""Softmax on the device. 16-bit rows of up to 12k columns forward and 24k backward are held in registers, read once.

Shapes: R rows, C columns. A held row lies in CHUNKS pieces of BLOCK columns. Longer rows are held two numbers a word or
pass through shared memory (streamed.py); where their accesses cannot be wide, they are read twice, the second time from
the L2.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import (
    ends_of,
    load_part,
    load_whole,
    row_lead,
    row_start,
    store_part,
    store_whole,
    whole_part,
)
from ridgeline.kernels.function import jit

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: rows that a mask fills with it share alike
FAR = tl.constexpr(20.0)
LOG2E = tl.constexpr(1.4426950408889634)


@jit
def power(x, top, NARROW: tl.constexpr):
    """exp(x − top); for 16-bit numbers the power of two, which is as right as they are."""
    return tl.exp2((x - top) * LOG2E) if NARROW else tl.exp(x - top)


@jit
def part_of(e, total, NARROW: tl.constexpr):
    """e / total; a product with the inverse rounds twice, which no 16-bit number shows."""
    return e * (1.0 / total) if NARROW else e / total


@jit
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
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
    READS: tl.constexpr,  # what the L2 is told of what is read and written
    WRITES: tl.constexpr,
):
    """A program takes every P-th tile of rows; with stages, the next tile is on its way meanwhile."""
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    col = tl.arange(0, BLOCK)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        lead = 0
        if UNALIGNED:
            lead = row_lead(row, cols, VECTOR)
        end = lead + cols
        x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
        y_at = y_ptr + row_start(row, cols, UNALIGNED, VECTOR) + col
        held = ()
        top = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            x = load_part(
                x_at + i * BLOCK, c, row < rows, lead, end, i, CHUNKS, UNALIGNED, VECTOR, float("-inf"), READS
            )
            x = x.to(tl.float32)
            top = tl.maximum(top, x)
            held = held + (x,)
        best = tl.maximum(tl.max(top, axis=1, keep_dims=True), LOWEST)
        powers = ()
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            e = power(held[i], best, NARROW)
            total += e
            powers = powers + (e,)
        all_powers = tl.sum(total, axis=1, keep_dims=True)
        for i in tl.static_range(CHUNKS):
            y = part_of(powers[i], all_powers, NARROW).to(y_ptr.dtype.element_ty)
            store_part(
                y_at + i * BLOCK, y, i * BLOCK + col, row < rows, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES
            )


@jit
def softmax_forward_ends(
    x_ptr,
    y_ptr,
    cols,
    x_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A row that starts inside an access of VECTOR elements: whole accesses in CHUNKS pieces, a few elements apart."""
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    ends = tl.load(x_ptr + row * x_stride + end_at, mask=own, other=float("-inf")).to(tl.float32)
    x_at = x_ptr + (row * x_stride + lead) // VECTOR * VECTOR + col
    y_at = y_ptr + (row * cols + lead) // VECTOR * VECTOR + col
    held = ()
    top = tl.full([BLOCK], LOWEST, tl.float32)
    for i in tl.static_range(CHUNKS):
        x = load_whole(x_at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS, float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
        held = held + (x,)
    best = tl.maximum(tl.max(top, axis=0), tl.max(ends, axis=0))
    powers = ()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        e = power(held[i], best, NARROW)
        total += e
        powers = powers + (e,)
    end_powers = power(ends, best, NARROW)
    all_powers = tl.sum(total, axis=0) + tl.sum(end_powers, axis=0)
    for i in tl.static_range(CHUNKS):
        y = part_of(powers[i], all_powers, NARROW).to(y_ptr.dtype.element_ty)
        store_whole(y_at + i * BLOCK, y, i * BLOCK + col, whole, i, CHUNKS)
    tl.store(y_ptr + row * cols + end_at, part_of(end_powers, all_powers, NARROW).to(y_ptr.dtype.element_ty), mask=own)


@jit
def softmax_forward_ends_shared(
    x_ptr,
    y_ptr,
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The same for several short rows a program. Behind the last row it takes that one again, and writes the same."""
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], rows - 1).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    ends = tl.load(x_ptr + row * x_stride + end_at, mask=own, other=float("-inf")).to(tl.float32)
    x_at = x_ptr + (row * x_stride + lead) // VECTOR * VECTOR + col
    y_at = y_ptr + (row * cols + lead) // VECTOR * VECTOR + col
    held = ()
    top = tl.full([ROWS, BLOCK], LOWEST, tl.float32)
    for i in tl.static_range(CHUNKS):
        x = load_whole(x_at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS, float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
        held = held + (x,)
    best = tl.maximum(tl.max(top, axis=1, keep_dims=True), tl.max(ends, axis=1, keep_dims=True))
    powers = ()
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        e = power(held[i], best, NARROW)
        total += e
        powers = powers + (e,)
    end_powers = power(ends, best, NARROW)
    all_powers = tl.sum(total, axis=1, keep_dims=True) + tl.sum(end_powers, axis=1, keep_dims=True)
    for i in tl.static_range(CHUNKS):
        y = part_of(powers[i], all_powers, NARROW).to(y_ptr.dtype.element_ty)
        store_whole(y_at + i * BLOCK, y, i * BLOCK + col, whole, i, CHUNKS)
    tl.store(y_ptr + row * cols + end_at, part_of(end_powers, all_powers, NARROW).to(y_ptr.dtype.element_ty), mask=own)


@jit
def sums_of(x_row, cols, offset, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Sum of exp(x − offset) and maximum of a row; threads meet only at its end."""
    NARROW: tl.constexpr = x_row.dtype.element_ty.primitive_bitwidth == 16
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_row + c, mask=c < cols, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        total += power(x, offset, NARROW)
        top = tl.maximum(top, x)
    return tl.sum(total, axis=0), tl.max(top, axis=0)


@jit
def softmax_forward_long(x_ptr, y_ptr, rows, cols, x_stride, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """One program a row: sums relative to the largest of the first block, then a second read, from the L2.

    Where a later element is far above that, the sums are taken again, relative to the true maximum.
    """
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
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
        y = part_of(power(x, offset, NARROW), total, NARROW)
        tl.store(y_ptr + row * cols + c, y.to(y_ptr.dtype.element_ty), mask=c < cols)


@jit
def softmax_backward(
    dy_ptr,
    y_ptr,
    dx_ptr,
    rows,
    cols,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,  # what the L2 is told of what is read and written
    WRITES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    lead = 0
    if UNALIGNED:
        lead = row_lead(row, cols, VECTOR)
    end = lead + cols
    at = row_start(row, cols, UNALIGNED, VECTOR) + col
    outputs = ()
    grads = ()
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        y = load_part(y_ptr + at + i * BLOCK, c, row < rows, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS)
        dy = load_part(dy_ptr + at + i * BLOCK, c, row < rows, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS)
        y, dy = y.to(tl.float32), dy.to(tl.float32)
        along += y * dy
        outputs = outputs + (y,)
        grads = grads + (dy,)
    level = tl.sum(along, axis=1, keep_dims=True)
    for i in tl.static_range(CHUNKS):
        dx = (outputs[i] * (grads[i] - level)).to(dx_ptr.dtype.element_ty)
        c = i * BLOCK + col
        store_part(dx_ptr + at + i * BLOCK, dx, c, row < rows, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES)


@jit
def softmax_backward_ends(
    dy_ptr,
    y_ptr,
    dx_ptr,
    cols,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    end_at = row * cols + end_at
    y_ends = tl.load(y_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    dy_ends = tl.load(dy_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    at = (row * cols + lead) // VECTOR * VECTOR + col
    outputs = ()
    grads = ()
    along = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        y = load_whole(y_ptr + at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS).to(tl.float32)
        dy = load_whole(dy_ptr + at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS).to(tl.float32)
        along += y * dy
        outputs = outputs + (y,)
        grads = grads + (dy,)
    level = tl.sum(along, axis=0) + tl.sum(y_ends * dy_ends, axis=0)
    for i in tl.static_range(CHUNKS):
        dx = (outputs[i] * (grads[i] - level)).to(dx_ptr.dtype.element_ty)
        store_whole(dx_ptr + at + i * BLOCK, dx, i * BLOCK + col, whole, i, CHUNKS)
    tl.store(dx_ptr + end_at, (y_ends * (dy_ends - level)).to(dx_ptr.dtype.element_ty), mask=own)


@jit
def softmax_backward_ends_shared(
    dy_ptr,
    y_ptr,
    dx_ptr,
    rows,
    cols,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], rows - 1).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    end_at = row * cols + end_at
    y_ends = tl.load(y_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    dy_ends = tl.load(dy_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    at = (row * cols + lead) // VECTOR * VECTOR + col
    outputs = ()
    grads = ()
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        y = load_whole(y_ptr + at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS).to(tl.float32)
        dy = load_whole(dy_ptr + at + i * BLOCK, i * BLOCK + col, whole, i, CHUNKS).to(tl.float32)
        along += y * dy
        outputs = outputs + (y,)
        grads = grads + (dy,)
    level = tl.sum(along, axis=1, keep_dims=True) + tl.sum(y_ends * dy_ends, axis=1, keep_dims=True)
    for i in tl.static_range(CHUNKS):
        dx = (outputs[i] * (grads[i] - level)).to(dx_ptr.dtype.element_ty)
        store_whole(dx_ptr + at + i * BLOCK, dx, i * BLOCK + col, whole, i, CHUNKS)
    tl.store(dx_ptr + end_at, (y_ends * (dy_ends - level)).to(dx_ptr.dtype.element_ty), mask=own)


@jit
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
