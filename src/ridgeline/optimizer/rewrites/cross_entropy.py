"""Cross-entropy over large vocabularies: without a float32 copy of the logits, or without logits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import linear_cross_entropy
from ridgeline.kernels.cross_entropy.op import CROSS_ENTROPY
from ridgeline.kernels.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite

_RACED = "lab/notes/rows.md: cross-entropy forward 2.5x, backward 2.7x of the best contender"


@dataclass(frozen=True, slots=True)
class Loss:
    """A cross-entropy of class indices; ``steps`` lead from the logits to its input."""

    logits: fx.Node
    target: fx.Node
    ignore_index: int
    reduction: str
    smoothing: float
    steps: tuple[fx.Node, ...]
    out: fx.Node


def _loss(ctx: GraphContext, node: fx.Node) -> Loss | None:
    read = call(node)
    if (
        read is None
        or read.op != "cross_entropy"
        or any(read.given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    ):
        return None
    target, source = read["target"], read["input"]
    shape = ctx.shape(source)
    if shape is None or len(shape) != 2 or ctx.dtype(target) not in (torch.int64, torch.int32):
        return None
    logits, steps = _logits(ctx, source)
    return Loss(
        logits, target, read.get("ignore_index", -100), read.get("reduction", "mean"), read.get("label_smoothing", 0.0),
        (*steps, node), node,
    )  # fmt: skip


def _logits(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The logits before views that keep their last dim, copies, slices of other dims and widening casts."""
    steps: list[fx.Node] = []
    while (read := call(node)) is not None and isinstance(read.given.get("input"), fx.Node) and _harmless(ctx, read):
        steps.append(node)
        node = read["input"]
    return node, tuple(steps)


def _harmless(ctx: GraphContext, read: Call) -> bool:
    before, after = ctx.shape(read["input"]), ctx.shape(read.node)
    if before is None or after is None or before[-1] != after[-1]:
        return False
    if read.op in ("view", "reshape", "contiguous", "flatten"):
        return True
    if read.op == "getitem":
        return _leaves_last_dim(read["index"], len(before))
    start, end = ctx.dtype(read["input"]), ctx.dtype(read.node)
    return cast_target(read) is not None and start is not None and end is torch.float32 and start.is_floating_point


def _leaves_last_dim(index: Any, num: int) -> bool:
    """Whether an index keeps the last dim whole and every dim in its place."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is Ellipsis or isinstance(part, slice)) for part in parts):
        return False
    if Ellipsis in parts:
        return parts[-1] is Ellipsis or parts[-1] == slice(None)
    return len(parts) < num or parts[-1] == slice(None)


@rewrite(
    "linear-cross-entropy",
    summary="the last linear layer and its cross-entropy become one: the logits are never in memory as a whole",
    modes=(TRAINING,),
    worth=Worth(eager=1.3, compiled=1.2, basis=_RACED + "; logits and their gradient leave memory"),
    needs_kernels=True,
)
def fused_loss(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else _loss(ctx, node)
        match = None if read is None else _fused(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _fused(ctx: GraphContext, read: Loss) -> Match | None:
    head = call(read.logits)
    if head is None or head.op != "linear" or head.get("bias") is not None or read.reduction not in ("mean", "sum"):
        return None
    if any(len(node.users) != 1 for node in (read.logits, *read.steps[:-1])):
        ctx.refuse(read.out, "the logits are used for more than the loss")
        return None
    x, weight = head["input"], head["weight"]
    if ctx.dtype(x) != ctx.dtype(read.out):
        ctx.refuse(read.out, "the fused loss has the type of the hidden states, the loss a wider one")
        return None
    if not ctx.unchanged((x, weight, read.target), (read.logits, *read.steps), read.out):
        return None
    rows = _rows(ctx, read, x)
    flat = ctx.emit(read.out, torch.reshape, rows, (-1, (ctx.shape(x) or (0,))[-1]))
    if LINEAR_CROSS_ENTROPY.support(ctx.value(flat), ctx.value(weight), ctx.value(read.target)) is not None:
        ctx.discard(flat)
        return None
    new = ctx.emit(
        read.out, linear_cross_entropy, flat, weight, read.target, ignore_index=read.ignore_index,
        reduction=read.reduction, label_smoothing=read.smoothing,
    )  # fmt: skip
    if not ctx.replace(read.out, new):
        return None
    ctx.discard(read.out)
    return ctx.match(new, f"linear and cross-entropy, {(ctx.shape(weight) or (0,))[0]} classes")


def _rows(ctx: GraphContext, read: Loss, x: fx.Node) -> fx.Node:
    """The hidden states of the rows in the loss: slices of the logits are applied to them instead."""
    for step in reversed(read.steps[:-1]):
        taken = call(step)
        if taken is not None and taken.op == "getitem":
            x = ctx.emit(read.out, _taken, x, taken["index"])
        elif taken is not None and taken.op in ("view", "reshape", "flatten"):
            shape = ctx.shape(step)
            x = ctx.emit(read.out, torch.reshape, x, (*shape[:-1], (ctx.shape(x) or (0,))[-1]))  # type: ignore[index]
    return x


def _taken(x: Tensor, index: Any) -> Tensor:
    return x[index]


@rewrite(
    "cross-entropy",
    summary="cross-entropy becomes our kernel, on 16-bit logits without a float32 copy",
    worth={
        INFERENCE: Worth(eager=2.5, compiled=1.1, basis=_RACED),
        TRAINING: Worth(eager=2.6, compiled=1.3, basis=_RACED),
    },
    needs_kernels=True,
)
def cross_entropy(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else _loss(ctx, node)
        match = None if read is None else _by_kernel(ctx, read)
        if match is not None:
            found.append(match)
    return found


def kernel_loss(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str, wide: bool
) -> Tensor:
    """Cross-entropy of logits in their own dtype; ``wide`` returns float32."""
    return CROSS_ENTROPY(logits, target, ignore_index, smoothing, z_weight, reduction, wide)


def _by_kernel(ctx: GraphContext, read: Loss) -> Match | None:
    if read.reduction not in ("mean", "sum", "none") or ctx.is_small(read.logits):
        return None
    narrow = _before_cast(ctx, read)
    if not ctx.unchanged((narrow, read.target), read.steps, read.out):
        return None
    flat = ctx.emit(read.out, torch.reshape, narrow, tuple(ctx.shape(call(read.out)["input"]) or ()))  # type: ignore[index]
    wide = ctx.dtype(read.out) is torch.float32
    args = (flat, read.target, read.ignore_index, read.smoothing, 0.0, read.reduction, wide)
    if CROSS_ENTROPY.support(ctx.value(flat), ctx.value(read.target)) is not None:
        ctx.discard(flat)
        return None
    new = ctx.emit(read.out, kernel_loss, *args)
    if not ctx.replace(read.out, new):
        return None
    ctx.discard(read.out)
    return ctx.match(new, f"cross-entropy {tuple(ctx.shape(flat) or ())}")


def _before_cast(ctx: GraphContext, read: Loss) -> fx.Node:
    """The input of the loss before it was widened, through views."""
    node: fx.Node = call(read.out)["input"]  # type: ignore[index]
    current = node
    for step in read.steps[:-1]:
        taken = call(step)
        if taken is None or taken.op == "getitem":
            return node
        current = taken["input"]
        if cast_target(taken) is not None:
            return current
    return node
