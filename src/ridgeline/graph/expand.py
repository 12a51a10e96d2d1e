"""Blocks laid out flat, in full or with their middle iterations standing for all of them.

Any analysis of a flat list then works on a graph with blocks: price each flat node once and multiply by ``times``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.graph.types import Block, Graph, Node

Flat = tuple[int, int]
"""A storage of the flat graph: (id of the value that owns it, slice); the slice is 0 outside blocks."""


@dataclass(frozen=True, slots=True)
class FlatNode:
    """A node whose values are resolved to the storages they live in.

    ``times`` iterations look like this one. ``body`` numbers the stretch of flat nodes that repeats together; it is
    0 outside blocks.
    """

    node: Node
    inputs: tuple[Flat, ...]
    outputs: tuple[Flat, ...]
    frees: tuple[Flat, ...]
    times: int
    body: int


def slot_times(repeat: int, max_iterations: int) -> list[int]:
    """How many real iterations each shown one stands for: first and last alone, the middle for the rest."""
    shown = min(repeat, max_iterations)
    return [repeat - shown + 1 if shown < repeat and i == shown // 2 else 1 for i in range(shown)]


def expand(graph: Graph, max_iterations: int = 3) -> Iterator[FlatNode]:
    """Flat nodes in schedule order; a longer block shows its first, middle (× the rest) and last iteration."""
    names = _Names(graph)
    body = 0
    for item in graph.items:
        if isinstance(item, Node):
            yield names.flat(item, 0, 1, 0)
            continue
        names.enter(item)
        times = slot_times(item.repeat, max_iterations)
        for i, repeated in enumerate(times):
            body += 1
            slot = len(times) - 1 - i if item.reverse else i
            names.iterate(item, i, slot)
            for node in item.nodes:
                yield names.flat(node, slot, repeated, body)
        names.leave(item, slot)


class _Names:
    """Which storage a value id means right now."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.carried: dict[int, Flat] = {}  # placeholder of the open block → storage in this iteration
        self.stacked: dict[Flat, Flat] = {}  # (placeholder, slice) → storage, for later blocks
        self.local: frozenset[int] = frozenset()  # values the open block defines
        self.last: dict[int, int] = {}  # value defined in a closed block → slice of its last iteration
        self.slot = 0

    def enter(self, block: Block) -> None:
        self.local = frozenset(o for n in block.nodes for o in n.outputs)
        self.carried = {}

    def iterate(self, block: Block, i: int, slot: int) -> None:
        if i == 0:
            fresh = {c.inner: self.storage(c.init, slot) for c in block.carries}
        else:
            fresh = {c.inner: self.storage(c.next, self.slot) for c in block.carries}
        self.carried, self.slot = fresh, slot
        self.stacked.update({(inner, slot): flat for inner, flat in fresh.items()})

    def leave(self, block: Block, slot: int) -> None:
        self.stacked.update({(c.inner, -1): self.carried[c.inner] for c in block.carries})
        self.last.update(dict.fromkeys(self.local, slot))
        self.local, self.carried = frozenset(), {}

    def storage(self, value: int, slot: int) -> Flat:
        while True:
            if value in self.carried:
                return self.carried[value]
            seen = self.values[value]
            if seen.count > 1 and (value, slot) in self.stacked:
                return self.stacked[value, slot]
            if (value, -1) in self.stacked and value not in self.local:
                return self.stacked[value, -1]
            if seen.alias is None:
                inside = seen.count > 1 or value in self.local
                return (value, slot if inside else self.last.get(value, 0))
            value = seen.alias

    def flat(self, node: Node, slot: int, times: int, body: int) -> FlatNode:
        inputs = tuple(self.storage(v, slot) for v in node.inputs)
        outputs = tuple(self.storage(v, slot) for v in node.outputs)
        frees = tuple(self.storage(v, slot) for v in node.frees)
        return FlatNode(node, inputs, outputs, frees, times, body)
