"""Tiles of the product, by its sizes; which is fastest is a race's to say (optimizer/rewrites/pointwise.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and terms of a tile, tiles of a column handled together, warps and stages."""

    rows: int
    cols: int
    depth: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Rows and columns that a program finishes, and its warps."""

    rows: int
    cols: int
    num_warps: int = 4


def tiles(m: int, n: int, k: int) -> tuple[Tile, ...]:
    """Tiles worth trying: small ones, several to a multiprocessor, and where sums are long larger ones.

    Few forms for all sizes: each is a kernel to compile.
    """
    narrow, middle = Tile(128, 64, num_warps=4), Tile(128, 128)
    if n <= 64:
        return (narrow,)
    return (narrow, middle) if k <= 256 else (middle,)


def default(m: int, n: int, k: int) -> Tile:
    return tiles(m, n, k)[0]


FINISH = Finish(32, 64)
"""Sixteen elements a thread, 128 bytes of a row: one form for all widths, since each is a kernel to compile."""
