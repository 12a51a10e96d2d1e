"""From a graph to a prediction: lower, price, schedule, and add up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, host, interval
from ridgeline.cost.call import Call, Coef
from ridgeline.cost.chip import Chip
from ridgeline.cost.lower import lower
from ridgeline.cost.prediction import Prediction, Row
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.schedule import Segment, wall_s
from ridgeline.cost.work import Site, Work, site_of, work_of
from ridgeline.errors import CostError, nearest
from ridgeline.graph import Block, Graph, Node, ops, root_of
from ridgeline.graph.expand import Flat
from ridgeline.hardware import Device

EXECUTIONS = ("eager", "compiled", "cudagraph")
L2_KEPT_FRAC = 0.33
"""Share of the L2 in which a kernel still finds what earlier ones touched (fitted on whole models)."""


class _Nothing(dict[Any, int]):
    """The mapping of lines that have nothing to say, shared by all of them."""

    __hash__ = object.__hash__  # type: ignore[assignment]


NOTHING: Mapping[Any, int] = _Nothing()


@dataclass(slots=True)
class Line:
    """One priced node (or fused group) and how often it runs."""

    node: Node
    times: int
    work: Work
    calls: tuple[Call, ...]
    busy_s: float
    floor_s: float
    bound: str
    basis: Basis
    family: str
    num_kernels: int
    host_s: float
    cold_frac: float
    energy_j: float = 0.0
    stretch: float = 1.0
    members: tuple[Node, ...] = ()
    width: float = 0.0
    beside: float = 1.0  # durations of its kernels over the time they take, where some run beside each other
    block: int = 0  # lines of one block repeat together; 0 is outside blocks
    unmade: frozenset[int] = frozenset()  # values a fused kernel keeps to itself
    kept: Mapping[int, int] = NOTHING  # bytes kept in place of a value's own
    held: Mapping[Flat, int] = NOTHING  # storages a fused kernel reads, and until which flat node
    made: Mapping[Flat, int] = NOTHING  # storages it writes, and at which flat node

    def row(self) -> Row:
        node, times = self.node, self.times
        total_s = self.busy_s * self.stretch * times
        low, high = interval.factors(self.width)
        name = node.module or node.target or node.op
        kernel = "+".join(dict.fromkeys(c.kind for c in self.calls))
        op = (
            node.op
            if not self.members
            else "fused(" + "+".join(dict.fromkeys(str(m.attrs.get("fn", m.op)) for m in self.members)) + ")"
        )
        return Row(
            name,
            node.module,
            op,
            str(node.phase),
            self.bound,
            times,
            self.num_kernels * times,
            self.work.flops * times,
            self.work.num_bytes * times,
            self.floor_s * times,
            total_s,
            total_s * low,
            total_s * high,
            self.host_s * times,
            self.energy_j,
            self.basis,
            kernel,
            node.source,
        )


def estimate(graph: Graph, device: Device, execution: str = "eager") -> Prediction:
    """Price one step of the graph on the device."""
    if execution not in EXECUTIONS:
        raise CostError(f"unknown execution mode {execution!r}{nearest(execution, EXECUTIONS)}")
    pricer = pricer_of(device)
    coef = {**host.DEFAULTS, **pricer.calibration.host}
    segments = segments_of(graph, pricer, coef, execution)
    for number, segment in enumerate(segments, 1):
        for line in segment.lines if segment.repeat > 1 else ():
            line.block = number
    lines = [line for segment in segments for line in segment.lines]
    return _summed(graph, device, execution, pricer, coef, segments, lines)


def segments_of(graph: Graph, pricer: Pricer, coef: Coef, execution: str) -> list[Segment]:
    """The step as stretches that repeat; first what each node finds in the L2, then prices, then lines."""
    walk = Walk(graph, pricer, coef)
    plans: list[tuple[list[Planned], int]] = []
    for item in graph.items:
        if isinstance(item, Block):
            plans.append(([walk.plan(node) for node in item.nodes], item.repeat))
        elif plans and plans[-1][1] == 1:
            plans[-1][0].append(walk.plan(item))
        else:
            plans.append(([walk.plan(item)], 1))
    pricer.prefetch((call, warm_frac) for nodes, _ in plans for _, _, calls, warm_frac in nodes for call in calls)
    segments = [Segment([walk.line(planned, repeat) for planned in nodes], repeat) for nodes, repeat in plans]
    if execution != "eager":
        from ridgeline.cost.fusion import compiled_segments

        return compiled_segments(graph, segments, pricer, coef, fuse=execution == "compiled")
    return segments


Planned = tuple[Node, Work, tuple[Call, ...], float]
"""A node, its work, the calls it makes and the share of its inputs that the L2 holds."""


Lowered = tuple[Work, tuple[Call, ...], tuple[float, ...], tuple[float, ...]]
"""A node's work, its calls, and the bytes of each input and output."""

NO_CALLS: Lowered = (Work(), (), (), ())
"""What a view asks of a device, and a collective of one that is simulated with its network: a place in the list."""

MAX_REMEMBERED = 200_000
"""Distinct nodes a process keeps lowered; a study of endless shapes must not grow for ever."""


class Walk:
    """Prices nodes in order, remembering what the L2 still holds."""

    def __init__(self, graph: Graph, pricer: Pricer, coef: Coef) -> None:
        self.graph, self.pricer, self.coef = graph, pricer, coef
        self.training = graph.mode == "train"
        self.networked = bool(graph.meta.get("networked"))  # a rank's graph: its collectives are priced by the network
        self.roots = [root_of(graph.values, v.id) if v.alias is not None else v.id for v in graph.values]
        self.ops = ops()
        owned = [v.num_bytes for v in graph.values]
        self.held = [owned[root] for root in self.roots]  # bytes of the storage a value lives in
        self.keys = [(v.type.number, held) for v, held in zip(graph.values, self.held, strict=True)]
        self.cache = Cache(pricer.chip.l2_bytes * L2_KEPT_FRAC)
        self.seen: dict[tuple[object, ...], Lowered] = pricer.lowered

    def plan(self, node: Node) -> Planned:
        work, calls, in_bytes, out_bytes = self.lowered(node)
        if not calls:
            return node, work, calls, 0.0
        roots = self.roots
        storages = list(zip([roots[v] for v in node.inputs], in_bytes, strict=True))
        warm_frac = self.cache.warm_frac(storages)
        storages += zip([roots[v] for v in node.outputs], out_bytes, strict=True)
        self.cache.touch(storages)
        return node, work, calls, warm_frac

    def line(self, planned: Planned, times: int) -> Line:
        node, work, calls, warm_frac = planned
        if not calls:
            spent_s = host.host_s(node, self.coef, self.training)
            return Line(node, times, work, calls, 0.0, 0.0, "free", Basis.MEASURED, "", 0, spent_s, 0.0)
        line = priced(self.pricer, node, times, work, calls, warm_frac, 0.0)
        line.host_s = host.host_s(node, self.coef, self.training, line.num_kernels)
        return line

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
            out_bytes = tuple([float(t.num_bytes) for t in site.outs])
            found = self.seen[key] = (work_of(site), lower(site, self.pricer.chip.arch), site.in_bytes, out_bytes)
        return found


def _frozen(attrs: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    return tuple([(k, tuple(v) if type(v) is list else v) for k, v in attrs.items() if k != "calls"])


def priced(
    pricer: Pricer, node: Node, times: int, work: Work, calls: Sequence[Call], warm_frac: float, spent_s: float
) -> Line:
    """The line of a node that launches these calls."""
    if len(calls) == 1:
        price = pricer.price(calls[0], warm_frac, flushed=False)
        time = price.time
        return Line(node, times, work, tuple(calls), time.busy_s, time.floor_s, time.bound, price.basis, price.family,
                    time.num_kernels, spent_s, 1.0 - warm_frac, width=price.width if time.busy_s else 0.0,
                    beside=time.beside)  # fmt: skip
    prices = [pricer.price(call, warm_frac, flushed=False) for call in calls]
    longest = max(prices, key=lambda p: p.time.busy_s)
    busy_s = sum(p.time.busy_s for p in prices)
    width = sum(p.width * p.time.busy_s for p in prices) / busy_s if busy_s else 0.0
    return Line(
        node,
        times,
        work,
        tuple(calls),
        busy_s,
        sum(p.time.floor_s for p in prices),
        longest.time.bound,
        worst(p.basis for p in prices),
        longest.family,
        sum(p.time.num_kernels for p in prices),
        spent_s,
        1.0 - warm_frac,
        width=width,
        beside=sum(p.time.busy_s * p.time.beside for p in prices) / busy_s if busy_s else 1.0,
    )


class Cache:
    """Which storages the L2 still holds, least recently used first out."""

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity, self.used = capacity_bytes, 0.0
        self.held: OrderedDict[int, float] = OrderedDict()

    def warm_frac(self, storages: Sequence[tuple[int, float]]) -> float:
        total, warm, held = 0.0, 0.0, self.held
        for storage, num_bytes in storages:
            total += num_bytes
            if storage in held:
                warm += min(num_bytes, held[storage])
        return warm / total if total else 0.0

    def touch(self, storages: Sequence[tuple[int, float]]) -> None:
        """One kernel walks over all of these side by side; of a walk larger than the cache, a share of each stays."""
        walked = dict(storages)
        total = sum(walked.values())
        if total >= self.capacity:
            kept_frac = self.capacity / total
            self.held = OrderedDict((s, b * kept_frac) for s, b in walked.items())
            self.used = self.capacity
            return
        held = self.held
        for storage, num_bytes in walked.items():
            old = held.pop(storage, 0.0)
            held[storage] = now = max(old, num_bytes)
            self.used += now - old
        while self.used > self.capacity:
            _, gone = self.held.popitem(last=False)
            self.used -= gone


def _summed(
    graph: Graph, device: Device, execution: str, pricer: Pricer, coef: Coef, segments: list[Segment], lines: list[Line]
) -> Prediction:
    power = {**energy.DEFAULTS, **pricer.calibration.power}
    chip, limit_w, scale_w = pricer.chip, pricer.chip.tdp_w, pricer.designed_w
    total = activity(lines, chip, power, scale_w)
    cool_s, cool_host_s = wall_s(segments, coef, execution, device.kind)
    stretch = energy.throttle_factor(total, cool_s, power, scale_w, limit_w)
    busy_s = floor_s = wanted_j = 0.0
    num_kernels, basis = 0, Basis.MEASURED
    for line in lines:
        times = line.times
        if line.bound == "compute" and line.work.matrix_flops:
            line.stretch = stretch
        busy_s += line.busy_s * line.stretch * line.beside * times
        floor_s += line.floor_s * times
        wanted_j += line.energy_j
        num_kernels += line.num_kernels * times
        if line.basis > basis:
            basis = line.basis
    expected_s, host_total_s = cool_s, cool_host_s
    if stretch != 1.0:
        expected_s, host_total_s = wall_s(segments, coef, execution, device.kind)
    joules = energy.energy_j(total, expected_s, power, scale_w, limit_w)
    above_idle_j = max(0.0, joules - energy.idle_j(expected_s, power, scale_w))
    granted_frac = min(1.0, above_idle_j / wanted_j) if wanted_j else 0.0
    for line in lines:
        line.energy_j *= granted_frac  # at a lower clock and voltage the same work takes less
    price = device.price_usd_per_hour
    spread = interval.spread(lines, busy_s, basis)
    host_share = max(0.0, expected_s - busy_s) / expected_s if expected_s else 0.0
    wall_spread = spread + interval.HOST_SPREAD * host_share
    return Prediction(
        graph=graph,
        device=device,
        execution=execution,
        expected_s=expected_s,
        interval_s=_interval(expected_s, wall_spread, floor_s),
        busy_s=busy_s,
        busy_interval_s=_interval(busy_s, spread, floor_s),
        floor_s=floor_s,
        host_s=host_total_s,
        energy_j=joules,
        power_w=joules / expected_s if expected_s else 0.0,
        usd=expected_s / 3600.0 * price if price else 0.0,
        basis=basis,
        num_kernels=num_kernels,
        throttle=stretch,
        calibrated_on=pricer.calibration.device,
        lines=tuple(lines),
    )


def activity(lines: Sequence[Line], chip: Chip, power: Coef, scale_w: float) -> energy.Activity:
    """What all lines did together; each line is told its joules on the way."""
    busy_s = matrix_s = dram_s = 0.0
    for line in lines:
        if line.busy_s:
            work = line.work
            peak = energy.matrix_rate_flops_per_s(chip, work.dtype, power)
            spent = energy.activity_of(work, line.busy_s, peak, chip.dram_bytes_per_s, line.cold_frac)
            line.energy_j = energy.dynamic_j(spent, power, scale_w) * line.times
            busy_s += spent.busy_s * line.times
            matrix_s += spent.peak_matrix_s * line.times
            dram_s += spent.peak_dram_s * line.times
    return energy.Activity(busy_s, matrix_s, dram_s)


def _interval(seconds: float, width: float, floor_s: float) -> tuple[float, float]:
    low, high = interval.factors(width)
    return max(min(floor_s, seconds), seconds * low), seconds * high
