"""LayerNorm with quantized output: the row is in registers anyway, so its largest element costs nothing to find.

Shapes: R rows, C columns, GROUP columns a scale (a whole row where it is 0).
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import row_lead, row_start
from ridgeline.kernels.function import jit
from ridgeline.kernels.rms_norm_quant.kernel import read_piece, write_piece, write_quantized


@jit
def layer_norm_quantized(
    x_ptr,  # [R, C], rows x_stride apart
    residual_ptr,  # [R, C]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    q_ptr,  # [R, C] fp8 or int8
    scale_ptr,  # [R, scales] fp32: y ≈ q · scale
    h_ptr,  # [R, C] x + residual
    rows,
    cols,
    x_stride,
    scales,
    eps,
    largest,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # BLOCK / GROUP
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # rows fill their pieces
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,  # programs walk over several tiles and keep weight and bias meanwhile
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
    biases = ()
    for i in tl.static_range(CHUNKS if KEEP else 0):
        c = i * BLOCK + col
        in_cols = (c >= lead) & (c < end) if UNALIGNED else (c < cols) | EVEN
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + c - lead, mask=in_cols, other=0.0)
            weights = weights + (w.to(tl.float32),)
        if HAS_BIAS:
            b = tl.load(bias_ptr + c - lead, mask=in_cols, other=0.0)
            biases = biases + (b.to(tl.float32),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at = row_start(row, cols, UNALIGNED, VECTOR) + col
        x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR) + col
        held = ()
        total = 0.0
        for i in tl.static_range(CHUNKS):
            x = read_piece(x_at, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
            if HAS_RESIDUAL:
                more = residual_ptr + at
                h = x + read_piece(more, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
                h = h.to(h_ptr.dtype.element_ty)
                write_piece(h_ptr + at, h, row < rows, cols, lead, col, i, CHUNKS, BLOCK, EVEN, UNALIGNED, VECTOR)
                x = h.to(tl.float32)
            total = x if i == 0 else total + x
            held = held + (x,)
        mean = tl.sum(total, axis=1, keep_dims=True) * inverse
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        centered = ()
        for i in tl.static_range(CHUNKS):
            off = held[i] - mean
            c = i * BLOCK + col
            if not EVEN and (i == CHUNKS - 1 or (UNALIGNED and (i == 0 or i == CHUNKS - 2))):
                off = tl.where((c >= lead) & (c < end) if UNALIGNED else c < cols, off, 0.0)
            squares += off * off
            centered = centered + (off,)
        rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * inverse + eps)
        normed = ()
        for i in tl.static_range(CHUNKS):
            c = i * BLOCK + col
            in_cols = (c >= lead) & (c < end) if UNALIGNED else (c < cols) | EVEN
            y = centered[i] * rstd
            if HAS_WEIGHT:
                if KEEP:
                    y *= weights[i]
                else:
                    y *= tl.load(weight_ptr + i * BLOCK + col, mask=in_cols, other=0.0).to(tl.float32)
            if HAS_BIAS:
                if KEEP:
                    y += biases[i]
                else:
                    y += tl.load(bias_ptr + i * BLOCK + col, mask=in_cols, other=0.0).to(tl.float32)
            normed = normed + (y,)  # zero in the padding of a row, which is no candidate for its largest
        write_quantized(
            normed, 0.0 * rstd + 1.0, q_ptr, scale_ptr, row, col, rows, cols, scales, largest, lead, INTEGER, GROUP,
            PARTS, ROWS, CHUNKS, BLOCK, UNALIGNED, VECTOR,
        )  # fmt: skip
