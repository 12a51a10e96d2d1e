"""What-if for the dashboard: the model itself, for any changes of a device and any options of a network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.cost.estimate import EXECUTIONS, estimate
from ridgeline.cost.fleet import estimate_fleet
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import InputError
from ridgeline.hardware import device as device_named
from ridgeline.hardware import devices
from ridgeline.hardware.fleet import fleet
from ridgeline.hardware.override import field_of
from ridgeline.models import build, models

AXES = (
    ("hbm_bandwidth", "Memory bandwidth"), ("peak", "Peak FLOP/s"), ("l2_bandwidth", "L2 bandwidth"),
    ("l2", "L2 capacity"), ("sms", "SMs"), ("clock", "Core clock"), ("tdp", "Power limit"),
)  # fmt: skip
CURVE = tuple(2.0 ** (step / 4) for step in range(-8, 9))
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,40}")


def choices() -> dict[str, Any]:
    """Networks, devices and executions by name."""
    names = sorted(card.name for card in models())
    return {"models": names, "devices": list(devices()), "executions": list(EXECUTIONS)}


def evaluated(asked: Mapping[str, str]) -> dict[str, Any]:
    """A prediction as it is and with changes, and what each change alone would do from there.

    ``asked`` has ``model``, ``on``, ``execution``, factors as ``x.AXIS``, and the network's options.
    """
    options: dict[str, Any] = {}
    factors: dict[str, float] = {}
    for key, text in asked.items():
        if key.startswith("x."):
            factors[key[2:]] = _factor(key[2:], text)
        elif key not in ("model", "on", "execution"):
            if not _OPTION.fullmatch(key) or len(text) > 60:
                raise InputError(f"{key[:40]!r} is no option of a network")
            options[key] = int(text) if re.fullmatch(r"\d{1,9}", text) else text
    execution = asked.get("execution") or "eager"
    graph = build(asked.get("model") or "llama3-8b", **options)
    parent = device_named(asked.get("on") or "h200")
    before = estimate(graph, parent, execution)
    types = {line.work.dtype for line in before.lines if line.work.matrix_flops}
    peaks = sorted({f"{peak.unit}.{peak.dtype}" for peak in (parent.peak("tensor", name) for name in types)})
    words = {name: peaks if name == "peak" else [name] for name, _ in AXES}
    known = {name for name, found in words.items() if found and all(field_of(w) in parent.numbers() for w in found)}
    changed = {word: factor for name, factor in factors.items() if name in known and factor != 1.0
               for word in words[name]}  # fmt: skip
    device = parent.override(**{word: f"{factor:.6g}x" for word, factor in changed.items()}) if changed else parent
    after = estimate(graph, device, execution) if changed else before
    curves = {}
    for name in known:
        part = {word: (np.full(len(CURVE), factor), True) for word, factor in changed.items()}
        part |= {word: (np.array(CURVE), True) for word in words[name]}
        made = fleet(parent, part, len(CURVE))
        found = estimate_fleet(graph, made, execution).expected_s
        curves[name] = [float(s) if wrong == "" else None for s, wrong in zip(found, made.wrong)]
    return {
        "model": graph.name, "mode": graph.mode, "device": device.name, "execution": execution,
        "axes": [[name, label] for name, label in AXES if name in known], "curve": list(CURVE), "curves": curves,
        "before": _totals(before), "after": _totals(after), "ops": _ops(before, after), "notes": list(after.notes),
        "sizes": {key: value for key, value in graph.meta.items() if isinstance(value, (str, int, float))},
    }  # fmt: skip


def _factor(name: str, text: str) -> float:
    if name not in dict(AXES):
        raise InputError(f"no slider {name[:40]!r}: there are {', '.join(name for name, _ in AXES)}")
    try:
        found = float(f"{float(text):.6g}")
    except ValueError as error:
        raise InputError(f"{name}={text[:20]!r} is no factor") from error
    if not 0.01 <= found <= 100.0:
        raise InputError(f"{name}={found:g}: a factor from 0.01 to 100")
    return found


def _totals(p: Prediction) -> dict[str, Any]:
    return {
        "step_s": p.expected_s, "low_s": p.interval_s[0], "high_s": p.interval_s[1], "busy_s": p.busy_s,
        "idle_s": p.idle_s, "floor_s": p.floor_s, "energy_j": p.energy_j, "power_w": p.power_w, "usd": p.usd,
        "throttle": p.throttle, "peak_bytes": p.peak_bytes, "capacity_bytes": p.capacity_bytes, "basis": str(p.basis),
    }  # fmt: skip


def _ops(before: Prediction, after: Prediction) -> list[list[Any]]:
    """Seconds by op and what bounds it, before and after; the largest first."""
    sums: dict[str, list[Any]] = {}
    for side, prediction in enumerate((before, after)):
        bounds: dict[str, dict[str, float]] = {}
        for row in prediction.rows():
            made = sums.setdefault(row.op, [row.op, 0.0, 0.0, "", ""])
            made[1 + side] += row.expected_s
            shares = bounds.setdefault(row.op, {})
            shares[row.bound] = shares.get(row.bound, 0.0) + row.expected_s
        for op, shares in bounds.items():
            sums[op][3 + side] = max(shares, key=shares.__getitem__)
    return sorted(sums.values(), key=lambda row: -max(row[1], row[2]))[:24]
