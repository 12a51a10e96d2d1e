"""GELU as it is meant, in the precision of its input; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.gated.reference import slope


def forward(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return dy * slope(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def exact(x: Tensor) -> Tensor:
    return F.gelu(x)


def by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick(x: Tensor) -> Tensor:
    """The sigmoid stand-in for GELU."""
    return x * torch.sigmoid(1.702 * x)


def rectified(x: Tensor) -> Tensor:
    """Without the tail."""
    return F.relu(x)
