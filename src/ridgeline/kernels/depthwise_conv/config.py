"""Tiles of a depthwise convolution: which is fastest is a race's to say (optimizer/rewrites/depthwise.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a strip, columns of them and channels that a program has, and its warps."""

    strip: int
    slots: int
    channels: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"{self.strip}x{self.slots}x{self.channels}"


TALL = 7
"""Rows of a strip where columns of taps are long: the sides of images are multiples of it more often than not."""


def tiles(out_h: int, channels: int, taps: int) -> tuple[Tile, ...]:
    """Tiles worth trying, two at most, since each is a kernel to compile.

    A thread has eight channels of one slot (32 or 56 sums) or of two. As few channels as possible stay empty.
    """
    widths = sorted((64, 32, 16), key=lambda width: (-channels % width, -width))
    if out_h == 1:  # a sequence: no rows below to share what is read with
        return tuple(Tile(1, numbers // widths[0], widths[0]) for numbers in (1024, 2048))
    if taps > 5 and out_h % TALL == 0:
        return tuple(Tile(TALL, 1024 // width, width) for width in widths[: 1 + (channels % 64 == 0)])
    return tuple(Tile(4, numbers // widths[0], widths[0]) for numbers in (1024, 2048))


def default(out_h: int, channels: int, taps: int) -> Tile:
    return tiles(out_h, channels, taps)[0]
