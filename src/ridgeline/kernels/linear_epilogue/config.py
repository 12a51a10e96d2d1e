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


NARROW, MIDDLE = Tile(128, 64, num_warps=4), Tile(128, 128)


def tiles(m: int, n: int, k: int) -> tuple[Tile, ...]:
    """Tiles worth trying: small ones, several to an SM, and where sums are longer larger ones; none where
    they are so long that the product takes all the time.

    Few forms for all sizes: each is a kernel to compile.
    """
    # terms beyond which cuBLAS and a pass won every race: 1,024 terms 31 µs against 34 and 55 against 62, 1,152 12
    # against 16, 2,048 27 against 35; below, 26 of 27 were ours, by 1.03 to 1.86 times
    # (lab/notes/optimized-models.md)
    if k > 1000:
        return ()
    if n <= 64:
        return (NARROW,)
    return (NARROW, MIDDLE) if k <= 256 else (MIDDLE,)


def default(m: int, n: int, k: int) -> Tile:
    return NARROW if k <= 256 else MIDDLE


FINISH = Finish(32, 64)
"""Sixteen elements a thread, 128 bytes of a row: one form for all widths, since each is a kernel to compile."""
