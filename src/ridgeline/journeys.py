"""The verbs, each short enough to be the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError, nearest
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.models import build

if TYPE_CHECKING:
    import os

    from ridgeline.cost.check import Check
    from ridgeline.sim.published.verdict import PublishedCheck
    from ridgeline.sim.serving.metrics import Metrics, Slo
    from ridgeline.sim.serving.simulate import Served
    from ridgeline.sim.serving.workload import Workload
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


def serve(
    model: str,
    on: str = "h200*8",
    workload: Workload | None = None,
    slo: Slo | None = None,
    *,
    spans: int = 0,
    **wanted: Any,
) -> tuple[Served, Metrics]:
    """What users of a deployment would see: every request of ``workload`` simulated, and the figures made of it.

    ``model`` is a name of the zoo, a hub path or a ``config.json``; ``on`` a cluster; ``wanted`` the fields of
    ``ridgeline.sim.serving.compose.Wanted`` (tp, pp, ep, attention_dp, precision, kv, engine, disaggregated, …).
    """
    from ridgeline.sim.serving.compose import Wanted, deployment_of
    from ridgeline.sim.serving.metrics import metrics
    from ridgeline.sim.serving.simulate import simulate
    from ridgeline.sim.serving.workload import closed

    known = set(Wanted.__dataclass_fields__)
    for name in wanted:
        if name not in known:
            raise InputError(f"serve has no option {name!r}{nearest(name, known)}")
    deployment = deployment_of(model, on, Wanted(**wanted))
    served = simulate(deployment, workload or closed(32, 1024, 1024), max_spans=spans)
    return served, metrics(served, slo)


def serving_timeline(served: Served) -> Trace:
    """The iterations of every instance, and the cache, batch and queue over time."""
    from ridgeline.trace import TraceBuilder

    deployment = served.deployment
    where = f"{deployment.num_devices} × {deployment.device.name}"
    trace = TraceBuilder(name=f"{deployment.anatomy.name} on {where}, served")
    num_prefill = deployment.prefill.replicas if deployment.prefill else 0
    for worker, start_s, end_s, prompts, decoding, steps in served.spans:
        lane = f"prefill {worker}" if worker < num_prefill else f"replica {worker - num_prefill}"
        what = "mixed" if prompts and decoding else "prefill" if prompts else "decode"
        detail = f"{prompts} prompts" if prompts else f"{steps} steps"
        trace.add(f"{what}: {detail}, batch {decoding}", lane, start_s, end_s - start_s, op=what, phase=what)
    for name in ("held", "running", "waiting"):
        label = {"held": "cache_tokens", "running": "batch", "waiting": "queue"}[name]
        for at_s, value in zip(served.samples["at_s"], served.samples[name], strict=True):
            trace.count(label, at_s, value)
    if served.iterations and len(served.spans) < served.iterations:
        trace.note("runs of equal decoding steps are drawn as one span")
    return trace.build()
