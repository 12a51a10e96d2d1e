"""Building graphs by hand: what the zoo and the importers use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.errors import GraphError
from ridgeline.graph.types import RESIDENT, Block, Carry, Graph, Item, Kind, Node, Phase, TensorType, Value


@dataclass
class _OpenBlock:
    repeat: int
    module: str
    reverse: bool
    nodes: list[Node] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)


class Builder:
    """Collects values and nodes; ``finish`` makes the immutable graph and, unless told, computes what each node frees."""

    def __init__(self, name: str, mode: str = "infer", **meta: Any) -> None:
        self.name, self.mode, self.meta = name, mode, meta
        self.values: list[Value] = []
        self.items: list[Item] = []
        self.phase = Phase.FORWARD
        self._path: list[str] = []
        self._block: _OpenBlock | None = None

    def value(self, type_: TensorType, kind: Kind = Kind.ACTIVATION, *, alias: int | None = None, count: int = 1,
              name: str = "", storage_bytes: int | None = None) -> int:
        """A new value; returns its id."""
        self.values.append(Value(len(self.values), type_, kind, alias, count, name, storage_bytes))
        return len(self.values) - 1

    def param(self, name: str, type_: TensorType) -> int:
        """A parameter; inside a repeated block, one per iteration."""
        count = self._block.repeat if self._block else 1
        return self.value(type_, Kind.PARAM, count=count, name=self._dotted(name))

    def input(self, name: str, type_: TensorType) -> int:
        return self.value(type_, Kind.INPUT, name=name)

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Nodes added inside belong to this submodule."""
        self._path.append(name)
        try:
            yield
        finally:
            self._path.pop()

    @contextmanager
    def repeat(self, times: int, module: str, *, reverse: bool = False) -> Iterator[None]:
        """Nodes added inside form a block that runs ``times``; carry values with ``carry`` and ``close_carry``."""
        if self._block is not None:
            raise GraphError("blocks do not nest: finish the open one first")
        self._block = _OpenBlock(times, module, reverse)
        self._path.append(f"{module}.*")
        try:
            yield
        finally:
            self._path.pop()
            block, self._block = self._block, None
        if any(c.next < 0 for c in block.carries):
            raise GraphError(f"block {module!r} has a carried value that was never closed")
        if times > 0:
            self.items.append(Block(tuple(block.nodes), times, tuple(block.carries), reverse, module))

    def carry(self, init: int) -> int:
        """The block-local name of a value that flows from iteration to iteration; starts as ``init``."""
        assert self._block is not None
        inner = self.value(self.values[init].type, alias=init)
        self._block.carries.append(Carry(init, inner, -1))
        return inner

    def close_carry(self, inner: int, next_: int) -> None:
        """Say what ``inner`` becomes in the following iteration."""
        assert self._block is not None
        carries = self._block.carries
        index = next(i for i, c in enumerate(carries) if c.inner == inner)
        carries[index] = replace(carries[index], next=next_)

    def node(self, op: str, inputs: Sequence[int], outputs: Sequence[TensorType | int], *, target: str = "",
             module: str | None = None, frees: tuple[int, ...] = (), out_kind: Kind = Kind.ACTIVATION,
             **attrs: Any) -> tuple[int, ...]:
        """Add a node; an output given as a type is a new value, one given as an id already exists (in-place)."""
        outs = tuple(o if isinstance(o, int) else self.value(o, out_kind) for o in outputs)
        path = ".".join(self._path) if module is None else module
        made = Node(op, tuple(inputs), outs, attrs, self.phase, path, "", target, frees)
        (self._block.nodes if self._block is not None else self.items).append(made)
        return outs

    def view(self, of: int, type_: TensorType, fn: str = "view") -> int:
        """Another look at the storage of ``of``."""
        out = self.value(type_, self.values[of].kind, alias=of, count=1)
        self.node("view", [of], [out], fn=fn)
        return out

    def finish(self, outputs: Sequence[int] = (), *, frees: bool = True) -> Graph:
        """The immutable graph. ``frees=False`` keeps the frees the nodes were given (captures know them exactly)."""
        inputs = tuple(v.id for v in self.values if v.kind is Kind.INPUT)
        graph = Graph(self.name, tuple(self.values), tuple(self.items), inputs, tuple(outputs), self.mode, self.meta)
        return with_frees(graph) if frees else graph

    def _dotted(self, name: str) -> str:
        return ".".join([*self._path, name]) if self._path else name


def root_of(values: Sequence[Value], value: int) -> int:
    """The value that owns the storage ``value`` lives in."""
    while (alias := values[value].alias) is not None:
        value = alias
    return value


def with_frees(graph: Graph) -> Graph:
    """Free every activation after its last use, as reference counting would."""
    values = graph.values
    keep = {root_of(values, o) for o in graph.outputs}
    keep |= {v.id for v in values if v.kind in RESIDENT}
    last_use: dict[int, int] = {}
    for index, item in enumerate(graph.items):
        for node in item.nodes if isinstance(item, Block) else (item,):
            for value in (*node.inputs, *node.outputs):
                last_use[root_of(values, value)] = index
        if isinstance(item, Block):
            for c in item.carries:
                last_use[root_of(values, c.init)] = index
    items = tuple(_freed_item(graph, item, index, last_use, keep) for index, item in enumerate(graph.items))
    return replace(graph, items=items)


def _freed_item(graph: Graph, item: Item, index: int, last_use: dict[int, int], keep: set[int]) -> Item:
    values = graph.values
    if isinstance(item, Node):
        roots = dict.fromkeys(root_of(values, v) for v in (*item.inputs, *item.outputs))
        return replace(item, frees=tuple(r for r in roots if last_use[r] == index and r not in keep))
    return _freed_block(graph, item, index, last_use, keep)


def _freed_block(graph: Graph, block: Block, index: int, last_use: dict[int, int], keep: set[int]) -> Block:
    """Inside a block a value dies after its last use in the body, unless it is carried on, stacked for later, or from outside."""
    values = graph.values
    inner_roots = {c.inner for c in block.carries}

    def local_root(value: int) -> int:  # stop at the carried placeholder: each iteration has its own
        while value not in inner_roots and values[value].alias is not None:
            value = values[value].alias  # type: ignore[assignment]
        return value

    defined = {local_root(o) for n in block.nodes for o in n.outputs}
    next_roots = {local_root(c.next) for c in block.carries}
    last: dict[int, int] = {}
    for at, node in enumerate(block.nodes):
        for value in (*node.inputs, *node.outputs):
            last[local_root(value)] = at
    frees: dict[int, list[int]] = {}
    for root, at in last.items():
        if root in inner_roots:
            if values[root].count == 1 and root not in next_roots:
                frees.setdefault(at, []).append(root)
        elif root in next_roots or last_use[root_of(values, root)] != index or root in keep:
            continue
        elif root in defined or values[root].count > 1:
            frees.setdefault(at, []).append(root)
    nodes = tuple(replace(n, frees=tuple(frees.get(at, ()))) for at, n in enumerate(block.nodes))
    return replace(block, nodes=nodes)
