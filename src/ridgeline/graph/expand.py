"""Blocks laid out flat, in full or with their middle iterations standing for all of them.

Any analysis of a flat list then works on a graph with blocks: price each flat node once and multiply by ``times``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.graph.types import RESIDENT, Block, Carry, Graph, Node

Flat = tuple[int, int]
"""A storage of the flat graph: (id of the value that owns it, slice); the slice is 0 outside blocks."""

OUTSIDE = -1
"""The slot of nodes outside blocks: a value of a closed block then means its last iteration's."""


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
    names = _Names(graph, max_iterations)
    body = 0
    for index, item in enumerate(graph.items):
        names.index = index
        if isinstance(item, Node):
            yield names.flat(item, OUTSIDE, 1, 0)
            names.written.update(item.outputs)
            continue
        names.enter(item)
        times = slot_times(item.repeat, max_iterations)
        slot = 0
        for i in range(len(times)):
            body += 1
            slot = len(times) - 1 - i if item.reverse else i
            names.iterate(item, i, slot)
            for node in item.nodes:
                yield names.flat(node, slot, times[slot], body)
        names.leave(item, slot)


def moving(graph: Graph) -> dict[int, Carry]:
    """The carries that are another storage in every iteration, by placeholder; one updated in place is not."""
    found = {c.inner: c for item in graph.items if isinstance(item, Block) for c in item.carries}
    for inner, c in list(found.items()):
        value: int | None = c.next
        while value is not None and value != inner:
            value = graph.values[value].alias
        if value == inner and graph.values[inner].count == 1:
            del found[inner]
    return found


class _Names:
    """Which storage a value id means right now."""

    def __init__(self, graph: Graph, max_iterations: int) -> None:
        self.values = graph.values
        self.max_iterations = max_iterations
        self.holders = frozenset(moving(graph))
        self.needed = self._needed(graph)
        self.index = 0
        self.written: set[int] = set()  # values written so far, outside the open block
        self.carried: dict[int, Flat] = {}  # placeholder of the open block → storage in this iteration
        self.stacked: dict[Flat, Flat] = {}  # (placeholder, slice) → storage, for later blocks
        self.local: frozenset[int] = frozenset()  # values the open block defines
        self.last: dict[int, int] = {}  # value defined in a closed block → slice of its last iteration
        self.slices: dict[int, int] = {}  # value of a closed block → iterations shown that each wrote one
        self.gone: set[Flat] = set()  # freed so far
        self.held: dict[Flat, float] = {}  # stacked carries of closed blocks → the later item that frees their slices
        self.slot = 0

    def _needed(self, graph: Graph) -> dict[int, float]:
        """The last item that needs each storage by its own name; as a carry's start an item needs it half as long."""
        needed: dict[int, float] = {}
        if not self.holders:
            return needed
        for index, item in enumerate(graph.items):
            if isinstance(item, Block):
                for root in [self.owner(c.init) for c in item.carries]:
                    needed[root] = index if needed.get(root) == index - 0.5 else index - 0.5
            for node in item.nodes if isinstance(item, Block) else (item,):
                for value in (*node.inputs, *node.outputs):
                    needed[self.owner(value)] = index
        for out in graph.outputs:
            needed[self.owner(out)] = len(graph.items)
        return needed

    def owner(self, value: int) -> int:
        while value not in self.holders and (alias := self.values[value].alias) is not None:
            value = alias
        return value

    def enter(self, block: Block) -> None:
        outputs = {o for n in block.nodes for o in n.outputs} - self.written
        self.local = frozenset(o for o in outputs if self.values[o].alias is not None or not self._is_resident(o))
        self.carried = {}

    def _is_resident(self, value: int) -> bool:
        return self.values[value].kind in RESIDENT

    def iterate(self, block: Block, i: int, slot: int) -> None:
        if i == 0:
            fresh = {c.inner: self.storage(c.init, OUTSIDE) for c in block.carries}
        else:
            fresh = {c.inner: self.storage(c.next, self.slot) for c in block.carries}
        self.carried, self.slot = fresh, slot
        self.stacked.update({(inner, slot): flat for inner, flat in fresh.items()})

    def leave(self, block: Block, slot: int) -> None:
        self.stacked.update({(c.inner, OUTSIDE): self.carried[c.inner] for c in block.carries})
        self.last.update(dict.fromkeys(self.local, slot))
        slots = min(block.repeat, self.max_iterations)
        self.slices.update(dict.fromkeys(self.local, slots))
        stacks = [c.inner for c in block.carries if self.values[c.inner].count > 1]
        self.slices.update(dict.fromkeys(stacks, slots))
        self.held.update({self.stacked[i, at]: self.needed.get(i, -1) for i in stacks for at in range(slots)})
        self.written |= self.local
        self.local, self.carried = frozenset(), {}

    def storage(self, value: int, slot: int) -> Flat:
        values = self.values
        inside = sliced = slot != OUTSIDE
        while True:
            if inside and value in self.carried:
                return self.carried[value]
            seen = values[value]
            sliced = sliced and (seen.count > 1 or value in self.local)  # a view made outside is of the last slice
            own = sliced and seen.count > 1
            if own and (value, slot) in self.stacked:
                return self.stacked[value, slot]
            if not own and (value, OUTSIDE) in self.stacked:
                return self.stacked[value, OUTSIDE]
            if seen.alias is None:
                return (value, slot if own or (inside and value in self.local) else self.last.get(value, 0))
            value = seen.alias

    def freed(self, value: int, slot: int) -> Iterator[Flat]:
        """A plain node frees what all iterations left; a body spares the start of a carry that others need still."""
        if slot == OUTSIDE and value in self.slices:
            every = (self.stacked.get((value, at), (value, at)) for at in range(self.slices[value]))
            yield from (storage for storage in every if storage not in self.gone and not self.is_held(storage))
            return
        storage = self.storage(value, slot)
        spared = self.is_held(storage) if slot == OUTSIDE else value in self.holders and self.outlives(storage)
        if not spared:
            yield storage

    def is_held(self, storage: Flat) -> bool:
        return self.held.get(storage, -1) > self.index

    def outlives(self, storage: Flat) -> bool:
        root, slot = storage
        if root in self.local or slot != self.last.get(root, 0):
            return False
        return self._is_resident(root) or self.needed.get(root, -1) >= self.index

    def flat(self, node: Node, slot: int, times: int, body: int) -> FlatNode:
        inputs = tuple(self.storage(v, slot) for v in node.inputs)
        outputs = tuple(self.storage(v, slot) for v in node.outputs)
        frees = tuple(s for v in node.frees for s in self.freed(v, slot)) if node.frees else ()
        self.gone.update(frees)
        return FlatNode(node, inputs, outputs, frees, times, body)
