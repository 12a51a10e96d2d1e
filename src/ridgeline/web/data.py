"""What the report's script draws from: the prediction in SI units, rows as columns, words kept once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.basis import Basis
from ridgeline.cost.analyses.memory_curve import live_bytes
from ridgeline.cost.analyses.utilization import matrix_peak_flops_per_s, utilization
from ridgeline.cost.fleet import estimate_fleet
from ridgeline.cost.prediction import Prediction
from ridgeline.cost.price import pricer_of
from ridgeline.graph import RESIDENT
from ridgeline.hardware.fleet import fleet
from ridgeline.hardware.override import field_of

MAX_POINTS = 1200
"""Points of the memory curve: more than a screen has columns."""


def report_data(prediction: Prediction, rate: tuple[str, float] | None) -> dict[str, Any]:
    """Everything the page shows."""
    found = prediction.device
    device_numbers = [
        [key, value, str(found.provenance(key).basis), found.provenance(key).source]
        for key, value in found.numbers().items()
    ]
    return {
        "title": _title(prediction),
        "totals": _totals(prediction, rate),
        "memory": _memory(prediction),
        "ceilings": _ceilings(prediction),
        "whatif": _whatif(prediction),
        "rows": _columns(prediction),
        "notes": list(prediction.notes),
        "bases": _bases(prediction),
        "device": device_numbers,
    }


def _title(p: Prediction) -> dict[str, Any]:
    from ridgeline import __version__

    meta = {
        key: p.graph.meta[key]
        for key in ("precision", "batch", "seq", "kv", "image", "optimizer")
        if p.graph.meta.get(key)
    }
    return {
        "model": p.graph.name,
        "mode": p.graph.mode,
        "device": p.device.name,
        "device_title": p.device.title,
        "execution": p.execution,
        "sizes": {key: str(value) for key, value in meta.items()},
        "version": __version__,
        "hash": p.graph.content_hash,
    }


def _totals(p: Prediction, rate: tuple[str, float] | None) -> dict[str, Any]:
    used = utilization(p)
    return {
        "expected_s": p.expected_s,
        "interval_s": list(p.interval_s),
        "busy_s": p.busy_s,
        "busy_interval_s": list(p.busy_interval_s),
        "floor_s": p.floor_s,
        "host_s": p.host_s,
        "idle_s": p.idle_s,
        "flops": p.flops,
        "bytes": sum(row.bytes for row in p.rows()),
        "num_kernels": p.num_kernels,
        "num_params": p.num_params,
        "energy_j": p.energy_j,
        "power_w": p.power_w,
        "tdp_w": p.device.tdp_w,
        "usd": p.usd,
        "usd_per_hour": p.device.price_usd_per_hour,
        "price_date": p.device.price_date,
        "mfu_frac": used.mfu_frac,
        "dram_frac": used.dram_frac,
        "throttle": p.throttle,
        "basis": str(p.basis),
        "rate": list(rate) if rate else None,
    }


def _memory(p: Prediction) -> dict[str, Any]:
    curve = list(live_bytes(p))
    return {
        "by_kind": dict(p.memory.by_kind),
        "resident_kinds": sorted(map(str, RESIDENT)),
        "peak_bytes": p.peak_bytes,
        "capacity_bytes": p.capacity_bytes,
        "missing_bytes": p.missing_bytes,
        "resident_bytes": p.memory.resident_bytes,
        "workspace_bytes": p.memory.workspace_bytes,
        "num_nodes": len(curve),
        "curve": thinned(curve),
    }


def thinned(curve: Sequence[int]) -> list[list[int]]:
    """(index, bytes) of at most ``MAX_POINTS`` points, each the highest of its stretch, so that no peak is lost."""
    step = max(1, -(-len(curve) // MAX_POINTS))
    stretches = ((start, curve[start : start + step]) for start in range(0, len(curve), step))
    return [[start + max(range(len(part)), key=part.__getitem__), max(part)] for start, part in stretches]


def _ceilings(p: Prediction) -> dict[str, Any]:
    chip = pricer_of(p.device).chip
    used = sorted({line.work.dtype for line in p.lines if line.work.matrix_flops})
    peaks = [
        [f"{dtype} matrix peak", matrix_peak_flops_per_s(chip, dtype)]
        for dtype in used
        if dtype in chip.tensor_flops_per_s
    ]
    return {
        "dram_bytes_per_s": chip.dram_bytes_per_s,
        "l2_bytes_per_s": chip.l2_bytes_per_s,
        "peaks": [*peaks, ["fp32 vector peak", chip.vector_flops_per_s]],
    }


def _whatif(p: Prediction) -> dict[str, Any]:
    """What the model itself says of imagined devices: every position of one slider, and of every two together.

    ``axes`` are (word, label, overrides, factors). ``values`` are, for each position in the order of ``moved``, the
    wall time, the busy time, the energy and the money of a step; null where no such device can be.
    """
    calls = {line.work.dtype for line in p.lines if line.work.matrix_flops}
    peaks = sorted({f"{peak.unit}.{peak.dtype}" for peak in (p.device.peak("tensor", name) for name in calls)})
    axes = [
        ("hbm_bandwidth", "Memory bandwidth", ["hbm_bandwidth"], [0.5, 0.75, 1.5, 2.0, 4.0]),
        ("peak", "Peak FLOP/s", peaks, [0.5, 0.75, 1.5, 2.0, 4.0]),
        ("l2_bandwidth", "L2 bandwidth", ["l2_bandwidth"], [0.5, 1.5, 2.0]),
        ("clock", "Core clock", ["clock"], [0.6, 0.8, 1.2, 1.5]),
        ("tdp", "Power limit", ["tdp"], [0.6, 0.8, 1.25, 1.5]),
    ]
    axes = [axis for axis in axes if all(field_of(word) in p.device.numbers() for word in axis[2]) and axis[2]]
    single = [{at: factor} for at, axis in enumerate(axes) for factor in axis[3]]
    pairs = [{**one, **other} for one in single for other in single if min(one) < min(other)]
    moved = [*single, *pairs]
    values: list[list[float] | None] = [None] * len(moved)
    clock = next((at for at, axis in enumerate(axes) if axis[0] == "clock"), -1)
    groups: dict[tuple[int, ...], list[int]] = {}  # a clock moves what is not itself asked for
    for number, factors in enumerate(moved):
        groups.setdefault(tuple(factors) if clock in factors else tuple(at for at in range(len(axes)) if at != clock),
                          []).append(number)  # fmt: skip
    for asked, numbers in groups.items():
        changes = {
            word: (np.array([moved[number].get(at, 1.0) for number in numbers]), True)
            for at in asked
            for word in axes[at][2]
        }
        devices = fleet(p.device, changes, len(numbers))
        alive = np.flatnonzero(devices.wrong == "")
        found = estimate_fleet(p.graph, devices.part(alive), p.execution)
        for place, row in zip(alive, zip(found.expected_s, found.busy_s, found.energy_j, found.usd)):
            values[numbers[place]] = [float(f"{number:.9g}") for number in row]
    return {"axes": axes, "moved": [sorted(factors.items()) for factors in moved], "values": values}


def _columns(p: Prediction) -> dict[str, Any]:
    rows, ids = p.rows(), dict[str, int]()
    columns: dict[str, Any] = {
        key: [ids.setdefault(str(row[key]), len(ids)) for row in rows]
        for key in ("name", "module", "op", "phase", "bound", "kernel", "source", "basis")
    }
    columns |= {
        key: [_short(float(row[key])) for row in rows]
        for key in (
            "times",
            "num_kernels",
            "flops",
            "bytes",
            "floor_s",
            "expected_s",
            "low_s",
            "high_s",
            "host_s",
            "energy_j",
        )
    }
    return {"words": list(ids), **columns}


def _short(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")


def _bases(p: Prediction) -> list[list[Any]]:
    """Seconds by basis, best first."""
    sums = dict.fromkeys(Basis, 0.0)
    for row in p.rows():
        sums[row.basis] += row.expected_s
    return [[str(basis), seconds] for basis, seconds in sums.items() if seconds > 0]
