"""Activations in the last step of the product before them: the result is written once, already activated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene
from ridgeline.optimizer.rewrites.words import Call, call

_active_modes = torch._C._len_torch_dispatch_stack


def activated_product(bias: Tensor, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    """gelu (by tanh) or relu of ``x @ weight + bias``, all in one kernel of cuBLASLt on a GPU.

    Tracers see one opaque op: taken apart again, the activation would be a pass over memory of its own.
    """
    if type(x) is Tensor and not _active_modes():
        return _activated(bias, x, weight, gelu)
    return torch.ops.ridgeline_optimizer.activated_product(bias, x, weight, gelu)


def _activated(bias: Tensor, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    if x.is_cuda:
        return torch._addmm_activation(bias, x, weight, use_gelu=gelu)
    product = torch.addmm(bias, x, weight)
    return F.gelu(product, approximate="tanh") if gelu else F.relu(product)


_op = torch.library.custom_op("ridgeline_optimizer::activated_product", _activated, mutates_args=())


@_op.register_fake
def _(bias: Tensor, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@rewrite(
    "linear-activation",
    summary="ReLU or tanh-GELU behind a product with a bias is computed in the product's last step",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=1.05, basis="a pass over the activations less; cuBLASLt's epilogues"),
)
def linear_activation(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        kind = None if read is None or scene.autocast or scene.training else _kind(read)
        match = None if kind is None else _joined(scene, read, kind == "gelu")  # type: ignore[arg-type]
        if match is not None:
            found.append(match)
    return found


def _kind(read: Call) -> str | None:
    if read.op == "relu":
        return "relu"
    return "gelu" if read.op == "gelu" and read.get("approximate", "none") == "tanh" else None


def _joined(scene: Scene, act: Call, gelu: bool) -> Match | None:
    source, steps = _before_views(act["input"])
    product = None if len(source.users) != 1 else _product(scene, source)
    shape = scene.shape(act.node)
    if product is None or shape is None:
        return None
    bias, x, weight, turned = product
    width = (scene.shape(bias) or (0,))[-1]
    if (
        len(scene.shape(bias) or ()) != 1
        or scene.dtype(bias) != scene.dtype(x)
        or scene.dtype(x) != scene.dtype(weight)
    ):
        return None
    if not scene.unchanged((bias, x, weight), (source, *steps, act.node), act.node):
        return None
    flat = scene.emit(act.node, torch.reshape, x, (-1, (scene.shape(x) or (0,))[-1]))
    columns = scene.emit(act.node, torch.t, weight) if turned else weight
    made = scene.emit(act.node, activated_product, bias, flat, columns, gelu)
    new = scene.emit(act.node, torch.reshape, made, shape)
    if not scene.replace(act.node, new):
        return None
    scene.discard(act.node)
    return scene.match(new, f"{'GELU' if gelu else 'ReLU'} of {width} columns")


def _before_views(node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The node behind views that only this chain uses."""
    steps = []
    while (read := call(node)) is not None and read.op in ("view", "reshape") and len(node.users) == 1:
        steps.append(node)
        node = read["input"]
    return node, tuple(steps)


def _product(scene: Scene, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, bool] | None:
    """(bias, x, weight, whether the weight lies turned) of a linear layer or a matrix product with a bias."""
    read = call(node)
    if read is None or read.op not in ("linear", "addmm"):
        return None
    bias, x = read.get("bias"), read["input"]
    weight = read["weight"] if read.op == "linear" else read["other"]
    plain = read.given.get("beta") in (None, 1) and read.given.get("alpha") in (None, 1)
    if not plain or not all(isinstance(each, fx.Node) for each in (bias, x, weight)):
        return None
    return bias, x, weight, read.op == "linear"
