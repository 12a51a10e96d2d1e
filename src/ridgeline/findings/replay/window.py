"""Which part of a trace is replayed: whole steps, as many as a replay can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

MAX_WORKS = 60_000
"""Pieces of device work in a replay: a tenth of a second each time."""

MAX_STEP_WORKS = 20_000
"""Pieces of device work in whole steps from the middle of a long trace: more of them say nothing new."""


@dataclass(frozen=True, slots=True)
class Window:
    """From ``start_ns`` to ``end_ns``, with the steps that begin inside it; the host's part ends at ``host_end_ns``."""

    start_ns: int
    end_ns: int
    host_end_ns: int
    num_steps: int
    marks_ns: tuple[int, ...] = ()  # where further steps begin
    is_marked: bool = False  # steps were recorded; else all of it is taken for one

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.duration_s / self.num_steps


def window_of(trace: Trace) -> Window:
    """The steps of the trace, or all of it as one step; of a long one, consecutive steps from its middle."""
    steps = trace.in_order(trace.of_kind(Kind.STEP) & (trace.device < 0))
    work = trace.gpu
    if not len(trace):
        return Window(0, 1, 1, 1)
    if not len(steps):
        return _whole(trace)
    steps = steps[_beginning(trace.duration_s[steps]) :]
    starts, ends = trace.start_ns[steps], trace.end_ns[steps]
    chosen = _middle(trace, starts, ends)
    first, last = int(chosen[0]), int(chosen[-1])
    end_ns = host_end_ns = int(ends[last])
    if last + 1 < len(starts):
        end_ns = max(end_ns, int(starts[last + 1]))
    elif work.any():
        end_ns = max(end_ns, int(trace.end_ns[work].max()))
    marks = tuple(int(at) for at in starts[first + 1 : last + 1])
    return Window(int(starts[first]), end_ns, host_end_ns, len(chosen), marks, True)


def _beginning(step_s: np.ndarray) -> int:
    """How many of the first steps are a program's beginning (memory is taken, kernels are loaded, code is compiled):
    each far longer than those after it, of which at least two are left."""
    num = 0
    # A first step that takes this many times as long as those after it is not one of them.
    while num < len(step_s) - 2 and step_s[num] > 1.5 * float(np.median(step_s[num + 1 :])):
        num += 1
    return num


def _whole(trace: Trace) -> Window:
    """Without steps: from the launch of the first work to the end of the last, at most as long as a replay can take."""
    work = trace.in_order(trace.gpu)
    if not len(work):
        start_ns, end_ns = int(trace.start_ns.min()), int(trace.end_ns.max()) + 1
        return Window(start_ns, end_ns, end_ns, 1)
    launches = trace.launch[work][trace.launch[work] >= 0]
    start_ns = min(int(trace.start_ns[rows].min()) for rows in (work, launches) if len(rows))
    end_ns = int(trace.end_ns[work].max())
    if len(work) > MAX_WORKS:
        middle = (len(work) - MAX_WORKS) // 2
        start_ns, end_ns = int(trace.start_ns[work[middle]]), int(trace.start_ns[work[middle + MAX_WORKS]])
    end_ns = max(end_ns, start_ns + 1)
    host_end_ns = int(trace.end_ns[launches].max()) if len(launches) else start_ns
    return Window(start_ns, end_ns, min(end_ns, max(start_ns, host_end_ns)), 1)


def _middle(trace: Trace, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Indices of consecutive steps whose device work fits into a replay."""
    num = len(starts)
    if int(trace.gpu.sum()) <= MAX_STEP_WORKS:
        return np.arange(num)
    works = np.sort(trace.start_ns[trace.gpu])
    each = np.maximum(1, np.searchsorted(works, ends) - np.searchsorted(works, starts))
    count = int(np.clip(MAX_STEP_WORKS // max(1, int(np.median(each))), 1, num))
    first = (num - count) // 2
    return np.arange(first, first + count)
