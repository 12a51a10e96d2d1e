"""Rows longer than an SM's registers and shared memory: norms and softmax by our kernel, where it wins its race."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.long_norm.config import LEAST_COLS
from ridgeline.kernels.long_norm.op import LONG_NORM, in_registers, long_norm
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 22
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def raced_rows(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> Tensor:
    """Long rows by the library or by our kernel; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _raced(x, kind, cols, weight, bias, channels, eps)
    return torch.ops.ridgeline_optimizer.raced_rows(x, kind, cols, weight, bias, channels, eps)


def _raced(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> Tensor:
    args = (x, kind, cols, weight, bias, channels, eps)
    ways = {"library": partial(_library, *args), "ours": partial(long_norm, *args),
            "in registers": partial(in_registers, *args)}  # fmt: skip
    return CONTEST.run((x.shape, kind, cols, weight is None, channels, x.device), ways, x.device)


def _library(
    x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float
) -> Tensor:
    """The same by PyTorch's kernels."""
    flat = x.view(-1, cols)
    if kind != "norm" and weight is not None:  # one weight per row, cyclic
        plain = _library(x, kind, cols, None, bias, 0, eps).view(-1, weight.numel(), cols)
        return plain.mul_(weight[:, None]).view(x.shape)
    if kind in ("softmax", "log_softmax"):
        return (flat.softmax(1) if kind == "softmax" else flat.log_softmax(1)).view(x.shape)
    if kind == "norm" and channels:
        of = weight if weight is not None else bias
        period = of.numel() // channels if of is not None else 1
        shaped = x.view(-1, period * channels, cols // channels)
        return F.group_norm(shaped, period, weight, bias, eps).view(x.shape)
    if kind == "norm":
        w, b = (None if each is None else each.reshape(cols) for each in (weight, bias))
        return F.layer_norm(flat, (cols,), w, b, eps).view(x.shape)
    size = flat.abs().mean(1, keepdim=True) if kind == "l1" else torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return (flat / size).view(x.shape)


_op = torch.library.custom_op("ridgeline_optimizer::raced_rows", _raced, mutates_args=())


@_op.register_fake
def _(x: Tensor, kind: str, cols: int, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float) -> Tensor:
    return x.new_empty(x.shape)


Args = tuple[fx.Node, str, int, Any, Any, int, float]


@rewrite(
    "long-rows",
    summary="norms, softmax and normalization of very long rows become our kernel, which reads them once",
    modes=(INFERENCE,),
    worth=Worth(eager=1.4, compiled=1.3, basis="two passes over memory instead of three; the faster by a race"),
    exact="reordered",
    needs_kernels=True,
)
def long_rows(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        args = None if read is None or ctx.training or ctx.autocast else _row_args(ctx, read)
        if args is None or not _is_long(ctx, args) or LONG_NORM.support(*(ctx.value(each) for each in args)):
            continue
        inside = [node, *(each for each in node.all_input_nodes if each is not args[0])]
        if not ctx.unchanged((args[0], args[3], args[4]), inside, node):
            continue
        if (match := _scaled(ctx, node, args)) is not None:
            found.append(match)
            continue
        new = ctx.emit(node, raced_rows, *args)
        if ctx.replace(node, new):
            _erase(ctx, node)
            found.append(ctx.match(new, f"{args[1]} of rows of {args[2]}"))
    return found


def _scaled(ctx: GraphContext, node: fx.Node, args: Args) -> Match | None:
    """Rows with the factor applied after them: a number per channel of an image."""
    at, last = node, _only_call(node)
    if last is not None and last.op in ("view", "reshape"):
        at, last = last.node, _only_call(last.node)
    if args[1] == "norm" or last is None or last.op != "mul" or ctx.shape(last.node) != ctx.shape(at):
        return None
    a, b = last.given.get("input"), last.given.get("other")
    by = b if a is at else a
    if not isinstance(by, fx.Node) or by is at or not _is_cyclic(ctx, by, at, args[2]):
        return None
    if not ctx.unchanged((args[0], by), (node, at, last.node), last.node):
        return None
    weight = ctx.emit(last.node, torch.reshape, by, (-1,))
    rows = ctx.emit(last.node, raced_rows, *args[:3], weight, None, 1, args[6])
    new = ctx.emit(last.node, torch.reshape, rows, ctx.shape(at))
    if LONG_NORM.support(*(ctx.value(each) for each in rows.args)) or not ctx.replace(last.node, new):
        ctx.discard(new)
        return None
    ctx.discard(last.node)
    return ctx.match(new, f"{args[1]} of rows of {args[2]}, scaled")


def _only_call(node: fx.Node) -> Call | None:
    return call(next(iter(node.users))) if len(node.users) == 1 else None


def _is_cyclic(ctx: GraphContext, by: fx.Node, at: fx.Node, cols: int) -> bool:
    """Whether a float32 tensor on the same device has one number per row, cyclic."""
    sizes, shape, x, y = ctx.shape(at), ctx.shape(by), ctx.tensor(by), ctx.tensor(at)
    if not sizes or shape is None or x is None or y is None or x.dtype != torch.float32 or x.device != y.device:
        return False
    full = (1,) * (len(sizes) - len(shape)) + shape
    first = next((i for i in range(len(sizes)) if math.prod(sizes[i:]) == cols), None)
    if first is None or len(full) != len(sizes) or any(size != 1 for size in full[first:]):
        return False
    start = next((i for i in range(first) if full[i] != 1), first)
    return full[start:first] == sizes[start:first]


def _erase(ctx: GraphContext, node: fx.Node) -> None:
    """Erase a norm that counts as in-place because it could write running statistics, but has none."""
    if node in ctx.writers():
        ctx.erase_writer(node)
    else:
        ctx.discard(node)


def _is_long(ctx: GraphContext, args: Args) -> bool:
    x = ctx.tensor(args[0])
    dense = x is not None and x.is_contiguous() and x.dtype == torch.float32
    return dense and args[2] >= LEAST_COLS and x.numel() >= LEAST_ELEMENTS  # type: ignore[union-attr]


def _row_args(ctx: GraphContext, read: Call) -> Args | None:
    """Our kernel's arguments for a call that normalizes its last dims."""
    if read.op == "div":
        return _divided(ctx, read)
    x, shape = read.given.get("input"), ctx.shape(read.given.get("input"))
    if not isinstance(x, fx.Node) or not shape:
        return None
    if read.op in ("softmax", "log_softmax"):
        last = isinstance(read.given.get("dim"), int) and read["dim"] % len(shape) == len(shape) - 1
        return (x, read.op, shape[-1], None, None, 0, 0.0) if last and read.given.get("dtype") is None else None
    weight, bias, eps = read.get("weight"), read.get("bias"), read.get("eps", 1e-5)
    if read.op == "layer_norm":
        cols = math.prod(shape[len(shape) - len(read["normalized_shape"]) :])
        return x, "norm", cols, weight, bias, 0, eps
    if read.op == "group_norm" and len(shape) > 2 and shape[1] % read["num_groups"] == 0:
        channels = shape[1] // read["num_groups"]
        return x, "norm", channels * math.prod(shape[2:]), weight, bias, channels, eps
    if read.op == "instance_norm" and len(shape) > 2 and read.get("use_input_stats", True):
        free = read.get("running_mean") is None and read.get("running_var") is None
        return (x, "norm", math.prod(shape[2:]), weight, bias, 1, eps) if free else None
    return None


def _divided(ctx: GraphContext, read: Call) -> Args | None:
    """A tensor divided by the mean or norm of its rows, along the last dim."""
    x, size = read.given.get("input"), call(read.given.get("other"))
    shape = ctx.shape(x)
    if size is None or not shape or read.given.get("rounding_mode") or not size.get("keepdim", False):
        return None
    dims = size.given.get("dim")
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    if len(dims) != 1 or not isinstance(dims[0], int) or dims[0] % len(shape) != len(shape) - 1:
        return None
    if size.given.get("dtype") is not None:
        return None
    inner = call(size.given.get("input"))
    if size.op == "mean" and inner is not None and inner.op == "abs" and inner["input"] is x:
        return x, "l1", shape[-1], None, None, 0, 0.0
    order = size.get("p", "fro") if size.op == "norm" else size.get("ord", 2) if size.op == "linalg_norm" else None
    if size.given.get("input") is x and order in (2, 2.0, "fro"):
        return x, "l2", shape[-1], None, None, 0, 0.0
    return None
