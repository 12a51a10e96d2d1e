"""Pooling: a block of output pixels of one channel, its windows' elements one after the other.

Neighboring windows overlap, or pixels of one window lie side by side: what one reads is in the cache for the next.
Shapes: x [R, D, H, W], out [R, OD, OH, OW], R images times channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_windows(
    x_ptr,
    out_ptr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OD: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PD: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DD: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    MEAN: tl.constexpr,  # else the largest
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (OD * OH * OW + BLOCK - 1) // BLOCK
    EMPTY: tl.constexpr = 0.0 if MEAN else float("-inf")
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    p = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = p < OD * OH * OW
    at_w = p % OW * SW - PW
    at_h = (p // OW) % OH * SH - PH
    at_d = p // (OW * OH) * SD - PD
    start = x_ptr + row * (D * H * W) + (at_d * H + at_h) * W + at_w
    acc = tl.full([BLOCK], EMPTY, tl.float32)
    for jd in range(KD):
        for jh in range(KH):
            for jw in tl.static_range(KW):
                inside = real
                if PADDED:
                    inside = inside & (at_w + jw * DW >= 0) & (at_w + jw * DW < W)
                    inside = inside & (at_h + jh * DH >= 0) & (at_h + jh * DH < H)
                    inside = inside & (at_d + jd * DD >= 0) & (at_d + jd * DD < D)
                x = tl.load(start + (jd * DD * H + jh * DH) * W + jw * DW, mask=inside, other=EMPTY)
                acc = acc + x if MEAN else tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        acc = acc * (1.0 / (KD * KH * KW))
    tl.store(out_ptr + row * (OD * OH * OW) + p, acc, mask=real)
