"""Gated units as they are meant, in the precision of their inputs; PyTorch's form; and kernels that would be wrong."""

from __future__ import annotations

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
    with torch.enable_grad():
        g, u = gate.detach().requires_grad_(), up.detach().requires_grad_()
        dgate, dup = torch.autograd.grad(forward(g, u, kind), (g, u), dy)
    return dgate, dup


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
