"""Host spans and gaps that take far longer than the same ones usually do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.context.first_use import is_first_use
from ridgeline.findings.context.host_time import _away, elsewhere_time
from ridgeline.findings.context.nesting import launching_spans
from ridgeline.findings.context.rounds import num_rounds
from ridgeline.findings.replay.replay import Index, Mask, Seconds


def stalled_spans(context: TraceContext, spans: Index) -> tuple[Index, float]:
    """Spans that took over ten times (and 50 µs more than) what their name usually takes by itself, without what
    is inside of it: a thread that is not running stops in the middle of an op as well as of a call. What builds a
    plan for a new shape was running."""
    waiting = context.wiring.call_rows[context.program.waits_for >= 0]
    own = spans[~np.isin(spans, waiting)]
    if not len(own):
        return own, 0.0
    inside = np.bincount(context.trace.parent[spans] + 1, context.trace.duration_s[spans], len(context.trace) + 1)[1:]
    seconds = np.maximum(0.0, context.trace.duration_s[own] - inside[own])
    usual = _usual_s(context.trace.name[own], seconds)
    long = _is_unusual(seconds, usual) & ~_works_on(context, own, seconds, usual)
    long &= ~is_first_use(context, own)
    return own[long], float((seconds - usual)[long].sum())


def mostly_stopped_s(context: TraceContext) -> float:
    """The same where that is most of all long gaps."""
    return stopped_for_s(context, 0.5)


def stopped_for_s(context: TraceContext, least: float) -> float:
    """Seconds in long gaps between two ops that usually follow each other at once, if they are this share of such
    gaps: code that somebody wrote there would take its time whenever the two meet."""
    num, found_s = _stops(context)
    # Gaps in which a thread was not running, at least: once is whatever a machine does.
    return found_s if num >= 4 and found_s > least * elsewhere_time(context).total / 1e9 else 0.0


@derived
def _stops(context: TraceContext) -> tuple[int, float]:
    """How many such gaps there are, and their seconds beyond what is usual."""
    trace, rows, gap_s = context.trace, context.wiring.call_rows, context.wiring.program.gap_s
    after = context.wiring.program.after
    known = np.flatnonzero((rows >= 0) & (after >= 0) & (rows[np.maximum(after, 0)] >= 0))
    ops = np.where(trace.parent[rows] >= 0, trace.parent[rows], rows)
    words = trace.name[np.maximum(ops, 0)].astype(np.int64)
    _, pairs = np.unique(words[after[known]] * len(trace.words) + words[known], return_inverse=True)
    usual = _usual_s(pairs.astype(np.int32), gap_s[known])
    long = _is_unusual(gap_s[known], usual) & _away(context)[known]
    return int(long.sum()), float((gap_s[known] - usual)[long].sum())


def unusual_spans(context: TraceContext, spans: Index) -> Index:
    """The same of all spans, those with children as well: whatever is around a stall took as long."""
    seconds = context.trace.duration_s[spans]
    usual = _usual_s(context.trace.name[spans], seconds)
    return spans[_is_unusual(seconds, usual) & ~_works_on(context, spans, seconds, usual)]


def _works_on(context: TraceContext, spans: Index, seconds: Seconds, usual: Seconds) -> Mask:
    """Spans of ops that take as long whenever they are given tensors of these sizes: they compute on the host, and
    are not the ops of the same name that launch, over tensors of the same sizes perhaps."""
    shapes, names = context.trace.optional("shapes")[spans].astype(np.int64), context.trace.name[spans].astype(np.int64)
    alike = 2 * (names * len(context.trace.words) + shapes) + launching_spans(context)[spans]
    _, same, counts = np.unique(alike, return_inverse=True, return_counts=True)
    shortest = np.full(len(counts), np.inf)
    np.minimum.at(shortest, same, seconds)
    long = _is_unusual(shortest[same], usual)
    return np.asarray(
        (shapes > 0) & (counts[same] >= num_rounds(context)) & (num_rounds(context) > 1) & long, dtype=bool
    )


def _is_unusual(seconds: Seconds, usual: Seconds) -> Mask:
    return np.asarray((seconds > 10 * usual) & (seconds > usual + 50e-6), dtype=bool)


def _usual_s(words: NDArray[np.int32], seconds: Seconds) -> Seconds:
    """The median duration of the spans with the same name; infinite where there are too few to tell."""
    order = np.lexsort((seconds, words))
    found, first, counts = np.unique(words[order], return_index=True, return_counts=True)
    medians = np.where(counts >= 8, seconds[order][first + counts // 2], np.inf)
    return np.asarray(medians[np.searchsorted(found, words)])
