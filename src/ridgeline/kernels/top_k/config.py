"""Warps of a row."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import power_of_two

REGISTERS = 64
"""Of a thread, that hold a row's numbers."""


@dataclass(frozen=True, slots=True)
class Row:
    """Warps that share a row: with one, nobody waits for anybody else between two turns."""

    num_warps: int


def default(n: int, itemsize: int) -> Row:
    """As few as hold the numbers, which are twice as wide as the elements."""
    words = power_of_two(n) * itemsize // 2
    return Row(max(1, min(8, words // (32 * REGISTERS))))
