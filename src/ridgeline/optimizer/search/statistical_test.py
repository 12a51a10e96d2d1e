"""Compares random runs of a model by means and spreads, with a test that accounts for correlated elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXCESS, SPREAD = 1.3, 1.25
"""Allowed squared distance of two means over what chance explains, and allowed ratio of spreads, for many elements."""
SIGMAS = 4.5
"""Deviations granted to chance for correlated elements: 3 in 10⁶, over hundreds of results."""
WIDE_STEP = 1e-6
"""Rounding steps below this belong to float32 and float64."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of a result over several runs.

    Correlated elements count as fewer: a skipped path removes a whole sample's share of a gradient. ``freedom`` is the
    effective number of independent elements, ``unevenness`` the relative deviation of the runs' squared distances from
    their mean.
    """

    mean: Tensor
    variance: Tensor
    freedom: float
    unevenness: float
    num: int
    num_absent: int = 0  # runs in which the result did not occur

    def nothing(self) -> Moments:
        """The moments of as many runs in which the result did not occur."""
        none = torch.zeros_like(self.mean)
        return Moments(none, none, self.freedom, 0.0, self.num, self.num)

    @property
    def spread(self) -> float:
        return float(self.variance.sum())

    @property
    def energy(self) -> float:
        """The mean squared norm."""
        return self.spread + float(self.mean.square().sum())

    @property
    def spread_noise(self) -> float:
        """The standard deviation of the spread."""
        return self.spread * self.unevenness / math.sqrt(self.num)


@dataclass(slots=True)
class Runs:
    """Accumulates one result over runs."""

    num: int = 0
    total: Tensor | None = None
    squares: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    num_absent: int = 0

    def add(self, values: Tensor) -> None:
        value = values[: 1 << 20].double()
        self.num += 1
        self.total = value.clone() if self.total is None else self.total + value
        self.squares = value.square() if self.squares is None else self.squares + value.square()
        self.samples.append(value[:: value.numel() // 512 | 1].clone())  # to estimate correlations

    def add_zeros(self, num: int) -> None:
        """Count the runs missing of ``num`` as zeros."""
        self.num_absent = num - self.num
        self.samples += [torch.zeros_like(self.samples[0])] * self.num_absent
        self.num = num

    def moments(self) -> Moments:
        assert self.total is not None and self.squares is not None and self.num > 1
        mean = self.total / self.num
        variance = (self.squares / self.num - mean.square()).clamp(min=0) * self.num / (self.num - 1)
        return Moments(mean, variance, *_correlation(torch.stack(self.samples)), self.num, self.num_absent)


def _correlation(runs: Tensor) -> tuple[float, float]:
    """The effective number of independent elements, and the relative deviation of the runs' squared distances."""
    centered = runs - runs.mean(0)
    products = centered @ centered.T
    energies = products.diagonal()
    mean = float(energies.mean())
    num = len(runs)
    crossed = float(products.square().sum() - energies.square().sum()) / (num * (num - 1))
    if not mean > 0 or not crossed > 0:
        return max(1.0, float(runs.shape[1])), 0.0
    return max(1.0, mean**2 / crossed), float(energies.std()) / mean


def beyond_chance(eager: Moments, again: Moments, found: Moments, step: float) -> tuple[float, float, float, float]:
    """Excess and ratio of spreads of a result, and what is allowed of each given eager's own runs.

    A single number may show 12 and 3 more (1 in 1,000 of the F distributions with 8 runs), which fades as 1/√n.
    """
    few = max(1, eager.mean.numel()) ** -0.5
    excess, ratio = _distance(eager, found, step)
    own_excess, own_ratio = _distance(eager, again, step)
    allowed_excess = EXCESS * max(1.0, own_excess) + 12.0 * few
    allowed_ratio = SPREAD * max(own_ratio, 1 / own_ratio) + 3.0 * few
    return excess, ratio, max(allowed_excess, _high_quantile(min(eager.freedom, again.freedom))), allowed_ratio


def _high_quantile(freedom: float) -> float:
    """A high quantile of a mean of ``freedom`` squared normal numbers (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return (1 - part + SIGMAS * math.sqrt(part)) ** 3


def _distance(a: Moments, b: Moments, step: float) -> tuple[float, float]:
    """Squared distance of two means over what chance explains, and the ratio of the spreads."""
    steps = 4 if step > WIDE_STEP else 16  # two ways to compute a number; wide types keep the order of summation
    apart = float((a.mean - b.mean).square().sum())
    rounding = (steps * step) ** 2 * float(a.mean.square().sum())
    if a.spread <= rounding and b.spread <= rounding:  # this result is not random
        return (apart / max(rounding, 1e-30) if apart > rounding else 0.0), 1.0
    excess = apart / ((a.spread + b.spread) / a.num + rounding)
    if abs(a.spread - b.spread) <= SIGMAS * math.hypot(a.spread_noise, b.spread_noise):
        return excess, 1.0
    return excess, math.sqrt((b.spread + rounding) / (a.spread + rounding))
