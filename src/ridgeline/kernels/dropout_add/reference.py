"""Dropout and add as they are meant, with the very mask the kernel draws; PyTorch's form; and wrong kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOW = 0xFFFFFFFF


TOGETHER, STEPS = 8, 1 << 16
"""Elements that share a call of the generator, and values that each one's number has: part of what the mask is."""

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


def numbers(seed: int, num: int, device: torch.device) -> Tensor:
    """16-bit numbers by position: the lower and the upper half of each of the four words of every eight elements."""
    words = philox(seed, torch.arange(-(-num // TOGETHER), device=device))
    halves = [half for word in words for half in (word % STEPS, word // STEPS)]
    return torch.stack(halves, 1).reshape(-1)[:num]


def threshold(p: float) -> int:
    """An element stays where its number is not below this: the nearest step of probability, of which one stays."""
    return min(round(p * STEPS), STEPS - 1)


def scale(p: float) -> float:
    """What elements that stay are multiplied by: the mean is theirs, whichever step is nearest."""
    return STEPS / (STEPS - threshold(p))


def kept(seed: Tensor, like: Tensor, p: float) -> Tensor:
    return (numbers(int(seed), like.numel(), like.device) >= threshold(p)).view(like.shape)


def forward(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x * scale(p), 0.0) + residual


def backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, dy, p), dy * scale(p), 0.0)


def eager(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """PyTorch in the precision of its inputs, with the same mask."""
    return x * (kept(seed, x, p).to(x.dtype) * scale(p)) + residual


def pytorch(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) + residual


def not_scaled(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x, 0.0) + residual


def residual_dropped(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(kept(seed, x, p), x * scale(p) + residual, 0.0)
