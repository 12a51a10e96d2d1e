"""Extremes as they are meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    """Elements, or the first places they are at; what is no number is larger and smaller than all."""
    if place:
        return x.argmax(dim) if largest else x.argmin(dim)
    return x.amax(dim) if largest else x.amin(dim)


def eager(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    return at_places(x, dim, largest, forward(x, dim, largest, True)) if place else forward(x, dim, largest, False)


def at_places(x: Tensor, dim: int, largest: bool, places: Tensor) -> Tensor:
    """The elements at places, so that a wrong place is a wrong number."""
    return torch.gather(x, dim, places.unsqueeze(dim)).squeeze(dim)


def first_half(x: Tensor, dim: int, *rest: Any) -> Tensor:
    """What comes after the middle is not looked at."""
    return eager(x.narrow(dim, 0, (x.shape[dim] + 1) // 2), dim, *rest)


def opposite(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    return eager(x, dim, not largest, place)
