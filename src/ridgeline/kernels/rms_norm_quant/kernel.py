"""RMSNorm with quantized output: the row is in registers anyway, so its largest element costs nothing to find.

Shapes: R rows, C columns, GROUP columns a scale (a whole row where it is 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.quantize.kernel import rounded


@triton.jit
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


@triton.jit
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
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows in registers to narrow numbers and their scales: the largest of a row or block at the end of the range."""
    at = row.to(tl.int64) * cols + col
    if GROUP == 0:
        top = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            top = tl.maximum(top, tl.abs(normed[i]))
        most = tl.maximum(tl.max(top, axis=1, keep_dims=True) * factor, 1e-12)
        if ROWS == 1:  # as one number: a tile of one would be worked out again in a layout of its own
            only = tl.max(tl.max(row, axis=1), axis=0)
            tl.store(scale_ptr + only, tl.max(tl.max(most, axis=1), axis=0) / largest, mask=only < rows)
        else:
            tl.store(scale_ptr + row, most / largest, mask=row < rows)
        times = largest / most * factor  # one division a row: a multiplication's last bit does not show in eight
    tops = ()
    for i in tl.static_range(CHUNKS if GROUP > 0 else 0):
        blocks = tl.max(tl.reshape(tl.abs(normed[i]), [ROWS, PARTS, GROUP]), axis=2)
        tops = tops + (tl.maximum(blocks * factor, 1e-12),)
    if GROUP > 0:
        write_scales(tops, scale_ptr, row, rows, scales, largest, PARTS, CHUNKS)
    for i in tl.static_range(CHUNKS):
        inside = (row < rows) & (i * BLOCK + col < cols)
        y = normed[i]
        if GROUP > 0:
            most = tops[i]
            root = tl.rsqrt(most)
            times = largest * root * root * factor  # a third of the instructions of a division
            wide = tl.broadcast_to(tl.expand_dims(times, 2), [ROWS, PARTS, GROUP])
            y = y * tl.reshape(wide, [ROWS, BLOCK])
        else:
            y = y * times
        tl.store(q_ptr + at + i * BLOCK, rounded(y, INTEGER, False, largest, q_ptr), mask=inside)


@triton.jit
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
):
    """A program takes every P-th tile of rows; with stages, the next ones are on their way meanwhile."""
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    weights = ()
    for i in tl.static_range(CHUNKS if KEEP else 0):
        w = tl.load(weight_ptr + i * BLOCK + col, mask=(i * BLOCK + col < cols) | EVEN, other=0.0)
        weights = weights + (w.to(tl.float32) + offset,)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * cols + col
        held = ()
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            inside = (row < rows) & ((i * BLOCK + col < cols) | EVEN)
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + i * BLOCK + col, mask=inside, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                h = x + tl.load(residual_ptr + at + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
                h = h.to(h_ptr.dtype.element_ty)
                tl.store(h_ptr + at + i * BLOCK, h, mask=inside)
                x = h.to(tl.float32)
            squares += x * x
            held = held + (x,)
        rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / cols + eps)
        normed = ()
        for i in tl.static_range(CHUNKS):
            if KEEP:
                normed = normed + (held[i] * weights[i],)
            else:
                w = tl.load(weight_ptr + i * BLOCK + col, mask=(i * BLOCK + col < cols) | EVEN, other=0.0)
                normed = normed + (held[i] * (w.to(tl.float32) + offset),)
        write_quantized(
            normed, rstd, q_ptr, scale_ptr, row, col, rows, cols, scales, largest, INTEGER, GROUP, PARTS, ROWS, CHUNKS,
            BLOCK,
        )  # fmt: skip
