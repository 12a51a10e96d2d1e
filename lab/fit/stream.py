"""Fit the coefficients of the streaming families to recorded operators and print the errors, on unseen ones too."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from lab import ROOT
from ridgeline.cost.call import ITEMSIZE, Call, family_of
from ridgeline.cost.time import recurrent  # noqa: F401  registers the families
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import reduction  # noqa: F401  registers the families
from ridgeline.cost.time.stream import elementwise as stream  # noqa: F401  registers the families
from ridgeline.cost.time.stream import (
    indexing,  # noqa: F401  registers the families
    pooling,  # noqa: F401  registers the families
)
from ridgeline.cost.time.stream import multi_tensor as multitensor  # noqa: F401  registers the families
from ridgeline.cost.time.stream import sort_scan_topk as ordering  # noqa: F401  registers the families

RECORDINGS = ROOT / "data" / "recordings" / "h200"
FILES = ("operators_seed0", "operators_seed1", "inductor")
LAUNCH_S, GAP_S = 3e-6, 1e-6  # event time beyond the kernels: before the first, before each other
H200 = Chip(
    name="h200",
    arch="hopper",
    num_sms=132,
    clock_hz=1.98e9,
    dram_bytes_per_s=4.8e12,
    l2_bytes=62914560.0,
    l2_bytes_per_s=10.14e12,
    smem_bytes=228 * 1024.0,
    tensor_flops_per_s={"bf16": 989e12},
    vector_flops_per_s=66.9e12,
    tdp_w=700.0,
    idle_w=75.0,
)


@dataclass(frozen=True, slots=True)
class Point:
    """One recorded operator: the call, its kernels' seconds and number, and the seconds when its data sat in the L2."""

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
    numel = (
        math.prod(value for key, value in dims.items() if key in "ncbshdw")
        * dims.get("numel", 1)
        * dims.get("tensors", 1)
    )
    tensors = 7.0 if row["kind"] == "adamw" else 4.0 if row["kind"] in ("upsample2x", "foreach_addcdiv_") else 3.0
    return Point(
        call,
        sum(k[1] for k in kernels),
        len(kernels),
        row.get("warm_kernels_s"),
        tensors * numel * ITEMSIZE[row["dtype"]],
        tuple(k[0] for k in kernels),
    )


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
        cold += [0.05 * float(v) for v in x]  # what the points do not tell stays where it was
        return cold + [
            0.6 * math.log(predicted_event_s(p, coef, 1.0) / (p.event_s - p.kernel_s + (p.warm_s or 0)))
            for p in resident
        ]

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
        print(
            f"{' '.join(key):42s} n {len(found):4d}  mape {100 * np.abs(errors).mean():5.1f} %"
            f"  median {100 * np.median(np.abs(errors)):5.1f} %  bias {100 * errors.mean():+5.1f} %"
        )
    for error, p in sorted(groups[("all",)], key=lambda pair: -abs(pair[0]))[:worst]:
        what = f"{p.call.kind} {p.call.phase} {p.call.dtype} {dict(p.call.shape)}"
        print(f"  {error:+.0%} {what} measured {p.kernel_s * 1e6:.2f} us")
    resident = [p for p in points if p.warm_s and p.footprint_bytes < 30e6]
    if resident:
        errors = np.array(
            [predicted_event_s(p, coef, 1.0) / (p.event_s - p.kernel_s + (p.warm_s or 0)) - 1 for p in resident]
        )
        print(f"warm n {len(resident)} mape {100 * np.abs(errors).mean():.1f} % bias {100 * errors.mean():+.1f} %")


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of one family, fitted to recorded calls that exercise them and no others."""

    family: str
    calls: str  # kind or kind:phase, space-separated
    names: str
    compiled: bool = False


_POINTWISE = "gelu silu relu exp rsqrt cos pow2 gelu_tanh clamp add mul div add_ where"
_REDUCE = "sum_dim0 sum_dim1 mean_dim1 sum_all argmax_dim1 max_dim1 norm_all"

FITS = (
    Fit(
        "stream",
        _POINTWISE,
        "read_frac write_frac l2_frac start_cycles miss_cycles ramp_cycles ramp_bytes overlap vector_instr "
        "chain_cycles",
    ),
    Fit(
        "stream",
        "add_row mul_col add_strided permute0213 cast transpose",
        "strided_instr strided_thread_instr index_instr "
        "strided_start_cycles narrow_start_cycles index_chain_cycles cast_start_cycles cast_instr transposed_instr",
    ),
    Fit("stream", "copy masked_fill", "copy_start_cycles copy_large_start_cycles copy_frac"),
    Fit("stream", "fill", "store_start_cycles fill_frac fill_instr"),
    Fit("stream", "dropout", "paced_overlap paced_cycles dropout_instr dropout_thread_instr"),
    Fit("stream", "cat", "cat_instr cat_element_instr cat_seam_instr cat_seam_bytes"),
    Fit("stream", "gelu add add_row", "fused_frac fused_alu fused_ragged fused_start_cycles", compiled=True),
    Fit(
        "reduction",
        _REDUCE,
        "dram_frac overlap start_cycles miss_cycles load_cycles load_miss_cycles round_cycles ramp_cycles "
        "ramp_bytes thread_instr load_instr value_instr guard_instr guard_thread_instr index_instr "
        "index_thread_instr index_cycles meet_cycles meet_round_cycles meet_ragged",
    ),
    Fit(
        "ordering",
        "sort",
        "overlap block_cycles block_bit_cycles block_width_frac narrow_frac block_instr narrow_instr_frac "
        "pass_cycles pass_instr histogram_instr segment_element_cycles segment_instr",
    ),
    Fit(
        "ordering",
        "cumsum",
        "scan_cycles scan_look_cycles scan_look_elements scan_frac scan_narrow_cycles scan_narrow_instr "
        "row_cycles row_step_cycles row_level_cycles row_miss_cycles row_instr",
    ),
    Fit(
        "ordering",
        "topk",
        "bitonic_cycles bitonic_instr select_cycles select_step_cycles select_instr digit_instr digit_cycles "
        "take_instr select_scan_cycles",
    ),
    Fit(
        "indexing",
        "embedding:fwd index_select gather_rows",
        "overlap start_cycles miss_cycles block_cycles row_frac l2_frac",
    ),
    Fit("indexing", "index_add", "atomic_start_cycles atomic_instr atomic_narrow_instr"),
    Fit(
        "indexing",
        "embedding_bag:fwd",
        "bag_overlap bag_start_cycles bag_entry_cycles bag_miss_cycles bag_chunk_instr bag_entry_instr bag_stall_instr",
    ),
    Fit(
        "indexing",
        "embedding:bwd embedding_bag:bwd",
        "feature_cycles feature_index_cycles feature_miss_cycles tile_cycles "
        "pass_cycles pass_instr digit_cycles between_cycles segment_instr column_instr value_instr",
    ),
    Fit(
        "multitensor",
        "adamw foreach_add foreach_sqrt foreach_mul_ foreach_addcdiv_",
        "overlap start_cycles step_cycles access_cycles miss_cycles ragged_cycles access_instr ragged_instr root_frac "
        "root_cycles adam_instr adam_cycles adam_frac",
    ),
    Fit(
        "pooling",
        "max_pool2d avg_pool2d upsample2x",
        "start_cycles miss_cycles output_instr window_instr average_frac "
        "last_frac last_start_cycles last_output_cycles last_wide_frac back_instr back_last_frac back_small_frac "
        "back_last_start_cycles resize_instr resize_wide_frac",
    ),
    Fit(
        "recurrent",
        "lstm",
        "product_cycles product_l2_frac cell_cycles cell_element_cycles input_frac input_cycles layer_cycles",
    ),
)


def points_of(one: Fit) -> list[Point]:
    wanted = [(call + ":").split(":")[:2] for call in one.calls.split()]
    found = read([kind for kind, _ in wanted], FILES[2:] if one.compiled else FILES[:2])
    return [p for p in found if any(p.call.kind == kind and phase in ("", p.call.phase) for kind, phase in wanted)]


def check_floors(points: list[Point]) -> None:
    """No measurement may beat the speed of light, no prediction either."""
    for p in points:
        made = family_of(p.call.kind)
        time = made.model(p.call, H200, made.defaults, 0.0)
        if time.floor_s > p.kernel_s or time.busy_s < time.floor_s:
            floor_us, busy_us = time.floor_s * 1e6, time.busy_s * 1e6
            print(f"  floor {floor_us:.2f} us, measured {p.kernel_s * 1e6:.2f}, predicted {busy_us:.2f}: {p.call}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="", help="only this family")
    parser.add_argument("--keep", action="store_true", help="report the defaults, fit nothing")
    parser.add_argument("--half", action="store_true", help="fit on one half, report on the other")
    parser.add_argument("--worst", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the coefficients here")
    options = parser.parse_args()
    fitted: dict[str, dict[str, float]] = {}
    for one in FITS:
        if options.family in ("", one.family):
            points = points_of(one)
            coef = fitted.setdefault(one.family, dict(family_of(points[0].call.kind).defaults))
            known, unseen = halves(points) if options.half else (points, points)
            if not options.keep:
                coef.update(fit(known, coef, one.names.split()))
            print(f"-- {one.family}: {one.calls}")
            report(unseen, coef, options.worst)
            check_floors(points)
    rounded = {name: {key: float(f"{value:.3g}") for key, value in coef.items()} for name, coef in fitted.items()}
    print(json.dumps(rounded, indent=1))
    if options.json:
        options.json.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
