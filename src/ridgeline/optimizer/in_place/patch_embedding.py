"""Convolutions whose windows lie side by side, as one product: an image cut into patches, a clip into tubes.

A filter of 16 × 16 over three channels moved by 16 is a product of patches with a matrix. cuDNN pads three channels to
eight and takes 0.46 ms for ViT-L's 64 images on an H200, the product and the copy that lays patches out less than a
tenth of that. Where a window has many channels, cuDNN is as fast and needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine.autocast import computed_in

MOST_CHANNELS = 8
"""Up to so many channels cuDNN pads them: an eighth of a 16-byte access each, or fewer."""
LEAST_TERMS = 16
"""Elements of a window: below, the copy costs more than the product gains."""
LEAST_NUMBERS = 1 << 18
"""Elements of the input from which it matters."""
ALIGNED = 8
NARROW = (torch.bfloat16, torch.float16)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def patched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution by ``weight`` whose stride is the size of its windows, without padding; channels lie last."""
    sizes = weight.shape[2:]
    counts = [length // size for length, size in zip(x.shape[2:], sizes, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        x = x if x.shape[2 + dim] == count * size else x.narrow(2 + dim, 0, count * size)
    num = len(counts)
    cut = x.reshape(*x.shape[:2], *(n for pair in zip(counts, sizes, strict=True) for n in pair))
    windows, inside = range(2, 2 + 2 * num, 2), range(3, 3 + 2 * num, 2)
    rows = cut.permute(0, *windows, 1, *inside).reshape(-1, weight[0].numel())
    filters = weight.reshape(weight.shape[0], -1)
    if lack := -rows.shape[1] % ALIGNED:  # rows off 16 bytes are read in small pieces
        rows, filters = F.pad(rows, (0, lack)), F.pad(filters, (0, lack))
    made = F.linear(rows, filters, bias).view(x.shape[0], *counts, weight.shape[0])
    return made.permute(0, -1, *range(1, 1 + num))


def is_patching(weight: Tensor, stride: Sequence[int], padding: Any, dilation: Sequence[int], groups: int) -> bool:
    """Whether windows lie side by side, and hold few channels of 16 bits: cuDNN's weak spot."""
    sizes = tuple(weight.shape[2:])
    plain = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    narrow = computed_in(weight) in NARROW and (weight.shape[1] <= MOST_CHANNELS or len(sizes) == 3)
    return narrow and plain and groups == 1 and tuple(stride) == sizes and set(dilation) == {1} and (
        weight[0].numel() >= LEAST_TERMS
    )  # fmt: skip


def is_patch_layer(module: nn.Module) -> bool:
    """Whether a module is such a convolution."""
    return type(module) in LAYERS and module.padding_mode == "zeros" and is_patching(
        module.weight, module.stride, module.padding, module.dilation, module.groups
    )  # fmt: skip


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether an input is a batch of 16-bit images large enough to matter."""
    alike = computed_in(x) == computed_in(weight) in NARROW
    return x.dim() == weight.dim() and alike and x.numel() >= LEAST_NUMBERS


def forward_of(original: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    """A forward for such a layer: one product where the input fits, else what it did."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if input.device.type not in devices or not fits(input, self.weight):
            found: Tensor = original(self, input)
            return found
        dtype, bias = computed_in(self.weight), self.bias
        return patched(input.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))

    return forward
