"""The answer of ``predict``: time, memory, energy and money of one step, and where each of them goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ridgeline.basis import Basis, worst
from ridgeline.cost.memory import Fused, Memory, memory_of
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.result import Result
from ridgeline.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from ridgeline.trace import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """One node of the graph and all its runs: seconds, flops and bytes are totals over ``times``."""

    name: str
    module: str
    op: str
    phase: str
    bound: str
    times: int
    num_kernels: int
    flops: float
    bytes: float
    floor_s: float
    expected_s: float
    low_s: float
    high_s: float
    host_s: float
    energy_j: float
    basis: Basis
    kernel: str
    source: str

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    @classmethod
    def keys(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @property
    def floor_ratio(self) -> float:
        """How many times its speed of light the node takes; 1 is perfect."""
        return self.expected_s / self.floor_s if self.floor_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on the predicted device timeline (one per kernel group; repeats unrolled on demand)."""

    name: str
    module: str
    op: str
    phase: str
    start_s: float
    duration_s: float
    lane: str  # device or host
    floor_s: float = 0.0  # of what runs on the device


@dataclass(frozen=True, repr=False)
class Prediction(Result):
    """One step of a graph on a device: ``expected_s`` is wall time, ``busy_s`` the sum of kernel durations.

    ``interval_s`` contains the measured wall time in 90 % of the cases, ``busy_interval_s`` the measured busy time.
    """

    graph: Graph
    device: Device
    execution: str
    expected_s: float
    interval_s: tuple[float, float]
    busy_s: float
    busy_interval_s: tuple[float, float]
    floor_s: float
    host_s: float
    energy_j: float
    power_w: float
    usd: float
    basis: Basis
    num_kernels: int
    throttle: float  # how much the power limit stretches the kernels; 1 is not at all
    calibrated_on: str = ""  # the device whose calibration was used; empty when none was
    lines: tuple[Any, ...] = field(repr=False, default=())

    def summary(self) -> str:
        low, high = (show_seconds(s) for s in self.interval_s)
        return (f"{self.graph.name} on {self.device.name}, {self.execution}: {show_seconds(self.expected_s)} "
                f"({low} to {high}), {show_bytes(self.peak_bytes)}")  # fmt: skip

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row a node, the longest first."""
        rows, names = sorted(self.rows(), key=lambda row: -row.expected_s), Row.keys()
        return [{name: str(row[name]) if name == "basis" else row[name] for name in names} for row in rows]

    @cached_property
    def memory(self) -> Memory:
        """Live bytes over the schedule, worked out when first asked for."""
        return memory_of(self.graph, self.fused if self.execution == "compiled" else None)

    @property
    def fused(self) -> Fused:
        """What all generated kernels together change about memory."""
        held: dict[tuple[int, int], int] = {}
        for line in self.lines:
            for storage, until in line.held.items():
                held[storage] = max(until, held.get(storage, 0))
        return Fused(
            frozenset().union(*(line.unmade for line in self.lines)),
            {value: num_bytes for line in self.lines for value, num_bytes in line.kept.items()},
            held,
            {storage: index for line in self.lines for storage, index in line.made.items()},
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know: assumptions, missing calibration, memory that does not suffice, and what to do."""
        found = [str(a) for a in self.graph.meta.get("assumptions", ())]
        if not self.calibrated_on:
            found.append(
                f"{self.device.name} is not calibrated: its datasheet and its architecture family's behavior are used"
            )
        elif self.calibrated_on != self.device.name:
            found.append(f"calibration of {self.calibrated_on} used for {self.device.name}")
        return (*found, *self._stand_ins(), *([self._cure()] if self.missing_bytes else []))

    def _stand_ins(self) -> list[str]:
        """Element types the device's matrix units do not take, and what computes them instead."""
        wanted = {line.work.dtype for line in self.lines if line.work.matrix_flops}
        used = {name: self.device.peak("tensor", name) for name in sorted(wanted - {"fp32"})}
        return [
            f"{self.device.name} has no {name} matrix units: priced at its {peak.dtype} {peak.unit} rate"
            for name, peak in used.items()
            if (peak.unit, peak.dtype) != ("tensor", name)
        ]

    def _cure(self) -> str:
        ranks = -(-self.peak_bytes // int(self.capacity_bytes * 0.92))
        fixes = [f"shard over {ranks} devices"]
        if self.graph.mode == "train":
            fixes += ["shard optimizer states (ZeRO)", "recompute activations", "a smaller micro-batch"]
        else:
            fixes += ["a narrower weight format (fp8, int4)", "a smaller batch or sequence"]
        return (
            f"does not fit in {self.device.name}: misses {show_bytes(self.missing_bytes)} "
            f"of {show_bytes(self.peak_bytes)}; "
            f"what would make it fit: {', '.join(fixes)}"
        )

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def num_params(self) -> int:
        return self.graph.num_params

    @cached_property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows())

    @property
    def idle_s(self) -> float:
        """Time the device waits for the host or between kernels."""
        return max(0.0, self.expected_s - self.busy_s)

    @property
    def capacity_bytes(self) -> float:
        return self.device.dram.capacity_bytes

    @property
    def missing_bytes(self) -> float:
        """By how much the step does not fit in the device's memory; 0 when it fits."""
        return max(0.0, self.peak_bytes - self.capacity_bytes)

    def rows(self) -> list[Row]:
        """One row a node, in schedule order."""
        return self._rows

    @cached_property
    def _rows(self) -> list[Row]:
        return [line.row() for line in self.lines]

    def by(self, key: str) -> list[dict[str, Any]]:
        """Totals grouped by a column of the rows (op, module, phase, bound, basis, kernel), largest first."""
        groups: dict[Any, dict[str, Any]] = {}
        for row in self.rows():
            group = groups.setdefault(
                row[key],
                {
                    key: row[key],
                    "expected_s": 0.0,
                    "floor_s": 0.0,
                    "flops": 0.0,
                    "bytes": 0.0,
                    "num_kernels": 0,
                    "energy_j": 0.0,
                    "_bases": [],
                },
            )
            for total in ("expected_s", "floor_s", "flops", "bytes", "num_kernels", "energy_j"):
                group[total] += row[total]
            group["_bases"].append(row.basis)
        for group in groups.values():
            group["basis"] = worst(group.pop("_bases"))
        return sorted(groups.values(), key=lambda g: -g["expected_s"])

    def spans(self) -> Iterator[Span]:
        """Device spans in time order, repeats unrolled."""
        from ridgeline.cost.schedule import spans_of

        return spans_of(self)

    def trace(self, max_spans: int = 300_000) -> Trace:
        """The step as a timeline: host calls, kernels and live memory, repeats unrolled."""
        from ridgeline.cost.analyses.timeline import timeline

        return timeline(self, max_spans)

    def to_dict(self) -> Mapping[str, Any]:
        """Everything a machine wants to read, in SI units."""
        names = Row.keys()
        return {
            "model": self.graph.name,
            "mode": self.graph.mode,
            "device": self.device.name,
            "execution": self.execution,
            "expected_s": self.expected_s,
            "interval_s": list(self.interval_s),
            "busy_s": self.busy_s,
            "busy_interval_s": list(self.busy_interval_s),
            "floor_s": self.floor_s,
            "host_s": self.host_s,
            "flops": self.flops,
            "num_params": self.num_params,
            "num_kernels": self.num_kernels,
            "peak_bytes": self.peak_bytes,
            "memory": dict(self.memory.by_kind),
            "capacity_bytes": self.capacity_bytes,
            "missing_bytes": self.missing_bytes,
            "energy_j": self.energy_j,
            "power_w": self.power_w,
            "usd": self.usd,
            "throttle": self.throttle,
            "basis": str(self.basis),
            "notes": list(self.notes),
            "rows": [{k: (str(row[k]) if k == "basis" else row[k]) for k in names} for row in self.rows()],
        }
