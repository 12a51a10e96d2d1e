"""Tiles of short attention: rows of a program, batch elements it goes through, warps."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, power_of_two

MOST_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Short:
    """Rows of a tile, batch elements of a program, warps."""

    rows: int
    chunk: int
    num_warps: int


def default(rows: int, keys: int, programs: int, groups: int) -> Short:
    """``programs`` there are for one batch element of each bias, and ``groups`` of such elements."""
    tall = min(64, max(16, power_of_two(rows)))
    # eight programs to each of an H200's SMs, so that they hide each other's waiting
    chunk = max(1, min(MOST_CHUNK, groups, groups * cdiv(rows, tall) * programs // 1056))
    return Short(tall, chunk, 4 if keys <= 64 else 8)
