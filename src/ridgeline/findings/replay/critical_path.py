"""The critical path of a replay: the chain of calls, work and delays that decided when the run ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.findings.replay.replay import NONE, Index, Program, Schedule


@dataclass(frozen=True, slots=True)
class Link:
    """One stretch of the path: a call (host time), work (device time), or the delay before it."""

    kind: str  # "call", "work", "launch" (from a call to its work), "queue" (behind other work), "host" (between calls)
    index: int  # of the call or work it leads to
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def critical_path(program: Program, schedule: Schedule) -> list[Link]:
    """From the end back to the start, then in order of time: without gaps, as long as the run."""
    before = _stream_before(program)
    at = _last(schedule)
    links = list[Link]()
    while at is not None:
        kind, index = at
        found, at = _STEPS[kind](program, schedule, index, before)
        links += found
    return links[::-1]


def path_ms(program: Program, schedule: Schedule, num_steps: int) -> dict[str, float]:
    """Milliseconds a step of the critical path by what they are: device, queued, launch, host call, host."""
    words = {"work": "device", "queue": "queued", "launch": "launch", "call": "host_call", "host": "host"}
    sums = dict.fromkeys(words.values(), 0.0)
    for link in critical_path(program, schedule):
        sums[words[link.kind]] += link.duration_s * 1e3 / num_steps
    return sums


def _last(schedule: Schedule) -> tuple[str, int] | None:
    works = float(schedule.work_end_s.max(initial=-np.inf))
    calls = float(schedule.call_end_s.max(initial=-np.inf))
    if not np.isfinite(max(works, calls)):
        return None
    if works >= calls:
        return "work", int(np.argmax(schedule.work_end_s))
    return "call", int(np.argmax(schedule.call_end_s))


def _stream_before(program: Program) -> Index:
    """The work whose end freed the stream for each piece of work."""
    before = np.full(program.num_works, NONE, dtype=np.int64)
    for stream in range(program.num_streams):
        own = np.flatnonzero(program.stream == stream)
        before[own[1:]] = own[:-1]
    return before


def _before_work(p: Program, s: Schedule, w: int, before: Index) -> tuple[list[Link], tuple[str, int] | None]:
    """The work itself, and what it waited for: its stream, another stream, or its launch."""
    start_s = float(s.work_start_s[w])
    links = [Link("work", w, start_s, float(s.work_end_s[w]))]
    reasons: list[tuple[float, str, int]] = []
    for other, gap_s in ((int(before[w]), p.stream_gap_s[w]), (int(p.depends_on[w]), p.depend_gap_s[w])):
        if other >= 0 and abs(s.work_end_s[other] + gap_s - start_s) < 2e-9:
            reasons.append((float(s.work_end_s[other]), "work", other))
    if reasons:
        ended_s, kind, other = max(reasons)
        return links + [Link("queue", w, ended_s, start_s)], (kind, other)
    call = int(p.call[w])
    called_s = float(s.call_start_s[call])
    if start_s <= called_s:
        return links, None
    return links + [Link("launch", w, called_s, start_s)], ("gap", call)


def _before_call(p: Program, s: Schedule, c: int, before: Index) -> tuple[list[Link], tuple[str, int] | None]:
    """The call itself, or the work it waited for."""
    start_s, end_s = float(s.call_start_s[c]), float(s.call_end_s[c])
    waited = int(p.waits_for[c])
    if waited >= 0 and float(s.work_end_s[waited]) > start_s and end_s - p.own_s[c] > start_s:
        return [Link("call", c, float(s.work_end_s[waited]), end_s)], ("work", waited)
    return [Link("call", c, start_s, end_s)], ("gap", c)


def _before_gap(p: Program, s: Schedule, c: int, before: Index) -> tuple[list[Link], tuple[str, int] | None]:
    """Host time between the call that came before and this one."""
    after, start_s = int(p.after[c]), float(s.call_start_s[c])
    ended_s = float(s.call_end_s[after]) if after >= 0 else 0.0
    links = [Link("host", c, ended_s, start_s)] if start_s > ended_s else []
    return links, ("call", after) if after >= 0 else None


_STEPS = {"work": _before_work, "call": _before_call, "gap": _before_gap}
