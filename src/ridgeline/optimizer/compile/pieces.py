"""Graphs cut where their blocks repeat, so that a compiler sees each unlike piece once and all equal ones share it."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import Scene, is_switch, stand_in, tracing_mode, where
from ridgeline.optimizer.rewrites.op_names import call

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
LEAST_NODES = 60
"""A graph as short as this is compiled in a few seconds anyway."""
LEAST_EQUAL = 3
MOST_UNLIKE_FRAC = 0.7
"""Cut only where at most this share of the nodes is left when equal pieces are counted once."""
MOST_DEPTH = 4
_LAYOUT_BOUND = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_LAYOUT_FUNCTIONS = tuple(getattr(torch, name) for name in _LAYOUT_BOUND)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of nodes, what it reads from before it and what is read of it behind it."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled piece with the places of its inputs and outputs, and the places nobody reads afterwards."""

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]


def compiled_in_pieces(scene: Scene, compiler: Compiler) -> Callable[..., Any] | None:
    """The graph as a chain of pieces, each unlike one compiled once; None where cutting brings nothing or is unsafe."""
    pieces = cut(scene)
    if pieces is None:
        return None
    made: dict[Any, Callable[..., Any]] = {}
    keys = _keys(scene, pieces)
    for piece, key in zip(pieces, keys, strict=True):
        if key not in made:
            made[key] = _compiled(scene, piece, compiler)
    return _chained(scene, pieces, [made[key] for key in keys])


# Where to cut.


def cut(scene: Scene) -> list[Piece] | None:
    """Pieces of a graph in its order; None where it has no repeating blocks, or where a cut could change a result."""
    nodes = [node for node in scene.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    if len(nodes) < LEAST_NODES or any(_has_inner_graph(scene, node) for node in scene.graph.nodes):
        return None
    paths = {node: _numbered(where(node)) for node in nodes}
    pieces = _pieces(scene, _runs(nodes, paths, dict.fromkeys(nodes, 1)))
    depth = dict.fromkeys(nodes, 1)
    for _ in range(MOST_DEPTH - 1):  # blocks that are all unlike may hold blocks that are not
        lonely = [node for piece, num in zip(pieces, _counts(scene, pieces), strict=True) if num == 1
                  for node in piece.nodes]  # fmt: skip
        deeper = [node for node in lonely if len(paths[node]) > depth[node]]
        if not deeper:
            break
        depth |= {node: depth[node] + 1 for node in deeper}
        pieces = _pieces(scene, _runs(nodes, paths, depth))
    pieces = _joined(scene, pieces)
    return pieces if _worth_it(scene, pieces) and _safe(scene, pieces) else None


def _numbered(path: str) -> list[str]:
    """The path up to each of its numbers: ``encoder.layer.3.mlp`` gives ``encoder.layer.3``."""
    return [path[: found.end()] for found in re.finditer(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", path)]


def _runs(nodes: list[fx.Node], paths: dict[fx.Node, list[str]], depth: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Nodes in order, cut where the block changes; a block that was left is not entered again.

    What stands between blocks goes with the one before it, and what follows the last is a run of its own.
    """
    numbered = [at for at, node in enumerate(nodes) if paths[node]]
    last = numbered[-1] if numbered else len(nodes)
    runs: list[list[fx.Node]] = []
    seen: set[str] = set()
    current = None
    homes: dict[fx.Node, list[fx.Node]] = {}
    for at, node in enumerate(nodes):
        source = _taken_from(node)
        if source in homes:  # a part of several results stays with them
            homes[source].append(node)
            homes[node] = homes[source]
            continue
        label = paths[node][min(depth[node], len(paths[node])) - 1] if paths[node] else "behind" if at > last else ""
        if not runs or (label != current and label not in seen):
            runs.append([])
            current = label
            seen.add(label)
        runs[-1].append(node)
        homes[node] = runs[-1]
    return runs


def _taken_from(node: fx.Node) -> fx.Node | None:
    """The node of which this one takes a part, where that has several results."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    return None if isinstance(node.args[0].meta.get("example_value"), Tensor) else node.args[0]


def _pieces(scene: Scene, runs: list[list[fx.Node]]) -> list[Piece]:
    home = {node: number for number, run in enumerate(runs) for node in run}
    found = []
    for number, run in enumerate(runs):
        inputs = [each for node in run for each in node.all_input_nodes if home.get(each, -1) != number]
        outputs = [node for node in run if any(home.get(user, -1) != number for user in node.users)]
        found.append(Piece(tuple(run), tuple(dict.fromkeys(inputs)), tuple(outputs)))
    return found


def _joined(scene: Scene, pieces: list[Piece]) -> list[Piece]:
    """Neighbors that are like no other are one piece: the compiler may fuse across them."""
    runs: list[list[fx.Node]] = []
    before_lonely = False
    for piece, num in zip(pieces, _counts(scene, pieces), strict=True):
        lonely = num < LEAST_EQUAL
        if lonely and before_lonely:
            runs[-1].extend(piece.nodes)
        else:
            runs.append(list(piece.nodes))
        before_lonely = lonely
    return _pieces(scene, runs)


def _worth_it(scene: Scene, pieces: list[Piece]) -> bool:
    counts = _counts(scene, pieces)
    repeated = [node for piece, num in zip(pieces, counts, strict=True) if num > 1 for node in piece.nodes]
    if any(_bound_to_layout(node) for node in repeated):
        return False  # a compiler chooses one layout for all convolutions, and a cut would convert at every seam
    unlike = sum(len(piece.nodes) / num for piece, num in zip(pieces, counts, strict=True))
    return unlike <= MOST_UNLIKE_FRAC * sum(len(piece.nodes) for piece in pieces)


def _bound_to_layout(node: fx.Node) -> bool:
    read = call(node)
    return node.target in _LAYOUT_FUNCTIONS or (read is not None and read.op in _LAYOUT_BOUND)


def _has_inner_graph(scene: Scene, node: fx.Node) -> bool:
    return node.op == "get_attr" and not isinstance(_constant(scene, node), Tensor)


def _constant(scene: Scene, node: fx.Node) -> Any:
    found: Any = scene.gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


# When a cut changes nothing.


def _safe(scene: Scene, pieces: list[Piece]) -> bool:
    crossing = {node for piece in pieces for node in (*piece.inputs, *piece.outputs)}
    if any(not isinstance(_value(scene, node), Tensor) for node in crossing):
        return False
    return all(_balanced(piece) for piece in pieces) and not _written_through_views(scene, crossing)


def _value(scene: Scene, node: fx.Node) -> Any:
    return _constant(scene, node) if node.op == "get_attr" else scene.value(node)


def _balanced(piece: Piece) -> bool:
    """Whether a piece leaves gradient and autocast modes as it found them."""
    switches = [node for node in piece.nodes if is_switch(node)]
    values = [node.args for node in switches if node.target is torch._C._set_grad_enabled]
    others = len(switches) - len(values)
    return others % 2 == 0 and (not values or (len(values) % 2 == 0 and values[0] != values[-1]))


def _written_through_views(scene: Scene, crossing: set[fx.Node]) -> bool:
    """Whether memory that is written in place is known by two names at a seam: a piece would see one of them only."""
    names: Counter[int] = Counter()
    for node in crossing:
        names.update(scene.memory(node))
    for writer in scene.writers():
        written = scene.written(writer)
        if not written or any(names[owner] > 1 for owner in written):
            return True
    return False


# Equal pieces.


def _keys(scene: Scene, pieces: Sequence[Piece]) -> list[Any]:
    return [_key(scene, piece) for piece in pieces]


def _counts(scene: Scene, pieces: Sequence[Piece]) -> list[int]:
    """How many pieces are like each, itself included."""
    keys = _keys(scene, pieces)
    num = Counter(keys)
    return [num[key] for key in keys]


def _key(scene: Scene, piece: Piece) -> Any:
    """What a compiler could tell two pieces apart by."""
    number: dict[fx.Node, int] = {node: at for at, node in enumerate((*piece.inputs, *piece.nodes))}
    inputs = tuple(_type_of(_value(scene, node)) for node in piece.inputs)
    body = tuple(
        (node.op, _target(node), _spelled(node.args, number), _spelled(node.kwargs, number)) for node in piece.nodes
    )
    return inputs, body, tuple(number[node] for node in piece.outputs)


def _target(node: fx.Node) -> Any:
    return node.target if isinstance(node.target, str) else id(node.target)


def _type_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    aligned = value.storage_offset() * value.element_size() % 16 == 0
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, aligned


def _spelled(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return "node", number[value]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_spelled(each, number) for each in value)
    if isinstance(value, dict):
        return tuple((name, _spelled(each, number)) for name, each in value.items())
    if isinstance(value, slice):
        return "slice", *(_spelled(each, number) for each in (value.start, value.stop, value.step))
    return type(value).__name__, repr(value)


# Compiling and running.


def _compiled(scene: Scene, piece: Piece, compiler: Compiler) -> Callable[..., Any]:
    graph = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(piece.inputs):
        table[node] = graph.placeholder(f"input_{at}")
        table[node].meta["example_value"] = _value(scene, node)
    for node in piece.nodes:
        table[node] = graph.node_copy(node, lambda each: table[each])
    graph.output(tuple(table[node] for node in piece.outputs))
    module = fx.GraphModule(scene.gm, graph)
    mode = tracing_mode()
    examples = [_value(scene, node) if mode is None else stand_in(_value(scene, node), mode) for node in piece.inputs]
    if mode is None:
        return compiler(module, examples)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compiler(module, examples)


def _chained(scene: Scene, pieces: list[Piece], runs: list[Callable[..., Any]]) -> Callable[..., Any]:
    placeholders = scene.graph.find_nodes(op="placeholder")
    place = {node: at for at, node in enumerate(placeholders)}
    constants = [node for node in scene.graph.nodes if node.op == "get_attr"]
    place |= {node: len(place) + at for at, node in enumerate(constants)}
    fixed = tuple(_constant(scene, node) for node in constants)
    for piece in pieces:
        place |= {node: len(place) + at for at, node in enumerate(piece.outputs)}
    (last,) = scene.graph.find_nodes(op="output")
    kept = set(last.all_input_nodes)
    reader = {node: at for at, piece in enumerate(pieces) for node in (*piece.outputs, *piece.inputs)}
    steps = tuple(
        Step(run, tuple(place[n] for n in piece.inputs), tuple(place[n] for n in piece.outputs),
             tuple(place[n] for n, at in reader.items() if at == number and n not in kept))
        for number, (piece, run) in enumerate(zip(pieces, runs, strict=True))
    )  # fmt: skip
    room = [None] * (len(place) - len(placeholders) - len(fixed))
    result = fx.node.map_arg(last.args[0], lambda node: _Place(place[node]))

    def chain(*args: Any) -> Any:
        values: list[Any] = [*args, *fixed, *room]
        del args
        for step in steps:
            made = step.run(*[values[at] for at in step.inputs])
            for at, value in zip(step.outputs, made, strict=True):
                values[at] = value
            del made
            for at in step.done:
                values[at] = None
        return _filled(result, values)

    return chain


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part of the result lies."""

    at: int


def _filled(shape: Any, values: list[Any]) -> Any:
    if isinstance(shape, _Place):
        return values[shape.at]
    if isinstance(shape, (tuple, list)):
        return type(shape)(_filled(each, values) for each in shape)
    return shape
