"""The verbs, each short enough to be the documentation."""

from __future__ import annotations

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

    from ridgeline.cost.check import Check
    from ridgeline.sim.published.verdict import PublishedCheck
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
