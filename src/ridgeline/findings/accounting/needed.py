"""Work done against work needed: products, convolutions and attention of a run counted beside those of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.replay.window import window_of
from ridgeline.graph import Block, Graph
from ridgeline.profiler.floors import priced_ops
from ridgeline.profiler.ops import site_of
from ridgeline.trace.kernels import recomputed
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

Key = tuple[str, str, tuple[int, ...]]  # sort, phase, the sizes that do not depend on the batch


@dataclass(frozen=True, slots=True)
class Need:
    """One product, convolution or attention: how often a step ran it, and how often the model needs it."""

    sort: str
    phase: str
    sizes: tuple[int, ...]
    num_recorded: float  # a step
    num_needed: float
    measured_ms: float  # a step
    extra_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A recording beside its model; ``extra_s`` has the avoidable seconds of every span."""

    model: str
    num_batches: int  # micro-batches a step, as the counts tell
    needs: tuple[Need, ...]
    extra_s: NDArray[np.float64]
    notes: tuple[str, ...]

    @property
    def extra_ms(self) -> float:
        return sum(need.extra_ms for need in self.needs)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "num_batches": self.num_batches, "extra_ms": self.extra_ms,
                "needs": [asdict(need) for need in self.needs], "notes": list(self.notes)}  # fmt: skip


def compared(trace: Trace, graph: Graph) -> Comparison:
    """Which products a step runs more often than the model needs them, batch sizes aside.

    Sizes that depend on the batch are left out, and a step may hold several micro-batches: what every product of the
    recording is repeated is taken for their number. A phase in which all products are repeated more often than that
    is a whole extra pass, and its other kernels count with it.
    """
    nothing = np.zeros(len(trace))
    needed = needed_of(graph)
    window = window_of(trace)
    inside = (trace.start_ns < window.end_ns) & (trace.end_ns > window.start_ns)
    works = np.flatnonzero(trace.gpu & trace.of_kind(Kind.KERNEL) & inside & ~recomputed(trace))
    weights = frozenset(key[2] for key in needed if key[0] == "matmul")
    ops, caller = _recorded(trace, works, weights)
    if not ops:
        why = "no product with recorded shapes" if needed else "the model has no products"
        return Comparison(graph.name, 1, (), nothing, (f"{why}: nothing to compare",))
    recorded = Counter(key for _, key in ops)
    steps = window.num_steps
    ratios = {key: recorded[key] / steps / num for key, num in needed.items() if recorded[key]}
    full = [ratio for ratio in ratios.values() if ratio >= 1.0]
    batches = max(1, int(min(full))) if full else 1
    passes = _passes(ratios, recorded, batches)
    extra, needs = nothing, []
    rows_of: dict[int, list[int]] = {}
    for row, op in zip(works.tolist(), caller.tolist(), strict=True):
        if op >= 0:
            rows_of.setdefault(op, []).append(row)
    by_key: dict[Key, list[int]] = {}
    for op, key in ops:
        by_key.setdefault(key, []).append(op)
    for key, own in sorted(by_key.items()):
        want = needed.get(key, 0.0) * batches * steps
        rows = [row for op in own for row in rows_of.get(op, ())]
        spent = float(trace.duration_s[rows].sum())
        share = max(0.0, 1.0 - want / len(own)) if want else 0.0
        if share and key[1] not in passes:
            extra[rows] = trace.duration_s[rows] * share
        needs.append(Need(*key, len(own) / steps, want / steps, spent / steps * 1e3, spent * share / steps * 1e3))
    for phase, times in passes.items():
        rows = works[trace.phase[works] == trace.word_id(phase)]
        extra[rows] = trace.duration_s[rows] * (1.0 - batches / times)
    notes = [f"{times / batches:.3g} {phase} passes where the model needs one" for phase, times in passes.items()]
    unknown = sum(need.measured_ms for need in needs if not need.num_needed)
    whole = sum(need.measured_ms for need in needs)
    if unknown > 0.1 * whole:
        notes.append(f"{unknown / whole:.0%} of the time in products is of sizes that {graph.name} does not have")
    order = sorted(needs, key=lambda need: (-need.extra_ms, -need.measured_ms))
    return Comparison(graph.name, batches, tuple(order), extra, tuple(notes))


def needed_of(graph: Graph) -> Mapping[Key, float]:
    """How often one step of the graph runs each product, convolution and attention."""
    weights = frozenset(
        tuple(sorted((int(node.attrs["k"]), int(node.attrs["n"]))))
        for item in graph.items for node in (item.nodes if isinstance(item, Block) else (item,))
        if node.op == "matmul" and node.phase == "forward" and node.attrs.get("b", 1) == 1
    )  # fmt: skip
    found: dict[Key, float] = {}
    for item in graph.items:
        block = isinstance(item, Block)
        for node in item.nodes if isinstance(item, Block) else (item,):
            key = _key(node.op, str(node.phase), node.attrs, weights)
            if key is not None:
                found[key] = found.get(key, 0.0) + (item.repeat if block else 1)  # type: ignore[union-attr]
    return found


def _key(op: str, phase: str, attrs: Mapping[str, Any], weights: frozenset[tuple[int, ...]]) -> Key | None:
    """What a piece of work is, whatever the batch; None for what is not counted."""
    phase = phase or "forward"
    if op == "conv":
        sizes = (attrs["c"], attrs["o"], *attrs["kernel"], *attrs["stride"], attrs["groups"])
        return "conv", phase, tuple(int(size) for size in sizes)
    if op == "attention":
        return "attention", phase, (int(attrs["h"]), int(attrs["d"]))
    if op != "matmul" or attrs.get("b", 1) != 1:
        return None
    m, n, k = (int(attrs[name]) for name in "mnk")
    pairs = [(k, n)] if phase == "forward" else [(m, n), (k, n), (m, k)]
    known = [pair for pair in (tuple(sorted(pair)) for pair in pairs) if pair in weights]
    return ("matmul", phase, known[0]) if known else ("matmul", phase, tuple(sorted((k, n))))


def _recorded(
    trace: Trace, works: Index, weights: frozenset[tuple[int, ...]]
) -> tuple[list[tuple[int, Key]], NDArray[np.intp]]:
    """(op, key) of everything counted that ran, and the op of each piece of work."""
    caller = priced_ops(trace, works)
    columns = [trace.optional(name) for name in ("shapes", "dtypes", "strides", "concrete")]
    found = []
    for op in np.unique(caller[caller >= 0]).tolist():
        site = site_of(trace.words[trace.name[op]], *(trace.words[column[op]] for column in columns))
        key = _key(site.op, trace.words[trace.phase[op]], site.attrs, weights) if site is not None else None
        if key is not None:
            found.append((op, key))
    return found, caller


def _passes(ratios: Mapping[Key, float], recorded: Mapping[Key, int], batches: int) -> dict[str, float]:
    """Phases that were run more often as a whole: four of five of their products, by how often."""
    found = {}
    for phase in ("forward", "backward"):
        own = sorted(ratio for key, ratio in ratios.items() if key[1] == phase)
        if own and own[len(own) // 5] >= batches + 1:
            found[phase] = float(int(own[len(own) // 5]))
    return found
