"""The waterfall of a trace: its window is chosen, its kernels are priced, its time is accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.accounting.waterfall import Waterfall, waterfall_of
from ridgeline.findings.replay.window import window_of
from ridgeline.hardware import Device
from ridgeline.profiler.floors import device_of, with_floors
from ridgeline.trace.collectives import bus_factor, sort_of
from ridgeline.trace.kind import Kind
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
    if chosen is None:
        return trace
    rows = np.flatnonzero(trace.gpu & (trace.start_ns < end_ns) & (trace.end_ns > start_ns))
    priced = with_floors(trace, chosen, rows)[0] if "shapes" in trace.extra else trace
    return _with_links(priced, chosen, rows)


def _with_links(trace: Trace, device: Device, rows: NDArray[np.intp]) -> Trace:
    """Collectives with the least time that the links need for their bytes: between devices of a host, and between hosts
    if the group is larger than one, where every device of a host has a way out of its own."""
    rows = rows[trace.of_kind(Kind.COMMUNICATION)[rows] & (trace.optional("message_bytes")[rows] > 0)]
    near, far = device.links.get("scale_up"), device.links.get("scale_out")
    if not len(rows) or near is None:
        return trace
    floor_s = trace.optional("floor_s").copy()
    names, sizes = trace.optional("collective"), trace.optional("group_size")
    for row in rows.tolist():
        sort = sort_of(trace.words[int(names[row])]) or sort_of(trace.words[int(trace.name[row])])
        size, moved = int(sizes[row]), float(trace.optional("message_bytes")[row])
        if size < 2 or not sort:
            continue
        floor_s[row] = bus_factor(sort, min(size, near.domain_size)) * moved / near.bandwidth_bytes_per_s
        if size > near.domain_size and far is not None:
            out_bytes = bus_factor(sort, size) * moved / near.domain_size
            floor_s[row] = max(floor_s[row], out_bytes / far.bandwidth_bytes_per_s)
    return trace.with_columns(floor_s=floor_s)
