"""Tiles of a convolution: pixels, channels and terms, by the sizes of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_POOLED = 128
"""Channels of the widest tile: all of a pixel's are in one where something becomes of them together."""
MOST_EXACT = 128 * 128
"""Elements of a tile whose sums are carried twice."""
SHORT_SUM = 160
"""Terms up to which a tile is done after a few blocks of them, and waits for memory before and behind: several smaller
ones on an SM hide it from each other. One tile of 256 pixels at a time against two to four of 128 on an H200: 72
terms in float32 2.77 → 2.36 and 0.56 → 0.47 ms, 54 terms 2.30 → 1.86, 3 terms 0.31 → 0.19; with eight warps for four no
better (2.50, 0.48, 1.98, 0.23)."""

ROUNDINGS = {
    "nearest": (0, 0), "even": (2, 2), "exact": (0, 0), "cut": (1, 1), "weights cut": (0, 1), "image cut": (1, 0),
}  # fmt: skip
"""What becomes of images and of weights, as the kernel counts it: 0 the nearest, of two the one farther from zero, 1
cut off, 2 the nearest, of two the even one."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Pixels, channels and terms of a tile, warps and stages, and what becomes of factors."""

    pixels: int
    channels: int
    depth: int = 32
    num_warps: int = 8
    num_stages: int = 3
    rounding: str = "nearest"  # one of ``ROUNDINGS``; "exact": three products, as accurate as float32
    last: bool = False  # images are turned first, channels last, and read in whole accesses then


@dataclass(frozen=True, slots=True)
class Depthwise:
    """Pixels of a block and warps where every channel is convolved by itself."""

    pixels: int = 1024
    num_warps: int = 4


def turned(found: tuple[Tile, ...], inputs: int, groups: int, terms: int, flops: float) -> tuple[Tile, ...]:
    """The likeliest tile of images that are turned first, where a block of terms is one tap's.

    Right on the interpreter and compiled without spills, 16 bytes an access; no device has timed it yet.
    """
    # Channels of which a multiple is dense for a tile of images that are turned, and terms and operations from which it
    # may pay to turn them, and to compile one more tile for that.
    if groups > 1 or inputs % 32 or terms < 256 or flops < 4e10 or not found:
        return ()
    first = found[0]
    return (replace(first, last=True, depth=32, num_stages=4 if first.num_warps == 4 else 3),)


def tiles(channels: int, pixels: int, pooled: bool = False, terms: int = SHORT_SUM + 1) -> tuple[Tile, ...]:
    """Tiles worth trying for a number of output channels, the likely first; ``pooled``: with all channels in one."""
    # The fewest channels a tile of the tensor cores has; a convolution with fewer fills it up with zeros.
    wide = 16
    while wide < min(channels, 128):
        wide *= 2
    if terms <= SHORT_SUM:
        several = (Tile(128, min(wide, 64), 16, 4, 2), *((Tile(64, wide, 16, 4, 2),) if wide == 128 else ()))
        found: tuple[Tile, ...] = (*several, Tile(128 if wide == 128 else 256, wide))
    elif wide == 128:
        found = (Tile(128, 128), Tile(256, 128), Tile(128, 64, num_warps=4))
    elif wide == 64:
        found = (Tile(128, 64, num_warps=4), Tile(256, 64))
    else:
        found = (Tile(256, wide), Tile(128, wide, num_warps=4))
    fit = [tile for tile in found if tile.pixels <= max(128, pixels) and (tile.channels >= channels or not pooled)]
    return tuple(fit) or found[:1]
