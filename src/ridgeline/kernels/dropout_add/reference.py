"""Dropout and add as they are meant, with the very mask the kernel draws; PyTorch's form; and wrong kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOW = 0xFFFFFFFF


QUARTER = 1024
"""Elements that share a word of the generator with nobody in their program: part of what the mask is."""

ROUNDS = 7


def philox(seed: int, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words of Philox-4x32-7 with the counter (its low and high half, 0, 0), as 32-bit integers."""
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    c0, c1 = counters & LOW, (counters >> 32) & LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(ROUNDS):
        high_b, low_b = _product(0xCD9E8D57, c2)
        high_a, low_a = _product(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32-bit product, in 64-bit integers that never overflow."""
    low, high = b & 0xFFFF, b >> 16
    first = a * low
    second = a * high + (first >> 16)
    return second >> 16, ((second & 0xFFFF) << 16) | (first & 0xFFFF)


def words(seed: int, num: int, device: torch.device) -> Tensor:
    """32-bit words by position: of every 4·QUARTER elements, each quarter has one of the generator's four words."""
    tiles = -(-num // (4 * QUARTER))
    counters = torch.arange(tiles * QUARTER, device=device)
    quarters = [word.view(tiles, QUARTER) for word in philox(seed, counters)]
    return torch.stack(quarters, 1).reshape(-1)[:num]


def threshold(p: float) -> int:
    """An element stays where its word is not below this: 2³² steps of probability, of which one always stays."""
    return min(round(p * 2**32), LOW)


def kept(seed: Tensor, like: Tensor, p: float) -> Tensor:
    return (words(int(seed), like.numel(), like.device) >= threshold(p)).view(like.shape)


def forward(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x / (1 - p), 0.0) + residual


def backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, dy, p), dy / (1 - p), 0.0)


def eager(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """PyTorch in the precision of its inputs, with the same mask."""
    return x * (kept(seed, x, p).to(x.dtype) / (1 - p)) + residual


def pytorch(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) + residual


def not_scaled(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x, 0.0) + residual


def residual_dropped(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x / (1 - p) + residual, 0.0)
