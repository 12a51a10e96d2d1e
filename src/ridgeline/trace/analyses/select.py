"""A part of a trace: one step, a stretch of time, or the instances of an annotation, as a trace of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ridgeline.errors import InputError, nearest
from ridgeline.trace.intervals import Nanos
from ridgeline.trace.kind import Kind
from ridgeline.trace.steps import windows_of
from ridgeline.trace.table import Trace, TraceBuilder, concat

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def selected(
    trace: Trace, *, step: int | None = None, between: str | tuple[float, float] | None = None, annotation: str = ""
) -> Trace:
    """What was asked for; each instance of an annotation, or the stretch of time, then counts as a step."""
    if step is not None:
        trace = _step(trace, step)
    if annotation:
        trace = _annotated(trace, annotation)
    if between is not None:
        trace = _between(trace, *(range_of(between) if isinstance(between, str) else between))
    return trace


def range_of(text: str) -> tuple[float, float]:
    """``1.2s..1.5s`` or ``300ms..350ms``, from the first span of the trace, in seconds."""
    found = re.fullmatch(r"\s*([\d.]+?)\s*([a-zµ]*)\s*\.\.+\s*([\d.]+)\s*([a-zµ]+)\s*", text)
    try:
        if found is None:
            raise ValueError
        low = float(found[1]) * _UNITS_S[found[2] or found[4]]
        high = float(found[3]) * _UNITS_S[found[4]]
    except (ValueError, KeyError):
        raise InputError(f"--range {text!r} is no stretch of time: write 1.2s..1.5s or 300..350ms") from None
    if high <= low:
        raise InputError(f"--range {text!r} ends before it begins")
    return low, high


def _step(trace: Trace, number: int) -> Trace:
    for rank in trace.ranks():
        windows = windows_of(trace, rank)
        at = np.flatnonzero(windows.number == number)
        if len(at) and number >= 0:
            low, high = windows.start[at[:1]], windows.end[at[:1]]
            return _cut(trace, low, high, f"step {number}", numbers=[number])
    known = sorted({int(one) for rank in trace.ranks() for one in windows_of(trace, rank).number if one >= 0})
    said = f"steps {known[0]} to {known[-1]}" if known else "none: use --range or --annotation"
    raise InputError(f"the trace has no step {number}; it has {said}")


def _annotated(trace: Trace, name: str) -> Trace:
    """Host ranges of this name, with the device work that was launched in them."""
    rows = trace.in_order((trace.name == trace.word_id(name)) & (trace.device < 0) & ~trace.of_kind(Kind.RUNTIME))
    if not len(rows):
        marks = trace.of_kind(Kind.ANNOTATION, Kind.STEP) & (trace.device < 0)
        known = [trace.words[word] for word in np.unique(trace.name[marks]).tolist()]
        raise InputError(f"no annotation {name!r} in the trace{nearest(name, known)}")
    # Instances inside of others of the same name are part of them
    reached = np.maximum.accumulate(np.concatenate(([-(2**62)], trace.end_ns[rows][:-1])))
    rows = rows[trace.start_ns[rows] >= reached]
    low, high = trace.start_ns[rows].copy(), trace.end_ns[rows].copy()
    launched = np.flatnonzero(trace.gpu & (trace.launch >= 0))
    called = trace.start_ns[trace.launch[launched]]
    at = np.searchsorted(low, called, side="right") - 1
    inside = (at >= 0) & (called < high[np.maximum(at, 0)])
    np.maximum.at(high, at[inside], trace.end_ns[launched[inside]])
    high = np.maximum(np.minimum(high, np.append(low[1:], 2**62)), low)
    return _cut(trace, low, high, name)


def _between(trace: Trace, low_s: float, high_s: float) -> Trace:
    spans = ~trace.of_kind(Kind.ALLOCATION)
    first = int(trace.start_ns[spans].min(initial=2**62)) if spans.any() else 0
    low, high = first + round(low_s * 1e9), first + round(high_s * 1e9)
    last = int(trace.end_ns[spans].max(initial=0))
    if low >= last:
        raise InputError(f"the trace is {(last - first) / 1e9:.6g} s long: no time after {low_s:g} s")
    name = f"{low_s:g} s to {high_s:g} s"
    return _cut(trace, np.array([low]), np.array([min(high, last)]), name)


def _cut(trace: Trace, low: Nanos, high: Nanos, name: str, numbers: list[int] | None = None) -> Trace:
    """Spans clipped to stretches of time, each of which is then a step of the trace; the time between them is cut out.
    """
    moved = np.concatenate(([0], np.cumsum(high - low)[:-1])) + low[0] - low
    inside = np.zeros(len(trace), np.bool_)
    start, end = trace.start_ns.copy(), trace.end_ns.copy()
    which = np.full(len(trace), -1, np.int32)
    marks = trace.of_kind(Kind.STEP) & (trace.device < 0)
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        own = ~inside & ~marks & (trace.start_ns < b) & (trace.end_ns >= a)
        own &= (trace.end_ns > a) | (trace.start_ns >= a)
        start[own], end[own] = np.clip(trace.start_ns[own], a, b), np.clip(trace.end_ns[own], a, b)
        start[own] += moved[i]
        end[own] += moved[i]
        which[own] = i if numbers is None else numbers[i]
        inside |= own
    index = np.flatnonzero(inside)
    part = trace.with_columns(start_s=start / 1e9, duration_s=(end - start) / 1e9, step=which).select(index)
    part = replace(part, title=f"{trace.title}, {name}", counters={})
    host = np.flatnonzero((part.thread >= 0) & (part.device < 0))
    thread = int(np.bincount(part.thread[host]).argmax()) if len(host) else 0
    return _with_steps(part, low + moved, high + moved, name, numbers or list(range(len(low))), thread)


def _with_steps(trace: Trace, low: Nanos, high: Nanos, name: str, numbers: list[int], thread: int) -> Trace:
    build = TraceBuilder(trace.title)
    build.describe(origin_ns=trace.origin_ns)
    rank = int(trace.rank[0]) if len(trace) else 0
    for number, a, b in zip(numbers, low.tolist(), high.tolist(), strict=True):
        build.add(f"{name}#{number}", f"host {thread}", a / 1e9, (b - a) / 1e9, kind=Kind.STEP, device=-1, stream=-1,
                  thread=thread, rank=rank, step=number)  # fmt: skip
    return replace(concat([trace, build.build()], trace.title), meta=dict(trace.meta), notes=trace.notes)
