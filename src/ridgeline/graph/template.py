"""A graph written once with symbols for its sizes, and made again for others without asking the one who wrote it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from ridgeline.graph.symbol import Recording, Symbol, hold, picker
from ridgeline.graph.types import Block, Graph, Item, Node, TensorType, Value, typed

Numbers = Sequence[Any]


class Template:
    """``graph`` has symbols in its shapes and attributes; ``at`` gives the graph that the sizes would have had.

    Who works out more of ``graph`` goes on with its recording, and holds ``lock`` meanwhile.
    """

    def __init__(self, sizes: Sequence[int], write: Callable[[list[Any]], Graph]) -> None:
        self.recording, self.lock = Recording(sizes), RLock()
        self.graph = write(list(self.recording.sizes))
        self._guards = self.recording.take_guards()
        self._items = [_item_maker(self.recording, item) for item in self.graph.items]
        meta = self.graph.meta
        self._meta_names, self._meta = tuple(meta), picker(self.recording, meta.values())
        types = {id(value.type): value.type for value in self.graph.values}
        slots = {key: slot for slot, key in enumerate(types)}
        self._types = [_type_maker(self.recording, type_) for type_ in types.values()]
        self._type_slots = [slots[id(value.type)] for value in self.graph.values]
        self._storage_bytes = picker(self.recording, [value.storage_bytes for value in self.graph.values])

    def at(self, sizes: Sequence[int]) -> Graph | None:
        """The graph at these sizes, its values written out when first asked for; none where it would be another."""
        numbers = self.recording.replay(sizes)
        if numbers is None or not hold(self._guards, numbers):
            return None
        graph = self.graph
        made = Graph.__new__(Graph)
        made.__dict__.update(
            name=graph.name, items=tuple([make(numbers) for make in self._items]), inputs=graph.inputs,
            outputs=graph.outputs, mode=graph.mode, meta=dict(zip(self._meta_names, self._meta(numbers), strict=True)),
            template=(self, tuple(sizes), numbers),
        )  # fmt: skip
        return made

    def values(self, numbers: Numbers) -> tuple[Value, ...]:
        """The values of the graph that has these numbers."""
        types = [make(numbers) for make in self._types]
        parts = zip(self.graph.values, self._type_slots, self._storage_bytes(numbers), strict=True)
        return tuple([Value(v.id, types[t], v.kind, v.alias, v.count, v.name, owned) for v, t, owned in parts])


def _item_maker(recording: Recording, item: Item) -> Callable[[Numbers], Item]:
    if isinstance(item, Node):
        return _node_maker(recording, item)
    makers = [_node_maker(recording, node) for node in item.nodes]

    def block(numbers: Numbers) -> Item:
        nodes = tuple([make(numbers) for make in makers])
        return Block(nodes, item.repeat, item.carries, item.reverse, item.module)

    return block


def _node_maker(recording: Recording, n: Node) -> Callable[[Numbers], Node]:
    """Most nodes are the same at any size: one object serves all graphs."""
    if not any(isinstance(value, Symbol) for value in n.attrs.values()):
        return lambda numbers: n
    names, pick = tuple(n.attrs), picker(recording, n.attrs.values())

    def node(numbers: Numbers) -> Node:
        attrs = dict(zip(names, pick(numbers), strict=True))
        return Node(n.op, n.inputs, n.outputs, attrs, n.phase, n.module, n.source, n.target, n.frees)

    return node


def _type_maker(recording: Recording, t: TensorType) -> Callable[[Numbers], TensorType]:
    pick, dtype, layout = picker(recording, t.shape), t.dtype, t.layout
    return lambda numbers: typed(pick(numbers), dtype, layout)
