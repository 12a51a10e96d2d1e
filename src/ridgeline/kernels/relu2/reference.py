"""Squared ReLU as it is meant, in the precision of its input; PyTorch's form; and a kernel that would be wrong."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def forward(x: Tensor) -> Tensor:
    return F.relu(x).square()


def backward(dy: Tensor, x: Tensor) -> Tensor:
    return 2 * F.relu(x) * dy


def signed(x: Tensor) -> Tensor:
    """Keeps the sign of what should be zero."""
    return x * x.abs()
