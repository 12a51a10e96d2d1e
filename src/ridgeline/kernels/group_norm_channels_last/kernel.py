"""GroupNorm where channels lie last: moments of every channel by stretches of pixels, joined by groups, then one pass.

PyTorch's kernel wants channels first: between convolutions that want them last it copies the image there, and the next
convolution copies it back, seven passes where three are enough.

Shapes: x and y [N, P, C], P pixels; part [2, N, S, C], means and squared deviations of a stretch of pixels; ends [2, N,
C], what a channel is multiplied with and what is added to it. Moments are taken from the stretch's first pixel on:
nothing large is subtracted from anything large.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def channel_stats(
    x_ptr, part_ptr, pixels, channels, stretch, num_stretches, num_images,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // num_stretches
    share = tl.program_id(0) % num_stretches
    first = share * stretch
    last = tl.minimum(first + stretch, pixels)
    row = tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < channels
    x_at = x_ptr + image.to(tl.int64) * pixels * channels
    center = tl.load(x_at + first.to(tl.int64) * channels + col, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    for begin in range(first, last, ROWS):
        real = (begin + row < last)[:, None] & inside[None, :]
        at = (begin + row).to(tl.int64)[:, None] * channels + col[None, :]
        d = tl.load(x_at + at, mask=real, other=0.0).to(tl.float32) - center[None, :]
        d = tl.where(real, d, 0.0)
        total += d
        squares += d * d
    num = (last - first).to(tl.float32)
    off = tl.sum(total, 0) / num
    spread = tl.sum(squares, 0) - num * off * off
    at = (image * num_stretches + share) * channels + col
    tl.store(part_ptr + at, center + off, mask=inside)
    tl.store(part_ptr + num_images * num_stretches * channels + at, spread, mask=inside)


@jit
def group_ends(
    part_ptr, weight_ptr, bias_ptr, ends_ptr, pixels, channels, groups, stretch, num_stretches, num_images, eps,
    SHARES: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    size = channels // groups
    share = tl.arange(0, SHARES)
    col = tl.arange(0, COLS)
    channel = group * size + col
    real = (share < num_stretches)[:, None] & (col < size)[None, :]
    at = (image * num_stretches + share)[:, None] * channels + channel[None, :]
    mean = tl.load(part_ptr + at, mask=real, other=0.0)
    spread = tl.load(part_ptr + num_images * num_stretches * channels + at, mask=real, other=0.0)
    begin = share * stretch
    num = tl.maximum(tl.minimum(begin + stretch, pixels) - begin, 0).to(tl.float32)[:, None]
    count = (pixels * size).to(tl.float32)
    center = tl.sum(tl.sum(tl.where(real, mean * num, 0.0), 1), 0) / count
    off = tl.where(real, mean - center, 0.0)
    var = tl.sum(tl.sum(spread + num * off * off, 1), 0) / count
    inside = col < size
    scale = tl.full([COLS], 1.0, tl.float32) * tl.rsqrt(var + eps)
    if WEIGHT:
        scale *= tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    shift = -center * scale
    if BIAS:
        shift += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    at = image * channels + channel
    tl.store(ends_ptr + at, scale, mask=inside)
    tl.store(ends_ptr + num_images * channels + at, shift, mask=inside)


@jit
def channels_ended(
    x_ptr, ends_ptr, y_ptr, pixels, channels, num_images, ROWS: tl.constexpr, COLS: tl.constexpr, SILU: tl.constexpr
):
    tall = tl.cdiv(pixels, ROWS)
    image = tl.program_id(0) // tall
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < channels
    real = (row < pixels)[:, None] & inside[None, :]
    at = (image.to(tl.int64) * pixels + row)[:, None] * channels + col[None, :]
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(ends_ptr + image * channels + col, mask=inside, other=0.0)
    shift = tl.load(ends_ptr + (num_images + image) * channels + col, mask=inside, other=0.0)
    y = x * scale[None, :] + shift[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=real)
