"""Random runs of a model: their means and spreads, and how far apart chance alone takes those of two sets of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_ELEMENTS, SAMPLED = 1 << 20, 512
"""Elements of a result whose means are taken, and those that are kept of every run to see how they move together."""
EXCESS, SPREAD = 1.3, 1.25
"""Squared distance of two means over what chance explains, and ratio of spreads, that many elements may show."""
FEW_EXCESS, FEW_SPREAD = 12.0, 3.0
"""What a single number may show beyond that (1 in 1,000 of the F distributions with 8 runs); fades as 1/√n."""
SIGMAS = 4.5
"""Deviations that chance is granted where elements move together: 3 in 10⁶, of hundreds of results."""
WIDE_STEP, ROUNDINGS, WIDE_ROUNDINGS = 1e-6, 4, 16
"""Rounding steps two ways to compute the same number may be apart; more in types whose sums are not rounded at the end.
"""


@dataclass(frozen=True, slots=True)
class Moments:
    """What runs have in common.

    Elements that move together are fewer than they seem: a path that is dropped takes a whole sample's share of a
    gradient with it. ``freedom`` is how many they are, ``unevenness`` how much the runs' distances from their mean
    vary, relative to their mean.
    """

    mean: Tensor
    variance: Tensor
    freedom: float
    unevenness: float
    num: int
    num_absent: int = 0  # runs that had none of it

    def nothing(self) -> Moments:
        """What as many runs show that all had none of it."""
        none = torch.zeros_like(self.mean)
        return Moments(none, none, self.freedom, 0.0, self.num, self.num)

    @property
    def spread(self) -> float:
        return float(self.variance.sum())

    @property
    def energy(self) -> float:
        """The mean of the squared length."""
        return self.spread + float(self.mean.square().sum())

    @property
    def spread_noise(self) -> float:
        """The deviation of the spread itself."""
        return self.spread * self.unevenness / math.sqrt(self.num)


@dataclass(slots=True)
class Runs:
    """A result of several runs, as they come."""

    num: int = 0
    total: Tensor | None = None
    squares: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    num_absent: int = 0

    def add(self, values: Tensor) -> None:
        value = values[:MOST_ELEMENTS].double()
        self.num += 1
        self.total = value.clone() if self.total is None else self.total + value
        self.squares = value.square() if self.squares is None else self.squares + value.square()
        self.samples.append(value[:: value.numel() // SAMPLED | 1].clone())

    def add_nothing(self, num: int) -> None:
        """As many runs as are missing of ``num``, in which there was none of it."""
        self.num_absent = num - self.num
        self.samples += [torch.zeros_like(self.samples[0])] * self.num_absent
        self.num = num

    def moments(self) -> Moments:
        assert self.total is not None and self.squares is not None and self.num > 1
        mean = self.total / self.num
        variance = (self.squares / self.num - mean.square()).clamp(min=0) * self.num / (self.num - 1)
        return Moments(mean, variance, *_together(torch.stack(self.samples)), self.num, self.num_absent)


def _together(runs: Tensor) -> tuple[float, float]:
    """How many independent elements there seem to be, and how uneven the runs' distances from their mean are."""
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
    """(excess, ratio of spreads) of a result, and what is allowed of each given what eager's own runs show."""
    few = max(1, eager.mean.numel()) ** -0.5
    excess, ratio = _distance(eager, found, step)
    own_excess, own_ratio = _distance(eager, again, step)
    allowed_excess = EXCESS * max(1.0, own_excess) + FEW_EXCESS * few
    allowed_ratio = SPREAD * max(own_ratio, 1 / own_ratio) + FEW_SPREAD * few
    return excess, ratio, max(allowed_excess, _rare(min(eager.freedom, again.freedom))), allowed_ratio


def _rare(freedom: float) -> float:
    """What a mean of so many squared normal numbers exceeds by chance alone, seldom (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return (1 - part + SIGMAS * math.sqrt(part)) ** 3


def _distance(a: Moments, b: Moments, step: float) -> tuple[float, float]:
    """Squared distance of two means over what chance explains, and the ratio of the spreads."""
    steps = ROUNDINGS if step > WIDE_STEP else WIDE_ROUNDINGS
    apart = float((a.mean - b.mean).square().sum())
    rounding = (steps * step) ** 2 * float(a.mean.square().sum())  # two ways to round the same number
    if a.spread <= rounding and b.spread <= rounding:  # nothing random about this one
        return (apart / max(rounding, 1e-30) if apart > rounding else 0.0), 1.0
    excess = apart / ((a.spread + b.spread) / a.num + rounding)
    if abs(a.spread - b.spread) <= SIGMAS * math.hypot(a.spread_noise, b.spread_noise):
        return excess, 1.0
    return excess, math.sqrt((b.spread + rounding) / (a.spread + rounding))
