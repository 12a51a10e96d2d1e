"""Dropout and add as they are meant, with the very mask the kernel draws; PyTorch's form; and wrong kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOW = 0xFFFFFFFF


def philox(seed: int, positions: Tensor) -> Tensor:
    """First word of Philox-4x32-10 with the counter (low and high half of the position, 0, 0), as 32-bit integers."""
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    c0, c1 = positions & LOW, (positions >> 32) & LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        high_b, low_b = _product(0xCD9E8D57, c2)
        high_a, low_a = _product(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32-bit product, in 64-bit integers that never overflow."""
    low, high = b & 0xFFFF, b >> 16
    first = a * low
    second = a * high + (first >> 16)
    return second >> 16, ((second & 0xFFFF) << 16) | (first & 0xFFFF)


def uniform(seed: int, num: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) by position: the upper 31 bits, folded, as the device makes them."""
    word = philox(seed, torch.arange(num, device=device))
    signed = torch.where(word >= 2**31, word - 2**32, word)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10


def kept(seed: Tensor, like: Tensor, p: float) -> Tensor:
    limit = torch.tensor(p, dtype=torch.float32, device=like.device)
    return (uniform(int(seed), like.numel(), like.device) >= limit).view(like.shape)


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
