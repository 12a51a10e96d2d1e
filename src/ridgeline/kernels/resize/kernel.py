"""[B, C, H, W] → [B, C, h, w] by lines between the four nearest pixels, in whatever order the dims lie.

A program has a tile of pixels by channels: where channels lie last, whole pieces of them for a few pixels, else one
channel for many pixels of its rows. The result is written once; of the source most is found in the caches.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def _between(at, scale, size, CORNERS: tl.constexpr):
    """The two pixels of a line that a pixel of the result lies between, and how far it is from the first.

    The maximum keeps a place from being joined with the difference below, unrounded: PyTorch's places are rounded.
    """
    if CORNERS:
        place = tl.maximum(at.to(tl.float32) * scale, 0.0)
    else:
        place = tl.maximum((at.to(tl.float32) + 0.5) * scale - 0.5, 0.0)
    low = tl.minimum(place.to(tl.int32), size - 1)
    return low, tl.minimum(low + 1, size - 1), place - low.to(tl.float32)


@jit
def resize_forward(
    x_ptr, out_ptr, total, channels, height, width, h, w, scale_y, scale_x, x_b, x_c, x_y, x_x, out_b, out_c, out_y,
    out_x, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, CORNERS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    b = pixel // (h * w)
    inside = pixel - b * (h * w)
    y = inside // w
    x = inside - y * w
    top, bottom, down = _between(y, scale_y, height, CORNERS)
    left, right, along = _between(x, scale_x, width, CORNERS)
    real = (pixel < total)[:, None] & (channel < channels)[None, :]
    if LAST:
        at = channel[None, :]
    else:
        at = channel.to(tl.int64)[None, :] * x_c
    from_ptr = x_ptr + b.to(tl.int64)[:, None] * x_b + at
    upper = from_ptr + (top * x_y)[:, None]
    lower = from_ptr + (bottom * x_y)[:, None]
    a = tl.load(upper + (left * x_x)[:, None], mask=real, other=0.0).to(tl.float32)
    c = tl.load(upper + (right * x_x)[:, None], mask=real, other=0.0).to(tl.float32)
    d = tl.load(lower + (left * x_x)[:, None], mask=real, other=0.0).to(tl.float32)
    e = tl.load(lower + (right * x_x)[:, None], mask=real, other=0.0).to(tl.float32)
    along, down = along[:, None], down[:, None]
    found = (1.0 - down) * ((1.0 - along) * a + along * c) + down * ((1.0 - along) * d + along * e)
    if LAST:
        to = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    else:
        to = b.to(tl.int64)[:, None] * out_b + channel.to(tl.int64)[None, :] * out_c + inside[:, None]
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=real)
