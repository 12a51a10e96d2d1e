"""Gated units as they are meant, in the precision of their inputs; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


def forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return ACTIVATIONS[kind](gate) * up


def backward(dy: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return dy * up * slope(gate, kind), dy * ACTIVATIONS[kind](gate)


def slope(x: Tensor, kind: str) -> Tensor:
    """The activation's derivative."""
    if kind == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if kind == "gelu_tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def geglu_erf(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def swapped(gate: Tensor, up: Tensor) -> Tensor:
    """The activation on the wrong half."""
    return F.silu(up) * gate


def quick(gate: Tensor, up: Tensor) -> Tensor:
    """The sigmoid stand-in for GELU."""
    return gate * torch.sigmoid(1.702 * gate) * up
