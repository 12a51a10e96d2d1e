"""Whether a graph is well formed, in words that name the node and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ridgeline.errors import GraphError, nearest
from ridgeline.graph.expand import Flat, expand
from ridgeline.graph.ops import ops
from ridgeline.graph.types import RESIDENT, Block, Carry, Graph, Node, TensorType

MAX_SHOWN = 12
EVERYWHERE = frozenset({"calls", "which"})
"""Attributes any op may carry: how often the framework dispatched it, and which of its gradients it computes."""


def verify(graph: Graph) -> Graph:
    """The same graph, or a GraphError that lists what is wrong with it."""
    found = problems(graph)
    if not found:
        return graph
    shown = "".join(f"\n  - {problem}" for problem in found[:MAX_SHOWN])
    more = f"\n  … and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    raise GraphError(f"graph {graph.name!r} is not well formed, {len(found)} problem(s):{shown}{more}")


def problems(graph: Graph) -> list[str]:
    """Every problem found; later checks run only where earlier ones leave them something to stand on."""
    found = [*_value_problems(graph), *_reference_problems(graph)]
    if found:
        return found
    found = [*_definition_problems(graph), *_stack_problems(graph), *_attr_problems(graph)]
    return found or [*_shape_problems(graph), *_free_problems(graph)]


def _where(index: int, node: Node) -> str:
    place = f" in {node.module}" if node.module else ""
    return f"node {index} ({node.op}{place})"


def _placed(graph: Graph) -> Iterator[tuple[str, Node]]:
    for index, (node, _) in enumerate(graph.nodes()):
        yield _where(index, node), node


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


# Values


def _value_problems(graph: Graph) -> Iterator[str]:
    num = len(graph.values)
    for i, v in enumerate(graph.values):
        if v.id != i:
            yield f"value at position {i} calls itself %{v.id}: ids are positions"
        if v.alias is not None and not (_is_size(v.alias) and v.alias < num):
            yield f"%{i} aliases %{v.alias}, which does not exist: there are {num} values"
        if not all(_is_size(dim) for dim in v.type.shape):
            yield f"%{i} has shape {v.type.shape}: every dim is a whole number from 0 up"
        if not _is_size(v.count):
            yield f"%{i} has count {v.count}: a stack has one tensor per iteration"
        if v.storage_bytes is not None and not _is_size(v.storage_bytes):
            yield f"%{i} has storage_bytes {v.storage_bytes}: it is a whole number of bytes"
    yield from _alias_cycles(graph)
    if _sizes(graph.meta.get("donated", ())) is None:
        yield f"meta 'donated' is {graph.meta['donated']!r}: it lists the inputs that the caller gives away"


def _alias_cycles(graph: Graph) -> Iterator[str]:
    sound: set[int] = set()
    for v in graph.values:
        chain: dict[int, None] = {}
        at: int | None = v.id
        while at is not None and at not in sound and 0 <= at < len(graph.values):
            if at in chain:
                circle = " → ".join(f"%{i}" for i in [*chain, at])
                yield f"aliases form a circle, so nobody owns the storage: {circle}"
                break
            chain[at] = None
            at = graph.values[at].alias
        sound.update(chain)


# References


def _reference_problems(graph: Graph) -> Iterator[str]:
    num = len(graph.values)

    def missing(ids: Sequence[int], what: str) -> Iterator[str]:
        for i in ids:
            if not (_is_size(i) and i < num):
                yield f"{what} %{i}, which does not exist: there are {num} values"

    for where, node in _placed(graph):
        yield from missing(node.inputs, f"{where} reads")
        yield from missing(node.outputs, f"{where} writes")
        yield from missing(node.frees, f"{where} frees")
    for block in (item for item in graph.items if isinstance(item, Block)):
        for c in block.carries:
            yield from missing((c.init, c.inner, c.next), f"block {block.module!r} carries")
        if not (_is_size(block.repeat) and block.repeat >= 1):
            yield f"block {block.module!r} repeats {block.repeat} times: leave it out, or repeat it at least once"
    yield from missing(graph.inputs, "the graph's inputs name")
    yield from missing(graph.outputs, "the graph's outputs name")


# Definitions


def _definition_problems(graph: Graph) -> Iterator[str]:
    defined = _Defined(graph)
    index = 0
    for item in graph.items:
        body = item.nodes if isinstance(item, Block) else (item,)
        carries = item.carries if isinstance(item, Block) else ()
        yield from defined.opened(carries, getattr(item, "module", ""))
        for node in body:
            yield from defined.passed(node, _where(index, node))
            index += 1
        yield from defined.closed(carries, getattr(item, "module", ""))
    for out in graph.outputs:
        if not defined.has(out):
            yield f"the graph's output %{out} is never written"


class _Defined:
    """The values that exist after the nodes passed so far."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.ids = {v.id for v in graph.values if v.kind in RESIDENT}
        self.resident = frozenset(self.ids)

    def has(self, value: int) -> bool:
        """An alias exists when the storage it looks at does."""
        at: int | None = value
        while at is not None:
            if at in self.ids:
                return True
            at = self.values[at].alias
        return False

    def opened(self, carries: Sequence[Carry], module: str) -> Iterator[str]:
        for c in carries:
            if not self.has(c.init):
                yield f"block {module!r} starts its carry %{c.inner} from %{c.init}, which is not written before it"
            if c.inner in self.ids:
                yield f"block {module!r} carries %{c.inner}, which is already written: a carry needs its own value"
        self.ids.update(c.inner for c in carries)

    def closed(self, carries: Sequence[Carry], module: str) -> Iterator[str]:
        for c in carries:
            before, after = self.values[c.init].type, self.values[c.next].type
            if not self.has(c.next):
                yield f"block {module!r} carries %{c.next} on, which its body never writes"
            elif (before.shape, before.dtype) != (after.shape, after.dtype):
                yield f"block {module!r} starts its carry %{c.inner} as {before} and hands it on as {after}"

    def passed(self, node: Node, where: str) -> Iterator[str]:
        for i in node.inputs:
            if not self.has(i):
                yield f"{where} reads %{i} before anything has written it"
        for o in node.outputs:
            if o in self.ids and not self._rewritable(o, node):
                yield f"{where} writes %{o} a second time: in-place ops read what they write, others need a new value"
        if len(set(node.outputs)) < len(node.outputs):
            yield f"{where} writes the same value twice"
        self.ids.update(node.outputs)

    def _rewritable(self, value: int, node: Node) -> bool:
        in_place = value in node.inputs or bool(node.attrs.get("inplace"))
        return in_place or value in self.resident or self.values[value].alias is not None


def _stack_problems(graph: Graph) -> Iterator[str]:
    index = 0
    for item in graph.items:
        body = item.nodes if isinstance(item, Block) else (item,)
        for node in body:
            if isinstance(item, Block):
                yield from _wrong_counts(graph, item, node, _where(index, node))
            index += 1


def _wrong_counts(graph: Graph, block: Block, node: Node, where: str) -> Iterator[str]:
    for i in dict.fromkeys((*node.inputs, *node.outputs)):
        count = graph.values[i].count
        if count not in (1, block.repeat):
            yield f"{where} uses %{i}, a stack of {count}, in a block that repeats {block.repeat} times"


# Attributes


def _attr_problems(graph: Graph) -> Iterator[str]:
    known = ops()
    for where, node in _placed(graph):
        if node.op not in known:
            yield f"{where}: unknown op{nearest(node.op, known)}; new ops are declared in graph/ops.py"
            continue
        decl = known[node.op]
        for name in decl.required:
            if name not in node.attrs:
                yield f"{where} lacks attribute {name!r}: {node.op} is {decl.meaning}"
        allowed = {*decl.required, *decl.optional, *EVERYWHERE}
        for name, value in node.attrs.items():
            if name not in allowed and node.op != "custom":
                yield f"{where} has attribute {name!r}, which {node.op} does not know{nearest(name, allowed)}"
            if not is_plain(value):
                yield f"{where}: attribute {name!r} is a {type(value).__name__}: use numbers, text, or lists of them"


def is_plain(value: object) -> bool:
    """Whether an attribute can be hashed and saved: None, bool, int, finite float, text, or a list or tuple of them."""
    if isinstance(value, list | tuple):
        return all(is_plain(v) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


# Shapes


def _shape_problems(graph: Graph) -> Iterator[str]:
    for where, node in _placed(graph):
        sizes, rule = _SHAPE_RULES.get(node.op, ("", None))
        if rule is None:
            continue
        bad = [name for name in sizes.split() if not _is_size(node.attrs[name])]
        yield from (f"{where}: {name}={node.attrs[name]!r} is not a whole number from 0 up" for name in bad)
        if not bad:
            yield from (f"{where}: {p}" for p in rule(node.attrs, graph.in_types(node), graph.out_types(node), node))


def _expect(types: Sequence[TensorType], numels: set[int], what: str) -> Iterator[str]:
    """One of ``types`` has one of ``numels`` elements; narrow and packed types may hold several per element."""
    if types and not any(t.numel in numels or t.dtype.family != "float" or t.dtype.bits < 8 for t in types):
        yield f"no {what} has {' or '.join(map(str, sorted(numels)))} elements, only {', '.join(map(str, types))}"


def _matmul_shape(
    a: Mapping[str, Any], ins: Sequence[TensorType], outs: Sequence[TensorType], node: Node
) -> Iterator[str]:
    b, m, n, k = a["b"], a["m"], a["n"], a["k"]
    yield from _expect(ins, {m * k, b * m * k}, f"input with b×m×k = {b}×{m}×{k}")
    yield from _expect(ins, {k * n, b * k * n}, f"input with b×k×n = {b}×{k}×{n}")
    if "epilogue" not in a:
        yield from _expect(outs, {b * m * n}, f"output with b×m×n = {b}×{m}×{n}")


def _attention_shape(
    a: Mapping[str, Any], ins: Sequence[TensorType], outs: Sequence[TensorType], node: Node
) -> Iterator[str]:
    if a["hkv"] and a["h"] % a["hkv"]:
        yield f"h={a['h']} query heads do not divide over hkv={a['hkv']} key heads"
    if a.get("varlen"):
        return
    b, h, s, d = a["b"], a["h"], a["s"], a["d"]
    yield from _expect(ins, {b * h * s * d}, f"input with b×h×s×d = {b}×{h}×{s}×{d}")
    dv = a.get("dv") or d
    if node.phase == "forward" and _is_size(dv):
        yield from _expect(outs, {b * h * s * dv}, f"output with b×h×s×dv = {b}×{h}×{s}×{dv}")


def _conv_shape(
    a: Mapping[str, Any], ins: Sequence[TensorType], outs: Sequence[TensorType], node: Node
) -> Iterator[str]:
    if a["groups"] < 1 or a["c"] % a["groups"] or a["o"] % a["groups"]:
        yield f"c={a['c']} and o={a['o']} channels do not divide over groups={a['groups']}"
        return
    if a["which"] != "fwd" or "epilogue" in a:
        return
    spatial = _sizes(a["out_spatial"]) if a.get("out_spatial") else conv_out_spatial(a)
    if spatial is not None:
        shape = "×".join(map(str, (a["n"], a["o"], *spatial)))
        yield from _expect(outs, {a["n"] * a["o"] * math.prod(spatial)}, f"output with n×o×spatial = {shape}")


def conv_out_spatial(a: Mapping[str, Any]) -> tuple[int, ...] | None:
    """What a convolution makes of its spatial dims; None where its padding is given by name or it is transposed."""
    parts = [sizes for key in ("spatial", "kernel", "stride", "padding", "dilation") if (sizes := _sizes(a[key]))]
    if a["transposed"] or len(parts) < 5 or len({len(p) for p in parts}) > 1 or 0 in parts[2]:
        return None
    return tuple((x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d in zip(*parts))


def _sizes(value: object) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list | tuple) and all(_is_size(v) for v in value) else None


_ShapeRule = Callable[[Mapping[str, Any], Sequence[TensorType], Sequence[TensorType], Node], Iterator[str]]
_SHAPE_RULES: dict[str, tuple[str, _ShapeRule]] = {
    "matmul": ("b m n k", _matmul_shape),
    "attention": ("b h hkv s skv d", _attention_shape),
    "conv": ("n c o groups", _conv_shape),
}


# Frees


def _free_problems(graph: Graph) -> Iterator[str]:
    """Checked on the flat schedule, where every iteration has its own storages."""
    places = {id(node): where for where, node in _placed(graph)}
    freed: set[Flat] = set()
    seen: set[str] = set()
    latest: dict[int, Flat] = {}  # where each value was written last
    for flat in expand(graph):
        where = places[id(flat.node)]
        for problem in _freed_wrong(graph, flat.inputs, flat.outputs, flat.frees, freed):
            if (text := f"{where} {problem}") not in seen:  # one line, not one per iteration
                seen.add(text)
                yield text
        freed.update(flat.frees)
        latest.update(zip(flat.node.outputs, flat.outputs))
    for out in graph.outputs:
        if latest.get(out) in freed:
            yield f"the graph's output %{out} is freed before the end"


def _freed_wrong(
    graph: Graph, inputs: Sequence[Flat], outputs: Sequence[Flat], frees: Sequence[Flat], freed: set[Flat]
) -> Iterator[str]:
    for storage in dict.fromkeys((*inputs, *outputs)):
        if storage in freed:
            yield f"uses the storage of %{storage[0]} after it was freed"
    for storage in frees:
        if storage in freed or frees.count(storage) > 1:
            yield f"frees the storage of %{storage[0]} a second time"
        if graph.values[storage[0]].kind in RESIDENT and storage[0] not in graph.meta.get("donated", ()):
            yield f"frees %{storage[0]}, a {graph.values[storage[0]].kind}, which outlives the run"
