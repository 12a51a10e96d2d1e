"""Host work that a program does when it meets a shape, a kernel or a library for the first time."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.accounting.host_activity import ACTIVITIES, Host
from ridgeline.findings.context.context import TraceContext, derived, inside_window
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.replay.replay import Index


@derived
def first_use_spans(context: TraceContext) -> Index:
    """Spans of the launching threads that build plans, compile, tune or load code, as the accounting tells them."""
    trace = context.trace
    host = Host(trace, int(trace.rank[0]) if len(trace) else 0)
    spans = np.flatnonzero(host.overrides == ACTIVITIES.index("first_use"))
    spans = inside_window(context, spans[trace.device[spans] < 0])
    return np.asarray(spans[np.isin(trace.thread[spans], main_threads(context))], dtype=np.int64)


def not_first_use(context: TraceContext, spans: Index) -> Index:
    """The spans without those that do such work or are inside of it: that is no stall of the machine."""
    first, trace = first_use_spans(context), context.trace
    found, at = np.zeros(len(spans), dtype=bool), spans.astype(np.int64)
    while len(first) and (at >= 0).any():
        found |= np.isin(at, first)
        at = np.where(at >= 0, trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return np.asarray(spans[~found], dtype=np.int64)
