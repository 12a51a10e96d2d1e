"""Rotary embedding as it is meant, in the precision of its inputs; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int, sign: float = 1.0) -> Tensor:
    half = min(cos.shape[-1], x.shape[-1] // 2)
    cos, sin = (t[..., :half] for t in (cos, sin))
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    heads_dim = 1 if sequence_dim % 4 == 2 else 2
    cos, sin = cos.unsqueeze(heads_dim), sign * sin.unsqueeze(heads_dim)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out, rest), -1)


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int
) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin, interleaved, sequence_dim), rotated(k, cos, sin, interleaved, sequence_dim)


def backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int
) -> tuple[Tensor, Tensor]:
    return tuple(rotated(g, cos, sin, interleaved, sequence_dim, -1.0) for g in (dq, dk))  # type: ignore[return-value]


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As models write it: heads before positions, both halves of the table."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(x * cos + _rotate_half(x) * sin for x in (q, k))  # type: ignore[return-value]


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def interleaved_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The other layout's pairs."""
    return forward(q, k, cos, sin, True, 2)


def shifted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Every position one too far."""
    return forward(q, k, cos.roll(1, -2), sin.roll(1, -2), False, 2)
