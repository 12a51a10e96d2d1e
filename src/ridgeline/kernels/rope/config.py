"""Launch configuration of the rotary embedding by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Rope:
    """Warps that rotate one token's heads."""

    num_warps: int


def default(heads: int, head_dim: int) -> Rope:
    """Sixteen elements of the query a thread."""
    return Rope(clamp(power_of_two(heads) * power_of_two(head_dim) // 512, 1, 16))
