"""The scalar that backward starts from when a training step is measured or proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.example_inputs import leaves
from ridgeline.errors import OptimizeError


class Loss:
    """The given loss, else the model's own, else a fixed weighted sum of its outputs.

    Weighted, because the plain mean of a normalized output is constant, and its gradients are rounding errors.
    """

    def __init__(self, given: Callable[[Any], Tensor] | None) -> None:
        self.given = given
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, output: Any) -> Tensor:
        if self.given is not None:
            return _differentiable(self.given(output))
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor) and own.requires_grad:
            return own if own.dim() == 0 else own.mean()
        found = [tensor for _, tensor in leaves(output) if tensor.is_floating_point() and tensor.requires_grad]
        if not found:
            raise OptimizeError("no output depends on a trainable parameter: pass loss=function of the output, or "
                                'mode="infer"')  # fmt: skip
        return torch.stack([self._sum(tensor) for tensor in found]).sum()

    def _sum(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor.float() if tensor.dtype.itemsize < 4 else tensor
        wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
        key = (tensor.shape, wide, tensor.device)
        if key not in self._weights:
            steps = torch.arange(tensor.numel(), device=tensor.device, dtype=wide)
            self._weights[key] = torch.cos(steps).reshape(tensor.shape)
        return (tensor * self._weights[key]).mean()


def _differentiable(value: Any) -> Tensor:
    """Check that a loss returned a differentiable scalar."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OptimizeError(f"loss returns {what}: it is a function of the output that returns one number, as a tensor")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise OptimizeError("what loss returns depends on nothing that requires gradients: parameters may be frozen, "
                            "or the output detached")  # fmt: skip
    return value
