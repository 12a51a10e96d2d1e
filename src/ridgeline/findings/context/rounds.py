"""Rounds of a program (marked steps, or steps of the optimizer), and what happens in each of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.replay.replay import Index
from ridgeline.trace.intervals import Intervals, covered_within
from ridgeline.trace.kind import Kind

ONGOING_FRAC, LATE_FRAC = 0.25, 0.1
"""Of what a round has in the mean, in half of them; and of a whole recording, in its later half."""


@derived
def num_rounds(context: TraceContext) -> int:
    """Steps as far as one can tell: those that were marked, else those of the optimizer."""
    updates = 0 if context.window.is_marked else len(context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP))
    return max(context.num_steps, updates)


def recurs(context: TraceContext, time: Intervals) -> bool:
    """Whether half of the rounds have a quarter of what a round has in the mean, or all of two: what a program does
    when it begins, or a machine once, is not what the program does. Rounds are marked steps, else those of the
    optimizer; without either, the later half of the launches has a tenth of it."""
    if not len(time.start):
        return False
    bounds = _round_bounds(context)
    if not len(bounds):
        return context.window.is_marked or _late_frac(context, time) >= LATE_FRAC
    rounds = np.sort(covered_within(time, bounds[:-1], bounds[1:]))
    return bool(rounds[(len(rounds) - 1) // 2] >= ONGOING_FRAC * rounds.mean())


def comes_again(context: TraceContext, spans: Index) -> bool:
    """Whether half of the rounds have a quarter as many of the spans as a round has in the mean: what a program
    does every so many steps (writing a line, looking at a sample) fell into the recording."""
    bounds = _round_bounds(context)
    if not len(bounds):
        return len(spans) > 0
    starts = np.sort(context.start_ns[spans])
    rounds = np.sort(np.diff(np.searchsorted(starts, bounds)))
    return bool(rounds[(len(rounds) - 1) // 2] >= max(1.0, ONGOING_FRAC * rounds.mean()))


@derived
def _round_bounds(context: TraceContext) -> NDArray[np.int64]:
    """Where rounds begin and the last one ends; nothing where nobody can tell, or there is one round."""
    updates = context.host_spans(r"^Optimizer\.step", Kind.ANNOTATION)
    ends = [*context.window.marks_ns] or context.end_ns[updates].tolist()[:-1]
    bounds = [context.window.start_ns, *sorted(ends), context.window.end_ns] if ends else []
    return np.array(bounds, dtype=np.int64)


def _late_frac(context: TraceContext, time: Intervals) -> float:
    """Of this time, what lies beside the later half of the launches."""
    middle_ns = int(np.median(context.launch_ns)) if len(context.launch_ns) else context.window.start_ns
    late = covered_within(time, np.array([middle_ns]), np.array([max(middle_ns, context.window.end_ns)]))
    return float(late[0]) / max(1, time.total)


def lasts_on(context: TraceContext, spans: Index) -> bool:
    """Whether spans are not of the beginning alone; of marked steps those that are a beginning are left out."""
    return len(spans) > 0 and (context.window.is_marked or _late_frac(context, context.time_of(spans)) >= LATE_FRAC)
