"""When every stage runs every pass: a max-plus walk over the schedule, with transfers between stages.

Streams are in order, so each start is the latest of a few ends. Such a system is monotone: nothing that gets faster can
make the step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ridgeline.errors import PlanError
from ridgeline.plan.schedule import BACKWARD, FORWARD, Schedule, Work, schedule


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one position of the model: forward, backward (input gradients) and weight gradients, and the way on.

    The first forward waits for its parameters (``ready_s``) and shares the device with their arrival, the last backward
    with gradients that leave.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    send_s: float  # activations to the next position, one micro-batch
    ready_s: float = 0.0  # when its parameters have arrived, counted from the start of the step
    extra_first_s: float = 0.0
    extra_last_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """One pass as it ran."""

    stage: int
    work: Work
    start_s: float
    end_s: float


FIRST, LATER, BACK, LAST, APART = range(5)
"""Passes that take equally long: first and later forwards, backwards and the last one, weight gradients apart."""


@dataclass(frozen=True)
class Program:
    """A schedule laid out so that every pass comes after those it waits for."""

    stage: tuple[int, ...]
    work: tuple[Work, ...]
    length: tuple[int, ...]  # kind of pass · positions + position
    waits: tuple[int, ...]  # index of the pass whose result travels here; -1 for none
    sends: tuple[int, ...]  # position whose transfer that is
    last: tuple[tuple[int, ...], ...]  # of each stage and chunk, the index of its last backward


@lru_cache(maxsize=256)
def program(order: Schedule) -> Program:
    """Resolve what waits for what, once for a schedule."""
    pp, num = len(order.orders), order.num_positions
    stage, works, length, waits, sends = list[int](), list[Work](), list[int](), list[int](), list[int]()
    made: dict[tuple[str, int, int, int], int] = {}
    last = [[-1] * order.num_chunks for _ in range(pp)]
    final = [{w.chunk: w.micro for w in one if w.kind == BACKWARD} for one in order.orders]
    at, waiting, todo = [0] * pp, dict[tuple[str, int, int, int], int](), list(range(pp))
    while todo:
        s = todo.pop()
        one = order.orders[s]
        while at[s] < len(one):
            work = one[at[s]]
            place, way = order.position(s, work.chunk), work.chunk if order.mirrored else 0
            need = _need(work, place, way, num)
            if need is not None and need not in made:
                waiting[need] = s
                break
            index = len(works)
            stage.append(s)
            works.append(work)
            ends = work.kind == BACKWARD and work.micro == final[s][work.chunk]
            kind = (FIRST if work.micro == 0 else LATER) if work.kind == FORWARD else (
                (LAST if ends else BACK) if work.kind == BACKWARD else APART)  # fmt: skip
            length.append(kind * num + place)
            waits.append(-1 if need is None else made[need])
            sends.append(min(place, place - 1 if work.kind == FORWARD else place))
            if ends:
                last[s][work.chunk] = index
            at[s] += 1
            key = (work.kind, work.micro, place, way)
            made[key] = index
            if key in waiting:
                todo.append(waiting.pop(key))
    if any(at[s] < len(order.orders[s]) for s in range(pp)):
        raise PlanError("a pipeline schedule cannot go on: some pass waits for one that never runs")
    return Program(tuple(stage), tuple(works), tuple(length), tuple(waits), tuple(sends), tuple(map(tuple, last)))


def _need(work: Work, place: int, way: int, num: int) -> tuple[str, int, int, int] | None:
    """The pass whose result this one reads from another stage."""
    if work.kind == FORWARD:
        return None if place == 0 else (FORWARD, work.micro, place - 1, way)
    if work.kind == BACKWARD:
        return None if place == num - 1 else (BACKWARD, work.micro, place + 1, way)
    return None


@dataclass(frozen=True)
class Timeline:
    """All passes of all stages, and when each stage ended."""

    program: Program
    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    end_s: tuple[float, ...]  # of each stage
    walked_busy_s: tuple[float, ...]
    skipped_s: float = 0.0  # of a steady stretch that is like the rest and was not walked
    skipped_busy_s: tuple[float, ...] = ()

    @property
    def last_s(self) -> float:
        return max(self.end_s)

    def busy_s(self, stage: int) -> float:
        return self.walked_busy_s[stage] + (self.skipped_busy_s[stage] if self.skipped_busy_s else 0.0)

    def last_backward(self, stage: int, chunk: int) -> tuple[float, float]:
        """When a chunk's last backward ran; the skipped stretch lies before it."""
        at = self.program.last[stage][chunk]
        return self.start_s[at] + self.skipped_s, self.finish_s[at] + self.skipped_s

    @cached_property
    def done(self) -> tuple[tuple[Done, ...], ...]:
        """The walked passes of each stage in order."""
        found: list[list[Done]] = [[] for _ in self.end_s]
        for s, work, start, end in zip(self.program.stage, self.program.work, self.start_s, self.finish_s, strict=True):
            found[s].append(Done(s, work, start, end))
        return tuple(map(tuple, found))


def run_pipeline(order: Schedule, passes: Sequence[Pass], slow: Sequence[float] = ()) -> Timeline:
    """A pass starts when its stage is free and what it reads has arrived; ``slow`` stretches the passes of stages."""
    made, pp, num = program(order), len(order.orders), order.num_positions
    table = _lengths(passes[:num], order.split)
    ready = {p: passes[p].ready_s for p in range(num) if passes[p].ready_s > 0.0}
    send = [p.send_s for p in passes]
    free, busy = [0.0] * pp, [0.0] * pp
    factor = list(slow) or [1.0] * pp
    starts, ends = list[float](), list[float]()
    for s, kind, wait, via in zip(made.stage, made.length, made.waits, made.sends, strict=True):
        start = free[s]
        if wait >= 0:
            arrived = ends[wait] + send[via]
            if arrived > start:
                start = arrived
        if kind < num and kind in ready and ready[kind] > start:
            start = ready[kind]
        length = table[kind] * factor[s]
        end = start + length
        busy[s] += length
        free[s] = end
        starts.append(start)
        ends.append(end)
    return Timeline(made, tuple(starts), tuple(ends), tuple(free), tuple(busy))


def _lengths(passes: Sequence[Pass], split: bool) -> list[float]:
    """Seconds of each kind of pass at each position, in the order of the kinds."""
    backward = [p.backward_s + (0.0 if split else p.weight_s) for p in passes]
    return [
        *(p.forward_s + p.extra_first_s for p in passes),
        *(p.forward_s for p in passes),
        *backward,
        *(b + p.extra_last_s for b, p in zip(backward, passes, strict=True)),
        *(p.weight_s for p in passes),
    ]


def run_steady(name: str, pp: int, num_micro: int, vp: int, passes: Sequence[Pass],
               slow: Sequence[float] = ()) -> tuple[Schedule, Timeline]:  # fmt: skip
    """Like ``run_pipeline``; of many micro-batches only as many are walked as it takes to be periodic."""
    step = pp * (2 if name == "dualpipe" else 1)
    # Rounds of ``pp`` micro-batches after which every further round takes as long as the last
    rounds = (num_micro - 2 * step) // step
    odd = name in ("zero-bubble", "dualpipe") or (vp > 1 and num_micro % pp)  # greedy and uneven ones have no period
    if rounds < 1 or (odd and num_micro <= 64 * pp):
        order = schedule(name, pp, num_micro, vp)
        return order, run_pipeline(order, passes, slow)
    shorter = num_micro - rounds * step
    order = schedule(name, pp, shorter, vp)
    short = run_pipeline(order, passes, slow)
    longer = run_pipeline(schedule(name, pp, shorter + step, vp), passes, slow)
    more_s = (longer.last_s - short.last_s) * rounds
    busy = tuple((longer.busy_s(s) - short.busy_s(s)) * rounds for s in range(pp))
    return order, Timeline(short.program, short.start_s, short.finish_s, tuple(e + more_s for e in short.end_s),
                           short.walked_busy_s, more_s, busy)  # fmt: skip
