"""How many programs share a sequence's keys, and how many keys they take at once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

PROGRAMS_PER_SM = 2
"""On one H200 two reach 3.7 and 4.0 TB/s where four reach 3.1 and 3.9 and eight 3.3 and 3.8 (0.5 and 1 GB of cache)."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys of a block, shares of a sequence, warps and stages."""

    keys: int
    shares: int
    num_warps: int = 4
    num_stages: int = 3


def choose(batch: int, key_heads: int, longest: int, head_dim: int, num_sms: int) -> Paged:
    keys = 64 if head_dim <= 128 else 32
    wanted = cdiv(PROGRAMS_PER_SM * num_sms, max(1, batch * key_heads))
    return Paged(keys, clamp(wanted, 1, max(1, longest // (4 * keys))))


def rows_of(ratio: int) -> int:
    """Heads that share keys, padded to what a product takes."""
    return max(16, power_of_two(ratio))
