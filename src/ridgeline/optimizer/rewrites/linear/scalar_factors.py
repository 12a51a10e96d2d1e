"""Joins consecutive multiplications and additions of scalars."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite


@rewrite(
    "numbers",
    summary="consecutive multiplications and additions of scalars become one",
    worth=Worth(eager=1.5, compiled=1.0001, basis="a kernel less each; compilers fuse them"),
)
def numbers(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        outer = None if read is None else _affine(read)
        if outer is None:
            continue
        inner_node = outer[2]
        inner_read = call(inner_node)
        inner = None if inner_read is None or len(inner_node.users) != 1 else _affine(inner_read)
        if inner is None or outer[0] != inner[0] or not _is_float(ctx, inner[2]):
            continue
        if ctx.dtype(inner[2]) != ctx.dtype(node) or not ctx.unchanged((inner[2],), (inner_node, node), node):
            continue
        target, number = (torch.mul, outer[1] * inner[1]) if outer[0] == "mul" else (torch.add, outer[1] + inner[1])
        new = ctx.emit(node, target, inner[2], number)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, "numbers joined"))
    return found


def _is_float(ctx: GraphContext, node: Any) -> bool:
    dtype = ctx.dtype(node)
    return dtype is not None and dtype.is_floating_point


def _affine(read: Call) -> tuple[str, float, fx.Node] | None:
    """("mul" or "add", number, node) of a call that scales or shifts a node by a number."""
    if read.op not in ("mul", "div", "add", "sub") or read.given.get("rounding_mode") or read.given.get("alpha"):
        return None
    a, b = read.given.get("input"), read.given.get("other")
    number = _number(b)
    if isinstance(a, fx.Node) and number is not None:
        if read.op == "div":
            return ("mul", 1.0 / number, a) if number else None
        return ("add", -number, a) if read.op == "sub" else (read.op, number, a)
    number = _number(a)
    if isinstance(b, fx.Node) and number is not None and read.op in ("mul", "add"):
        return read.op, number, b
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
