"""Fuses dropout with the residual sum after it in training; the mask is recomputed in the backward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from ridgeline.kernels import dropout_add
from ridgeline.kernels.rows import float_reason
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import TRAINING, Match, Worth, rewrite


@rewrite(
    "dropout-add",
    summary="dropout and the residual sum after it become one kernel without a stored mask; other random numbers",
    modes=(TRAINING,),
    worth=Worth(eager=1.5, compiled=1.0, basis="three passes and a mask become one; compilers fuse them as well"),
    exact="rounding",
    needs_kernels=True,
)
def dropout_sum(ctx: GraphContext) -> list[Match]:
    if not ctx.training:
        return []
    found = []
    for node in ctx.nodes:
        match = _put(ctx, node)
        if match is not None:
            found.append(match)
    return found


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    total = call(node)
    if total is None or total.op != "add" or total.given.get("alpha") not in (None, 1):
        return None
    for dropped, residual in ((total["input"], total["other"]), (total["other"], total["input"])):
        read = call(dropped)
        if read is None or not _drops(read) or len(dropped.users) != 1 or not isinstance(residual, fx.Node):
            continue
        x, other = ctx.tensor(read["input"]), ctx.tensor(residual)
        if x is None or other is None or x.shape != other.shape or x.dtype != other.dtype or float_reason(x=x):
            continue
        if not ctx.unchanged((read["input"], residual), (dropped,), node):
            continue
        new = ctx.emit(node, dropout_add, read["input"], residual, read.get("p", 0.5), True)
        if ctx.replace(node, new):
            ctx.discard(node)
            ctx.graph.erase_node(dropped)  # it draws random numbers, so dead-code elimination keeps it
            return ctx.match(new, f"dropout and sum {tuple(x.shape)}")
    return None


def _drops(read: Call) -> bool:
    """Elementwise dropout in training."""
    return read.node.target is F.dropout and read.get("training", True) is True and 0.0 < read.get("p", 0.5) < 1.0
