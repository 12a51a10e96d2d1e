"""Launch configuration of dropout and add: a tile's elements are fixed by the mask, not how many programs share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Programs that share a tile, and the warps of each."""

    parts: int
    num_warps: int


FEW_ELEMENTS = 4 * 132 * 4096
"""Elements up to which a thread has one counter: what it makes of random words is then what takes long."""


def default(num: int, tile: int, itemsize: int) -> Tile:
    """Sixteen bytes a thread and access: eight counters of 16-bit elements, four of float32; one where there are few
    elements."""
    if num < FEW_ELEMENTS:
        return Tile(8, 4)
    return Tile(1, 4) if itemsize == 2 else Tile(2, 4)
