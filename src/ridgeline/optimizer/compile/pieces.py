"""Compiles graphs with repeated blocks in pieces: equal pieces are compiled once and share the code."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import GraphContext, is_switch, stand_in, tracing_mode, where
from ridgeline.optimizer.rewrites.op_names import call

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
LEAST_EQUAL = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of nodes with its inputs and outputs."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled piece with the slots of its inputs and outputs, and the slots that are free afterwards."""

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]


def compiled_in_pieces(ctx: GraphContext, compiler: Compiler) -> Callable[..., Any] | None:
    """The graph as a chain of pieces, equal ones compiled once; None if cutting does not pay or is unsafe."""
    pieces = cut(ctx)
    if pieces is None:
        return None
    made: dict[Any, Callable[..., Any]] = {}
    keys = _keys(ctx, pieces)
    for piece, key in zip(pieces, keys, strict=True):
        if key not in made:
            made[key] = _compiled(ctx, piece, compiler)
    return _chained(ctx, pieces, [made[key] for key in keys])


def cut(ctx: GraphContext) -> list[Piece] | None:
    """Cut a graph into pieces; None if it has no repeated blocks, or if a cut could change a result."""
    nodes = [node for node in ctx.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    attributes = [node for node in ctx.graph.nodes if node.op == "get_attr"]
    # Smaller graphs compile in a few seconds anyway.
    if len(nodes) < 60 or any(not isinstance(_constant(ctx, node), Tensor) for node in attributes):
        return None  # the second: inner graphs of control flow
    paths = {node: _numbered(where(node)) for node in nodes}
    pieces = _pieces(ctx, _runs(nodes, paths, dict.fromkeys(nodes, 1)))
    depth = dict.fromkeys(nodes, 1)
    for _ in range(3):  # blocks that are all different may contain blocks that are not
        lonely = [node for piece, num in zip(pieces, _counts(ctx, pieces), strict=True) if num == 1
                  for node in piece.nodes]  # fmt: skip
        deeper = [node for node in lonely if len(paths[node]) > depth[node]]
        if not deeper:
            break
        depth |= {node: depth[node] + 1 for node in deeper}
        pieces = _pieces(ctx, _runs(nodes, paths, depth))
    pieces = _joined(ctx, pieces)
    crossing = {node for piece in pieces for node in (*piece.inputs, *piece.outputs)}
    safe = all(isinstance(_value(ctx, node), Tensor) for node in crossing) and all(map(_balanced, pieces))
    return pieces if _worth_it(ctx, pieces) and safe and not _written_through_views(ctx, crossing) else None


def _numbered(path: str) -> list[str]:
    """The path up to each of its numbers: ``encoder.layer.3.mlp`` gives ``encoder.layer.3``."""
    return [path[: found.end()] for found in re.finditer(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", path)]


def _runs(nodes: list[fx.Node], paths: dict[fx.Node, list[str]], depth: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Runs of nodes in order, cut where the block changes; a block is never entered twice.

    Nodes between blocks belong to the block before, nodes after the last block to a run of their own.
    """
    numbered = [at for at, node in enumerate(nodes) if paths[node]]
    last = numbered[-1] if numbered else len(nodes)
    runs: list[list[fx.Node]] = []
    seen: set[str] = set()
    current = None
    homes: dict[fx.Node, list[fx.Node]] = {}
    for at, node in enumerate(nodes):
        source = _taken_from(node)
        if source in homes:  # one of several results stays with their node
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
    """The node with several results of which this one takes an item."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    return None if isinstance(node.args[0].meta.get("example_value"), Tensor) else node.args[0]


def _pieces(ctx: GraphContext, runs: list[list[fx.Node]]) -> list[Piece]:
    home = {node: number for number, run in enumerate(runs) for node in run}
    found = []
    for number, run in enumerate(runs):
        inputs = [each for node in run for each in node.all_input_nodes if home.get(each, -1) != number]
        outputs = [node for node in run if any(home.get(user, -1) != number for user in node.users)]
        found.append(Piece(tuple(run), tuple(dict.fromkeys(inputs)), tuple(outputs)))
    return found


def _joined(ctx: GraphContext, pieces: list[Piece]) -> list[Piece]:
    """Join neighbors without equals, so that the compiler may fuse across them."""
    runs: list[list[fx.Node]] = []
    before_lonely = False
    for piece, num in zip(pieces, _counts(ctx, pieces), strict=True):
        lonely = num < LEAST_EQUAL
        if lonely and before_lonely:
            runs[-1].extend(piece.nodes)
        else:
            runs.append(list(piece.nodes))
        before_lonely = lonely
    return _pieces(ctx, runs)


def _worth_it(ctx: GraphContext, pieces: list[Piece]) -> bool:
    counts = _counts(ctx, pieces)
    repeated = [node for piece, num in zip(pieces, counts, strict=True) if num > 1 for node in piece.nodes]
    layouts = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    functions = tuple(getattr(torch, name) for name in layouts)
    if any(node.target in functions or ((read := call(node)) is not None and read.op in layouts) for node in repeated):
        return False  # a compiler chooses one layout for all convolutions; a cut would convert at every boundary
    unlike = sum(len(piece.nodes) / num for piece, num in zip(pieces, counts, strict=True))
    # Cutting pays if at most this share of the nodes is left when equal pieces are counted once.
    return unlike <= 0.7 * sum(len(piece.nodes) for piece in pieces)


def _constant(ctx: GraphContext, node: fx.Node) -> Any:
    found: Any = ctx.gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def _value(ctx: GraphContext, node: fx.Node) -> Any:
    return _constant(ctx, node) if node.op == "get_attr" else ctx.value(node)


def _balanced(piece: Piece) -> bool:
    """Whether a piece leaves the gradient and autocast modes as it found them."""
    switches = [node for node in piece.nodes if is_switch(node)]
    values = [node.args for node in switches if node.target is torch._C._set_grad_enabled]
    others = len(switches) - len(values)
    return others % 2 == 0 and (not values or (len(values) % 2 == 0 and values[0] != values[-1]))


def _written_through_views(ctx: GraphContext, crossing: set[fx.Node]) -> bool:
    """Whether memory written in place crosses a cut under two names: a piece would see only one of them."""
    names: Counter[int] = Counter()
    for node in crossing:
        names.update(ctx.memory(node))
    for writer in ctx.writers():
        written = ctx.written(writer)
        if not written or any(names[owner] > 1 for owner in written):
            return True
    return False


def _keys(ctx: GraphContext, pieces: Sequence[Piece]) -> list[Any]:
    return [_key(ctx, piece) for piece in pieces]


def _counts(ctx: GraphContext, pieces: Sequence[Piece]) -> list[int]:
    """The number of pieces equal to each, itself included."""
    keys = _keys(ctx, pieces)
    num = Counter(keys)
    return [num[key] for key in keys]


def _key(ctx: GraphContext, piece: Piece) -> Any:
    """Everything that could make a compiler generate other code for a piece."""
    number: dict[fx.Node, int] = {node: at for at, node in enumerate((*piece.inputs, *piece.nodes))}
    inputs = tuple(_type_of(_value(ctx, node)) for node in piece.inputs)
    body = tuple(
        (node.op, node.target if isinstance(node.target, str) else id(node.target), _read_unfused(node.args, number),
         _read_unfused(node.kwargs, number)) for node in piece.nodes
    )  # fmt: skip
    return inputs, body, tuple(number[node] for node in piece.outputs)


def _type_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    aligned = value.storage_offset() * value.element_size() % 16 == 0
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, aligned


def _read_unfused(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return "node", number[value]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_read_unfused(each, number) for each in value)
    if isinstance(value, dict):
        return tuple((name, _read_unfused(each, number)) for name, each in value.items())
    if isinstance(value, slice):
        return "slice", *(_read_unfused(each, number) for each in (value.start, value.stop, value.step))
    return type(value).__name__, repr(value)


def _compiled(ctx: GraphContext, piece: Piece, compiler: Compiler) -> Callable[..., Any]:
    graph = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(piece.inputs):
        table[node] = graph.placeholder(f"input_{at}")
        table[node].meta["example_value"] = _value(ctx, node)
    for node in piece.nodes:
        table[node] = graph.node_copy(node, lambda each: table[each])
    graph.output(tuple(table[node] for node in piece.outputs))
    module = fx.GraphModule(ctx.gm, graph)
    mode = tracing_mode()
    examples = [_value(ctx, node) if mode is None else stand_in(_value(ctx, node), mode) for node in piece.inputs]
    if mode is None:
        return compiler(module, examples)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compiler(module, examples)


def _chained(ctx: GraphContext, pieces: list[Piece], runs: list[Callable[..., Any]]) -> Callable[..., Any]:
    placeholders = ctx.graph.find_nodes(op="placeholder")
    place = {node: at for at, node in enumerate(placeholders)}
    constants = [node for node in ctx.graph.nodes if node.op == "get_attr"]
    place |= {node: len(place) + at for at, node in enumerate(constants)}
    fixed = tuple(_constant(ctx, node) for node in constants)
    for piece in pieces:
        place |= {node: len(place) + at for at, node in enumerate(piece.outputs)}
    (last,) = ctx.graph.find_nodes(op="output")
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
    """The slot of a part of the result."""

    at: int


def _filled(shape: Any, values: list[Any]) -> Any:
    if isinstance(shape, _Place):
        return values[shape.at]
    if isinstance(shape, (tuple, list)):
        return type(shape)(_filled(each, values) for each in shape)
    return shape
