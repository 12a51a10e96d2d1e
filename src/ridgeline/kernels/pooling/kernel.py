"""Pooling: a block of output pixels of one channel, its windows' elements one after the other.

Neighboring windows overlap, or pixels of one window lie side by side: what one reads is in the cache for the next.
Shapes: x [R, D, H, W], out [R, OD, OH, OW], R images times channels.

Windows along the last dim alone that go on by one element: a thread has four neighboring results, reads what all four
need in whole accesses and adds each element to those it belongs to. Reading every window by itself is 32 accesses for
four windows of eight, and it is these that take the time.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
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


@jit
def _taken(acc, x, MEAN: tl.constexpr):
    return acc + x if MEAN else tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)


@jit
def pool_lines(
    x_ptr,  # [R, W], whole accesses
    out_ptr,  # [R, OW]
    W: tl.constexpr,
    OW: tl.constexpr,
    KW: tl.constexpr,
    PW: tl.constexpr,  # whole accesses
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (OW + BLOCK - 1) // BLOCK
    EMPTY: tl.constexpr = 0.0 if MEAN else float("-inf")
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    four = tl.arange(0, 4)
    at = first - PW + 4 * tl.arange(0, BLOCK // 4)
    a = tl.full([BLOCK // 4], EMPTY, tl.float32)
    b = tl.full([BLOCK // 4], EMPTY, tl.float32)
    c = tl.full([BLOCK // 4], EMPTY, tl.float32)
    d = tl.full([BLOCK // 4], EMPTY, tl.float32)
    for j in tl.static_range((KW + 6) // 4):
        inside = (at + 4 * j >= 0) & (at + 4 * j < W)
        x_at = x_ptr + row * W + (at + 4 * j)[:, None] + four[None, :]
        x = tl.load(x_at, mask=tl.broadcast_to(inside[:, None], [BLOCK // 4, 4]), other=EMPTY)
        even, odd = tl.split(tl.reshape(x, [BLOCK // 4, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        for i in tl.static_range(4):
            element = x0 if i == 0 else x1 if i == 1 else x2 if i == 2 else x3
            if 4 * j + i < KW:
                a = _taken(a, element, MEAN)
            if 4 * j + i >= 1 and 4 * j + i < KW + 1:
                b = _taken(b, element, MEAN)
            if 4 * j + i >= 2 and 4 * j + i < KW + 2:
                c = _taken(c, element, MEAN)
            if 4 * j + i >= 3 and 4 * j + i < KW + 3:
                d = _taken(d, element, MEAN)
    found = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    if MEAN:
        found = found * (1.0 / KW)
    p = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * OW + p, found, mask=p < OW)
