"""[B, C, H, W] with C of at most four → [B, 16, h, w], channels last: four neighbors of a channel beside each other.

Channel 4c + 2·dy + dx of pixel (y, x) is channel c of the image's pixel (2y + dy − top, 2x + dx − left); what lies
outside, and channels that the image does not have, are zeros.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def unshuffle_forward(
    x_ptr, out_ptr, total, channels, height, width, h, w, top, left, x_b, x_c, x_y, x_x, PIXELS: tl.constexpr
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    b = pixel // (h * w)
    inside = pixel - b * (h * w)
    row = inside // w
    col = inside - row * w
    channel = tl.arange(0, 16)
    y = (2 * row - top)[:, None] + ((channel // 2) % 2)[None, :]
    x = (2 * col - left)[:, None] + (channel % 2)[None, :]
    c = (channel // 4)[None, :]
    real = (pixel < total)[:, None] & (c < channels) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = b.to(tl.int64)[:, None] * x_b + c * x_c + y * x_y + x * x_x
    found = tl.load(x_ptr + at, mask=real, other=0.0)
    to = pixel.to(tl.int64)[:, None] * 16 + channel[None, :]
    tl.store(out_ptr + to, found, mask=(pixel < total)[:, None])
