"""Measured against expected: ops beside what the cost model expects and the speed of light, the largest gap first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.profiler.floors import with_floors
from ridgeline.trace.table import Trace

_PRICED: WeakKeyDictionary[TraceContext, Trace | None] = WeakKeyDictionary()
"""A rule asks as well as the table: pricing is done once."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One op of one module: milliseconds a step measured, expected and at best."""

    op: str
    module: str
    num: float
    measured_ms: float
    expected_ms: float
    floor_ms: float

    @property
    def gap_ms(self) -> float:
        """What is measured above what is expected."""
        return self.measured_ms - self.expected_ms

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gap_ms": self.gap_ms}


def gaps_of(context: TraceContext) -> tuple[Gap, ...]:
    """Ops with a price, the largest gap first; none where shapes or the device are not known."""
    trace = priced(context)
    if trace is None:
        return ()
    floor, expected = trace.optional("floor_s")[context.rows], trace.optional("expected_s")[context.rows]
    known = np.flatnonzero(np.isfinite(floor) & np.isfinite(expected))
    rows = context.rows[known]
    code = np.stack([trace.op[rows], trace.module[rows]], axis=1)
    distinct, inverse = np.unique(code, axis=0, return_inverse=True)
    sums = [
        np.bincount(inverse.reshape(-1), weights=column, minlength=len(distinct)) / context.num_steps
        for column in (np.ones(len(known)), context.work_s[known], expected[known], floor[known])
    ]
    found = [
        Gap(
            trace.words[int(op)],
            trace.words[int(module)],
            *(float(part[i]) * unit for part, unit in zip(sums, (1.0, 1e3, 1e3, 1e3))),
        )
        for i, (op, module) in enumerate(distinct.tolist())
    ]
    return tuple(sorted(found, key=lambda gap: -gap.gap_ms)[:40])


def with_work(context: TraceContext) -> Trace:
    """The trace with the flops and bytes of its kernels, if it has them or its shapes tell them."""
    if np.isfinite(context.trace.optional("flops")[context.rows]).any():
        return context.trace
    return _from_shapes(context) or context.trace


def priced(context: TraceContext) -> Trace | None:
    """The trace with what each op is expected to take and needs at least; None where shapes or the device are not
    known."""
    if context not in _PRICED:
        known = "floor_s" in context.trace.extra and np.isfinite(context.trace.extra["floor_s"]).any()
        _PRICED[context] = context.trace if known else _from_shapes(context)
    return _PRICED[context]


def _from_shapes(context: TraceContext) -> Trace | None:
    if context.device is None or "shapes" not in context.trace.extra:
        return None
    return with_floors(context.trace, context.device, context.rows)[0]
