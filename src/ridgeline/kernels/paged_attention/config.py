"""How many programs share a sequence's keys, and how many keys they take at once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

PROGRAMS_PER_SM = 4
"""Four of three stages take 50, 83 and 143 µs at 134, 269 and 537 MB of cache, two of five stages 52, 87 and 153."""

START_BLOCKS = 2
"""What a program's first lookups and its last sums take, in blocks of keys."""

MAX_SHARES = 128


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys of a block, shares of a sequence, warps, stages (1: through registers), when the joining kernel starts."""

    keys: int
    shares: int
    num_warps: int = 4
    num_stages: int = 3
    early: int = 2
    max_registers: int = 0


SMALL_BYTES = range(32_000_000, 100_000_000)
"""Caches that go through registers: 33.5 µs against 38.5 at 84 MB behind a flush that leaves dirty lines, 32.3 against
30.5 behind one that does not; at 134 MB they are even."""


def choose(batch: int, key_heads: int, longest: int, head_dim: int, num_sms: int, itemsize: int = 2) -> Paged:
    cache_bytes = 2 * batch * key_heads * longest * head_dim * itemsize
    if head_dim == 128 and itemsize == 2 and cache_bytes in SMALL_BYTES:
        return Paged(32, shares_of(batch * key_heads, longest, 32, 4 * num_sms), 4, 1, max_registers=128)
    keys = 64 if head_dim <= 128 else 32
    return Paged(keys, shares_of(batch * key_heads, longest, keys, PROGRAMS_PER_SM * num_sms))


def shares_of(sequences: int, longest: int, keys: int, slots: int) -> int:
    """Shares of a sequence that end soonest: whole waves of programs, each its keys and what starting one costs."""

    def waves(shares: int) -> tuple[int, int]:
        mine = cdiv(longest, shares) + START_BLOCKS * keys
        return cdiv(max(1, sequences) * shares, slots) * mine, shares

    most = clamp(longest // (4 * keys), 1, MAX_SHARES)
    return min(range(1, most + 1), key=waves)


def rows_of(ratio: int) -> int:
    """Heads that share keys, padded to what a product takes."""
    return max(16, power_of_two(ratio))
