"""Makes a residual stream contiguous once, if it starts as a transposed image.

A convolution's [batch, channels, steps] viewed as [batch, steps, channels] keeps its strides, and sums keep the layout
of their inputs: all layers of Whisper's encoder, or of a patch embedding without a class token, would read and write
across rows. One copy at the entry makes every later sum contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LEAST_NUMBERS = 1 << 18


def is_transposed_rows(x: Tensor) -> bool:
    """Whether a [batch, rows, columns] tensor is large and contiguous along its rows."""
    return x.dim() == 3 and x.is_floating_point() and min(x.shape[1:]) > 1 and x.stride(1) == 1 != x.stride(2) and (
        x.numel() >= LEAST_NUMBERS
    )  # fmt: skip


def contiguous_entry(block: nn.Module) -> Callable[[Any], Any]:
    """A function that makes transposed inputs of a block contiguous, if the block normalizes their columns."""
    weights = [getattr(module, "weight", None) for module in block.modules()]
    widths = {w.shape[0] for w in weights if isinstance(w, Tensor) and w.dim() == 1}  # the widths of norms

    def laid(value: Any) -> Any:
        if type(value) is Tensor and value.dim() == 3 and value.shape[2] in widths and is_transposed_rows(value):
            return value.contiguous()
        return value

    return laid


def dense(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)
