"""Launch configurations of cross-entropy by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import lanes
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


@dataclass(frozen=True, slots=True)
class Short:
    """Rows a program holds whole, in how many pieces, and how many programs walk over all rows."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 16


MAX_STRETCHES = 64
SHORTEST_STRETCHED = 2048


def forward(rows: int, cols: int, itemsize: int, sms: int) -> Forward:
    """Sixteen elements a thread, three blocks on their way; few rows are cut until all multiprocessors have eight."""
    block = min(power_of_two(cols), 2048)
    enough = cdiv(8 * sms, max(rows, 1))
    stretches = clamp(enough, 1, min(MAX_STRETCHES, cdiv(cols, 4 * block)))
    return Forward(block, clamp(block // 512, 1, 8), 4 if cols > block else 1, stretches)


def short(cols: int, itemsize: int) -> Short:
    """A row inside one warp, so that its sums need no barrier; four warps a program."""
    block = min(power_of_two(cols), lanes(itemsize))
    return Short(4 * lanes(itemsize) // block, cdiv(cols, block), block, 4)


def backward(cols: int, itemsize: int) -> Backward:
    """Sixteen elements a thread."""
    block = min(power_of_two(cols), 4096)
    return Backward(block, clamp(block // 512, 1, 8))
