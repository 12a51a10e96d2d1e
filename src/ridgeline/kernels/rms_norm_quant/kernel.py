"""RMSNorm with quantized output: the row is in registers anyway, so its largest element costs nothing to find.

Shapes: R rows, C columns, GROUP columns a scale (a whole row where it is 0).
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import load_part, row_lead, row_start, store_part
from ridgeline.kernels.function import jit
from ridgeline.kernels.quantize.kernel import rounded


@jit
def write_scales(tops, scale_ptr, row, rows, scales, largest, PARTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Scales of all pieces of a row at once: each store is rearranged through shared memory, behind barriers."""
    if CHUNKS == 1 or CHUNKS > 8:
        for i in tl.static_range(CHUNKS):
            part = i * PARTS + tl.arange(0, PARTS)[None, :]
            to = scale_ptr + row.to(tl.int64) * scales + part
            tl.store(to, tops[i] * (1.0 / largest), mask=(row < rows) & (part < scales))
    else:
        LAST: tl.constexpr = CHUNKS - 1
        ab = tl.join(tops[0], tops[1])
        cd = tl.join(tops[min(2, LAST)], tops[min(3, LAST)])
        ef = tl.join(tops[min(4, LAST)], tops[min(5, LAST)])
        gh = tl.join(tops[min(6, LAST)], tops[min(7, LAST)])
        eight = tl.join(tl.join(ab, cd), tl.join(ef, gh))
        k = tl.arange(0, 8)[None, None, :]
        chunk = k // 4 + (k // 2) % 2 * 2 + k % 2 * 4
        part = chunk * PARTS + tl.arange(0, PARTS)[None, :, None]
        there = (row[:, :, None] < rows) & (chunk < CHUNKS) & (part < scales)
        at = scale_ptr + row[:, :, None].to(tl.int64) * scales + part
        tl.store(at, tl.reshape(eight, [tops[0].shape[0], PARTS, 8]) * (1.0 / largest), mask=there)


@jit
def write_quantized(
    normed,  # CHUNKS tiles [ROWS, BLOCK]
    factor,  # [ROWS, 1]: what they are still to be multiplied with
    q_ptr,
    scale_ptr,
    row,
    col,
    rows,
    cols,
    scales,
    largest,
    lead,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows in registers to narrow numbers and their scales: the largest of a row or block at the end of the range."""
    at = row_start(row, cols, UNALIGNED, VECTOR) + col
    narrower = 1.0 / largest
    if GROUP == 0:
        top = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            top = tl.maximum(top, tl.abs(normed[i]))
        most = tl.maximum(tl.max(top, axis=1, keep_dims=True) * factor, 1e-12)
        if ROWS == 1:  # as one number: a tile of one would be worked out again in a layout of its own
            only = tl.max(tl.max(row, axis=1), axis=0)
            tl.store(scale_ptr + only, tl.max(tl.max(most, axis=1), axis=0) * narrower, mask=only < rows)
        else:
            tl.store(scale_ptr + row, most * narrower, mask=row < rows)
        root = tl.rsqrt(most)
        times = largest * root * root * factor  # every warp waits for it: a division would take eight instructions
    tops = ()
    for i in tl.static_range(CHUNKS if GROUP > 0 else 0):
        blocks = tl.max(tl.reshape(tl.abs(normed[i]), [ROWS, PARTS, GROUP]), axis=2)
        tops = tops + (tl.maximum(blocks * factor, 1e-12),)
    if GROUP > 0:
        write_scales(tops, scale_ptr, row, rows, scales, largest, PARTS, CHUNKS)
    for i in tl.static_range(CHUNKS):
        y = normed[i]
        if GROUP > 0:
            most = tops[i]
            root = tl.rsqrt(most)
            times = largest * root * root * factor  # a third of the instructions of a division
            wide = tl.broadcast_to(tl.expand_dims(times, 2), [ROWS, PARTS, GROUP])
            y = y * tl.reshape(wide, [ROWS, BLOCK])
        else:
            y = y * times
        narrow = rounded(y, INTEGER, False, largest, q_ptr)
        write_piece(q_ptr + at, narrow, row < rows, cols, lead, col, i, CHUNKS, BLOCK, False, UNALIGNED, VECTOR)


@jit
def read_piece(
    at, there, cols, lead, col, I: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    UNALIGNED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Piece I of rows as float32, zeros outside of them."""
    c = I * BLOCK + col
    if UNALIGNED:
        x = load_part(at + I * BLOCK, c, there, lead, lead + cols, I, CHUNKS, True, VECTOR)
    else:
        x = tl.load(at + I * BLOCK, mask=there & ((c < cols) | EVEN), other=0.0)
    return x.to(tl.float32)


@jit
def write_piece(
    to, value, there, cols, lead, col, I: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    UNALIGNED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    c = I * BLOCK + col
    if UNALIGNED:
        store_part(to + I * BLOCK, value, c, there, lead, lead + cols, I, CHUNKS, True, VECTOR)
    else:
        tl.store(to + I * BLOCK, value, mask=there & ((c < cols) | EVEN))


@jit
def rms_norm_quantized(
    x_ptr,  # [R, C], rows x_stride apart
    residual_ptr,  # [R, C]
    weight_ptr,  # [C]
    q_ptr,  # [R, C] fp8 or int8
    scale_ptr,  # [R, scales] fp32: y ≈ q · scale
    h_ptr,  # [R, C] x + residual
    rows,
    cols,
    x_stride,
    scales,
    eps,
    offset,
    largest,
    HAS_RESIDUAL: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # BLOCK / GROUP
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # rows fill their pieces
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,  # programs walk over several tiles and keep the weight meanwhile
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements, all rows of a program alike
    VECTOR: tl.constexpr,
):
    """A program takes every P-th tile of rows; with stages, the next ones are on their way meanwhile."""
    lead = 0
    if UNALIGNED:
        lead = row_lead(tl.program_id(0), cols, VECTOR)
    end = lead + cols
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    inverse = 1.0 / cols
    weights = ()
    for i in tl.static_range(CHUNKS if KEEP else 0):
        c = i * BLOCK + col
        in_cols = (c >= lead) & (c < end) if UNALIGNED else (c < cols) | EVEN
        w = tl.load(weight_ptr + c - lead, mask=in_cols, other=0.0)
        weights = weights + (w.to(tl.float32) + offset,)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at = row_start(row, cols, UNALIGNED, VECTOR) + col
        x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
        held = ()
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            x = read_piece(x_at, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
            if HAS_RESIDUAL:
                more = residual_ptr + at
                h = x + read_piece(more, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
                h = h.to(h_ptr.dtype.element_ty)
                write_piece(h_ptr + at, h, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
                x = h.to(tl.float32)
            squares += x * x
            held = held + (x,)
        rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * inverse + eps)
        normed = ()
        for i in tl.static_range(CHUNKS):
            if KEEP:
                normed = normed + (held[i] * weights[i],)
            else:
                w = tl.load(weight_ptr + i * BLOCK + col, mask=(i * BLOCK + col < cols) | EVEN, other=0.0)
                normed = normed + (held[i] * (w.to(tl.float32) + offset),)
        write_quantized(
            normed, rstd, q_ptr, scale_ptr, row, col, rows, cols, scales, largest, lead, INTEGER, GROUP, PARTS, ROWS,
            CHUNKS, BLOCK, UNALIGNED, VECTOR,
        )  # fmt: skip
