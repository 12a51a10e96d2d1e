"""Bundles and tiles of a convolution in groups; whether ours is faster is a race's to say (optimizer/rewrites)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import power_of_two

LEAST_WIDTH, GOOD_WIDTH, MOST_WIDTH = 16, 32, 128
"""Channels that the tensor cores take at least, that keep them busy, and that a tile has room for."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Pixels of a program, warps and stages."""

    pixels: int = 128
    num_warps: int = 4
    num_stages: int = 3

    def __str__(self) -> str:
        return f"{self.pixels} pixels, {self.num_warps} warps"


def tiles(outputs: int) -> tuple[Tile, ...]:
    """Tiles worth trying, two, since each is a kernel to compile.

    Eight warps were the faster for groups of 24 and of 112 channels (53 and 58 µs, 134 and 145), four for bundles of 32
    (26 and 32); 64 pixels lost everywhere, 256 gained 4 % at best (H200, lab/notes/grouped-convolutions.md).
    """
    wide, narrow = Tile(128, 8), Tile(128, 4)
    return (narrow, wide) if outputs == GOOD_WIDTH else (wide, narrow)


def default(outputs: int) -> Tile:
    return tiles(outputs)[0]


def bundled(groups: int, size_in: int, size_out: int) -> int:
    """Groups that are computed together: those with the fewest zeros among tiles of a good width; 0 if none fits."""
    fits = [num for num in range(1, groups + 1) if groups % num == 0 and num * max(size_in, size_out) <= MOST_WIDTH]
    even = [num for num in fits if num * size_in % 8 == 0 and num * size_out % 8 == 0]
    enough = [num for num in even if num * min(size_in, size_out) >= LEAST_WIDTH]
    return min(enough, key=lambda num: _work(num, size_in, size_out), default=0)


def _work(num: int, size_in: int, size_out: int) -> float:
    """Multiplications a group, zeros included; narrow tiles leave the tensor cores waiting."""
    wide = [power_of_two(num * size) for size in (size_in, size_out)]
    return wide[0] * wide[1] / num * (1.0 if min(wide) >= GOOD_WIDTH else 3.0)
