"""Launch configurations of cross-entropy by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """A stretch of a row is read in blocks, the next ones on their way; few long rows are cut into several."""

    block: int
    num_warps: int
    num_stages: int
    num_stretches: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Elements a program turns into gradients, and its warps."""

    block: int
    num_warps: int


MAX_STRETCHES = 64


def forward(rows: int, cols: int, itemsize: int, sms: int) -> Forward:
    """32 elements a thread, so that the maximum over a block is rare beside the exponentials."""
    block = min(power_of_two(cols), 8192)
    enough = cdiv(4 * sms, max(rows, 1))
    stretches = clamp(enough, 1, min(MAX_STRETCHES, cdiv(cols, 2 * block)))
    return Forward(block, clamp(block // 1024, 1, 8), 3 if cols > block else 1, stretches)


def backward(cols: int, itemsize: int) -> Backward:
    """Sixteen elements a thread."""
    block = min(power_of_two(cols), 4096)
    return Backward(block, clamp(block // 512, 1, 8))
