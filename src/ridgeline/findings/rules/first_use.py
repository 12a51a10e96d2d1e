"""Work that a program does when it meets something for the first time, in steps that should have none of it."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import SURE_FRAC, TraceContext
from ridgeline.findings.context.evidence import host_evidence, place_of_host
from ridgeline.findings.context.first_use import compiling_spans, first_use_spans
from ridgeline.findings.context.host_time import stretched
from ridgeline.findings.context.rounds import recurs
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rule
from ridgeline.trace.kind import Kind
from ridgeline.units import show_ms


@rule("first-use", version=3, order=12, saves="host")
def first_use(context: TraceContext) -> Candidate | None:
    """Compilation, plans, tuning or loading of code in every step: a shape is new each time, or a guard fails."""
    return _recompiles(context) or _builds_plans(context)


def _recompiles(context: TraceContext) -> Candidate | None:
    spans = compiling_spans(context)
    time = context.time_of(spans)
    if not recurs(context, time):  # once, it is the first time
        return None
    return Candidate(
        what="torch.compile compiles inside the measured steps",
        cause="recompilation: a guard failed (changing shapes, Python scalars or attributes) and the graph is "
        "built again",
        change="torch.compile(model, dynamic=True) or mark_dynamic the changing dim; TORCH_LOGS=recompiles names "
        "the guard",
        where=place_of_host(context, spans),
        fix=Fix(
            host=stretched(context, time),
            host_best=0.0,
            host_worst=0.05,
            works=np.flatnonzero(context.launched_in(time)),
            keep_best=0.0,
            keep_worst=0.5,
        ),
        evidence=host_evidence(context, spans),
        spans=tuple(spans.tolist()),
    )


def _builds_plans(context: TraceContext) -> Candidate | None:
    """Ops and calls that take long only when their shapes, or a kernel, are new. Once is a warm-up; in half of the
    steps shapes keep changing."""
    spans = first_use_spans(context)
    time = context.time_of(spans)
    if not recurs(context, time):
        return None
    calls = context.trace.kind[spans] == int(Kind.RUNTIME)
    loads = context.trace.duration_s[spans[calls]].sum() > 0.5 * context.trace.duration_s[spans].sum()
    cause = "kernels are loaded when they are first launched" if loads else "a plan is built for every new shape"
    change = (
        "run every shape once before the loop, or CUDA_MODULE_LOADING=EAGER"
        if loads
        else "pad or bucket what grows (lengths, batches) to a few sizes and run each once before the loop; or a "
        "backend without plans: sdpa_kernel(SDPBackend.FLASH_ATTENTION) for attention, "
        "torch.backends.cudnn.benchmark = False for convolutions of changing sizes"
    )
    return Candidate(
        what=f"{len(spans) / context.num_steps:.3g} ops and calls a step take "
        f"{show_ms(time.total / 1e9 / context.num_steps)} because they meet something new",
        cause=f"first-use work: {cause}",
        change=change,
        where=place_of_host(context, spans),
        fix=Fix(host=time, host_best=0.0, host_worst=0.3),  # ops go on to do what they are for, in 30 % at most
        evidence=host_evidence(context, spans),
        spans=tuple(spans[:200].tolist()),
        unchecked=("whether shapes can be bucketed",),
        sure_frac=SURE_FRAC,
    )
