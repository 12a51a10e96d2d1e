"""Launch configuration of dropout and add by size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Calls of the generator in a program, of eight elements each, and its warps."""

    counters: int
    num_warps: int


FEW_ELEMENTS = 4 * 132 * 4096
"""Elements up to which a thread has one counter: what it makes of random words is then what takes long."""


def default(num: int, itemsize: int) -> Tile:
    """Sixteen bytes an access, four of them a thread where there are many."""
    if num < FEW_ELEMENTS:
        return Tile(128, 4)
    return Tile(512 if itemsize == 2 else 256, 4)
