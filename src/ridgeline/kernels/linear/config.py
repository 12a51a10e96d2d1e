"""Which kernel multiplies, and how the weight is cut up between programs."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

MAX_ROWS = 16
MAX_ROW_KERNEL_ROWS = 2
"""Rows up to which 16-bit products are made on the ordinary units; more go to the tensor cores."""

THREAD_BYTES = 16
WARP = 32


@dataclass(frozen=True, slots=True)
class Linear:
    """Kernel (``row`` or ``tile``), outputs of a program, elements of K at once, warps, stages, shares of K."""

    kernel: str
    outputs: int
    step: int
    num_warps: int = 4
    num_stages: int = 1
    shares: int = 1


def choose(rows: int, k: int, n: int, itemsize: int, gated: bool, num_sms: int) -> Linear:
    """The row kernel for one row or two and for float32; the tensor cores for the rest."""
    if itemsize == 4 or rows <= MAX_ROW_KERNEL_ROWS:
        return _row(rows, k, n, itemsize, gated)
    return _tile(k, n, gated, num_sms)


def _row(rows: int, k: int, n: int, itemsize: int, gated: bool) -> Linear:
    """A step is 16 bytes a thread; fewer outputs a program where there are few, or many rows to keep sums of."""
    step = clamp(power_of_two(k), WARP * THREAD_BYTES // itemsize, 128 * THREAD_BYTES // itemsize)
    outputs = 4 if n >= 2048 else 2
    if rows * (2 if gated else 1) > 8:
        outputs = 1
    elif gated or rows > 4:
        outputs = min(outputs, 2)
    return Linear("row", outputs, step, clamp(step * itemsize // (WARP * THREAD_BYTES), 1, 4))


def _tile(k: int, n: int, gated: bool, num_sms: int) -> Linear:
    """64 outputs, the least a warp group multiplies; K shared out until the device holds two programs a processor."""
    step = 64 if gated else 128
    programs = cdiv(n, 64)
    shares = clamp(2 * num_sms // programs, 1, max(1, k // (4 * step))) if programs < num_sms else 1
    return Linear("tile", 64, step, 4, 4, shares)


def share_of(k: int, chosen: Linear) -> int:
    """Elements of K of a share: whole steps."""
    return cdiv(cdiv(k, chosen.step), chosen.shares) * chosen.step
