"""Launch configurations of quantization: rows as RMSNorm holds them, tensors in blocks of sixteen bytes a lane."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import LONG_BLOCK, Forward, forward
from ridgeline.kernels.rows import cdiv, clamp, power_of_two

__all__ = ["LONG_BLOCK", "Flat", "Forward", "Tile", "flat", "rows", "tile"]


@dataclass(frozen=True, slots=True)
class Flat:
    """Elements of a block and warps that share it; programs a multiprocessor that look for the largest."""

    block: int
    num_warps: int
    programs_per_sm: int = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a tile without reductions."""

    rows: int
    block: int
    num_warps: int


def rows(num: int, cols: int, itemsize: int) -> Forward:
    return forward(num, cols, itemsize)


def flat(itemsize: int) -> Flat:
    """Sixteen elements a lane: sixteen bytes of the narrow side at once."""
    return Flat(4096 if itemsize == 2 else 2048, 8 if itemsize == 2 else 4)


def tile(num: int, cols: int) -> Tile:
    """2048 elements for four warps, in as few rows as give that."""
    block = min(power_of_two(cols), 2048)
    return Tile(clamp(2048 // block, 1, power_of_two(cdiv(num, 132))), block, 4)
