"""What Inductor makes of a graph: chains of memory-bound ops become one kernel, matrix products stay the library's.

An op joins the kernel of a producer when nothing forces it to wait for a later library call (its level is the same)
and both walk the same elements. Only what other kernels read is written to memory. This is our own reading of how the
compiler behaves, checked against kernel counts and times recorded from compiled models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import trunc
from typing import Any, NamedTuple

from ridgeline.basis import Basis
from ridgeline.cost import host
from ridgeline.cost.call import Call, Coef, call
from ridgeline.cost.estimate import L2_KEPT_FRAC, NOTHING, Cache, Line, priced
from ridgeline.cost.lower.eager import function_of
from ridgeline.cost.lower.template import Lowered, Lowering, Make, Storages, from_template, maker_of
from ridgeline.cost.price import Pricer
from ridgeline.cost.schedule import Segment
from ridgeline.cost.time.stream.elementwise import alu_of
from ridgeline.cost.work import Site, Work
from ridgeline.graph import RESIDENT, FlatNode, Graph, Node, Phase, expand
from ridgeline.graph.expand import Flat
from ridgeline.graph.symbol import largest, picker
from ridgeline.graph.template import Template

FUSIBLE = frozenset(
    {
        "pointwise",
        "copy",
        "fill",
        "random",
        "reduce",
        "norm",
        "softmax",
        "loss",
        "cross_entropy",
        "embedding",
        "gather",
        "quantize",
        "resize",
    }
)
REDUCING = frozenset({"norm", "softmax", "loss", "cross_entropy", "reduce"})
RECOMPUTED = frozenset({"pointwise", "copy", "fill", "quantize"})
"""Cheap ops: what they made for the backward pass alone is made again there from their kernel's inputs."""


@dataclass(slots=True)
class Group:
    """Ops of one generated kernel."""

    level: int
    domain: int  # elements the kernel walks
    members: list[FlatNode] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    reads: dict[Flat, float] = field(default_factory=dict)
    writes: dict[Flat, float] = field(default_factory=dict)
    escaping: set[Flat] = field(default_factory=set)
    reduced: int = 0  # longest row that is reduced
    order: int = 0
    last: dict[int, int] = field(default_factory=dict)  # place in the flat schedule of the last op, by body
    read_in: dict[Flat, int] = field(default_factory=dict)  # the body in which a storage is read
    made_in: dict[Flat, int] = field(default_factory=dict)  # the body in which a storage is written


LibraryCall = tuple[FlatNode, Site, Work, tuple[Call, ...]]


class Launch(NamedTuple):
    """A generated kernel, or what a node asks of a library: all that is known before a device is."""

    node: Node
    times: int
    body: int
    lowered: Lowered
    storages: Storages
    members: tuple[Node, ...] = ()
    unmade: frozenset[int] = frozenset()
    kept: Mapping[int, int] = NOTHING
    held: Mapping[Flat, int] = NOTHING
    made: Mapping[Flat, int] = NOTHING


def fused_segments(graph: Graph, pricer: Pricer, coef: Coef) -> list[Segment]:
    """The step as a compiled graph launches it: kernels in schedule order, stretches of one body together."""
    launches = launches_of(graph, pricer)
    cache = Cache(pricer.chip.l2_bytes * L2_KEPT_FRAC)
    warm_fracs = [
        cache.walk(launch.storages, launch.lowered[2], launch.lowered[3]) if launch.lowered[1] else 0.0
        for launch in launches
    ]
    pricer.prefetch((c, warm) for launch, warm in zip(launches, warm_fracs, strict=True) for c in launch.lowered[1])
    segments: list[Segment] = []
    for launch, warm_frac in zip(launches, warm_fracs, strict=True):
        line = _line(launch, warm_frac, pricer, coef)
        if segments and segments[-1].repeat == line.times and (line.times > 1 or not launch.body):
            segments[-1].lines.append(line)
        else:
            segments.append(Segment([line], line.times, True))
    return segments


def _line(launch: Launch, warm_frac: float, pricer: Pricer, coef: Coef) -> Line:
    node, times, (work, calls, _, _) = launch.node, launch.times, launch.lowered
    if not calls:
        spent = host.host_s(node, coef, training=True)
        return Line(node, times, work, (), 0.0, 0.0, "network", Basis.MEASURED, "", 0, spent, 0.0)
    spent = coef["compiled_call_s"] * (1 if launch.members else len(calls))
    if node.phase is Phase.OPTIMIZER:  # the optimizer is not compiled with the model
        spent = host.host_s(node, coef, training=True)
    line = priced(pricer, node, times, work, calls, warm_frac, spent)
    line.members, line.unmade, line.kept = launch.members, launch.unmade, launch.kept
    line.held, line.made = launch.held, launch.made
    return line


def launches_of(graph: Graph, pricer: Pricer) -> list[Launch]:
    """What a compiled step launches on a device's architecture."""
    arch = pricer.chip.arch
    found = from_template(graph, ("fused", arch), lambda template: _launches_maker(template, arch))
    return Fuser(graph, arch, pricer.lowered).launches() if found is None else found


def _launches_maker(template: Template, arch: str) -> Make[list[Launch]]:
    """Kernels of a template: which nodes they take together follows from guards, how much they do from numbers."""
    place = {id(node): at for at, (node, _) in enumerate(template.graph.nodes())}
    parts = []
    for launch in Fuser(template.graph, arch, {}).launches():
        members = [place[id(node)] for node in launch.members]
        kept = tuple(launch.kept), picker(template.recording, launch.kept.values())
        parts.append((launch, place[id(launch.node)], members, maker_of(template.recording, launch.lowered), *kept))

    def made(numbers: Sequence[Any], graph: Graph) -> list[Launch]:
        nodes = [node for node, _ in graph.nodes()]
        return [
            Launch(nodes[at], launch.times, launch.body, lowered(numbers), launch.storages,
                   tuple([nodes[member] for member in members]), launch.unmade,
                   dict(zip(values, kept(numbers), strict=True)) if values else NOTHING, launch.held, launch.made)
            for launch, at, members, lowered, values, kept in parts
        ]  # fmt: skip

    return made


class Fuser:
    """Assigns flat nodes to kernels in schedule order."""

    def __init__(self, graph: Graph, arch: str, seen: dict[tuple[object, ...], Lowered]) -> None:
        self.graph = graph
        self.lowering = Lowering(graph, arch, seen)
        self.level: dict[Flat, int] = {}
        self.producer: dict[Flat, Group] = {}
        self.readers: dict[Flat, list[tuple[Phase, Group | None]]] = {}  # phase, and the kernel if it is generated
        self.products: dict[Flat, int] = {}  # matrix products that read a storage
        self.done: list[tuple[int, int, Group | LibraryCall]] = []  # (sequence, body, what runs)
        self.sequence = 0

    def see(self, flat: FlatNode) -> None:
        node = flat.node
        site, (work, calls, _, _) = self.lowering.site(node), self.lowering.lowered(node)
        self.sequence += 1
        if node.op in ("view", "alloc", "host"):
            return
        if node.phase is Phase.OPTIMIZER or node.op not in FUSIBLE:
            self._library(flat, site, work, self._relaid(calls))
        else:
            self._fuse(flat, site)

    def _relaid(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        """Compiled convolutions run channels-last, their bias joins a generated kernel; odd products are padded."""
        if not calls or calls[0].kind not in ("conv", "gemm"):
            return calls
        if calls[0].kind == "gemm":
            if any(v == 1 for k, v in calls[0].shape if k in ("m", "n")):  # a vector gains nothing by it
                return calls
            return (
                replace(
                    calls[0],
                    shape=tuple((k, -(-v // 8) * 8 if k in "mnk" and v > 64 else v) for k, v in calls[0].shape),
                ),
            )
        return (replace(calls[0], shape=tuple((k, 1 if k == "nhwc" else v) for k, v in calls[0].shape)),)

    def _library(self, flat: FlatNode, site: Site, work: Work, calls: tuple[Call, ...]) -> None:
        level = max((self.level.get(i, 0) for i in flat.inputs), default=0)
        for i in flat.inputs:
            self._read_outside(i, None)
            self.readers.setdefault(i, []).append((flat.node.phase, None))
            self.products[i] = self.products.get(i, 0) + (flat.node.op == "matmul")
        for out in flat.outputs:
            self.level[out] = level + 1
            self.producer.pop(out, None)
        self.done.append((self.sequence, flat.body, (flat, site, work, calls)))

    def _fuse(self, flat: FlatNode, site: Site) -> None:
        level = max((self.level.get(i, 0) for i in flat.inputs), default=0)
        domain = (
            max((t.numel for t in (*site.ins, *site.outs)), default=0)
            if site.op not in ("embedding", "gather")
            else site.out_numel
        )
        group = self._joinable(flat, site, level, domain)
        if group is None:
            group = Group(level, domain, order=self.sequence)
            self.done.append((self.sequence, flat.body, group))
        group.members.append(flat)
        group.sites.append(site)
        group.last[flat.body] = self.sequence - 1
        if site.op in REDUCING:
            group.reduced = max(group.reduced, _row(site))
        sizes = site.in_bytes if site.op not in ("embedding", "gather") else (site.written_bytes, *site.in_bytes[1:])
        for i, size in zip(flat.inputs, sizes, strict=False):
            if self.producer.get(i) is not group:
                group.reads[i] = max(group.reads.get(i, 0.0), size)
                group.read_in[i] = flat.body
                self.readers.setdefault(i, []).append((flat.node.phase, group))
            self._read_outside(i, group)
        for out, t in zip(flat.outputs, site.outs, strict=True):
            self.level[out] = level
            self.producer[out] = group
            group.writes[out] = 1.0 * t.num_bytes
            group.made_in[out] = flat.body
            if self.graph.values[out[0]].kind in RESIDENT or out[0] in self.graph.outputs:
                group.escaping.add(out)

    def _joinable(self, flat: FlatNode, site: Site, level: int, domain: int) -> Group | None:
        """The latest producer's kernel, if it walks the same elements at the same level."""
        best: Group | None = None
        for i in flat.inputs:
            group = self.producer.get(i)
            # Inductor's limit on what one kernel takes
            if group is None or group.level != level or len(group.members) >= 64:
                continue
            same = group.domain == domain or _row_of(group, domain)
            if same and not _crosses(group, site) and (best is None or group.order > best.order):
                best = group
        if best is not None and domain > best.domain:
            best.domain = domain
        return best

    def _read_outside(self, storage: Flat, reader: Group | None) -> None:
        made_by = self.producer.get(storage)
        if made_by is not None and made_by is not reader:
            made_by.escaping.add(storage)

    def launches(self) -> list[Launch]:
        """Kernels in schedule order."""
        for flat in expand(self.graph):
            self.see(flat)
        found = [
            self._generated(item, body) if isinstance(item, Group) else self._asked(item, body)
            for _, body, item in sorted(self.done, key=lambda d: d[0])
        ]
        return [launch for launch in found if launch is not None]

    def _asked(self, item: LibraryCall, body: int) -> Launch | None:
        """A node that a library runs; one that runs nothing is there if the network does."""
        flat, site, work, calls = item
        if not calls and flat.node.op != "collective":
            return None
        out_bytes = tuple([1.0 * t.num_bytes for t in site.outs])
        lowered = (work, calls, site.in_bytes, out_bytes) if calls else (work, (), (), ())
        unasked = flat.node.op == "pool" and self.graph.mode == "infer"
        unmade = frozenset(flat.node.outputs[1:]) if unasked else frozenset()  # positions of maxima
        storages = _places(flat.inputs), _places(flat.outputs)
        return Launch(flat.node, flat.times, body, lowered, storages, (), unmade, self._small_positions(flat, site))

    def _generated(self, group: Group, body: int) -> Launch | None:
        made = [s for s in group.escaping if s in group.writes]
        read, written = sum(group.reads.values()), sum([group.writes[s] for s in made])
        if not written and not read:
            return None
        written, last, itemsize = max(written, 4.0), group.members[-1], _narrowest(group.sites)
        work = Work(
            flops=1.0 * group.domain * len(group.members), read_bytes=read, written_bytes=written, dtype=itemsize
        )
        lowered = (work, _calls(group, work), tuple(group.reads.values()), tuple([group.writes[s] for s in made]))
        return Launch(
            last.node,
            last.times,
            body,
            lowered,
            (_places(group.reads), _places(made)),
            tuple(m.node for m in group.members),
            frozenset(s[0] for s in group.writes.keys() - group.escaping),
            {**self._recomputed(group), **self._padded(group)},
            {storage: group.last[body] for storage, body in group.read_in.items()},
            {storage: group.last[body] for storage, body in group.made_in.items()},
        )

    def _recomputed(self, group: Group) -> dict[int, int]:
        """What the partition of a training graph keeps for values only the backward pass would read.

        They are made again there if that takes fewer bytes: the first stands for the kernel's inputs that would
        have died, the others for nothing.
        """
        if group.members[0].node.phase is not Phase.FORWARD or self.graph.mode != "train":
            return {}
        cheap = {s for m in group.members for s in _cheap(m)}
        saved = [s for s in group.writes if s in cheap and self._made_again(s, group)]
        needed = sum(b for s, b in group.reads.items() if not self._lives_on(s))
        if not saved or needed >= sum(group.writes[s] for s in saved):
            return {}
        return {s[0]: trunc(needed) if s is saved[0] else 0 for s in saved}

    def _made_again(self, storage: Flat, group: Group) -> bool:
        """Read in the backward pass by generated kernels; in the forward pass by none that is not one with ours."""
        readers = self.readers.get(storage, [])
        if storage[0] in self.graph.outputs or not any(phase is Phase.BACKWARD for phase, _ in readers):
            return False
        return all(
            kernel is not None
            and (phase is Phase.BACKWARD or (kernel.level, kernel.domain) == (group.level, group.domain))
            for phase, kernel in readers
        )

    def _lives_on(self, storage: Flat) -> bool:
        """Whether a storage is there in the backward pass anyway."""
        resident = self.graph.values[storage[0]].kind in RESIDENT
        return resident or any(phase is Phase.BACKWARD for phase, _ in self.readers.get(storage, ()))

    def _small_positions(self, flat: FlatNode, site: Site) -> dict[int, int]:
        """Positions of maxima are kept as offsets within their window, a byte each."""
        if flat.node.op != "pool" or self.graph.mode != "train" or len(flat.outputs) < 2:
            return {}
        return {flat.outputs[1][0]: site.outs[1].numel}

    def _padded(self, group: Group) -> dict[int, int]:
        """A generated kernel writes an odd operand once for every product, padded."""
        found: dict[int, int] = {}
        for m, site in zip(group.members, group.sites, strict=True):
            for s, t in zip(m.outputs, site.outs, strict=True):
                # odd operands of products wider than this are padded into copies of their own
                odd = bool(t.shape) and t.shape[-1] > 64 and t.shape[-1] % 8 != 0
                if odd and self.products.get(s, 0) > 1:
                    found[s[0]] = t.num_bytes * self.products[s]
        return found


def _places(storages: Iterable[Flat]) -> tuple[int, ...]:
    """Storages by numbers, as the cache knows them."""
    return tuple([hash(storage) for storage in storages])


def _calls(group: Group, work: Work) -> tuple[Call, ...]:
    """The generated kernel, and the one that adds up columns, if that is not all there is to it."""
    walked = [largest(t.numel for t in (*site.ins, *site.outs)) for site in group.sites]
    alu = sum(_alu(site) * numel for site, numel in zip(group.sites, walked, strict=True)) / max(1, group.domain)
    generated = call(
        "pointwise",
        work.dtype,
        "fwd",
        "inductor",
        numel=max(1, group.domain),
        read_bytes=trunc(work.read_bytes),
        written_bytes=trunc(work.written_bytes),
        num_inputs=max(1, len(group.reads)),
        alu=round(min(alu, 400.0), 1),
        vector=1,
        transposed=0,
    )
    extra = _column_reduction(group)
    if extra is None:
        return (generated,)
    return (generated, extra) if group.escaping - set(group.members[-1].outputs) else (extra,)


def _cheap(flat: FlatNode) -> tuple[Flat, ...]:
    """Outputs that are quickly made again: all of a pointwise op, of a norm what its saved statistics give."""
    if flat.node.op in RECOMPUTED:
        return flat.outputs
    return flat.outputs[:1] if flat.node.op == "norm" else ()


def _row(site: Site) -> int:
    if site.op == "reduce":
        return site.ins[0].numel // max(1, site.out_numel)
    row: int = trunc(site.attrs.get("c", site.attrs.get("v", 1)))
    return row


def _row_of(group: Group, domain: int) -> bool:
    """Per-row results (means, scales) belong to the kernel that reduces the rows, and spread back over them."""
    if not group.reduced:
        return domain < group.domain and group.domain % max(1, domain) == 0 and domain * 4096 >= group.domain
    return max(domain, group.domain) % max(1, min(domain, group.domain)) == 0


def _crosses(group: Group, site: Site) -> bool:
    """A sum over rows cannot share a kernel with work that needs its result, nor follow a reduction over columns."""
    if any(s.op == "reduce" and _is_column(s) for s in group.sites):
        return True
    return site.op == "reduce" and _is_column(site) and group.reduced > 0


def _is_column(site: Site) -> bool:
    shape, dims = site.ins[0].shape, site.attrs["dims"]
    if not isinstance(dims, (tuple, list)) or not shape:
        return False
    return bool(dims) and (len(shape) - 1) not in {int(d) % len(shape) for d in dims}


def _column_reduction(group: Group) -> Call | None:
    site = group.sites[-1]
    if site.op != "reduce" or not _is_column(site):
        return None
    shape = site.ins[0].shape
    inner = math.prod(site.outs[0].shape) or 1
    return call(
        "reduce",
        site.ins[0].dtype.name,
        "fwd",
        "inductor",
        outer=1,
        reduced=max(1, math.prod(shape) // max(1, inner)),
        inner=max(1, inner),
        out_bytes=trunc(site.written_bytes),
    )


def _alu(site: Site) -> float:
    if site.op in ("pointwise", "quantize"):
        return alu_of(function_of(site))
    if site.op == "copy" and str(site.attrs["fn"]) in ("cat", "stack"):
        largest = max((t.numel for t in site.ins), default=0) * len(site.ins) / max(1, site.out_numel)
        return 45.0 if largest < 1.5 else 150.0  # every element asks which piece it comes from, appends word by word
    return {"norm": 10.0, "softmax": 14.0, "loss": 4.0, "cross_entropy": 16.0, "random": 20.0, "reduce": 2.0}.get(
        site.op, 1.0
    )


def _narrowest(sites: list[Site]) -> str:
    """The element type that most of the traffic has."""
    sizes: dict[str, float] = {}
    for site in sites:
        for t in (*site.ins, *site.outs):
            sizes[t.dtype.name] = sizes.get(t.dtype.name, 0.0) + t.numel
    return max(sizes, key=lambda k: sizes[k], default="bf16")
