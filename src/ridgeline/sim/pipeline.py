"""When every stage runs every pass: a max-plus walk over the schedule, with transfers and links that queue.

Streams are in order, so each start is the latest of a few ends. Such a system is monotone: nothing that gets faster can
make the step slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.plan.schedule import BACKWARD, FORWARD, WEIGHT, Schedule, Work, schedule


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one position of the model: forward, backward (input gradients) and weight gradients, and the way on.

    ``first_s`` and ``last_s`` are longer first forwards and last backwards: gradients and parameters travel meanwhile.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    send_s: float  # activations to the next position, one micro-batch
    ready_s: float = 0.0  # when its parameters have arrived, counted from the start of the step
    extra_first_s: float = 0.0  # interference of the parameters' arrival with the first forward
    extra_last_s: float = 0.0  # interference of gradients leaving with the last backward


@dataclass(frozen=True, slots=True)
class Done:
    """One pass as it ran."""

    stage: int
    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All passes of all stages, and when each stage ended."""

    done: tuple[tuple[Done, ...], ...]
    end_s: tuple[float, ...]
    skipped_s: float = 0.0  # of a steady stretch that is like the rest and was not walked
    skipped_busy_s: tuple[float, ...] = ()

    @property
    def last_s(self) -> float:
        return max(self.end_s)

    def busy_s(self, stage: int) -> float:
        walked = sum(d.end_s - d.start_s for d in self.done[stage])
        return walked + (self.skipped_busy_s[stage] if self.skipped_busy_s else 0.0)


STEADY = 2
"""Rounds of ``pp`` micro-batches after which every further round takes as long as the last."""


def run_steady(name: str, pp: int, num_micro: int, vp: int, passes: Sequence[Pass],
               slow: Sequence[float] = ()) -> tuple[Schedule, Timeline]:  # fmt: skip
    """Like ``run_pipeline``; of many micro-batches only as many are walked as it takes to be periodic."""
    step = pp * (2 if name == "dualpipe" else 1)
    rounds = (num_micro - STEADY * step) // step
    if rounds < 1 or (name == "zero-bubble" and num_micro <= 64 * pp):  # greedy orders have no exact period
        order = schedule(name, pp, num_micro, vp)
        return order, run_pipeline(order, passes, slow=slow)
    shorter = num_micro - rounds * step
    order = schedule(name, pp, shorter, vp)
    short = run_pipeline(order, passes, slow=slow)
    longer = run_pipeline(schedule(name, pp, shorter + step, vp), passes, slow=slow)
    more_s = (longer.last_s - short.last_s) * rounds
    busy = tuple((longer.busy_s(s) - short.busy_s(s)) * rounds for s in range(pp))
    return order, Timeline(short.done, tuple(e + more_s for e in short.end_s), more_s, busy)


def run_pipeline(plan: Schedule, passes: Sequence[Pass], *, hidden: bool = True,
                 slow: Sequence[float] = ()) -> Timeline:  # fmt: skip
    """Walk the orders: a pass starts when its stage is free and what it reads has arrived.

    ``hidden`` transfers run beside compute; others hold the sender too. ``slow`` stretches the passes of each stage.
    """
    return _Runner(plan, passes, hidden, slow).run()


class _Runner:
    def __init__(self, plan: Schedule, passes: Sequence[Pass], hidden: bool, slow: Sequence[float]) -> None:
        self.plan, self.passes, self.hidden = plan, passes, hidden
        self.pp = len(plan.orders)
        self.slow = list(slow) or [1.0] * self.pp
        self.ends: dict[tuple[str, int, int, int], float] = {}  # (kind, micro, position, direction) → arrival
        self.at = [0] * self.pp
        self.free = [0.0] * self.pp
        self.done: list[list[Done]] = [[] for _ in range(self.pp)]
        self.last_micro = [self._last(order) for order in plan.orders]

    def _last(self, order: Sequence[Work]) -> dict[int, int]:
        """The micro-batch whose backward comes last, for each chunk."""
        return {w.chunk: w.micro for w in order if w.kind == BACKWARD}

    def run(self) -> Timeline:
        waiting: dict[tuple[str, int, int, int], int] = {}
        todo = list(range(self.pp))
        while todo:
            stage = todo.pop()
            order = self.plan.orders[stage]
            while self.at[stage] < len(order):
                work = order[self.at[stage]]
                need = self._need(stage, work)
                if need is not None and need not in self.ends:
                    waiting[need] = stage
                    break
                for key in self._execute(stage, work, self.ends[need] if need is not None else 0.0):
                    if key in waiting:
                        todo.append(waiting.pop(key))
                self.at[stage] += 1
        return Timeline(tuple(map(tuple, self.done)), tuple(self.free))

    def _need(self, stage: int, work: Work) -> tuple[str, int, int, int] | None:
        at, way = self.plan.position(stage, work.chunk), work.chunk if self.plan.mirrored else 0
        if work.kind == FORWARD:
            return None if at == 0 else (FORWARD, work.micro, at - 1, way)
        if work.kind == BACKWARD:
            if at == self.plan.num_positions - 1:
                return None
            return (BACKWARD, work.micro, at + 1, way)
        return None

    def _execute(self, stage: int, work: Work, arrived_s: float) -> list[tuple[str, int, int, int]]:
        at, way = self.plan.position(stage, work.chunk), work.chunk if self.plan.mirrored else 0
        own = self.passes[at]
        start = max(self.free[stage], arrived_s)
        length, sends = own.weight_s, False
        if work.kind == FORWARD:
            length = own.forward_s
            if work.micro == 0:
                start, length = max(start, own.ready_s), length + own.extra_first_s
            sends = at < self.plan.num_positions - 1
        elif work.kind == BACKWARD:
            length = own.backward_s + (0.0 if self.plan.split else own.weight_s)
            if work.micro == self.last_micro[stage][work.chunk]:
                length += own.extra_last_s
            sends = at > 0
        end = start + length * self.slow[stage]
        self.done[stage].append(Done(stage, work, start, end))
        send_s = 0.0
        if sends:
            send_s = own.send_s if work.kind == FORWARD else self.passes[at - 1].send_s
        self.free[stage] = end if self.hidden else end + send_s
        if work.kind == WEIGHT:
            return []
        key = (work.kind, work.micro, at, way)
        self.ends[key] = end + send_s
        return [key]
