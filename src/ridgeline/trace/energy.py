"""Energy from sampled power: of a step, of idle time, and of every op and module."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.breakdown import by_device
from ridgeline.trace.steps import windows_of
from ridgeline.trace.table import Counter, Trace

_POWER = re.compile(r"^power_w\b(?:.*?(\d+))?")


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """What a device drew during one step."""

    number: int
    rank: int
    device: int
    energy_j: float
    mean_w: float
    busy_j: float  # while it ran something
    idle_j: float


def power_of(trace: Trace, device: int = 0) -> Counter | None:
    """The sampled power of a device; None where it was not recorded."""
    for name, counter in trace.counters.items():
        found = _POWER.match(name)
        if found and int(found.group(1) or 0) == device and len(counter.value):
            return counter
    return None


def energy_until(counter: Counter, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Joules drawn until each time; a sample holds until the next, the first also before it, the last also after."""
    order = np.argsort(counter.at_s, kind="stable")
    times, watts = counter.at_s[order], counter.value[order]
    drawn = np.concatenate(([0.0], np.cumsum(watts[:-1] * np.diff(times))))
    at = np.clip(np.searchsorted(times, at_s, side="right") - 1, 0, len(times) - 1)
    return np.asarray(drawn[at] + watts[at] * (at_s - times[at]), dtype=np.float64)


def energy_by_step(trace: Trace) -> list[StepEnergy]:
    """Joules of every step, of each device whose power was sampled."""
    rows = []
    for rank, device, mask in by_device(trace, trace.gpu):
        counter = power_of(trace, device)
        if counter is None:
            continue
        busy = trace.busy(mask)
        until_start, until_end = (energy_until(counter, edge / 1e9) for edge in (busy.start, busy.end))
        windows = windows_of(trace, rank)
        for i, number in enumerate(windows.number.tolist()):
            low, high = int(windows.start[i]), int(windows.end[i])
            edges = energy_until(counter, np.array([low, high]) / 1e9)
            inside = (busy.end > low) & (busy.start < high)
            begun = np.maximum(until_start[inside], edges[0])
            ended = np.minimum(until_end[inside], edges[1])
            total, used = float(edges[1] - edges[0]), float((ended - begun).sum())
            seconds = (high - low) / 1e9
            mean_w = total / seconds if seconds else float("nan")
            rows.append(StepEnergy(number, rank, device, total, mean_w, used, total - used))
    return rows


def with_energy(trace: Trace) -> Trace:
    """The trace with joules for every device span: the power sampled while it ran; where two overlap, the first has it.

    Boards sample every few milliseconds: a kernel shorter than that gets its share of the sample by its time.
    """
    energy = np.array(trace.optional("energy_j"), dtype=np.float64)
    for _, device, mask in by_device(trace, trace.gpu):
        counter = power_of(trace, device)
        if counter is None:
            continue
        rows = trace.in_order(mask)
        end = trace.end_ns[rows]
        reached = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))
        fresh = np.minimum(np.maximum(trace.start_ns[rows], reached), end)
        energy[rows] = energy_until(counter, end / 1e9) - energy_until(counter, fresh / 1e9)
    return trace.with_columns(energy_j=energy)
