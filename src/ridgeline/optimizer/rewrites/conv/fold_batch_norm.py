"""Folds batch norm in evaluation into the weights of the layer before it.

The scaled weights are computed in the graph, at every call, from the current parameters and statistics, so that they
are never stale, also in a captured CUDA graph. They are small compared with the activations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_CHANNEL_DIM = {"linear": 0, "conv1d": 0, "conv2d": 0, "conv3d": 0, "conv_transpose2d": 1}
"""The dim of a weight that counts output channels."""


@rewrite(
    "fold-norm",
    summary="batch norm in evaluation is folded into the convolution or linear layer before it",
    modes=(INFERENCE,),
    worth=Worth(eager=1.0, compiled=1.0, basis="pays with conv-activation only: compilers fuse the pass it saves"),
    exact="rounding",
)
def fold_norm(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        match = None if read is None or read.op != "batch_norm" or ctx.autocast else _image_bias(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _image_bias(ctx: GraphContext, norm: Call) -> Match | None:
    if norm.get("training", False) is not False or norm.get("running_mean") is None or norm.get("running_var") is None:
        return None
    layer = call(norm["input"])
    if layer is None or not _is_foldable(ctx, layer):
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    sources = (layer["weight"], layer.get("bias"), *(norm.get(name) for name in names))
    if not ctx.unchanged((layer["input"], *sources), (layer.node,), norm.node):
        return None
    both = ctx.emit(norm.node, folded, *sources, norm.get("eps", 1e-5), _CHANNEL_DIM[layer.op])
    weight, bias = (ctx.emit(norm.node, operator.getitem, both, index) for index in (0, 1))
    kwargs = {name: value for name, value in layer.given.items() if name not in ("input", "weight", "bias")}
    new = ctx.emit(norm.node, layer.node.target, layer["input"], weight, bias, **kwargs)  # type: ignore[arg-type]
    if not ctx.alike(norm.node, new):
        ctx.discard(new)
        return None
    norm.node.replace_all_uses_with(new)
    ctx.discard(norm.node)
    return ctx.match(new, f"batch norm folded into {layer.op}")


def _is_foldable(ctx: GraphContext, layer: Call) -> bool:
    """A layer whose output only the norm reads, with the norm's channels."""
    if layer.op not in _CHANNEL_DIM or len(layer.node.users) != 1 or not isinstance(layer["weight"], fx.Node):
        return False
    if layer.op == "conv_transpose2d" and layer.get("groups", 1) != 1:
        return False
    return layer.op != "linear" or len(ctx.shape(layer.node) or ()) == 2  # batch norm's channels are dim 1


def folded(
    weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None,
    eps: float, channel_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weight and bias of a layer followed by a batch norm, computed in at least float32 and rounded once."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(var.to(wide) + eps)
    if gamma is not None:
        scale = scale * gamma
    shift: Any = -mean.to(wide) if bias is None else bias - mean.to(wide)
    shift = shift * scale if beta is None else torch.addcmul(beta.to(wide), shift, scale)
    shape = [1] * weight.dim()
    shape[channel_dim] = -1
    return (weight * scale.view(shape)).to(weight.dtype), shift.to(weight.dtype)
