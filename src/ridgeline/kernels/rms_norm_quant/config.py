"""Launch configurations of the quantizing norms: RMSNorm's, with blocks that hold whole scale groups."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import forward
from ridgeline.kernels.rows import cdiv, power_of_two

__all__ = ["Tile", "default"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows a program holds, in how many pieces of how many columns, and its warps; tiles that are on their way, and
    programs a multiprocessor that walk over all tiles. No programs given: one a tile."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0


def default(rows: int, cols: int, itemsize: int, group: int) -> Tile:
    """As RMSNorm's forward pass; rows too long for registers have no configuration."""
    chosen = forward(rows, cols, itemsize)
    if group and chosen.block and chosen.block < group:
        block = max(group, power_of_two(min(cols, 256)))
        return Tile(chosen.num_warps, cdiv(cols, block), block, chosen.num_warps)
    return Tile(chosen.rows, chosen.chunks, chosen.block, chosen.num_warps)
