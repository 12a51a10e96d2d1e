"""Recognizes rotary embeddings: halves or pairs rotated, queries and keys by the same table."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import rope
from ridgeline.kernels.rope.op import ROPE
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite


@dataclass(frozen=True, slots=True)
class Turned:
    """x · cos + rotate(x) · sin; the table before it is repeated and unsqueezed for heads."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    table: tuple[fx.Node, fx.Node]
    out: fx.Node
    interleaved: bool
    sequence_dim: int
    inside: tuple[fx.Node, ...]


@rewrite(
    "rotary",
    summary="rotary embedding of queries and keys becomes one kernel, forward and backward",
    worth={
        INFERENCE: Worth(eager=3.0, compiled=0.97, basis="ten passes over memory become two; compilers fuse it too"),
        TRAINING: Worth(eager=3.0, compiled=0.97, basis="ten passes over memory become two; compilers fuse it too"),
    },
    needs_kernels=True,
)
def rotary(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    waiting: dict[tuple[Any, ...], Turned] = {}
    found = []
    for node in ctx.nodes:
        turn = turned(ctx, node)
        if turn is None:
            continue
        key = (turn.cos, turn.sin, turn.interleaved, turn.sequence_dim, ctx.dtype(turn.x))
        first = waiting.pop(key, None)
        match = None if first is None else _paired(ctx, first, turn)
        if match is not None:
            found.append(match)
        else:
            waiting[key] = turn
    return found


def _paired(ctx: GraphContext, q: Turned, k: Turned) -> Match | None:
    """Rotate two tensors by one kernel, placed at the second: nothing may use the first before it."""
    if any(ctx.position(user) < ctx.position(k.out) for user in q.out.users):
        return None
    leaves = (q.x, k.x, *k.table)
    if q.table != k.table or not ctx.unchanged(leaves, (*q.inside, *k.inside), k.out):
        return None
    if ctx.training and any(ctx.value(table).requires_grad for table in k.table):
        ctx.refuse(k.out, "the table asks for a gradient, which the kernel does not give")
        return None
    reason = ROPE.support(*(ctx.value(node) for node in leaves), q.interleaved, q.sequence_dim)
    if reason is not None:
        ctx.refuse(k.out, reason)
        return None
    options = {"interleaved": q.interleaved, "sequence_dim": q.sequence_dim}
    both = ctx.emit(k.out, rope, q.x, k.x, *k.table, **options)
    new_q, new_k = (ctx.emit(k.out, operator.getitem, both, index) for index in (0, 1))
    if not ctx.same_shape(q.out, new_q) or not ctx.same_shape(k.out, new_k):
        ctx.discard(new_q)
        ctx.discard(new_k)
        return None
    ctx.replace_any_layout(q.out, new_q)
    ctx.replace_any_layout(k.out, new_k)
    ctx.discard(q.out)
    ctx.discard(k.out)
    return ctx.match(new_k, f"rotary embedding {tuple(ctx.shape(q.x) or ())}")


def turned(ctx: GraphContext, node: fx.Node) -> Turned | None:
    """Read a node as the last step of a rotary embedding."""
    total = call(node)
    if total is None or total.op != "add" or total.given.get("alpha") not in (None, 1):
        return None
    for straight, across in ((total["input"], total["other"]), (total["other"], total["input"])):
        found = _turned_as(ctx, node, call(straight), call(across))
        if found is not None:
            return found
    return None


def _turned_as(ctx: GraphContext, node: fx.Node, straight: Call | None, across: Call | None) -> Turned | None:
    if straight is None or across is None or straight.op != "mul" or across.op != "mul":
        return None
    for x, cos in ((straight["input"], straight["other"]), (straight["other"], straight["input"])):
        for turn, sin in ((across["input"], across["other"]), (across["other"], across["input"])):
            shape = ctx.shape(x)
            if shape is None or len(shape) != 4:
                continue
            kind = not _halves_rotated(ctx, turn, x, shape[-1])  # otherwise pairs
            if kind and not _pairs_rotated(ctx, turn, x, shape[-1]):
                continue
            if not isinstance(cos, fx.Node) or not isinstance(sin, fx.Node):
                continue
            tables = _table(ctx, cos, kind), _table(ctx, sin, kind)
            if tables[0] is None or tables[1] is None or tables[0][1] != tables[1][1]:
                continue
            bare = _bare(ctx, x)
            out = node if ctx.dtype(node) is ctx.dtype(bare) else _narrowed(ctx, node, bare)
            if out is None:
                continue
            inside = (straight.node, across.node, turn, node)
            table, heads_dim = (tables[0][0], tables[1][0]), tables[0][1]
            return Turned(bare, cos, sin, table, out, kind, 2 if heads_dim == 1 else 1, inside)
    return None


def _bare(ctx: GraphContext, node: Any) -> Any:
    """A node before a cast to float32, in which the kernel computes anyway."""
    read = call(node)
    if read is None or cast_target(read) is not torch.float32 or not isinstance(read["input"], fx.Node):
        return node
    return read["input"] if ctx.dtype(read["input"]) in (torch.bfloat16, torch.float16) else node


def _narrowed(ctx: GraphContext, node: fx.Node, like: fx.Node) -> fx.Node | None:
    """The only user of a float32 sum, if it rounds it to the dtype of the input."""
    users = list(node.users)
    read = call(users[0]) if len(users) == 1 else None
    if read is None or read.given.get("input") is not node or ctx.dtype(users[0]) is not ctx.dtype(like):
        return None
    return users[0] if cast_target(read) is ctx.dtype(like) else None


def _halves_rotated(ctx: GraphContext, node: Any, x: fx.Node, width: int) -> bool:
    """cat(-x[half:], x[:half])."""
    read = call(node)
    if read is None or read.op != "cat" or read.get("dim", 0) not in (-1, 3) or len(read["tensors"]) != 2:
        return False
    negated = call(read["tensors"][0])
    if negated is None or negated.op != "neg":
        return False
    half = width // 2
    return _range_of(ctx, negated["input"], x) == (half, width, 1) and _range_of(ctx, read["tensors"][1], x) == (
        0,
        half,
        1,
    )


def _pairs_rotated(ctx: GraphContext, node: Any, x: fx.Node, width: int) -> bool:
    """stack(-x[1::2], x[0::2]) along a new last dim, flattened into the last."""
    read = call(node)
    if read is None or read.op not in ("flatten", "reshape", "view") or ctx.shape(node) != ctx.shape(x):
        return False
    stacked = call(read["input"])
    if stacked is None or stacked.op != "stack" or stacked.get("dim", 0) not in (-1, 4) or len(stacked["tensors"]) != 2:
        return False
    negated = call(stacked["tensors"][0])
    if negated is None or negated.op != "neg":
        return False
    odd, even = _range_of(ctx, negated["input"], x), _range_of(ctx, stacked["tensors"][1], x)
    return odd == (1, width, 2) and even == (0, width, 2)


def _range_of(ctx: GraphContext, node: Any, x: fx.Node) -> tuple[int, int, int] | None:
    """The (start, stop, step) of a slice of the last dim of x."""
    read = call(node)
    width = (ctx.shape(x) or (0,))[-1]
    if read is None or read.op != "getitem":
        return None
    bare = _bare(ctx, x)
    if _bare(ctx, read["input"]) is bare:
        index = read["index"] if isinstance(read["index"], tuple) else (read["index"],)
        rest, last = index[:-1], index[-1]
        full = len(index) == 4 or (index and index[0] is Ellipsis)
        if not full or not isinstance(last, slice) or any(i is not Ellipsis and i != slice(None) for i in rest):
            return None
        return last.indices(width)
    parts = call(read["input"])
    if (
        parts is None
        or parts.op not in ("chunk", "split")
        or _bare(ctx, parts["input"]) is not bare
        or parts.get("dim", 0) not in (-1, 3)
    ):
        return None
    size = parts.get("split_size") if parts.op == "split" else width // max(1, parts.get("chunks", 1))
    if isinstance(size, (list, tuple)):
        if set(size) != {width // 2} or len(size) != 2:
            return None
        size = size[0]
    start = read["index"] * size
    return (start, min(start + size, width), 1)


def _table(ctx: GraphContext, node: fx.Node, interleaved: bool) -> tuple[fx.Node, int] | None:
    """The table behind a factor, [S, W] or [B, S, W], and the position of the inserted heads dim.

    The kernel reads each angle once, so a table with repeated angles must be recognized as such.
    """
    shape = ctx.shape(node)
    read = call(node)
    if shape is None or len(shape) != 4 or read is None:
        return None
    dim = _new_dim(read)
    if dim not in (1, 2) or shape[dim] != 1:
        return None
    inner = read["input"]
    if not isinstance(inner, fx.Node) or len(ctx.shape(inner) or ()) != 3:
        return None
    if interleaved:
        half = _before_repeat(inner)
        return None if half is None else (half, dim)
    return (inner, dim) if _repeats_halves(inner) else None


def _new_dim(read: Call) -> int | None:
    """The position of a dim inserted into three."""
    if read.op == "unsqueeze":
        return read["dim"] % 4
    if read.op == "getitem" and isinstance(read["index"], tuple) and read["index"].count(None) == 1:
        place = read["index"].index(None)
        return place if all(i == slice(None) for i in read["index"] if i is not None) else None
    return None


def _repeats_halves(node: fx.Node, depth: int = 8) -> bool:
    """Whether the last dim repeats a row twice, through elementwise ops."""
    read = call(node)
    if read is None or depth == 0:
        return False
    if read.op == "cat":
        parts = read["tensors"]
        return len(parts) == 2 and parts[0] is parts[1] and read.get("dim", 0) in (-1, 2)
    if read.op in ("cos", "sin", "contiguous") or cast_target(read) is not None:
        return _repeats_halves(read["input"], depth - 1)
    if read.op == "mul" and not isinstance(read["other"], fx.Node):
        return _repeats_halves(read["input"], depth - 1)
    if read.op == "getitem" and isinstance(read["index"], tuple) and read["index"][-1:] == (slice(None),):
        return _repeats_halves(read["input"], depth - 1)
    return False


def _before_repeat(node: fx.Node) -> fx.Node | None:
    """The table before every angle was repeated twice in a row."""
    read = call(node)
    if read is None or read.op != "repeat_interleave" or read["repeats"] != 2 or read.given.get("dim") not in (-1, 2):
        return None
    return read["input"] if isinstance(read["input"], fx.Node) else None
