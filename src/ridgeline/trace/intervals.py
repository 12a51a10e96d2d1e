"""Sets of intervals as two sorted columns of nanoseconds: union, overlap and difference, without a loop over spans."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Nanos = NDArray[np.int64]
NONE: Nanos = np.zeros(0, dtype=np.int64)


class Intervals(NamedTuple):
    """Disjoint, sorted, none of them empty; ends are exclusive."""

    start: Nanos
    end: Nanos

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())


def union(start: Nanos, end: Nanos) -> Intervals:
    """The time that at least one of the given intervals covers."""
    if not len(start):
        return Intervals(NONE, NONE)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    merged_start, merged_end = start[first], reached[last]
    kept = merged_end > merged_start
    return Intervals(merged_start[kept], merged_end[kept])


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The time that both cover."""
    if not len(a.start) or not len(b.start):
        return Intervals(NONE, NONE)
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(last - first, 0)
    which_a = np.repeat(np.arange(len(count)), count)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    which_b = np.repeat(first, count) + offset
    return Intervals(
        np.maximum(a.start[which_a], b.start[which_b]),
        np.minimum(a.end[which_a], b.end[which_b]),
    )


def difference(a: Intervals, b: Intervals) -> Intervals:
    """The time that ``a`` covers and ``b`` does not."""
    if not len(a.start) or not len(b.start):
        return a
    low, high = int(min(a.start[0], b.start[0])), int(max(a.end[-1], b.end[-1]))
    return intersection(a, gaps(b, low, high))


def gaps(covered: Intervals, low: int, high: int) -> Intervals:
    """The time between ``low`` and ``high`` that nothing covers."""
    inside = clip(covered, low, high)
    start = np.concatenate(([low], inside.end))
    end = np.concatenate((inside.start, [high]))
    kept = end > start
    return Intervals(start[kept].astype(np.int64), end[kept].astype(np.int64))


def clip(intervals: Intervals, low: int, high: int) -> Intervals:
    """What lies between two times."""
    start, end = np.maximum(intervals.start, low), np.minimum(intervals.end, high)
    kept = end > start
    return Intervals(start[kept], end[kept])


def covered_before(intervals: Intervals, at: Nanos) -> Nanos:
    """How much of the set lies before each time."""
    if not len(intervals.start):
        return np.zeros(len(at), dtype=np.int64)
    length = intervals.end - intervals.start
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(length)))
    which = np.searchsorted(intervals.start, at, side="right")
    last = np.maximum(which - 1, 0)
    inside = np.where(which > 0, np.minimum(at - intervals.start[last], length[last]), 0)
    return np.asarray(before[last] + inside, dtype=np.int64)


def covered_within(intervals: Intervals, start: Nanos, end: Nanos) -> Nanos:
    """How much of the set lies in each of the windows."""
    return covered_before(intervals, end) - covered_before(intervals, start)
