"""Which kernel multiplies, and how the weight is cut up between programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

MAX_ROWS = 16
"""The tensor cores take 16 at once; more rows are not this kernel's business."""

EARLY_WEIGHT_BYTES = 128 << 20
"""Larger weights gain nothing from an early start, and programs that wait stand in the way of those that run."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Kernel (``row`` or ``tile``), outputs of a program, elements of K at once, warps, stages, shares of K."""

    kernel: str
    outputs: int
    step: int
    num_warps: int = 4
    num_stages: int = 1
    shares: int = 1


def choose(
    rows: int, k: int, n: int, itemsize: int, gated: bool, early: bool, num_sms: int, normed: bool = False
) -> Linear:
    """The row kernel for one row and for float32; the tensor cores for the rest (lab/notes/attention.md).

    A norm's weight is read beside every row of the product's: four rows share it, one alone takes 22 µs for 14.
    """
    # up to as many outputs, two rows are still faster on the ordinary units
    if itemsize == 4 or rows == 1 or (rows == 2 and n <= 4096 and not gated):
        return _fitted(_row(rows, k, n, itemsize, gated, early or normed), k, itemsize)
    return _tile(k, n, gated, early, num_sms)


def _row(rows: int, k: int, n: int, itemsize: int, gated: bool, early: bool) -> Linear:
    """4,096² takes 10.4 µs either way, 28,672 × 4,096 54.4 µs a row a program, 57.2 four; with early starts, four."""
    if itemsize == 4:
        return Linear("row", 2 if gated else 4, 512, 4) if rows > 4 else Linear("row", 1, 1024, 4)
    if rows > 1:
        return Linear("row", 4 if n > 2048 else 1, 1024, 4)
    # rows of a weight longer than this are read several at a time by one program; shorter ones each by its own
    if gated or early or k * itemsize > 16384:
        return Linear("row", 4 if n > 2048 else 1, 1024, 4)
    return Linear("row", 1, 2048, 8)


def _fitted(chosen: Linear, k: int, itemsize: int) -> Linear:
    """Not more than a row at once, and warps enough to load it 16 bytes a thread."""
    least = 32 * 16 // itemsize
    step = clamp(power_of_two(k), least, chosen.step)
    return replace(chosen, step=step, num_warps=clamp(step // least, 1, chosen.num_warps))


def _tile(k: int, n: int, gated: bool, early: bool, num_sms: int) -> Linear:
    """64 outputs, the least a warp group multiplies; K shared out where the device would stand half empty.

    6,144 outputs take 15.4 µs whole and 16.2 in two shares; started early, the shares take 14.9.
    """
    if gated:
        return Linear("tile", 32, 128, 2, 3)
    programs = cdiv(n, 64)
    if programs >= num_sms:
        return Linear("tile", 64, 128, 4, 4)
    if programs > num_sms // 2 and k >= 1024 and not early:
        return Linear("tile", 64, 256, 4, 3)
    return Linear("tile", 64, 128, 4, 4, clamp(2 * num_sms // programs, 1, max(1, k // 512)))


def share_of(k: int, chosen: Linear) -> int:
    """Elements of K of a share: whole steps."""
    return cdiv(cdiv(k, chosen.step), chosen.shares) * chosen.step
