"""The convolution as it is meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.convolution.links import ended, followed, parts_of

_PLAIN = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TURNED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    output_padding: list[int], groups: int, transposed: bool,
) -> Tensor:  # fmt: skip
    """PyTorch's convolution of as many dims as x has."""
    if transposed:
        call: Any = _TURNED[x.dim()]
        return call(x, weight, bias, stride, padding, output_padding, groups, dilation)
    call = _PLAIN[x.dim()]
    return call(x, weight, bias, stride, padding, dilation, groups)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], output_padding: list[int], groups: int, transposed: bool, chain: str,
) -> Tensor:  # fmt: skip
    y = convolved(x, weight, bias, stride, padding, dilation, output_padding, groups, transposed)
    links, pool, after = parts_of(chain)
    rows = () if vectors is None else tuple(vectors)
    return ended(followed(y, links, rows), pool, after, rows)


eager = forward


def mirrored(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Taps in the opposite order."""
    return forward(x, weight.flip(-1), *rest)


def tap_lost(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The last tap left out."""
    less = weight.clone()
    less[..., -1] = 0
    return forward(x, less, *rest)


def shifted(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Pixels read one further on."""
    return forward(torch.roll(x, 1, -1), weight, *rest)
