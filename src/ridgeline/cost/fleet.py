"""One graph on many imagined devices at once: what ``estimate`` says of each, in arrays.

The same time models run on arrays (``cost/time/lanes.py``). Those that count whole blocks by the number of SMs are run
for the devices of each number of SMs, and what a model cannot do on arrays at all is done device by device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.basis import Basis, worst
from ridgeline.cost import energy, host, interval
from ridgeline.cost.call import Call, Coef, Time, family_of
from ridgeline.cost.estimate import EXECUTIONS, L2_KEPT_FRAC, Writer, estimate
from ridgeline.cost.lower.inductor import launches_of
from ridgeline.cost.lower.template import lowered_of
from ridgeline.cost.price import SERVED, WARM_STEPS, Price, Pricer, unlike_a_gpu
from ridgeline.cost.schedule import entry_s
from ridgeline.cost.time import serving
from ridgeline.cost.time.chip import COMPUTE_BOUND, Chip, chip_of
from ridgeline.cost.time.lanes import Index, Lanes, TooManyPaths, at, by_path, lanes
from ridgeline.errors import CostError, nearest
from ridgeline.graph import Block, Graph, Node, Phase
from ridgeline.hardware import Device
from ridgeline.hardware.fleet import Fleet

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictions:
    """The totals of a prediction, one a device."""

    basis: NDArray[np.int8]  # position in ``Basis``
    expected_s: Floats
    low_s: Floats
    high_s: Floats
    busy_s: Floats
    floor_s: Floats
    host_s: Floats
    energy_j: Floats
    usd: Floats
    throttle: Floats
    peak_bytes: Floats
    capacity_bytes: Floats

    def columns(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in self.__slots__}


def estimate_fleet(graph: Graph, fleet: Fleet, execution: str = "eager") -> Predictions:
    """Price one step of the graph on every device of a fleet."""
    if execution not in EXECUTIONS:
        raise CostError(f"unknown execution mode {execution!r}{nearest(execution, EXECUTIONS)}")
    found = Predictions(np.zeros(len(fleet), dtype=np.int8), *(np.full(len(fleet), np.nan) for _ in range(11)))
    if not len(fleet):
        return found
    shared = _Shared(graph, execution, device_at(fleet, 0))
    for index in _groups(fleet):
        if len(index) < 8:  # Devices from which arrays are worth their while
            for number in index:
                one = _alone(graph, device_at(fleet, int(number)), execution)
                for name, values in one.columns().items():
                    getattr(found, name)[number] = values[0]
            continue
        part = fleet.part(index)
        made = _Group(shared, part, device_at(part, 0)).predictions()
        for name, values in made.columns().items():
            getattr(found, name)[index] = values
    return found


def _groups(fleet: Fleet) -> list[Index]:
    """Devices that differ only in numbers that models take as arrays: one set of coefficients."""
    keys: list[NDArray[Any]] = [fleet.changed]
    if Pricer(fleet.parent).calibration.device != fleet.parent.name:  # coefficients are adapted by these
        names = ("num_cores", "boost_hz", "tdp_w", "dram.bandwidth_bytes_per_s", "tensor.fp16")
        keys += [fleet.numbers[name] for name in names if name in fleet.numbers]
    order = np.lexsort(keys)
    changes = np.zeros(len(order), dtype=bool)
    for key in keys:
        ordered = key[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    return np.split(order, np.flatnonzero(changes)) if len(order) else []


def device_at(fleet: Fleet, number: int) -> Device:
    """One device of a fleet as it would be imagined alone."""
    if not fleet.changed[number]:
        return fleet.parent
    return fleet.parent.override(**{field: float(fleet.numbers[field][number]) for field in fleet.asked})


def _alone(graph: Graph, device: Device, execution: str) -> Predictions:
    p = estimate(graph, device, execution)
    numbers = (p.expected_s, *p.interval_s, p.busy_s, p.floor_s, p.host_s, p.energy_j, p.usd, p.throttle,
               p.peak_bytes, p.capacity_bytes)  # fmt: skip
    return Predictions(np.array([list(Basis).index(p.basis)]), *(np.array([float(number)]) for number in numbers))


class _Shared:
    """What all devices of an architecture have in common: calls, bytes, the order of nodes, memory."""

    def __init__(self, graph: Graph, execution: str, parent: Device) -> None:
        self.graph, self.execution, self.parent = graph, execution, parent
        self.peak_bytes = float(estimate(graph, parent, execution).peak_bytes)
        self.levels: dict[str, int] = {}  # how kinds of calls are priced: together, by number of SMs, one by one


@dataclass(slots=True)
class _Line:
    """A priced node on all devices of a group; numbers may be arrays."""

    node: Node
    times: int
    work: Any
    busy_s: Any
    floor_s: Any
    is_compute: Any
    num_kernels: Any
    host_s: Any
    cold_frac: Any
    beside: Any
    basis: Basis
    widths: list[tuple[str, Any]]  # of a line's error, by family; zero where another family leads
    energy_j: Any = 0.0
    stretch: Any = 1.0


class _Group:
    """Devices of one calibration."""

    def __init__(self, shared: _Shared, fleet: Fleet, device: Device) -> None:
        self.shared, self.fleet, self.device, self.num = shared, fleet, device, len(fleet)
        self.pricer = Pricer(device)
        self.chip = _chip(device, fleet)
        self.pricer.chip = self.chip
        self.coef: Coef = {**host.DEFAULTS, **self.pricer.calibration.host}
        self.prices: dict[tuple[Call, bytes], Price] = {}
        sms = fleet.numbers["num_cores"]
        order = np.argsort(sms, kind="stable")
        self.by_sms = np.split(order, np.flatnonzero(np.diff(sms[order])) + 1)

    def predictions(self) -> Predictions:
        graph, execution = self.shared.graph, self.shared.execution
        segments = self._compiled() if execution == "compiled" else self._segments(graph, execution)
        lines = [line for segment, _ in segments for line in segment]
        return self._summed(segments, lines, execution)

    # Lines

    def _segments(self, graph: Graph, execution: str) -> list[tuple[list[_Line], int]]:
        lowered, storages = lowered_of(graph, self.chip.arch, self.pricer.lowered)
        cache = FleetCache(self.chip.l2_bytes * L2_KEPT_FRAC, self.num)
        write = Writer(self.pricer, self.coef, training=graph.mode == "train", launched=execution == "eager")
        planned = zip(lowered, storages, strict=True)
        segments: list[tuple[list[_Line], int]] = []

        def line(node: Node, times: int) -> _Line:
            found, touched = next(planned)
            warm = cache.walk(touched, found[2], found[3]) if found[1] else 0.0
            made = self._line(node, times, found[0], found[1], warm)
            if write.launched:
                made.host_s = self._host_s(write, node, made.num_kernels if found[1] else 1)
            return made

        for item in graph.items:
            if isinstance(item, Block):
                segments.append(([line(node, item.repeat) for node in item.nodes], item.repeat))
            elif segments and segments[-1][1] == 1:
                segments[-1][0].append(line(item, 1))
            else:
                segments.append(([line(item, 1)], 1))
        return segments

    def _host_s(self, write: Writer, node: Node, num_kernels: Any) -> Any:
        if not isinstance(num_kernels, Lanes):
            return write.host_s(node, int(num_kernels))
        counts = {int(count): write.host_s(node, int(count)) for count in np.unique(num_kernels)}
        return np.array([counts[int(count)] for count in num_kernels]).view(Lanes)

    def _compiled(self) -> list[tuple[list[_Line], int]]:
        cache = FleetCache(self.chip.l2_bytes * L2_KEPT_FRAC, self.num)
        segments: list[tuple[list[_Line], int]] = []
        for launch in launches_of(self.shared.graph, self.pricer):
            node, times, (work, calls, read, written) = launch.node, launch.times, launch.lowered
            warm = cache.walk(launch.storages, read, written) if calls else 0.0
            line = self._line(node, times, work, calls, warm)
            line.host_s = self.coef["compiled_call_s"] * (1 if launch.members else len(calls))
            if not calls or node.phase is Phase.OPTIMIZER:
                line.host_s = host.host_s(node, self.coef, training=True)
            if segments and segments[-1][1] == times and (times > 1 or not launch.body):
                segments[-1][0].append(line)
            else:
                segments.append(([line], times))
        return segments

    def _line(self, node: Node, times: int, work: Any, calls: Sequence[Call], warm: Any) -> _Line:
        if not calls:
            return _Line(node, times, work, 0.0, 0.0, False, 0, 0.0, 0.0, 1.0, Basis.MEASURED, [])
        prices = [self.price(call, warm) for call in calls]
        busy = [price.time.busy_s for price in prices]
        total_s = sum(busy)
        basis = worst(price.basis for price in prices)
        if len(prices) == 1:
            time = prices[0].time
            width = _chosen(np.asarray(total_s) > 0, prices[0].width, 0.0)
            return _Line(node, times, work, total_s, time.floor_s, _is_compute(time.bound), time.num_kernels, 0.0,
                         1.0 - warm, time.beside, basis, [(prices[0].family, width)])  # fmt: skip
        longest = np.argmax(np.broadcast_arrays(*(np.asarray(part) for part in busy)), axis=0)
        width = _over(sum(price.width * price.time.busy_s for price in prices), total_s, 0.0)
        families = {
            name: lanes(np.isin(longest, [at for at, price in enumerate(prices) if price.family == name]) * width)
            for name in dict.fromkeys(price.family for price in prices)
        }
        is_compute = np.choose(longest, [np.asarray(_is_compute(price.time.bound)) for price in prices])
        return _Line(node, times, work, total_s, sum(price.time.floor_s for price in prices), is_compute,
                     sum(price.time.num_kernels for price in prices), 0.0, 1.0 - warm,
                     _over(sum(price.time.busy_s * price.time.beside for price in prices), total_s, 1.0), basis,
                     list(families.items()))  # fmt: skip

    # Prices

    def price(self, call: Call, warm_frac: Any) -> Price:
        """What the call takes on every device, as ``Pricer.price`` says of each."""
        step = np.round(np.asarray(warm_frac) * WARM_STEPS) / WARM_STEPS
        warm = lanes(step)
        key = call, np.asarray(warm).tobytes()
        found = self.prices.get(key)
        if found is None:
            found = self.prices[key] = self._priced(call, warm)
        return found

    def _priced(self, call: Call, warm: Any) -> Price:
        family = family_of(call.kind)
        entry = self.pricer.serving_entry(call) if call.kind in SERVED else None
        coef, basis = family.defaults, self.pricer.calibration.basis
        if entry is None:
            coef, basis = self.pricer.coef(family, call, flushed=False, alone=False)

        def run(index: Index) -> Time:
            chip, part = (self.chip, warm) if len(index) == self.num else (_part(self.chip, index), at(warm, index))
            if entry is not None:
                time = (serving.attention if call.kind == "attention" else serving.gemm)(call, chip, entry, part)
            else:
                time = family.model(call, chip, coef, part)
            return time if self.device.kind == "gpu" else unlike_a_gpu(time)

        # Devices for which tiles are chosen at once: their menu of some 300 entries then stays in the CPU's cache
        time = _merged(self._by_path(run, call.kind, 128 if call.kind in SERVED else 0), self.num)
        widths = self._by_path(
            lambda index: self.pricer.width(call, family.name, entry, basis, at(time.busy_s, index)), "width"
        )
        width = widths[0][1] if len(widths) == 1 else lanes(_filled(widths, self.num))
        return Price(time, basis, family.name, width)

    def _by_path(self, run: Callable[[Index], Any], kind: str, piece: int = 0) -> list[tuple[Index, Any]]:
        """Run for all devices together, else for those of each number of SMs, else one by one."""
        level = self.shared.levels.get(kind, 0)
        while level < 2:
            groups = self.by_sms if level else [np.arange(self.num)]
            try:
                found = []
                for group in groups:
                    parts = by_path(partial(_run_part, run, group), len(group), piece)
                    found += [(group[index], value) for index, value in parts]
                return found
            except (TooManyPaths, TypeError, ValueError, AttributeError):  # a model that does not take these arrays
                level = self.shared.levels[kind] = level + 1
        return [(np.array([number]), run(np.array([number]))) for number in range(self.num)]

    # Sums

    def _matrix_rate(self, dtype: str, power: Coef, index: Index) -> Any:
        return energy.matrix_rate_flops_per_s(_part(self.chip, index), dtype, power)

    def _summed(self, segments: list[tuple[list[_Line], int]], lines: list[_Line], execution: str) -> Predictions:
        power = {**energy.DEFAULTS, **self.pricer.calibration.power}
        chip, limit_w, scale_w = self.chip, self.chip.tdp_w, self.pricer.designed_w
        kind, host_coef = self.device.kind, self.coef
        busy_s = matrix_s = dram_s = 0.0
        rates: dict[str, Any] = {}
        for line in lines:
            if np.any(line.busy_s):
                work = line.work
                if work.dtype not in rates:
                    rate = partial(self._matrix_rate, work.dtype, power)
                    parts = self._by_path(rate, "rate")
                    rates[work.dtype] = parts[0][1] if len(parts) == 1 else lanes(_filled(parts, self.num))
                spent = work.matrix_flops / rates[work.dtype]
                moved = (work.read_bytes + work.written_bytes) * line.cold_frac / chip.dram_bytes_per_s
                line.energy_j = energy.joules_of(line.busy_s, spent, moved, power, scale_w) * line.times
                busy_s = busy_s + line.busy_s * line.times
                matrix_s = matrix_s + spent * line.times
                dram_s = dram_s + moved * line.times
        cool_s, cool_host_s = _wall_s(segments, host_coef, execution, kind)
        wanted_w = scale_w * power["idle_frac"] + energy.joules_of(busy_s, matrix_s, dram_s, power, scale_w) / cool_s
        stretch = 1.0 + power["throttle"] * np.maximum(0.0, wanted_w / limit_w - 1.0)
        stretch = np.where(np.asarray(cool_s) > 0, stretch, 1.0)
        total_s = floor_s = 0.0
        basis = Basis.MEASURED
        for line in lines:
            if line.work.matrix_flops:
                line.stretch = np.where(line.is_compute, stretch, 1.0)
            total_s = total_s + line.busy_s * line.stretch * line.beside * line.times
            floor_s = floor_s + line.floor_s * line.times
            basis = max(basis, line.basis)
        expected_s, host_s = cool_s, cool_host_s
        if np.any(stretch != 1.0):
            hot_s, hot_host_s = _wall_s(segments, host_coef, execution, kind)
            expected_s = np.where(stretch != 1.0, hot_s, cool_s)
            host_s = np.where(stretch != 1.0, hot_host_s, cool_host_s)
        drawn = scale_w * power["idle_frac"] * expected_s + energy.joules_of(busy_s, matrix_s, dram_s, power, scale_w)
        joules = np.minimum(drawn, limit_w * power["cap_frac"] * expected_s)
        spread = _spread(lines, total_s, basis)
        host_share = np.maximum(0.0, expected_s - total_s) / expected_s
        width = spread + interval.HOST_SPREAD * np.where(np.asarray(expected_s) > 0, host_share, 0.0)
        low_s = np.maximum(np.minimum(floor_s, expected_s), expected_s * np.exp(-width))
        price, numbers = self.fleet.numbers["price_usd_per_hour"], self.fleet.numbers
        return Predictions(
            np.full(self.num, list(Basis).index(basis), dtype=np.int8),
            *(np.broadcast_to(np.asarray(part, dtype=np.float64), self.num) for part in (
                expected_s, low_s, expected_s * np.exp(width), total_s, floor_s, host_s, joules,
                expected_s / 3600.0 * price, stretch, self.shared.peak_bytes, numbers["dram.capacity_bytes"],
            )),
        )  # fmt: skip


def _chip(device: Device, fleet: Fleet) -> Chip:
    """The chip of a device of the fleet, with an array for every number on which the fleet's devices differ."""
    first, numbers = chip_of(device), fleet.numbers
    peaks = {}
    for name, rate in first.tensor_flops_per_s.items():
        peak = device.peak("tensor", name)
        values = numbers[f"{peak.unit}.{peak.dtype}"]
        peaks[name] = lanes(values * (rate / values[0]))
    vector = device.peak("vector", "fp32")
    values = numbers[f"{vector.unit}.{vector.dtype}"]
    sms = lanes(numbers["num_cores"])
    return replace(
        first, num_sms=int(sms) if isinstance(sms, float) else sms, tensor_flops_per_s=peaks,
        vector_flops_per_s=lanes(values * (vector.flops_per_s / values[0])),
        clock_hz=lanes(numbers["boost_hz"]), dram_bytes_per_s=lanes(numbers["dram.bandwidth_bytes_per_s"]),
        l2_bytes=lanes(numbers["l2.capacity_bytes"]), l2_bytes_per_s=lanes(numbers["l2.bandwidth_bytes_per_s"]),
        smem_bytes=lanes(numbers["shared.capacity_bytes"]), tdp_w=lanes(numbers["tdp_w"]),
        idle_w=lanes(numbers["idle_w"]), name=first.name if first.name == first.origin else f"{first.origin} imagined",
    )  # fmt: skip


def _part(chip: Chip, index: Index) -> Chip:
    return chip.each(lambda value: at(value, index))


def _is_compute(bound: Any) -> Any:
    return bound == "compute" if isinstance(bound, str) else np.asarray(bound) == COMPUTE_BOUND


def _run_part(run: Callable[[Index], Any], group: Index, index: Index) -> Any:
    return run(group[index])


def _filled(parts: list[tuple[Index, Any]], num: int) -> Floats:
    found = np.empty(num)
    for index, value in parts:
        found[index] = value
    return found


def _merged(parts: list[tuple[Index, Time]], num: int) -> Time:
    """One time of all paths; what a path says with one number holds for all of its devices."""
    if len(parts) == 1:
        return parts[0][1]
    compute = np.empty(num, dtype=bool)
    for index, time in parts:
        compute[index] = _is_compute(time.bound)
    busy_s, floor_s, num_kernels, beside = (
        lanes(_filled([(index, getattr(time, name)) for index, time in parts], num))
        for name in ("busy_s", "floor_s", "num_kernels", "beside")
    )
    return Time(busy_s, floor_s, np.where(compute, COMPUTE_BOUND, -1), num_kernels, beside)  # type: ignore[arg-type]


def _chosen(condition: Any, value: Any, other: float) -> Any:
    return value if np.all(condition) else lanes(np.where(condition, value, other))


def _over(value: Any, total: Any, other: float) -> Any:
    """A share of a total, or ``other`` where there is none."""
    some = np.asarray(total) > 0
    return value / total if some.all() else lanes(np.where(some, value / np.where(some, total, 1.0), other))


class FleetCache:
    """``estimate.Cache`` for caches of many sizes: all hold things in one order, and each its own share of them."""

    def __init__(self, capacity_bytes: Any, num: int) -> None:
        self.capacity = np.asarray(capacity_bytes, dtype=np.float64)
        self.used: Any = np.zeros_like(self.capacity)
        self.held: dict[int, Any] = {}  # the least recently used first; no bytes where it was evicted

    def walk(self, storages: Any, in_bytes: Sequence[float], out_bytes: Sequence[float]) -> Any:
        """Share of what a kernel reads that is there already; then it has touched all it reads and writes."""
        pairs = list(zip(storages[0], in_bytes, strict=True))
        total = sum(num_bytes for _, num_bytes in pairs)
        warm: Any = 0.0
        for storage, num_bytes in pairs:
            if storage in self.held:
                warm = warm + np.minimum(num_bytes, self.held[storage])
        share = warm / total if total else 0.0
        self._touch(dict([*pairs, *zip(storages[1], out_bytes, strict=True)]))
        return lanes(share) if isinstance(share, np.ndarray) else float(share)

    def _touch(self, walked: Mapping[int, float]) -> None:
        total = sum(walked.values())
        flood = total >= self.capacity
        if flood.all():
            kept = self.capacity / total if total else self.capacity * 0.0
            self.held = {storage: num_bytes * kept for storage, num_bytes in walked.items()}
            self.used = self.capacity + 0.0
            return
        used = self.used
        for storage, num_bytes in walked.items():
            old = self.held.pop(storage, 0.0)
            now = np.maximum(num_bytes, old)
            self.held[storage] = now
            used = used + (now - old)
        for storage in list(self.held):
            over = used > self.capacity
            if not over.any():
                break
            held = self.held[storage]
            used = used - np.where(over, held, 0.0)
            self.held[storage] = np.where(over, 0.0, held)
        if flood.any():
            kept = self.capacity / total
            for storage in list(self.held):
                self.held[storage] = np.where(flood, walked.get(storage, 0.0) * kept, self.held[storage])
            used = np.where(flood, self.capacity, used)
        self.used = used


def _wall_s(segments: list[tuple[list[_Line], int]], coef: Coef, execution: str, kind: str) -> tuple[Any, Any]:
    """``schedule.wall_s`` of every device."""
    busy_s: Any = sum(line.busy_s * line.stretch * repeat for lines, repeat in segments for line in lines)
    if kind != "gpu":
        return busy_s, 0.0
    if execution == "cudagraph":
        num_kernels = sum(line.num_kernels * repeat for lines, repeat in segments for line in lines)
        return busy_s + num_kernels * coef["graph_gap_s"] + coef["launch_s"] + coef["step_s"] * 0.3, coef["launch_s"]
    host_s: Any = entry_s(coef, execution)
    device_s, spent_s = 0.0, host_s
    launch_s, gap_s = coef["launch_s"], coef["gap_s"]
    for lines, repeat in segments:
        walked = min(repeat, 3)
        before = (host_s, device_s, spent_s)
        for _ in range(walked):
            before = (host_s, device_s, spent_s)
            for line in lines:
                host_s, spent_s = host_s + line.host_s, spent_s + line.host_s
                if np.any(line.num_kernels):
                    runs_s = line.busy_s * line.stretch + (line.num_kernels - 1) * gap_s
                    device_s = np.maximum(host_s + launch_s, device_s + gap_s) + runs_s
                    if line.node.op == "sync":
                        host_s = np.maximum(host_s, device_s)
        more = repeat - walked
        if more:
            device_s = device_s + (device_s - before[1]) * more
            host_s = host_s + (host_s - before[0]) * more
            spent_s = spent_s + (spent_s - before[2]) * more
    return np.maximum(device_s, host_s), spent_s


def _spread(lines: Sequence[_Line], busy_s: Any, basis: Basis) -> Any:
    """``interval.spread`` of every device."""
    shared: dict[str, Any] = {}
    own: Any = 0.0
    for line in lines:
        if np.any(line.busy_s):
            for family, width in line.widths:
                width_s = width * line.busy_s * line.times
                shared[family] = shared.get(family, 0.0) + interval.SHARED_FRAC * width_s
                own = own + ((1 - interval.SHARED_FRAC) * width_s) ** 2
    total = np.sqrt(sum((value * value for value in shared.values()), start=0.0) + own)
    some = np.asarray(busy_s) > 0
    return np.where(some, np.hypot(total / np.where(some, busy_s, 1.0), interval.MODEL_WIDTH[basis]), 0.0)


