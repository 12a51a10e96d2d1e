"""From a trace to what constrained it: which call launched what, who waited for whom, and the delays in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.replay.replay import NONE, Index, Mask, Program, Seconds
from ridgeline.findings.replay.window import Window
from ridgeline.trace.intervals import difference, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

NEAR_S = 20e-6
"""Work that starts this soon after work of another stream has ended, and for no other reason, was waiting for it."""
SURE_S = 5e-6
"""Delays below this need no reason: events, front ends and clocks have their own."""
BACK_TO_BACK_S = 3e-6
"""Queued kernels follow each other within this; where they never do, nothing was ever queued."""
SYNCHRONIZES = ("Synchronize", "cudaFree", "hipFree", "cuMemFree", "cudaHostUnregister", "cudaMemcpy_")
ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease",
             "cuMemSetAccess", "cuMemAddressReserve", "cuMemAlloc", "cuMemFree", "cudaHostAlloc", "cudaFreeHost",
             "cudaMallocHost", "hipHostMalloc", "cudaHostRegister")  # fmt: skip
NOT_ALLOCATING = ("Async",)


@dataclass(frozen=True, slots=True)
class Wiring:
    """A program with the spans its calls and works are, and how much of the delays has no explanation."""

    program: Program
    call_rows: Index  # NONE for the window's marks
    work_rows: Index
    call_start_ns: NDArray[np.int64]
    call_end_ns: NDArray[np.int64]
    unexplained_s: float


def wire(trace: Trace, window: Window, work_mask: Mask) -> Wiring:
    """Constraints of everything launched in the window."""
    calls = _calls(trace, window, work_mask)
    works = _works(trace, window, work_mask, calls)
    waits_for, return_s, own_s = _waits(trace, calls, works)
    after, gap_s = _order(calls)
    delays = _delays(calls, works)
    program = Program(
        after=after,
        gap_s=gap_s,
        own_s=own_s,
        waits_for=waits_for,
        return_s=return_s,
        call=works.call,
        stream=works.stream,
        latency_s=delays.latency_s,
        stream_gap_s=delays.stream_gap_s,
        depends_on=delays.depends_on,
        depend_gap_s=delays.depend_gap_s,
        duration_s=works.end_s - works.start_s,
    )
    origin_ns = window.start_ns
    start_ns = np.rint(calls.start_s * 1e9).astype(np.int64) + origin_ns
    end_ns = np.rint(calls.end_s * 1e9).astype(np.int64) + origin_ns
    return Wiring(program, calls.row, works.row, start_ns, end_ns, delays.unexplained_s)


def runtime_named(trace: Trace, words: tuple[str, ...], but: tuple[str, ...] = ()) -> Mask:
    """Runtime calls whose name has one of the words in it and none of the others."""
    chosen = np.fromiter(
        (any(word in name for word in words) and not any(word in name for word in but) for name in trace.words),
        dtype=bool,
        count=len(trace.words),
    )
    return np.asarray(chosen[trace.name] & (trace.kind == int(Kind.RUNTIME)), dtype=bool)


@dataclass(frozen=True, slots=True)
class _Calls:
    row: Index
    start_s: Seconds
    end_s: Seconds
    thread: Index
    nested_in: dict[int, int]  # launch rows that lie inside another call, and that call


def _calls(trace: Trace, window: Window, work_mask: Mask) -> _Calls:
    """Calls that launch, wait or allocate, outermost first, with marks for the window and its steps."""
    inside = (trace.start_ns >= window.start_ns) & (trace.start_ns < window.end_ns)
    wanted = runtime_named(trace, SYNCHRONIZES) | runtime_named(trace, ALLOCATES, NOT_ALLOCATING)
    launches = np.unique(trace.launch[work_mask])
    wanted[launches[launches >= 0]] = True
    rows = trace.in_order(wanted & inside)
    rows, nested_in = _outermost(trace, rows)
    further = (*window.marks_ns, window.host_end_ns) if len(rows) else ()  # without calls there is no host to follow
    marks_ns = np.array([window.start_ns, *further], dtype=np.int64)
    main = _main_thread(trace, rows)
    row = np.concatenate((np.full(len(marks_ns), NONE), rows))
    launched_ns = np.where(trace.of_kind(Kind.RUNTIME)[rows], trace.start_ns[rows], trace.end_ns[rows])
    start_ns = np.concatenate((marks_ns, launched_ns))  # an op of a predicted run launches when it is done
    end_ns = np.concatenate((marks_ns, trace.end_ns[rows]))
    thread = np.concatenate((np.full(len(marks_ns), main), trace.thread[rows]))
    order = np.argsort(start_ns, kind="stable")
    return _Calls(
        row[order].astype(np.int64),
        (start_ns[order] - window.start_ns) / 1e9,
        (end_ns[order] - window.start_ns) / 1e9,
        thread[order].astype(np.int64),
        nested_in,
    )


def _main_thread(trace: Trace, rows: Index) -> int:
    if not len(rows):
        return 0
    threads, counts = np.unique(trace.thread[rows], return_counts=True)
    return int(threads[np.argmax(counts)])


def _outermost(trace: Trace, rows: Index) -> tuple[Index, dict[int, int]]:
    """Calls that are not inside another call of their thread; a launch inside one is that one's."""
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    outer = np.ones(len(rows), dtype=bool)
    nested_in = dict[int, int]()
    for thread in np.unique(trace.thread[rows]):
        own = np.flatnonzero(trace.thread[rows] == thread)
        reached = np.maximum.accumulate(end[own])
        inner = np.flatnonzero((start[own][1:] < reached[:-1]) & (end[own][1:] <= reached[:-1])) + 1
        if not len(inner):
            continue
        outer[own[inner]] = False
        kept = own[outer[own]]
        owner = kept[np.maximum(0, np.searchsorted(start[kept], start[own[inner]], side="right") - 1)]
        nested_in |= dict(zip(rows[own[inner]].tolist(), rows[owner].tolist(), strict=True))
    return rows[outer], nested_in


@dataclass(frozen=True, slots=True)
class _Works:
    row: Index
    start_s: Seconds
    end_s: Seconds
    call: Index
    stream: Index
    linked: Mask


def _works(trace: Trace, window: Window, work_mask: Mask, calls: _Calls) -> _Works:
    """Device work by the call that launched it; work without one hangs on the call before it."""
    at = dict[int, int]({int(row): i for i, row in enumerate(calls.row.tolist()) if row >= 0})
    rows = np.flatnonzero(work_mask)
    launch = [calls.nested_in.get(row, row) for row in trace.launch[rows].tolist()]
    call = np.fromiter((at.get(row, NONE) for row in launch), dtype=np.int64, count=len(rows))
    start_s = (trace.start_ns[rows] - window.start_ns) / 1e9
    end_s = (trace.end_ns[rows] - window.start_ns) / 1e9
    linked = call >= 0
    before = np.maximum(0, np.searchsorted(calls.start_s, start_s, side="right") - 1)
    kept = linked | ((trace.launch[rows] < 0) & (start_s >= 0.0) & (trace.start_ns[rows] < window.end_ns))
    place = trace.device[rows].astype(np.int64) * (1 << 32) + trace.stream[rows]
    _, stream = np.unique(place, return_inverse=True)
    call = _in_stream_order(np.where(linked, call, before), start_s, stream, linked)
    order = np.lexsort((start_s, call))
    order = order[kept[order]]
    return _Works(rows[order], start_s[order], end_s[order], call[order], stream.astype(np.int64)[order], linked[order])


def _in_stream_order(call: Index, start_s: Seconds, stream: Index, linked: Mask) -> Index:
    """Work without a launch was launched no later than the work that follows it on its stream."""
    if linked.all():
        return call
    found = call.copy()
    for place in np.unique(stream):
        own = np.flatnonzero(stream == place)
        own = own[np.argsort(start_s[own], kind="stable")]
        latest = np.minimum.accumulate(np.where(linked[own], call[own], np.iinfo(np.int64).max)[::-1])[::-1]
        found[own] = np.where(linked[own], call[own], np.minimum(call[own], latest))
    return found


def _waits(trace: Trace, calls: _Calls, works: _Works) -> tuple[Index, Seconds, Seconds]:
    """What each call waits for: the work that ended last before it returned, if the call is of the waiting kind."""
    duration_s = calls.end_s - calls.start_s
    num = len(calls.row)
    if not len(works.row):
        return np.full(num, NONE), np.zeros(num), duration_s
    by_end = np.argsort(works.end_s, kind="stable")
    last = np.searchsorted(works.end_s[by_end], calls.end_s, side="right") - 1
    found = np.where(last >= 0, by_end[np.maximum(last, 0)], NONE)
    own_copy = _own_copy(trace, calls, works)
    copies = own_copy >= 0
    found = np.where(copies, own_copy, found)
    ended_s = np.where(found >= 0, works.end_s[found], -np.inf)
    waiting = _may_wait(trace, calls, works, duration_s) | copies
    earlier = works.call[np.maximum(found, 0)] <= np.arange(num)
    bound = waiting & (found >= 0) & (ended_s <= calls.end_s) & earlier
    waited = bound & (
        ended_s > calls.start_s
    )  # the others found the device done, and would wait if the host were faster
    return_s = np.where(waited, calls.end_s - ended_s, np.minimum(duration_s, SURE_S))
    own_s = np.where(waited, np.minimum(duration_s, return_s), duration_s)
    return np.where(bound, found, NONE).astype(np.int64), return_s, own_s


def _may_wait(trace: Trace, calls: _Calls, works: _Works, duration_s: Seconds) -> Mask:
    """Calls that synchronize, and launches that took long while the queue was full."""
    rows = np.maximum(calls.row, 0)
    synchronizes = runtime_named(trace, SYNCHRONIZES)[rows] & (calls.row >= 0)
    early = int((~works.linked).sum())  # launched before the recording began
    launched = early + np.searchsorted(works.call[works.linked], np.arange(len(calls.row)), side="right")
    finished = np.searchsorted(np.sort(works.end_s), calls.start_s, side="right")
    # A launch that takes long while this much work is pending waits for room in the queue (CUDA holds about 1,024).
    full = (launched - finished > 512) & (duration_s > 30e-6)
    return np.asarray(synchronizes | full, dtype=bool)


def _own_copy(trace: Trace, calls: _Calls, works: _Works) -> Index:
    """The copy that a call launched and waited for: it ended before the call returned."""
    found = np.full(len(calls.row), NONE, dtype=np.int64)
    copy = np.flatnonzero((trace.kind[works.row] == int(Kind.MEMCPY)) & works.linked)
    inside = copy[works.end_s[copy] <= calls.end_s[works.call[copy]]]
    found[works.call[inside]] = inside
    return found


def _order(calls: _Calls) -> tuple[Index, Seconds]:
    """Which call each call follows, and how long after it has ended."""
    num = len(calls.row)
    same = np.full(num, NONE, dtype=np.int64)
    for thread in np.unique(calls.thread):
        own = np.flatnonzero(calls.thread == thread)
        same[own[1:]] = own[:-1]
    gap_s = np.where(same >= 0, calls.start_s - calls.end_s[same], np.inf)
    # The call that ended last before each one starts, never one later in order.
    by_end = np.argsort(calls.end_s, kind="stable")
    place = np.searchsorted(calls.end_s[by_end], calls.start_s, side="right") - 1
    index = np.arange(len(calls.row))
    found = np.where(place >= 0, by_end[np.maximum(place, 0)], NONE)
    for _ in range(4):  # calls of no length end where they start: look one further back
        late = (found >= index) & (place >= 0)
        if not late.any():
            break
        place = np.where(late, place - 1, place)
        found = np.where(place >= 0, by_end[np.maximum(place, 0)], NONE)
    latest = np.where(found < index, found, index - 1)
    # A thread that calls nothing for longer was probably waiting for another one: its next call follows whichever ended
    # last.
    handed = (gap_s > 100e-6) & (latest >= 0)
    after = np.where(handed, latest, same)
    return after, np.where(after >= 0, calls.start_s - calls.end_s[after], calls.start_s)


@dataclass(frozen=True, slots=True)
class _Delays:
    latency_s: Seconds
    stream_gap_s: Seconds
    depends_on: Index
    depend_gap_s: Seconds
    unexplained_s: float


def _delays(calls: _Calls, works: _Works) -> _Delays:
    """What held each piece of work: its launch, its stream or another stream; the rest stays where it was."""
    latency_s = works.start_s - calls.start_s[works.call]
    gap_s = works.start_s - _freed_s(works)
    # An empty queue starts work within this after its launch; where none does, the queue was never empty.
    usual_latency_s = min(10e-6, _usual(latency_s[works.linked]))
    usual_gap_s = min(BACK_TO_BACK_S, _usual(gap_s[gap_s < NEAR_S]))
    launch_ready_s = works.start_s - latency_s + usual_latency_s
    stream_ready_s = works.start_s - gap_s + usual_gap_s
    launch_ready_s = np.where(~works.linked & (gap_s < NEAR_S), -np.inf, launch_ready_s)
    by_stream = stream_ready_s > launch_ready_s
    held_s = works.start_s - np.maximum(launch_ready_s, stream_ready_s)
    depends_on, depend_gap_s = _other_stream(works, held_s)
    explained = depends_on >= 0
    lost = ~explained & (held_s > NEAR_S) & np.isfinite(held_s)
    start_ns = np.rint(works.start_s * 1e9).astype(np.int64)
    lost_ns = union(start_ns[lost] - np.rint(held_s[lost] * 1e9).astype(np.int64), start_ns[lost])
    latency_s = np.where(~by_stream & ~explained, latency_s, np.minimum(latency_s, usual_latency_s))
    return _Delays(
        # Latency of work whose launch is not known and did not hold it.
        np.where(np.isfinite(launch_ready_s), latency_s, (-1e9)),
        np.where(by_stream & ~explained, np.where(np.isfinite(gap_s), gap_s, 0.0), np.minimum(gap_s, usual_gap_s)),
        depends_on,
        depend_gap_s,
        difference(
            lost_ns, union(np.rint(works.start_s * 1e9).astype(np.int64), np.rint(works.end_s * 1e9).astype(np.int64))
        ).total
        / 1e9,
    )


def _usual(delays_s: Seconds) -> float:
    """The delay that no queue adds to."""
    known = delays_s[np.isfinite(delays_s) & (delays_s > 0.0)]
    return float(np.quantile(known, 0.1)) if len(known) else 0.0


def _freed_s(works: _Works) -> Seconds:
    """When the stream of each piece of work was free of what came before."""
    freed = np.full(len(works.row), -np.inf)
    for stream in np.unique(works.stream):
        own = np.flatnonzero(works.stream == stream)
        freed[own[1:]] = np.maximum.accumulate(works.end_s[own])[:-1]
    return freed


def _other_stream(works: _Works, held_s: Seconds) -> tuple[Index, Seconds]:
    """Work of another stream that ended just before a piece that nothing else held."""
    num = len(works.row)
    if not num:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    by_end = np.argsort(works.end_s, kind="stable")
    place = np.searchsorted(works.end_s[by_end], works.start_s, side="right") - 1
    found = np.where(place >= 0, by_end[np.maximum(place, 0)], NONE)
    safe = np.maximum(found, 0)
    gap_s = works.start_s - works.end_s[safe]
    other = (works.stream[safe] != works.stream) & (works.call[safe] <= works.call) & (safe < np.arange(num))
    real = (found >= 0) & (held_s > SURE_S) & (gap_s < NEAR_S) & (gap_s < held_s) & other
    return np.where(real, found, NONE).astype(np.int64), np.where(real, gap_s, 0.0)
