"""Where in the user's program something happens, and the tables that a finding shows as evidence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.finding import Where
from ridgeline.findings.replay.replay import Index, Seconds


def place_of(context: TraceContext, works: Index) -> Where:
    """The place that most of the works' time has in common."""
    if not len(works):
        return Where()
    rows = context.rows[works]
    weight = context.work_s[works]
    return Where(
        module=_shared_path(context, context.trace.module[rows], weight),
        source=_heaviest(context, context.trace.source[rows], weight),
        op=_heaviest(context, context.trace.op[rows], weight),
    )


def place_of_host(context: TraceContext, spans: Index) -> Where:
    if not len(spans):
        return Where()
    weight = context.trace.duration_s[spans]
    return Where(
        module=_shared_path(context, context.trace.module[spans], weight),
        source=_heaviest(context, context.trace.source[spans], weight),
        op=_heaviest(context, context.trace.name[spans], weight),
    )


def _heaviest(context: TraceContext, words: NDArray[np.int32], weight: Seconds) -> str:
    found, inverse = np.unique(words, return_inverse=True)
    sums = np.bincount(inverse, weights=weight)
    return context.trace.words[int(found[int(np.argmax(sums))])]


def _shared_path(context: TraceContext, words: NDArray[np.int32], weight: Seconds) -> str:
    """The longest module path that holds at least nine tenths of the time."""
    found, inverse = np.unique(words, return_inverse=True)
    sums = np.bincount(inverse, weights=weight)
    total = float(sums.sum())
    prefixes: dict[str, float] = {}
    for word, seconds in zip(found.tolist(), sums.tolist(), strict=True):
        path = context.trace.words[word].split(".") if context.trace.words[word] else []
        for depth in range(1, len(path) + 1):
            key = ".".join(path[:depth])
            prefixes[key] = prefixes.get(key, 0.0) + seconds
    fitting = [path for path, seconds in prefixes.items() if seconds >= 0.9 * total]
    return max(fitting, key=len, default="")


def kernel_evidence(context: TraceContext, works: Index, num: int = 5) -> tuple[dict[str, Any], ...]:
    """The kernels behind a finding, heaviest first: name, how many a step, milliseconds a step."""
    return _table(context, context.trace.name[context.rows[works]], context.work_s[works], num, "kernel")


def host_evidence(context: TraceContext, spans: Index, num: int = 5) -> tuple[dict[str, Any], ...]:
    return _table(context, context.trace.name[spans], context.trace.duration_s[spans], num, "host span")


def _table(
    context: TraceContext, words: NDArray[np.int32], seconds: Seconds, num: int, label: str
) -> tuple[dict[str, Any], ...]:
    found, inverse, counts = np.unique(words, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=seconds) if len(found) else np.zeros(0)
    heaviest = np.argsort(-sums, kind="stable")[:num]
    return tuple(
        {
            label: context.trace.words[int(found[i])],
            "times_a_step": round(float(counts[i]) / context.num_steps, 3),
            "ms_a_step": round(float(sums[i]) * 1e3 / context.num_steps, 6),
        }
        for i in heaviest.tolist()
    )


def memory_frac(context: TraceContext) -> float | None:
    """Peak memory as a share of the device's; None if nobody said."""
    peak, total = context.number("peak_allocated_bytes"), context.number("total_bytes")
    if peak and total:
        return peak / total
    capacity = context.device.dram.capacity_bytes if context.device else None
    peaks = [float(c.value.max()) for name, c in context.trace.counters.items() if "memory" in name and len(c.value)]
    return max(peaks) / capacity if peaks and capacity else None
