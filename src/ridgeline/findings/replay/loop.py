"""A recorded stretch as one round of a loop: played several times over, so that what one step gives the next is
counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.findings.replay.program import Wiring
from ridgeline.findings.replay.replay import NONE, Index, Program, run
from ridgeline.findings.replay.window import MAX_WORKS, Window

ROUNDS = 3
"""The first fills the queue, the others are what a long run repeats."""


@dataclass(frozen=True, slots=True)
class Loop:
    """How rounds follow each other: after which call the next begins, and which waits are only the recording's end."""

    num_steps: int
    end_call: int
    last_waits: Index

    def step_s(self, program: Program) -> float:
        """Seconds a step takes in the steady state."""
        if self.end_call < 0:
            return run(program).end_s / self.num_steps
        done = run(_repeated(program, self))
        ends = [_end_s(done.call_end_s, program.num_calls, i, done.work_end_s, program.num_works) for i in (0, -1)]
        return max(0.0, ends[1] - ends[0]) / ((ROUNDS - 1) * self.num_steps)


def loop_of(wiring: Wiring, window: Window) -> Loop:
    """Recorded steps repeat if there are few enough of them; a recording without steps is taken as it is."""
    marks = np.flatnonzero(wiring.call_rows < 0)
    works = wiring.program.num_works
    # Of a longer recording the first step's lead and the last one's tail are too small a share to matter.
    repeats = window.is_marked and window.num_steps <= 12 and 0 < works * ROUNDS <= MAX_WORKS
    if not repeats or len(marks) < 2:
        return Loop(window.num_steps, NONE, np.zeros(0, dtype=np.int64))
    return Loop(window.num_steps, int(marks[-1]), _last_waits(wiring.program, marks))


def _last_waits(program: Program, marks: Index) -> Index:
    """Waits at the end of the last step that the steps before it do not have: whoever recorded waited there."""
    launches = np.zeros(program.num_calls, dtype=bool)
    launches[program.call] = True
    waits = np.flatnonzero(program.waits_for >= 0)
    bounds = [*marks[1:-1].tolist(), program.num_calls]
    trailing = list[Index]()
    for start, end in zip([int(marks[0]), *bounds[:-1]], bounds, strict=True):
        own = np.flatnonzero(launches[start:end])
        last = start + int(own[-1]) if len(own) else start
        trailing.append(waits[(waits > last) & (waits < end)])
    usual = min((len(found) for found in trailing[:-1]), default=len(trailing[-1]))
    return trailing[-1][usual:]


def _repeated(program: Program, loop: Loop) -> Program:
    """The program several times in a row; each round begins where the host of the one before is done with its steps."""
    calls, works = program.num_calls, program.num_works
    round_of_call = np.repeat(np.arange(ROUNDS), calls)
    round_of_work = np.repeat(np.arange(ROUNDS), works)
    after = np.tile(program.after, ROUNDS)
    follows = np.where(round_of_call > 0, (round_of_call - 1) * calls + loop.end_call, NONE)
    waits_for = program.waits_for.copy()
    waits_for[loop.last_waits] = NONE
    waits = np.tile(waits_for, ROUNDS)
    depends = np.tile(program.depends_on, ROUNDS)
    return Program(
        after=np.where(after >= 0, after + round_of_call * calls, follows),
        gap_s=np.tile(program.gap_s, ROUNDS),
        own_s=np.tile(program.own_s, ROUNDS),
        waits_for=np.where(waits >= 0, waits + round_of_call * works, NONE),
        return_s=np.tile(program.return_s, ROUNDS),
        call=np.tile(program.call, ROUNDS) + round_of_work * calls,
        stream=np.tile(program.stream, ROUNDS),
        latency_s=np.tile(program.latency_s, ROUNDS),
        stream_gap_s=np.tile(program.stream_gap_s, ROUNDS),
        depends_on=np.where(depends >= 0, depends + round_of_work * works, NONE),
        depend_gap_s=np.tile(program.depend_gap_s, ROUNDS),
        duration_s=np.tile(program.duration_s, ROUNDS),
    )


def _end_s(call_end_s: np.ndarray, num_calls: int, which: int, work_end_s: np.ndarray, num_works: int) -> float:
    """When everything of the first or of the last round was done."""
    calls = call_end_s[:num_calls] if which == 0 else call_end_s[-num_calls:]
    works = work_end_s[:num_works] if which == 0 else work_end_s[-num_works:]
    return max(float(calls.max(initial=0.0)), float(works.max(initial=0.0)))
