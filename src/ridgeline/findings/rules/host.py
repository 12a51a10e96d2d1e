"""Host time that keeps the device waiting: the data loader, garbage collection, compilation, the allocator,
launches."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import SURE_FRAC, TraceContext, inside_window
from ridgeline.findings.context.evidence import host_evidence, kernel_evidence, memory_frac, place_of, place_of_host
from ridgeline.findings.context.gains import recorded_frac
from ridgeline.findings.context.host_time import (
    between_epochs,
    elsewhere_time,
    first_fetches,
    host_s_a_launch,
    launching_time,
    loading_spans,
    loads_itself,
    main_threads,
    stretched,
    time_between,
)
from ridgeline.findings.context.kernels import launched_late, linked
from ridgeline.findings.context.nesting import spans_under, under
from ridgeline.findings.context.rounds import lasts_on, num_rounds, recurs
from ridgeline.findings.context.samples import MANY_PASSES, passes_again, passes_over_samples
from ridgeline.findings.context.stalls import mostly_stopped_s, stalled_spans, stopped_for_s, unusual_spans
from ridgeline.findings.context.training import BACKWARD, passes_a_step, turns_a_step
from ridgeline.findings.context.waits import host_waits
from ridgeline.findings.finding import Where
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import EMPTY, Fix, joined
from ridgeline.findings.replay.program import ALLOCATES, NOT_ALLOCATING, runtime_named
from ridgeline.findings.replay.replay import Index, Seconds
from ridgeline.findings.rule import rule
from ridgeline.trace.intervals import Intervals, covered_within, difference, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.quality import COLD_NS
from ridgeline.units import show_ms

REGION = r"Torch-Compiled Region"
MORE_WORKERS = (
    "raise num_workers and prefetch_factor, move decoding or augmentation to the GPU, or cache decoded samples"
)
GENERAL_FRAC = 0.05
"""Of the step: what no specific rule explains is worth a sentence from here on."""
RECORDED_GC_FRAC = 0.7
"""Of a collection's recorded time, what may be the recording's where nobody timed a step: 22 ms were 8 without."""
RECORDED_FRAC = 0.35
"""The same of a step that nobody timed without the recording: some of its launching time is the recording itself."""
MERGED_FRAC = 0.5
"""Of the memory: two batches at once need about twice what is held at the peak."""


@rule("cpu-affinity", version=2, order=9, saves="host")
def cpu_affinity(context: TraceContext) -> Candidate | None:
    """The process may use fewer cores than the machine has, and its host side is what the step waits for."""
    usable, cores = context.number("num_usable_cores"), context.number("num_cores")
    # For a process that trains: its own thread, autograd's and two that load. Jobs are given a part of a machine, and
    # one that has eight of its cores is not held by that.
    if usable is None or cores is None or usable > min(4, cores / 4):
        return None
    spans = loading_spans(context)
    stalls, _ = stalled_spans(context, context.of_kind(Kind.OP, Kind.RUNTIME))
    time = joined(context.time_of(np.union1d(spans, stalls)), elsewhere_time(context))
    if context.frac(time.total / 1e9 / context.num_steps) < 0.02:
        return None
    return Candidate(
        what=f"The process may run on {usable:.0f} of {cores:.0f} cores, and the step waits for its host side",
        cause="CPU affinity: loader workers, autograd and the launching thread share the cores they are bound to",
        change="drop the binding (taskset, cgroup or launcher), or bind to all cores of the GPU's NUMA node",
        where=place_of_host(context, spans),
        fix=Fix(host=time, host_best=0.0, host_worst=0.25),
        evidence=({"num_usable_cores": usable, "num_cores": cores}, *host_evidence(context, spans)),
        spans=tuple(spans[:200].tolist()),
    )


@rule(
    "data-loader",
    version=4,
    order=10,
    saves="host",
    trust=Trust(
        0.6, 1.05, "fitted: four workers gave a recorded ResNet-50 (V100) 0.65 of what a loader without any wait would"
    ),
)
def data_loader(context: TraceContext) -> Candidate | None:
    spans = loading_spans(context)
    if not len(spans):
        return None
    time = joined(context.time_of(spans), between_epochs(context))
    per_step_s = time.total / 1e9 / context.num_steps
    cause, change = _starved(context, time.total)
    return Candidate(
        what=f"The step waits {show_ms(per_step_s)} ({per_step_s / context.window.step_s:.0%}) for the data loader",
        cause=f"data loader: {cause}",
        change=change,
        where=place_of_host(context, spans),
        fix=Fix(host=stretched(context, time), host_best=0.0, host_worst=0.1, elastic=not loads_itself(context)),
        evidence=host_evidence(context, spans),
        spans=tuple(spans.tolist()),
        unchecked=("whether the host has free cores for more workers",),
    )


def _starved(context: TraceContext, waited_ns: int) -> tuple[str, str]:
    """Why batches come late, and what brings them in time."""
    if loads_itself(context):
        return (
            "the batch is made in the training process itself",
            "DataLoader(…, num_workers=4 or more, persistent_workers=True, pin_memory=True, prefetch_factor=4)",
        )
    anew_ns, first_ns = between_epochs(context).total, context.time_of(first_fetches(context)).total
    if 2 * anew_ns > waited_ns:
        return ("workers are started anew for every epoch", f"DataLoader(…, persistent_workers=True); {MORE_WORKERS}")
    if 2 * (anew_ns + first_ns) > waited_ns:
        return (
            "the first batches of an epoch are made after it has begun",
            "one endless epoch (a sampler that repeats, or a dataset as long as the run): workers then go on while an "
            "epoch ends",
        )
    return ("the workers do not keep up", MORE_WORKERS)


@rule(
    "garbage-collection",
    version=2,
    order=11,
    saves="host",
    more_at_best=0.15,
)
def garbage_collection(context: TraceContext) -> Candidate | None:
    spans = np.union1d(
        context.of_kind(Kind.GC),
        context.host_spans(r"garbage.?collect|\bgc\.collect|gc: gen", Kind.ANNOTATION, Kind.PYTHON),
    )
    time = context.time_of(spans)
    if not recurs(context, time):  # one of a whole epoch fell into the recording: collecting seldom is what is advised
        return None
    return Candidate(
        what=f"Python's garbage collector runs {len(spans) / context.num_steps:.2g} times a step",
        cause="garbage collection stops the thread that launches",
        change="gc.disable() before the loop (or gc.freeze() after warm-up) and gc.collect() every few hundred steps",
        where=place_of_host(context, spans),
        fix=Fix(
            host=stretched(context, time), host_best=0.0, host_worst=0.15 if context.is_timed else RECORDED_GC_FRAC
        ),
        evidence=host_evidence(context, spans),
        spans=tuple(spans.tolist()),
    )


@rule(
    "allocator",
    version=5,
    order=13,
    saves="host",
    more_at_best=0.3,
)
def allocator(context: TraceContext) -> Candidate | None:
    mask = runtime_named(context.trace, ALLOCATES, NOT_ALLOCATING)
    spans = inside_window(context, np.flatnonzero(mask))
    # Of threads that launch kernels: one that only pins batches takes memory until there is some for every batch in
    # flight, and then no more.
    launches = context.trace.launch[context.rows[context.work_kind == int(Kind.KERNEL)]]
    spans = spans[np.isin(context.trace.thread[spans], context.trace.thread[launches[launches >= 0]])]
    calls = np.flatnonzero(np.isin(context.wiring.call_rows, spans))
    if not len(calls) or not recurs(context, context.time_of(spans)) or not _gives_back(context, spans):
        return None
    return Candidate(
        what=f"{len(calls) / context.num_steps:.3g} calls a step to cudaMalloc, cudaFree and the like",
        cause="the caching allocator gives memory back and asks again: cudaFree waits for the whole device",
        change="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no torch.cuda.empty_cache() in the loop, "
        "pad varying shapes to a few sizes; pinned buffers are made once",
        where=place_of_host(context, spans),
        # Host time before memory is taken: the allocator has looked through all it has (43 to 72 µs in the median
        # before such a call in five recordings on an H200, 23 to 31 before any).
        fix=Fix(
            host=context.time_of(spans),
            host_best=0.0,
            host_worst=0.2,
            freed=calls,
            spare=union(context.clock.gap_start_ns[calls], context.clock.start_ns[calls]),
        ),
        evidence=host_evidence(context, spans),
        spans=tuple(spans.tolist()),
        unchecked=("first steps allocate by nature: record after warm-up",),
    )


def _gives_back(context: TraceContext, spans: Index) -> bool:
    """Whether memory is given back as well as taken."""
    given = runtime_named(
        context.trace,
        ("cudaFree", "hipFree", "cuMemUnmap", "cuMemRelease", "cuMemFree", "cudaFreeHost"),
        NOT_ALLOCATING,
    )[spans]
    # Of the calls that take memory: all of them in four recordings of emptied caches. One that only takes has not yet
    # grown to its size, which passes by itself (95 and 16 calls in two programs that were well).
    return float(given.sum()) >= 0.1 * float((~given).sum())


def perhaps_graph_breaks(context: TraceContext) -> Candidate | None:
    """Compiled graphs with eager kernels among them: compiled one by one, or one that broke."""
    regions = context.host_spans(REGION)
    regions = regions[np.isin(context.trace.thread[regions], main_threads(context))]
    if len(regions) < 2 * num_rounds(context):
        return None
    graphs = context.time_of(context.host_spans(r"CompiledFxGraph"))
    inside = graphs if len(graphs.start) else context.time_of(regions)
    between = difference(joined(context.time_of(regions), time_between(context, regions)), inside)
    works = np.flatnonzero(context.launched_in(between) & ~under(context, BACKWARD))
    works = works[~context.launched_in(context.time_of(context.host_spans(r"^Optimizer\.")))[works]]
    if not len(works):
        return None
    return Candidate(
        what=f"{len(regions) / context.num_steps:.3g} compiled graphs a step, and between them "
        f"{len(works) / context.num_steps:,.0f} eager kernels",
        cause="graph breaks: what is between two graphs runs eagerly",
        change="torch.compile what is around all of them, with fullgraph=True, which names what breaks it",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=0.1, keep_worst=0.9, host=between, host_best=0.1, host_worst=0.9),
        evidence=host_evidence(context, regions),
        spans=tuple(regions[:200].tolist()),
    )


@rule(
    "graph-breaks",
    version=6,
    order=49,
    saves="host",
    suspect=perhaps_graph_breaks,
    is_ambiguous=True,
    tell="TORCH_LOGS=graph_breaks, which names every break, or none",
)
def graph_breaks(context: TraceContext) -> Candidate | None:
    """What Python goes on with after a break is compiled for itself and called from inside of what was broken. Regions
    beside each other are functions that somebody compiled one by one."""
    regions = context.host_spans(REGION)
    regions = regions[np.isin(context.trace.thread[regions], main_threads(context))]
    resumed = spans_under(context, regions, REGION)
    top = regions[
        ~resumed
        & (covered_within(context.time_of(regions[resumed]), *(context.start_ns[regions], context.end_ns[regions])) > 0)
    ]
    if int(resumed.sum()) / num_rounds(context) < 1:
        return None
    inside = context.time_of(context.host_spans(r"CompiledFxGraph"))
    between = difference(context.time_of(top), inside)
    works = np.flatnonzero(context.launched_in(between)) if len(inside.start) else EMPTY
    made = np.flatnonzero(context.launched_in(context.time_of(top)) & context.family("fused"))
    made = made[~np.isin(made, works)]
    reads = np.array(
        [
            wait.call
            for wait in host_waits(context)
            if covered_within(between, context.start_ns[[wait.row]], context.end_ns[[wait.row]])[0]
        ],
        dtype=np.int64,
    )
    once = len(top) / (len(top) + int(resumed.sum()))  # one light kernel for all pieces: 3.8 of 15.7 ms in four (H200)
    num = (len(top) + int(resumed.sum())) / context.num_steps
    return Candidate(
        what=f"The compiled model runs as {num:.3g} separate graphs a step",
        cause="graph breaks: every break returns to Python, checks guards and launches eagerly in between",
        change="TORCH_LOGS=graph_breaks names them; remove .item(), prints and data-dependent branches, then "
        "fullgraph=True",
        where=place_of_host(context, top),
        fix=Fix(
            host=context.time_of(top),
            host_best=0.1,
            host_worst=0.7 if int(resumed.sum()) >= 2 * num_rounds(context) else 1.0,  # one break costs what it costs
            works=np.concatenate((works, made)),
            keep_best=np.concatenate((np.zeros(len(works)), np.full(len(made), once))),
            keep_worst=np.concatenate((_kept_of_breaks(context, works, len(top)), np.ones(len(made)))),
            freed=reads,
        ),
        evidence=host_evidence(context, top),
        spans=tuple(top.tolist()),
    )


def _kept_of_breaks(context: TraceContext, works: Index, num: int) -> Seconds:
    """Of what runs eagerly in a break, what is left at worst: of several light kernels in a row, which are compiled
    into one, half; of others nearly all."""
    light = context.family("pointwise", "reduce", "dropout", "copy")[works]
    # Light kernels that run eagerly in a break, from which on compiling them pays, as of any chain.
    chained = light & (light.sum() >= 4 * max(1, num))
    return np.where(chained, 0.5, 0.9)


@rule(
    "launch-bound",
    version=5,
    order=90,
    saves="host",
    trust=Trust(0.8, 1.15, "fitted: five recordings on an H200 gained up to 1.11 of the replayed best"),
    more_at_best=0.1,
    is_general=True,
    is_ambiguous=True,
    alternative_to=(
        "graph-breaks",
        "micro-batches",
        "pointwise-chains",
        "tensor-loop",
        "unfused-optimizer",
    ),
    tell="a step timed out of torch.cuda.graph; if it takes as long, launches are not what it waits for",
)
def launch_bound(context: TraceContext) -> Candidate | None:
    kernels = np.flatnonzero(context.work_kind == int(Kind.KERNEL))
    if len(kernels) < 8 or not linked(context).any():
        return None
    per_step = len(kernels) / context.num_steps
    typical_s = float(np.median(context.work_s[kernels]))
    host_s = host_s_a_launch(context)
    if host_s <= 0:
        return None
    tiny = float((context.work_s[kernels] < 10e-6).mean())
    cold, late = _cold_calls(context), launched_late(context)
    return Candidate(
        what=f"The host launches {per_step:,.0f} kernels a step, {host_s * 1e6:.3g} µs each; half take under "
        f"{typical_s * 1e6:.3g} µs",
        cause=f"host launch-bound: the device finishes before the next kernel is launched ({tiny:.0%} of kernels "
        "under 10 µs)"
        + ("; the batch is small: products fill less than half of the SMs" if _is_small(context) else ""),
        change="CUDA graphs (torch.compile(mode='reduce-overhead') or torch.cuda.graph), torch.compile to fuse, or "
        "a larger batch",
        where=place_of(context, kernels),
        fix=Fix(
            host=difference(launching_time(context), context.time_of(cold)),
            # Share of the host time of eager launches that remains with CUDA graphs: inputs are copied, the rest is one
            # call.
            host_best=0.1 if context.is_timed or recorded_frac(context) < 1.0 else RECORDED_FRAC,
            host_worst=0.5,
            closed=late[~np.isin(context.trace.launch[context.rows[late]], cold)],  # in a graph they follow at once
        ),
        evidence=kernel_evidence(context, kernels),
        spans=tuple(context.rows[kernels[:200]].tolist()),
        unchecked=()
        if context.is_timed or not len(context.of_kind(Kind.RUNTIME))
        else (
            "how fast the host is unrecorded: taken from what such recordings usually cost; time a step without one",
        ),
        least_frac=GENERAL_FRAC,
        # Of the step, what a graph must bring at worst: hosts of one kind differ by as much (40.5 and 34.1 ms for the
        # same program on two of them, 6 % promised at worst on the first and nothing to be had on the second), and
        # under capture a library may take other kernels (7 % promised, none realized). Slow hosts that were planted
        # have 20 % and more.
        sure_frac=0.075 if context.is_timed else SURE_FRAC,  # at worst, untimed, is by a host that was never seen
    )


def _cold_calls(context: TraceContext) -> Index:
    """Calls of a tenth of a second during which the device does nothing: it is opened, or code is loaded, which no
    graph spares. In a recording of a first forward pass they were 12.9 of 16 s."""
    calls = context.of_kind(Kind.RUNTIME)
    calls = calls[context.trace.duration_s[calls] > COLD_NS / 1e9]
    start, end = context.start_ns[calls], context.end_ns[calls]
    return calls[covered_within(context.time_of(context.rows), start, end) < 0.1 * (end - start)]


def _is_small(context: TraceContext) -> bool:
    """Whether most of the products' time is spent in kernels of fewer blocks than half of the SMs."""
    grid, products = context.trace.extra.get("grid"), np.flatnonzero(context.family("gemm", "conv"))
    if grid is None or context.device is None or not len(products):
        return False
    blocks = np.prod(np.maximum(grid[context.rows[products]], 1).astype(np.float64), axis=1)
    small = products[blocks < 0.5 * context.device.num_cores]
    return context.per_step_s(small) > 0.5 * context.per_step_s(products)


@rule(
    "host-code",
    version=5,
    order=80,
    saves="host",
    is_general=True,
    is_ambiguous=True,
    alternative_to=("host-contention",),
    tell="a recording with stacks, in which the same line of Python is there in every step",
)
def host_code(context: TraceContext) -> Candidate | None:
    """Long stretches in which the host neither launches nor waits, and no other rule knows why. An op that now and then
    takes many times as long as it does is the machine's, not the program's."""
    time, stalled = elsewhere_time(context), context.time_of(unusual_spans(context, _of_launching(context)))
    kept = covered_within(stalled, time.start, time.end) < 0.5 * (time.end - time.start)
    time = Intervals(time.start[kept], time.end[kept])
    if not recurs(context, time):
        return None
    per_step_s = time.total / 1e9 / context.num_steps
    spans = context.of_kind(Kind.OP, Kind.ANNOTATION, Kind.PYTHON)
    held = spans[
        covered_within(time, context.start_ns[spans], context.end_ns[spans])
        > 0.5 * (context.end_ns - context.start_ns)[spans]
    ]
    held = held[context.trace.duration_s[held] > 100e-6]
    return Candidate(
        what=f"The host spends {show_ms(per_step_s)} a step on code that launches nothing",
        cause="host code between launches (preprocessing, Python loops, I/O) while the device runs dry",
        change="move it to a worker process or a thread ahead of the step, to the GPU, or out of the loop",
        where=place_of_host(context, held),
        fix=Fix(host=time, host_best=0.0, host_worst=0.5),
        evidence=host_evidence(context, held),
        spans=tuple(held[:200].tolist()),
        unchecked=() if len(held) else ("what the host did: the trace has no span there; record with stacks",),
        least_frac=GENERAL_FRAC,
        sure_frac=0.0
        # Whether every call of Python was recorded, which takes as long as many of them: stretches without an op were 9
        # ms of a step that had none (an encoder of a hub, 107 ms recorded and 50 unrecorded).
        if context.is_timed and not bool((context.trace.kind == int(Kind.PYTHON)).any())
        else GENERAL_FRAC,  # else how long it is is a guess
    )


def perhaps_micro_batches(context: TraceContext) -> Candidate | None:
    """Passes by what gradients are added to, two at least, or passes over a few samples that may follow from each
    other."""
    kernels = np.flatnonzero(context.work_kind == int(Kind.KERNEL))
    if not len(kernels) or context.per_step_s(kernels) > 0.7 * context.step_s:
        return None
    if (memory_frac(context) or 0.0) > MERGED_FRAC:
        return None
    added = under(context, r"AccumulateGrad") & (context.work_kind == int(Kind.KERNEL))
    leaves = len(context.host_spans(r"^torch::autograd::AccumulateGrad$", Kind.OP))
    written = leaves - int(added.sum())
    passes = leaves / written if written > 0 else 0.0
    if passes >= 2.0:
        return _in_one_pass(context, kernels, passes, True)
    passes = passes_again(context)
    return _in_one_pass(context, kernels, passes, False) if passes >= MANY_PASSES else None


@rule(
    "micro-batches",
    version=6,
    order=17,
    saves="host",
    suspect=perhaps_micro_batches,
    is_ambiguous=True,
    tell="whether a pass needs what the one before gave; if not, all of them can be one",
)
def micro_batches(context: TraceContext) -> Candidate | None:
    """Gradients accumulated over batches too small for the device, or samples one by one: the same few kernels, many
    times a step."""
    passes = passes_a_step(context) or turns_a_step(context)  # a loss may be written out
    kernels = np.flatnonzero(context.work_kind == int(Kind.KERNEL))
    busy_s = context.per_step_s(kernels)
    if not len(kernels) or busy_s > 0.7 * context.step_s:
        return None
    if (memory_frac(context) or 0.0) > MERGED_FRAC:  # a larger batch does not fit
        return None
    adds_up = passes >= MANY_PASSES and _adds_up(context, passes)
    if not adds_up:
        passes = passes_over_samples(context) if passes <= 1.0 else 0.0
    return _in_one_pass(context, kernels, passes, adds_up) if passes >= MANY_PASSES else None


def _in_one_pass(context: TraceContext, kernels: Index, passes: float, adds_up: bool) -> Candidate:
    once, busy_s = 1.0 / passes, context.per_step_s(kernels)
    return Candidate(
        what=f"{passes:.3g} small batches a step, and the device is busy {context.frac(busy_s):.0%} of it",
        cause=f"small batch: gradients are accumulated over {passes:.3g} batches that do not fill the device"
        if adds_up
        else f"small batch: {passes:.3g} passes over a sample or a few each do not fill the device",
        change="one larger batch instead of accumulating (memory permitting), or fewer and larger micro-batches"
        if adds_up
        else "one pass over all of them together (pad what differs in length, or sort by it)",
        where=place_of(context, kernels),
        fix=Fix(
            works=kernels,
            keep_best=max(0.2, once),
            keep_worst=0.9,
            host=launching_time(context),
            host_best=once,
            host_worst=0.5,
        ),
        evidence=kernel_evidence(context, kernels),
        spans=tuple(context.rows[kernels[:200]].tolist()),
        unchecked=("whether the larger batch fits into memory",),
        least_frac=GENERAL_FRAC,
    )


def _adds_up(context: TraceContext, passes: float) -> bool:
    """Whether gradients of one pass are added to those of the one before: passes that follow from each other (inner
    steps, a picture that is changed, a search) cannot be one."""
    added = under(context, r"AccumulateGrad") & (context.work_kind == int(Kind.KERNEL))
    return float(added.sum()) / num_rounds(context) >= passes - 1.0


def perhaps_host_contention(context: TraceContext) -> Candidate | None:
    """Fewer stalls than that, or long gaps some of which are between ops that usually follow at once."""
    stalls, excess_s = stalled_spans(context, _of_launching(context))
    # Of the step, and of long gaps: what may be a thread that is not running.
    stopped_s = stopped_for_s(context, 0.25)
    if max(context.frac(excess_s / context.num_steps), context.frac(stopped_s / context.num_steps)) < 0.02:
        return None
    what = (
        f"{show_ms((excess_s + stopped_s) / context.num_steps)} a step pass in and between calls that are mostly short"
    )
    return _descheduled(context, stalls, excess_s, what)


@rule(
    "host-contention",
    version=5,
    order=70,
    saves="host",
    suspect=perhaps_host_contention,
    is_ambiguous=True,
    tell="the same run on a machine of its own: its stops are gone, or at other places",
)
def host_contention(context: TraceContext) -> Candidate | None:
    """The same op now and then takes many times its usual host time: the thread was not running. Between ops it was not
    running either: long gaps go along."""
    stalls, excess_s = stalled_spans(context, _of_launching(context))
    few = context.frac(excess_s / context.num_steps) < 0.05 or not lasts_on(context, stalls)
    # Of the step, from which on stops between ops alone are told.
    if few and context.frac(mostly_stopped_s(context) / context.num_steps) < 0.1:
        return None
    stopped = show_ms(mostly_stopped_s(context) / context.num_steps)
    what = (
        f"{len(stalls) / context.num_steps:.3g} host calls a step take over ten times their usual time"
        if not few
        else f"{stopped} a step pass between ops that usually follow at once"
    )
    return _descheduled(context, stalls, excess_s, what)


def _descheduled(context: TraceContext, stalls: Index, excess_s: float, what: str) -> Candidate:
    time = joined(context.time_of(stalls), elsewhere_time(context))
    kept = 1.0 - min(0.95, (excess_s + elsewhere_time(context).total / 1e9) / max(1e-12, time.total / 1e9))
    return Candidate(
        what=what,
        cause="CPU contention: the launching thread is descheduled (too few cores, oversubscribed threads, wrong "
        "NUMA node, or another thread of the process that holds Python's lock)",
        change="taskset/numactl the process to the cores of the GPU's NUMA node; OMP_NUM_THREADS and loader "
        "workers within them; Python that works beside the loop in a process of its own",
        where=Where(op=place_of_host(context, stalls).op),
        fix=Fix(host=time, host_best=kept, host_worst=min(1.0, kept + 0.5)),
        evidence=host_evidence(context, stalls),
        spans=tuple(stalls[:200].tolist()),
        unchecked=("which process took the cores: a trace holds one process",),
        sure_frac=SURE_FRAC,
    )


def _of_launching(context: TraceContext) -> Index:
    """Ops and calls of the threads that launch."""
    ops = context.of_kind(Kind.OP, Kind.RUNTIME)
    return ops[np.isin(context.trace.thread[ops], main_threads(context))]
