"""Which host span lies inside which: call stacks rebuilt from times, and what a span inherits from those around it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.intervals import Nanos
from ridgeline.trace.kind import Kind

Ids = NDArray[np.int32]
#: Spans of equal times nest in this order, outermost first.
_OUTER = (Kind.STEP, Kind.ANNOTATION, Kind.DATALOADER, Kind.PYTHON, Kind.GC, Kind.OTHER, Kind.OP, Kind.RUNTIME)


@dataclass(frozen=True, slots=True)
class Stacks:
    """The innermost enclosing span of each, and the spans of each depth, outermost first."""

    parent: Ids
    levels: tuple[NDArray[np.intp], ...]

    def inherit(self, own: NDArray[np.int32], absent: int = 0) -> NDArray[np.int32]:
        """A span's own value, or that of the nearest span around it that has one."""
        found = own.copy()
        for rows in self.levels[1:]:
            empty = rows[found[rows] == absent]
            found[empty] = found[self.parent[empty]]
        return found


def stacks_of(start: Nanos, end: Nanos, kind: NDArray[np.int8], thread: Ids, slack_ns: int = 0) -> Stacks:
    """Nests the spans of each thread; a child may outlast its parent by the clock's resolution.

    Rows with a negative thread take no part and have no parent.
    """
    # Host rows by thread, then time, an enclosing span before what it encloses
    outer = np.zeros(128, dtype=np.int8)
    outer[[int(k) for k in _OUTER]] = np.arange(len(_OUTER))
    rows = np.flatnonzero(thread >= 0)
    order = np.lexsort((outer[kind[rows]], -end[rows], start[rows], thread[rows]))
    order = np.asarray(rows[order], dtype=np.intp)
    leaf = kind[order] == Kind.RUNTIME  # calls hold nothing, and are most of what there is
    inner = order[~leaf]
    parent_at, depth_at = _walk(start[inner].tolist(), end[inner].tolist(), thread[inner].tolist(), slack_ns)
    parent = np.full(len(start), -1, dtype=np.int32)
    depth = np.zeros(len(start), dtype=np.int32)
    above = np.array(parent_at, dtype=np.int64)
    inside = above >= 0
    parent[inner[inside]] = inner[above[inside]]
    depth[inner] = depth_at
    calls = order[leaf]
    parent[calls] = _around(start, end, thread, parent, calls, order, leaf, slack_ns)
    depth[calls] = np.where(parent[calls] >= 0, depth[np.maximum(parent[calls], 0)] + 1, 0)
    return Stacks(parent, _levels(order, depth[order]))


def _around(
    start: Nanos,
    end: Nanos,
    thread: Ids,
    parent: Ids,
    calls: NDArray[np.intp],
    order: NDArray[np.intp],
    leaf: NDArray[np.bool_],
    slack_ns: int,
) -> Ids:
    """The innermost span around each call: from the last one begun, outward until one has not ended."""
    last = np.maximum.accumulate(np.where(leaf, -1, np.arange(len(order))))  # the span before each in the order
    found = np.where(last[leaf] >= 0, order[np.maximum(last[leaf], 0)], -1).astype(np.int32)
    rows = np.flatnonzero(found >= 0)
    while len(rows):
        at, call = found[rows], calls[rows]
        other = thread[at] != thread[call]
        ended = (end[at] <= start[call]) | (end[at] + slack_ns < end[call])
        found[rows[other]] = -1
        rows, at = rows[ended & ~other], at[ended & ~other]
        found[rows] = parent[at]
        rows = rows[found[rows] >= 0]
    return found


def _walk(start: list[int], end: list[int], thread: list[int], slack_ns: int) -> tuple[list[int], list[int]]:
    """One pass with a stack of open spans; a plain loop is a third of a second per million."""
    parents, depths = [-1] * len(start), [0] * len(start)
    open_rows: list[int] = []
    open_ends: list[int] = []
    current = -1
    for row, (starts, ends, on) in enumerate(zip(start, end, thread, strict=True)):
        if on != current:
            current = on
            open_rows.clear()
            open_ends.clear()
        while open_ends and open_ends[-1] <= starts:
            open_ends.pop()
            open_rows.pop()
        if open_ends:
            at = len(open_ends) - 1
            while at >= 0 and open_ends[at] + slack_ns < ends:  # they overlap without nesting
                at -= 1
            if at >= 0:
                above = open_rows[at]
                parents[row] = above
                depths[row] = depths[above] + 1
        open_rows.append(row)
        open_ends.append(ends)
    return parents, depths


def _levels(order: NDArray[np.intp], depth: Ids) -> tuple[NDArray[np.intp], ...]:
    by_depth = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    rows = order[by_depth]
    return tuple(rows[a:b] for a, b in pairwise(edges))
