"""Pipeline schedules: the order in which each stage runs forward and backward passes of its model chunks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ridgeline.errors import PlanError, nearest

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


class Work(NamedTuple):
    """One pass of one chunk over one micro-batch; ``WEIGHT`` is the part of backward that nothing waits for."""

    kind: str
    micro: int
    chunk: int


Order = tuple[Work, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Orders of all stages. ``split`` says that weight gradients run apart from input gradients."""

    orders: tuple[Order, ...]
    num_chunks: int
    split: bool
    mirrored: bool = False  # chunk 1 runs through the stages backward (dual pipe)

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model a chunk of a stage lies: 0 is the part with the embedding."""
        pp = len(self.orders)
        if self.mirrored:
            return stage if chunk == 0 else pp - 1 - stage
        return chunk * pp + stage

    @property
    def num_positions(self) -> int:
        return len(self.orders) * (1 if self.mirrored else self.num_chunks)


@lru_cache(maxsize=512)
def schedule(name: str, pp: int, num_micro: int, vp: int = 1) -> Schedule:
    """The orders of every stage for so many micro-batches."""
    if name not in _MAKERS:
        raise PlanError(f"unknown pipeline schedule {name!r}{nearest(name, _MAKERS)}")
    return _MAKERS[name](pp, num_micro, vp)


def _one_f_one_b(pp: int, num_micro: int, vp: int) -> Schedule:
    """Warm up with as many forwards as stages follow, then alternate: at most ``pp`` micro-batches are in flight."""
    if vp > 1:
        return _interleaved(pp, num_micro, vp)
    orders = []
    for stage in range(pp):
        warm = min(num_micro, pp - stage - 1)
        order = [Work(FORWARD, i, 0) for i in range(warm)]
        for i in range(num_micro - warm):
            order += [Work(FORWARD, warm + i, 0), Work(BACKWARD, i, 0)]
        order += [Work(BACKWARD, i, 0) for i in range(num_micro - warm, num_micro)]
        orders.append(tuple(order))
    return Schedule(tuple(orders), 1, False)


def _gpipe(pp: int, num_micro: int, vp: int) -> Schedule:
    """All forwards, then all backwards."""
    order = [Work(FORWARD, i, c) for c in range(vp) for i in range(num_micro)]
    order += [Work(BACKWARD, i, c) for c in reversed(range(vp)) for i in range(num_micro)]
    return Schedule((tuple(order),) * pp, vp, False)


def _interleaved(pp: int, num_micro: int, vp: int) -> Schedule:
    """Each stage holds ``vp`` chunks and walks micro-batches in rounds of ``pp``, so the bubble shrinks by ``vp``."""
    if vp == 1:
        return _one_f_one_b(pp, num_micro, 1)
    # Micro-batches that go through all chunks together: `pp` of them, or a few more where they do not divide
    num = max(1, num_micro // pp)
    each, more = divmod(num_micro, num)
    sizes = [each + (i < more) for i in range(num)]
    # (micro-batch, chunk) in the order of forwards: a round of micro-batches through all chunks, then the next
    found, start = list[tuple[int, int]](), 0
    for size in sizes:
        found += [(m, c) for c in range(vp) for m in range(start, start + size)]
        start += size
    walk, largest = found, max(sizes)
    total = len(walk)
    orders = []
    for stage in range(pp):
        warm = min(total, (pp - stage - 1) * 2 + (vp - 1) * largest)
        order = [Work(FORWARD, m, c) for m, c in walk[:warm]]
        back = [Work(BACKWARD, m, vp - 1 - c) for m, c in walk]
        for i in range(total - warm):
            m, c = walk[warm + i]
            order += [Work(FORWARD, m, c), back[i]]
        orders.append((*order, *back[total - warm :]))
    return Schedule(tuple(orders), vp, False)


def _zero_bubble(pp: int, num_micro: int, vp: int) -> Schedule:
    """One forward, one backward with weight gradients apart: they fill what would be bubbles."""
    if vp > 1:
        raise PlanError(f"zero-bubble keeps one chunk a stage, not vp={vp}: use vp=1, or the interleaved schedule")
    limit = [pp - s for s in range(pp)]
    return Schedule(_greedy(pp, num_micro, lambda s: [(0, m) for m in range(num_micro)], limit, 1, False), 1, True)


def _dual_pipe(pp: int, num_micro: int, vp: int) -> Schedule:
    """Micro-batches enter at both ends: every stage holds a chunk of either direction, their phases interleave."""
    if vp > 1:
        raise PlanError(f"dualpipe holds one chunk of each direction, not vp={vp}: use vp=1")
    if num_micro % 2 or pp % 2:
        raise PlanError(
            f"dualpipe needs an even number of stages and micro-batches, not pp={pp} and {num_micro}; "
            f"the nearest legal ones are {pp + pp % 2} and {num_micro + num_micro % 2}"
        )
    half = num_micro // 2
    feeds = [(d, m) for m in range(half) for d in (0, 1)]
    # Backward first holds about `pp` micro-batches; the limit of the paper, one more, binds from some 20 stages on.
    made = _greedy(pp, half, lambda s: feeds, [pp + 1] * pp, 2, True)
    return Schedule(made, 2, True, True)


def _greedy(pp: int, num_micro: int, feed: Callable[[int], list[tuple[int, int]]], limit: list[int], chunks: int,
            mirrored: bool) -> tuple[Order, ...]:  # fmt: skip
    """List scheduling with unit passes: backward first, then forward within the memory limit, else weight gradients."""
    walk = _Walk(pp, num_micro, chunks, limit, mirrored)
    for stage in range(pp):
        walk.feed(stage, feed(stage))
    return walk.run()


class _Walk:
    """A clock over stages that always have the most urgent ready pass to do."""

    def __init__(self, pp: int, num_micro: int, chunks: int, limit: list[int], mirrored: bool) -> None:
        self.pp, self.chunks, self.limit, self.mirrored = pp, chunks, limit, mirrored
        self.ready: list[list[tuple[int, int, Work]]] = [[] for _ in range(pp)]  # (urgency, micro, work)
        self.flying, self.owed = [0] * pp, [0] * pp
        self.orders: list[list[Work]] = [[] for _ in range(pp)]
        self.left = pp * num_micro * chunks * 3
        self.busy = [False] * pp
        self.events: list[tuple[int, int, Work]] = []

    def feed(self, stage: int, starts: list[tuple[int, int]]) -> None:
        for chunk, micro in starts:
            if self.position(stage, chunk) == 0:
                heapq.heappush(self.ready[stage], (1, micro, Work(FORWARD, micro, chunk)))

    def position(self, stage: int, chunk: int) -> int:
        return self.pp - 1 - stage if self.mirrored and chunk else stage

    def stage(self, position: int, chunk: int) -> int:
        return self.position(position, chunk)

    def run(self) -> tuple[Order, ...]:
        now = 0
        while self.left:
            for stage in range(self.pp):
                if not self.busy[stage]:
                    self._start(stage, now)
            if not self.events:
                raise PlanError("a pipeline schedule cannot go on: no pass is ready")
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, stage, work = heapq.heappop(self.events)
                self.busy[stage] = False
                self._finish(stage, work)
        return tuple(tuple(order) for order in self.orders)

    def _start(self, stage: int, now: int) -> None:
        queue, held = self.ready[stage], []
        if self.owed[stage] > (2 if self.mirrored else 1) and queue:  # weight gradients may wait, but not for long
            queue = self.ready[stage] = [(-1 if i[2].kind == WEIGHT else i[0], *i[1:]) for i in queue]
            heapq.heapify(queue)
        while queue:
            item = heapq.heappop(queue)
            if item[2].kind == FORWARD and self.flying[stage] >= self.limit[stage]:
                held.append(item)
                continue
            work = item[2]
            self.flying[stage] += (work.kind == FORWARD) - (work.kind == BACKWARD)
            self.owed[stage] += (work.kind == BACKWARD) - (work.kind == WEIGHT)
            self.orders[stage].append(work)
            self.busy[stage] = True
            heapq.heappush(self.events, (now + 1, stage, work))
            break
        for item in held:
            heapq.heappush(queue, item)

    def _finish(self, stage: int, work: Work) -> None:
        self.left -= 1
        at, chunk = self.position(stage, work.chunk), work.chunk
        if work.kind == FORWARD:
            if at == self.pp - 1:
                heapq.heappush(self.ready[stage], (0, work.micro, work._replace(kind=BACKWARD)))
            else:
                heapq.heappush(self.ready[self.stage(at + 1, chunk)], (1, work.micro, work))
        elif work.kind == BACKWARD:
            heapq.heappush(self.ready[stage], (2, work.micro, work._replace(kind=WEIGHT)))
            if at:
                heapq.heappush(self.ready[self.stage(at - 1, chunk)], (0, work.micro, work))


_MAKERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": _one_f_one_b,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "dualpipe": _dual_pipe,
}


def in_flight(order: Order, split: bool) -> list[int]:
    """Micro-batches whose activations a stage holds after each pass, chunks counted apart."""
    held, found = 0, []
    last = WEIGHT if split else BACKWARD
    for work in order:
        held += (work.kind == FORWARD) - (work.kind == last)
        found.append(held)
    return found
