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
    from collections.abc import Iterable

    from ridgeline.cost.check import Check
    from ridgeline.profiler.recorder import Run
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
