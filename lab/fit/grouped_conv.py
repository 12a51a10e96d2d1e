"""Fits convolutions in groups to the H200 recordings: kernels that take any groups, and groups side by side on streams.
Fourier transforms of dense ones too, whose times are sums of terms as well.

    python -m lab.fit.grouped_conv [--direct] [--streams] [--rounds 2]

``--direct`` fits the terms of ``direct_terms`` and its like (``cost/time/conv/conv.py``) to the durations of single
kernels, by least squares without negative coefficients, and prints the error on fifths held out. ``--streams`` nudges
what lies around the groups' kernels until calls meet what was measured; only calls with a time between events or from
the first start to the last end count, because durations of kernels side by side add up to more. Prints what
``cost/time/conv/conv.py`` has.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from lab.fit.recordings import load_operators
from lab.validate.operators import errors
from ridgeline.cost.call import Call
from ridgeline.cost.price import Pricer
from ridgeline.cost.time.chip import chip_of
from ridgeline.cost.time.conv import groups, problem, vector_units
from ridgeline.hardware import device

KERNELS = {"fwd": "conv2d_grouped_direct", "dgrad": "dgrad2d_grouped_direct", "wgrad": "wgrad2d_grouped_direct"}
SHARED = "wgrad2d_shmem"
FOLDS, ROBUST, FEW_TRANSFORMS = 5, 0.03, 100
STREAMS = (
    "stream_issue_cycles stream_start_cycles stream_gap_cycles stream_blocks slice_cycles slice_bytes_per_s "
    "pad_start_cycles turn_cycles turn_element_cycles generic_tile_cycles generic_start_cycles apart_fwd_copy "
    "apart_fwd_analytic apart_fwd_vector apart_fwd_indexed apart_fwd_simt apart_dgrad_copy apart_dgrad_copy_strided "
    "apart_dgrad_scatter apart_dgrad_simt apart_wgrad_copy apart_wgrad_atomic packed_fwd_tma packed_fwd_warp "
    "packed_dgrad_tma packed_dgrad_warp packed_dgrad_warp_strided packed_wgrad_tma packed_wgrad_warp packed_tall"
).split()
STEPS = ((0.8, 1.25, 0.93, 1.075), (0.95, 1.05, 0.985, 1.015))
CAP = 1.5  # relative error beyond which a call no longer pulls
FEW, MANY = 3, 150  # kernels that cannot be a loop over groups, and that the host is no longer ahead of


def conv_of(row: dict[str, Any]) -> problem.Conv:
    return problem.conv_of_call(
        Call(row["kind"], row["dtype"], "fwd", "cudnn", tuple(row["shape"].items())), row["shape"]
    )


def nonnegative(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients that miss least in relative terms; calls that miss by much count less than by their square."""
    from scipy.optimize import nnls

    scale = np.maximum(terms.max(axis=0), 1e-30)
    rows, weight = terms / scale / seconds[:, None], np.ones(len(seconds))
    for _ in range(30):
        found, _ = nnls(rows * weight[:, None], weight)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(rows @ found - 1.0), ROBUST))
    return np.asarray(found / scale)


def fitted(name: str, given: list[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Coefficients by term, and the error of those fitted without a fifth, on that fifth."""
    names = list(given[0][0])
    terms, seconds = np.array([[row[n] for n in names] for row, _ in given]), np.array([s for _, s in given])
    fold, told = np.random.default_rng(0).integers(0, FOLDS, len(given)), np.zeros(len(given))
    for number in range(FOLDS):
        held = fold == number
        told[held] = terms[held] @ nonnegative(terms[~held], seconds[~held])
    off = np.abs(told / seconds - 1.0)
    print(f"{name:20s} n {len(given):4d}  held out {off.mean():.1%}, median {np.median(off):.1%}", flush=True)
    return {f"{name}.{n}": float(f"{v:.3g}") for n, v in zip(names, nonnegative(terms, seconds), strict=True)}


def fit_direct(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for op, kernel in KERNELS.items():
        for last in (False, True):
            given = [
                (groups.direct_terms(made, op), s) for made, s in alone(rows, kernel) if made.channels_last == last
            ]
            found |= fitted(f"direct.{op}.{'last' if last else 'first'}", given)
    found |= fitted("shared.wgrad", [(groups.shared_terms(made), s) for made, s in alone(rows, SHARED)])
    for op in ("fwd", "dgrad"):
        found |= fitted(
            f"fourier.{op}", [(vector_units.fourier_terms(made, op), s) for made, s in transformed(rows, op)]
        )
    return found | fitted("winograd.wgrad", [(vector_units.winograd_terms(made), s) for made, s in tiled(rows)])


def tiled(rows: list[dict[str, Any]]) -> list[tuple[problem.Conv, float]]:
    """Weight gradients of transformed 3 x 3 tiles, and the seconds of their kernels: the last transform and before."""
    found = []
    for row in rows:
        at = [number for number, (name, _) in enumerate(row["kernels"]) if "winogradWgrad" in name]
        if len(at) == 3 and row["shape"]["groups"] == 1 and at[-1] - at[0] == 3:
            found.append((conv_of(row), sum(s for _, s in row["kernels"][at[0] : at[-1] + 1])))
    return found


def transformed(rows: list[dict[str, Any]], op: str) -> list[tuple[problem.Conv, float]]:
    """Dense passes that ran through Fourier transforms, and the seconds of their kernels but for changes of layout."""
    found = []
    for row in rows:
        kernels, names = row["kernels"], "".join(name for name, _ in row["kernels"])
        if row["shape"]["groups"] > 1 or "fft2d" not in names or (row["phase"] == "fwd") != (op == "fwd"):
            continue
        if op == "dgrad":  # comes first; flipped filters are those of a weight gradient
            ends = [at for at, (name, _) in enumerate(kernels) if "c2r" in name]
            if "flip" in names or not ends:
                continue
            kernels = kernels[: ends[-1] + 1]
        if len(kernels) < FEW_TRANSFORMS or op == "dgrad":
            seconds = sum(s for name, s in kernels if "nchwTo" not in name and "nhwcTo" not in name)
            found.append((conv_of(row), seconds))
    return found


def alone(rows: list[dict[str, Any]], kernel: str) -> list[tuple[problem.Conv, float]]:
    """Convolutions in which a kernel of this name ran once, and its seconds."""
    found = []
    for row in rows:
        own = [s for name, s in row["kernels"] if kernel in name]
        if len(own) == 1:
            found.append((conv_of(row), own[0]))
    return found


def trusted(row: dict[str, Any]) -> bool:
    timed = "span_s" in row or (row["phase"] == "fwd" and row.get("cold_s", 0.0) > 0.0)
    few = len(row["kernels"]) <= FEW or (timed and len(row["kernels"]) < MANY)
    return 1 < row["shape"].get("groups", 1) < row["shape"]["c"] and few


def missed(rows: list[dict[str, Any]], pricer: Pricer) -> np.ndarray:
    return np.array([abs(math.exp(e["log"]) - 1.0) for e in errors(rows, pricer)])


def priced(coef: dict[str, float]) -> Pricer:
    pricer = Pricer(device("h200"))
    basis = pricer.calibration.basis
    pricer._coefs = {("conv", dtype, True): (coef, basis) for dtype in ("bf16", "fp16", "tf32", "fp32")}
    return pricer


def fit_streams(rows: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    coef = dict(problem.DEFAULTS)
    least = float(np.minimum(missed(rows, priced(coef)), CAP).mean())
    for number in range(rounds):
        for name in STREAMS:
            for step in STEPS[min(number, 1)]:
                tried = {**coef, name: coef[name] * step}
                found = float(np.minimum(missed(rows, priced(tried)), CAP).mean())
                if found < least - 1e-5:
                    coef, least = tried, found
        print(f"round {number + 1}: {least:.2%}", flush=True)
    return {name: float(f"{coef[name]:.3g}") for name in STREAMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--leave", type=int, default=0, help="a recording's seed, left out and judged")
    options = parser.parse_args()
    assert chip_of(device("h200")).arch == "hopper"
    rows = [row for row in load_operators("h200") if row["kind"] == "conv2d"]
    if options.direct:
        print(fit_direct(rows))
    if options.streams:
        calls = [row for row in rows if trusted(row)]
        print(fit_streams([row for row in calls if row["seed"] != options.leave], options.rounds))


if __name__ == "__main__":
    main()
