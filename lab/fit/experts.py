"""Fit the model of fused experts to kernel tables that serving frameworks measured, and print the held-out errors.

    python -m lab.fit.experts ../shared/silicon

The tables (ai-dynamo/aiconfigurator, Apache-2.0) are read, never copied. Two thirds of the rows with balanced loads are
fitted, the rest are held out; the sets go by hand into sim/serving/experts.py, one an architecture and format.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from ridgeline.cost.time.chip import Chip, Floats, chip_of
from ridgeline.hardware import device
from ridgeline.sim.serving.experts import Grouped, experts_s

FOLDERS = {"h200": "h200_sxm", "h100-sxm": "h100_sxm", "a100-sxm-80gb": "a100_sxm", "b200": "b200_sxm",
           "gb200": "gb200", "l40s": "l40s"}  # fmt: skip
FORMATS = {"bfloat16": (2.0, "bf16"), "fp8": (1.0, "fp8"), "fp8_block": (1.0, "fp8"), "int4_wo": (0.53, "bf16"),
           "w4a16_mxfp4": (0.53, "bf16"), "w4a8_mxfp4_mxfp8": (0.53, "fp8"), "nvfp4": (0.5625, "fp4")}  # fmt: skip
START = {"launch_s": 2e-5, "dram_frac": 0.7, "tensor_frac": 0.5, "move_frac": 0.5, "fill": 0.1, "blend": 2.0,
         "expert_s": 1e-8}  # fmt: skip
LOW, HIGH = (3e-6, 0.3, 0.05, 0.1, 0.005, 1.0, 1e-10), (2e-4, 0.98, 0.9, 2, 5, 4, 2e-6)
LEAST_ROWS, MOST_ROWS = 150, 2500


def fit(chip: Chip, rows: pd.DataFrame, weight_bytes: float, dtype: str) -> tuple[dict[str, float], Floats]:
    """Coefficients of the better of two largest tiles, and the errors on the third that was held out."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size", "moe_tp_size")
    tokens, hidden, ffn, top, num, ep, tp = (rows[name].to_numpy(float) for name in names)
    measured_s = rows.latency_ms.to_numpy() * 1e-3
    shape = Grouped(hidden, ffn / tp, num / ep, top / ep, 3)
    fitted, start = np.arange(len(rows)) % 3 != 0, np.log(list(START.values()))

    def errors(x: Floats, tile: float) -> Floats:
        coef = {**dict(zip(START, np.exp(x), strict=True)), "tile": tile}
        peak = chip.peak_flops_per_s(dtype)
        return np.log(experts_s(chip, coef, shape, tokens, weight_bytes, peak, even=True) / measured_s)

    best: tuple[float, dict[str, float], Floats] | None = None
    for tile in (64.0, 128.0):
        found = least_squares(
            lambda x, tile=tile: np.concatenate([errors(x, tile)[fitted], 0.02 * (x - start)]), start,
            bounds=(np.log(LOW), np.log(HIGH)), loss="soft_l1", f_scale=0.1, max_nfev=60,
        )  # fmt: skip
        missed = np.abs(np.expm1(errors(found.x, tile)))
        if best is None or missed[fitted].mean() < best[0]:
            coef = {name: float(f"{v:.3g}") for name, v in zip(START, np.exp(found.x), strict=True)}
            best = (missed[fitted].mean(), {**coef, "tile": tile}, missed[~fitted])
    assert best is not None
    return best[1], best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path)
    options = parser.parse_args()
    for name, folder in FOLDERS.items():
        chip, table = chip_of(device(name)), pd.read_parquet(options.tables / folder / "moe.parquet")
        table = table[(table.distribution == "balanced") & (table.num_tokens * table.topk >= table.moe_ep_size)]
        for (kind, kernel), rows in table[table.moe_dtype.isin(FORMATS)].groupby(["moe_dtype", "kernel_source"]):
            if len(rows) < LEAST_ROWS:
                continue
            rows = rows.sample(min(len(rows), MOST_ROWS), random_state=0)
            coef, missed = fit(chip, rows, *FORMATS[kind])
            print(f"{name} {kind} {kernel[-44:]}: {len(rows)} rows, held out mean {missed.mean():.1%} median "
                  f"{np.median(missed):.1%} {coef}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
