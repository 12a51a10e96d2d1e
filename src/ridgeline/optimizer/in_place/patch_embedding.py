"""Convolutions with adjacent windows as one GEMM: an image cut into patches, a clip into tubes.

A filter of 16 × 16 over three channels with stride 16 is a GEMM of patches and a matrix. cuDNN pads three channels to
eight and takes 0.46 ms for ViT-L's 64 images on an H200; the GEMM and the copy that rearranges patches take less than a
tenth of that. For many channels cuDNN is as fast and needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine.autocast import computed_in

LEAST_NUMBERS = 1 << 18
"""Smaller inputs do not matter."""
ALIGNED = 8
NARROW = (torch.bfloat16, torch.float16)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def patched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution by ``weight`` with stride equal to its windows and no padding; the result is channels last."""
    sizes = weight.shape[2:]
    counts = [length // size for length, size in zip(x.shape[2:], sizes, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        x = x if x.shape[2 + dim] == count * size else x.narrow(2 + dim, 0, count * size)
    num = len(counts)
    cut = x.reshape(*x.shape[:2], *(n for pair in zip(counts, sizes, strict=True) for n in pair))
    windows, inside = range(2, 2 + 2 * num, 2), range(3, 3 + 2 * num, 2)
    rows = cut.permute(0, *windows, 1, *inside).reshape(-1, weight[0].numel())
    filters = weight.reshape(weight.shape[0], -1)
    if lack := -rows.shape[1] % ALIGNED:  # unaligned rows prevent 16-byte accesses
        rows, filters = F.pad(rows, (0, lack)), F.pad(filters, (0, lack))
    made = F.linear(rows, filters, bias).view(x.shape[0], *counts, weight.shape[0])
    return made.permute(0, -1, *range(1, 1 + num))


def is_patching(weight: Tensor, stride: Sequence[int], padding: Any, dilation: Sequence[int], groups: int) -> bool:
    """Whether windows are adjacent and hold few 16-bit channels, for which cuDNN is slow."""
    sizes = tuple(weight.shape[2:])
    plain = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    # cuDNN pads up to so many channels, to one 16-byte access.
    narrow = computed_in(weight) in NARROW and (weight.shape[1] <= 8 or len(sizes) == 3)
    # For smaller windows the copy costs more than the GEMM gains.
    return narrow and plain and groups == 1 and tuple(stride) == sizes and set(dilation) == {1} and (
        weight[0].numel() >= 16
    )  # fmt: skip


def is_patch_layer(module: nn.Module) -> bool:
    """Whether a module is such a convolution."""
    return type(module) in LAYERS and module.padding_mode == "zeros" and is_patching(
        module.weight, module.stride, module.padding, module.dilation, module.groups
    )  # fmt: skip


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether an input is a large enough batch of 16-bit images."""
    alike = computed_in(x) == computed_in(weight) in NARROW
    return x.dim() == weight.dim() and alike and x.numel() >= LEAST_NUMBERS


def forward_of(original: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    """The forward of such a layer: one GEMM if the input fits, otherwise as before."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if input.device.type not in devices or not fits(input, self.weight):
            found: Tensor = original(self, input)
            return found
        dtype, bias = computed_in(self.weight), self.bias
        return patched(input.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))

    return forward
