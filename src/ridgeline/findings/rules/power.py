"""Clocks held down by power or heat, from what was sampled beside the run."""

from __future__ import annotations

import re

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.evidence import place_of
from ridgeline.findings.replay.fix import Fix
from ridgeline.findings.rule import rule

CLOCK = re.compile(r"(sm|graphics|core|gpu).*clock|clock.*(hz|mhz)|clock_hz", re.IGNORECASE)
POWER = re.compile(r"power", re.IGNORECASE)
HEAT = re.compile(r"temp|therm", re.IGNORECASE)
LEAST_FRAC = 0.85
CAPPED_FRAC, HOT_C = 0.8, 82
"""Of the designed power, from which on a device draws what it is built for: a board's sensor averages and lags (642 of
700 W were sampled in the middle of a training loop that ran at its limit)."""
AT_POWER_FRAC = 0.55
"""Of the boost clock, what the designed power leaves to the heaviest load (0.65 on an H200 that trains at 700 W)."""


@rule("throttling", version=3, order=56)
def throttling(context: TraceContext) -> Candidate | None:
    """The clock under load is far below what the device's boost clock allows, and not because the device draws the
    power it is built for: no setting raises that."""
    clock_hz = _under_load(context, CLOCK)
    if context.device is None or clock_hz is None:
        return None
    clock_hz *= 1e6 if clock_hz < 1e5 else 1.0
    share = clock_hz / context.device.boost_hz
    if share > LEAST_FRAC:
        return None
    power_w, heat_c = _under_load(context, POWER), _under_load(context, HEAT)
    capped = power_w is not None and power_w > CAPPED_FRAC * context.device.tdp_w
    hot = heat_c is not None and heat_c > HOT_C
    if capped and not hot and share > AT_POWER_FRAC:
        return None
    cause = (
        "thermal throttling"
        if hot
        else "power throttling"
        if capped
        else "the clock is held down (limit set, or throttled)"
    )
    works = np.flatnonzero(context.family("gemm", "conv", "attention"))
    return Candidate(
        what=f"The clock runs at {clock_hz / 1e6:.0f} MHz of {context.device.boost_hz / 1e6:.0f} MHz under load",
        cause=cause + (f" at {power_w:.0f} W" if power_w is not None else ""),
        change="raise the power limit (nvidia-smi -pl) or reset locked clocks (nvidia-smi -rgc); cooling; or fewer "
        "joules: lower precision, fusion",
        where=place_of(context, works),
        fix=Fix(works=works, keep_best=share, keep_worst=min(1.0, share + 0.6 * (1 - share))),
        evidence=({"clock_mhz": round(clock_hz / 1e6), "power_w": power_w, "temperature_c": heat_c},),
        unchecked=("whether the limit is set on purpose",),
    )


def _under_load(context: TraceContext, pattern: re.Pattern[str]) -> float | None:
    """The median of a counter in the window; None if it was not sampled."""
    for name, counter in context.trace.counters.items():
        if not pattern.search(name):
            continue
        at_ns = np.rint(counter.at_s * 1e9)
        inside = (at_ns >= context.window.start_ns) & (at_ns < context.window.end_ns)
        if inside.any():
            return float(np.median(counter.value[inside]))
    return None
