"""The product and what follows it as they are meant, PyTorch's own form, and kernels that would be wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
}


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
) -> Tensor:  # fmt: skip
    return finish(F.linear(x, w), bias, added, mean, var, gamma, beta, eps, activation, last)


def finish(
    y: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
) -> Tensor:  # fmt: skip
    y = y if bias is None else y + bias
    if mean is not None and var is not None:
        y = (y - mean) * torch.rsqrt(var + eps)
        y = y if gamma is None else y * gamma
        y = y if beta is None else y + beta
    y = y if added is None or last else y + added
    y = ACTIVATIONS[activation](y)
    return y + added if added is not None and last else y


def unscaled(x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, *rest: object) -> Tensor:
    """The norm forgotten."""
    return forward(x, w, bias, added, None, None, None, None, *rest[4:])  # type: ignore[arg-type]


def sum_lost(x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, *rest: object) -> Tensor:
    """What should be added left out."""
    return forward(x, w, bias, None, *rest)  # type: ignore[arg-type]
