"""Fit the GEMM coefficients of a recorded device and write them into its calibration.

    python -m lab.fit.gemm [--device h200] [--classic] [--write]

Reads data/recordings/DEVICE/operators_seed*.jsonl.gz; half of the shapes are fitted, the other half gives the error.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy.optimize import least_squares, minimize

import ridgeline.cost.time.gemm.tiles as gemm
from lab.fit.recordings import event_to_busy_s, load_operators, update_calibration
from ridgeline.cost import host
from ridgeline.cost.calibration import calibration_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm.calls import alignment, group_of
from ridgeline.cost.time.gemm.simt import START as CLASSIC
from ridgeline.cost.time.gemm.simt import VECTOR_COEFFICIENTS, classic_timing, vector_timing
from ridgeline.hardware import device

EVENT_S, GAP_S = host.DEFAULTS["event_s"], host.DEFAULTS["event_gap_s"]
START = {
    "launch_s": 2.6e-6, "fanout_s": 4.2e-7, "gap_s": 1.7e-7,
    "tensor_frac": 0.867, "l2_frac": 1.0, "dram_frac": 0.841, "kstep_s": 6.4e-8,
    "kstep_cold_s": 3e-8, "epilogue_frac": 0.52, "splitk_s": 2e-6,
    "exposed_frac": 0.233, "power_frac": 1.315, "power_tau_s": 2.25e-4,
    "writeback_frac": 0.0755, "ramp_s": 6.5e-6, "ramp_bytes": 4.6e7,
}  # fmt: skip


def step_of(row: dict) -> int:
    s = row["shape"]
    return alignment((s.get("b", 1), s["m"], s["n"], s["k"], s.get("layout", "nt")), row["dtype"])


def columns(rows: list[dict]) -> tuple[np.ndarray, ...]:
    dims = [np.array([r["shape"].get(k, 1) for r in rows], float) for k in ("b", "m", "n", "k")]
    gaps = np.array([GAP_S * (len(r["kernels"]) - 1) for r in rows])
    return (*dims, np.array([event_to_busy_s(r) for r in rows]) + EVENT_S + gaps)


def fit(
    rows: list[dict], chip: Chip, dtype: str, start: dict[str, float], label: str, rounds: int = 3
) -> tuple[dict[str, float], dict]:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(rows))
    half = len(rows) // 2
    train, test = [rows[i] for i in order[:half]][:700], [rows[i] for i in order[half:]]
    names = list(start)
    x0 = np.log([start[k] for k in names])
    fitted, held = columns(train), columns(test)

    def seconds(x: np.ndarray, c: tuple[np.ndarray, ...]) -> np.ndarray:
        coef = {**dict(zip(names, np.exp(x), strict=True)), "unaligned_frac": 1.0}
        times = gemm.gemm_timing(chip, coef, b=c[0], m=c[1], n=c[2], k=c[3], dtype=dtype)
        return times.expected_s + EVENT_S + GAP_S * (times.num_kernels - 1)

    def loss(x: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(seconds(x, fitted) / fitted[4]))) + 1e-3 * np.mean((x - x0) ** 2))

    x, began = x0, time.time()
    for _ in range(rounds):
        x = minimize(loss, x, method="Powell", options={"maxiter": 2, "ftol": 1e-3}).x
    ratio = seconds(x, held) / held[4]
    logs = np.log(ratio)
    report = {
        "n": len(test),
        "mape": float(np.mean(np.abs(ratio - 1))),
        "median_ape": float(np.median(np.abs(ratio - 1))),
        "bias": float(np.mean(ratio - 1)),
        "log_quantiles": {"q05": float(np.quantile(logs, 0.05)), "q95": float(np.quantile(logs, 0.95))},
    }
    print(
        f"{label:14s} n {report['n']:4d}  MAPE {report['mape']:.1%}  median {report['median_ape']:.1%}  "
        f"bias {report['bias']:+.1%}  ({time.time() - began:.0f} s)",
        flush=True,
    )
    return {k: float(f"{v:.4g}") for k, v in zip(names, np.exp(x), strict=True)}, report


# Kernels of older generations

MATRIX = {"eff_frac": 0.4, "half_area": 3000.0, "start_s": 1e-6, "depth_s": 5e-9, "dram_frac": 0.84}


def classic_seconds(rows: list[dict], chip: Chip, dtype: str, coef: dict[str, float], vector: bool) -> np.ndarray:
    b, m, n, k = columns(rows)[:4]
    if vector:
        return vector_timing(chip, coef, n=np.maximum(m, n), k=k, dtype=dtype).expected_s + EVENT_S
    times = classic_timing(chip, coef, b=b, m=m, n=n, k=k, dtype=dtype)
    return times.expected_s + EVENT_S + GAP_S * (times.num_kernels - 1)


def fit_classic(rows: list[dict], chip: Chip, dtype: str, label: str) -> dict[str, float]:
    """Coefficients fitted on all rows; the error printed is of a fit on one half, on the other."""
    vector = label.endswith("vector")
    usual = CLASSIC if dtype == "fp32" else {**CLASSIC, **MATRIX}
    start = {k: v for k, v in usual.items() if k in VECTOR_COEFFICIENTS or not vector}
    names, first = list(start), np.log(list(start.values()))

    def solved(train: list[dict]) -> dict[str, float]:
        measured = columns(train)[4]

        def residuals(x: np.ndarray) -> np.ndarray:
            coef = dict(zip(names, np.exp(x).tolist(), strict=True))
            logs = np.log(classic_seconds(train, chip, dtype, coef, vector) / measured)
            return np.concatenate([logs, 0.02 * (x - first)])  # what no row depends on stays where it started

        found = least_squares(residuals, first, loss="soft_l1", f_scale=0.08, diff_step=1e-2, max_nfev=60, x_scale=0.3)
        return dict(zip(names, np.exp(found.x).tolist(), strict=True))

    order = np.random.default_rng(0).permutation(len(rows))
    half = [rows[i] for i in order[: len(rows) // 2]]
    held = [rows[i] for i in order[len(rows) // 2 :]]
    ratio = classic_seconds(held, chip, dtype, solved(half), vector) / columns(held)[4]
    off = np.abs(ratio - 1)
    figures = f"MAPE {off.mean():.1%}  median {np.median(off):.1%}  bias {ratio.mean() - 1:+.1%}"
    print(f"{label:14s} n {len(held):4d}  {figures}")
    return {k: float(f"{v:.4g}") for k, v in solved(rows).items()}


def classic_groups(rows: list[dict], chip: Chip, dtypes: tuple[str, ...]) -> dict[str, float]:
    """Prefixed coefficients of every group of older kernels that products of these element types meet."""
    found: dict[str, float] = {}
    groups: dict[str, list[dict]] = {}
    for row in rows:
        s = row["shape"]
        problem = (s.get("b", 1), s["m"], s["n"], s["k"], s.get("layout", "nt"))
        name = group_of(problem, row["dtype"])
        alike = name == "vector" and {row["dtype"], dtypes[0]} <= {"fp32", "tf32"}  # the same kernels run both
        if name and (row["dtype"] in dtypes or alike):
            groups.setdefault(name, []).append(row)
    for name, mine in sorted(groups.items()):
        if len(mine) >= 16:
            coef = fit_classic(mine, chip, dtypes[0], f"{dtypes[0]} {name}")
            found |= {f"{name}.{k}": v for k, v in coef.items()}
    return found


def newest(rows: list[dict], chip: Chip, dtypes: tuple[str, ...]) -> tuple[dict[str, float], dict]:
    mine = [r for r in rows if r["kind"] == "gemm" and r["dtype"] in dtypes and step_of(r) == 8]
    return fit(mine, chip, dtypes[0], START, dtypes[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--classic", action="store_true", help="fit the kernels of older generations alone (seconds)")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chip = chip_of(device(options.device))
    rows = [r for r in load_operators(options.device) if r["kind"] in ("gemm", "bmm") and r["phase"] == "fwd"]
    known = calibration_of(device(options.device)).families.get("gemm", {})
    families = {}
    for dtypes in (("bf16", "fp16"), ("tf32",), ("fp32",), ("fp8",), ("int8",)):
        if options.classic or dtypes[0] == "fp32":
            entry = known.get(dtypes[0], {"coef": {}})
            coef, report = {k: v for k, v in entry["coef"].items() if "." not in k}, entry.get("heldout", {})
        else:
            coef, report = newest(rows, chip, dtypes)
        coef |= classic_groups(rows, chip, dtypes) if dtypes[0] in ("bf16", "tf32", "fp32") else {}
        families |= {dtype: {"coef": coef, "heldout": report} for dtype in dtypes}
    if options.write:
        update_calibration(options.device, families={"gemm": families})


if __name__ == "__main__":
    main()
