"""Launch configurations of the fused head norm and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Heads:
    """Warps that work on one token's heads; programs a multiprocessor holds of the backward pass, and their stages."""

    num_warps: int
    programs_per_sm: int
    num_stages: int = 1


def default(heads: int, head_dim: int) -> Heads:
    """Sixteen elements of the query a thread; the backward pass keeps two column sums, so few programs fit."""
    num_warps = clamp(power_of_two(heads) * head_dim // 512, 1, 16)
    return Heads(num_warps, clamp(16 // num_warps, 1, 8))
