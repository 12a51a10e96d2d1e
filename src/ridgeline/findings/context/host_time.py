"""Host time: launching, the data loader, and long gaps between launches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.context import LONG_GAP_S, TraceContext, _long_gap_s, derived
from ridgeline.findings.replay.fix import joined
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.intervals import Intervals, covered_within, union
from ridgeline.trace.kind import Kind


@derived
def launching_time(context: TraceContext) -> Intervals:
    """Host time spent on launching: calls, and the short gaps between them."""
    clock = context.clock
    return union(np.where(_away(context), clock.start_ns, clock.gap_start_ns), clock.end_ns)


@derived
def elsewhere_time(context: TraceContext) -> Intervals:
    """Host time between calls that is too long to be the launching of an op."""
    return union(context.clock.gap_start_ns[_away(context)], context.clock.start_ns[_away(context)])


@derived
def _away(context: TraceContext) -> Mask:
    """Calls before which the host did something else for long; preparing an optimizer's step is launching, and so
    is waking the thread that prepares it once the backward pass of another has ended."""
    clock, gap_s = context.clock, context.wiring.program.gap_s
    usual_s = float(np.median(gap_s[gap_s > 0])) if (gap_s > 0).any() else 0.0
    ops = covered_within(context.time_of(context.of_kind(Kind.OP)), clock.gap_start_ns, clock.start_ns) / 1e9
    # Nor does a host that launches stay without an op for this long, and this many times as long as it usually does: of
    # such a gap ops cover less than a quarter.
    silent = (gap_s >= max(300e-6, 20.0 * usual_s)) & (ops < 0.25 * gap_s) & ~_handed_over(context)
    long = (gap_s >= _long_gap_s(context)) | silent
    optimizer = context.time_of(context.host_spans(r"^Optimizer\.step"))
    inside_ns = covered_within(optimizer, clock.gap_start_ns, clock.start_ns)
    gap_ns = clock.start_ns - clock.gap_start_ns
    held = inside_ns > 0.5 * gap_ns
    handed = (inside_ns > 0) & (gap_ns - inside_ns < LONG_GAP_S * 1e9) & _handed_over(context)
    return np.asarray(long & ~held & ~handed, dtype=bool)


@derived
def _handed_over(context: TraceContext) -> Mask:
    """Calls that follow one of another thread: waking a thread takes its time."""
    rows, after = context.wiring.call_rows, context.wiring.program.after
    before = np.where(after >= 0, rows[np.maximum(after, 0)], -1)
    threads = context.trace.thread
    known = (rows >= 0) & (before >= 0)
    return np.asarray(known & (threads[np.maximum(rows, 0)] != threads[np.maximum(before, 0)]), dtype=bool)


@derived
def loading_spans(context: TraceContext) -> Index:
    """Spans of the launching threads in which a batch is fetched."""
    spans = np.union1d(
        context.of_kind(Kind.DATALOADER),
        context.host_spans(
            r"dataloader.*(__next__|next)|_next_data|data_?loading|fetch_batch|DataPipe",
            Kind.ANNOTATION,
            Kind.OP,
            Kind.PYTHON,
        ),
    )
    return spans[np.isin(context.trace.thread[spans], main_threads(context))]


@derived
def between_epochs(context: TraceContext) -> Intervals:
    """Time from one fetch to the next with nothing launched in between: the first found no more batches, and before
    the second the loader began again."""
    spans = loading_spans(context)[np.argsort(context.start_ns[loading_spans(context)], kind="stable")]
    starts, ends, launches = context.start_ns[spans], context.end_ns[spans], np.sort(context.launch_ns)
    if _is_quiet(launches, ends[:-1], starts[1:]).any():  # so it does before the first and after the last step
        starts = np.concatenate((starts, [context.window.host_end_ns]))
        ends = np.concatenate(([context.window.start_ns], ends))
    else:
        starts, ends = starts[:0], ends[:0]
    quiet = _is_quiet(launches, ends, starts)
    return union(ends[quiet], starts[quiet])


@derived
def first_fetches(context: TraceContext) -> Index:
    """Fetches with which an epoch begins."""
    return loading_spans(context)[np.isin(context.start_ns[loading_spans(context)], between_epochs(context).end)]


def _is_quiet(launches: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Mask:
    """Whether nothing is launched from each start to its end."""
    none = np.searchsorted(launches, starts) == np.searchsorted(launches, ends)
    return np.asarray(none & (ends > starts), dtype=bool)


def loads_itself(context: TraceContext) -> bool:
    """Whether batches are made by the thread that fetches them."""
    return bool(context.words_like("SingleProcess")[context.trace.name[loading_spans(context)]].any())


def time_between(context: TraceContext, spans: Index) -> Intervals:
    """Time of the steps outside the spans, from the first span of a step to its last."""
    inner = context.time_of(spans)
    marks = np.array([*context.window.marks_ns, context.window.end_ns])
    step = np.searchsorted(marks, inner.start, side="right")
    same = step[1:] == step[:-1]
    return Intervals(inner.end[:-1][same], inner.start[1:][same])


def host_s_a_launch(context: TraceContext) -> float:
    """What the host usually needs from one launch to the next."""
    gaps_s = context.program.gap_s + context.program.own_s
    usual = gaps_s[
        (context.wiring.program.gap_s < LONG_GAP_S) & (context.wiring.call_rows >= 0) & (context.program.waits_for < 0)
    ]
    return float(np.median(usual)) if len(usual) else 0.0


def stretched(context: TraceContext, time: Intervals) -> Intervals:
    """This time, and the whole of every long gap between calls that it fills at least half of."""
    held = covered_within(time, elsewhere_time(context).start, elsewhere_time(context).end) > 0.5 * (
        elsewhere_time(context).end - elsewhere_time(context).start
    )
    return joined(time, Intervals(elsewhere_time(context).start[held], elsewhere_time(context).end[held]))


@derived
def main_threads(context: TraceContext) -> Index:
    """Threads that launch work."""
    calls = context.wiring.call_rows
    return np.unique(context.trace.thread[calls[calls >= 0]])


@derived
def is_fed_late(context: TraceContext) -> bool:
    """Steps wait for batches that workers make at their own pace: what is saved elsewhere is waited for."""
    if loads_itself(context) or not len(loading_spans(context)):
        return False
    time = context.time_of(loading_spans(context))
    # Waiting for batches, of a step and at least, from which on workers set the pace.
    return time.total / 1e9 / context.num_steps > max(0.05 * context.step_s, 2e-3)
