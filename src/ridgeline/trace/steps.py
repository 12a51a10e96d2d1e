"""Steps: where each begins and ends, what its time went to, and which are steady."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.breakdown import Shares, layers_of, shares_of
from ridgeline.trace.intervals import Intervals, Nanos, clip, covered_within, difference, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

#: What a moment of a step counts as, the first that holds; the rest is "other".
CATEGORIES = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec", "other")
_KINDS = {
    "kernel": Kind.KERNEL,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
    "communication": Kind.COMMUNICATION,
    "runtime": Kind.RUNTIME,
    "dataloader": Kind.DATALOADER,
    "cpu_exec": Kind.OP,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: from the end of the one before, or its own start, to its last host or device span."""

    number: int  # -1: the trace marks no steps, and this is all of it
    rank: int
    start_s: float
    end_s: float
    categories_s: dict[str, float]  # by CATEGORIES; they add up to the step
    shares: Shares  # of the device, over the same window
    num_kernels: int

    @property
    def total_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def gpu_frac(self) -> float:
        """Share of the step in which a kernel runs."""
        return self.categories_s["kernel"] / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Windows:
    """Steps of one rank as columns of nanoseconds."""

    number: NDArray[np.int32]
    start: Nanos
    end: Nanos


def windows_of(trace: Trace, rank: int) -> Windows:
    """Begin and end of every step of a rank; all of the trace if it marks none."""
    own = trace.rank == rank
    marks = np.flatnonzero(own & trace.of_kind(Kind.STEP) & (trace.device < 0))
    numbers = np.unique(trace.step[own & (trace.step >= 0)])
    if not len(numbers):
        return _whole(trace, own)
    order = np.searchsorted(numbers, trace.step)
    order = np.minimum(order, len(numbers) - 1)
    spans = own & (trace.step >= 0)
    device = spans & (trace.device >= 0) & ~trace.of_kind(Kind.ALLOCATION)
    base = np.isin(np.arange(len(trace)), marks) if len(marks) else spans
    start, end = np.full(len(numbers), 2**62), np.full(len(numbers), -(2**62))
    np.minimum.at(start, order[base & spans], trace.start_ns[base & spans])
    np.maximum.at(end, order[base & spans], trace.end_ns[base & spans])
    np.maximum.at(end, order[device], trace.end_ns[device])
    found = start < 2**62
    # The end of the device work that was launched before the first step
    early = own & trace.gpu & (trace.step < 0) & (trace.launch >= 0)
    first = trace.start_ns[own & (trace.step >= 0)].min()
    launched = early & (trace.start_ns[np.maximum(trace.launch, 0)] < first)
    return _in_line(numbers[found], start[found], end[found], int(trace.end_ns[launched].max(initial=-(2**62))))


def _whole(trace: Trace, own: NDArray[np.bool_]) -> Windows:
    spans = own & ~trace.of_kind(Kind.ALLOCATION)
    work = own & trace.gpu
    chosen = work if work.any() else spans
    if not chosen.any():
        return Windows(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    low, high = int(trace.start_ns[chosen].min()), int(trace.end_ns[chosen].max())
    return Windows(np.array([-1], np.int32), np.array([low]), np.array([high]))


def _in_line(numbers: NDArray[np.int32], start: Nanos, end: Nanos, before: int) -> Windows:
    """A step begins when the one before has ended: a device still at work on that belongs to it."""
    order = np.argsort(start, kind="stable")
    numbers, start, end = numbers[order], start[order], np.maximum.accumulate(end[order])
    begun = np.maximum(start, np.concatenate(([before], end[:-1])))
    return Windows(numbers.astype(np.int32), np.minimum(begun, end), end)


def steps(trace: Trace) -> list[Step]:
    """Every step of every rank, in order."""
    return [step for rank in trace.ranks() for step in steps_of(trace, rank)]


def steps_of(trace: Trace, rank: int) -> list[Step]:
    """The steps of one rank."""
    windows = windows_of(trace, rank)
    own = trace.rank == rank
    work = own & trace.gpu
    layers = layers_of(trace, work)
    spent = _categories(trace, own, windows)
    kernels = np.sort(trace.start_ns[work])
    counts = np.searchsorted(kernels, windows.end) - np.searchsorted(kernels, windows.start)
    return [
        Step(
            number=int(windows.number[i]),
            rank=rank,
            start_s=int(windows.start[i]) / 1e9,
            end_s=int(windows.end[i]) / 1e9,
            categories_s={name: int(column[i]) / 1e9 for name, column in spent.items()},
            shares=shares_of(layers, (int(windows.start[i]), int(windows.end[i])), int(counts[i])),
            num_kernels=int(counts[i]),
        )
        for i in range(len(windows.number))
    ]


def _categories(trace: Trace, own: NDArray[np.bool_], windows: Windows) -> dict[str, Nanos]:
    """Nanoseconds of each step by category; a moment counts once, for the first category that holds."""
    if not len(windows.number):
        return {}
    low, high = int(windows.start.min()), int(windows.end.max())
    taken: Intervals | None = None
    spent: dict[str, Nanos] = {}
    for name, kind in _KINDS.items():
        covered = clip(trace.busy(own & trace.of_kind(kind)), low, high)
        fresh = covered if taken is None else difference(covered, taken)
        taken = (
            covered
            if taken is None
            else union(np.concatenate((taken.start, fresh.start)), np.concatenate((taken.end, fresh.end)))
        )
        spent[name] = covered_within(fresh, windows.start, windows.end)
    spent["other"] = windows.end - windows.start - np.sum(list(spent.values()), axis=0)
    return spent


def mean_categories_s(found: Iterable[Step]) -> dict[str, float]:
    """Mean seconds a step by category, and in total."""
    rows = list(found)
    if not rows:
        return {}
    means = {name: float(np.mean([step.categories_s[name] for step in rows])) for name in CATEGORIES}
    return {"total": float(np.mean([step.total_s for step in rows])), **means}
