"""Which kernel multiplies narrow weights, and how they are cut up between programs."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.kernels.linear.config import MAX_ROWS, Linear, share_of
from ridgeline.kernels.rows import cdiv, clamp, power_of_two

__all__ = ["GROUP", "MAX_ROWS", "Linear", "choose", "share_of"]

GROUP = 128
"""Weights of four bits that share a scale: a step of the tile kernel."""


def choose(rows: int, k: int, n: int, bits: int, gated: bool, num_sms: int) -> Linear:
    """The row kernel for one row of eight bits; the tensor cores for the rest."""
    if bits == 8 and rows == 1:
        return _fitted(Linear("row", 2 if gated else 4 if n > 2048 else 1, 2048, 4), k)
    step = 128 if bits == 8 else GROUP
    programs = cdiv(n, 64)
    if gated:
        return Linear("tile", 64, step, 4, 4)
    if programs >= num_sms:
        return Linear("tile", 64, step, 4, 5)
    return Linear("tile", 64, step, 4, 5, clamp(2 * num_sms // programs, 1, max(1, k // 512)))


def _fitted(chosen: Linear, k: int) -> Linear:
    """Not more than a row at once, and warps enough to load it 16 bytes a thread."""
    least = 32 * 16
    step = clamp(power_of_two(k), least, chosen.step)
    return replace(chosen, step=step, num_warps=clamp(step // least, 1, chosen.num_warps))
