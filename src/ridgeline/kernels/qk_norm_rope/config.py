"""Launch configurations of the fused head norm and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp


@dataclass(frozen=True, slots=True)
class Heads:
    """Warps of a program, CTAs per SM in the backward, heads that are worked on at once."""

    num_warps: int
    programs_per_sm: int
    rows: int


def rows(num_warps: int, head_dim: int) -> int:
    """Heads of 16-bit numbers whose halves a program reads with one access a lane each."""
    return clamp(num_warps * 512 // head_dim, 1, 64)


def forward(head_dim: int) -> Heads:
    """Two warps: 16384 tokens of 32 and 8 heads 89 µs, 91 on four warps, 95 on eight, 93 a token at a time; of 64 and 8
    heads 156, 160, 169 and 165; of 40 and 8 105, 108, 113 and 127."""
    return Heads(2, 1, rows(2, head_dim))


def backward(head_dim: int) -> Heads:
    """Five programs of four warps: 139 µs for 32 and 8 heads, 131 for 28 and 4. Ten of two warps 140 and 117, checked
    in bf16 at head dim 128 alone. Two of eight 157, six of four, which have fewer registers, 175, a token at a time
    169. For 64 and 8 heads five of four 237, a token at a time 313; for 40 and 8 165 and 279."""
    return Heads(4, 5, rows(4, head_dim))
