"""RMSNorm on the device: rows normalized by their root mean square, with the residual add fused in.

Shapes: R rows, C columns (the normalized dim), P programs. A program holds whole rows, ROWS at a time.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import (
    column_part,
    ends_of,
    let_next_start,
    load_part,
    load_whole,
    row_lead,
    row_start,
    share_pitch,
    store_part,
    store_whole,
    wait_for_last,
    whole_part,
)
from ridgeline.kernels.function import jit


@jit
def rms_norm_forward(
    x_ptr,  # [R, C], rows x_stride apart
    residual_ptr,  # [R, C]
    weight_ptr,  # [C]
    y_ptr,  # [R, C]
    h_ptr,  # [R, C] x + residual
    rstd_ptr,  # [R] fp32
    rows,
    cols,
    x_stride,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
    READS: tl.constexpr,  # what the L2 is told of what is read and written
    WRITES: tl.constexpr,
    EARLY: tl.constexpr,  # the weight is asked for with the row, not when its sum is known
):
    """A program holds ROWS rows in CHUNKS pieces of BLOCK columns, so that registers fit rows of any length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)  # vectors are read in the layout of the tile
    there = row < rows
    lead = 0
    if UNALIGNED:
        lead = row_lead(row, cols, VECTOR)
    end = lead + cols
    at = row_start(row, cols, UNALIGNED, VECTOR) + col
    x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
    held, more, weights = (), (), ()
    if HAS_WEIGHT and EARLY:
        for i in tl.static_range(CHUNKS):
            weights = weights + (column_part(weight_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
    for i in tl.static_range(CHUNKS):  # all is asked for before anything is written, which no read may overtake
        c = i * BLOCK + col
        held = held + (load_part(x_at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS),)
        if HAS_RESIDUAL:
            add_at = residual_ptr + at + i * BLOCK
            more = more + (load_part(add_at, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS),)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    wide = ()
    for i in tl.static_range(CHUNKS):
        x = held[i].to(tl.float32)  # type: ignore[var-annotated]
        if HAS_RESIDUAL:
            # Rounded as stored: the backward pass sees the very numbers that were normalized.
            h = (x + more[i].to(tl.float32)).to(h_ptr.dtype.element_ty)
            to = h_ptr + at + i * BLOCK
            store_part(to, h, i * BLOCK + col, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES)
            x = h.to(tl.float32)
        squares += x * x
        wide = wide + (x,)
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / cols + eps)
    if SAVE:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    # Pieces of the weight that are asked for before one of the result is written: sixteen warps have no registers left.
    AHEAD: tl.constexpr = 2 if BLOCK < 4096 else 1
    for i in tl.static_range(0 if EARLY else AHEAD):
        if HAS_WEIGHT and i < CHUNKS:
            weights = weights + (column_part(weight_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        if HAS_WEIGHT and not EARLY and i + AHEAD < CHUNKS:
            weights = weights + (column_part(weight_ptr, c + AHEAD * BLOCK, lead, end, UNALIGNED),)
        y = wide[i] * rstd
        if HAS_WEIGHT:
            y *= weights[i].to(tl.float32) + offset
        y = y.to(y_ptr.dtype.element_ty)
        store_part(y_ptr + at + i * BLOCK, y, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES)


@jit
def rms_norm_forward_apart(
    x_ptr,
    residual_ptr,
    weight_ptr,
    copies_ptr,  # [2, VECTOR, width], of which the first half is used: see copy_shifted
    y_ptr,
    h_ptr,
    rstd_ptr,
    cols,
    x_stride,
    width,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # copies are made while rows are read
):
    """A row that starts inside an access of VECTOR elements, a program each and no next one: whole accesses in CHUNKS
    pieces, a few elements apart, the weight from the copy that starts where the row's whole accesses do."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    at = (row * cols + lead) // VECTOR * VECTOR + col
    x_at = x_ptr + (row * x_stride + lead) // VECTOR * VECTOR + col
    tail = tl.load(x_ptr + row * x_stride + end_at, mask=own, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        more_ends = tl.load(residual_ptr + row * cols + end_at, mask=own, other=0.0).to(tl.float32)
    held, more = (), ()
    for i in tl.static_range(CHUNKS):  # all is asked for before anything is written, which no read may overtake
        c = i * BLOCK + col
        held = held + (load_whole(x_at + i * BLOCK, c, whole, i, CHUNKS, 0.0, READS),)
        if HAS_RESIDUAL:
            more = more + (load_whole(residual_ptr + at + i * BLOCK, c, whole, i, CHUNKS, 0.0, READS),)
    if HAS_RESIDUAL:
        h_ends = (tail + more_ends).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * cols + end_at, h_ends, mask=own)
        tail = h_ends.to(tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    wide = ()
    for i in tl.static_range(CHUNKS):
        x = held[i].to(tl.float32)  # type: ignore[var-annotated]
        if HAS_RESIDUAL:
            h = (x + more[i].to(tl.float32)).to(h_ptr.dtype.element_ty)
            store_whole(h_ptr + at + i * BLOCK, h, i * BLOCK + col, whole, i, CHUNKS)
            x = h.to(tl.float32)
        squares += x * x
        wide = wide + (x,)
    rstd = tl.rsqrt((tl.sum(squares, axis=0) + tl.sum(tail * tail, axis=0)) / cols + eps)
    if SAVE:
        tl.store(rstd_ptr + row, rstd)
    wait_for_last(DEPENDENT)
    copy = copies_ptr + lead * width // VECTOR * VECTOR + col
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        y = wide[i] * rstd
        if HAS_WEIGHT:
            y *= load_whole(copy + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32) + offset
        store_whole(y_ptr + at + i * BLOCK, y.to(y_ptr.dtype.element_ty), c, whole, i, CHUNKS)
    y = tail * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + end_at, mask=own, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + row * cols + end_at, y.to(y_ptr.dtype.element_ty), mask=own)


@jit
def rms_norm_forward_long(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    rows,
    cols,
    x_stride,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows that do not fit in registers: read once for the sum and once more, from the L2, for the result."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_RESIDUAL:
            h = x + tl.load(residual_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
            h = h.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row * cols + c, h, mask=c < cols)
            x = h.to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=0) / cols + eps)
    if SAVE:
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, cols, BLOCK):
        c = start + col
        if HAS_RESIDUAL:
            # The same thread wrote these elements: program order makes them visible to it.
            x = tl.load(h_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
        y = x * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32) + offset
        tl.store(y_ptr + row * cols + c, y.to(y_ptr.dtype.element_ty), mask=c < cols)


@jit
def rms_norm_backward(
    dy_ptr,  # [R, C]
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C]
    rstd_ptr,  # [R] fp32
    dh_ptr,  # [R, C] gradient that reaches x + residual past the norm
    dx_ptr,  # [R, C]
    dw_ptr,  # [P, C] fp32, unaligned rows share_pitch(C) apart: each program's share of the weight's gradient
    rows,
    cols,
    x_stride,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    WANT_DW: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
):
    """A program walks over tiles of rows with a stride of the grid; the next tiles are on their way meanwhile.

    Where rows are unaligned, a tile is one row and the grid a multiple of VECTOR: all rows of a program start
    at the same place of an access, and columns stay where they are in registers.
    """
    lead = 0
    if UNALIGNED:
        lead = row_lead(tl.program_id(0), cols, VECTOR)
    end = lead + cols
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)  # vectors are read in the layout of the tile
    first_row = tl.arange(0, BLOCK)[None, :]
    shares = ()
    weights = ()
    for i in tl.static_range(CHUNKS):
        shares = shares + (tl.zeros([ROWS, BLOCK], tl.float32),)
        if HAS_WEIGHT and KEEP_WEIGHT:
            c = i * BLOCK + col
            w = tl.load(weight_ptr + c - lead, mask=(c >= lead) & (c < end) if UNALIGNED else c < cols, other=0.0)
            weights = weights + (w.to(tl.float32) + offset,)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        at = row_start(row, cols, UNALIGNED, VECTOR) + col
        x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        grads = ()
        normed = ()
        updated = ()
        along = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            x = load_part(x_at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(tl.float32)
            n = x * rstd
            g = load_part(dy_ptr + at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(tl.float32)
            if WANT_DW:
                updated = updated + (shares[i] + g * n,)
            if HAS_WEIGHT:
                if KEEP_WEIGHT:
                    g *= weights[i]
                else:
                    w = tl.load(
                        weight_ptr + c - lead, mask=(c >= lead) & (c < end) if UNALIGNED else c < cols, other=0.0
                    )
                    g *= w.to(tl.float32) + offset
            along += g * n
            grads = grads + (g,)
            normed = normed + (n,)
        if WANT_DW:
            shares = updated
        mean = tl.sum(along, axis=1, keep_dims=True) / cols
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            dx = (grads[i] - normed[i] * mean) * rstd
            if HAS_DH:
                dx += load_part(dh_ptr + at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(
                    tl.float32
                )
            dx = dx.to(dx_ptr.dtype.element_ty)
            store_part(dx_ptr + at + i * BLOCK, dx, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR)
    let_next_start(EARLY)
    if WANT_DW:
        pitch = share_pitch(cols) if UNALIGNED else cols
        to = dw_ptr + tl.program_id(0).to(tl.int64) * pitch + first_row - lead
        for i in tl.static_range(CHUNKS):
            share = tl.sum(shares[i], axis=0)[None, :]
            c = i * BLOCK + first_row
            tl.store(to + i * BLOCK, share, mask=(c >= lead) & (c < end) if UNALIGNED else c < cols)


@jit
def rms_norm_backward_long(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dh_ptr,
    dx_ptr,
    rows,
    cols,
    x_stride,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of rows that do not fit in registers: one program a row, the second read from the L2."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32) + offset
        total += g * x
    mean = tl.sum(total, axis=0) * rstd / cols
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32) + offset
        dx = (g - x * rstd * mean) * rstd
        if HAS_DH:
            dx += tl.load(dh_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * cols + c, dx.to(dx_ptr.dtype.element_ty), mask=c < cols)


@jit
def rms_norm_weight_share(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    dw_ptr,  # [P, C]
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weight's gradient of long rows: a program takes some columns of every P-th tile of rows."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=3):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row.to(tl.int64) * cols + col, mask=inside, other=0.0).to(tl.float32)
        acc += dy * x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    share = tl.sum(acc, axis=0)[None, :]
    tl.store(dw_ptr + tl.program_id(1).to(tl.int64) * share_pitch(cols) + col, share, mask=col < cols)
