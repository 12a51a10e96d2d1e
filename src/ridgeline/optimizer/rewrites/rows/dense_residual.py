"""Makes residual sums contiguous that inherit a transposed layout."""

from __future__ import annotations

from torch import fx

from ridgeline.optimizer.in_place.dense_residual import dense, is_transposed_rows
from ridgeline.optimizer.rewrites.context import GraphContext, is_written
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_TURNED = ("transpose", "permute", "mT")


@rewrite(
    "dense-rows",
    summary="a residual stream that starts as a transposed image is made contiguous once",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="two sums a layer that read and write across rows, in every layer"),
    exact="bits",
)
def dense_rows(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        value = ctx.tensor(node)
        if read is None or read.op != "add" or value is None or not is_transposed_rows(value) or is_written(ctx, node):
            continue
        for side in ("input", "other"):
            turned = read.given.get(side)
            if _is_turned(ctx, turned) and ctx.shape(turned) == ctx.shape(node):
                found.append(_laid(ctx, node, turned))
                break
    return found


def _is_turned(ctx: GraphContext, node: object) -> bool:
    read, value = call(node), ctx.tensor(node)
    return read is not None and read.op in _TURNED and value is not None and is_transposed_rows(value)


def _laid(ctx: GraphContext, node: fx.Node, turned: fx.Node) -> Match:
    """Replace a sum by one over a contiguous copy of its transposed operand."""
    copied = ctx.emit(node, dense, turned)
    args = tuple(copied if each is turned else each for each in node.args)
    new = ctx.emit(node, node.target, *args, **node.kwargs) if callable(node.target) else None  # type: ignore[arg-type]
    new = new or ctx.emit(node, _added, *args, **node.kwargs)
    ctx.replace_any_layout(node, new)
    ctx.discard(node)
    return ctx.match(new, f"rows of {tuple(ctx.shape(new) or ())}")


def _added(x: object, other: object, **options: object) -> object:
    return x.add(other, **options)  # type: ignore[attr-defined]
