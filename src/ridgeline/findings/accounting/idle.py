"""Every gap of a device cut by what kept it empty: the host until the launch, the launch itself, then the device."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ridgeline.findings.accounting.host_activity import ACTIVITIES, Host
from ridgeline.trace.idle import named
from ridgeline.trace.intervals import Intervals, Nanos, covered_within
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Ids, Index, Trace

REASONS = (*ACTIVITIES, "bubble", "latency", "queued", "graph", "device_wait", "no_host")
"""Why a device is empty: what the host did, and what follows once it has launched the next work."""
_CODE = {name: code for code, name in enumerate(REASONS)}
LATENCY_NS = 50_000
"""From a launch to its kernel, and from a queued kernel to the next, a device needs no more than this."""
_GRAPH = re.compile(r"GraphLaunch", re.IGNORECASE)


class Idle(NamedTuple):
    """Idle time as columns: why, how long, the host span that shows it, the device span that ended it (-1: none)."""

    reason: Ids
    ns: Nanos
    span: Ids
    ended_by: Ids


def idle_of(trace: Trace, host: Host, rank: int, device: int, works: Index, empty: Intervals) -> Idle:
    """The gaps of one device; ``works`` are all its spans in time order, the window's and those after it."""
    num = len(empty.start)
    if not num or not len(trace):
        return _idle([], [], [], [])
    starts = trace.start_ns[works]
    at = np.searchsorted(starts, empty.end, side="left")
    after = np.where(at < len(works), works[np.minimum(at, len(works) - 1)] if len(works) else -1, -1).astype(np.int32)
    launch = np.where(after >= 0, trace.launch[np.maximum(after, 0)], -1)
    known = launch >= 0
    row = np.maximum(launch, 0)
    called = np.where(known, np.clip(trace.start_ns[row], empty.start, empty.end), empty.end)
    returned = np.where(known, np.clip(trace.end_ns[row], called, empty.end), empty.end)
    # A gap of a simulated schedule that is a bubble belongs to it whole
    planned = (trace.rank == rank) & trace.of_kind(Kind.BUBBLE) & np.isin(trace.device, (device, -1))
    bubble = covered_within(trace.busy(planned), empty.start, empty.end) if planned.any() else np.zeros(num, np.int64)
    parts = [_idle(["bubble"] * num, bubble, np.full(num, -1), after)] if bubble.any() else []
    if bubble.any():
        called = np.maximum(called, np.minimum(empty.start + bubble, empty.end))
        returned = np.maximum(returned, called)
    start = empty.start + bubble
    parts.append(_host_part(trace, host, Intervals(np.minimum(start, called), called), launch, after))
    in_call = _idle(host.activity_of(row.astype(np.int32)), np.where(known, returned - called, 0), launch, after)
    late = np.where(known, empty.end - returned, 0)
    ahead = known & (trace.end_ns[row] <= empty.start)
    usual = np.minimum(late, LATENCY_NS)
    hands = [np.where(ahead, _CODE["queued"], _CODE["latency"]), usual, launch, after]
    # Work that was queued and did not start: behind a graph whose kernels were not recorded, or waiting for an event
    calls = trace.of_kind(Kind.RUNTIME) & (trace.rank == rank)
    graphs = trace.start_ns[named(trace, _GRAPH, calls)]
    behind = known & (trace.start_ns[row] >= graphs.min(initial=2**62))
    beyond = np.where(behind, _CODE["graph"], _CODE["device_wait"])
    parts += [in_call, _idle(*hands), _idle(beyond, late - usual, launch, after)]
    return Idle(*(np.concatenate([getattr(part, name) for part in parts]) for name in Idle._fields))


def _host_part(trace: Trace, host: Host, windows: Intervals, launch: Ids, after: Ids) -> Idle:
    """From the moment the device ran dry until the launch of its next work, or all of it if that is not recorded."""
    kept = np.flatnonzero(windows.end > windows.start)
    if not len(kept):
        return _idle([], [], [], [])
    chosen = Intervals(windows.start[kept], windows.end[kept])
    if host.main < 0:
        return _idle(["no_host"] * len(kept), chosen.end - chosen.start, np.full(len(kept), -1), after[kept])
    caller = launch[kept]
    thread = np.where(caller >= 0, trace.thread[np.maximum(caller, 0)], host.main)
    thread = np.where(thread >= 0, thread, host.main).astype(np.int32)
    found = host.activities(chosen, thread)
    return _idle(found.activity, found.ns, found.span, after[kept][found.window])


def _idle(reason: object, ns: object, span: object, ended_by: object) -> Idle:
    codes = [_CODE[one] if isinstance(one, str) else int(one) for one in np.asarray(reason).tolist()]
    found = Idle(np.asarray(codes, np.int32), np.asarray(ns, np.int64), np.asarray(span, np.int32),
                 np.asarray(ended_by, np.int32))  # fmt: skip
    kept = found.ns > 0
    return Idle(found.reason[kept], found.ns[kept], found.span[kept], found.ended_by[kept])
