"""Launch configuration of dropout and add: the elements of a program are fixed by the mask, its warps are not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Warps:
    num_warps: int


def default() -> Warps:
    """Eight elements of a 16-bit type a thread and access."""
    return Warps(4)
