"""Channels-last convolution weights for a clone of a model; the model's own weights keep their layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.replay.static_inputs import is_alone

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Convolutions whose weights change their strides by channels last, without weights that other tensors share."""
    found = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)) and (
            isinstance(weight, nn.Parameter) and "weight" in module._parameters and is_alone(weight)
        ):  # fmt: skip
            last = torch.empty_like(weight, device="meta", memory_format=_LAST[weight.dim()])
            if last.stride() != weight.stride():
                found.append((path, module))
    return found


class ChannelsLastWeights:
    """Channels-last copies of weights, updated in place after the weights were written to."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs
        self._marks = self._read()

    def _read(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for weight, _ in self.pairs]

    def refresh(self) -> None:
        """Copy the weights again if one was written to or moved."""
        marks = self._read()
        if marks != self._marks:
            with torch.no_grad():
                for weight, laid in self.pairs:
                    laid.copy_(weight)
            self._marks = marks


def make_channels_last(clone: nn.Module, model: nn.Module, *, differentiable: bool) -> ChannelsLastWeights | None:
    """Give convolutions of a clone channels-last weights.

    For inference they are copies, refreshed by the result. In training every forward converts them, one copy a step, so
    that gradients reach the weights of the model.
    """
    layers = dict(clone.named_modules())
    pairs = []
    for path, original in channels_last_layers(model):
        layer, weight = layers[path], original.weight
        assert isinstance(weight, nn.Parameter)
        if differentiable:
            kind: Any = type(layer)
            layer.__class__ = _channels_last_class(kind)
            continue
        laid = nn.Parameter(weight.detach().contiguous(memory_format=_LAST[weight.dim()]), weight.requires_grad)
        layer._parameters = {**layer._parameters, "weight": laid}
        pairs.append((weight, laid))
    return ChannelsLastWeights(pairs) if pairs else None


@cache
def _channels_last_class(kind: Any) -> Any:
    """A subclass of a convolution whose weight is converted to channels last when it is read."""

    def weight(self: Any) -> Tensor:
        found = self._parameters["weight"]
        return found.contiguous(memory_format=_LAST[found.dim()])

    maker: Any = type(kind)
    return maker(kind.__name__, (kind,), {"weight": property(weight), "__module__": kind.__module__})
