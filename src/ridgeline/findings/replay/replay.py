"""Replaying a run: host calls, the device work they launch and what waits for what, scheduled again after a change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What ran, as constraints instead of times.

    A call starts ``gap_s`` after the call ``after`` it follows has ended and takes ``own_s`` of its thread; one that
    waits for device work (``waits_for``) returns ``return_s`` after that work has ended. Work starts no earlier than
    ``latency_s`` after the start of its call, ``stream_gap_s`` after the work before it on its stream, and
    ``depend_gap_s`` after the work of another stream it depends on. Calls are in the order in which they start, work in
    the order of its calls.
    """

    after: Index
    gap_s: Seconds
    own_s: Seconds
    waits_for: Index
    return_s: Seconds
    call: Index  # of each piece of work
    stream: Index
    latency_s: Seconds
    stream_gap_s: Seconds
    depends_on: Index
    depend_gap_s: Seconds
    duration_s: Seconds

    @property
    def num_calls(self) -> int:
        return len(self.after)

    @property
    def num_works(self) -> int:
        return len(self.call)

    @property
    def num_streams(self) -> int:
        return int(self.stream.max(initial=NONE)) + 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """When every call and every piece of work ran; the first call starts at 0."""

    call_start_s: Seconds
    call_end_s: Seconds
    work_start_s: Seconds
    work_end_s: Seconds

    @property
    def end_s(self) -> float:
        """When the last of all is done."""
        return max(float(self.call_end_s.max(initial=0.0)), float(self.work_end_s.max(initial=0.0)))


def run(program: Program) -> Schedule:
    """Schedule every call and every piece of work as early as its constraints allow."""
    p = program
    first = np.searchsorted(p.call, np.arange(p.num_calls + 1)).tolist()
    call_start, call_end = [0.0] * p.num_calls, [0.0] * p.num_calls
    work_start, work_end = [0.0] * p.num_works, [0.0] * p.num_works
    free_at = [float("-inf")] * p.num_streams
    work = list(
        zip(
            p.stream.tolist(),
            p.latency_s.tolist(),
            p.stream_gap_s.tolist(),
            p.depends_on.tolist(),
            p.depend_gap_s.tolist(),
            p.duration_s.tolist(),
        )
    )
    calls = zip(p.after.tolist(), p.gap_s.tolist(), p.own_s.tolist(), p.waits_for.tolist(), p.return_s.tolist())
    for c, (after, gap, own, waits_for, returned) in enumerate(calls):
        started = gap if after < 0 else call_end[after] + gap
        for w in range(first[c], first[c + 1]):
            stream, latency, stream_gap, depends_on, depend_gap, duration = work[w]
            at = started + latency if latency > -started else 0.0
            freed = free_at[stream] + stream_gap
            if freed > at:
                at = freed
            if depends_on >= 0 and work_end[depends_on] + depend_gap > at:
                at = work_end[depends_on] + depend_gap
            work_start[w] = at
            work_end[w] = done = at + duration
            if done > free_at[stream]:
                free_at[stream] = done
        ended = started + own
        if waits_for >= 0 and work_end[waits_for] + returned > ended:
            ended = work_end[waits_for] + returned
        call_start[c], call_end[c] = started, ended
    return Schedule(np.array(call_start), np.array(call_end), np.array(work_start), np.array(work_end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change to a program: host time cut, work made faster, waits dropped, work moved out of the way.

    ``cut_before`` and ``cut_inside`` are the shares of host time saved before and inside a call; ``scale`` multiplies
    the duration of each piece of work.
    """

    cut_before: Seconds
    cut_inside: Seconds
    scale: Seconds
    freed: Mask  # calls that no longer wait
    aside: Mask  # work that moves to a stream of its own kind, beside the one it held up
    closed: Mask  # work that follows what is before it on its stream at once

    def __or__(self, other: Edit) -> Edit:
        """Both changes; the time they cut must be different time, which the budget sees to."""
        return Edit(
            cut_before=self.cut_before + other.cut_before,
            cut_inside=self.cut_inside + other.cut_inside,
            scale=self.scale * other.scale,
            freed=self.freed | other.freed,
            aside=self.aside | other.aside,
            closed=self.closed | other.closed,
        )


def no_edit(program: Program) -> Edit:
    calls, works = program.num_calls, program.num_works
    return Edit(
        cut_before=np.zeros(calls),
        cut_inside=np.zeros(calls),
        scale=np.ones(works),
        freed=np.zeros(calls, dtype=bool),
        aside=np.zeros(works, dtype=bool),
        closed=np.zeros(works, dtype=bool),
    )


def edited(program: Program, edit: Edit) -> Program:
    """The program after the change; no time is cut below nothing."""
    at_once = (edit.scale == 0.0) | edit.closed
    left_before = np.maximum(0.0, 1.0 - edit.cut_before)
    return replace(
        program,
        gap_s=np.where(edit.cut_before > 0.0, np.maximum(0.0, program.gap_s) * left_before, program.gap_s),
        own_s=program.own_s * np.maximum(0.0, 1.0 - edit.cut_inside),
        waits_for=np.where(edit.freed, NONE, program.waits_for),
        duration_s=program.duration_s * edit.scale,
        latency_s=np.where(edit.closed, np.minimum(0.0, program.latency_s), program.latency_s),
        stream_gap_s=np.where(at_once, np.minimum(0.0, program.stream_gap_s), program.stream_gap_s),
        stream=np.where(edit.aside, program.stream + program.num_streams, program.stream),
        depends_on=np.where(edit.aside[program.depends_on] & (program.depends_on >= 0), NONE, program.depends_on),
    )
