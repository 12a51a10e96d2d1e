"""How many heads a program takes, and how many programs share a sequence's keys."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.paged_attention.config import shares_of
from ridgeline.kernels.rows import cdiv, power_of_two

MAX_ROWS = 64
"""Heads of a program: their sums over 512 latent dims fill the registers of eight warps."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Heads of a program, keys of a block, shares of a sequence, warps and stages."""

    rows: int
    keys: int
    shares: int
    num_warps: int = 8
    num_stages: int = 5
    early: int = 1


def choose(batch: int, heads: int, longest: int, num_sms: int) -> Latent:
    rows = max(16, min(MAX_ROWS, power_of_two(heads)))
    keys = 32
    return Latent(rows, keys, shares_of(batch * cdiv(heads, rows), longest, keys, num_sms))
