"""Launch configurations of LayerNorm by shape: RMSNorm's, with room for a second column sum."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.kernels.rms_norm import config as rms
from ridgeline.kernels.rms_norm.config import LONG_BLOCK, Backward, Forward

__all__ = ["LONG_BLOCK", "Backward", "Forward", "backward", "forward"]


def forward(rows: int, cols: int, itemsize: int) -> Forward:
    """As RMSNorm's: the same bytes, one more reduction."""
    return rms.forward(rows, cols, itemsize)


def backward(rows: int, cols: int, itemsize: int) -> Backward:
    """As RMSNorm's; small tiles are halved, since two column sums take the registers that a second tile would."""
    chosen = rms.backward(rows, cols, itemsize)
    if chosen.rows > 1 and chosen.rows * chosen.block > 2048:
        return replace(chosen, rows=chosen.rows // 2)
    return chosen
