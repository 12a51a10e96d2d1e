"""Sets of intervals obey the laws of sets, and call stacks those of nesting, for any input."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.trace.intervals import Intervals, clip, covered_within, difference, gaps, intersection, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.nesting import stacks_of

_PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=14)


def _set(pairs) -> Intervals:
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    return union(start, start + np.array([n for _, n in pairs], dtype=np.int64))


def _moments(intervals: Intervals) -> set[int]:
    return {t for a, b in zip(intervals.start.tolist(), intervals.end.tolist(), strict=True) for t in range(a, b)}


@given(_PAIRS)
def test_a_union_covers_what_its_members_do_in_disjoint_order(pairs):
    found = _set(pairs)
    assert _moments(found) == {t for a, n in pairs for t in range(a, a + n)}
    assert (found.end > found.start).all() and (found.start[1:] > found.end[:-1]).all()
    assert found.total == len(_moments(found))


@given(_PAIRS, _PAIRS)
def test_intersection_and_difference_are_those_of_sets(a, b):
    one, other = _set(a), _set(b)
    assert _moments(intersection(one, other)) == _moments(one) & _moments(other)
    assert _moments(difference(one, other)) == _moments(one) - _moments(other)


@given(_PAIRS, st.integers(0, 40), st.integers(0, 40))
def test_gaps_and_clip_divide_a_window(pairs, low, size):
    found, high = _set(pairs), low + size
    inside, free = clip(found, low, high), gaps(found, low, high)
    assert inside.total + free.total == high - low
    assert not _moments(inside) & _moments(free)


@given(_PAIRS, _PAIRS)
def test_what_windows_cover_is_counted_moment_by_moment(pairs, windows):
    found = _set(pairs)
    start = np.array([a for a, _ in windows], dtype=np.int64)
    end = start + np.array([n for _, n in windows], dtype=np.int64)
    moments = _moments(found)
    expected = [sum(t in moments for t in range(a, b)) for a, b in zip(start.tolist(), end.tolist(), strict=True)]
    assert covered_within(found, start, end).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 1), st.booleans()), max_size=16))
def test_a_parent_encloses_its_child_on_the_same_thread_and_none_lies_between(rows):
    start = np.array([a for a, *_ in rows], dtype=np.int64)
    end = start + np.array([n for _, n, *_ in rows], dtype=np.int64)
    thread = np.array([t for *_, t, _ in rows], dtype=np.int32)
    kind = np.array([Kind.RUNTIME if leaf else Kind.OP for *_, leaf in rows], dtype=np.int8)
    stacks = stacks_of(start, end, kind, thread)
    for child, parent in enumerate(stacks.parent.tolist()):
        if parent < 0:
            continue
        assert thread[parent] == thread[child] and kind[parent] != Kind.RUNTIME
        assert start[parent] <= start[child] and end[child] <= end[parent]
    assert sorted(row for level in stacks.levels for row in level.tolist()) == list(range(len(rows)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_spans_within_spans_are_found_at_their_depth(widths):
    total = 2 * sum(widths)
    edges = np.cumsum([0, *widths[:-1]])
    start, end = edges.astype(np.int64), (total - edges).astype(np.int64)
    stacks = stacks_of(start, end, np.full(len(widths), Kind.OP, np.int8), np.zeros(len(widths), np.int32))
    assert stacks.parent.tolist() == [-1, *range(len(widths) - 1)]
    assert stacks.inherit(np.array([7] + [0] * (len(widths) - 1), np.int32)).tolist() == [7] * len(widths)
