"""Places of the largest elements as they are meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, k: int, largest: bool) -> Tensor:
    """Of equal elements the first comes first; what is no number is larger than all."""
    return torch.sort(x, dim=-1, descending=largest, stable=True).indices[..., :k].contiguous()


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """The elements at places, so that a wrong place is a wrong number."""
    return torch.gather(x, -1, places)


def eager(x: Tensor, k: int, largest: bool) -> Tensor:
    return torch.topk(x, k, dim=-1, largest=largest).values


def last_left_out(x: Tensor, k: int, largest: bool) -> Tensor:
    """The end of a row is not looked at."""
    return eager(x[..., : max(k, 2 * x.shape[-1] // 3)], k, largest)


def opposite(x: Tensor, k: int, largest: bool) -> Tensor:
    return eager(x, k, not largest)


def first_again(x: Tensor, k: int, largest: bool) -> Tensor:
    """What was found is not taken out."""
    return eager(x, 1, largest).expand(*x.shape[:-1], k)
