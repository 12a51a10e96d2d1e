"""Rewrites rotary embeddings in complex numbers, as in the first code of Llama and DeepSeek, to real numbers.

Inductor generates no code for complex numbers: every step of such an embedding is a separate pass over float32 copies.
In real numbers it is one fused kernel, or ours.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import rope
from ridgeline.kernels.rope.op import ROPE
from ridgeline.optimizer.rewrites.context import LOWERED_BY, GraphContext
from ridgeline.optimizer.rewrites.op_names import call, cast_target
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite

_VIEWS = ("reshape", "view", "unflatten")
_JOINS = ("reshape", "view", "flatten")


@dataclass(frozen=True, slots=True)
class Turned:
    """Pairs of ``x`` read as complex numbers, multiplied by a table and rounded."""

    x: fx.Node
    table: fx.Node
    out: fx.Node
    inside: tuple[fx.Node, ...]


def in_pairs(x: Tensor, table: Tensor) -> Tensor:
    """Pairs of the last dim rotated by the angles of a complex table, in float32."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = torch.view_as_real(table).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def angles(table: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a complex table, without the heads dim."""
    cos, sin = torch.view_as_real(table.squeeze(dim)).unbind(-1)
    return cos, sin


@rewrite(
    "complex-rotary",
    summary="rotary embedding in complex numbers is computed in real ones, by our kernel without a compiler",
    worth=Worth(eager=2.0, compiled=1.5, basis="five passes over complex copies, which no compiler fuses, become one"),
    needs_kernels=True,
)
def complex_rotary(ctx: GraphContext) -> list[Match]:
    if ctx.autocast or ctx.training:
        return []
    found = [turn for node in ctx.nodes if (turn := _turned(ctx, node)) is not None]
    if ctx.options.get(LOWERED_BY) != "none":
        return [match for turn in found if (match := _real(ctx, turn)) is not None]
    pairs = zip(found[0::2], found[1::2], strict=False)
    return [match for q, k in pairs if (match := _paired(ctx, q, k)) is not None]


def _real(ctx: GraphContext, turn: Turned) -> Match | None:
    if not ctx.unchanged((turn.x, turn.table), turn.inside, turn.out):
        return None
    new = ctx.emit(turn.out, in_pairs, turn.x, turn.table)
    if not ctx.replace(turn.out, new):
        return None
    ctx.discard(turn.out)
    return ctx.match(new, f"rotary embedding by complex numbers {ctx.shape(turn.x)}")


def _paired(ctx: GraphContext, q: Turned, k: Turned) -> Match | None:
    """Rotate queries and keys by one kernel, placed at the second: nothing may read the first before it."""
    dims = ctx.shape(q.table) or ()
    dim = next((each for each in (1, 2) if len(dims) == 4 and dims[each] == 1 and dims[3 - each] > 1), None)
    early = any(ctx.position(user) < ctx.position(k.out) for user in q.out.users)
    if not _is_same(q.table, k.table) or dim is None or early:
        return None
    if not ctx.unchanged((q.x, k.x, q.table), (*q.inside, *k.inside), k.out):
        return None
    both = ctx.emit(k.out, angles, q.table, dim)
    cos, sin = (ctx.emit(k.out, operator.getitem, both, i) for i in range(2))
    given = (q.x, k.x, cos, sin)
    if ROPE.support(*(ctx.value(each) for each in given), True, 3 - dim) is not None:
        for each in (cos, sin):
            ctx.discard(each)
        return None
    made = ctx.emit(k.out, rope, *given, interleaved=True, sequence_dim=3 - dim)
    new = [ctx.emit(k.out, operator.getitem, made, i) for i in range(2)]
    if not all(ctx.same_shape(old.out, each) for old, each in zip((q, k), new, strict=True)):
        for each in new:
            ctx.discard(each)
        return None
    for old, each in zip((q, k), new, strict=True):
        ctx.replace_any_layout(old.out, each)
        ctx.discard(old.out)
    return ctx.match(new[1], f"rotary embedding by complex numbers {ctx.shape(q.x)}")


def _is_same(a: Any, b: Any) -> bool:
    """Whether two nodes are the same, or the same view of one."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and bool(a == b))
    read = call(a)
    viewed = read is not None and read.op in ("getitem", "unsqueeze", *_VIEWS)
    if not viewed or a.target != b.target or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(_is_same(x, y) for x, y in zip(a.args, b.args, strict=True))


def _turned(ctx: GraphContext, node: fx.Node) -> Turned | None:
    """A node that rounds rotated pairs back to their original dtype."""
    joined, inside = _source(ctx, node, None), [node]
    real = _source(ctx, joined, _JOINS) if joined is not None else None
    if joined is None or real is None or real.target is not torch.view_as_real or len(real.users) != 1:
        return None
    product = call(real.args[0])
    if product is None or product.op != "mul" or len(product.node.users) != 1:
        return None
    inside += [joined, real, product.node]
    for pairs, table in ((product["input"], product["other"]), (product["other"], product["input"])):
        found = _bare(ctx, pairs)
        if found is not None and isinstance(table, fx.Node) and ctx.dtype(table) is torch.complex64:
            x, steps = found
            same = ctx.shape(x) == ctx.shape(node) == ctx.shape(joined) and ctx.dtype(x) is ctx.dtype(node)
            return Turned(x, table, node, (*inside, *steps)) if same else None
    return None


def _source(ctx: GraphContext, node: Any, ops: tuple[str, ...] | None) -> fx.Node | None:
    """The input of a node that is one of ``ops``, or a cast, and the only user of that input."""
    read = call(node)
    if read is None or (read.op not in ops if ops is not None else cast_target(read) is None):
        return None
    inner = read.given.get("input")
    return inner if isinstance(inner, fx.Node) and len(inner.users) == 1 else None


def _bare(ctx: GraphContext, node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The tensor that was widened, split into pairs and viewed as complex."""
    if not isinstance(node, fx.Node) or node.target is not torch.view_as_complex or len(node.users) != 1:
        return None
    pairs = node.args[0]
    wide = _source(ctx, pairs, _VIEWS)
    narrow = None if wide is None else call(wide)
    if wide is None or narrow is None or cast_target(narrow) is not torch.float32:
        return None
    x, shape, split = narrow.given.get("input"), ctx.shape(wide), ctx.shape(pairs)
    if shape is None or split is None or split != (*shape[:-1], shape[-1] // 2, 2) or not isinstance(x, fx.Node):
        return None
    return x, (node, pairs, wide)
