"""What users of a deployment see, from a finished simulation: percentiles, throughput, goodput, energy and money."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.basis import Basis
from ridgeline.errors import InputError
from ridgeline.result import Result
from ridgeline.sim.serving.simulate import Served
from ridgeline.units import show_seconds

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
APART_WIDER, FIRST_APART_WIDER = 1.25, 6.5
"""Intervals of runs with prefill apart, on which nothing was fitted, are wider by this; those of first tokens, which
are what is left of a queue between two pools, by the second. Split-conformal over 146 published runs: 89 and 90 %
inside when each engine and device is left out."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency over requests: its mean with a 90 % interval, percentiles, and the largest."""

    mean: float
    low: float
    high: float
    percentiles: dict[int, float]
    largest: float

    def to_dict(self) -> dict[str, Any]:
        named = {f"p{p}": value for p, value in self.percentiles.items()}
        return {"mean": self.mean, "low": self.low, "high": self.high, **named, "max": self.largest}


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; ``inf`` asks nothing."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"the limit on {name[:-2]} must be above 0 seconds")

    @property
    def asks(self) -> bool:
        return min(self.ttft_s, self.tpot_s, self.e2e_s) < math.inf


@dataclass(frozen=True, slots=True, repr=False)
class Metrics(Result):
    """The figures of one simulation."""

    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    wall_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_device: float
    tokens_per_s_per_user: float
    goodput_per_s: float
    good_frac: float
    cache_peak_frac: float
    cache_mean_frac: float
    mean_running: float
    reused_frac: float
    energy_j: float
    energy_j_per_token: float
    usd: float
    usd_per_million_output: float
    usd_per_million_tokens: float
    num_devices: int
    num_requests: int
    iterations: int
    preemptions: int
    width: float
    basis: Basis
    num_skipped: int  # requests at the start that the latencies leave out
    waiting_at_end: int  # requests not begun when the last one arrived, where that number grew all along; else 0

    def summary(self) -> str:
        return (f"{self.num_requests:,} requests on {self.num_devices} devices: TTFT {show_seconds(self.ttft_s.mean)}, "
                f"TPOT {show_seconds(self.tpot_s.mean)}, {self.output_tokens_per_s:,.0f} tokens/s")  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """One row a latency."""
        return [{"latency": name, **spread.to_dict()}
                for name, spread in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s))]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: SI units, the basis as a word."""
        found: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            found[name] = value.to_dict() if isinstance(value, Spread) else str(value) if name == "basis" else value
        return {**found, "intervals": self.intervals()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """90 % intervals of the figures that are not latencies: all follow the time of a step."""
        names = ("wall_s", "requests_per_s", "output_tokens_per_s", "output_tokens_per_s_per_device",
                 "tokens_per_s_per_user", "energy_j_per_token", "usd_per_million_output",
                 "usd_per_million_tokens")  # fmt: skip
        low, high = math.exp(-self.width), math.exp(self.width)
        return {name: (getattr(self, name) * low, getattr(self, name) * high) for name in names}


def latencies(served: Served) -> tuple[Floats, Floats, Floats]:
    """(time to first token, time per output token after it, end to end) of every request."""
    ttft = served.first_s - served.arrival_s
    e2e = served.done_s - served.arrival_s
    tpot = (served.done_s - served.first_s) / np.maximum(served.workload.osl - 1, 1)
    return ttft, tpot, e2e


def steady(served: Served) -> int:
    """Requests that a closed loop starts all at once, if others follow: a steady state begins after them."""
    at_once = served.workload.concurrency
    return at_once if len(served.workload) >= 2 * at_once else 0


def _waiting_at_end(served: Served) -> int:
    """Requests of an open workload not begun when the last arrives, if the wait grew: a queue without bound."""
    arrival, first = served.arrival_s, served.first_s
    if served.workload.concurrency or len(arrival) < 40 or arrival[-1] <= arrival[0]:
        return 0
    waited = np.array([part.mean() for part in np.array_split(first - arrival, 4)])
    waiting = int((first > arrival.max()).sum())
    return waiting if waiting > 0.05 * len(arrival) and waited[3] > 1.5 * waited[1] else 0


def metrics(served: Served, slo: Slo | None = None, *, skip: int = 0) -> Metrics:
    """All figures; goodput counts the requests that keep the SLO. Latencies leave out the first ``skip`` requests."""
    ttft, tpot, e2e = (values[min(skip, len(values) - 1) :] for values in latencies(served))
    deployment, work = served.deployment, served.workload
    width, first = deployment.engine.width, deployment.engine.first_width
    if deployment.prefill:
        width, first = width * APART_WIDER, first * FIRST_APART_WIDER
    wall_s = float(served.done_s.max() - served.arrival_s.min())
    made, read = int(work.osl.sum()), int(work.isl.sum())
    good = _good(slo or Slo(), ttft, tpot, e2e)
    usd = deployment.device.price_usd_per_hour / 3600 * wall_s * deployment.num_devices
    several = work.osl[len(work) - len(tpot) :] > 1
    peak, mean, running = _occupancy(served)
    return Metrics(
        _spread(ttft, min(2.0, first)), _spread(tpot[several] if several.any() else tpot, width),
        _spread(e2e, width), wall_s, len(work) / wall_s, read / wall_s, made / wall_s,
        made / wall_s / deployment.num_devices, float(1 / max(tpot.mean(), 1e-9)) if several.any() else 0.0,
        float(good.mean()) * len(work) / wall_s, float(good.mean()), peak, mean, running,
        sum(served.requests.reused) / max(read, 1), served.energy_j, served.energy_j / made, usd,
        usd / made * 1e6, usd / (made + read) * 1e6, deployment.num_devices, len(work), served.iterations,
        served.preemptions, width, served.basis, skip, _waiting_at_end(served),
    )  # fmt: skip


def _good(slo: Slo, ttft: Floats, tpot: Floats, e2e: Floats) -> NDArray[np.bool_]:
    return np.asarray((ttft <= slo.ttft_s) & (tpot <= slo.tpot_s) & (e2e <= slo.e2e_s))


def _spread(values: Floats, width: float) -> Spread:
    mean = float(values.mean())
    found = np.percentile(values, PERCENTILES)
    named = {p: float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return Spread(mean, mean * math.exp(-width), mean * math.exp(width), named, float(values.max()))


def _occupancy(served: Served) -> tuple[float, float, float]:
    """(largest, mean over time) share of the cache in use, and mean requests in a batch."""
    at = np.array(served.samples["at_s"])
    if len(at) < 2 or at[-1] <= at[0]:
        return 0.0, 0.0, float(len(served.workload))
    held = np.array(served.samples["held"]) / max(served.capacity_tokens, 1)
    running = np.array(served.samples["running"])
    gaps = np.diff(at)
    over = gaps.sum()
    return float(held.max()), float((held[:-1] * gaps).sum() / over), float((running[:-1] * gaps).sum() / over)


def cdf(values: Floats, points: int = 200) -> list[tuple[float, float]]:
    """(value, share of requests at or below) at evenly spaced shares."""
    shares = np.linspace(0, 1, points)
    return [(float(v), float(s)) for v, s in zip(np.quantile(values, shares), shares, strict=True)]
