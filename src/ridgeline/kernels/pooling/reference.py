"""Pooling as it is meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
_MEAN = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}
Ints = list[int]


def forward(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    call: Any = (_MEAN if mean else _LARGEST)[x.dim()]
    return call(x, window, stride, padding) if mean else call(x, window, stride, padding, dilation)


eager = forward


def shifted(x: Tensor, *rest: Any) -> Tensor:
    """Windows one pixel further on."""
    return forward(torch.roll(x, 1, -1), *rest)


def last_lost(x: Tensor, window: Ints, *rest: Any) -> Tensor:
    """One element of each window's last row missing, made up for in the mean."""
    less = x.clone()
    less[..., -1] = less[..., 0]
    return forward(less, window, *rest)
