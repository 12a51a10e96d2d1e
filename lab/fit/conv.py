"""Fits the convolution time model to the H200 recordings and reports the error on what it has not seen.

Run from the repository: ``python -m lab.fit.conv [--fit [--only STAGES]] [--all] [--worst 10] [--out FILE]``.
Without ``--fit`` it reports the error of the coefficients in the source.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab import ROOT
from ridgeline.bench.fitting import FEW_KERNELS, elapsed_s
from ridgeline.cost.call import Call, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.conv import conv, problem

H200 = Chip(
    name="h200", arch="hopper", num_sms=132, clock_hz=1.98e9, dram_bytes_per_s=4.8e12, l2_bytes=60 * 2.0**20,
    l2_bytes_per_s=10.14e12, smem_bytes=233472.0, vector_flops_per_s=66.9e12,
    tensor_flops_per_s={"tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12}, tdp_w=700.0, idle_w=75.0,
)  # fmt: skip
RECORDINGS = ROOT / "data" / "recordings" / "h200"
EVENT_S, GAP_S = 3e-6, 1.5e-6  # what event timing adds to the kernels, once and per further kernel
CAP = 2.0  # relative error beyond which a point no longer pulls
STEPS = ((0.8, 1.25, 0.93, 1.075), (0.95, 1.05, 0.985, 1.015))
REACH = 1.2  # a fit moves no coefficient further than this, in logarithms, from where it started


@dataclass(frozen=True, slots=True)
class Point:
    """One recorded convolution and whether it is fitted."""

    call: Call
    event_s: float
    train: bool
    kernels: tuple[str, ...]

    @property
    def shape(self) -> dict[str, int]:
        return self.call.dims()

    @property
    def sort(self) -> str:
        groups = self.shape.get("groups", 1)
        return "dense" if groups == 1 else "depthwise" if groups == self.shape["c"] else "grouped"

    @property
    def layout(self) -> str:
        return "nhwc" if self.shape.get("nhwc", 0) else "nchw"

    @property
    def pointwise(self) -> bool:
        return self.shape["k"] == 1 and self.shape["stride"] == 1


def _event_s(row: dict[str, Any]) -> float:
    """Kernel durations with the event's overhead, averaged with the event itself where the host kept up."""
    kernels_s = elapsed_s(row["kernels"]) + EVENT_S + GAP_S * (len(row["kernels"]) - 1)
    event_s = row.get("cold_s", 0.0)
    if row["phase"] == "fwd" and 0.0 < event_s < 0.8 * kernels_s:  # kernels ran beside each other
        return float(event_s)
    if row["phase"] == "fwd" and 0.8 < event_s / kernels_s < 1.25:
        return math.sqrt(kernels_s * event_s)
    return float(kernels_s)


def _untold(row: dict[str, Any]) -> bool:
    """Groups one after another, on several streams, of which only the sum of the kernels was recorded."""
    return len(row["kernels"]) > FEW_KERNELS and not (row["phase"] == "fwd" and row.get("cold_s", 0.0) > 0.0)


def _trains(row: dict[str, Any], file: Path) -> bool:
    """Two thirds of the newest sample and all of the older ones are fitted; the rest is held out, by its shape."""
    key = json.dumps([row["kind"], row["dtype"], row["phase"], sorted(row["shape"].items())])
    return "seed5" not in file.name or int(hashlib.md5(key.encode()).hexdigest(), 16) % 3 != 0


def points() -> list[Point]:
    found = []
    for file in sorted(RECORDINGS.glob("operators_seed*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            rows = [json.loads(line) for line in lines][1:]
        for row in rows:
            if row["kind"].startswith("conv") and "error" not in row and "kernels" in row and not _untold(row):
                made = call(row["kind"], row["dtype"], row["phase"], row["library"], **row["shape"])
                found.append(Point(made, _event_s(row), _trains(row, file), tuple(k[0] for k in row["kernels"])))
    return found


def predicted_s(point: Point, coef: dict[str, float]) -> float:
    time = conv.model(point.call, H200, coef, 0.0)
    return time.busy_s + EVENT_S + GAP_S * (time.num_kernels - 1)


def _sixteen(p: Point) -> bool:
    return p.call.dtype in ("bf16", "fp16")


def _dense(p: Point, phase: str, sixteen: bool) -> bool:
    return p.sort == "dense" and p.call.phase == phase and p.call.dtype in (("bf16", "fp16") if sixteen else ("fp32",))


STAGES: list[tuple[str, str, Callable[[Point], bool]]] = [
    ("around",
     "transform_start_cycles transform_tile_cycles transform_back transform_dram_frac transform_held pad_cycles "
     "filter_start_cycles filter_cycles memset_cycles share_init_cycles reduce_cycles reduce_frac",
     lambda p: p.sort == "dense" and _sixteen(p) and not p.pointwise),
    ("products",
     "gemm_start_cycles gemm_frac gemm_bytes_per_cycle gemm_half_aligned gemm_unaligned gemm_dram_frac "
     "gemm_odd gemm_odd_frac simt_image_frac vector_depth_cycles",
     lambda p: _dense(p, "fwd", True) and (p.pointwise or p.shape["c"] <= 16)),
    ("product-gradients",
     "gemm_reduce_cycles gemm_split_depth",
     lambda p: _dense(p, "bwd", True) and p.pointwise),
    ("saving",
     "fourier_gain fourier_bytes winograd_gain winograd_bytes",
     lambda p: p.sort == "dense" and p.call.dtype in ("fp32", "tf32")),
    ("stencils-last",
     "stencil_last_cycles stencil_last_tap_cycles stencil_last_grad_cycles stencil_last_grad_tap_cycles "
     "stencil_last_weight_cycles stencil_last_weight_tap_cycles stencil_last_large stencil_last_first_cycles "
     "stencil_last_latency_cycles stencil_last_stride stencil_general_cycles stencil_general_tap_cycles "
     "stencil_general_large stencil_general_stride",
     lambda p: p.sort == "depthwise" and _sixteen(p) and p.layout == "nhwc"),
    ("stencils-last-single",
     "stencil_last_wide_cycles stencil_last_wide_tap_cycles stencil_last_wide_grad_cycles "
     "stencil_last_wide_grad_tap_cycles stencil_last_reduce_cycles stencil_direct_tap_cycles",
     lambda p: p.sort == "depthwise" and not _sixteen(p) and p.layout == "nhwc"),
    ("stencils-first",
     "stencil_weight_step_cycles stencil_weight_latency_cycles stencil_tiled_grad_cycles "
     "stencil_tiled_grad_tap_cycles stencil_tiled_weight_cycles stencil_tiled_weight_tap_cycles "
     "stencil_tiled_cycles stencil_tiled_tap_cycles stencil_cycles stencil_tap_cycles stencil_any_cycles "
     "stencil_any_tap_cycles",
     lambda p: p.sort == "depthwise" and p.layout == "nchw"),
    ("groups",
     "generic_tile_cycles generic_start_cycles group_start_cycles group_matrix_cycles group_row_cycles "
     "group_vector_start_cycles group_vector_frac group_depth_cycles group_engine_depth_cycles "
     "group_engine_row_cycles group_grad_cycles group_transpose_bytes_per_s",
     lambda p: p.sort == "grouped"),
]  # fmt: skip
"""Coefficients fitted together and the points that decide them.

Those of a kernel that few shapes take were read off its own duration first; the fit starts there. Groups whose kernels
are known (streams, direct kernels, tiles that hold several) are fitted by ``lab/fit/grouped_conv.py``.
"""


def _fit(coef: dict[str, float], names: list[str], train: list[Point], rounds: int) -> dict[str, float]:
    """Each coefficient in turn is made larger or smaller while that lowers the mean error."""

    def error(tried: dict[str, float]) -> float:
        return float(np.mean([min(CAP, abs(predicted_s(p, tried) / p.event_s - 1.0)) for p in train]))

    start, least = coef, error(coef)
    for number in range(rounds):
        before = least
        for name in names:
            for step in STEPS[min(number, 1)]:
                tried = {**coef, name: coef[name] * step}
                if abs(math.log(tried[name] / start[name])) < REACH and (found := error(tried)) < least - 1e-5:
                    coef, least = tried, found
        if before - least < 2e-4:
            break
    return coef


def fit(given: list[Point], only: str, rounds: int) -> dict[str, float]:
    coef = dict(problem.DEFAULTS)
    for title, names, belongs in STAGES:
        if only and title not in only.split(","):
            continue
        train = [p for p in given if belongs(p)]
        coef = _fit(coef, names.split(), train, rounds)
        found = {name: float(f"{coef[name]:.3g}") for name in names.split()}
        print(f"{title}, {len(train):4d} points:", found, flush=True)
    return coef


def _line(label: str, ratios: Iterable[float]) -> str:
    r = np.array(list(ratios))
    off = np.abs(r - 1.0)
    bias = math.exp(float(np.log(r).mean())) - 1.0
    return f"{label:34s} n {len(r):4d}  mape {off.mean():6.1%}  median {np.median(off):6.1%}  bias {bias:+6.1%}"


def report(held_out: list[Point], coef: dict[str, float], num_worst: int) -> None:
    ratios = [(predicted_s(p, coef) / p.event_s, p) for p in held_out]
    by: dict[str, list[float]] = defaultdict(list)
    for ratio, p in ratios:
        by[p.call.kind].append(ratio)
        by[f"{p.call.kind} {p.call.phase}"].append(ratio)
        by[f"{p.call.kind} {p.call.phase} {p.layout} {p.call.dtype} {p.sort}"].append(ratio)
    for label in sorted(by):
        print(_line(label, by[label]))
    for ratio, p in sorted(ratios, key=lambda pair: -abs(math.log(pair[0])))[:num_worst]:
        what = f"{p.call.kind} {p.call.phase} {p.call.dtype}"
        print(f"{ratio:6.2f} x {p.event_s * 1e6:9.1f} us", what, p.shape, p.kernels[0][:60])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit before reporting on what was held out")
    parser.add_argument("--all", action="store_true", help="fit on what was held out, too")
    parser.add_argument("--only", default="", help="stages to fit, by their names, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="times each coefficient is tried")
    parser.add_argument("--worst", type=int, default=0, help="list that many worst points")
    parser.add_argument("--out", type=Path, help="write the coefficients to this JSON file")
    args = parser.parse_args()
    everything = points()
    given = [p for p in everything if p.train or args.all]
    coef = fit(given, args.only, args.rounds) if args.fit else dict(problem.DEFAULTS)
    report([p for p in everything if not p.train], coef, args.worst)
    if args.out:
        args.out.write_text(json.dumps(coef, indent=1) + "\n")


if __name__ == "__main__":
    main()
