"""Makes residual sums contiguous that inherit a transposed layout."""

from __future__ import annotations

from torch import fx

from ridgeline.optimizer.in_place.dense_residual import dense, lies_across
from ridgeline.optimizer.rewrites.context import Scene, is_written
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_TURNED = ("transpose", "permute", "mT")


@rewrite(
    "dense-rows",
    summary="a transposed image that begins a stream of rows is laid along them once",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="two sums a layer that read and write across rows, in every layer"),
    exact="bits",
)
def dense_rows(scene: Scene) -> list[Match]:
    found = []
    for node in scene.nodes:
        read = call(node)
        value = scene.tensor(node)
        if read is None or read.op != "add" or value is None or not lies_across(value) or is_written(scene, node):
            continue
        for side in ("input", "other"):
            turned = read.given.get(side)
            if _is_turned(scene, turned) and scene.shape(turned) == scene.shape(node):
                found.append(_laid(scene, node, turned))
                break
    return found


def _is_turned(scene: Scene, node: object) -> bool:
    read, value = call(node), scene.tensor(node)
    return read is not None and read.op in _TURNED and value is not None and lies_across(value)


def _laid(scene: Scene, node: fx.Node, turned: fx.Node) -> Match:
    """Replace a sum by one over a contiguous copy of its transposed operand."""
    copied = scene.emit(node, dense, turned)
    args = tuple(copied if each is turned else each for each in node.args)
    new = scene.emit(node, node.target, *args, **node.kwargs) if callable(node.target) else None  # type: ignore[arg-type]
    new = new or scene.emit(node, _added, *args, **node.kwargs)
    scene.relaid(node, new)
    scene.discard(node)
    return scene.match(new, f"rows of {tuple(scene.shape(new) or ())}")


def _added(x: object, other: object, **options: object) -> object:
    return x.add(other, **options)  # type: ignore[attr-defined]
