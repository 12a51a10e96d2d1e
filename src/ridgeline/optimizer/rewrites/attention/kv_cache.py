"""Joins the small ops around key-value caches: two writes become one, positions are read in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import rope
from ridgeline.kernels.cache_append.op import refusal, turning_refusal
from ridgeline.optimizer.rewrites.context import ANYWHERE, Scene, clash, is_switch
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

ROPE_APPENDED = torch.ops.ridgeline_kernels.rope_append.default
APPENDED = torch.ops.ridgeline_kernels.cache_append.default
"""The registered op, whose schema says what it writes."""


def copied_place(length: Tensor) -> Tensor:
    """The value of ``arange(1) + length``, copied."""
    return length.clone().reshape(1)


def read_place(length: Tensor) -> Tensor:
    """The same as a view, for readers before the next increment."""
    return length.view(1)


@rewrite(
    "cache-append",
    summary="the writes of new keys and values into a cache become one; places are read in place and counted together",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=0.99, basis="four launches of five less a layer; compilers fuse what is left"),
    exact="bits",
    needs_kernels=True,
)
def cache_append(scene: Scene) -> list[Match]:
    if scene.training:
        return []
    found = [match for node in scene.nodes if (match := _place(scene, node)) is not None]
    waiting: fx.Node | None = None
    for node in scene.nodes:
        if _is_write(scene, node):
            match = None if waiting is None else _joined(scene, waiting, node)
            waiting = node if match is None else None
            found += [] if match is None else [match]
    found += _counted_together(scene) + _read_in_place(scene)
    return found + [match for node in scene.nodes if (match := _turned_into_place(scene, node)) is not None]


def _turned_into_place(scene: Scene, node: fx.Node) -> Match | None:
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
    if any(scene.position(user) < scene.position(node) for user in outs[0].users):
        return None
    if not scene.unchanged(turn.args[:4], (turn,), node) or turning_refusal(*map(scene.value, given)) is not None:
        return None
    new = scene.emit(node, ROPE_APPENDED, *given, bool(turn.kwargs.get("interleaved", False)))
    if not scene.alike(outs[0], new):
        scene.graph.erase_node(new)
        return None
    del new.meta["ridgeline"]  # it writes
    outs[0].replace_all_uses_with(new)
    scene.erase_writer(node)
    for gone in (*outs, k):  # the last one also erases their source
        scene.discard(gone)  # type: ignore[arg-type]
    return scene.match(new, f"turned into a cache {tuple(scene.shape(keys) or ())}")


def _counted_together(scene: Scene) -> list[Match]:
    """Move increments that nothing reads afterwards to the end of the graph, those of one kind into one launch."""
    counts = [node for node in scene.writers() if _is_count(scene, node)]
    last = _last_touched(scene) if counts else {}
    groups: dict[Any, list[fx.Node]] = {}
    for node in counts:
        length: Any = scene.tensor(node.args[0])
        touched = max(last.get(owner, 0) for owner in (*scene.memory(node.args[0]), ANYWHERE))
        if touched <= scene.position(node):
            groups.setdefault((node.args[1], length.dtype, length.device), []).append(node)
    return [_deferred(scene, group) for group in groups.values()]


def _deferred(scene: Scene, counts: Sequence[fx.Node]) -> Match:
    (end,) = scene.graph.find_nodes(op="output")
    new = scene.emit(end, torch._foreach_add_, [node.args[0] for node in counts], counts[0].args[1])
    del new.meta["ridgeline"]  # it writes, and must stay although nothing uses its result
    match = scene.match(counts[0], f"{len(counts)} lengths counted at once")
    for node in counts:
        scene.erase_writer(node)
    return match


def _is_count(scene: Scene, node: fx.Node) -> bool:
    """``length.add_(number)`` of an integer input, whose result is unused."""
    if node.op != "call_method" or node.target != "add_" or node.users or len(node.args) != 2 or node.kwargs:
        return False
    length, number = node.args
    if not isinstance(length, fx.Node) or length.op != "placeholder" or type(number) is not int:
        return False
    return scene.shape(length) == () and scene.dtype(length) in (torch.int64, torch.int32)


def _last_touched(scene: Scene) -> dict[int, int]:
    """The last node that reads or writes each storage; nodes that may touch any storage count as ``ANYWHERE``.

    Outputs are read after the graph has ended, so a tensor may be returned, but not a view of one.
    """
    last: dict[int, int] = {}
    given = set(scene.graph.find_nodes(op="placeholder"))
    for at, node in enumerate(scene.nodes):
        args = [arg for arg in node.all_input_nodes if node.op != "output" or arg not in given]
        owners = {owner for arg in args for owner in scene.memory(arg)}
        unclear = is_switch(node) or scene.written(node) == set()
        last |= dict.fromkeys(owners | ({ANYWHERE} if unclear else set()), at)
    return last


def _read_in_place(scene: Scene) -> list[Match]:
    """Read copied positions in place, if they are written only after the last reader."""
    found = []
    for node in scene.nodes:
        if node.target is copied_place and _stays(scene, node):
            new = scene.emit(node, read_place, node.args[0])
            node.replace_all_uses_with(new)
            found.append(scene.match(new, "place read where it is counted"))
            scene.discard(node)
    return found


def _stays(scene: Scene, place: fx.Node) -> bool:
    """Whether a position is unchanged until its last reader, views included, and no reader writes or keeps it."""
    memory = scene.memory(place) | scene.memory(place.args[0])
    readers = _readers(scene, place)
    if not readers or any(user.op == "output" for user in readers):
        return False
    first, last = scene.position(place), max(map(scene.position, readers))
    between = [node for node in scene.writers() if first < scene.position(node) <= last]
    return not any(clash(memory, scene.written(node) or set()) for node in between)


def _readers(scene: Scene, node: fx.Node) -> set[fx.Node]:
    """The users of a tensor and of its views."""
    own, found, waiting = scene.memory(node), set(), [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting += [user] if clash(scene.memory(user), own) else []
    return found


def _place(scene: Scene, node: fx.Node) -> Match | None:
    """A sum of ``arange(1)`` and a number on the device."""
    read = call(node)
    if read is None or read.op != "add" or read.given.get("alpha") not in (None, 1) or scene.shape(node) != (1,):
        return None
    for zero, length in ((read["input"], read["other"]), (read["other"], read["input"])):
        if _is_zero(zero) and scene.shape(length) == () and scene.dtype(length) == scene.dtype(node):
            if scene.tensor(length).device != scene.tensor(node).device:  # type: ignore[union-attr]
                continue
            new = scene.emit(node, copied_place, length)
            if scene.replace(node, new):
                scene.discard(node)
                return scene.match(new, "place in a cache")
    return None


def _is_zero(node: Any) -> bool:
    """``torch.arange(1)``: one element, which is 0."""
    if not isinstance(node, fx.Node) or node.target is not torch.arange:
        return False
    return node.args in ((1,), (0, 1)) and set(node.kwargs) <= {"device", "dtype"}


def _is_write(scene: Scene, node: fx.Node) -> bool:
    """``cache.index_copy_(2, positions, new)`` whose result is unused."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name != "index_copy_" or node.users or len(node.args) != 4 or node.kwargs or node.args[1] not in (2, -2):
        return False
    return all(scene.tensor(node.args[i]) is not None for i in (0, 2, 3))


def _joined(scene: Scene, first: fx.Node, second: fx.Node) -> Match | None:
    """One op at the second write, if nothing between them touches what the first writes or reads."""
    keys, _, index, k = first.args
    values, _, other, v = second.args
    if index is not other or keys is values or not scene.unchanged((index, k, v), (first,), second):
        return None
    if clash(scene.memory(keys), scene.memory(values) | scene.memory(v)) or _touched(scene, keys, first, second):
        return None
    if refusal(*(scene.value(x) for x in (keys, values, index, k, v))) is not None:
        return None
    new = scene.emit(second, APPENDED, keys, values, index, k, v)
    del new.meta["ridgeline"]  # it writes, and must stay although nothing uses its result
    scene.erase_writer(first)
    scene.erase_writer(second)
    return scene.match(new, f"cache {tuple(scene.shape(keys) or ())}")


def _touched(scene: Scene, keys: Any, first: fx.Node, second: fx.Node) -> bool:
    """Whether a node between two others reads or writes the memory of a cache."""
    memory = scene.memory(keys)
    return any(
        scene.memory(arg) and clash(memory, scene.memory(arg))
        for node in scene.nodes
        if scene.position(first) < scene.position(node) < scene.position(second)
        for arg in node.all_input_nodes
    )
