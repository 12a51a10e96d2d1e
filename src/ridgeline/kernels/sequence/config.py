"""Tiles of a convolution along a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Steps of a tile, warps and stages."""

    rows: int
    num_warps: int = 4
    num_stages: int = 4


def default(out_length: int) -> Tile:
    """Two programs to a multiprocessor; few steps leave less of a tile empty in small ones."""
    return Tile(128 if out_length > 64 else 64)
