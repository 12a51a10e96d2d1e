"""Fits the normalization and softmax time models to the H200 recordings and reports the error on the other half.

Run from the repository: ``python -m lab.fit.norm [norm|softmax] [--fit] [--worst 10] [--out FILE.json]``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from lab import ROOT
from ridgeline.cost.call import ITEMSIZE, Call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import norm, softmax

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=60e6,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, tensor_flops_per_s={"bf16": 989e12}, vector_flops_per_s=67e12,
    tdp_w=700.0, idle_w=75.0,
)  # fmt: skip
RECORDINGS = ROOT / "data" / "recordings" / "h200"
FAMILIES = {
    "norm": (norm, "layer_norm rms_norm group_norm batch_norm"),
    "softmax": (softmax, "softmax log_softmax cross_entropy"),
}
EVENT_S, GAP_S = 3e-6, 1e-6  # what event timing adds to the kernels, once and per further kernel
HELD = 40e6  # bytes of an operator's tensors that repeated runs find in the 60 MB L2


@dataclass(frozen=True, slots=True)
class Point:
    """One recorded operator."""

    call: Call
    kernels_s: tuple[float, ...]
    event_s: float
    warm_s: float
    warm_frac: float

    @property
    def busy_s(self) -> float:
        return sum(self.kernels_s)


def _footprint(call: Call) -> float:
    dims = call.dims()
    numel = dims["n"] * dims.get("c", dims.get("v", 1)) * dims.get("h", 1) * dims.get("w", 1)
    return numel * ITEMSIZE[call.dtype] * (2 if call.phase == "fwd" else 3)


def _point(row: dict[str, Any]) -> Point:
    call = Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))
    times = tuple(seconds for _, seconds in row["kernels"])
    busy_s = sum(times)
    overhead_s = EVENT_S + GAP_S * (len(times) - 1)
    event_s = row.get("cold_s", 0.0) if row["phase"] == "fwd" else 0.0
    if not 0.85 < event_s / (busy_s + overhead_s) < 1.12:  # host-bound, or the profiler disturbed the run
        event_s = busy_s + overhead_s
    ratio = (_footprint(call) / HELD) ** 4
    return Point(call, times, event_s, row.get("warm_kernels_s") or 0.0, 1.0 / (1.0 + ratio))


def load(kinds: str) -> list[Point]:
    """Every recorded point of these kinds."""
    wanted, points = set(kinds.split()), []
    for path in sorted(RECORDINGS.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            rows = [json.loads(line) for line in list(lines)[1:]]
        points += [_point(row) for row in rows if row.get("kind") in wanted and "kernels" in row]
    return points


def _adjusted(point: Point) -> tuple[float, ...]:
    """Kernel times between what the profiler and what the events say."""
    overhead_s = EVENT_S + GAP_S * (len(point.kernels_s) - 1)
    scale = ((point.event_s - overhead_s) / point.busy_s) ** 0.5 if point.busy_s > 10e-6 else 1.0
    return tuple(seconds * scale for seconds in point.kernels_s)


def _residuals(module: Any, points: Sequence[Point], coef: dict[str, float]) -> list[float]:
    out: list[float] = []
    for point in points:
        made = module.kernels(point.call, H200, coef, 0.0)
        busy_s = sum(k[1] for k in made)
        target = _adjusted(point)
        overhead_s = EVENT_S + GAP_S * (len(target) - 1)
        out.append(np.log((busy_s + overhead_s) / (sum(target) + overhead_s)))
        if len(made) == len(target) > 1:
            total = sum(target)
            out += [0.7 * (s / total) ** 0.5 * np.log(k[1] / s) for k, s in zip(made, target, strict=True)]
        if point.warm_s:
            warm_s = sum(k[1] for k in module.kernels(point.call, H200, coef, point.warm_frac))
            out.append(0.3 * np.log((warm_s + overhead_s) / (point.warm_s + overhead_s)))
    return out


def _bounds(key: str, start: float) -> tuple[float, float]:
    """Of the logarithm of a coefficient: shares stay below one, powers between one and eight."""
    if key.endswith(".power"):
        return 0.0, float(np.log(8.0)) + 1e-6
    return start - 5.0, 1e-6 if key == "tail_frac" or key.endswith("dram_frac") else start + 3.0


def fit(module: Any, points: Sequence[Point], start: dict[str, float], keys: Sequence[str]) -> dict[str, float]:
    """Coefficients (positive, fitted in their logarithm) with the least mean absolute log error."""
    keys = list(keys)

    def unpack(x: np.ndarray) -> dict[str, float]:
        return {**start, **{k: float(np.exp(v)) for k, v in zip(keys, x, strict=True)}}

    x0 = np.log([max(start[k], 1e-3) for k in keys])
    found = least_squares(
        lambda x: np.append(_residuals(module, points, unpack(x)), 0.01 * (x - x0)),
        x0, loss="soft_l1", f_scale=0.04, max_nfev=40, diff_step=1e-3,
        bounds=tuple(zip(*(_bounds(k, x) for k, x in zip(keys, x0, strict=True)), strict=True)),
    )  # fmt: skip
    return unpack(found.x)


def free(coef: dict[str, float]) -> list[str]:
    """What a fit may move: not the terms a kernel lacks (zero), nor what an empty kernel or a lone load sets."""
    return sorted(k for k, v in coef.items() if v > 0.0 and k not in ("launch_cycles", "miss_cycles"))


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    rng = random.Random(0)
    order = list(points)
    rng.shuffle(order)
    return order[::2], order[1::2]


def _errors(module: Any, points: Iterable[Point], coef: dict[str, float]) -> list[tuple[float, Point, float]]:
    out = []
    for point in points:
        time = module.model(point.call, H200, coef, 0.0)
        predicted_s = time.busy_s + EVENT_S + GAP_S * (time.num_kernels - 1)
        out.append((predicted_s / point.event_s - 1.0, point, time.busy_s))
    return out


def report(module: Any, points: Sequence[Point], coef: dict[str, float], worst: int) -> float:
    """Print the error by kind, phase, library and dtype; return the mean over all."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    rows = _errors(module, points, coef)
    for error, point, _ in rows:
        c = point.call
        groups[c.kind, c.phase, c.library, c.dtype].append(error)
        groups[c.kind, c.phase, c.library, "all"].append(error)
        groups["all", "", "", ""].append(error)
    for key, errors in sorted(groups.items()):
        e = np.array(errors)
        mape, median, bias = 100 * np.mean(abs(e)), 100 * np.median(abs(e)), 100 * np.mean(e)
        print(f"{' '.join(key):40s} n={len(e):4d} MAPE {mape:6.2f} median {median:6.2f} bias {bias:+6.2f}")
    for error, point, busy_s in sorted(rows, key=lambda r: -abs(r[0]))[:worst]:
        c = point.call
        kernels_us = [round(s * 1e6, 2) for s in point.kernels_s]
        print(f"  {100 * error:+7.1f}% {c.kind} {c.phase} {c.library} {c.dtype} {dict(c.shape)}"
              f" predicted {busy_s * 1e6:.2f} us, kernels {kernels_us} us")  # fmt: skip
    return float(np.mean([abs(r[0]) for r in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=["norm", "softmax"])
    parser.add_argument("--fit", action="store_true", help="fit on one half before reporting on the other")
    parser.add_argument("--all", action="store_true", help="fit on every point, for the coefficients to ship")
    parser.add_argument("--worst", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the coefficients as JSON")
    args = parser.parse_args()
    fitted: dict[str, dict[str, float]] = {}
    for name in args.families:
        module, kinds = FAMILIES[name]
        points = load(kinds)
        train, held_out = split(points)
        coef = dict(module.DEFAULTS)
        if args.fit or args.all:
            coef = fit(module, points if args.all else train, coef, free(coef))
            print(json.dumps({k: float(f"{v:.4g}") for k, v in coef.items()}, indent=1))
        report(module, held_out, coef, args.worst)
        fitted[name] = {k: float(f"{v:.4g}") for k, v in coef.items()}
    if args.out:
        args.out.write_text(json.dumps(fitted, indent=1))


if __name__ == "__main__":
    main()
