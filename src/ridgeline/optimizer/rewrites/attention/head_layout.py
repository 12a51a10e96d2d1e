"""Passes strided heads and unscaled queries to fused attention, which needs neither copies nor a separate scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_SIDES = ("query", "key", "value")
_NARROW = (torch.bfloat16, torch.float16)
ALIGNED = 8
"""16-bit elements in 16 bytes: the row alignment that fused kernels need."""


@rewrite(
    "attention-layout",
    summary="strided queries, keys and values are read without copies, and their scaling becomes attention's scale",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=1.1, basis="three copies a layer less, and the one behind it (Whisper)"),
)
def attention_layout(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "attention" or ctx.autocast or ctx.dtype(node) not in _NARROW:
            continue
        match = _read_in_place(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _read_in_place(ctx: GraphContext, read: Call) -> Match | None:
    given = dict(read.given)
    inside = [read.node]
    for side in _SIDES:
        source = _before_copy(ctx, given[side])
        if source is not None:
            inside.append(given[side])
            given[side] = source
    factor, rows, steps = _scaled(ctx, given["query"])
    if len(inside) == 1 and rows is None:
        return None
    leaves = [given[side] for side in _SIDES] + ([rows] if rows is not None else [])
    if not ctx.unchanged(leaves, (*inside, *steps), read.node):
        return None
    if rows is not None:
        width = (ctx.shape(given["query"]) or (1,))[-1]
        given["query"] = _again(ctx, read.node, rows, steps)
        given["scale"] = factor * (width**-0.5 if given.get("scale") is None else given["scale"])
    args = tuple(given.pop(side) for side in _SIDES)
    new = ctx.emit(read.node, read.node.target, *args, **given)  # type: ignore[arg-type]
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    what = [f"{len(inside) - 1} copies"] * (len(inside) > 1) + ["a scaling"] * (rows is not None)
    return ctx.match(new, f"{' and '.join(what)} less")


def _before_copy(ctx: GraphContext, node: Any) -> fx.Node | None:
    """The tensor before a contiguous copy, if attention can read its strides."""
    read = call(node)
    if read is None or read.op != "contiguous" or read.get("memory_format", torch.contiguous_format) is not (
        torch.contiguous_format
    ):  # fmt: skip
        return None
    value = ctx.tensor(read["input"])
    if value is None or value.dim() != 4 or value.stride(3) != 1 or any(step % ALIGNED for step in value.stride()[:3]):
        return None
    return read["input"]  # type: ignore[no-any-return]


def _scaled(ctx: GraphContext, query: Any) -> tuple[float, fx.Node | None, list[fx.Node]]:
    """(factor, rows, nodes) of queries that are scaled rows, through views without other users."""
    steps: list[fx.Node] = []
    node = query
    while (read := call(node)) is not None and read.op in ("view", "reshape", "transpose") and len(node.users) == 1:
        steps.append(node)
        node = read["input"]
    factor = None if read is None or read.op != "mul" or len(node.users) != 1 else read.given.get("other")
    rows = None if read is None else read.given.get("input")
    plain = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0
    if not plain or not steps or not isinstance(rows, fx.Node) or ctx.dtype(rows) != ctx.dtype(query):
        return 1.0, None, []
    value = ctx.tensor(rows)
    if value is None or value.stride(-1) != 1 or any(step % ALIGNED for step in value.stride()[:-1]):
        return 1.0, None, []
    return float(factor), rows, [node, *reversed(steps)]  # type: ignore[arg-type]


def _again(ctx: GraphContext, before: fx.Node, rows: fx.Node, steps: list[fx.Node]) -> fx.Node:
    """The same views of the unscaled rows."""
    made = rows
    for step in steps[1:]:
        read = call(step)
        assert read is not None
        if read.op == "transpose":
            made = ctx.emit(before, torch.transpose, made, read["dim0"], read["dim1"])
        else:
            made = ctx.emit(before, torch.reshape, made, tuple(ctx.shape(step) or ()))
    return made
