"""Launch configurations of the quantizing norm: RMSNorm's, with blocks that hold whole scale groups."""

from __future__ import annotations

from ridgeline.kernels.rms_norm.config import Forward, forward
from ridgeline.kernels.rows import cdiv, power_of_two

__all__ = ["Forward", "default"]


def default(rows: int, cols: int, itemsize: int, group: int) -> Forward:
    """As RMSNorm's forward pass; rows too long for registers have no configuration."""
    chosen = forward(rows, cols, itemsize)
    if group and chosen.block and chosen.block < group:
        block = max(group, power_of_two(min(cols, 256)))
        return Forward(chosen.num_warps, cdiv(cols, block), block, chosen.num_warps)
    return chosen
