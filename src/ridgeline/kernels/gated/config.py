"""Launch configurations of the gated units."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Elements a program computes, and its warps; what the L2 is told of what is read and written."""

    block: int
    num_warps: int
    reads: str = ""
    writes: str = ""


def forward(cols: int, num_bytes: int) -> Pointwise:
    """Eight elements a thread: 8192×14336 165.8 µs, 166.5 with sixteen."""
    chosen = backward(cols)
    # From so many bytes of an input on the L2 is told to keep what is read, as for the norms: 8192×14336 164.4 µs,
    # 166.8 else.
    return replace(chosen, reads="evict_last") if num_bytes >= 96 << 20 else chosen


def backward(cols: int) -> Pointwise:
    """Eight elements a thread: 8192×14336 276.5 µs, 279.4 with sixteen; 2048×8192 43.6 and 44.4."""
    block = min(power_of_two(cols), 1024)
    return Pointwise(block, clamp(block // 256, 1, 4))


def default(cols: int) -> Pointwise:
    """Sixteen elements a thread; a row shorter than a block gets a block of its own size."""
    block = min(power_of_two(cols), 2048)
    return Pointwise(block, clamp(block // 512, 1, 4))
