"""A few rows times a large matrix of eight or four bits: fewer bytes are read, and widened on the way to the product.

Shapes: M rows (at most 16), K their length, N outputs. y_MN = epilogue(x_MK @ (scale · w_NK).T). Eight bits are one
signed byte a weight and one scale an output, applied to the sum. Four bits are two weights a byte and one scale for
every 128 of an output (a group): byte j of a group holds weight j below and weight j + 64 above, each plus eight, so
that the halves of a byte meet two stretches of x that lie apart, and nothing has to be interleaved.

``narrow_row`` multiplies eight bits in float32 on the ordinary units, as ``linear_row`` does halves. ``narrow_tile``
gives widened weights to the tensor cores from registers. Four bits become halves by permutation: a nibble below the
byte 0x43 is the bfloat16 128 + nibble, below 0x64 the float16 1024 + nibble; one subtraction of two at once is left,
in all an instruction and a half a weight, where conversions would take four.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit
from ridgeline.kernels.linear.kernel import _finish, _scales, _weights, normed_columns, row_sums, store_tile

GROUP: tl.constexpr = tl.constexpr(128)
HALF_GROUP: tl.constexpr = tl.constexpr(64)


@jit
def narrow_row(
    x_ptr,  # [M, K]
    w_ptr,  # int8 [N or 2N, K]
    scale_ptr,  # fp32 [N or 2N]
    bias_ptr,  # [N or 2N]
    norm_ptr,  # [K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    k,
    n,
    x_stride,
    w_stride,
    residual_stride,
    eps,
    offset,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
):
    """BN outputs of M rows; K in steps of BK, the next step's weights on their way while this one is multiplied."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    col = tl.arange(0, BK)
    at = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * w_stride + col[None, :]
    above = at + n.to(tl.int64) * w_stride
    sums, ups, squares = row_sums(x_ptr, at, above, norm_ptr, col, k, x_stride, offset,
                                  M, BN, BK, V, EVEN, NORM, GATED, False)  # fmt: skip
    own = tl.load(scale_ptr + row, mask=row < n, other=0.0)
    for m in tl.static_range(M):
        y = tl.sum(sums[m], 1) * own
        z = tl.sum(ups[m], 1)
        if GATED:
            z *= tl.load(scale_ptr + n + row, mask=row < n, other=0.0)
        if NORM:
            level = tl.rsqrt(tl.sum(squares[m], 0) / k + eps)
            y *= level
            z *= level
        _finish(y, z, bias_ptr, residual_ptr + m * residual_stride + row, out_ptr + m * n + row, row, n,
                BIAS, RESIDUAL, GATED, ACT)  # fmt: skip


@jit
def _nibbles(b, like, PERMUTED: tl.constexpr):
    """The lower and the upper four bits of bytes, less eight, in the type of ``like``."""
    if PERMUTED:
        if like.dtype == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 l, h, s;
                and.b32 l, $4, 0x0F0F0F0F;
                shr.u32 h, $4, 4;
                and.b32 h, h, 0x0F0F0F0F;
                mov.b32 s, 0x43084308;
                prmt.b32 $0, l, 0x43434343, 0x4140;
                prmt.b32 $1, l, 0x43434343, 0x4342;
                prmt.b32 $2, h, 0x43434343, 0x4140;
                prmt.b32 $3, h, 0x43434343, 0x4342;
                sub.rn.bf16x2 $0, $0, s;
                sub.rn.bf16x2 $1, $1, s;
                sub.rn.bf16x2 $2, $2, s;
                sub.rn.bf16x2 $3, $3, s;
                }
                """,
                "=&r,=&r,=&r,=&r,r", [b], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                """
                {
                .reg .b32 l, h, s;
                and.b32 l, $4, 0x0F0F0F0F;
                shr.u32 h, $4, 4;
                and.b32 h, h, 0x0F0F0F0F;
                mov.b32 s, 0x64086408;
                prmt.b32 $0, l, 0x64646464, 0x4140;
                prmt.b32 $1, l, 0x64646464, 0x4342;
                prmt.b32 $2, h, 0x64646464, 0x4140;
                prmt.b32 $3, h, 0x64646464, 0x4342;
                sub.rn.f16x2 $0, $0, s;
                sub.rn.f16x2 $1, $1, s;
                sub.rn.f16x2 $2, $2, s;
                sub.rn.f16x2 $3, $3, s;
                }
                """,
                "=&r,=&r,=&r,=&r,r", [b], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        low = ((b & 15).to(tl.float32) - 8.0).to(like.dtype)
        high = ((b >> 4).to(tl.float32) - 8.0).to(like.dtype)
    return low, high


@jit
def narrow_tile(
    x_ptr,  # [M, K]
    w_ptr,  # int8 [N or 2N, K], or uint8 [N or 2N, K / 2]
    scale_ptr,  # fp32 [N or 2N], or fp16 [N or 2N, K / 128]
    bias_ptr,  # [N or 2N]
    norm_ptr,  # [K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N], or fp32 [shares, M, N or 2N]
    squares_ptr,  # fp32 [shares, M]
    m,
    k,
    n,
    x_stride,
    w_stride,
    residual_stride,
    share,  # of K, a multiple of BK
    eps,
    offset,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    FOUR: tl.constexpr,
    PERMUTED: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    WHOLE: tl.constexpr,
    FIRST_SCALED: tl.constexpr,
):
    """BN outputs of up to MP rows over one share of K; the answer where the share is all of K, else a partial sum."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.arange(0, MP)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, k)
    level = tl.full([MP], 1.0, tl.float32)
    if FIRST_SCALED:
        level = _scales(x_ptr, x_stride, m, k, eps, MP, BK)
    acc = tl.zeros([BN, MP], tl.float32)
    up = tl.zeros([BN, MP], tl.float32)
    squares = tl.zeros([MP], tl.float32)
    line = tl.minimum(row, n - 1).to(tl.int64)
    real_x = (mine < m)[None, :]
    if FOUR:
        byte = tl.arange(0, HALF_GROUP)
        at = w_ptr + line[:, None] * w_stride + byte[None, :]
        above = at + n.to(tl.int64) * w_stride
        groups = k // GROUP
        grid_at = scale_ptr + line * groups
        x_at = x_ptr + mine[None, :] * x_stride + byte[:, None]
        for first in range(start, end, GROUP):
            b = tl.load(at + first // 2, eviction_policy="evict_first")
            x_low = tl.load(x_at + first, mask=real_x, other=0.0)
            x_high = tl.load(x_at + first + HALF_GROUP, mask=real_x, other=0.0)
            x_low, squares = normed_columns(x_low, norm_ptr + first + byte, byte < k, offset, squares, level,
                                            True, NORM, FIRST_SCALED)  # fmt: skip
            x_high, squares = normed_columns(x_high, norm_ptr + first + HALF_GROUP + byte, byte < k, offset, squares,
                                             level, True, NORM, FIRST_SCALED)  # fmt: skip
            low, high = _nibbles(b, x_low, PERMUTED)
            part = tl.dot(low, x_low)
            part = tl.dot(high, x_high, part)
            own = tl.load(grid_at + first // GROUP).to(tl.float32)
            acc += part * own[:, None]
            if GATED:
                b = tl.load(above + first // 2, eviction_policy="evict_first")
                low, high = _nibbles(b, x_low, PERMUTED)
                part = tl.dot(low, x_low)
                part = tl.dot(high, x_high, part)
                own = tl.load(grid_at + n.to(tl.int64) * groups + first // GROUP).to(tl.float32)
                up += part * own[:, None]
    else:
        col = tl.arange(0, BK)
        at = w_ptr + line[:, None] * w_stride + col[None, :]
        above = at + n.to(tl.int64) * w_stride
        x_at = x_ptr + mine[None, :] * x_stride + col[:, None]
        for first in range(start, end, BK):
            inside = first + col < end
            w = _weights(at + first, inside[None, :], EVEN)
            if EVEN:
                x = tl.load(x_at + first, mask=real_x, other=0.0)
            else:
                x = tl.load(x_at + first, mask=inside[:, None] & real_x, other=0.0)
            x, squares = normed_columns(
                x, norm_ptr + first + col, inside, offset, squares, level, EVEN, NORM, FIRST_SCALED
            )
            acc = tl.dot(w.to(x.dtype), x, acc)
            if GATED:
                u = _weights(above + first, inside[None, :], EVEN)
                up = tl.dot(u.to(x.dtype), x, up)
        acc *= tl.load(scale_ptr + line)[:, None]
        if GATED:
            up *= tl.load(scale_ptr + n.to(tl.int64) + line)[:, None]
    real = (row < n)[:, None] & real_x
    store_tile(acc, up, squares, level, bias_ptr, residual_ptr, out_ptr, squares_ptr, row, mine, real, m, k, n,
               residual_stride, eps, NORM, BIAS, RESIDUAL, GATED, ACT, WHOLE, FIRST_SCALED)  # fmt: skip
