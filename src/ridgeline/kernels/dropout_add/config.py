"""Launch configuration of dropout and add: a tile's elements are fixed by the mask, not how many programs share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Programs that share a tile, and the warps of each."""

    parts: int
    num_warps: int


FEW_TILES = 4 * 132
"""Tiles for which a multiprocessor has less than four: what a thread makes of random words is then what takes long."""


def default(num: int, tile: int) -> Tile:
    """Eight elements of a 16-bit type a thread and access; a quarter as many where there are few tiles."""
    return Tile(4, 4) if num < FEW_TILES * tile else Tile(1, 4)
