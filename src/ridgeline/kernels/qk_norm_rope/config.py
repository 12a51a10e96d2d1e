"""Launch configurations of the fused head norm and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Heads:
    """Warps of a program, and programs a multiprocessor holds of the backward pass; ``rows`` heads at a time, whatever
    tokens they belong to, or all heads of a token where none are given."""

    num_warps: int
    programs_per_sm: int
    rows: int = 0


def forward(heads: int, head_dim: int) -> Heads:
    """At most four warps, whatever they hold: 92 µs, 101 with eight, for 32 heads; 163, 180 with eight, for 64."""
    return Heads(clamp(power_of_two(heads) * head_dim // 1024, 1, 4), 1)


def backward(heads: int, head_dim: int) -> Heads:
    """At most eight warps: 309 µs for 64 heads, 362 with one program of sixteen. Reading ahead lost: 257, not 166."""
    num_warps = clamp(power_of_two(heads) * head_dim // 512, 1, 8)
    return Heads(num_warps, clamp(16 // num_warps, 1, 8))
