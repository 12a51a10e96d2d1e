"""What scales and shifts a norm's channels becomes part of the norm's own weight and bias: a pass over images less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import Scene
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 20
"""Below, two launches for vectors cost what a pass over the result does."""


@rewrite(
    "norm-affine",
    summary="numbers and vectors that a norm of float32 channels is scaled and shifted by go into its weight and bias",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=1.02, basis="a result is not read and written once more"),
)
def norm_affine(scene: Scene) -> list[Match]:
    if scene.training or scene.autocast:
        return []
    return [match for node in scene.nodes if (match := _put(scene, node)) is not None]


def _put(scene: Scene, node: fx.Node) -> Match | None:
    found = _behind(scene, node)
    if found is None:
        return None
    read, op, by = found
    leaves = [each for each in (*read.given.values(), by) if isinstance(each, fx.Node)]
    if not scene.unchanged(tuple(leaves), (read.node, node), node):
        return None
    if isinstance(by, fx.Node):
        by = scene.emit(node, torch.reshape, by, (-1,))
    channels = (scene.shape(node) or (0, 0))[1]
    weight, bias = _affine(scene, node, read, op, by, channels)
    new = scene.emit(node, read.node.target, **{**read.given, "weight": weight, "bias": bias})
    if not scene.replace(node, new):
        return None
    scene.discard(node)
    return scene.match(new, f"{op} behind {read.op}")


def _behind(scene: Scene, node: fx.Node) -> tuple[Call, str, Any] | None:
    """(norm, op, number or vector) of a sum, difference, product or quotient of a norm that nobody else reads."""
    read = call(node)
    if read is None or read.op not in ("add", "sub", "mul", "div") or read.given.get("rounding_mode"):
        return None
    a, b = read.given.get("input"), read.given.get("other")
    turned = read.op in ("add", "mul") and not _is_norm(scene, a)
    source, by = (b, a) if turned else (a, b)
    if not _is_norm(scene, source) or by is source or read.given.get("alpha") is not None:
        return None
    if scene.shape(node) != scene.shape(source) or scene.dtype(node) is not torch.float32:
        return None
    number = isinstance(by, (int, float)) and not isinstance(by, bool)
    if not number and not _is_channelwise(scene, by, source):
        return None
    norm = call(source)
    return None if norm is None else (norm, read.op, by)


def _is_norm(scene: Scene, node: Any) -> bool:
    read = call(node) if isinstance(node, fx.Node) else None
    if read is None or read.op not in ("group_norm", "instance_norm") or len(read.node.users) != 1:
        return False
    if read.get("running_mean") is not None or read.get("use_input_stats", True) is not True:
        return False  # it writes to its statistics, or normalizes by them
    tensor = scene.tensor(read.node)
    return tensor is not None and tensor.dtype == torch.float32 and tensor.numel() >= LEAST_ELEMENTS


def _is_channelwise(scene: Scene, by: Any, source: fx.Node) -> bool:
    """Whether it is a float32 tensor of one element, or of one a channel that spreads over batch and pixels."""
    x, y = (scene.tensor(each) if isinstance(each, fx.Node) else None for each in (by, source))
    if x is None or y is None or x.dtype != torch.float32 or x.device != y.device or x.dim() > y.dim():
        return False
    full = (1,) * (y.dim() - x.dim()) + tuple(x.shape)
    return all(size == 1 or (dim == 1 and size == y.shape[1]) for dim, size in enumerate(full))


def constants(like: Tensor, num: int, value: float) -> Tensor:
    """A vector of one number."""
    return like.new_full((num,), value)


def _affine(scene: Scene, at: fx.Node, read: Call, op: str, by: Any, channels: int) -> tuple[Any, Any]:
    """The norm's weight and bias with a number or a vector in them; where it has none, ones and zeros stand for it."""
    weight, bias = read.given.get("weight"), read.given.get("bias")
    weight = scene.emit(at, constants, read["input"], channels, 1.0) if weight is None else weight
    bias = scene.emit(at, constants, read["input"], channels, 0.0) if bias is None else bias
    change = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op]
    moved = scene.emit(at, change, bias, by)
    return (weight if op in ("add", "sub") else scene.emit(at, change, weight, by)), moved
