"""Building graphs by hand: what the zoo and the importers use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.errors import GraphError
from ridgeline.graph.expand import moving
from ridgeline.graph.types import RESIDENT, Block, Carry, Graph, Item, Kind, Node, Phase, TensorType, Value


@dataclass
class _OpenBlock:
    repeat: int
    module: str
    reverse: bool
    nodes: list[Node] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)


class Builder:
    """Collects values and nodes; ``finish`` makes the immutable graph and computes what each node frees."""

    def __init__(self, name: str, mode: str = "infer", **meta: Any) -> None:
        self.name, self.mode, self.meta = name, mode, meta
        self.values: list[Value] = []
        self.items: list[Item] = []
        self.phase = Phase.FORWARD
        self._path: list[str] = []
        self._block: _OpenBlock | None = None

    def value(
        self,
        type_: TensorType,
        kind: Kind = Kind.ACTIVATION,
        *,
        alias: int | None = None,
        count: int = 1,
        name: str = "",
        storage_bytes: int | None = None,
    ) -> int:
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

    def node(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[TensorType | int],
        *,
        target: str = "",
        module: str | None = None,
        frees: tuple[int, ...] = (),
        out_kind: Kind = Kind.ACTIVATION,
        **attrs: Any,
    ) -> tuple[int, ...]:
        """Add a node; an output given as a type is a new value, one given as an id already exists (in-place)."""
        outs = tuple([o if isinstance(o, int) else self.value(o, out_kind) for o in outputs])
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
    """Free every activation after its last use, as reference counting would; gradients stay.

    What dies where follows from who uses what, whatever the shapes: graphs of one structure are worked out once.
    """
    key = _structure(graph)
    frees = _known_frees.get(key)
    if frees is None:
        # max structures
        if len(_known_frees) >= 1000:
            _known_frees.clear()
        frees = _known_frees[key] = tuple(
            (tuple([n.frees for n in item.nodes]) if isinstance(item, Block) else (item.frees,))
            for item in _Frees(graph).items()
        )
    items = tuple([_item_freeing(item, found) for item, found in zip(graph.items, frees, strict=True)])
    return Graph(graph.name, graph.values, items, graph.inputs, graph.outputs, graph.mode, graph.meta)


Freed = tuple[tuple[int, ...], ...]
"""What each node of an item frees."""

_known_frees: dict[tuple[object, ...], tuple[Freed, ...]] = {}


def _structure(graph: Graph) -> tuple[object, ...]:
    """All that decides where values die: who owns, who uses, what repeats."""
    values = tuple([(v.kind, v.alias, v.count) for v in graph.values])
    items = tuple([_item_structure(item) for item in graph.items])
    return values, items, graph.outputs, tuple(graph.meta.get("donated", ()))


def _item_structure(item: Item) -> tuple[object, ...]:
    if isinstance(item, Node):
        return item.inputs, item.outputs
    return item.repeat, item.carries, tuple([(n.inputs, n.outputs) for n in item.nodes])


def _item_freeing(item: Item, frees: Freed) -> Item:
    if isinstance(item, Node):
        return _freeing(item, frees[0])
    nodes = tuple([_freeing(node, found) for node, found in zip(item.nodes, frees, strict=True)])
    return Block(nodes, item.repeat, item.carries, item.reverse, item.module)


def _freeing(n: Node, frees: Sequence[int]) -> Node:
    """``n`` with its frees; four times faster than ``replace``, which is felt in graphs of half a millisecond."""
    freed = tuple(frees)
    if freed == n.frees:
        return n
    return Node(n.op, n.inputs, n.outputs, n.attrs, n.phase, n.module, n.source, n.target, freed)


class _Frees:
    """Walks the schedule once, knowing of every storage where it is used last.

    Storages go by the value that owns them; the placeholder of a carry counts as an owner if it is another storage in
    every iteration.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.carries = moving(graph)
        self.keep = {self.root(o) for o in graph.outputs}
        self.keep |= {v.id for v in graph.values if v.kind in RESIDENT or v.kind is Kind.GRAD}
        self.keep -= set(graph.meta.get("donated", ()))  # inputs the caller gives away, such as a cache being replaced
        self.written: set[int] = set()  # roots written by the items passed
        self.looped: set[int] = set()  # those of them that blocks wrote
        self.pending: list[int] = []  # last used by a block that runs it many times: the next plain node frees them
        self.last_item: dict[int, int] = {}
        for index, item in enumerate(graph.items):
            for node in item.nodes if isinstance(item, Block) else (item,):
                for value in (*node.inputs, *node.outputs):
                    self.last_item[self.root(value)] = index
            if isinstance(item, Block):
                for c in item.carries:
                    self.last_item[self.root(c.init)] = index

    def root(self, value: int) -> int:
        while value not in self.carries and (alias := self.graph.values[value].alias) is not None:
            value = alias
        return value

    def items(self) -> Iterator[Item]:
        for index, item in enumerate(self.graph.items):
            yield self._block(item, index) if isinstance(item, Block) else self._node(item, index)

    def _node(self, node: Node, index: int) -> Node:
        roots = dict.fromkeys(self.root(v) for v in (*node.inputs, *node.outputs))
        dead = [r for r in roots if self.last_item[r] == index and r not in self.keep]
        dead += [r for r in self.pending if r not in roots]
        self.pending = []
        self.written.update(self.root(o) for o in node.outputs)
        return _freeing(node, dead)

    def _block(self, block: Block, index: int) -> Block:
        carries = [c for c in block.carries if c.inner in self.carries]
        last: dict[int, int] = {c.inner: 0 for c in carries}  # one that is never read dies at once
        for at, node in enumerate(block.nodes):
            for value in (*node.inputs, *node.outputs):
                last[self.root(value)] = at
        outputs = {o for n in block.nodes for o in n.outputs}
        single = {i for n in block.nodes for i in n.inputs if self.graph.values[i].count == 1} - outputs
        inits = {c.init for c in block.carries}
        shared = {self.root(i) for i in single | inits}  # not by slice: a stack may be seen through a view of its last
        local = {self.root(o) for o in outputs} - self.written - self.keep - self.carries.keys()
        inner = {c.inner: self.root(c.next) for c in carries}
        handed_on = set(inner.values())
        frees: dict[int, list[int]] = {}
        for root, at in last.items():
            if root in handed_on or root in self.keep or self.last_item.get(root, index) != index:
                continue
            if root in inner:
                dies = self._dies_here(root, inner, last, index)
            else:
                dies = root in local or (root not in shared and self._own_slice(root, last))
            if dies:
                frees.setdefault(at, []).append(root)
            start = self.root(self.carries[root].init) if root in self.carries else root
            if not dies or (root in inner and start in self.looped):  # of a looped start, earlier iterations' remain
                self._leave(start, index)
        self._leave_carried(block, index, local)
        self.written |= local
        self.looped |= local
        nodes = [_freeing(n, frees.get(at, ())) for at, n in enumerate(block.nodes)]
        return replace(block, nodes=tuple(nodes))

    def _dies_here(self, root: int, inner: Mapping[int, int], last: Mapping[int, int], index: int) -> bool:
        """Whether a carried storage dies with its placeholder: not where it, or a twin of it, is stacked for later."""
        twins = [i for i in inner if inner[i] == inner[root]]
        if root != self._last_of(twins, last) or any(self.last_item.get(t, index) != index for t in twins):
            return False
        if self.graph.values[inner[root]].count == 1:
            return True
        return inner[root] not in self.keep and self.last_item.get(inner[root], index) == index

    def _last_of(self, twins: Sequence[int], last: Mapping[int, int]) -> int:
        """Of placeholders that mean one storage, the one that is read last."""
        return max(twins, key=lambda twin: (last[twin], twin))

    def _own_slice(self, root: int, used: Mapping[int, int]) -> bool:
        """Whether each iteration may free its slice of a stack: not if the same storage is also stacked as a result."""
        if self.graph.values[root].count == 1:
            return False
        if root not in self.carries:
            return True
        handed_on = self.root(self.carries[root].next)
        twins = [c for c in self.carries if c in used and self.root(self.carries[c].next) == handed_on]
        return handed_on not in used and root == self._last_of(twins, used)

    def _leave_carried(self, block: Block, index: int, local: set[int]) -> None:
        """What the last iteration hands on to nobody, and inits that several carries share."""
        inits = [self.root(c.init) for c in block.carries]
        for root in dict.fromkeys(self.root(c.next) for c in block.carries):
            if root in local:
                self._leave(root, index)
        for root in {r for r in inits if inits.count(r) > 1}:
            self._leave(root, index)

    def _leave(self, value: int, index: int) -> None:
        root = self.root(value)
        if root not in self.keep and root not in self.pending and self.last_item.get(root, index) <= index:
            self.pending.append(root)
