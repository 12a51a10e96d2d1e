"""Softmax, and GroupNorm with the SiLU after it, by our kernels."""

from __future__ import annotations

import math

import torch
from torch import fx

from ridgeline.kernels import group_norm, softmax
from ridgeline.kernels.group_norm.op import GROUP_NORM
from ridgeline.kernels.group_norm_channels_last.op import GROUP_NORM_LAST, group_norm_last
from ridgeline.kernels.softmax.op import SOFTMAX
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite

_SOFTMAX = "lab/notes/rows.md: 1.2-3x of eager forward, 1.5-2.3x backward; compilers' own is as fast"


@rewrite(
    "softmax",
    summary="softmax over the last dim becomes our kernel",
    worth={
        INFERENCE: Worth(eager=1.5, compiled=0.97, basis=_SOFTMAX),
        TRAINING: Worth(eager=1.7, compiled=0.97, basis=_SOFTMAX),
    },
    needs_kernels=True,
)
def softmax_rows(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "softmax" or ctx.autocast or not isinstance(read["input"], fx.Node):
            continue
        shape, dim = ctx.shape(read["input"]), read.given.get("dim")
        if not shape or not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
            continue
        if read.given.get("dtype") not in (None, ctx.dtype(read["input"])):
            continue
        if ctx.is_small(read["input"]) or SOFTMAX.support(ctx.value(read["input"])) is not None:
            continue
        new = ctx.emit(node, softmax, read["input"], -1)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"softmax {shape}"))
    return found


@rewrite(
    "group-norm-last",
    summary="GroupNorm (and SiLU) between channels-last convolutions keeps channels last",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.3, basis="three passes over memory, not seven; compilers read across groups"),
    needs_kernels=True,
)
def group_norm_in_place(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        image = None if read is None or read.op != "group_norm" or ctx.autocast else ctx.tensor(read["input"])
        if read is None or image is None or ctx.shape(read["input"]) is None or image.is_contiguous():
            continue
        weight, bias = read.get("weight"), read.get("bias")
        args = (read["num_groups"], weight, bias, float(read.get("eps", 1e-5)))
        if GROUP_NORM_LAST.support(image, args[0], ctx.value(weight), ctx.value(bias)) is not None:
            continue
        out = _silu_behind(node)
        if ctx.is_small(node) or not ctx.unchanged((read["input"], weight, bias), (node,), out):
            continue
        new = ctx.emit(out, group_norm_last, read["input"], *args, silu=out is not node)
        if not ctx.same_shape(out, new) and not _feeds_convolutions(ctx, out):
            ctx.discard(new)
            continue
        ctx.replace_any_layout(out, new)
        ctx.discard(out)
        found.append(ctx.match(new, f"GroupNorm {ctx.shape(read['input'])}{' SiLU' if out is not node else ''}"))
    return found


def _feeds_convolutions(ctx: GraphContext, node: fx.Node) -> bool:
    """Whether only convolutions read a value, which return channels last for any layout."""
    for user in node.users:
        read, made = call(user), ctx.tensor(user)
        if read is None or read.op != "conv2d" or made is None or read["input"] is not node:
            return False
        if not made.is_contiguous(memory_format=torch.channels_last):
            return False
    return bool(node.users)


@rewrite(
    "group-norm",
    summary="GroupNorm, with a SiLU after it, becomes our kernel",
    worth=Worth(eager=1.2, compiled=0.97, basis="one pass less than GroupNorm and SiLU apart; not raced"),
    needs_kernels=True,
)
def group_norm_silu(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "group_norm" or ctx.autocast or not isinstance(read["input"], fx.Node):
            continue
        positions = math.prod((ctx.shape(read["input"]) or (0, 0))[2:])
        # Our GroupNorm needs enough positions per channel, in whole vectors: for [1024, 8192] in 16 groups it took 5 ms
        # and PyTorch's 0.1; for 123,039 positions 5 ms and PyTorch's 2.
        if positions < 64 or positions % 4:
            continue
        weight, bias = read.get("weight"), read.get("bias")
        args = (read["num_groups"], weight, bias, read.get("eps", 1e-5))
        if GROUP_NORM.support(ctx.value(read["input"]), args[0], ctx.value(weight), ctx.value(bias)) is not None:
            continue
        out = _silu_behind(node)
        if not ctx.unchanged((read["input"], weight, bias), (node,), out):
            continue
        new = ctx.emit(out, group_norm, read["input"], *args, silu=out is not node)
        if ctx.replace(out, new):
            ctx.discard(out)
            found.append(
                ctx.match(new, f"GroupNorm {ctx.shape(read['input'])}{' SiLU' if out is not node else ''}")
            )
    return found


def _silu_behind(node: fx.Node) -> fx.Node:
    """The SiLU that is the only user of a norm, or the norm itself."""
    if len(node.users) == 1:
        user = next(iter(node.users))
        read = call(user)
        if read is not None and read.op == "silu":
            return user
    return node
