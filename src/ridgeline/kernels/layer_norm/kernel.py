"""LayerNorm on the device: rows centered and scaled, with the residual add fused in.

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
def _add_both(a, b, more_a, more_b):
    return a + more_a, b + more_b


@jit
def sums_of(a, b, AXIS: tl.constexpr):
    """Two sums at once: warps meet once for both."""
    return tl.reduce((a, b), AXIS, _add_both, keep_dims=AXIS == 1)


@jit
def layer_norm_forward(
    x_ptr,  # [R, C], rows x_stride apart
    residual_ptr,  # [R, C]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    y_ptr,  # [R, C]
    h_ptr,  # [R, C] x + residual
    mean_ptr,  # [R] fp32
    rstd_ptr,  # [R] fp32
    rows,
    cols,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
    READS: tl.constexpr,  # what the L2 is told of what is read and written
    WRITES: tl.constexpr,
    EARLY: tl.constexpr,  # weight and bias are asked for with the row, not when its sums are known
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
    held, more, weights, biases = (), (), (), ()
    if EARLY:
        for i in tl.static_range(CHUNKS):
            if HAS_WEIGHT:
                weights = weights + (column_part(weight_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
            if HAS_BIAS:
                biases = biases + (column_part(bias_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
    for i in tl.static_range(CHUNKS):  # all is asked for before anything is written, which no read may overtake
        c = i * BLOCK + col
        held = held + (load_part(x_at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS),)
        if HAS_RESIDUAL:
            add_at = residual_ptr + at + i * BLOCK
            more = more + (load_part(add_at, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, 0.0, READS),)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    wide = ()
    for i in tl.static_range(CHUNKS):
        x = held[i].to(tl.float32)  # type: ignore[var-annotated]
        if HAS_RESIDUAL:
            h = (x + more[i].to(tl.float32)).to(h_ptr.dtype.element_ty)
            to = h_ptr + at + i * BLOCK
            store_part(to, h, i * BLOCK + col, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES)
            x = h.to(tl.float32)
        total += x
        wide = wide + (x,)
    mean = tl.sum(total, axis=1, keep_dims=True) / cols
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        centered = tl.where((c >= lead) & (c < end) if UNALIGNED else c < cols, wide[i] - mean, 0.0)
        squares += centered * centered
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / cols + eps)
    if SAVE:
        tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    # Of weight and bias a piece more is asked for before one of the result is written; of many that takes registers.
    AHEAD: tl.constexpr = 1 if CHUNKS <= 4 else 0
    for i in tl.static_range(0 if EARLY else AHEAD):
        if HAS_WEIGHT and i < CHUNKS:
            weights = weights + (column_part(weight_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
        if HAS_BIAS and i < CHUNKS:
            biases = biases + (column_part(bias_ptr, i * BLOCK + col, lead, end, UNALIGNED),)
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        if HAS_WEIGHT and not EARLY and i + AHEAD < CHUNKS:
            weights = weights + (column_part(weight_ptr, c + AHEAD * BLOCK, lead, end, UNALIGNED),)
        if HAS_BIAS and not EARLY and i + AHEAD < CHUNKS:
            biases = biases + (column_part(bias_ptr, c + AHEAD * BLOCK, lead, end, UNALIGNED),)
        y = (wide[i] - mean) * rstd
        if HAS_WEIGHT:
            y *= weights[i].to(tl.float32)
        if HAS_BIAS:
            y += biases[i].to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
        store_part(y_ptr + at + i * BLOCK, y, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR, WRITES)


@jit
def layer_norm_forward_apart(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    copies_ptr,  # [2, VECTOR, width]: see copy_shifted
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    cols,
    x_stride,
    width,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    READS: tl.constexpr,
    DEPENDENT: tl.constexpr,  # copies are made while rows are read
):
    """A row that starts inside an access of VECTOR elements, a program each and no next one: whole accesses in CHUNKS
    pieces, a few elements apart, weights from the copy that starts where the row's whole accesses do."""
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
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    wide = ()
    for i in tl.static_range(CHUNKS):
        x = held[i].to(tl.float32)  # type: ignore[var-annotated]
        if HAS_RESIDUAL:
            h = (x + more[i].to(tl.float32)).to(h_ptr.dtype.element_ty)
            store_whole(h_ptr + at + i * BLOCK, h, i * BLOCK + col, whole, i, CHUNKS)
            x = h.to(tl.float32)
        total += x
        wide = wide + (x,)
    mean = (tl.sum(total, axis=0) + tl.sum(tail, axis=0)) / cols
    for i in tl.static_range(CHUNKS):
        off = wide[i] - mean
        if i == CHUNKS - 1:
            off = tl.where(i * BLOCK + col < whole, off, 0.0)
        squares += off * off
    off = tl.where(own, tail - mean, 0.0)
    rstd = tl.rsqrt((tl.sum(squares, axis=0) + tl.sum(off * off, axis=0)) / cols + eps)
    if SAVE:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    wait_for_last(DEPENDENT)
    copy = copies_ptr + lead * width // VECTOR * VECTOR + col
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        y = (wide[i] - mean) * rstd
        if HAS_WEIGHT:
            y *= load_whole(copy + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32)
        if HAS_BIAS:
            y += load_whole(copy + VECTOR * width + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32)
        store_whole(y_ptr + at + i * BLOCK, y.to(y_ptr.dtype.element_ty), c, whole, i, CHUNKS)
    y = off * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * cols + end_at, y.to(y_ptr.dtype.element_ty), mask=own)


@jit
def layer_norm_forward_long(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    cols,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows that do not fit in registers: running mean and squared deviations merged block by block, then a second read.

    Deviations are taken from each block's own mean, so nothing large is subtracted from anything large.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    count = 0.0
    mean = 0.0
    spread = 0.0
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_RESIDUAL:
            h = x + tl.load(residual_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
            h = h.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row * cols + c, h, mask=c < cols)
            x = h.to(tl.float32)
        num = tl.minimum(cols - start, BLOCK).to(tl.float32)
        block_mean = tl.sum(x, axis=0) / num
        off = tl.where(c < cols, x - block_mean, 0.0)
        shift = block_mean - mean
        both = count + num
        mean += shift * num / both
        spread += tl.sum(off * off, axis=0) + shift * shift * count * num / both
        count = both
    rstd = tl.rsqrt(spread / cols + eps)
    if SAVE:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, cols, BLOCK):
        c = start + col
        if HAS_RESIDUAL:
            x = tl.load(h_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
        y = (x - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * cols + c, y.to(y_ptr.dtype.element_ty), mask=c < cols)


@jit
def layer_norm_backward(
    dy_ptr,  # [R, C]
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C]
    mean_ptr,  # [R] fp32
    rstd_ptr,  # [R] fp32
    dh_ptr,  # [R, C] gradient that reaches x + residual past the norm
    dx_ptr,  # [R, C]
    shares_ptr,  # [2, P, C] fp32: each program's share of the weight's and the bias's gradient
    rows,
    cols,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
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
    w_shares = ()
    b_shares = ()
    weights = ()
    for i in tl.static_range(CHUNKS):
        w_shares = w_shares + (tl.zeros([ROWS, BLOCK], tl.float32),)
        b_shares = b_shares + (tl.zeros([ROWS, BLOCK], tl.float32),)
        if HAS_WEIGHT and KEEP_WEIGHT:
            c = i * BLOCK + col
            w = tl.load(weight_ptr + c - lead, mask=(c >= lead) & (c < end) if UNALIGNED else c < cols, other=0.0)
            weights = weights + (w.to(tl.float32),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        at = row_start(row, cols, UNALIGNED, VECTOR) + col
        x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        grads = ()
        normed = ()
        w_updated = ()
        b_updated = ()
        along = tl.zeros([ROWS, BLOCK], tl.float32)
        level = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            x = load_part(x_at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(tl.float32)
            n = (x - mean) * rstd
            g = load_part(dy_ptr + at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(tl.float32)
            if WANT_DW:
                w_updated = w_updated + (w_shares[i] + g * n,)
            if WANT_DB:
                b_updated = b_updated + (b_shares[i] + g,)
            if HAS_WEIGHT:
                if KEEP_WEIGHT:
                    g *= weights[i]
                else:
                    w = tl.load(
                        weight_ptr + c - lead, mask=(c >= lead) & (c < end) if UNALIGNED else c < cols, other=0.0
                    )
                    g *= w.to(tl.float32)
            along += g * n  # g is zero outside the row, so the sums need no mask
            level += g
            grads = grads + (g,)
            normed = normed + (n,)
        if WANT_DW:
            w_shares = w_updated
        if WANT_DB:
            b_shares = b_updated
        slope, shift = sums_of(along, level, 1)
        slope, shift = slope / cols, shift / cols
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            dx = (grads[i] - normed[i] * slope - shift) * rstd
            if HAS_DH:
                dx += load_part(dh_ptr + at + i * BLOCK, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR).to(
                    tl.float32
                )
            dx = dx.to(dx_ptr.dtype.element_ty)
            store_part(dx_ptr + at + i * BLOCK, dx, c, there, lead, end, i, CHUNKS, UNALIGNED, VECTOR)
    let_next_start(EARLY)
    pitch = share_pitch(cols) if UNALIGNED else cols
    to = shares_ptr + tl.program_id(0).to(tl.int64) * pitch + first_row - lead
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + first_row
        in_cols = (c >= lead) & (c < end) if UNALIGNED else c < cols
        if WANT_DW:
            tl.store(to + i * BLOCK, tl.sum(w_shares[i], axis=0)[None, :], mask=in_cols)
        if WANT_DB:
            share = tl.sum(b_shares[i], axis=0)[None, :]
            tl.store(to + tl.num_programs(0).to(tl.int64) * pitch + i * BLOCK, share, mask=in_cols)


@jit
def layer_norm_backward_ends(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dh_ptr,
    dx_ptr,
    shares_ptr,  # [2, P, C] fp32
    rows,
    cols,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    WANT_DW: tl.constexpr,
    WANT_DB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """As forward: every P-th row, the weight and the sums of columns in registers, the ends of rows apart."""
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    lead, whole = whole_part(first * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    weights = ()
    w_shares = ()
    b_shares = ()
    for i in tl.static_range(CHUNKS):
        w_shares = w_shares + (tl.zeros([BLOCK], tl.float32),)
        b_shares = b_shares + (tl.zeros([BLOCK], tl.float32),)
        if HAS_WEIGHT:
            c = i * BLOCK + col
            weights = weights + (tl.load(weight_ptr + lead + c, mask=c < whole, other=0.0).to(tl.float32),)
    if HAS_WEIGHT:
        w_ends = tl.load(weight_ptr + end_at, mask=own, other=0.0).to(tl.float32)
    dw_ends = tl.zeros([2 * VECTOR], tl.float32)
    db_ends = tl.zeros([2 * VECTOR], tl.float32)
    here = own & (first < rows)
    x_now = tl.load(x_ptr + first * x_stride + end_at, mask=here, other=0.0)
    dy_now = tl.load(dy_ptr + first * cols + end_at, mask=here, other=0.0)
    mean_now = tl.load(mean_ptr + first, mask=first < rows, other=0.0)
    rstd_now = tl.load(rstd_ptr + first, mask=first < rows, other=0.0)
    for turn in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = first + (turn - tl.program_id(0))
        further = row + step
        x_next = tl.load(x_ptr + further * x_stride + end_at, mask=own & (further < rows), other=0.0)
        dy_next = tl.load(dy_ptr + further * cols + end_at, mask=own & (further < rows), other=0.0)
        mean_next = tl.load(mean_ptr + further, mask=further < rows, other=0.0)
        rstd_next = tl.load(rstd_ptr + further, mask=further < rows, other=0.0)
        if HAS_DH:
            dh_ends = tl.load(dh_ptr + row * cols + end_at, mask=own, other=0.0).to(tl.float32)
        mean = mean_now
        rstd = rstd_now
        at = (row * cols + lead) // VECTOR * VECTOR + col
        x_at = x_ptr + (row * x_stride + lead) // VECTOR * VECTOR + col
        n_ends = tl.where(own, (x_now.to(tl.float32) - mean) * rstd, 0.0)
        g_ends = dy_now.to(tl.float32)
        dw_ends += g_ends * n_ends
        db_ends += g_ends
        if HAS_WEIGHT:
            g_ends *= w_ends
        grads = ()
        normed = ()
        w_updated = ()
        b_updated = ()
        along = tl.zeros([BLOCK], tl.float32)
        level = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            n = (load_whole(x_at + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32) - mean) * rstd
            g = load_whole(dy_ptr + at + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32)
            if WANT_DW:
                w_updated = w_updated + (w_shares[i] + g * n,)
            if WANT_DB:
                b_updated = b_updated + (b_shares[i] + g,)
            if HAS_WEIGHT:
                g *= weights[i]
            along += g * n  # g is zero outside the row, so the sums need no mask
            level += g
            grads = grads + (g,)
            normed = normed + (n,)
        if WANT_DW:
            w_shares = w_updated
        if WANT_DB:
            b_shares = b_updated
        slope, shift = sums_of(along, level, 0)
        slope = (slope + tl.sum(g_ends * n_ends, axis=0)) / cols
        shift = (shift + tl.sum(g_ends, axis=0)) / cols
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            dx = (grads[i] - normed[i] * slope - shift) * rstd
            if HAS_DH:
                dx += load_whole(dh_ptr + at + i * BLOCK, c, whole, i, CHUNKS).to(tl.float32)
            store_whole(dx_ptr + at + i * BLOCK, dx.to(dx_ptr.dtype.element_ty), c, whole, i, CHUNKS)
        dx = (g_ends - n_ends * slope - shift) * rstd
        if HAS_DH:
            dx += dh_ends
        tl.store(dx_ptr + row * cols + end_at, dx.to(dx_ptr.dtype.element_ty), mask=own)
        x_now = x_next
        dy_now = dy_next
        mean_now = mean_next
        rstd_now = rstd_next
    let_next_start(EARLY)
    to = shares_ptr + first * share_pitch(cols)
    second = step * share_pitch(cols)
    for i in tl.static_range(CHUNKS):
        c = i * BLOCK + col
        if WANT_DW:
            tl.store(to + lead + c, w_shares[i], mask=c < whole)
        if WANT_DB:
            tl.store(to + second + lead + c, b_shares[i], mask=c < whole)
    if WANT_DW:
        tl.store(to + end_at, dw_ends, mask=own)
    if WANT_DB:
        tl.store(to + second + end_at, db_ends, mask=own)


@jit
def layer_norm_backward_long(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dh_ptr,
    dx_ptr,
    rows,
    cols,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    HAS_DH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of rows that do not fit in registers: one program a row, the second read from the L2."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    along_sum = tl.zeros([BLOCK], tl.float32)
    level_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
        along_sum += g * (x - mean)
        level_sum += g
    along = tl.sum(along_sum, axis=0) * rstd / cols
    level = tl.sum(level_sum, axis=0) / cols
    for start in range(0, cols, BLOCK):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
        dx = (g - (x - mean) * rstd * along - level) * rstd
        if HAS_DH:
            dx += tl.load(dh_ptr + row * cols + c, mask=c < cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * cols + c, dx.to(dx_ptr.dtype.element_ty), mask=c < cols)


@jit
def layer_norm_column_shares(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    shares_ptr,  # [2, P, C]
    rows,
    cols,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weight's and bias's gradients of long rows: a program takes some columns of every P-th tile of rows."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc_w = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_b = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=3):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row.to(tl.int64) * cols + col, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        acc_w += dy * (x - mean) * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        acc_b += dy
    pitch = share_pitch(cols)
    to = shares_ptr + tl.program_id(1).to(tl.int64) * pitch + col
    tl.store(to, tl.sum(acc_w, axis=0)[None, :], mask=col < cols)
    tl.store(to + tl.num_programs(1).to(tl.int64) * pitch, tl.sum(acc_b, axis=0)[None, :], mask=col < cols)
