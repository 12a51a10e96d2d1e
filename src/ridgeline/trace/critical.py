"""The critical path: the chain of work and waiting that decides how long a window lasts, followed back from its end."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import InputError
from ridgeline.trace.idle import named
from ridgeline.trace.intervals import Nanos
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Mask, Trace

_WAIT = re.compile(r"Synchronize|^(?:cuda|hip)Memcpy(?!.*Async)|Memcpy\w*Async", re.IGNORECASE)
#: Two things that happen this close together are taken as cause and effect.
_NEAR_NS = 5_000
#: From the start of a call until its work can start.
_HANDED_NS = 20_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the path: what ran, or why nothing did."""

    start_s: float
    end_s: float
    sort: str  # a kind of work in lower case, or host, launch, gap, wait, arrival, unknown
    span: int  # the span that ran, or that the stretch waits for; -1: none
    rank: int

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PathShare:
    """How much of the path one name has."""

    sort: str
    name: str
    module: str
    total_s: float
    count: int


def critical_path(
    trace: Trace,
    *,
    step: int | None = None,
    annotation: str | None = None,
    instance: int = 0,
    arrivals: Mapping[int, int] | None = None,
) -> list[Segment]:
    """The path through a step, an annotated range or the whole trace, in time order; its segments tile the window.

    A device span starts when the one before it on its stream has ended, when its launch has reached the device, or when
    a span of another stream that it waits for has ended: whichever came last is on the path. On the host the path goes
    back to the last wait for the device, and from there to what was waited for. ``arrivals`` maps a collective's span
    to that of the rank which arrived last (``collectives.arrivals``): the path crosses over to that rank.
    """
    window = _window(trace, step, annotation, instance)
    return _Walk(trace, *window, dict(arrivals or {})).segments()


def path_shares(trace: Trace, path: list[Segment]) -> list[PathShare]:
    """The path by name and module, largest first."""
    sums: dict[tuple[str, str, str], tuple[float, int]] = {}
    for segment in path:
        named_ = segment.span >= 0
        key = (
            segment.sort,
            trace.text("name", segment.span) if named_ else "",
            trace.text("module", segment.span) if named_ else "",
        )
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + segment.duration_s, count + 1)
    rows = [PathShare(*key, total, count) for key, (total, count) in sums.items()]
    return sorted(rows, key=lambda row: -row.total_s)


def _window(trace: Trace, step: int | None, annotation: str | None, instance: int) -> tuple[int, int]:
    """Begin and end in nanoseconds: a host range, and whatever work it launched."""
    if annotation is not None:
        rows = trace.in_order((trace.name == trace.word_id(annotation)) & (trace.device < 0))
        if instance >= len(rows):
            raise InputError(f"the trace has {len(rows)} ranges named {annotation!r}, not {instance + 1}")
        row = int(rows[instance])
        low, high = int(trace.start_ns[row]), int(trace.end_ns[row])
        launched = trace.gpu & (trace.launch >= 0)
        called = trace.start_ns[np.maximum(trace.launch, 0)]
        inside = launched & (called >= low) & (called < high)
        return low, max(high, int(trace.end_ns[inside].max(initial=high)))
    if step is not None:
        chosen = (trace.step == step) & ~trace.of_kind(Kind.ALLOCATION)
        if not chosen.any():
            raise InputError(f"the trace has no step {step}")
    else:
        chosen = ~trace.of_kind(Kind.ALLOCATION, Kind.STEP, Kind.OVERHEAD)
    if not chosen.any():
        return 0, 0
    return int(trace.start_ns[chosen].min()), int(trace.end_ns[chosen].max())


class _Walk:
    """Goes back from the window's end, one cause at a time."""

    def __init__(self, trace: Trace, low: int, high: int, arrivals: dict[int, int]) -> None:
        self.trace, self.low, self.high, self.arrivals = trace, low, high, arrivals
        self.start, self.end = trace.start_ns, trace.end_ns
        work = np.flatnonzero(trace.gpu & (self.end > low) & (self.start < high))
        # Starts and spans of each stream, in order
        found: Lanes = {}
        for row in work[np.argsort(self.start[work], kind="stable")].tolist():
            starts, spans = found.setdefault(_lane(trace, row), ([], []))
            starts.append(int(self.start[row]))
            spans.append(row)
        self.on_stream = found
        self.by_end: dict[int, tuple[list[int], list[int]]] = {}
        for rank in np.unique(trace.rank[work]).tolist():
            rows = work[trace.rank[work] == rank]
            rows = rows[np.argsort(self.end[rows], kind="stable")]
            self.by_end[rank] = (self.end[rows].tolist(), rows.tolist())
        calls = trace.of_kind(Kind.RUNTIME)
        self.waits = _per_thread(trace, np.flatnonzero(named(trace, _WAIT, calls)), self.end)
        top = np.flatnonzero(_outermost(trace) & (self.end > low) & (self.start < high))
        self.tops = _per_thread(trace, top, self.start)
        self.found: list[Segment] = []

    def segments(self) -> list[Segment]:
        at = self._last()
        time = self.high
        limit = 4 * len(self.trace) + 1000
        while time > self.low and limit > 0:
            limit -= 1
            before = (at, time)
            at, time = self._on_device(at, time) if isinstance(at, int) else self._on_host(at, time)
            if (at, time) == before:
                break
        if time > self.low:
            self._add(self.low, time, "unknown", -1, 0)
        return list(reversed(self.found))

    def _last(self) -> int | tuple[int, int]:
        """The span that ends last, or the host thread that does."""
        trace = self.trace
        inside = (self.start < self.high) & (self.end > self.low)
        work = np.flatnonzero(trace.gpu & inside)
        host = np.flatnonzero(_outermost(trace) & inside)
        last_work = int(work[np.argmax(self.end[work])]) if len(work) else -1
        last_host = int(host[np.argmax(self.end[host])]) if len(host) else -1
        if last_work >= 0 and (last_host < 0 or self.end[last_work] >= self.end[last_host]):
            if self.end[last_work] < self.high:
                self._add(int(self.end[last_work]), self.high, "host", -1, int(trace.rank[last_work]))
            return last_work
        if last_host < 0:
            return (0, -1)
        return int(trace.rank[last_host]), int(trace.thread[last_host])

    def _add(self, start: int, end: int, sort: str, span: int, rank: int) -> None:
        start, end = max(start, self.low), min(end, self.high)
        if end > start:
            self.found.append(Segment(start / 1e9, end / 1e9, sort, span, rank))

    def _on_device(self, span: int, time: int) -> tuple[int | tuple[int, int], int]:
        """Past one device span, and on to whatever let it start."""
        trace, rank = self.trace, int(self.trace.rank[span])
        start = int(self.start[span])
        last = self.arrivals.get(span, span)
        arrived = int(self.start[last])
        sort = Kind(int(trace.kind[span])).name.lower()
        if last != span and start < arrived < time:  # it waited for another rank: the path goes on over there
            self._add(arrived, time, sort, span, rank)
            return last, arrived
        self._add(start, time, sort, span, rank)
        before, ended = self._before_on_stream(span, start)
        launch = int(trace.launch[span])
        called = self._reached(launch, start) if launch >= 0 else -(2**62)
        other, other_end = self._other_stream(span, start)
        if other >= 0 and other_end > max(ended, called) + _NEAR_NS:
            before, ended = other, other_end
        if before >= 0 and ended >= called:
            self._add(ended, start, "gap", span, rank)
            return before, ended
        if launch >= 0:
            self._add(called, start, "launch", span, rank)
            return (rank, int(trace.thread[launch])), called
        before, ended = self._latest(rank, start, span)
        if before < 0:
            return (rank, -1), start
        self._add(ended, start, "unknown", span, rank)
        return before, ended

    def _reached(self, launch: int, start: int) -> int:
        """When a launch had been handed over: a call that blocks goes on long after that."""
        return min(int(self.end[launch]), int(self.start[launch]) + _HANDED_NS, start)

    def _before_on_stream(self, span: int, start: int) -> tuple[int, int]:
        lane = _lane(self.trace, span)
        starts, rows = self.on_stream[lane]
        at = bisect_left(starts, start) - 1
        while at >= 0 and rows[at] == span:
            at -= 1
        if at < 0:
            return -1, -(2**62)
        return rows[at], min(int(self.end[rows[at]]), start)

    def _other_stream(self, span: int, start: int) -> tuple[int, int]:
        """A span of another stream that ends just when this one starts: an event was waited for."""
        row, ended = self._latest(int(self.trace.rank[span]), start, span)
        return (row, ended) if row >= 0 and start - ended <= _NEAR_NS else (-1, -1)

    def _latest(self, rank: int, time: int, besides: int) -> tuple[int, int]:
        """The device span of a rank that ends last, no later than a time."""
        ends, rows = self.by_end.get(rank, ([], []))
        at = bisect_right(ends, time) - 1
        while at >= 0 and (rows[at] == besides or self.start[rows[at]] >= time):
            at -= 1
        return (rows[at], ends[at]) if at >= 0 else (-1, -1)

    def _on_host(self, place: tuple[int, int], time: int) -> tuple[int | tuple[int, int], int]:
        """Back along a thread to its last wait for the device, or to the thread that woke it."""
        rank, _ = place
        waited, span = self._last_wait(place, time)
        rested, other = self._rest(place, time)
        if span is not None and waited >= rested:
            device, ended = self._latest(rank, waited, -1)
            self._host_work(place, waited, time)
            self._add(ended, waited, "wait", span, rank)
            return device, ended
        if other is not None:
            self._host_work(place, rested, time)
            return other, rested
        self._host_work(place, self.low, time)
        return place, self.low

    def _last_wait(self, place: tuple[int, int], time: int) -> tuple[int, int | None]:
        """(end, span) of the last call before a time that a device kept waiting."""
        ends, rows = self.waits.get(place, ([], []))
        at = bisect_right(ends, time) - 1
        while at >= 0 and ends[at] > self.low:
            device, ended = self._latest(place[0], ends[at], -1)
            if device >= 0 and ended > self.start[rows[at]] and ended < time:
                return ends[at], rows[at]
            at -= 1
        return -(2**62), None

    def _rest(self, place: tuple[int, int], time: int) -> tuple[int, tuple[int, int] | None]:
        """When a thread last began to work after a rest, and the thread that was at work then."""
        starts, rows = self.tops.get(place, ([], []))
        at = bisect_left(starts, time) - 1
        # a thread that rests longer than this was woken by another
        while at > 0 and starts[at] - int(self.end[rows[at - 1]]) < 20_000:
            at -= 1
        if at < 0 or starts[at] <= self.low:
            return -(2**62), None
        other = self._busiest_before(place, starts[at])
        return (starts[at], other) if other is not None else (-(2**62), None)

    def _busiest_before(self, place: tuple[int, int], time: int) -> tuple[int, int] | None:
        """The other thread of the rank that was last at work before a time."""
        latest, found = -(2**62), None
        for other, (begun, spans) in self.tops.items():
            i = bisect_left(begun, time) - 1
            if other[0] == place[0] and other[1] != place[1] and i >= 0:
                ended = min(int(self.end[spans[i]]), time)
                latest, found = (ended, other) if ended > latest else (latest, found)
        return found

    def _host_work(self, place: tuple[int, int], low: int, high: int) -> None:
        """The ops of a thread in a window, last first, and what lies between them."""
        starts, rows = self.tops.get(place, ([], []))
        low = max(low, self.low)
        at, time = bisect_left(starts, high) - 1, high
        while time > low:
            while at >= 0 and int(self.end[rows[at]]) <= low:
                at = -1 if starts[at] < low else at - 1
            if at < 0:
                self._add(low, time, "host", -1, place[0])
                return
            ended, begun = min(int(self.end[rows[at]]), time), max(starts[at], low)
            self._add(ended, time, "host", -1, place[0])
            self._add(begun, ended, "host", rows[at], place[0])
            time = min(time, begun)
            at -= 1


def _outermost(trace: Trace) -> Mask:
    """Ops and calls that no other op or call encloses."""
    own = trace.of_kind(Kind.OP, Kind.RUNTIME, Kind.DATALOADER, Kind.GC) & (trace.thread >= 0)
    inside = np.zeros(len(trace) + 1, dtype=np.bool_)
    above = trace.parent.copy()
    while (above >= 0).any():  # as many rounds as stacks are deep
        inside[:-1] |= (above >= 0) & own[np.maximum(above, 0)]
        above = np.where((above >= 0) & ~inside[:-1], trace.parent[np.maximum(above, 0)], -1)
    return np.asarray(own & ~inside[:-1])


def _lane(trace: Trace, span: int) -> tuple[int, int, int]:
    return int(trace.rank[span]), int(trace.device[span]), int(trace.stream[span])


Lanes = dict[tuple[int, int, int], tuple[list[int], list[int]]]
Threads = dict[tuple[int, int], tuple[list[int], list[int]]]


def _per_thread(trace: Trace, rows: Index, times: Nanos) -> Threads:
    """Times and spans of each thread, in order."""
    found: Threads = {}
    for row in rows[np.argsort(times[rows], kind="stable")].tolist():
        at, spans = found.setdefault((int(trace.rank[row]), int(trace.thread[row])), ([], []))
        at.append(int(times[row]))
        spans.append(row)
    return found
