"""A depthwise convolution and what follows it, as they are meant, and kernels that would be wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.linear_epilogue.reference import finish


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: Sequence[int], padding: Sequence[int],
) -> Tensor:  # fmt: skip
    made = F.conv2d(x, w, None, stride, padding, groups=w.shape[0]).permute(0, 2, 3, 1)
    flat = finish(made.reshape(-1, made.shape[3]), bias, None, mean, var, gamma, beta, eps, activation, False)
    return flat.view(made.shape).permute(0, 3, 1, 2)


def turned(x: Tensor, w: Tensor, *rest: object) -> Tensor:
    """The taps turned by half a circle."""
    return forward(x, w.flip((2, 3)), *rest)  # type: ignore[arg-type]


def unscaled(x: Tensor, w: Tensor, bias: Tensor | None, *rest: object) -> Tensor:
    """The norm forgotten."""
    return forward(x, w, bias, None, None, None, None, *rest[4:])  # type: ignore[arg-type]

