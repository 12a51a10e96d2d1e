"""Small work around a cache of keys and values: its two writes become one, a place is copied instead of computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels.cache_append.op import refusal
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite
from ridgeline.optimizer.rewrites.scene import Scene, clash
from ridgeline.optimizer.rewrites.words import call

APPENDED = torch.ops.ridgeline_kernels.cache_append.default
"""The registered op: its schema says what it writes."""


def copied_place(length: Tensor) -> Tensor:
    """What ``arange(1) + length`` is."""
    return length.clone().reshape(1)


@rewrite(
    "cache-append",
    summary="the writes of new keys and values into a cache become one, and its place a copy",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=0.99, basis="two launches of four less a layer; compilers fuse what is left"),
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
    """``torch.arange(1)``: one element, and it is 0."""
    if not isinstance(node, fx.Node) or node.target is not torch.arange:
        return False
    return node.args in ((1,), (0, 1)) and set(node.kwargs) <= {"device", "dtype"}


def _is_write(scene: Scene, node: fx.Node) -> bool:
    """``cache.index_copy_(2, places, new)`` whose result nobody takes."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name != "index_copy_" or node.users or len(node.args) != 4 or node.kwargs or node.args[1] not in (2, -2):
        return False
    return all(scene.tensor(node.args[i]) is not None for i in (0, 2, 3))


def _joined(scene: Scene, first: fx.Node, second: fx.Node) -> Match | None:
    """One call in the place of the second, if nothing between them touches what the first writes or reads."""
    keys, _, index, k = first.args
    values, _, other, v = second.args
    if index is not other or keys is values or not scene.unchanged((index, k, v), (first,), second):
        return None
    if clash(scene.memory(keys), scene.memory(values) | scene.memory(v)) or _touched(scene, keys, first, second):
        return None
    if refusal(*(scene.value(x) for x in (keys, values, index, k, v))) is not None:
        return None
    new = scene.emit(second, APPENDED, keys, values, index, k, v)
    del new.meta["ridgeline"]  # it writes: nobody uses what it returns, and it stays
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
