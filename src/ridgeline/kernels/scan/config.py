"""Blocks of a scan, by the sizes of the problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """Columns of a block, neighboring rows handled together, warps and loads on their way."""

    cols: int
    inner: int
    num_warps: int
    num_stages: int = 3


def choose(cols: int, inner: int) -> Scan:
    """A thread holds sixteen numbers: enough to read ahead, few enough that several programs share an SM."""
    if inner > 1:
        return Scan(64, min(64, 1 << (inner - 1).bit_length()), 4, 2)
    block = min(4096, max(256, 1 << (cols - 1).bit_length()))
    return Scan(block, 1, max(1, block // 512))
