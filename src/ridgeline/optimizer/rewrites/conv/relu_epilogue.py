"""Convolutions that end in ReLU: bias, residual sum and activation in the convolution's last step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import Scene
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_active_modes = torch._C._len_torch_dispatch_stack
Ints = list[int]


def activated_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> Tensor:
    """relu(conv2d(x) + bias + added), all in one kernel of cuDNN on a GPU; one opaque op to tracers."""
    if type(x) is Tensor and not _active_modes():
        return _activated(x, weight, bias, added, stride, padding, dilation, groups)
    return torch.ops.ridgeline_optimizer.activated_convolution(
        x, weight, bias, added, stride, padding, dilation, groups
    )


def _activated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> Tensor:
    if not x.is_cuda:
        total = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return F.relu(total if added is None else total + added)
    if added is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, stride, padding, dilation, groups)


_op = torch.library.custom_op("ridgeline_optimizer::activated_convolution", _activated, mutates_args=())


@_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> Tensor:
    return torch.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups))


@rewrite(
    "conv-activation",
    summary="ReLU behind a convolution, with a residual sum between, is computed in the convolution's last step",
    modes=(INFERENCE,),
    worth=Worth(
        eager=1.0, compiled=1.0, basis="a pass over the activations less; cuDNN's fused engines, not yet raced"
    ),
    needs_kernels=True,
)
def conv_activation(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        if (
            read is None
            or read.op != "relu"
            or scene.autocast
            or scene.training
            or not isinstance(read["input"], fx.Node)
        ):
            continue
        match = _joined(scene, node, read["input"])
        if match is not None:
            found.append(match)
    return found


def _joined(scene: Scene, node: fx.Node, source: fx.Node) -> Match | None:
    layer, added = _convolution(scene, source)
    if layer is None or layer.get("bias") is None or len(scene.shape(layer["input"]) or ()) != 4:
        return None
    settings = _settings(layer)
    leaves = (layer["input"], layer["weight"], layer["bias"])
    if settings is None or len({scene.dtype(leaf) for leaf in leaves}) != 1:
        return None
    inside = (layer.node, source, node)
    if not scene.unchanged((*leaves, added), inside, node):
        return None
    new = scene.emit(node, activated_convolution, *leaves, added, *settings)
    if not scene.alike(node, new):
        scene.discard(new)
        return None
    node.replace_all_uses_with(new)
    scene.discard(node)
    return scene.match(new, f"convolution{' and sum' if added is not None else ''} with ReLU")


def _convolution(scene: Scene, source: fx.Node) -> tuple[Call | None, fx.Node | None]:
    """(the convolution, what is added to it) whose only use is a node."""
    read = call(source)
    if read is None or len(source.users) != 1:
        return None, None
    if read.op == "conv2d":
        return read, None
    if read.op != "add" or read.given.get("alpha") not in (None, 1):
        return None, None
    for made, other in ((read["input"], read["other"]), (read["other"], read["input"])):
        inner = call(made)
        alike = isinstance(other, fx.Node) and scene.shape(other) == scene.shape(made)
        if inner is not None and inner.op == "conv2d" and len(made.users) == 1 and alike and _same(scene, made, other):
            return inner, other
    return None, None


def _same(scene: Scene, a: fx.Node, b: fx.Node) -> bool:
    x, y = scene.tensor(a), scene.tensor(b)
    return x is not None and y is not None and x.dtype == y.dtype and x.stride() == y.stride()


def _settings(layer: Call) -> tuple[Ints, Ints, Ints, int] | None:
    """(stride, padding, dilation, groups) as lists of two; None where padding is a word."""
    found: list[Any] = []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = layer.get(name, default)
        pair = [value, value] if isinstance(value, int) else list(value) if isinstance(value, (tuple, list)) else None
        if pair is None or not all(isinstance(each, int) for each in pair):
            return None
        found.append(pair if len(pair) == 2 else pair * 2)
    return found[0], found[1], found[2], int(layer.get("groups", 1))
