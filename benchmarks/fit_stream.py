"""Fit the coefficients of the streaming families to the recordings of operators and print the errors on the other half."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ridgeline.cost.call import ITEMSIZE, Call, family_of
from ridgeline.cost.chip import Chip

RECORDINGS = Path(__file__).parent.parent / "data" / "recordings" / "h200"
FILES = ("operators_seed0", "operators_seed1", "inductor")
LAUNCH_S, GAP_S = 3e-6, 1e-6  # event time beyond the kernels: before the first, before each other
H200 = Chip(name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=62914560.0,
            l2_bytes_per_s=10.14e12, smem_bytes=228 * 1024.0, tensor_flops_per_s={"bf16": 989e12},
            vector_flops_per_s=66.9e12, tdp_w=700.0, idle_w=75.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One recorded operator: the call, its kernels' seconds and number, and seconds when it found its data in the L2."""

    call: Call
    kernel_s: float
    num_kernels: int
    warm_s: float | None
    footprint_bytes: float
    names: tuple[str, ...]

    @property
    def event_s(self) -> float:
        return self.kernel_s + LAUNCH_S + GAP_S * (self.num_kernels - 1)


def read(kinds: Iterable[str], files: Iterable[str] = FILES) -> list[Point]:
    wanted, found = set(kinds), []
    for file in files:
        with gzip.open(RECORDINGS / f"{file}.jsonl.gz", "rt") as lines:
            next(lines)
            rows = [json.loads(line) for line in lines]
        found += [_point(row) for row in rows if row["kind"] in wanted and "kernels" in row and "error" not in row]
    return found


def _point(row: Mapping[str, Any]) -> Point:
    call = Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))
    kernels = row["kernels"]
    dims = call.dims()
    numel = math.prod(value for key, value in dims.items() if key in "ncbshdw") * dims.get("numel", 1) * dims.get("tensors", 1)
    return Point(call, sum(k[1] for k in kernels), len(kernels), row.get("warm_kernels_s"), 3.0 * numel * ITEMSIZE[row["dtype"]],
                 tuple(k[0] for k in kernels))


def predicted_event_s(point: Point, coef: Mapping[str, float], warm_frac: float = 0.0) -> float:
    time = family_of(point.call.kind).model(point.call, H200, coef, warm_frac)
    return time.busy_s + LAUNCH_S + GAP_S * (point.num_kernels - 1)


def fit(points: list[Point], start: Mapping[str, float], names: list[str], warm: bool = True) -> dict[str, float]:
    """The coefficients ``names`` that bring predictions nearest to the points (robust, in the logarithm)."""
    resident = [p for p in points if warm and p.warm_s and p.footprint_bytes < 30e6]

    def coefficients(x: np.ndarray) -> dict[str, float]:
        return {**start, **{name: float(start[name] * math.exp(v)) for name, v in zip(names, x, strict=True)}}

    def residuals(x: np.ndarray) -> list[float]:
        coef = coefficients(x)
        cold = [math.log(predicted_event_s(p, coef) / p.event_s) for p in points]
        return cold + [0.6 * math.log(predicted_event_s(p, coef, 1.0) / (p.event_s - p.kernel_s + (p.warm_s or 0))) for p in resident]

    solved = least_squares(residuals, np.zeros(len(names)), loss="soft_l1", f_scale=0.03, diff_step=1e-3, max_nfev=25)
    return coefficients(solved.x)


def halves(points: list[Point], seed: int = 0) -> tuple[list[Point], list[Point]]:
    order = points[:]
    random.Random(seed).shuffle(order)
    return order[::2], order[1::2]


def report(points: list[Point], coef: Mapping[str, float], worst: int = 8) -> None:
    groups: dict[tuple[str, ...], list[tuple[float, Point]]] = {}
    for p in points:
        error = predicted_event_s(p, coef) / p.event_s - 1.0
        for key in ((p.call.kind, p.call.phase, p.call.library, p.call.dtype), ("all",)):
            groups.setdefault(key, []).append((error, p))
    for key, found in sorted(groups.items()):
        errors = np.array([e for e, _ in found])
        print(f"{' '.join(key):42s} n {len(found):4d}  mape {100 * np.abs(errors).mean():5.1f} %"
              f"  median {100 * np.median(np.abs(errors)):5.1f} %  bias {100 * errors.mean():+5.1f} %")
    for error, p in sorted(groups[("all",)], key=lambda pair: -abs(pair[0]))[:worst]:
        print(f"  {error:+.0%} {p.call.kind} {p.call.phase} {p.call.dtype} {dict(p.call.shape)} measured {p.kernel_s * 1e6:.2f} us")
    resident = [p for p in points if p.warm_s and p.footprint_bytes < 30e6]
    if resident:
        errors = np.array([predicted_event_s(p, coef, 1.0) / (p.event_s - p.kernel_s + (p.warm_s or 0)) - 1 for p in resident])
        print(f"warm n {len(resident)} mape {100 * np.abs(errors).mean():.1f} % bias {100 * errors.mean():+.1f} %")
