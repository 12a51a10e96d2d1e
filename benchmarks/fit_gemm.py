"""Fit the GEMM coefficients of a recorded device and write them into its calibration.

    python benchmarks/fit_gemm.py [--device h200] [--write]

Reads data/recordings/DEVICE/operators_seed*.jsonl.gz; half of the shapes are fitted, the other half gives the error.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np
from recordings import event_to_busy_s, load_operators, update_calibration
from scipy.optimize import minimize

import ridgeline.cost.gemm as gemm
from ridgeline.cost.chip import Chip, chip_of
from ridgeline.cost.matmul import CTAS_PER_SM, LEGACY, THIN_ROWS, alignment
from ridgeline.hardware import device

EVENT_S = 3e-6
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
    return (*dims, np.array([event_to_busy_s(r) for r in rows]) + EVENT_S)


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
        return gemm.gemm_timing(chip, coef, b=c[0], m=c[1], n=c[2], k=c[3], dtype=dtype).expected_s + EVENT_S

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chip = chip_of(device(options.device))
    older = dataclasses.replace(chip, arch=LEGACY)
    rows = [r for r in load_operators(options.device) if r["kind"] in ("gemm", "bmm") and r["phase"] == "fwd"]
    dense = [r for r in rows if r["kind"] == "gemm"]
    half = [r for r in dense if r["dtype"] in ("bf16", "fp16")]
    coef, report = fit([r for r in half if step_of(r) == 8], chip, "bf16", START, "half aligned")
    for group, steps, tensor_frac in (("align1", (1,), 0.2), ("align2", (2, 4), 0.4)):
        start = {
            **START,
            "tensor_frac": tensor_frac,
            "epilogue_frac": 1.0,
            "kstep_s": 3e-7,
            "gap_s": 5e-7,
            "ramp_s": 1e-5,
            "l2_frac": 0.4,
        }
        found, _ = fit([r for r in half if step_of(r) in steps and r["shape"]["m"] > 1], older, "bf16", start, group)
        coef |= {f"{group}.{k}": v for k, v in found.items()}
    batched = [r for r in rows if r["kind"] == "bmm" and r["dtype"] in ("bf16", "fp16") and step_of(r) < 8]
    start = {
        **START,
        "tensor_frac": 0.25,
        "epilogue_frac": 1.0,
        "kstep_s": 4e-7,
        "gap_s": 2e-7,
        "ramp_s": 1e-5,
        "l2_frac": 0.4,
    }
    small = dataclasses.replace(chip, arch=gemm.SMALL_TILES, num_sms=chip.num_sms * CTAS_PER_SM)
    found, _ = fit(batched, small, "bf16", start, "batched")
    coef |= {f"batched.{k}": v for k, v in found.items()}
    families = {"bf16": {"coef": coef, "heldout": report}, "fp16": {"coef": coef, "heldout": report}}
    for name, where in (("fp8", chip), ("tf32", chip), ("fp32", older), ("int8", chip)):
        mine = [r for r in dense if r["dtype"] == name and (name == "fp32" or step_of(r) == 8)]
        start = {**START, "tensor_frac": 0.8, "power_frac": 0.9} if name == "fp32" else START
        thin = [r for r in mine if name == "fp32" and r["shape"]["m"] <= THIN_ROWS]
        found, report = fit([r for r in mine if r not in thin], where, name, start, name)
        if thin:
            narrow, _ = fit(thin, where, name, start, "fp32 thin")
            found |= {f"thin.{k}": v for k, v in narrow.items()}
        families[name] = {"coef": found, "heldout": report}
    if options.write:
        update_calibration(options.device, families={"gemm": families})


if __name__ == "__main__":
    main()
