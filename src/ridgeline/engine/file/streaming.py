"""Weights on a device: all of them, or, beyond a budget, fetched from the host when a step needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def placed(
    weights: Mapping[str, Tensor], device: torch.device, budget_bytes: int | None
) -> tuple[dict[str, Tensor | Callable[[], Tensor]], int]:
    """Weights by name, and how many bytes of them are fetched by every call.

    On the CPU they stay in the file's mapping, whose pages the system loads and drops by itself. On a GPU the smallest
    ones are held first: they cost the most transfers a byte.
    """
    if device.type == "cpu" and budget_bytes is None:
        return dict(weights), 0
    made: dict[str, Any] = {}
    held = streamed = 0
    for name in sorted(weights, key=lambda name: (weights[name].nbytes, name)):
        tensor = weights[name]
        if budget_bytes is None or held + tensor.nbytes <= budget_bytes:
            made[name] = tensor.to(device)
            held += tensor.nbytes
        else:
            source = tensor.pin_memory() if device.type == "cuda" else tensor
            made[name] = partial(_fetched, source, device)
            streamed += tensor.nbytes
    return made, streamed


def _fetched(source: Tensor, device: torch.device) -> Tensor:
    return source.clone() if device.type == "cpu" else source.to(device, non_blocking=True)
