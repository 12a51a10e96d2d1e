"""A number over time: where it changed beyond its noise, and whether the last change is a regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A stretch of a series without a change: values ``start`` to ``stop`` (exclusive) around ``median``."""

    start: int
    stop: int
    median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Levels of a series, its relative noise, and the last change."""

    levels: tuple[Level, ...]
    noise: float  # relative standard deviation from one run to the next

    @property
    def change(self) -> float:
        """The last level over the one before; 1 where nothing changed."""
        return self.levels[-1].median / self.levels[-2].median if len(self.levels) > 1 else 1.0

    def regressed(self, max_regression: float, *, higher_is_worse: bool = True) -> bool:
        """Whether the last change is for the worse by more than allowed."""
        ratio = self.change if higher_is_worse else 1.0 / self.change
        return ratio > 1.0 + max_regression


def series_of(values: Sequence[float]) -> Series:
    """Split positive values into levels by exact least squares on their logarithms.

    A change costs what three and a half standard deviations squared, and the choice of its place, would explain by
    chance; noise is the median absolute step between neighbors, so that changes themselves do not count as noise.
    """
    logs = np.log(np.maximum(np.asarray(values, dtype=float), 1e-300))
    num = len(logs)
    steps = np.abs(np.diff(logs))
    # With few steps the median is a poor estimate, and the spread of all but the largest step bounds it from above.
    noise = float(np.median(steps)) * 1.4826 / math.sqrt(2.0) if num > 2 else 0.0
    if 2 < num < 8:
        noise = max(noise, float(np.sort(steps)[:-1].mean()) / math.sqrt(2.0))
    scale = max(noise, 1e-6)  # relative; below it two values are the same number computed twice
    price = (12.0 + 60.0 / num + 2.0 * math.log(max(num, 2))) * scale**2  # few runs know their noise badly
    sums, squares = np.concatenate([[0.0], np.cumsum(logs)]), np.concatenate([[0.0], np.cumsum(logs**2)])
    best, last = np.zeros(num + 1), np.zeros(num + 1, dtype=int)
    best[0] = -price
    for stop in range(1, num + 1):
        starts = np.arange(stop)
        total = sums[stop] - sums[starts]
        spread = np.maximum(squares[stop] - squares[starts] - total**2 / (stop - starts), 0.0)
        cost = best[:stop] + spread + price
        last[stop] = int(np.argmin(cost))
        best[stop] = cost[last[stop]]
    cuts, stop = list[tuple[int, int]](), num
    while stop > 0:
        cuts.append((int(last[stop]), stop))
        stop = int(last[stop])
    levels = tuple(
        Level(start=start, stop=end, median=float(np.median(np.asarray(values)[start:end])))
        for start, end in reversed(cuts)
    )
    return Series(levels=levels, noise=noise)
