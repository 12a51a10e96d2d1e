"""Launch configurations of attention by shape; figures are from one H200 (benchmarks/2026-11-15-attention.md)."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp

L2_FOR_KEYS_BYTES = 30_000_000
"""Keys and values that stay in a 50 MB L2 beside the queries that pass through it."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Rows and keys of a block, stages of the ring between the feeding warp and the others."""

    rows: int
    keys: int
    stages: int


FORWARD = Attention(128, 128, 2)
QUERIES = Attention(128, 128, 2)
KEYS = Attention(64, 128, 2)
"""dK and dV fill the registers: blocks of 64 query rows are what is left."""


def padded(head_dim: int) -> int:
    """The head dim a kernel works on; columns past the real one are read as zeros and never written."""
    return 64 if head_dim <= 64 else 128


def heads_together(heads: int, ratio: int, keys: int, head_dim: int) -> int:
    """Heads whose tiles go side by side: as many as have their keys and values in the L2 together."""
    return clamp(L2_FOR_KEYS_BYTES // max(1, keys * head_dim * 4) * ratio, min(ratio, heads), heads)


def key_split(blocks: int, ratio: int, num_sms: int, causal: bool) -> int:
    """How many programs share a group of heads: more while there are too few programs to even out their lengths."""
    split = 1
    while blocks * split < (4 if causal else 2) * num_sms and ratio % (split * 2) == 0:
        split *= 2
    return split


def programs(tiles: int, num_sms: int) -> int:
    """Persistent programs, one a multiprocessor: their shared memory leaves no room for a second."""
    return max(1, min(tiles, num_sms))


def num_tiles(rows: int, heads: int, block: int) -> int:
    return cdiv(rows, block) * heads
