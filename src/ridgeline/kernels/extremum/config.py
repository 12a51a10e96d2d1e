"""How columns and rows are shared out."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_INNER = 32
"""Neighboring columns from which a warp reads whole lines."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a step, and warps: 16 elements a thread, so that places fit beside them in registers. Half as
    many and twice the programs on a multiprocessor were no faster for places (1/52 of KernelBench, 2.8 ms as eager)."""

    rows: int = 16
    cols: int = 128
    num_warps: int = 4
    ahead: bool = False
