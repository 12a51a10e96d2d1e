"""The verbs, each short enough to be the documentation."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from os import PathLike as PathLikeType
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError, nearest
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.models import build as build_network

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from ridgeline.capture.importers.headers import Header
    from ridgeline.capture.importers.program import Imported
    from ridgeline.engine.drop_in import Optimized
    from ridgeline.findings.diff import Difference
    from ridgeline.findings.explanation import Explanation, Summary
    from ridgeline.findings.regression import Gate
    from ridgeline.findings.replay.what_if import WhatIf
    from ridgeline.hardware import Cluster
    from ridgeline.optimizer.in_place.substitution import Applied
    from ridgeline.plan import Plan
    from ridgeline.profiler.recorder import Run
    from ridgeline.sim.search import Search, Space
    from ridgeline.sim.serving.metrics import Slo
    from ridgeline.sim.serving.result import Serving
    from ridgeline.sim.serving.workload import Workload
    from ridgeline.sim.step import Step, Trouble
    from ridgeline.store.validations import Run as Validation
    from ridgeline.study.price import Figure
    from ridgeline.trace import Trace
    from ridgeline.validation.operators import Check
    from ridgeline.validation.verdict import PublishedCheck

    PathLike = str | os.PathLike[str]


def predict(
    model: Graph | Imported | str, on: str | Device = "h200", execution: str = "eager", **options: Any
) -> Prediction:
    """How long one step takes, what bounds it, and what it needs in memory, energy and money.

    ``model`` is a captured graph, a name of the zoo or a model that ``load`` read. For a name, ``options`` are the
    zoo's (batch, seq, mode, precision, …), for a loaded model its dims (``batch=8``, or ``dims={…}``). ``on`` is a
    device's name, with overrides if you like: ``"h200 hbm_bandwidth=2x"``.
    """
    if hasattr(type(model), "input_specs"):
        model, options = imported_graph(cast("Imported", model), options), {}
    if isinstance(model, Graph) and options:
        raise InputError(
            f"{', '.join(options)}: a captured graph has its sizes already; options are for names of the zoo"
        )
    if not isinstance(model, (Graph, str)):
        raise InputError(
            f"predict takes a graph or a zoo name, not {type(model).__name__}: "
            "capture the model first with ridgeline.capture(model, args=…)"
        )
    return _uncollected(model, device_named(on), execution, options)


def imported_graph(model: Imported, options: Mapping[str, Any]) -> Graph:
    """The graph of a loaded model at the sizes asked for: captured, or of the zoo's decoder that a header describes."""
    if model.import_format != "gguf":
        from ridgeline.capture.importers import captured

        return captured(model, options)
    from ridgeline.models.gguf import network

    header = cast("Header", model)
    sizes = {**{k: v for k, v in options.items() if k != "dims"}, **(options.get("dims") or {})}
    strange = sorted(set(sizes) - {"batch", "seq", "kv", "mode", "precision"})
    if strange:
        raise InputError(f"{model.import_name} takes batch, seq, kv, mode and precision, not {', '.join(strange)}")
    return network(model.import_name, header.facts, header.stored, **sizes)


def _uncollected(model: Graph | str, device: Device, execution: str, options: dict[str, Any]) -> Prediction:
    """A prediction makes thousands of small objects and no cycles: looking for some would take a tenth of its time."""
    with _collecting_later():
        graph = build_network(model, **options) if isinstance(model, str) else model
        return estimate(graph, device, execution)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Rubbish is not looked for in here."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def build(model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """An engine of a model: ``build(module, (x,), shapes={"batch": (1, 8, 64)}, error_budget=None, budget_s=60)``.

    A name of the zoo gives that network's graph instead: ``build("llama-3-8b", batch=1)``.
    """
    if isinstance(model, str):
        return build_network(model, **options)
    from ridgeline.optimizer.build_engine import build_engine

    return build_engine(model, args, kwargs, **options)


def validate(path: str | os.PathLike[str], on: str | Device = "h200") -> Check:
    """How far predictions of single operators are from a CSV file of measured ones.

    Columns are ``kind, dtype, phase, library, shape, measured_s`` and, if you like, ``cache`` (cold or warm).
    """
    from ridgeline.validation.measurements import read_measurements
    from ridgeline.validation.operators import check

    return check(on, read_measurements(path))


def validate_published(
    path: str | os.PathLike[str], *, keep: bool = True
) -> tuple[PublishedCheck, Validation, Validation | None]:
    """How far simulations are from a file of published results: the verdicts, this run, and the last one kept.

    The kind of file is known by its header. The run is kept unless ``keep`` is off or nothing changed since the last.
    """
    from ridgeline import __version__
    from ridgeline.store import validations
    from ridgeline.validation.registry import check_published

    check = check_published(path)
    run = validations.run_of(check.name, __version__, {row.key: (row.measured, row.predicted) for row in check.rows})
    before = validations.last(check.name)
    if keep:
        validations.append(run)
    return check, run, before


def simulate(
    model: Graph | str,
    on: str | Cluster = "h100-sxm*8",
    plan: Plan | None = None,
    *,
    stack: str = "",
    trouble: Trouble | None = None,
    seq: int | None = None,
    **choices: Any,
) -> Step:
    """One training step of a model under a parallel plan on a cluster: time, memory, communication, energy, money.

    ``model`` is a name of the zoo, or a captured training graph of one micro-batch. ``on`` is a cluster:
    ``"h100-sxm*16384"``. The plan is given whole, or by its choices (``tp=8, pp=16, global_batch=2048``); what is left
    of the devices is data parallel. ``stack`` is a software generation, the newest fitted on the device unless told.
    """
    from ridgeline.sim.request import simulated

    return simulated(model, on, plan, stack=stack, trouble=trouble, seq=seq, choices=choices)


def plans(
    model: str | Callable[[int], Graph],
    on: str | Cluster,
    *,
    global_batch: int,
    seq: int | None = None,
    precision: str = "bf16",
    stack: str = "",
    space: Space | None = None,
    top: int = 5,
    progress: Callable[[int, int], None] | None = None,
    **choices: Any,
) -> Search:
    """The best parallel plans of a model on a cluster, why they win, and how much each choice matters.

    Every legal plan of ``space`` is a candidate; those that cannot fit or cannot win are not simulated. ``choices`` fix
    what is not to be searched (``overlap_grads=False``, ``optimizer="sgd"``). ``model`` is a name of the zoo, or a
    function that makes the training graph of a micro-batch.
    """
    from ridgeline.hardware import cluster as cluster_named
    from ridgeline.plan import Plan
    from ridgeline.sim.generation import default_stack, stack_of
    from ridgeline.sim.request import training_graph
    from ridgeline.sim.search import search

    cluster = cluster_named(on) if isinstance(on, str) else on
    found = stack_of(stack or default_stack(cluster.device, cluster.num_devices, precision), cluster.device)
    base = Plan(**{**found.choices, "global_batch": global_batch, "precision": precision, **choices})
    made = model if callable(model) else lambda batch: training_graph(model, batch, seq, precision)
    return search(made, cluster, found, base, space, top=top,
                  progress=progress)  # fmt: skip


def explain(
    source: Trace | PathLike | Sequence[PathLike],
    on: str | Device | None = None,
    *,
    model: Graph | str | None = None,
    rank: int | None = None,
    step: int | None = None,
    between: str | tuple[float, float] | None = None,
    annotation: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Where the time of a run went, why, what to change and how much that brings.

    ``source`` is a trace, a file, a folder with a file for each rank, or several of these. ``on`` names the device when
    the trace does not. ``rank``, ``step``, ``between`` (``"1.2s..1.5s"``) and ``annotation`` choose a part of it;
    ``model`` is what was run, a graph or a name of the zoo, whose work the recorded work is compared with.
    ``progress`` is called with the number of ranks that were read and of all files.
    """
    from ridgeline.findings.explanation import communication_of, explained, summary_of
    from ridgeline.trace import Trace, read_ranks
    from ridgeline.trace.analyses.select import selected
    from ridgeline.trace.read import trace_files

    device = device_named(on) if on is not None else None
    num_files = 1 if isinstance(source, Trace) else sum(len(trace_files(path)) for path in _paths(source))
    needed = build(model, mode="train") if isinstance(model, str) else model
    aside: list[str] = []
    worlds: list[int | None] = []

    def ranks() -> Iterator[Trace]:
        """One rank after another, read again each time: only one is held."""
        aside.clear()
        worlds.clear()
        for trace in [source] if isinstance(source, Trace) else read_ranks(_paths(source), aside=aside):
            own = trace.ranks()
            worlds.append(trace.meta.get("distributed", {}).get("world_size"))
            chosen = step is not None or between is not None or bool(annotation)
            for one in (trace.of_rank(number) for number in own) if len(own) > 1 else (trace,):
                yield selected(one, step=step, between=between, annotation=annotation) if chosen else one

    summaries: list[Summary] = []
    collectives: list[Trace] = []
    alone: Trace | None = None
    for alone in ranks():
        summaries.append(summary_of(alone))
        collectives.append(communication_of(alone))
        if progress is not None:
            progress(len(summaries), num_files)
    beside = {"set_aside": tuple(aside), "num_ranks": len(summaries), "worlds": tuple(worlds)}
    if len(summaries) == 1 and alone is not None:
        return explained(_beside(alone, beside), summaries, device=device, needed=needed)
    chosen = _typical(summaries) if rank is None else _place_of(rank, summaries)
    trace = _beside(next(islice(ranks(), chosen, None)), beside)
    others = [c for i, c in enumerate(collectives) if i != chosen]
    found = explained(trace, summaries, others, device=device, needed=needed)
    return replace(found, title=_job_title(source, trace, summaries[chosen].rank))


def what_if(source: Trace | PathLike, *changes: str) -> list[WhatIf]:
    """A step scheduled again after changes: ``what_if(trace, "kernel=gemm:2x", "workers=4", "overlap=communication")``.

    Each alone, then all together; what else holds the step shows, because nothing is subtracted.
    """
    from ridgeline.findings.context.context import TraceContext
    from ridgeline.findings.replay.what_if import what_if as tried
    from ridgeline.profiler.floors import device_of

    trace = _one_trace(source)
    return tried(TraceContext(trace, device_of(trace)), changes)


def annotated(found: Explanation) -> Trace:
    """The explained trace with the critical path and the findings as lanes of their own, for a timeline viewer."""
    from ridgeline.findings.annotate import annotate

    if found.context is None:
        raise InputError("this explanation was read from JSON and has no trace any more: explain the trace again")
    return annotate(found.context, found.findings)


def _paths(source: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [source] if isinstance(source, (str, PathLikeType)) else list(source)


def _beside(trace: Trace, beside: Mapping[str, Any]) -> Trace:
    """The trace, with a note of what lies beside it: further ranks, and files that are no traces."""
    return trace.with_meta(**beside)


def _job_title(source: Trace | PathLike | Sequence[PathLike], trace: Trace, rank: int) -> str:
    """What several ranks are called: their folder or their one file, and which of them is looked into."""
    given = list(source) if isinstance(source, (list, tuple)) else [source]
    folder = Path(given[0]) if len(given) == 1 and isinstance(given[0], (str, PathLikeType)) else None
    name = (folder.resolve().name if folder and folder.is_dir() else "") or trace.title
    return f"{name}, rank {rank} in detail"


def _place_of(rank: int, summaries: Sequence[Summary]) -> int:
    """Where in the order of reading a rank stands."""
    known = [one.rank for one in summaries]
    if rank not in known:
        raise InputError(f"no rank {rank} in this run: it has {', '.join(map(str, sorted(known)[:20]))}")
    return known.index(rank)


def _typical(summaries: Sequence[Summary]) -> int:
    """The rank to look into: the one in the middle by time in collectives, which waits as most ranks do."""
    order = sorted(range(len(summaries)), key=lambda i: summaries[i].comm_s)
    return order[len(order) // 2]


def diff(a: Trace | PathLike, b: Trace | PathLike) -> Difference:
    """What differs between two runs, measured, simulated or predicted: aligned by module and op, largest change
    first. Of folders every rank of one is compared with the same rank of the other, and numbers are means over them."""
    from itertools import zip_longest

    from ridgeline.findings.diff import diff as compared
    from ridgeline.findings.diff import idle_by_cause, over_ranks

    found: list[Difference] = []
    alone = {"A": 0, "B": 0}
    for one, other in zip_longest(_rank_traces(a), _rank_traces(b)):
        if one is None or other is None:
            alone["B" if one is None else "A"] += 1
        else:
            found.append(compared(one, other, idle_by_cause, found[0].aligned_by if found else ""))
    made = over_ranks(found)
    if made.num_ranks > 1:
        made = replace(made, a=_run_title(a, made.a), b=_run_title(b, made.b))
    left = [f"{num} more rank{'s' if num > 1 else ''} of {side} not compared" for side, num in alone.items() if num]
    return replace(made, notes=(*made.notes, *left))


def _run_title(source: Trace | PathLike, title: str) -> str:
    """What a run of several ranks is called: its folder."""
    return Path(source).name if isinstance(source, (str, PathLikeType)) else title


def _rank_traces(source: Trace | PathLike) -> Iterator[Trace]:
    """The ranks of a run, one after another."""
    from ridgeline.trace import Trace, read_ranks

    aside: list[str] = []
    for trace in [source] if isinstance(source, Trace) else read_ranks(_paths(source), aside=aside):
        own = trace.ranks()
        yield from (trace.of_rank(rank) for rank in own) if len(own) > 1 else (trace,)


def _one_trace(source: Trace | PathLike) -> Trace:
    from ridgeline.trace import Trace, read_ranks

    return source if isinstance(source, Trace) else next(read_ranks(_paths(source)))


def gate(baseline: PathLike, runs: PathLike, max_regression: float = 0.03) -> Gate:
    """Are these runs slower than the baseline by more than allowed, beyond what runs scatter, and where?

    Each is a folder with a trace for every run, or a file of step times (JSON: a list of seconds for every run).
    """
    from ridgeline.findings.regression import gate_runs

    return gate_runs(Path(baseline), Path(runs), max_regression)


def profile(model: Any | Iterable[Any] | None = None, out: str | os.PathLike[str] | None = None, **wanted: Any) -> Run:
    """Record a running program: ``with profile() as run:``, and ``run.step()`` after every step.

    The warm-up is found from the step times and left out; ``steps`` steps are then recorded with shapes, module paths
    (of ``model``, else of every model alive), source lines, power and clocks. ``run.trace`` is the result; its notes
    say when the run was steady and what recording cost. ``wanted``: steps, warmup, max_warmup, shapes, stack, modules,
    power, memory.
    """
    from ridgeline.profiler.recorder import Run, wanted_of

    return Run(out, model, wanted_of(wanted))


def link(trace: Trace, to: Graph | Prediction, on: str | Device | None = None) -> Trace:
    """The trace with each kernel's node of the captured graph, its floor and its expected time beside the measured.

    ``to`` is the graph of the same model and inputs (predicted on the device the trace names, or ``on``), or a
    prediction of it.
    """
    from dataclasses import replace

    from ridgeline.profiler.floors import device_of
    from ridgeline.profiler.nodes import with_nodes

    if isinstance(to, Graph):
        device = on or device_of(trace)
        if device is None:
            raise InputError("the trace does not name a device that is known here: say which with on=…")
        to = predict(to, on=device)
    linked, matched = with_nodes(trace, to)
    note = (
        f"{matched.num_matched:,} of {matched.num_ops:,} ops found their node of {to.graph.name}: "
        f"{matched.frac:.1%} of the device's time"
    )
    return replace(linked, notes=(*linked.notes, note))


def serve(
    model: str,
    on: str = "h200*8",
    workload: Workload | None = None,
    slo: Slo | None = None,
    *,
    spans: int = 0,
    **wanted: Any,
) -> Serving:
    """What users of a deployment would see: every request of ``workload`` simulated, and the figures made of it.

    ``serve(…).metrics.ttft_s.mean`` is the mean time to first token. ``slo`` has limits for goodput, and ``spans`` is
    the number of iterations to keep for ``.trace()``.

    Latencies of a closed loop are those of its steady state: the requests that start it all at once are left out.

    ``model`` is a name of the zoo, a hub path or a ``config.json``; ``on`` a cluster; ``wanted`` the fields of
    ``ridgeline.sim.serving.compose.Wanted`` (tp, pp, ep, attention_dp, precision, kv, engine, disaggregated, …).
    """
    from ridgeline.sim.serving.compose import Wanted, deployment_of
    from ridgeline.sim.serving.metrics import Slo, metrics, steady
    from ridgeline.sim.serving.result import Serving
    from ridgeline.sim.serving.simulate import simulate
    from ridgeline.sim.serving.workload import closed

    known = set(Wanted.__dataclass_fields__)
    for name in wanted:
        if name not in known:
            raise InputError(f"serve has no option {name!r}{nearest(name, known)}")
    deployment = deployment_of(model, on, Wanted(**wanted))
    served = simulate(deployment, workload or closed(32, 1024, 1024), max_spans=spans)
    limits = slo or Slo()
    return Serving(served, metrics(served, limits, skip=steady(served)), limits)


def price(device: str | Device, as_: str = "vendor-price", **assume: float) -> Mapping[str, Figure]:
    """What a chip costs, with 90 % intervals: silicon, yield, bill of materials, price, an hour of use, carbon.

    ``assume`` sets assumptions (``margin=0.5``, ``utilization=0.9``); ``as_`` is vendor-price, cost-plus or internal.
    """
    from ridgeline.study.price import Bill, drawn, figures

    found = device_named(device)
    return figures(Bill(found, None, assume, as_).totals(), drawn(found, assume, as_).totals())


def optimize(
    model: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, **wanted: Any
) -> Optimized:
    """The model as a faster callable, proved and measured; never slower than eager or ``torch.compile``.

    ``fast(...)`` is called as the model is, and ``print(fast.receipt)`` says what was changed, gained and rejected.
    ``wanted``: mode ("infer", or "train" for a step that is differentiated), loss, optimizer, budget_s (120),
    memory_limit ("40 GB"; in training what eager needs, unless told), error_budget (None gives up no accuracy; with
    0.01 layers may be computed in fewer bits while results stay within 1 % of the reference, root mean square),
    use_cache, say (called with what is tried).
    """
    with _collecting_later():  # what is imported stays: looking through it and PyTorch took a quarter of the import
        from ridgeline.optimizer.request import optimize as optimized

    known = ("mode", "loss", "optimizer", "budget_s", "memory_limit", "error_budget", "use_cache", "say")
    for name in wanted:
        if name not in known:
            raise InputError(f"optimize has no option {name!r}{nearest(name, known)}")
    return optimized(model, args, kwargs, **wanted)


def apply(model: Any, parts: Sequence[str] | None = None) -> Applied:
    """Put our kernels into a Hugging Face model in place; what comes back says what was replaced and what was left.

    ``parts`` are among attention, norm, gate, rotary, loss, padding, scan and experts (None: all). ``revert`` undoes.
    """
    from ridgeline.optimizer.in_place.substitution import PARTS
    from ridgeline.optimizer.in_place.substitution import apply as put

    return put(model, PARTS if parts is None else parts)


def revert(model: Any) -> None:
    """Take out the kernels that ``apply`` put in: every forward and attribute is what it was."""
    from ridgeline.optimizer.in_place.substitution import revert as take_out

    take_out(model)
