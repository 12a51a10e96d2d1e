"""The waterfall of a trace: its window is chosen, its kernels are priced, its time is accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.accounting.waterfall import Waterfall, waterfall_of
from ridgeline.findings.replay.window import window_of
from ridgeline.hardware import Device
from ridgeline.profiler.floors import device_of, with_floors
from ridgeline.trace.table import Trace


def account(
    trace: Trace,
    device: Device | None = None,
    others: Sequence[Trace] = (),
    extra_s: NDArray[np.float64] | None = None,
) -> Waterfall:
    """Bars of one step that sum exactly to it: the mean over the steps of the window, and over devices.

    ``device`` prices kernels whose shapes were recorded (what the trace names, unless given); ``others`` are the
    collectives of further ranks; ``extra_s`` is what :func:`ridgeline.findings.accounting.needed.compared` found that a
    model does not need.
    """
    window = window_of(trace)
    priced = with_prices(trace, window.start_ns, window.end_ns, device)
    return waterfall_of(priced, window.start_ns, window.end_ns, window.num_steps, others=others, extra_s=extra_s)


def with_prices(trace: Trace, start_ns: int, end_ns: int, device: Device | None = None) -> Trace:
    """The trace with floors for the kernels of a window; as it is where it has them or nothing tells them."""
    if "floor_s" in trace.extra and np.isfinite(trace.extra["floor_s"]).any():
        return trace
    chosen = device or device_of(trace)
    if chosen is None or "shapes" not in trace.extra:
        return trace
    rows = np.flatnonzero(trace.gpu & (trace.start_ns < end_ns) & (trace.end_ns > start_ns))
    return with_floors(trace, chosen, rows)[0]
