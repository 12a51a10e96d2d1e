"""Host spans around other spans and around the launches of kernels."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext, derived
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.intervals import Intervals
from ridgeline.trace.kind import Kind

FACTORED = r"^aten::(_?linalg_\w+|cholesky\w*|_cholesky\w*|triangular_solve|lu_\w+|geqrf|ormqr|orgqr|svd|lstsq)$"
"""Factorizations and solves: what they launch is their solver's own."""


def under(context: TraceContext, pattern: str) -> Mask:
    """Works with a host span around their launch whose name has the pattern."""
    matching, trace = context.words_like(pattern), context.trace
    found = np.zeros(len(context.rows), dtype=bool)
    for at in _ancestry(context):
        found |= (at >= 0) & matching[trace.name[np.maximum(at, 0)]]
    return found


@derived
def factored(context: TraceContext) -> Mask:
    """Works of factorizations and solves, and of their gradients: no setting of products reaches those inside, and
    there is no larger batch."""
    # Gradients of such: PyTorch keeps TF32 out of their products, whatever is set.
    return np.asarray(
        context.named(FACTORED, "op") | under(context, r"^(Linalg|Cholesky|TriangularSolve|Lu)\w*Backward\d*$"),
        dtype=bool,
    )


def is_under(context: TraceContext, span: int, pattern: str) -> bool:
    matching = context.words_like(pattern)
    return any(matching[context.trace.name[at]] for at in context.trace.path(span))


@derived
def _ancestry(context: TraceContext) -> tuple[Index, ...]:
    """The spans around each launch, level by level, -1 above the outermost."""
    trace, levels = context.trace, list[Index]()
    at = trace.launch[context.rows].astype(np.int64)
    while (at >= 0).any() and len(levels) < 64:
        levels.append(at)
        at = np.where(at >= 0, trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return tuple(levels)


def op_time(context: TraceContext, works: Index) -> Intervals:
    """Host time of the ops that launch these works and nothing else."""
    trace = context.trace
    total, own = np.zeros(len(trace) + 1), np.zeros(len(trace) + 1)
    for at in _ancestry(context):
        np.add.at(total, at, 1.0)
        np.add.at(own, at[works], 1.0)
    is_op = trace.of_kind(Kind.OP, Kind.RUNTIME)
    best = np.full(len(works), -1, dtype=np.int64)
    for at in _ancestry(context):
        span = at[works]
        fits = (span >= 0) & is_op[np.maximum(span, 0)] & (own[span] >= 0.999 * total[span])
        best[fits] = span[fits]
    return context.time_of(np.unique(best[best >= 0]))


def next_start(context: TraceContext, span: int) -> int:
    """When the next span with the same parent starts; the parent's end if there is none."""
    parent = int(context.trace.parent[span])
    siblings = context.start_ns[children_of(context, parent)]
    later = siblings[siblings >= context.end_ns[span]]
    return int(later.min()) if len(later) else int(context.end_ns[parent])


def children_of(context: TraceContext, parent: int) -> Index:
    low = np.searchsorted(_by_parent(context)[1], parent)
    high = np.searchsorted(_by_parent(context)[1], parent, side="right")
    return _by_parent(context)[0][low:high]


@derived
def _by_parent(context: TraceContext) -> tuple[Index, Index]:
    order = np.argsort(context.trace.parent, kind="stable")
    return order, context.trace.parent[order].astype(np.int64)


def spans_inside(context: TraceContext, spans: Index, others: Index) -> Mask:
    """Which of the host spans have one of the others around them."""
    found, at = np.zeros(len(spans), dtype=bool), context.trace.parent[spans].astype(np.int64)
    while (at >= 0).any():
        found |= np.isin(at, others)
        at = np.where((at >= 0) & ~found, context.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return found


def spans_under(context: TraceContext, spans: Index, pattern: str) -> Mask:
    """Which of the host spans have one around them whose name has the pattern."""
    matching, found = context.words_like(pattern), np.zeros(len(spans), dtype=bool)
    at = context.trace.parent[spans].astype(np.int64)
    while (at >= 0).any():
        found |= (at >= 0) & matching[context.trace.name[np.maximum(at, 0)]]
        at = np.where((at >= 0) & ~found, context.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return found


def outermost(context: TraceContext, spans: Index, pattern: str) -> Index:
    """For each span the outermost one around it (or itself) in a row of spans whose names have the pattern."""
    matching, found = context.words_like(pattern), spans.copy()
    at = context.trace.parent[spans].astype(np.int64)
    on = np.ones(len(spans), dtype=bool)
    while (on & (at >= 0)).any():
        on &= (at >= 0) & matching[context.trace.name[np.maximum(at, 0)]]
        found = np.where(on, at, found)
        at = np.where(on, context.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return np.unique(found)


@derived
def launching_spans(context: TraceContext) -> Mask:
    """Rows of the trace in which something is launched."""
    found = np.zeros(len(context.trace), dtype=bool)
    for at in _ancestry(context):
        found[at[at >= 0]] = True
    return found
