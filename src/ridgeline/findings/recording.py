"""What a recording holds, what it does not, and how to record the rest."""

from __future__ import annotations

import re

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.trace.kind import Kind

GRAPH_LAUNCH = re.compile(r"GraphLaunch", re.IGNORECASE)


def what_is_missing(context: TraceContext) -> str:
    """Sentences on a recording that lacks launches, ops or Python, as servers make them that replay CUDA graphs or are
    recorded from a moment on; empty where little is missing."""
    trace, rows = context.trace, context.rows
    if not len(rows):
        return ""
    launch = trace.launch[rows]
    unlaunched = float((launch < 0).mean())
    calls = [GRAPH_LAUNCH.search(word) is not None for word in trace.words]
    in_graphs = float((np.array(calls, dtype=bool)[trace.name[np.maximum(launch, 0)]] & (launch >= 0)).mean())
    has_ops, has_python = (bool(len(context.of_kind(kind))) for kind in (Kind.OP, Kind.PYTHON))
    if unlaunched < 0.2 and in_graphs < 0.5:
        return ""
    missing, how = list[str](), list[str]()
    if unlaunched >= 0.2:
        missing.append(f"the launches of {unlaunched:.0%} of it (made before it began, or by another process)")
        how.append(
            "begin the recording a few steps earlier and in the process that launches, with CPU and CUDA activities "
            "(vLLM and SGLang: a profiler folder, /start_profile and /stop_profile, which record the worker)"
        )
    if in_graphs >= 0.5:
        missing.append(f"the ops behind {in_graphs:.0%} of it, which CUDA graphs replay")
    if in_graphs >= 0.5 or unlaunched >= 0.2:
        how.append(
            "record once without graphs to see ops and modules (vLLM: enforce_eager=True; SGLang: "
            "--disable-cuda-graph; PyTorch: no mode='reduce-overhead'), or the kernels of graphs (nsys: "
            "--cuda-graph-trace=node)"
        )
    if not has_ops:
        missing.append("the ops of the host")
    if not has_python:
        missing.append("Python")
        how.append("with_stack=True names the Python that runs while the device waits")
    held = f"{len(rows):,} pieces of device work" + (", ops" if has_ops else "") + (", Python" if has_python else "")
    return f"Recorded: {held}. Not recorded: {'; '.join(missing)}. To record it: {'; '.join(how)}."
