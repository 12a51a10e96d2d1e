"""Launch configurations of quantization: rows as RMSNorm holds them, tensors in blocks of sixteen bytes a lane."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import LONG_BLOCK, Forward, short_tile
from ridgeline.kernels.rows import cdiv, clamp, power_of_two

__all__ = ["LONG_BLOCK", "Flat", "Forward", "Tile", "flat", "rows", "tile"]


@dataclass(frozen=True, slots=True)
class Flat:
    """Elements of a block and warps that share it; CTAs per SM that look for the largest."""

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
    """Rows are held as they came, so a thread holds 64 elements of 16 bits: twice what a norm can.

    Rows of more than 16k columns are held twice as long by eight warps, of two programs: on 32, whose one program waits
    for itself, 16384×17408 took 91 µs more and 4096×29568 11 (copies as large take 204 and 87). Short rows: two for
    each warp-wide read, 65 against 70 µs for 16384×4096 in blocks of 128.
    """
    short = short_tile(num, cols, itemsize, 4)
    if short is not None:
        tile_rows, chunks, block, num_warps = short
        twice = 2 if num_warps == 4 and chunks == 1 else 1
        return Forward(twice * tile_rows, chunks, block, num_warps)
    vector = 16 // itemsize
    for num_warps, most in ((4, 8), (8, 16 if itemsize == 2 else 8), (16, 4), (32, 8)):
        block = 32 * num_warps * vector
        chunks = cdiv(cols, block)
        if chunks <= most:
            return Forward(1, chunks, block, num_warps, programs_per_sm=2 if num_warps == 8 and chunks > 8 else 0)
    return Forward(1, 0, 0, 16)


def flat(itemsize: int) -> Flat:
    """Sixteen elements a lane: sixteen bytes of the narrow side at once. Four warps: 94 µs, not 99, for 16384×4096."""
    return Flat(2048 if itemsize == 2 else 1024, 4 if itemsize == 2 else 2, 8)


def tile(num: int, cols: int) -> Tile:
    """2048 elements for four warps, in as few rows as give that."""
    block = min(power_of_two(cols), 2048)
    return Tile(clamp(2048 // block, 1, power_of_two(cdiv(num, 132))), block, 4)
