"""Where a device's time goes: compute, communication, copies and idle, exposed and overlapped, by device and stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from ridgeline.trace.intervals import Intervals, Nanos, clip, difference, intersection, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Mask, Trace

COMPUTE = (Kind.KERNEL, Kind.MEMSET)


@dataclass(frozen=True, slots=True)
class Totals:
    """A device's time in milliseconds, from its first span to its last; the mean where there are several devices."""

    total_ms: float
    busy_ms: float
    compute_ms: float
    exposed_comm_ms: float
    exposed_memcpy_ms: float
    idle_ms: float
    num_gpu_events: int

    def to_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of one device, stream or window by what ran; the exposed parts, compute and idle add up to the total."""

    total_s: float
    compute_s: float  # kernels and memsets
    comm_s: float
    memcpy_s: float
    memset_s: float
    exposed_comm_s: float  # while nothing computes
    overlapped_comm_s: float  # while something computes
    exposed_memcpy_s: float  # while nothing computes or communicates
    overlapped_memcpy_s: float
    idle_s: float
    num_spans: int

    @property
    def busy_s(self) -> float:
        return self.total_s - self.idle_s

    @property
    def overlap_frac(self) -> float:
        """The share of communication that is hidden behind compute; nan without communication."""
        return self.overlapped_comm_s / self.comm_s if self.comm_s else float("nan")


@dataclass(frozen=True, slots=True)
class DeviceShares:
    """The shares of one device of one rank, or of one of its streams (-1: all of them)."""

    rank: int
    device: int
    stream: int
    shares: Shares


@dataclass(frozen=True, slots=True)
class Layers:
    """A device's time, laid over one another: communication counts where no compute runs, copies where neither does."""

    compute: Intervals
    comm: Intervals
    memcpy: Intervals
    memset: Intervals
    exposed_comm: Intervals
    exposed_memcpy: Intervals
    busy: Intervals


def totals(trace: Trace) -> dict[str, dict[str, float]]:
    """Totals of all device events, and of those alone whose launch is in the trace.

    The two differ where launches are missing. Compute is kernels and memsets; communication counts where no compute
    runs, copies where neither does, and idle is the rest: the four add up to the total. Where a file's clock needs
    more digits than a JSON number holds (``meta["grid_ns"]``), both ends of a span are taken on the grid of such
    numbers, as every reader of JSON sees them; all other analyses use the digits.
    """
    work = trace.gpu
    return {"all": total_of(trace, work).to_dict(), "linked": total_of(trace, work & (trace.launch >= 0)).to_dict()}


def total_of(trace: Trace, chosen: Mask) -> Totals:
    """The chosen device spans' totals."""
    start, end = _on_grid(trace)
    parts = [_milliseconds(_layers(trace, mask, start, end)) for _, _, mask in by_device(trace, chosen)]
    means = np.mean(parts, axis=0).tolist() if parts else [0.0] * 6
    total, busy, compute, comm, memcpy, idle = means
    return Totals(total, busy, compute, comm, memcpy, idle, int(chosen.sum()))


def _milliseconds(layers: Layers) -> tuple[float, ...]:
    busy = layers.busy
    total = int(busy.end[-1] - busy.start[0]) if len(busy.start) else 0
    exposed = (layers.exposed_comm.total, layers.exposed_memcpy.total)
    return tuple(ns / 1e6 for ns in (total, busy.total, layers.compute.total, *exposed, total - busy.total))


def _on_grid(trace: Trace) -> tuple[Nanos, Nanos]:
    grid = int(trace.meta.get("grid_ns", 0))
    if not grid:
        return trace.start_ns, trace.end_ns
    start = np.rint((trace.start_ns + trace.origin_ns % grid) / grid).astype(np.int64) * grid
    lasts = np.rint(trace.duration_s * 1e9).astype(np.int64)
    return start, np.rint((start + lasts) / grid).astype(np.int64) * grid


def by_device(trace: Trace, chosen: Mask) -> Iterator[tuple[int, int, Mask]]:
    """(rank, device, which of the chosen spans run there) for every device that has any."""
    code = trace.rank.astype(np.int64) * 2**32 + trace.device
    for value in np.unique(code[chosen]).tolist():
        yield value >> 32, value & (2**32 - 1), chosen & (code == value)


def layers_of(trace: Trace, chosen: Mask) -> Layers:
    """The layers of the chosen spans of one device."""
    return _layers(trace, chosen, trace.start_ns, trace.end_ns)


def _layers(trace: Trace, chosen: Mask, start: Nanos, end: Nanos) -> Layers:
    def covered(*kinds: Kind) -> Intervals:
        rows = np.flatnonzero(chosen & trace.of_kind(*kinds))
        return union(start[rows], end[rows])

    compute, comm, memcpy = covered(*COMPUTE), covered(Kind.COMMUNICATION), covered(Kind.MEMCPY)
    exposed_comm = difference(comm, compute)
    rows = np.flatnonzero(chosen)
    return Layers(
        compute,
        comm,
        memcpy,
        covered(Kind.MEMSET),
        exposed_comm,
        difference(difference(memcpy, compute), comm),
        union(start[rows], end[rows]),
    )


def shares_of(layers: Layers, window: tuple[int, int] | None, num_spans: int) -> Shares:
    """A device's shares in a window of nanoseconds; without one, from its first span to its last."""
    busy = layers.busy
    if window is None:
        window = (int(busy.start[0]), int(busy.end[-1])) if len(busy.start) else (0, 0)

    def seconds(part: Intervals) -> float:
        return clip(part, *window).total / 1e9

    comm, memcpy = seconds(layers.comm), seconds(layers.memcpy)
    exposed_comm, exposed_memcpy = seconds(layers.exposed_comm), seconds(layers.exposed_memcpy)
    total_s = (window[1] - window[0]) / 1e9
    return Shares(
        total_s=total_s,
        compute_s=seconds(layers.compute),
        comm_s=comm,
        memcpy_s=memcpy,
        memset_s=seconds(layers.memset),
        exposed_comm_s=exposed_comm,
        overlapped_comm_s=seconds(intersection(layers.comm, layers.compute)),
        exposed_memcpy_s=exposed_memcpy,
        overlapped_memcpy_s=max(0.0, memcpy - exposed_memcpy),
        idle_s=total_s - seconds(busy),
        num_spans=num_spans,
    )


def device_shares(trace: Trace) -> list[DeviceShares]:
    """One row a rank and device."""
    return [
        DeviceShares(rank, device, -1, shares_of(layers_of(trace, mask), None, int(mask.sum())))
        for rank, device, mask in by_device(trace, trace.gpu)
    ]


def stream_shares(trace: Trace) -> list[DeviceShares]:
    """One row a stream, over the whole time in which its device has work; idle is when the stream has none."""
    rows = []
    for rank, device, mask in by_device(trace, trace.gpu):
        busy = trace.busy(mask)
        window = (int(busy.start[0]), int(busy.end[-1])) if len(busy.start) else (0, 0)
        for stream in np.unique(trace.stream[mask]).tolist():
            own = mask & (trace.stream == stream)
            rows.append(DeviceShares(rank, device, stream, shares_of(layers_of(trace, own), window, int(own.sum()))))
    return rows
