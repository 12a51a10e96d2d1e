"""Weights changed once instead of activations at every call: batch norm in evaluation goes into the layer before it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Extra, Scene
from ridgeline.optimizer.rewrites.words import Call, call

_CHANNEL_DIM = {"linear": 0, "conv1d": 0, "conv2d": 0, "conv3d": 0, "conv_transpose2d": 1}
"""The dim of a weight that counts output channels."""


@rewrite(
    "fold-norm",
    summary="batch norm in evaluation is folded into the convolution or linear layer before it",
    modes=(INFERENCE,),
    worth=Worth(
        eager=1.3, compiled=1.05, basis="a pass over the activations less; compilers fuse the pass, not the read"
    ),
    exact="rounding",
)
def fold_norm(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        match = None if read is None or read.op != "batch_norm" else _folded(scene, read)
        if match is not None:
            found.append(match)
    return found


def _folded(scene: Scene, norm: Call) -> Match | None:
    if norm.get("training", False) is not False or norm.get("running_mean") is None or norm.get("running_var") is None:
        return None
    layer = call(norm["input"])
    if layer is None or layer.op not in _CHANNEL_DIM or len(layer.node.users) != 1:
        return None
    if layer.op == "conv_transpose2d" and layer.get("groups", 1) != 1:
        return None
    if layer.op == "linear" and len(scene.shape(layer.node) or ()) != 2:
        return None  # batch norm counts channels at dim 1
    names = ("running_mean", "running_var", "weight", "bias")
    sources = [layer["weight"], layer.get("bias"), *(norm.get(name) for name in names)]
    fold = _Fold.of(scene, sources, norm.get("eps", 1e-5), _CHANNEL_DIM[layer.op])
    if fold is None or not scene.unchanged(sources, (layer.node,), norm.node):
        return None
    num = len(scene.extras)
    weight = scene.extra_input(fold.weight_like(), Extra(f"folded_weight_{num}", fold.current_weight))
    bias = scene.extra_input(fold.bias_like(), Extra(f"folded_bias_{num}", fold.current_bias))
    new = _same_layer(scene, layer, norm.node, weight, bias)
    if not scene.alike_sizes(norm.node, new) and not scene.alike(norm.node, new):
        scene.discard(new)
        scene.drop_extras(weight, bias)
        return None
    scene.relaid(norm.node, new)
    scene.discard(norm.node)
    return scene.match(new, f"batch norm folded into {layer.op}")


def _same_layer(scene: Scene, layer: Call, before: fx.Node, weight: fx.Node, bias: fx.Node) -> fx.Node:
    """The layer with another weight and bias."""
    kwargs = {name: value for name, value in layer.given.items() if name not in ("input", "weight", "bias")}
    return scene.emit(before, layer.node.target, layer["input"], weight, bias, **kwargs)  # type: ignore[arg-type]


class _Fold:
    """A weight and a bias with a batch norm in them, made again when one of their six sources has changed."""

    def __init__(self, indices: Sequence[int | None], eps: float, channel_dim: int, real: Sequence[Any]) -> None:
        self._indices, self._eps, self._channel_dim = tuple(indices), eps, channel_dim
        self._real = real
        self._counter = _step_counter(real[2])
        self._seen: tuple[Any, ...] = ()
        self._weight: Tensor = torch.empty(0)
        self._bias: Tensor = torch.empty(0)

    @classmethod
    def of(cls, scene: Scene, sources: Sequence[Any], eps: float, channel_dim: int) -> _Fold | None:
        """A fold of parameters and buffers whose changes can be noticed, or None."""
        real = [scene.real(node) if isinstance(node, fx.Node) else None for node in sources]
        for node, value in zip(sources, real, strict=True):
            if node is not None and (value is None or value.is_inference() or not value.is_floating_point()):
                return None
        if _step_counter(real[2]) is None:
            return None
        indices = [scene.input_index(node) if isinstance(node, fx.Node) else None for node in sources]
        return cls(indices, eps, channel_dim, real)

    def weight_like(self) -> Tensor:
        return self._real[0].detach()

    def bias_like(self) -> Tensor:
        weight = self._real[0]
        return weight.detach().new_empty(weight.shape[self._channel_dim])

    def current_weight(self, args: Sequence[Any]) -> Tensor:
        self._refresh(args)
        return self._weight

    def current_bias(self, args: Sequence[Any]) -> Tensor:
        self._refresh(args)
        return self._bias

    def _refresh(self, args: Sequence[Any]) -> None:
        sources = [None if index is None else args[index] for index in self._indices]
        steps = -1 if self._counter is None else self._counter._version
        seen = (steps, *((source.data_ptr(), source._version) for source in sources if source is not None))
        if seen != self._seen:
            self._weight, self._bias = folded(sources, self._eps, self._channel_dim)
            self._seen = seen


def _step_counter(running_mean: Any) -> Tensor | None:
    """The count of training steps beside a module's running mean.

    Batch norm's kernels write running statistics without telling autograd's version counter; the count they keep beside
    them tells it. Statistics that have no such count beside them cannot be watched.
    """
    for owner in gc.get_referrers(running_mean):
        if isinstance(owner, dict) and owner.get("running_mean") is running_mean:
            count = owner.get("num_batches_tracked")
            if isinstance(count, Tensor):
                return count
    return None


@torch.no_grad()
def folded(sources: Sequence[Tensor | None], eps: float, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer followed by a batch norm, worked out in float64 and rounded once."""
    weight, bias, mean, var, gamma, beta = (None if x is None else x.double() for x in sources)
    assert weight is not None and mean is not None and var is not None
    scale = torch.rsqrt(var + eps) * (1.0 if gamma is None else gamma)
    shift = (torch.zeros_like(mean) if bias is None else bias) - mean
    new_bias = shift * scale + (0.0 if beta is None else beta)
    shape = [1] * weight.dim()
    shape[channel_dim] = -1
    dtype = sources[0].dtype  # type: ignore[union-attr]
    new_weight = weight * scale.view(shape)
    kept = torch.empty_like(sources[0]).copy_(new_weight)  # type: ignore[arg-type]
    return kept, new_bias.to(dtype)
