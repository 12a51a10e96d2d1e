"""How columns and rows are shared out."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_INNER = 32
"""Neighboring columns from which a warp reads whole lines."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a step, and warps: 8 elements a thread fit into 32 registers with their places, and 16
    programs on a multiprocessor; 16 where programs are too few for that."""

    rows: int
    cols: int = 128
    num_warps: int = 4


def choose(outer: int, inner: int, num_sms: int) -> Tile:
    """Short steps where programs fill the device, so that the last of them do not run alone for long."""
    return Tile(8 if outer * -(-inner // 128) >= 16 * num_sms else 16)
