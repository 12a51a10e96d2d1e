"""What the nodes of a graph lower to: looked up by their meaning, or computed from a template's recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ridgeline.cost.call import Call
from ridgeline.cost.lower import lower
from ridgeline.cost.work import Site, Work, site_of, work_of
from ridgeline.errors import CostError
from ridgeline.graph import Graph, Node, ops, root_of
from ridgeline.graph.symbol import Recording, SymbolError, hold, picker
from ridgeline.graph.template import Template

Lowered = tuple[Work, tuple[Call, ...], tuple[float, ...], tuple[float, ...]]
"""A node's work, its calls, and the bytes of each input and output."""

NO_CALLS: Lowered = (Work(), (), (), ())
"""What a view asks of a device, and a collective of one that is simulated with its network: a place in the list."""

MAX_REMEMBERED = 200_000
"""Distinct nodes a process keeps lowered; a study of endless shapes must not grow for ever."""

MAX_RECIPES = 12
"""Recipes kept of one template and architecture: a batch of one and the like take other kernels."""


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
            if len(self.seen) > MAX_REMEMBERED:
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


class Recipe:
    """What the nodes of a template lower to, with places of numbers for what depends on sizes."""

    def __init__(self, template: Template, arch: str) -> None:
        recording = template.recording
        lowering = Lowering(template.graph, arch, {})
        found = [lowering.lowered(node) for node, _ in template.graph.nodes()]
        self._guards = recording.take_guards()
        distinct = {id(lowered): lowered for lowered in found}
        slots = {key: slot for slot, key in enumerate(distinct)}
        self._makers = [_maker(recording, lowered) for lowered in distinct.values()]
        self._slots = [slots[id(lowered)] for lowered in found]
        self.storages = storages_of(template.graph, lowering.roots)

    def at(self, numbers: Sequence[Any]) -> list[Lowered] | None:
        """What every node lowers to; none where sizes decide otherwise than when the recipe was written."""
        if not hold(self._guards, numbers):
            return None
        made = [make(numbers) for make in self._makers]
        return [made[slot] for slot in self._slots]


def _maker(recording: Recording, lowered: Lowered) -> Callable[[Sequence[Any]], Lowered]:
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


_recipes: WeakKeyDictionary[Template, dict[str, list[Recipe]]] = WeakKeyDictionary()


def lowered_of(graph: Graph, arch: str, seen: dict[tuple[object, ...], Lowered]) -> tuple[list[Lowered], list[Storages]]:
    """What every node of a graph lowers to on an architecture, and the storages it touches."""
    made = graph.__dict__.get("template")
    if made is not None:
        found = _from_template(*made, arch)
        if found is not None:
            return found
    lowering = Lowering(graph, arch, seen)
    return [lowering.lowered(node) for node, _ in graph.nodes()], storages_of(graph, lowering.roots)


def _from_template(
    template: Template, sizes: Sequence[int], numbers: Sequence[Any], arch: str
) -> tuple[list[Lowered], list[Storages]] | None:
    recipes = _recipes.setdefault(template, {}).setdefault(arch, [])
    recording = template.recording
    if len(numbers) < len(recording.numbers):  # of a graph made before the last recipe was written
        numbers = recording.replay(sizes) or ()
    for at, recipe in enumerate(recipes):
        found = recipe.at(numbers)
        if found is not None:
            if at:
                recipes.insert(0, recipes.pop(at))
            return found, recipe.storages
    recording.rebase(list(numbers))
    try:
        recipe = Recipe(template, arch)
    except SymbolError:
        recording.take_guards()
        return None
    recipes[:] = [recipe, *recipes[: MAX_RECIPES - 1]]
    found = recipe.at(recording.numbers)
    return None if found is None else (found, recipe.storages)
