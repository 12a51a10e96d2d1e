"""Rows laid dense once: a residual stream that comes out of a transposed image stays transposed through every layer.

A convolution's [batch, channels, steps] seen as [batch, steps, channels] keeps its memory, sums keep the layout of what
they add, and so all layers of Whisper's encoder or of a patch embedding without a class token read and write across
rows. One copy at the entry makes every sum behind it dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LEAST_NUMBERS = 1 << 18


def lies_across(x: Tensor) -> bool:
    """Whether a [batch, rows, columns] tensor is large and its rows are the dense dim."""
    return x.dim() == 3 and x.is_floating_point() and min(x.shape[1:]) > 1 and x.stride(1) == 1 != x.stride(2) and (
        x.numel() >= LEAST_NUMBERS
    )  # fmt: skip


def entry_of(block: nn.Module) -> Callable[[Any], Any]:
    """What a block is handed, laid dense where its columns are what the block normalizes."""
    weights = [getattr(module, "weight", None) for module in block.modules()]
    widths = {w.shape[0] for w in weights if isinstance(w, Tensor) and w.dim() == 1}  # those of norms

    def laid(value: Any) -> Any:
        if type(value) is Tensor and value.dim() == 3 and value.shape[2] in widths and lies_across(value):
            return value.contiguous()
        return value

    return laid


def dense(x: Tensor) -> Tensor:
    """A copy along its rows."""
    return x.clone(memory_format=torch.contiguous_format)
