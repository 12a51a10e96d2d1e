"""Host work that a program does when it meets a shape, a kernel or a library for the first time."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.accounting.host_activity import ACTIVITIES, host_of
from ridgeline.findings.context.context import TraceContext, derived, inside_window
from ridgeline.findings.context.host_time import main_threads
from ridgeline.findings.context.rounds import num_rounds, recurs
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.intervals import difference
from ridgeline.trace.kind import Kind
from ridgeline.trace.quality import COLD_NS


def compiling_spans(context: TraceContext) -> Index:
    """Spans in which code is made."""
    # What runs while code is made. With a stack recorded, files of the compiler are around every call of what was
    # compiled before (`eval_frame.py: compile_wrapper`, Triton's `launch_metadata`, `compile_fx.py: run`).
    return context.host_spans(
        r"_compile\.compile_inner|^(?!.*\.py\(\d+\)).*(compile_fx|dynamo_timed|entire_frame_compile|backend_compile)"
        r"|^TorchDynamo\b.*compil|\bconvert_frame\.py\(\d+\): (_compile|compile_inner|_compile_inner)$"
        r"|compile_fx\.py\(\d+\): \w*(compile_fx|fx_codegen_and_compile)\w*$"
        r"|\btriton\W.*\.py\(\d+\): (compile|_do_compile|make_cubin)$|^triton\w*compile",
        Kind.ANNOTATION,
        Kind.OP,
        Kind.PYTHON,
        Kind.OTHER,
    )


@derived
def first_use_spans(context: TraceContext) -> Index:
    """Ops and calls of the launching threads that build plans or load code, as the accounting tells them."""
    trace = context.trace
    host = host_of(trace, int(trace.rank[0]) if len(trace) else 0)
    told, ops = host.overrides == ACTIVITIES.index("first_use"), trace.of_kind(Kind.OP)
    # an op that is never seen without it may always take as long: a recurrent layer launches all of its steps
    others = np.unique(trace.name[ops & ~told])
    spans = np.flatnonzero(told & (trace.of_kind(Kind.RUNTIME) | (ops & np.isin(trace.name, others))))
    spans = inside_window(context, spans[trace.device[spans] < 0])
    return np.asarray(spans[np.isin(trace.thread[spans], main_threads(context))], dtype=np.int64)


def is_warm_up(context: TraceContext) -> bool:
    """Whether the device waits most of the window for work that a program does once: opening the device, loading code,
    compiling, building plans. Of one step nobody can tell whether the next has it again."""
    trace, calls = context.trace, context.of_kind(Kind.RUNTIME)
    waiting = context.wiring.call_rows[context.program.waits_for >= 0]
    cold = calls[(trace.duration_s[calls] > COLD_NS / 1e9) & ~np.isin(calls, waiting)]
    cold = cold[~context.words_like(r"Synchronize|Memcpy|Memset|Query|Host(Register|Alloc)")[trace.name[cold]]]
    first = np.union1d(first_use_spans(context), compiling_spans(context))
    time = context.time_of(np.union1d(first, cold))
    idle = difference(time, context.time_of(context.rows))
    recording = context.window.end_ns - context.window.start_ns
    return idle.total > 0.5 * recording and (num_rounds(context) < 2 or not recurs(context, time))


def is_first_use(context: TraceContext, spans: Index) -> Mask:
    """Which of the spans do such work or are inside of it."""
    first, trace = first_use_spans(context), context.trace
    found, at = np.zeros(len(spans), dtype=bool), spans.astype(np.int64)
    while len(first) and (at >= 0).any():
        found |= np.isin(at, first)
        at = np.where(at >= 0, trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
    return found
