"""From a graph to a prediction: lower, price, schedule, and add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, host, interval
from ridgeline.cost.call import Call, Coef
from ridgeline.cost.lower.template import Lowered, Storages, lowered_of
from ridgeline.cost.prediction import Prediction, Row
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.schedule import Segment, wall_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.work import Work
from ridgeline.errors import CostError, nearest
from ridgeline.graph import Block, Graph, Node
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

    @property
    def limit(self) -> str:
        """What limits the kernel, for readers: ``issue`` where no roof explains most of a long kernel's time."""
        reached = self.floor_s / self.busy_s if self.busy_s else 1.0
        is_issue = (
            (self.bound == "compute" and not self.work.flops)
            or (self.bound == "latency" and self.busy_s > 1e-4)
            or (self.bound == "memory" and self.busy_s > 5e-6 and reached < 0.3)
        )
        return "issue" if is_issue else self.bound

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
            self.limit,
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
    for dtype in {line.work.dtype for line in lines if line.work.matrix_flops} - pricer.chip.tensor_flops_per_s.keys():
        device.peak("tensor", dtype)  # raises: the device has neither such units nor any that stand in for them
    return _summed(graph, device, execution, pricer, coef, segments, lines)


def segments_of(graph: Graph, pricer: Pricer, coef: Coef, execution: str) -> list[Segment]:
    """The step as stretches that repeat; first what each node finds in the L2, then prices, then lines."""
    if execution == "compiled":
        from ridgeline.cost.lower.inductor import fused_segments

        return fused_segments(graph, pricer, coef)
    lowered, storages = lowered_of(graph, pricer.chip.arch, pricer.lowered)
    cache = Cache(pricer.chip.l2_bytes * L2_KEPT_FRAC)
    warm_fracs = [
        cache.walk(touched, found[2], found[3]) if found[1] else 0.0
        for found, touched in zip(lowered, storages, strict=True)
    ]
    pricer.prefetch((call, warm) for found, warm in zip(lowered, warm_fracs, strict=True) for call in found[1])
    write = Writer(pricer, coef, training=graph.mode == "train", launched=execution == "eager")
    planned = zip(lowered, warm_fracs, strict=True)
    segments: list[Segment] = []
    for item in graph.items:
        if isinstance(item, Block):
            lines = [write.line(node, item.repeat, *next(planned)) for node in item.nodes]
            segments.append(Segment(lines, item.repeat, execution != "eager"))
        elif segments and segments[-1].repeat == 1:
            segments[-1].lines.append(write.line(item, 1, *next(planned)))
        else:
            segments.append(Segment([write.line(item, 1, *next(planned))], 1, execution != "eager"))
    return segments


class Writer:
    """Writes the line of a node that was lowered; nodes of a recorded graph are not ``launched`` one by one."""

    def __init__(self, pricer: Pricer, coef: Coef, *, training: bool, launched: bool) -> None:
        self.pricer, self.coef, self.training, self.launched = pricer, coef, training, launched
        self._host_s: dict[tuple[object, ...], float] = {}  # of calls alike

    def line(self, node: Node, times: int, lowered: Lowered, warm_frac: float) -> Line:
        work, calls, _, _ = lowered
        if not calls:
            spent_s = self.host_s(node, 1) if self.launched else 0.0
            return Line(node, times, work, calls, 0.0, 0.0, "free", Basis.MEASURED, "", 0, spent_s, 0.0)
        line = priced(self.pricer, node, times, work, calls, warm_frac, 0.0)
        if self.launched:
            line.host_s = self.host_s(node, line.num_kernels)
        return line

    def host_s(self, node: Node, num_kernels: int) -> float:
        attrs = node.attrs
        key = (node.op, node.phase, num_kernels, attrs.get("calls"), attrs.get("num_tensors"), attrs.get("which"))
        found = self._host_s.get(key)
        if found is None:
            found = self._host_s[key] = host.host_s(node, self.coef, self.training, num_kernels)
        return found


def priced(
    pricer: Pricer, node: Node, times: int, work: Work, calls: Sequence[Call], warm_frac: float, spent_s: float
) -> Line:
    """The line of a node that launches these calls."""
    if len(calls) == 1:
        price = pricer.price(calls[0], warm_frac, flushed=False)
        time = price.time
        return Line(node, times, work, tuple(calls), time.busy_s, time.floor_s, time.bound, price.basis, price.family,
                    time.num_kernels, spent_s, 1.0 - warm_frac, 0.0, 1.0, (), price.width if time.busy_s else 0.0,
                    time.beside)  # fmt: skip
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
        self.held: dict[int, float] = {}  # the least recently used first

    def warm_frac(self, storages: Iterable[tuple[int, float]]) -> float:
        total, warm, held = 0.0, 0.0, self.held
        for storage, num_bytes in storages:
            total += num_bytes
            kept = held.get(storage)
            if kept is not None:
                warm += num_bytes if num_bytes < kept else kept
        return warm / total if total else 0.0

    def touch(self, walked: dict[int, float]) -> None:
        """One kernel walks over all of these side by side; of a walk larger than the cache, a share of each stays."""
        total, held = sum(walked.values()), self.held
        if total >= self.capacity:
            kept_frac = self.capacity / total
            self.held = {storage: num_bytes * kept_frac for storage, num_bytes in walked.items()}
            self.used = self.capacity
            return
        for storage, num_bytes in walked.items():
            old = held.pop(storage, 0.0)
            held[storage] = now = num_bytes if num_bytes > old else old
            self.used += now - old
        while self.used > self.capacity:
            self.used -= held.pop(next(iter(held)))

    def walk(self, storages: Storages, in_bytes: Sequence[float], out_bytes: Sequence[float]) -> float:
        """Share of what a kernel reads that is here already; then it has touched all it reads and writes."""
        pairs = list(zip(storages[0], in_bytes, strict=True))
        warm_frac = self.warm_frac(pairs) if self.held else 0.0
        self.touch(dict([*pairs, *zip(storages[1], out_bytes, strict=True)]))
        return warm_frac


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
    rates: dict[str, float] = {}
    for line in lines:
        if line.busy_s:
            work, times = line.work, line.times
            rate = rates.get(work.dtype)
            if rate is None:
                rate = rates[work.dtype] = energy.matrix_rate_flops_per_s(chip, work.dtype, power)
            spent = work.matrix_flops / rate
            moved = (work.read_bytes + work.written_bytes) * line.cold_frac / chip.dram_bytes_per_s
            line.energy_j = energy.joules_of(line.busy_s, spent, moved, power, scale_w) * times
            busy_s += line.busy_s * times
            matrix_s += spent * times
            dram_s += moved * times
    return energy.Activity(busy_s, matrix_s, dram_s)


def _interval(seconds: float, width: float, floor_s: float) -> tuple[float, float]:
    low, high = interval.factors(width)
    return max(min(floor_s, seconds), seconds * low), seconds * high
