"""Joins the small ops around key-value caches: two writes become one, positions are read in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import rope
from ridgeline.kernels.cache_append.op import refusal, turning_refusal
from ridgeline.optimizer.rewrites.context import ANYWHERE, GraphContext, clash, is_switch
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

ROPE_APPENDED = torch.ops.ridgeline_kernels.rope_append.default
APPENDED = torch.ops.ridgeline_kernels.cache_append.default
"""The registered op, whose schema says what it writes."""


def copied_position(length: Tensor) -> Tensor:
    """The value of ``arange(1) + length``, copied."""
    return length.clone().reshape(1)


def position_view(length: Tensor) -> Tensor:
    """The same as a view, for readers before the next increment."""
    return length.view(1)


@rewrite(
    "cache-append",
    summary="the writes of new keys and values into a cache become one; positions are read in place",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=0.99, basis="four launches of five less a layer; compilers fuse what is left"),
    exact="bits",
    needs_kernels=True,
)
def cache_append(ctx: GraphContext) -> list[Match]:
    if ctx.training:
        return []
    found = [match for node in ctx.nodes if (match := _place(ctx, node)) is not None]
    waiting: fx.Node | None = None
    for node in ctx.nodes:
        if _is_write(ctx, node):
            match = None if waiting is None else _joined(ctx, waiting, node)
            waiting = node if match is None else None
            found += [] if match is None else [match]
    found += _batch_increments(ctx) + _read_in_place(ctx)
    return found + [match for node in ctx.nodes if (match := _fuse_rope_and_append(ctx, node)) is not None]


def _fuse_rope_and_append(ctx: GraphContext, node: fx.Node) -> Match | None:
    """Rotate keys while they are written to the cache, and queries with them, if the keys have no other user."""
    if node.target is not APPENDED or not isinstance(node.args[3], fx.Node):
        return None
    keys, values, index, k, v = node.args
    turn = k.args[0] if k.target is operator.getitem and k.args[1] == 1 and set(k.users) == {node} else None  # type: ignore[union-attr]
    if not isinstance(turn, fx.Node) or turn.target is not rope or turn.kwargs.get("sequence_dim", 2) != 2:
        return None
    outs = [user for user in turn.users if user is not k]
    if any(out.target is not operator.getitem or out.args[1] != 0 for out in outs) or len(outs) != 1:
        return None
    given = (keys, values, index, *turn.args[:2], v, *turn.args[2:4])
    if any(ctx.position(user) < ctx.position(node) for user in outs[0].users):
        return None
    if not ctx.unchanged(turn.args[:4], (turn,), node) or turning_refusal(*map(ctx.value, given)) is not None:
        return None
    new = ctx.emit(node, ROPE_APPENDED, *given, bool(turn.kwargs.get("interleaved", False)))
    if not ctx.alike(outs[0], new):
        ctx.graph.erase_node(new)
        return None
    del new.meta["ridgeline"]  # it writes
    outs[0].replace_all_uses_with(new)
    ctx.erase_writer(node)
    for gone in (*outs, k):  # the last one also erases their source
        ctx.discard(gone)  # type: ignore[arg-type]
    return ctx.match(new, f"turned into a cache {tuple(ctx.shape(keys) or ())}")


def _batch_increments(ctx: GraphContext) -> list[Match]:
    """Move increments that nothing reads afterwards to the end of the graph, those of one kind into one launch."""
    counts = [node for node in ctx.writers() if _is_increment(ctx, node)]
    last = _last_access(ctx) if counts else {}
    groups: dict[Any, list[fx.Node]] = {}
    for node in counts:
        length: Any = ctx.tensor(node.args[0])
        touched = max(last.get(owner, 0) for owner in (*ctx.memory(node.args[0]), ANYWHERE))
        if touched <= ctx.position(node):
            groups.setdefault((node.args[1], length.dtype, length.device), []).append(node)
    return [_deferred(ctx, group) for group in groups.values()]


def _deferred(ctx: GraphContext, counts: Sequence[fx.Node]) -> Match:
    (end,) = ctx.graph.find_nodes(op="output")
    new = ctx.emit(end, torch._foreach_add_, [node.args[0] for node in counts], counts[0].args[1])
    del new.meta["ridgeline"]  # it writes, and must stay although nothing uses its result
    match = ctx.match(counts[0], f"{len(counts)} lengths counted at once")
    for node in counts:
        ctx.erase_writer(node)
    return match


def _is_increment(ctx: GraphContext, node: fx.Node) -> bool:
    """``length.add_(number)`` of an integer input, whose result is unused."""
    if node.op != "call_method" or node.target != "add_" or node.users or len(node.args) != 2 or node.kwargs:
        return False
    length, number = node.args
    if not isinstance(length, fx.Node) or length.op != "placeholder" or type(number) is not int:
        return False
    return ctx.shape(length) == () and ctx.dtype(length) in (torch.int64, torch.int32)


def _last_access(ctx: GraphContext) -> dict[int, int]:
    """The last node that reads or writes each storage; nodes that may touch any storage count as ``ANYWHERE``.

    Outputs are read after the graph has ended, so a tensor may be returned, but not a view of one.
    """
    last: dict[int, int] = {}
    given = set(ctx.graph.find_nodes(op="placeholder"))
    for at, node in enumerate(ctx.nodes):
        args = [arg for arg in node.all_input_nodes if node.op != "output" or arg not in given]
        owners = {owner for arg in args for owner in ctx.memory(arg)}
        unclear = is_switch(node) or ctx.written(node) == set()
        last |= dict.fromkeys(owners | ({ANYWHERE} if unclear else set()), at)
    return last


def _read_in_place(ctx: GraphContext) -> list[Match]:
    """Read copied positions in place, if they are written only after the last reader."""
    found = []
    for node in ctx.nodes:
        if node.target is copied_position and _stays(ctx, node):
            new = ctx.emit(node, position_view, node.args[0])
            node.replace_all_uses_with(new)
            found.append(ctx.match(new, "place read where it is counted"))
            ctx.discard(node)
    return found


def _stays(ctx: GraphContext, place: fx.Node) -> bool:
    """Whether a position is unchanged until its last reader, views included, and no reader writes or keeps it."""
    memory = ctx.memory(place) | ctx.memory(place.args[0])
    readers = _readers(ctx, place)
    if not readers or any(user.op == "output" for user in readers):
        return False
    first, last = ctx.position(place), max(map(ctx.position, readers))
    between = [node for node in ctx.writers() if first < ctx.position(node) <= last]
    return not any(clash(memory, ctx.written(node) or set()) for node in between)


def _readers(ctx: GraphContext, node: fx.Node) -> set[fx.Node]:
    """The users of a tensor and of its views."""
    own, found, waiting = ctx.memory(node), set(), [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting += [user] if clash(ctx.memory(user), own) else []
    return found


def _place(ctx: GraphContext, node: fx.Node) -> Match | None:
    """A sum of ``arange(1)`` and a number on the device."""
    read = call(node)
    if read is None or read.op != "add" or read.given.get("alpha") not in (None, 1) or ctx.shape(node) != (1,):
        return None
    for zero, length in ((read["input"], read["other"]), (read["other"], read["input"])):
        if _is_zero(zero) and ctx.shape(length) == () and ctx.dtype(length) == ctx.dtype(node):
            if ctx.tensor(length).device != ctx.tensor(node).device:  # type: ignore[union-attr]
                continue
            new = ctx.emit(node, copied_position, length)
            if ctx.replace(node, new):
                ctx.discard(node)
                return ctx.match(new, "place in a cache")
    return None


def _is_zero(node: Any) -> bool:
    """``torch.arange(1)``: one element, which is 0."""
    if not isinstance(node, fx.Node) or node.target is not torch.arange:
        return False
    return node.args in ((1,), (0, 1)) and set(node.kwargs) <= {"device", "dtype"}


def _is_write(ctx: GraphContext, node: fx.Node) -> bool:
    """``cache.index_copy_(2, positions, new)`` whose result is unused."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name != "index_copy_" or node.users or len(node.args) != 4 or node.kwargs or node.args[1] not in (2, -2):
        return False
    return all(ctx.tensor(node.args[i]) is not None for i in (0, 2, 3))


def _joined(ctx: GraphContext, first: fx.Node, second: fx.Node) -> Match | None:
    """One op at the second write, if nothing between them touches what the first writes or reads."""
    keys, _, index, k = first.args
    values, _, other, v = second.args
    if index is not other or keys is values or not ctx.unchanged((index, k, v), (first,), second):
        return None
    if clash(ctx.memory(keys), ctx.memory(values) | ctx.memory(v)) or _touched(ctx, keys, first, second):
        return None
    if refusal(*(ctx.value(x) for x in (keys, values, index, k, v))) is not None:
        return None
    new = ctx.emit(second, APPENDED, keys, values, index, k, v)
    del new.meta["ridgeline"]  # it writes, and must stay although nothing uses its result
    ctx.erase_writer(first)
    ctx.erase_writer(second)
    return ctx.match(new, f"cache {tuple(ctx.shape(keys) or ())}")


def _touched(ctx: GraphContext, keys: Any, first: fx.Node, second: fx.Node) -> bool:
    """Whether a node between two others reads or writes the memory of a cache."""
    memory = ctx.memory(keys)
    return any(
        ctx.memory(arg) and clash(memory, ctx.memory(arg))
        for node in ctx.nodes
        if ctx.position(first) < ctx.position(node) < ctx.position(second)
        for arg in node.all_input_nodes
    )
