"""How far predictions miss: 90 % intervals from held-out measurements, propagated from calls to models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ridgeline.basis import Basis

HOST_SPREAD = 0.45
"""Relative half-width of host-side time: machines differ, and so does the Python around a model."""

HALF_WIDTH: dict[str, float] = {
    "gemm": 0.12, "attention": 0.14, "conv": 0.28, "norm": 0.15, "softmax": 0.15, "stream": 0.12, "reduction": 0.17,
}
"""log half-width that held 90 % of held-out calls, by family, where the device was fitted."""

OTHER = 0.25
WIDER = {Basis.MEASURED: 1.0, Basis.FITTED: 1.0, Basis.DATASHEET: 2.2, Basis.ASSUMED: 3.0}
SHARED_FRAC = 0.55
"""Share of a family's error that its calls have in common, so that it does not average out over a model."""


def half_width(family: str, basis: Basis) -> float:
    return HALF_WIDTH.get(family, OTHER) * WIDER[basis]


def factors(family: str, basis: Basis, busy_s: float) -> tuple[float, float]:
    """(low, high) multipliers that contain 90 % of measurements of such a call."""
    if not busy_s:
        return 1.0, 1.0
    width = half_width(family, basis)
    return math.exp(-width), math.exp(width)


def spread(lines: Iterable[Any], busy_s: float) -> float:
    """Relative half-width of a sum: errors shared within a family add up, the rest average out."""
    if busy_s <= 0:
        return 0.0
    shared: dict[str, float] = {}
    own = 0.0
    for line in lines:
        if not line.busy_s:
            continue
        width_s = half_width(line.family, line.basis) * line.busy_s * line.times
        shared[line.family] = shared.get(line.family, 0.0) + SHARED_FRAC * width_s
        own += ((1 - SHARED_FRAC) * width_s) ** 2
    return math.sqrt(sum(v * v for v in shared.values()) + own) / busy_s
