"""What the nodes of a graph lower to: looked up by their meaning, or computed from a template's recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ridgeline.cost.call import Call
from ridgeline.cost.lower.eager import lower
from ridgeline.cost.work import Site, Work, site_of, work_of
from ridgeline.errors import CostError
from ridgeline.graph import Graph, Node, ops, root_of
from ridgeline.graph.symbol import Guard, Recording, SymbolError, hold, picker
from ridgeline.graph.template import Template

T = TypeVar("T")

Lowered = tuple[Work, tuple[Call, ...], tuple[float, ...], tuple[float, ...]]
"""A node's work, its calls, and the bytes of each input and output."""

NO_CALLS: Lowered = (Work(), (), (), ())
"""What a view asks of a device, and a collective of one that is simulated with its network: a place in the list."""


class Lowering:
    """Lowers the nodes of a graph for an architecture, those of equal meaning once."""

    def __init__(self, graph: Graph, arch: str, seen: dict[tuple[object, ...], Lowered]) -> None:
        self.graph, self.arch, self.seen = graph, arch, seen
        self.networked = bool(graph.meta.get("networked"))  # a rank's graph: its collectives are priced by the network
        self.roots = roots_of(graph)
        self.ops = ops()
        owned = [v.num_bytes for v in graph.values]
        self.held = [owned[root] for root in self.roots]  # bytes of the storage a value lives in
        self.keys = [(v.type.number, held) for v, held in zip(graph.values, self.held, strict=True)]

    def site(self, node: Node) -> Site:
        values, held = self.graph.values, self.held
        ins = tuple([values[v].type for v in node.inputs])
        outs = tuple([values[v].type for v in node.outputs])
        own = [(t.num_bytes, held[v]) for t, v in zip(ins, node.inputs, strict=True)]
        return site_of(node, ins, outs, tuple([h if 0 < h < b else b for b, h in own]))

    def lowered(self, node: Node) -> Lowered:
        op = self.ops.get(node.op)
        if (op is not None and op.free) or (node.op == "collective" and self.networked):
            return NO_CALLS
        keys = self.keys
        ins = tuple([keys[v] for v in node.inputs])
        outs = tuple([keys[v][0] for v in node.outputs])
        key = (node.op, _frozen(node.attrs), ins, outs)
        try:
            found = self.seen.get(key)
        except TypeError:
            raise CostError(
                f"op {node.op!r} at {node.module or 'top level'} has an attribute "
                f"that is no plain value: {dict(node.attrs)}"
            ) from None
        if found is None:
            site = self.site(node)
            # Distinct nodes a process keeps lowered; a study of endless shapes must not grow for ever
            if len(self.seen) > 200_000:
                self.seen.clear()
            out_bytes = tuple([1.0 * t.num_bytes for t in site.outs])
            found = self.seen[key] = (work_of(site), lower(site, self.arch), site.in_bytes, out_bytes)
        return found


def roots_of(graph: Graph) -> list[int]:
    """For every value the one that owns the storage it lives in."""
    return [root_of(graph.values, v.id) if v.alias is not None else v.id for v in graph.values]


def _frozen(attrs: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    return tuple([(k, tuple(v) if type(v) is list else v) for k, v in attrs.items() if k != "calls"])


Storages = tuple[tuple[int, ...], tuple[int, ...]]
"""Which storages a node reads and writes, by the values that own them."""


def storages_of(graph: Graph, roots: Sequence[int]) -> list[Storages]:
    return [
        (tuple([roots[v] for v in node.inputs]), tuple([roots[v] for v in node.outputs])) for node, _ in graph.nodes()
    ]


def _lowered_maker(template: Template, arch: str) -> Make[tuple[list[Lowered], list[Storages]]]:
    lowering = Lowering(template.graph, arch, {})
    found = [lowering.lowered(node) for node, _ in template.graph.nodes()]
    distinct = {id(lowered): lowered for lowered in found}
    slots = {key: slot for slot, key in enumerate(distinct)}
    makers = [maker_of(template.recording, lowered) for lowered in distinct.values()]
    chosen, storages = [slots[id(lowered)] for lowered in found], storages_of(template.graph, lowering.roots)

    def made(numbers: Sequence[Any], graph: Graph) -> tuple[list[Lowered], list[Storages]]:
        each = [make(numbers) for make in makers]
        return [each[slot] for slot in chosen], storages

    return made


def maker_of(recording: Recording, lowered: Lowered) -> Callable[[Sequence[Any]], Lowered]:
    """A function from a template's numbers to what was lowered with symbols."""
    work, calls, in_bytes, out_bytes = lowered
    if not calls:
        return lambda numbers: lowered
    amounts = (work.flops, work.read_bytes, work.written_bytes, work.matrix_flops)
    pick = picker(recording, (*amounts, *in_bytes, *out_bytes, *(number for c in calls for _, number in c.shape)))
    read = 4 + len(in_bytes)
    end, dtype = read + len(out_bytes), work.dtype
    shapes = []
    for c in calls:
        shapes.append((c, tuple([name for name, _ in c.shape]), end, end + len(c.shape)))
        end += len(c.shape)
    written = shapes[0][2]

    def made(numbers: Sequence[Any]) -> Lowered:
        found = pick(numbers)
        asked = Work(flops=found[0], read_bytes=found[1], written_bytes=found[2], matrix_flops=found[3], dtype=dtype)
        launched = [
            Call(c.kind, c.dtype, c.phase, c.library, tuple(zip(names, found[start:stop], strict=True)))
            for c, names, start, stop in shapes
        ]
        return asked, tuple(launched), found[4:read], found[read:written]

    return made


Make = Callable[[Sequence[Any], Graph], T]
"""From the numbers of a template's graph, and the graph, to what was worked out of the template."""


class _Recipes(Generic[T]):
    """What was worked out of a template for one purpose: makers behind guards, the last used first."""

    def __init__(self) -> None:
        self.known: list[tuple[tuple[Guard, ...], Make[T]]] = []
        self.refused = False

    def find(self, numbers: Sequence[Any]) -> Make[T] | None:
        for at, (guards, make) in enumerate(self.known):
            if hold(guards, numbers):
                if at:
                    self.known.insert(0, self.known.pop(at))
                return make
        return None

    def record(self, template: Template, numbers: list[Any], write: Callable[[Template], Make[T]]) -> Make[T] | None:
        recording = template.recording
        recording.rebase(numbers)
        try:
            make = write(template)
        except SymbolError:
            self.refused = True
        guards = recording.take_guards()
        if self.refused:
            return None
        # Recipes kept of one template and architecture: a batch of one and the like take other kernels
        self.known = [(guards, make), *self.known[: 8 - 1]]
        return make


_recipes: WeakKeyDictionary[Template, dict[tuple[str, ...], _Recipes[Any]]] = WeakKeyDictionary()


def from_template(graph: Graph, purpose: tuple[str, ...], write: Callable[[Template], Make[T]]) -> T | None:
    """What ``write`` would work out of the graph, by the recipe it wrote for its template; none without a template."""
    made = graph.__dict__.get("template")
    if made is None:
        return None
    template, sizes, numbers = made
    with template.lock:
        recipes: _Recipes[T] = _recipes.setdefault(template, {}).setdefault(purpose, _Recipes())
        if recipes.refused:
            return None
        if len(numbers) < len(template.recording.numbers):  # the graph was made before the last recipe was written
            numbers = template.recording.replay(sizes)
        if numbers is None:
            return None
        make = recipes.find(numbers)
        if make is None:
            make = recipes.record(template, list(numbers), write)
            numbers = template.recording.numbers
        return None if make is None else make(numbers, graph)


def lowered_of(
    graph: Graph, arch: str, seen: dict[tuple[object, ...], Lowered]
) -> tuple[list[Lowered], list[Storages]]:
    """What every node of a graph lowers to on an architecture, and the storages it touches."""
    found = from_template(graph, ("lowered", arch), lambda template: _lowered_maker(template, arch))
    if found is not None:
        return found
    lowering = Lowering(graph, arch, seen)
    return [lowering.lowered(node) for node, _ in graph.nodes()], storages_of(graph, lowering.roots)
