"""Fuses the RMSNorm of query and key heads with the rotary embedding after it (Qwen 3, Gemma 3).

As separate ops they are a norm over rows of 128 elements and a rotary embedding that reads its rows twice; a compiler
makes two or three kernels of them, ours is one pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import qk_norm_rope
from ridgeline.kernels.qk_norm_rope.op import QK_NORM_ROPE
from ridgeline.optimizer.rewrites.attention.rotary import Turned, turned
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.rows.norm import Normed, called, spelled


@rewrite(
    "head-norms",
    summary="RMSNorm of query and key heads and their rotary embedding become one kernel",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.2, basis="1.28 times Inductor's, lab/notes/rows.md"),
    needs_kernels=True,
)
def head_norms(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    norms = {read.out: read for node in ctx.nodes if (read := _normed(ctx, node)) is not None}
    if not norms:
        return []
    waiting: dict[Any, tuple[Turned, Normed]] = {}
    found = []
    for node in ctx.nodes:
        turn = turned(ctx, node)
        norm = None if turn is None else _before(ctx, turn, norms)
        if turn is None or norm is None or turn.interleaved:
            continue
        key = (turn.table, turn.sequence_dim, ctx.dtype(turn.x), norm.eps, norm.offset)
        first = waiting.pop(key, None)
        match = None if first is None else _put(ctx, first, (turn, norm))
        if match is not None:
            found.append(match)
        else:
            waiting[key] = (turn, norm)
    return found


def _normed(ctx: GraphContext, node: fx.Node) -> Normed | None:
    """An RMSNorm with a weight, over the last of four dims."""
    read = called(ctx, node) or spelled(ctx, node)
    if read is None or read.centered or read.weight is None or read.bias is not None:
        return None
    return read if len(ctx.shape(read.x) or ()) == 4 else None


def _before(ctx: GraphContext, turn: Turned, norms: dict[fx.Node, Normed]) -> Normed | None:
    """The norm before a rotary embedding, possibly transposed in between, without other users."""
    node = turn.x
    if any(user not in turn.inside and not _reads_part(ctx, user, turn) for user in node.users):
        return None
    if node in norms:
        return norms[node]
    read = call(node)
    if read is None or read.op != "transpose" or {read["dim0"] % 4, read["dim1"] % 4} != {1, 2}:
        return None
    norm = norms.get(read["input"])
    return norm if norm is not None and len(norm.out.users) == 1 else None


def _reads_part(ctx: GraphContext, user: fx.Node, turn: Turned) -> bool:
    """Whether a node is one of the halves that only the rotation reads."""
    seen = [user]
    while seen:
        at = seen.pop()
        if at in turn.inside:
            continue
        if not at.users or at.op == "output" or ctx.position(at) > ctx.position(turn.out):
            return False
        seen += list(at.users)
    return True


def _put(ctx: GraphContext, q: tuple[Turned, Normed], k: tuple[Turned, Normed]) -> Match | None:
    at, tables = k[0].out, k[0].table
    if any(ctx.position(user) < ctx.position(at) for user in q[0].out.users):
        return None
    leaves = (q[1].x, k[1].x, q[1].weight, k[1].weight, *tables)
    inside = (*q[0].inside, *k[0].inside, *q[1].inside, *k[1].inside)
    if not ctx.unchanged(leaves, inside, at):
        return None
    heads = [_laid(ctx, at, *each) for each in (q, k)]
    given = (*heads, q[1].weight, k[1].weight, *tables, q[1].eps)
    values = [ctx.value(each) for each in given]
    if QK_NORM_ROPE.support(*values, q[1].offset, q[0].sequence_dim) is not None:
        for each in heads:
            ctx.discard(each)
        return None
    both = ctx.emit(at, qk_norm_rope, *given, offset=q[1].offset, sequence_dim=q[0].sequence_dim)
    new = [ctx.emit(at, operator.getitem, both, index) for index in (0, 1)]
    outs = (q[0].out, k[0].out)
    if not all(ctx.same_shape(old, each) for old, each in zip(outs, new, strict=True)):
        for each in new:
            ctx.discard(each)
        return None
    for old, each in zip(outs, new, strict=True):
        ctx.replace_any_layout(old, each)
        ctx.discard(old)
    return ctx.match(new[1], f"head norms and rotary embedding {tuple(ctx.shape(heads[0]) or ())}")


def _laid(ctx: GraphContext, at: fx.Node, turn: Turned, norm: Normed) -> fx.Node:
    """The norm's input in the layout of the rotation: heads before positions."""
    return norm.x if turn.x is norm.out else ctx.emit(at, torch.transpose, norm.x, 1, 2)
