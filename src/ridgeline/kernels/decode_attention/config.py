"""How many programs share a sequence's keys, and how many keys they take at once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two

PROGRAMS_PER_SM = 2
BLOCKS_A_SHARE = 1
"""Blocks of keys that a share has at least: one step of decoding is too short to be spent on few processors."""

FEW_BLOCKS = 4
"""A share of more blocks than this gains from a third stage; a shorter one loses by it."""


MOST_JOINED = 16
"""Shares of a key head that its last program joins itself; more are read too slowly by one program."""

JOINED_ELEMENTS = 8192
"""Of shares that are joined at once: 64 registers of a thread."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Keys of a block, shares of a sequence, warps and stages; ``early`` says when the joining kernel may start,
    ``inside`` that there is none: the last program of a key head joins its shares."""

    keys: int
    shares: int
    num_warps: int = 4
    num_stages: int = 3
    early: int = 2
    inside: bool = False


def choose(batch: int, key_heads: int, longest: int, head_dim: int, num_sms: int) -> Decode:
    keys = 64 if head_dim <= 128 else 32
    wanted = cdiv(PROGRAMS_PER_SM * num_sms, max(1, batch * key_heads))
    shares = clamp(wanted, 1, max(1, longest // (BLOCKS_A_SHARE * keys)))
    stages = 3 if longest > FEW_BLOCKS * keys * shares else 2
    return Decode(keys, shares, 4, stages, inside=1 < shares <= MOST_JOINED)


def joined_at_once(ratio: int, wide: int, shares: int) -> int:
    """Shares that a program joins at once, of as many heads as share keys."""
    return clamp(power_of_two(shares), 1, max(1, JOINED_ELEMENTS // (power_of_two(ratio) * wide)))
