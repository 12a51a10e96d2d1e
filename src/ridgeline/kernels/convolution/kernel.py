"""A convolution of images as PyTorch lays them out, and what follows it channel by channel, in one pass.

cuDNN's fast kernels want channels last: images laid out the usual way are copied before and after, and what follows
reads the result once more. Here a tile is pixels by channels, pixels dense as they lie in memory, and products are
TensorFloat-32 as cuDNN's are, with factors rounded or cut off; or as accurate as float32, where cuDNN's are that.

One kernel serves plain, strided, dilated and transposed convolutions of one to three dims. Output pixel o = q·S + r is
made of input pixels q·IS + base + j·STEP for taps j; a plain convolution has S = 1, a transposed one with stride S
has S phases r a dim, each with taps of its own. Shapes: x [N, CI, D, H, W], out [N, CO, OD, OH, OW].
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.convolution.links import linked, pooled, softmax_of
from ridgeline.kernels.function import jit


@jit
def rounded(x, HOW: tl.constexpr):
    """A number of TensorFloat-32's ten bits: 0 the nearest, of two the one farther from zero, 1 the next one to zero, 2
    the nearest, of two the even one. Infinities stay what they are.

    So does NaN: one of nothing but ones, which is what a GPU makes, would become zero by being rounded.
    """
    bits = x.to(tl.int32, bitcast=True)
    if HOW == 1:
        return (bits & -8192).to(tl.float32, bitcast=True)
    if HOW == 2:
        bits += 0xFFF + ((bits >> 13) & 1)
    else:
        bits += 0x1000
    return tl.where(x == x, (bits & -8192).to(tl.float32, bitcast=True), x)


@jit
def left_over(x, high):
    """What rounding took away; nothing of an infinity, which has no digits."""
    return tl.where(tl.abs(high) < float("inf"), x - high, 0.0)


@jit
def convolution_weights(
    w_ptr,  # [GROUPS·CO, CI, TAPS], or [GROUPS·CI, CO, TAPS] where TURNED
    out_ptr,  # [GROUPS·CO, TAPS, CI], rounded; where EXACT, what rounding took away behind it
    outputs,
    inputs,
    taps,
    total,
    TURNED: tl.constexpr,
    HOW: tl.constexpr,  # see ``rounded``
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights as the product reads them: the channels of one tap side by side."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ci = at % inputs
    tap = (at // inputs) % taps
    co = at // (inputs * taps)
    if TURNED:
        source = ((co // outputs * inputs + ci) * outputs + co % outputs) * taps + tap
    else:
        source = (co * inputs + ci) * taps + tap
    inside = at < total
    w = tl.load(w_ptr + source, mask=inside, other=0.0)
    high = rounded(w, HOW)
    tl.store(out_ptr + at, high, mask=inside)
    if EXACT:
        tl.store(out_ptr + total + at, rounded(left_over(w, high), 0), mask=inside)


@jit
def convolution_tile(
    x_ptr,
    w_ptr,  # [CO, KD·KH·KW, CI]
    bias_ptr,  # [CO]
    vectors_ptr,  # [num, CO]: what links add or multiply channel by channel
    out_ptr,
    CI: tl.constexpr,
    CO: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OD: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,  # stride
    SH: tl.constexpr,
    SW: tl.constexpr,
    PD: tl.constexpr,  # padding
    PH: tl.constexpr,
    PW: tl.constexpr,
    DD: tl.constexpr,  # dilation
    DH: tl.constexpr,
    DW: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNED: tl.constexpr,  # transposed; then strides or dilations are 1
    PADDED: tl.constexpr,  # whether a tap may lie outside of the image
    HOW: tl.constexpr,  # how images are rounded: see ``rounded``
    EXACT: tl.constexpr,  # float32's own accuracy, from three products: high·high + high·low + low·high
    LAST: tl.constexpr,  # whether x is [N, D, H, W, CI], rounded already unless EXACT
    BIAS: tl.constexpr,
    LINKS: tl.constexpr,
    POOL: tl.constexpr,  # what becomes of a pixel's channels, all in the tile, or of its pixels: see ``links.POOLS``
    AFTER: tl.constexpr,  # links behind what becomes of channels, where all of them are left
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BM pixels of BN channels; CI and CO are those of a group, and the grid's second dim counts groups of images."""
    ZD: tl.constexpr = SD if TURNED else 1
    ZH: tl.constexpr = SH if TURNED else 1
    ZW: tl.constexpr = SW if TURNED else 1
    QD: tl.constexpr = (OD + ZD - 1) // ZD
    QH: tl.constexpr = (OH + ZH - 1) // ZH
    QW: tl.constexpr = (OW + ZW - 1) // ZW
    step_d: tl.constexpr = -DD if TURNED else DD
    step_h: tl.constexpr = -DH if TURNED else DH
    step_w: tl.constexpr = -DW if TURNED else DW
    WIDE: tl.constexpr = (CO + BN - 1) // BN
    UNIFORM: tl.constexpr = CI % BK == 0
    tile_n = tl.program_id(0) % WIDE
    rest = tl.program_id(0) // WIDE
    phase = rest % (ZD * ZH * ZW)  # neighbors in time, so that the lines they share are written once
    tile_m = rest // (ZD * ZH * ZW)
    image = tl.program_id(1).to(tl.int64)
    group = tl.program_id(1) % GROUPS
    p = tile_m * BM + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    pw = p % QW
    ph = (p // QW) % QH
    pd = p // (QW * QH)
    if TURNED:
        rw = phase % ZW
        rh = (phase // ZW) % ZH
        rd = phase // (ZW * ZH)
        od = pd * ZD + rd
        oh = ph * ZH + rh
        ow = pw * ZW + rw
        first_d = (rd + PD) % ZD
        first_h = (rh + PH) % ZH
        first_w = (rw + PW) % ZW
        taps_d = (KD - first_d + ZD - 1) // ZD
        taps_h = (KH - first_h + ZH - 1) // ZH
        taps_w = (KW - first_w + ZW - 1) // ZW
        at_d = pd + (rd + PD - first_d) // ZD
        at_h = ph + (rh + PH - first_h) // ZH
        at_w = pw + (rw + PW - first_w) // ZW
    else:
        od = pd
        oh = ph
        ow = pw
        first_d = 0
        first_h = 0
        first_w = 0
        taps_d = KD
        taps_h = KH
        taps_w = KW
        at_d = pd * SD - PD
        at_h = ph * SH - PH
        at_w = pw * SW - PW
    real = (p < QD * QH * QW) & (od < OD) & (oh < OH) & (ow < OW)
    base = (at_d * H + at_h) * W + at_w
    if LAST:
        base *= CI
    terms = taps_d * taps_h * taps_w * CI
    x_start = x_ptr + image * (CI * D * H * W)
    if LAST:  # memory of our own
        x_start = tl.multiple_of(x_start, 16)
    w_start = w_ptr + group * (CO * KD * KH * KW * CI)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, terms, BK):
        if UNIFORM:
            tap = first // CI
            ci = first - tap * CI + tl.arange(0, BK)
        else:
            k = first + tl.arange(0, BK)
            tap = k // CI
            ci = k - tap * CI
        jw = tap % taps_w
        jh = (tap // taps_w) % taps_h
        jd = tap // (taps_w * taps_h)
        if LAST:
            ahead = ((jd * step_d * H + jh * step_h) * W + jw * step_w) * CI + ci
        else:
            ahead = (jd * step_d * H + jh * step_h) * W + jw * step_w + ci * (D * H * W)
        weight = ((first_d + jd * ZD) * KH + first_h + jh * ZH) * KW + first_w + jw * ZW
        if UNIFORM:
            inside = real
            if PADDED:
                inside = inside & (at_w + jw * step_w >= 0) & (at_w + jw * step_w < W)
                inside = inside & (at_h + jh * step_h >= 0) & (at_h + jh * step_h < H)
                inside = inside & (at_d + jd * step_d >= 0) & (at_d + jd * step_d < D)
            inside = inside[:, None]
            known = (col < CO)[None, :]
        else:
            inside = real[:, None] & (k < terms)[None, :]
            if PADDED:
                tap_w = at_w[:, None] + (jw * step_w)[None, :]
                tap_h = at_h[:, None] + (jh * step_h)[None, :]
                tap_d = at_d[:, None] + (jd * step_d)[None, :]
                inside = inside & (tap_w >= 0) & (tap_w < W) & (tap_h >= 0) & (tap_h < H) & (tap_d >= 0) & (tap_d < D)
            known = (k < terms)[:, None] & (col < CO)[None, :]
        a = tl.load(x_start + base[:, None] + ahead[None, :], mask=inside, other=0.0)
        b_at = w_start + (weight * CI + ci)[:, None] + col[None, :] * (KD * KH * KW * CI)
        b = tl.load(b_at, mask=known, other=0.0)
        high = a if LAST and not EXACT else rounded(a, HOW)
        if EXACT:  # the tensor cores cut sums off: they carry one over a block of terms only
            low_b = tl.load(b_at + GROUPS * CO * KD * KH * KW * CI, mask=known, other=0.0)
            part = tl.dot(left_over(a, high), b, input_precision="tf32")
            digits = tl.where(tl.abs(high) < float("inf"), high, 0.0)  # an infinity meets whole weights alone, below
            part = tl.dot(digits, low_b, part, input_precision="tf32")
            acc += tl.dot(high, b, part, input_precision="tf32")
        else:
            acc = tl.dot(high, b, acc, input_precision="tf32")
    if BIAS:
        acc += tl.load(bias_ptr + group * CO + col, mask=col < CO, other=0.0)[None, :]
    acc = linked(acc, vectors_ptr, (group * CO + col)[None, :], (col < CO)[None, :], GROUPS * CO, LINKS)
    out_at = (od * OH + oh) * OW + ow
    if POOL == 5:  # out [images, CO, tiles of an image]: sums of a tile's pixels, which are summed up behind
        parts = tl.num_programs(0) // WIDE
        part = tl.sum(tl.where(real[:, None], acc, 0.0), 0)
        tl.store(out_ptr + (image * CO + col) * parts + rest, part, mask=col < CO)
        return
    if POOL == 4:
        acc = softmax_of(acc, (col < CO)[None, :])
        acc = linked(acc, vectors_ptr, col[None, :], (col < CO)[None, :], CO, AFTER)
    if POOL > 0 and POOL < 4:
        one = pooled(acc, (col < CO)[None, :], POOL)
        tl.store(out_ptr + image * (OD * OH * OW) + out_at, one, mask=real)
        return
    to = out_ptr + image * (CO * OD * OH * OW) + out_at[:, None] + col[None, :].to(tl.int64) * (OD * OH * OW)
    tl.store(to, acc, mask=real[:, None] & (col < CO)[None, :])


@jit
def convolution_depthwise(
    x_ptr,  # [N·C, D, H, W]
    w_ptr,  # [C, TAPS]
    bias_ptr,
    vectors_ptr,
    out_ptr,
    CI: tl.constexpr,
    CO: tl.constexpr,
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
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    LINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of pixels of one channel of one image: taps read what their neighbors have brought into the cache."""
    image = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(1) % GROUPS
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = p < OD * OH * OW
    at_w = p % OW * SW - PW
    at_h = (p // OW) % OH * SH - PH
    at_d = p // (OW * OH) * SD - PD
    start = x_ptr + image * (D * H * W) + (at_d * H + at_h) * W + at_w
    acc = tl.zeros([BLOCK], tl.float32)
    for jd in range(KD):
        for jh in range(KH):
            for jw in tl.static_range(KW):
                inside = real
                if PADDED:
                    inside = inside & (at_w + jw * DW >= 0) & (at_w + jw * DW < W)
                    inside = inside & (at_h + jh * DH >= 0) & (at_h + jh * DH < H)
                    inside = inside & (at_d + jd * DD >= 0) & (at_d + jd * DD < D)
                x = tl.load(start + (jd * DD * H + jh * DH) * W + jw * DW, mask=inside, other=0.0)
                acc += x * tl.load(w_ptr + ((channel * KD + jd) * KH + jh) * KW + jw)
    if BIAS:
        acc += tl.load(bias_ptr + channel)
    acc = linked(acc, vectors_ptr, channel + tl.zeros([BLOCK], tl.int32), real, GROUPS, LINKS)
    tl.store(out_ptr + image * (OD * OH * OW) + p, acc, mask=real)


@jit
def convolution_links(
    x_ptr,  # [N·CO, PIXELS], changed in place
    vectors_ptr,
    CO: tl.constexpr,
    PIXELS: tl.constexpr,
    LINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chain on what another convolution has written."""
    BLOCKS: tl.constexpr = (PIXELS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // BLOCKS
    p = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row.to(tl.int64) * PIXELS + p
    x = tl.load(at, mask=p < PIXELS, other=0.0)
    channel = row % CO + tl.zeros([BLOCK], tl.int32)
    tl.store(at, linked(x, vectors_ptr, channel, p < PIXELS, CO, LINKS), mask=p < PIXELS)


@jit
def convolution_turn(
    x_ptr,  # [N, C, P], or [N, P, C] where BACK
    vectors_ptr,
    out_ptr,  # the other way round
    C: tl.constexpr,
    P: tl.constexpr,
    BACK: tl.constexpr,
    LINKS: tl.constexpr,
    ROUND: tl.constexpr,  # to TensorFloat-32: 0 not at all, else one more than ``rounded`` has it
    BC: tl.constexpr,
    BP: tl.constexpr,
):
    """A tile of channels by pixels turned, and a chain on its way: both sides of memory are read or written densely."""
    WIDE: tl.constexpr = (C + BC - 1) // BC
    TALL: tl.constexpr = (P + BP - 1) // BP
    c = tl.program_id(0) % WIDE * BC + tl.arange(0, BC)
    p = tl.program_id(0) // WIDE % TALL * BP + tl.arange(0, BP)
    image = (tl.program_id(0) // (WIDE * TALL)).to(tl.int64) * (C * P)
    inside = (c < C)[:, None] & (p < P)[None, :]
    plain = c[:, None] * P + p[None, :]
    last = c[:, None] + p[None, :] * C
    x = tl.load(x_ptr + image + (last if BACK else plain), mask=inside, other=0.0)
    x = linked(x, vectors_ptr, c[:, None], (c < C)[:, None], C, LINKS)
    if ROUND > 0:
        x = rounded(x, ROUND - 1)
    tl.store(out_ptr + image + (plain if BACK else last), x, mask=inside)
