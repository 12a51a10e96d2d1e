"""A trace with what was found drawn into it: the critical path and every finding as lanes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.context.gains import recorded_schedule
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.finding import Finding
from ridgeline.findings.replay.critical_path import Link, critical_path
from ridgeline.findings.replay.replay import Index
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace, TraceBuilder, concat

MAX_SPANS = 400_000
_WORDS = {"work": "device", "queue": "device: queued", "launch": "launch", "call": "host call", "host": "host"}


def annotate(context: TraceContext, findings: tuple[Finding, ...]) -> Trace:
    """The spans of the replayed window with the lanes ``critical path`` and ``finding 1: …``."""
    inside = (context.start_ns < context.window.end_ns) & (context.end_ns > context.window.start_ns)
    rows = np.flatnonzero(inside)
    if len(rows) > MAX_SPANS:
        longest = np.argsort(-context.trace.duration_s[rows], kind="stable")[:MAX_SPANS]
        rows = np.sort(rows[longest])
    shown = context.trace.select(rows)
    build = TraceBuilder(context.trace.title)
    build.describe(origin_ns=context.trace.origin_ns, **dict(context.trace.meta))
    rank = int(context.trace.rank[0]) if len(context.trace) else 0
    for link in critical_path(context.wiring.program, recorded_schedule(context)):
        if link.duration_s > 0:
            _add_link(build, context, link, rank)
    for number, finding in enumerate(findings, start=1):
        _add_finding(build, context, finding, number, rank)
    return concat([shown, build.build()], f"{context.trace.title}, explained")


def link_name(context: TraceContext, link: Link) -> str:
    """What a stretch of the critical path is: its kernel or call, or, of host time before a call, the innermost host
    span that covers half of it (the data loader, a line of Python); empty where there is none."""
    trace = context.trace
    if link.kind != "host":
        row = int((context.wiring.call_rows if link.kind == "call" else context.rows)[link.index])
        return trace.words[int(trace.name[row])] if row >= 0 and link.kind in ("work", "call") else ""
    if link.duration_s < 50e-6:  # between two calls of an op
        return ""
    start_ns, end_ns = int(context.clock.gap_start_ns[link.index]), int(context.clock.start_ns[link.index])
    spans = _named_host_spans(context)
    overlap = np.minimum(context.end_ns[spans], end_ns) - np.maximum(context.start_ns[spans], start_ns)
    around = spans[overlap > 0.5 * (end_ns - start_ns)]
    return trace.words[int(trace.name[around[np.argmin(trace.duration_s[around])]])] if len(around) else ""


@derived
def _named_host_spans(context: TraceContext) -> Index:
    """Host spans that say what a thread which launches does, the collector's on any thread."""
    spans = context.of_kind(Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.DATALOADER, Kind.GC)
    collects = context.trace.kind[spans] == int(Kind.GC)
    return np.asarray(spans[np.isin(context.trace.thread[spans], main_threads(context)) | collects], dtype=np.int64)


def _add_link(build: TraceBuilder, context: TraceContext, link: Link, rank: int) -> None:
    name = link_name(context, link)
    start_s = context.window.start_ns / 1e9 + link.start_s
    word = _WORDS[link.kind]
    place: dict[str, Any] = {"kind": Kind.ANNOTATION, "device": -1, "stream": -1, "thread": 0, "rank": rank}
    build.add(name or word, "critical path", start_s, link.duration_s, phase=word, **place)


def _add_finding(build: TraceBuilder, context: TraceContext, finding: Finding, number: int, rank: int) -> None:
    """The finding's spans again, on a lane that says what it is."""
    lane = f"finding {number}: {finding.rule}, {finding.low_ms:.3g} to {finding.high_ms:.3g} ms a step"
    trace = context.trace
    place: dict[str, Any] = {"kind": Kind.ANNOTATION, "device": -1, "stream": -1, "thread": number, "rank": rank}
    for row in finding.rows:
        start_s, duration_s = float(trace.start_s[row]), float(trace.duration_s[row])
        build.add(finding.what, lane, start_s, duration_s, source=finding.change, **place)
