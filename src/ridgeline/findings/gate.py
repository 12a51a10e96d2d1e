"""Is it slower? Several runs a side, how much they scatter, and a verdict that noise alone does not trip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.errors import FindingError


@dataclass(frozen=True, slots=True)
class Verdict:
    """The slowdown of the runs against the baseline; ``low`` to ``high`` holds it with 90 % confidence."""

    verdict: str  # "regression", "improvement", "ok" or "inconclusive"
    slowdown_frac: float
    low_frac: float
    high_frac: float
    max_frac: float
    p_slower: float  # that scatter alone gives this much
    baseline_s: float
    runs_s: float
    noise_frac: float  # scatter of a run
    num_baseline: int
    num_runs: int
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.verdict == "regression"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Side:
    logs: np.ndarray
    variance: float  # of a run's logarithm
    degrees: float


def gate(baseline: Sequence[Sequence[float]], runs: Sequence[Sequence[float]], max_frac: float) -> Verdict:
    """Compare step times of several runs a side: a run is worth its median, and runs scatter more than steps."""
    if not baseline or not runs:
        raise FindingError("a gate needs at least one run on each side: record some, three or more are better")
    before, after = _side(baseline), _side(runs)
    # The median of all differences: one odd run does not move it.
    shift = float(np.median(after.logs[:, None] - before.logs[None, :]))
    error = math.sqrt(before.variance / len(before.logs) + after.variance / len(after.logs))
    # Welch and Satterthwaite's degrees of freedom.
    a, b = before.variance / len(before.logs), after.variance / len(after.logs)
    degrees = max(1.0, (a + b) ** 2 / (a**2 / before.degrees + b**2 / after.degrees))
    reach = student_quantile(0.95, degrees) * error
    low, high = math.expm1(shift - reach), math.expm1(shift + reach)
    slowdown = math.expm1(shift)
    return Verdict(
        _verdict(slowdown, low, high, max_frac),
        slowdown,
        low,
        high,
        max_frac,
        1.0 - student_cdf(shift / error, degrees) if error > 0 else float(shift <= 0),
        float(np.exp(np.median(before.logs))),
        float(np.exp(np.median(after.logs))),
        math.sqrt(max(before.variance, after.variance)),
        len(before.logs),
        len(after.logs),
        _notes(before, after, slowdown, low, max_frac),
    )


def _verdict(slowdown: float, low: float, high: float, max_frac: float) -> str:
    """A regression is more than allowed, and surely more than nothing."""
    if slowdown > max_frac:
        return "regression" if low > 0 else "inconclusive"
    if high < 0:
        return "improvement"
    return "ok"


def _notes(before: _Side, after: _Side, slowdown: float, low: float, max_frac: float) -> tuple[str, ...]:
    notes = []
    if min(len(before.logs), len(after.logs)) < 2:
        notes.append("one run on a side: how runs differ from each other is not seen; record three or more")
    if slowdown > max_frac and low <= 0:
        notes.append("slower than allowed, but so much scatter could be chance: record more runs")
    return tuple(notes)


def _side(runs: Sequence[Sequence[float]]) -> _Side:
    cleaned = [np.asarray([step for step in run if step > 0], dtype=float) for run in runs]
    if any(not len(run) for run in cleaned):
        raise FindingError("a run without steps cannot be gated: record at least one step with a duration")
    logs = np.log([float(np.median(run)) for run in cleaned])
    within = float(np.mean([_median_variance(np.log(run)) for run in cleaned]))
    between = float(np.var(logs, ddof=1)) if len(logs) > 1 else 0.0
    steps = sum(len(run) for run in cleaned)
    degrees = max(1.0, len(logs) - 1.0) if len(logs) > 1 else max(1.0, steps - 1.0)
    return _Side(logs, max(within, between, 1e-12), degrees)


def _median_variance(logs: np.ndarray) -> float:
    """Squared error of a run's median, from the scatter of its steps."""
    if len(logs) < 2:
        return 0.0
    sigma = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    # Standard error of a median over that of a mean, for normal scatter.
    return float((1.2533 * sigma) ** 2 / len(logs))


def student_cdf(t: float, degrees: float) -> float:
    """Student's distribution, by the continued fraction of the incomplete beta function."""
    if not math.isfinite(t):
        return float(t > 0)
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1.0 - tail if t > 0 else tail


def student_quantile(p: float, degrees: float) -> float:
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    found = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 + term * d
            c = 1.0 + term / c
            d, c = 1.0 / (d if abs(d) > tiny else tiny), c if abs(c) > tiny else tiny
            found *= d * c
        if abs(d * c - 1.0) < 1e-12:
            break
    return found
