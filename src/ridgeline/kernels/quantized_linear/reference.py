"""Weights of eight and four bits, the product with them as it is meant, and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.linear import reference as wide

GROUP = 128


def narrowed(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in 8 or 4 bits and the scales that restore it, as ``quantized_linear`` takes them."""
    return eight(weight) if bits == 8 else four(weight)


def eight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One signed byte a weight, one float32 scale an output."""
    wide_weight = weight.detach().float()
    scale = (wide_weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide_weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def four(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights a byte, one float16 scale a group of 128: of several scales the one with the least squared error."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    best = scale = torch.empty(0)
    # shares of a group's largest weight that four bits may reach: a smaller step may save more than it cuts off
    for clip in (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7):
        tried = (clip * largest / 7).clamp(min=2.0**-14).half().float()  # least scale
        error = ((groups / tried).round().clamp(-8, 7) * tried - groups).square().sum(2, keepdim=True)
        scale, best = (tried, error) if clip == 1.0 else (
            torch.where(error < best, tried, scale), torch.minimum(error, best))  # fmt: skip
    q = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8)
    low, high = q.chunk(2, 2)
    return (low | (high << 4)).flatten(1), scale.squeeze(2).half()


def restored(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that narrow ones and their scales stand for."""
    if weight.dtype == torch.int8:
        return weight.to(dtype) * scale.to(dtype)[:, None]
    groups = weight.unflatten(1, (-1, GROUP // 2))
    both = torch.cat([groups & 15, groups >> 4], 2).to(dtype) - 8
    return (both * scale.to(dtype)[:, :, None]).flatten(1)


def forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
) -> Tensor:
    full = restored(weight, scale, x.dtype if x.dtype == torch.float64 else torch.float32)
    return wide.forward(x.to(full.dtype), full, bias, norm_weight, residual, eps, offset, activation, gated)


def plain(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
          residual: Tensor | None) -> Tensor:  # fmt: skip
    return forward(x, weight, scale, bias, norm, residual, 1e-6, 0.0, "none", False)


def gated(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
          residual: Tensor | None) -> Tensor:  # fmt: skip
    return forward(x, weight, scale, bias, norm, residual, 1e-6, 0.0, "silu", True)


def eager(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    return wide.eager(x, restored(weight, scale, torch.float32).to(x.dtype), *rest)


def eager_gated(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    return wide.eager_gated(x, restored(weight, scale, torch.float32).to(x.dtype), *rest)


def scales_moved(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    """Every output, or group, with its neighbor's scale."""
    return plain(x, weight, scale.roll(1, -1) if scale.dim() > 1 and scale.shape[1] > 1 else scale.roll(1, 0), *rest)


def halves_swapped(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    """Upper and lower bits of a byte change places; of whole bytes, neighbors."""
    wrong = (weight >> 4) | (weight << 4) if weight.dtype == torch.uint8 else weight.roll(1, 1)
    return plain(x, wrong, scale, *rest)


def gate_and_up_swapped(x: Tensor, weight: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor:
    half = weight.shape[0] // 2
    return gated(x, weight.roll(half, 0), scale.roll(half, 0), *rest)
