"""What PyTorch's own products do with their factors under autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_anywhere: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, tensors in its type, as PyTorch's products take them; elsewhere as they are."""
    if not _anywhere():
        return tensors
    kind = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    to = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(to) for x in tensors)


def as_cached(query: Tensor, cache: Tensor) -> Tensor:
    """Under autocast, a query in the type of the cache it is to read."""
    return query.to(cache.dtype) if _anywhere() and torch.is_autocast_enabled("cuda") else query


def widens(x: Tensor) -> bool:
    """Whether a loss is float32 whatever its logits are: under autocast."""
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
