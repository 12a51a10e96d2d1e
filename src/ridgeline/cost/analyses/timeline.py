"""When everything of a predicted step happens, as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ridgeline.cost.analyses.memory_curve import memory_curve
from ridgeline.cost.prediction import Prediction, Span
from ridgeline.trace import Trace, TraceBuilder


def timeline(prediction: Prediction, max_spans: int = 300_000) -> Trace:
    """When everything of a predicted step happens: host calls, kernels and live memory, repeats unrolled."""
    trace = TraceBuilder(name=f"{prediction.graph.name} on {prediction.device.name}, {prediction.execution}, predicted")
    trace.describe(devices=[{"name": prediction.device.name}], origin="predicted")
    called_s, end_s = list[float](), 0.0
    spans = prediction.spans()
    for call, kernels in _launched(islice(spans, max_spans)):
        row = _add_span(trace, call, -1) if call else -1
        called_s += [call.start_s] if call else []
        for span in kernels:
            _add_span(trace, span, row)
        end_s = max([end_s, *(span.start_s + span.duration_s for span in (call, *kernels) if span)])
    if next(spans, None) is not None:
        trace.note(f"the first {max_spans:,} spans of the step; the rest are left out")
        return trace.build()
    for at_s, live_bytes in memory_curve(prediction, called_s, end_s):
        trace.count("memory_bytes", at_s, live_bytes)
    return trace.build()


def _launched(spans: Iterable[Span]) -> Iterator[tuple[Span | None, list[Span]]]:
    """Predicted spans by call: a line's kernels come before the host time that launches them, if it takes any."""
    waiting = list[Any]()
    for span in spans:
        if span.lane == "host":
            same = waiting[-1:] if waiting and waiting[-1].op == span.op and waiting[-1].module == span.module else []
            for other in waiting[: len(waiting) - len(same)]:
                yield None, [other]
            yield span, same
            waiting = []
        else:
            waiting.append(span)
    for other in waiting:
        yield None, [other]


def _add_span(trace: TraceBuilder, span: Span, launch: int) -> int:
    start_s, duration_s = span.start_s, span.duration_s
    extra = {"floor_s": span.floor_s} if span.floor_s > 0 else None
    return trace.add(
        span.name, span.lane, start_s, duration_s, module=span.module, op=span.op, phase=span.phase, launch=launch,
        extra=extra,
    )  # fmt: skip
