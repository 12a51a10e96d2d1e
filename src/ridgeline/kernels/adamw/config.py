"""Launch configurations of AdamW."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Update:
    """Elements a program moves at once, its warps, and the most elements of a chunk."""

    block: int
    num_warps: int
    longest: int


def update(bits: int) -> Update:
    """Four tensors of sixteen bytes a lane, twice: 8 KB of each stream in flight for a program of four warps."""
    return Update(1024, 4, 8192) if bits == 32 else Update(1024, 4, 8192)
