"""How far predictions miss: 90 % intervals from held-out measurements, propagated from calls to models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost.call import Call

HOST_SPREAD = 0.3
"""log half-width that host-bound time adds, by its share of the step: what held 90 % of 32 recorded wall times on the
host that was measured (``lab/fit/intervals.py``); hosts that differ more from it are not covered."""

FAMILY_WIDTH: dict[str, float] = {
    "gemm": 0.12,
    "attention": 0.16,
    "conv": 0.30,
    "norm": 0.15,
    "softmax": 0.15,
    "stream": 0.12,
    "reduction": 0.2,
}
"""log half-width that held 90 % of held-out calls, by family, where no finer figure was calibrated."""

OTHER_WIDTH = 0.3
WIDER = {Basis.MEASURED: 1.0, Basis.FITTED: 1.0, Basis.DATASHEET: 2.2, Basis.ASSUMED: 3.0}
OUTSIDE = 1.5
"""Wider by this for calls shorter or longer than any that was measured."""

UNRECORDED = 1.8
"""Wider by this for a kind, phase or library that a calibration never saw, though it knows the family."""

SHARED_FRAC = 0.5
"""Share of a family's error that its calls have in common, so that it does not average out over a model."""

MODEL_WIDTH = {Basis.MEASURED: 0.047, Basis.FITTED: 0.047, Basis.DATASHEET: 0.25, Basis.ASSUMED: 0.35}
"""What a whole model adds: clocks, neighbors in the cache, kernels chosen differently. The first two are
split-conformal over 34 recorded networks, each left out in turn (``lab/fit/intervals.py``); the others are assumed."""


def half_width(intervals: Mapping[str, Any], call: Call, family: str, basis: Basis, busy_s: float) -> float:
    """log half-width of the 90 % interval of a call: by kind, phase and library if calibrated, else by family."""
    kinds = intervals.get("kinds") or {}
    key = key_of(call)
    entry = kinds.get(key)
    if entry is None and key.count("/") > 2:  # odd ones and groups that were not recorded apart
        entry = kinds.get(key.rpartition("/")[0])
    if entry is None:
        width = intervals.get("families", {}).get(family, FAMILY_WIDTH.get(family, OTHER_WIDTH)) * WIDER[basis]
        return float(width * (UNRECORDED if kinds else 1.0))
    low_s, high_s = entry["domain_s"]
    width = entry["short"] if busy_s < entry["split_s"] else entry["long"]
    return float(width * (1.0 if low_s <= busy_s <= high_s else OUTSIDE) * WIDER[basis])


def key_of(call: Call) -> str:
    """Calls whose errors are alike: kind, phase and library; products of odd rows and grouped filters stand apart."""
    key = f"{call.kind}/{call.phase}/{call.library}"
    if call.kind in ("gemm", "bmm"):
        dims = call.dims()
        usual = call.dtype in ("bf16", "fp16", "fp8") and dims["n"] % 8 == 0 and dims["k"] % 8 == 0
        return key if usual else f"{key}/odd"
    if not call.kind.startswith("conv"):
        return key
    dims = call.dims()
    return f"{key}/groups" if 1 < dims.get("groups", 1) < dims.get("c", 1) else key


def factors(width: float) -> tuple[float, float]:
    """(low, high) multipliers that contain 90 % of measurements."""
    return math.exp(-width), math.exp(width)


def spread(lines: Iterable[Any], busy_s: float, basis: Basis = Basis.FITTED) -> float:
    """log half-width of a sum: errors shared within a family add up, the rest average out, a model adds its own."""
    if busy_s <= 0:
        return 0.0
    shared: dict[str, float] = {}
    own = 0.0
    for line in lines:
        if line.busy_s:
            width_s = line.width * line.busy_s * line.times
            shared[line.family] = shared.get(line.family, 0.0) + SHARED_FRAC * width_s
            own += ((1 - SHARED_FRAC) * width_s) ** 2
    return math.hypot(math.sqrt(sum(v * v for v in shared.values()) + own) / busy_s, MODEL_WIDTH[basis])
