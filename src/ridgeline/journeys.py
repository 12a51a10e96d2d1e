"""The verbs, each short enough to be the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.models import build

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from ridgeline.cost.check import Check
    from ridgeline.hardware import Cluster
    from ridgeline.plan import Plan
    from ridgeline.sim.published.verdict import PublishedCheck
    from ridgeline.sim.search import Search, Space
    from ridgeline.sim.step import Step, Trouble
    from ridgeline.store.validations import Run
    from ridgeline.trace import Trace


def predict(model: Graph | str, on: str | Device = "h200", execution: str = "eager", **options: Any) -> Prediction:
    """How long one step takes, what bounds it, and what it needs in memory, energy and money.

    ``model`` is a captured graph or a name of the zoo; for a name, ``options`` are the zoo's (batch, seq, mode,
    precision, …). ``on`` is a device's name, with overrides if you like: ``"h200 hbm_bandwidth=2x"``.
    """
    if isinstance(model, Graph) and options:
        raise InputError(
            f"{', '.join(options)}: a captured graph has its sizes already; options are for names of the zoo"
        )
    if not isinstance(model, (Graph, str)):
        raise InputError(
            f"predict takes a graph or a zoo name, not {type(model).__name__}: "
            "capture the model first with ridgeline.capture(model, args=…)"
        )
    graph = build(model, **options) if isinstance(model, str) else model
    return estimate(graph, device_named(on), execution)


def validate(path: str | os.PathLike[str], on: str | Device = "h200") -> Check:
    """How far predictions of single operators are from a CSV file of measured ones.

    Columns are ``kind, dtype, phase, library, shape, measured_s`` and, if you like, ``cache`` (cold or warm).
    """
    from ridgeline.cost.check import check
    from ridgeline.cost.measurements import read_measurements

    return check(on, read_measurements(path))


def validate_published(path: str | os.PathLike[str], *, keep: bool = True) -> tuple[PublishedCheck, Run, Run | None]:
    """How far simulations are from a file of published results: the verdicts, this run, and the last one kept.

    The kind of file is known by its header. The run is kept unless ``keep`` is off or nothing changed since the last.
    """
    from ridgeline import __version__
    from ridgeline.sim.published.registry import check_published
    from ridgeline.store import validations

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
    from ridgeline.hardware import cluster as cluster_named
    from ridgeline.plan.legality import check, facts_of
    from ridgeline.sim.generation import default_stack, stack_of
    from ridgeline.sim.step import simulate_step

    cluster = cluster_named(on) if isinstance(on, str) else on
    precision = plan.precision if plan else choices.get("precision", "bf16")
    found = stack_of(stack or default_stack(cluster.device, cluster.num_devices, precision), cluster.device)
    chosen = plan or _plan_of(cluster, {**found.choices, **choices})
    graph = _training_graph(model, chosen.micro_batch, seq, precision)
    check(chosen, facts_of(graph), cluster)
    return simulate_step(graph, chosen, cluster, found, trouble=trouble)


def _plan_of(cluster: Cluster, choices: Mapping[str, Any]) -> Plan:
    """A plan from the choices a person made; data parallelism takes the devices that are left."""
    from dataclasses import fields

    from ridgeline.errors import PlanError, nearest
    from ridgeline.plan import Plan

    known = [f.name for f in fields(Plan)]
    for name in choices:
        if name not in known:
            raise PlanError(f"a plan has no choice {name!r}{nearest(name, known)}")
    inner = math.prod(max(1, choices.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    dp = max(1, choices.get("dp") or cluster.num_devices // inner)
    given = {"dp": dp, "global_batch": dp * choices.get("micro_batch", 1), **choices}
    if dp > 1 and "zero" not in choices:
        given["zero"] = 1
    if choices.get("vp", 1) > 1 and "schedule" not in choices:
        given["schedule"] = "interleaved"
    if cluster.num_devices == 1 and "execution" not in choices:
        given["execution"] = "eager"
    if choices.get("tp", 1) > 1 and "overlap_tp" not in choices:
        given["overlap_tp"] = True
    return Plan(**given)


def _training_graph(model: Graph | str, micro_batch: int, seq: int | None, precision: str) -> Graph:
    if isinstance(model, Graph):
        if model.mode != "train":
            raise InputError(f"simulate takes a training graph, and {model.name} was captured for {model.mode}")
        return model
    wide = precision if precision in ("fp16", "fp32", "tf32") else "bf16"
    return build(model, batch=micro_batch, mode="train", precision=wide, seq=seq)


def plans(
    model: str,
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
    what is not to be searched (``overlap_grads=False``, ``optimizer="sgd"``).
    """
    from ridgeline.hardware import cluster as cluster_named
    from ridgeline.plan import Plan
    from ridgeline.sim.generation import default_stack, stack_of
    from ridgeline.sim.search import search

    cluster = cluster_named(on) if isinstance(on, str) else on
    found = stack_of(stack or default_stack(cluster.device, cluster.num_devices, precision), cluster.device)
    base = Plan(**{**found.choices, "global_batch": global_batch, "precision": precision, **choices})
    return search(lambda batch: _training_graph(model, batch, seq, precision), cluster, found, base, space, top=top,
                  progress=progress)  # fmt: skip


def timeline(prediction: Prediction, max_spans: int = 300_000) -> Trace:
    """When everything of a predicted step happens: host calls, kernels and live memory, repeats unrolled."""
    from itertools import islice

    from ridgeline.cost.memory_curve import memory_curve
    from ridgeline.trace import TraceBuilder

    trace = TraceBuilder(name=f"{prediction.graph.name} on {prediction.device.name}, {prediction.execution}, predicted")
    called_s, end_s = list[float](), 0.0
    spans = prediction.spans()
    for span in islice(spans, max_spans):
        trace.add(span.name, span.lane, span.start_s, span.duration_s, module=span.module, op=span.op, phase=span.phase)
        end_s = max(end_s, span.start_s + span.duration_s)
        if span.lane == "host":
            called_s.append(span.start_s)
    if next(spans, None) is not None:
        trace.note(f"the first {max_spans:,} spans of the step; the rest are left out")
        return trace.build()
    for at_s, live_bytes in memory_curve(prediction, called_s, end_s):
        trace.count("memory_bytes", at_s, live_bytes)
    return trace.build()
