"""Launch configurations of the gated units."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Elements a program computes, and its warps."""

    block: int
    num_warps: int
    reads: str = ""
    writes: str = ""


def default(cols: int) -> Pointwise:
    """Sixteen elements a thread; a row shorter than a block gets a block of its own size."""
    block = min(power_of_two(cols), 2048)
    return Pointwise(block, clamp(block // 512, 1, 4))
