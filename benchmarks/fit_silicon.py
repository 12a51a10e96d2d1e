"""Fit the GEMM and attention time models to published kernel timings of six GPUs and write their calibrations.

The tables come from ai-dynamo/aiconfigurator (Apache-2.0) as Parquet files, one folder per device; they are read, never
copied. Every shape is either in the fit or in the held-out set the printed errors are of. Run from the repository root:

    python benchmarks/fit_silicon.py ../shared/silicon [--only h200] [--loo]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from ridgeline.cost import gemm
from ridgeline.cost.chip import Chip, Floats, chip_of
from ridgeline.hardware import device

SOURCE = "ai-dynamo/aiconfigurator kernel timings (Apache-2.0, snapshot 095f58a51c4c), short bursts, clocks free"
FOLDERS = {"h200": "h200_sxm", "h100-sxm": "h100_sxm", "a100-sxm-80gb": "a100_sxm", "b200": "b200_sxm",
           "gb200": "gb200", "l40s": "l40s"}  # fmt: skip
NUM_FIT, NUM_HELD_OUT = 1200, 4000
NUM_WEIGHT_COPIES = 6  # the harness multiplies by six weights in turn, so that a weight is cold unless six fit in L2

Predict = Callable[[Mapping[str, float], pd.DataFrame], Floats]


@dataclass(frozen=True)
class Suite:
    """One coefficient set: which rows it is fitted to, how they are predicted and where the search starts."""

    family: str
    key: str
    rows: pd.DataFrame
    predict: Predict
    start: dict[str, float]
    protocol: tuple[str, ...]  # coefficients that describe the harness, not the kernel
    fixed: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Fit:
    """Fitted coefficients and the errors on shapes the fit has not seen."""

    coef: dict[str, float]
    errors: Floats
    held_out: pd.DataFrame
    seconds: float = 0.0
    figures: dict[str, object] = field(default_factory=dict)


def fit(suite: Suite, *, num_fit: int = NUM_FIT, seed: int = 0) -> Fit:
    """Minimize the log error, robustly, over a random subset; measure on another."""
    began = time.time()
    order = np.random.default_rng(seed).permutation(len(suite.rows))
    train = suite.rows.iloc[order[:num_fit]]
    held = suite.rows.iloc[order[num_fit : num_fit + NUM_HELD_OUT]]
    names = [name for name in suite.start if name not in suite.fixed]
    measured = np.log(train["measured_s"].to_numpy())
    start = np.log([suite.start[name] for name in names])

    def coefficients(x: Floats) -> dict[str, float]:
        return {**suite.start, **dict(zip(names, np.exp(x).tolist(), strict=True))}

    def residuals(x: Floats) -> Floats:
        pull = 0.02 * (x - start)  # keeps a coefficient that no row depends on where it started
        return np.concatenate([np.log(suite.predict(coefficients(x), train)) - measured, pull])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=0.06, diff_step=3e-3, max_nfev=40, x_scale=0.3)
    coef = coefficients(found.x)
    errors = suite.predict(coef, held) / held["measured_s"].to_numpy() - 1
    return Fit(coef, errors, held, time.time() - began, _figures(errors, len(train)))


def _figures(errors: Floats, num_fit: int) -> dict[str, object]:
    q05, q95 = np.quantile(np.log1p(errors), [0.05, 0.95])
    return {
        "n": len(errors), "num_fit": num_fit, "mape": round(float(np.abs(errors).mean()), 4),
        "median_ape": round(float(np.median(np.abs(errors))), 4), "bias": round(float(errors.mean()), 4),
        "log_quantiles": {"q05": round(float(q05), 4), "q95": round(float(q95), 4)},
    }  # fmt: skip


# GEMM

GEMM_DTYPES = {"bfloat16": ("bf16", "cublas"), "fp8": ("fp8", "cutlass"), "nvfp4": ("fp4", "cutlass")}
GEMM_PROTOCOL = {"x_held_frac": 0.75, "w_held_frac": 0.42}
QUANTIZE = {"quantize_launch_s": 2.5e-6, "quantize_row_s": 7e-9, "quantize_block_s": 4e-9}


def _dims(rows: pd.DataFrame, names: str) -> list[Floats]:
    return [rows[name].to_numpy(dtype=np.float64) for name in names.split()]


def loop_warm_frac(chip: Chip, coef: Mapping[str, float], rows: pd.DataFrame, dtype: str) -> Floats:
    """Share of input bytes a timing loop finds in L2: the activations always, a weight only if all copies stay."""
    m, n, k = _dims(rows, "m n k")
    x, w = m * k * gemm.itemsize(dtype), n * k * gemm.itemsize(dtype)
    y = m * n * gemm.itemsize(gemm.out_dtype_of(dtype))
    x_warm = gemm._fall(x + w + y, coef["x_held_frac"] * chip.l2_bytes)
    w_warm = gemm._fall(x + NUM_WEIGHT_COPIES * w + y, coef["w_held_frac"] * chip.l2_bytes)
    return (x * x_warm + w * w_warm) / (x + w)


def _quantize_s(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats | float:
    """The per-token quantization that scaled products run first: a block of threads a row, 2048 elements a turn."""
    if "quantize_launch_s" not in coef:
        return 0.0
    m, k = _dims(rows, "m k")
    turns = np.ceil(k / 2048)
    return coef["quantize_launch_s"] + m * (coef["quantize_row_s"] + coef["quantize_block_s"] * (turns - 1))


def gemm_suites(name: str, folder: Path, chip: Chip) -> list[Suite]:
    table = pd.read_parquet(folder / "gemm.parquet")
    return [_gemm_suite(chip, table, kind) for kind in GEMM_DTYPES if (table.gemm_dtype == kind).any()]


def _gemm_suite(chip: Chip, table: pd.DataFrame, kind: str) -> Suite:
    dtype, library = GEMM_DTYPES[kind]
    rows = table[table.gemm_dtype == kind].assign(measured_s=lambda t: t.latency_ms * 1e-3)
    extra = {} if library == "cublas" else QUANTIZE
    protocol = {**GEMM_PROTOCOL, **extra}
    kernel = {k: v for k, v in gemm.defaults(chip.arch, dtype).items() if k != "unaligned_frac"}

    def predict(coef: Mapping[str, float], rows: pd.DataFrame) -> Floats:
        m, n, k = _dims(rows, "m n k")
        warm = loop_warm_frac(chip, coef, rows, dtype)
        times = gemm.gemm_timing(chip, coef, m=m, n=n, k=k, dtype=dtype, warm_frac=warm, library=library)
        return times.expected_s + _quantize_s(coef, rows)

    rows = _possible(rows, chip, dtype)
    fixed = ("splitk_s",) if library == "cutlass" else ()
    return Suite("gemm", dtype, rows, predict, {**kernel, **protocol}, tuple(protocol), fixed, library)


def _possible(rows: pd.DataFrame, chip: Chip, dtype: str) -> pd.DataFrame:
    """Rows that do not beat the datasheet: tensor peak, and DRAM for what cannot be in L2."""
    m, n, k = _dims(rows, "m n k")
    moved = np.maximum((m + n) * k * gemm.itemsize(dtype) + m * n * 2 - chip.l2_bytes, 0)
    floor_s = np.maximum(2 * m * n * k / chip.peak_flops_per_s(dtype), moved / chip.dram_bytes_per_s)
    kept = rows[rows.measured_s.to_numpy() >= floor_s]
    if len(kept) < len(rows):
        print(f"  {chip.name} {dtype}: dropped {len(rows) - len(kept)} of {len(rows)} rows that beat the datasheet")
    return kept.reset_index(drop=True)


def report(name: str, suite: Suite, found: Fit) -> None:
    f = found.figures
    print(f"{name:14} {suite.family:9} {suite.key:14} n={f['n']:5} MAPE {100 * f['mape']:5.2f} %"
          f"  median {100 * f['median_ape']:5.2f} %  bias {100 * f['bias']:+5.2f} %  {found.seconds:4.0f} s", flush=True)  # fmt: skip


def write(path: Path, name: str, fits: list[tuple[Suite, Fit]]) -> None:
    """The calibration file of a device: coefficients by family and key, with their held-out errors."""
    families: dict[str, dict[str, object]] = {}
    for suite, found in fits:
        kernel = {k: float(f"{v:.4g}") for k, v in found.coef.items() if k not in suite.protocol}
        protocol = {k: float(f"{found.coef[k]:.4g}") for k in suite.protocol}
        families.setdefault(suite.family, {})[suite.key] = {
            "library": suite.note, "coef": kernel, "protocol": protocol, "heldout": found.figures,
        }  # fmt: skip
    content = {"device": name, "families": families, "basis": "fitted", "source": SOURCE}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--family", default="")
    parser.add_argument("--out", type=Path, default=Path("data/calibrations"))
    options = parser.parse_args()
    for name, folder in FOLDERS.items():
        if options.only and name not in options.only.split(","):
            continue
        chip = chip_of(device(name))
        fits = []
        for suite in gemm_suites(name, options.tables / folder, chip):
            found = fit(suite)
            report(name, suite, found)
            fits.append((suite, found))
        options.out.mkdir(parents=True, exist_ok=True)
        write(options.out / f"{name}.json", name, fits)


if __name__ == "__main__":
    main()
