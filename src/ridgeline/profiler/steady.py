"""Where a run becomes steady: the last change of level in its step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_STEPS = 5
#: A level that differs by less is the same level; steps of one job repeat within a few percent.
SAME_FRAC = 0.04


@dataclass(frozen=True, slots=True)
class Steady:
    """The first steady step, and the level and spread from there on."""

    first: int
    step_s: float
    spread_s: float
    num: int


def steady(times_s: Sequence[float], least: int = LEAST_STEPS, same_frac: float = SAME_FRAC) -> Steady | None:
    """The steady tail of a run, or None while its level still changes or too few steps have passed.

    Changes of level are found one after another, each where splitting the logarithms of the times at a step lowers
    their absolute deviation from the median most; what is left after the last change is steady if its halves agree.
    """
    if len(times_s) < least:
        return None
    logs = np.log(np.maximum(np.asarray(times_s, dtype=np.float64), 1e-9))
    first = 0
    while (change := _change(logs[first:], same_frac)) is not None:
        first += change
    tail = logs[first:]
    if len(tail) < least or not _level(tail, same_frac):
        return None
    times = np.exp(tail)
    middle = float(np.median(times))
    return Steady(first, middle, float(np.median(np.abs(times - middle))), len(tail))


def _change(logs: NDArray[np.float64], same_frac: float) -> int | None:
    """The place that splits the times best, if it splits them at all."""
    num = len(logs)
    if num < 3:
        return None
    costs = np.array([_deviation(logs[:k]) + _deviation(logs[k:]) for k in range(1, num)])
    best = int(np.argmin(costs)) + 1
    noise = max(float(np.median(np.abs(logs[best:] - np.median(logs[best:])))), same_frac / 2)
    apart = abs(float(np.median(logs[:best]) - np.median(logs[best:])))
    saved = _deviation(logs) - float(costs[best - 1])
    return best if apart > max(same_frac, 3 * noise) and saved > 3.0 * noise / 2 else None  # change cost


def _deviation(logs: NDArray[np.float64]) -> float:
    return float(np.abs(logs - np.median(logs)).sum())


def _level(tail: NDArray[np.float64], same_frac: float) -> bool:
    """Whether both halves have the same level, as far as their noise lets one see."""
    half = len(tail) // 2
    early, late = np.median(tail[:half]), np.median(tail[half:])
    noise = float(np.median(np.abs(tail - np.median(tail))))
    return bool(abs(early - late) <= max(same_frac, 2 * noise))
