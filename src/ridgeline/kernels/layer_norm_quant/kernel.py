"""LayerNorm with quantized output: the row is in registers anyway, so its largest element costs nothing to find.

Shapes: R rows, C columns, GROUP columns a scale (a whole row where it is 0).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.rms_norm_quant.kernel import write_quantized


@triton.jit
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
):
    """A program takes every P-th tile of rows; with stages, the next ones are on their way meanwhile."""
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    weights = ()
    biases = ()
    for i in tl.static_range(CHUNKS if KEEP else 0):
        in_cols = (i * BLOCK + col < cols) | EVEN
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + i * BLOCK + col, mask=in_cols, other=0.0)
            weights = weights + (w.to(tl.float32),)
        if HAS_BIAS:
            b = tl.load(bias_ptr + i * BLOCK + col, mask=in_cols, other=0.0)
            biases = biases + (b.to(tl.float32),)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * cols + col
        held = ()
        total = 0.0
        for i in tl.static_range(CHUNKS):
            inside = (row < rows) & ((i * BLOCK + col < cols) | EVEN)
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + i * BLOCK + col, mask=inside, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                h = x + tl.load(residual_ptr + at + i * BLOCK, mask=inside, other=0.0).to(tl.float32)
                h = h.to(h_ptr.dtype.element_ty)
                tl.store(h_ptr + at + i * BLOCK, h, mask=inside)
                x = h.to(tl.float32)
            total = x if i == 0 else total + x
            held = held + (x,)
        mean = tl.sum(total, axis=1, keep_dims=True) / cols
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        centered = ()
        for i in tl.static_range(CHUNKS):
            off = held[i] - mean
            if not EVEN:
                off = tl.where(i * BLOCK + col < cols, off, 0.0)
            squares += off * off
            centered = centered + (off,)
        rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / cols + eps)
        normed = ()
        for i in tl.static_range(CHUNKS):
            in_cols = (i * BLOCK + col < cols) | EVEN
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
            if HAS_BIAS and not EVEN:
                y = tl.where(in_cols, y, 0.0)  # the padding of a row is no candidate for its largest
            normed = normed + (y,)
        write_quantized(
            normed, 0.0 * rstd + 1.0, q_ptr, scale_ptr, row, col, rows, cols, scales, largest, INTEGER, GROUP, PARTS,
            ROWS, CHUNKS, BLOCK,
        )  # fmt: skip
