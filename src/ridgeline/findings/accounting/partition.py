"""A window of one device, cut so that each instant has one owner: a kernel, an exposed collective or copy, or a gap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.trace.intervals import Intervals, Nanos, covered_within, gaps, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

COMPUTE = (Kind.KERNEL, Kind.MEMSET)


@dataclass(frozen=True, slots=True)
class Owned:
    """What each span of a device owns of the window, in nanoseconds; ``waited`` is the part of a collective that
    passed before the last rank arrived."""

    rows: Index
    ns: Nanos
    waited_ns: Nanos
    gaps: Intervals


def owned_of(trace: Trace, rows: Index, low: int, high: int, arrived: Nanos | None = None) -> Owned:
    """Compute owns an instant before communication and communication before copies; of two alike the first to start
    owns it. ``arrived`` has the time from which on each of ``rows`` really transfers (its start unless known)."""
    start, end = np.clip(trace.start_ns[rows], low, high), np.clip(trace.end_ns[rows], low, high)
    ns, waited = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    above = union(start[:0], end[:0])
    for kinds in (COMPUTE, (Kind.COMMUNICATION,), (Kind.MEMCPY,)):
        own = np.flatnonzero(trace.of_kind(*kinds)[rows])
        own = own[np.argsort(start[own], kind="stable")]
        if not len(own):
            continue
        first, last = start[own], end[own]
        reached = np.maximum.accumulate(np.concatenate(([low], last)))[:-1]
        first = np.minimum(np.maximum(first, reached), last)
        ns[own] = (last - first) - covered_within(above, first, last)
        if arrived is not None and Kind.COMMUNICATION in kinds:
            ready = np.clip(arrived[own], first, last)
            waited[own] = (ready - first) - covered_within(above, first, ready)
        above = union(np.concatenate((above.start, start[own])), np.concatenate((above.end, end[own])))
    return Owned(rows, ns, waited, gaps(above, low, high))
