"""From recordings to a calibration: coefficients of every family nudged until predictions meet what was measured.

Coordinate descent on the mean |log error|, with nothing but the standard library: a GPU host has little installed. Half
of the shapes are fitted; the other half gives the error and the intervals.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.cost import host
from ridgeline.cost.call import Call, Coef, Family, family_of
from ridgeline.cost.interval import key_of
from ridgeline.cost.price import Pricer
from ridgeline.cost.time.chip import Chip
from ridgeline.errors import CalibrationError, RidgelineError
from ridgeline.hardware import Device

EVENT_S = host.DEFAULTS["event_s"]
GAP_S = host.DEFAULTS["event_gap_s"]
STEPS = (0.8, 1.25, 0.93, 1.075)
COVER = 0.9
FEW_KERNELS = 12  # beyond, convolutions in groups run on several streams
LATE_S, SHORT_S = 4e-6, 2e-4
"""Events around a call of up to the second length that read so much more than its kernels took waited for the host:
of 995 such calls of attention on an H200 436 read over 8 µs more, 45 read 4 to 8 and 36 read 2 to 4 µs more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured call: ``target_s`` is its kernels' time, events' overhead taken off."""

    call: Call
    target_s: float
    num_kernels: int


def samples(folder: Path) -> list[Sample]:
    """Every usable row of the operator recordings in a folder."""
    paths = sorted(folder.glob("operators_seed*.jsonl.gz"))
    if not paths:
        raise CalibrationError(f"no operators_seed*.jsonl.gz in {folder}: run `ridgeline calibrate --out {folder}`")
    found = []
    for path in paths:
        with gzip.open(path, "rt") as lines:
            next(lines)
            found += [sample(row) for row in map(json.loads, lines) if row.get("kernels") and "error" not in row]
    return found


def sample(row: dict[str, Any]) -> Sample:
    """The events' word where it agrees with the profiler's; else the host was in the way and the profiler is right.

    Less time between events than in a convolution's kernels: they ran beside each other, and the events are right;
    also where pieces ran beside each other in part, and the longest of them is less than what passed.
    """
    busy_s, num = elapsed_s(row["kernels"]), len(row["kernels"])
    conv = row["kind"].startswith("conv") and num > 1
    seen_s = (row["cold_s"] - EVENT_S if "cold_s" in row else row.get("span_s", 0.0)) - GAP_S * (num - 1)
    least = 0.05 if conv else 0.78
    late = not conv and busy_s < SHORT_S and seen_s - busy_s > LATE_S
    most_s = 1.28 * (sum(seconds for _, seconds in row["kernels"]) if conv else busy_s)
    agrees = (row["phase"] == "fwd" or conv) and least * busy_s < seen_s < most_s and not late
    call = Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))
    return Sample(call, seen_s if agrees else busy_s, num)


def elapsed_s(kernels: list[Any]) -> float:
    """Kernels one after another, but for the pieces of a large filter on vector units, which run beside each other."""
    total = sum(seconds for _, seconds in kernels)
    pieces = [seconds for name, seconds in kernels if "convolve_sgemm" in name or "kern_precompute" in name]
    beside = 2 < len(pieces) < FEW_KERNELS and any("kern_precompute" in name for name, _ in kernels)
    return float(total - sum(pieces) + max(pieces)) if beside else float(total)


def calibrate(device: Device, folder: Path, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """The calibration of a device from its recordings, ready to be written as JSON."""
    pricer = Pricer(device)
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for found in samples(folder):
        family = family_of(found.call.kind)
        groups[family.name, found.call.dtype if family.name == "gemm" else "all"].append(found)
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    errors: list[tuple[Sample, float, float]] = []
    for (name, key), rows in sorted(groups.items()):
        began = time.perf_counter()
        entry, judged = fit(rows, pricer, key)
        families[name][key] = entry
        errors += judged
        held = entry["heldout"]
        spent_s = time.perf_counter() - began
        progress(f"{name} {key}: {held['n']} held out, mean error {held['mape']:.1%}, {spent_s:.0f} s")
    return {
        "device": device.name,
        "basis": "fitted",
        "source": f"recordings of {time.strftime('%Y-%m-%d')}",
        "families": dict(families),
        "intervals": intervals(errors),
    }


def fit(rows: list[Sample], pricer: Pricer, key: str) -> tuple[dict[str, Any], list[tuple[Sample, float, float]]]:
    """(calibration entry, (sample, predicted seconds, log error) of every row)."""
    order = random.Random(0).sample(rows, len(rows))
    half = max(1, len(order) // 2)
    family = family_of(rows[0].call.kind)
    start = dict(pricer.calibration.coef(family, rows[0].call)[0])
    start.pop("leftover_frac", None)  # a factor of calls alone was learned beside other coefficients than these
    # of a family that are fitted: enough for its few coefficients, little enough for minutes
    coef = descend(order[:half][:160], family, pricer.chip, start)
    judged = [(row, *_judged(row, family, pricer.chip, coef)) for row in order]
    held = [log for _, _, log in judged[half:]] or [log for _, _, log in judged]
    ratios = [math.exp(log) - 1 for log in held]
    report = {
        "n": len(held),
        "mape": round(statistics.fmean(map(abs, ratios)), 4),
        "median_ape": round(statistics.median(map(abs, ratios)), 4),
        "bias": round(statistics.fmean(ratios), 4),
    }
    changed = {name: float(f"{value:.4g}") for name, value in coef.items() if value != family.defaults.get(name)}
    return {"coef": changed, "heldout": report}, judged


def descend(rows: list[Sample], family: Family, chip: Chip, start: Coef, rounds: int = 2) -> dict[str, float]:
    """Each coefficient in turn is made larger or smaller while that helps."""
    coef = dict(start)
    best = _loss(rows, family, chip, coef)
    for _ in range(rounds):
        before = best
        for name in start:
            for step in STEPS:
                tried = {**coef, name: coef[name] * step}
                loss = _loss(rows, family, chip, tried)
                if loss < best - 1e-5:
                    coef, best = tried, loss
        if before - best < 5e-4:
            break
    return coef


def _loss(rows: list[Sample], family: Family, chip: Chip, coef: Coef) -> float:
    return statistics.fmean(abs(_judged(row, family, chip, coef)[1]) for row in rows)


def _judged(row: Sample, family: Family, chip: Chip, coef: Coef) -> tuple[float, float]:
    """(predicted kernel seconds, log of predicted over measured, events' overhead on both sides)."""
    try:
        busy_s = family.model(row.call, chip, coef, 0.0).busy_s
    except (RidgelineError, ValueError, ZeroDivisionError, OverflowError):
        return 0.0, 10.0  # a coefficient out of its range: never an improvement
    more_s = EVENT_S + GAP_S * (row.num_kernels - 1)
    return busy_s, math.log((busy_s + more_s) / (row.target_s + more_s))


def intervals(errors: Iterable[tuple[Sample, float, float]]) -> dict[str, Any]:
    """90 % half-widths by kind, phase and library, apart for short and long calls; and by family."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    families: dict[str, list[float]] = defaultdict(list)
    for row, busy_s, log in errors:
        kinds[key_of(row.call)].append((busy_s, abs(log)))
        families[family_of(row.call.kind).name].append(abs(log))
    # fewer rows than this get no interval of their own
    return {
        "kinds": {name: _kind_widths(found) for name, found in kinds.items() if len(found) >= 12},
        "families": {name: _quantile(found) for name, found in families.items()},
    }


def _kind_widths(found: list[tuple[float, float]]) -> dict[str, Any]:
    split_s = statistics.median(busy_s for busy_s, _ in found)
    return {
        "split_s": split_s,
        "domain_s": [min(b for b, _ in found) * 0.8, max(b for b, _ in found) * 1.25],
        "short": _quantile([log for b, log in found if b < split_s] or [log for _, log in found]),
        "long": _quantile([log for b, log in found if b >= split_s]),
    }


def _quantile(logs: list[float]) -> float:
    """A little beyond the sample's own quantile, the more so the fewer they are."""
    ordered = sorted(logs)
    at = min(len(ordered) - 1, math.ceil(COVER * (len(ordered) + 1)) - 1)
    return round(ordered[at] * 1.03, 4)
