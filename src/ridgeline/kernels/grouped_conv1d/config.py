"""Tiles of a convolution along a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp


@dataclass(frozen=True, slots=True)
class Tile:
    """Steps of a tile, warps and stages."""

    rows: int
    num_warps: int = 4
    num_stages: int = 4


SHARED_BYTES = 112 << 10
"""Half of what an SM has for two programs."""


def default(out_length: int, size_in: int, size_out: int) -> Tile:
    """Two programs to an SM; few steps leave less of a tile empty in small ones."""
    rows = 128 if out_length > 64 else 64
    stage_bytes = 2 * size_in * (rows + size_out)
    num_warps = 8 if rows * size_out > 128 * 64 else 4  # 64 sums a thread
    return Tile(rows, num_warps, clamp(SHARED_BYTES // stage_bytes, 1, 4))
