"""Source lines from a step recorded with its Python stack, carried over to steps recorded without."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.profiler.align import align
from ridgeline.trace import Kind, Trace

Index = NDArray[np.intp]


def with_lines(trace: Trace, stacked: Trace) -> Trace:
    """The trace with the lines of another recording of the same step; ops are matched by name, thread by thread.

    Recording the stack slows the host, so times come from the one and lines from the other.
    """
    source = np.zeros(len(trace), dtype=np.int64)
    for mine, theirs in zip(_threads(trace), _threads(stacked), strict=False):
        names = [stacked.words[i] for i in stacked.name[theirs]]
        for part in [mine[trace.step[mine] == step] for step in np.unique(trace.step[mine])]:
            partner = align([trace.words[i] for i in trace.name[part]], names)
            hit = partner >= 0
            source[part[hit]] = stacked.source[theirs[partner[hit]]]
    if not source.any():
        return trace
    source = _spread(trace, source)
    words = [stacked.words[number] if number else trace.words[own] for number, own in zip(source, trace.source)]
    return trace.with_words(source=words)


def with_module_lines(trace: Trace) -> Trace:
    """The trace with the line where the forward pass of each span's module is written, or of the nearest around it."""
    facts = trace.meta.get("ridgeline")
    lines = facts.get("module_lines") if isinstance(facts, dict) else None
    if not isinstance(lines, dict) or not lines:
        return trace
    wanted = {word: _nearest(word, lines) if word else "" for word in {trace.words[i] for i in np.unique(trace.module)}}
    words = [
        trace.words[own] if own else wanted[trace.words[module]] for own, module in zip(trace.source, trace.module)
    ]
    return trace.with_words(source=words)


def _nearest(path: str, lines: dict[str, str]) -> str:
    while path:
        if path in lines:
            return str(lines[path])
        path = path.rpartition(".")[0]
    return str(lines.get("", ""))


def _threads(trace: Trace) -> list[Index]:
    """Ops of each host thread in time order; the busiest thread first, so that those of two recordings pair up."""
    ops = trace.of_kind(Kind.OP) & (trace.thread >= 0)
    numbers, counts = np.unique(trace.thread[ops], return_counts=True)
    order = numbers[np.argsort(-counts, kind="stable")]
    return [trace.in_order(ops & (trace.thread == number)) for number in order]


def _spread(trace: Trace, source: NDArray[np.int64]) -> NDArray[np.int64]:
    """A span without a line has that of the op around it, a kernel that of its launch."""
    up = np.where(trace.launch >= 0, trace.launch, trace.parent).astype(np.int64)
    # depth
    for _ in range(64):
        lacking = (source == 0) & (up >= 0)
        if not lacking.any():
            break
        source = np.where(lacking, source[np.maximum(up, 0)], source)
        up = np.where(lacking & (source == 0), np.where(up >= 0, trace.parent[np.maximum(up, 0)], -1), -1)
    return source
