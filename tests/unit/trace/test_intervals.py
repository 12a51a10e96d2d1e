"""Sets of intervals against nanoseconds counted one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.trace.intervals import (
    Intervals,
    clip,
    covered_before,
    covered_within,
    difference,
    gaps,
    intersection,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6)
SIZE = 40


def made(spans: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in spans], dtype=np.int64)
    return union(start, start + np.array([n for _, n in spans], dtype=np.int64))


def counted(intervals: Intervals) -> np.ndarray:
    """Which nanoseconds are covered."""
    found = np.zeros(SIZE, dtype=int)
    for start, end in zip(*intervals, strict=True):
        found[start:end] += 1
    return found


def test_intervals_that_touch_are_one() -> None:
    found = union(np.array([0, 5, 20]), np.array([5, 9, 21]))
    assert (found.start.tolist(), found.end.tolist()) == ([0, 20], [9, 21])


@given(SPANS, SPANS, st.integers(0, 20), st.integers(0, 19))
def test_sets_of_intervals_are_sets_of_nanoseconds(one, other, low, more) -> None:
    a, b, high = made(one), made(other), low + more
    at_a, at_b, inside = counted(a), counted(b), np.zeros(SIZE, dtype=int)
    inside[low:high] = 1
    for spans, found in ((one, at_a), (other, at_b)):
        meant = {t for start, num in spans for t in range(start, start + num)}
        assert set(np.flatnonzero(found).tolist()) == meant and found.max() <= 1
    assert counted(intersection(a, b)).tolist() == (at_a & at_b).tolist()
    assert counted(difference(a, b)).tolist() == (at_a & ~at_b & 1).tolist()
    assert counted(gaps(a, low, high)).tolist() == (inside & ~at_a & 1).tolist()
    assert counted(clip(a, low, high)).tolist() == (inside & at_a).tolist()
    assert a.total == at_a.sum()
    times = np.arange(SIZE)
    assert covered_before(a, times).tolist() == [int(at_a[:t].sum()) for t in times]
    assert covered_within(a, np.array([low]), np.array([high])).tolist() == [int(at_a[low:high].sum())]
