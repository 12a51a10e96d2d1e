"""What the report's script draws from: the prediction in SI units, rows as columns, words kept once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost import host
from ridgeline.cost.analyses.memory_curve import live_bytes
from ridgeline.cost.analyses.utilization import matrix_peak_flops_per_s, roofs, utilization
from ridgeline.cost.prediction import Prediction
from ridgeline.cost.price import pricer_of
from ridgeline.graph import RESIDENT

MAX_POINTS = 1200
"""Points of the memory curve: more than a screen has columns."""


def report_data(prediction: Prediction, rate: tuple[str, float] | None) -> dict[str, Any]:
    """Everything the page shows."""
    return {
        "title": _title(prediction),
        "totals": _totals(prediction, rate),
        "memory": _memory(prediction),
        "ceilings": _ceilings(prediction),
        "whatif": _whatif(prediction),
        "rows": _columns(prediction),
        "notes": list(prediction.notes),
        "bases": _bases(prediction),
        "device": _device_numbers(prediction),
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
    """What replaying the host's and the device's queues in the browser needs."""
    queue = {**host.DEFAULTS, **pricer_of(p.device).calibration.host}
    kept = ("launch_s", "gap_s", "graph_gap_s", "step_s", "compiled_step_s")
    return {
        "kind": p.device.kind,
        "execution": p.execution,
        "idle_w": p.device.idle_w,
        **{key: queue[key] for key in kept},
    }


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
    found = roofs(p)
    columns |= {
        "compute_s": [_short(r.compute_s) for r in found],
        "dram_s": [_short(r.dram_s) for r in found],
        "l2_s": [_short(r.l2_s) for r in found],
    }
    stretch, matrix = [_short(line.stretch) for line in p.lines], [int(line.work.matrix_flops > 0) for line in p.lines]
    return {"words": list(ids), "stretch": stretch, "matrix": matrix, **columns}


def _short(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")


def _bases(p: Prediction) -> list[list[Any]]:
    """Seconds by basis, best first."""
    sums = dict.fromkeys(Basis, 0.0)
    for row in p.rows():
        sums[row.basis] += row.expected_s
    return [[str(basis), seconds] for basis, seconds in sums.items() if seconds > 0]


def _device_numbers(p: Prediction) -> list[list[Any]]:
    found = p.device
    return [
        [key, value, str(found.provenance(key).basis), found.provenance(key).source]
        for key, value in found.numbers().items()
    ]
