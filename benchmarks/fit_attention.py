"""Fit the attention coefficients of a recorded device, by library and phase, and write them into its calibration.

    python benchmarks/fit_attention.py [--device h200] [--write]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from recordings import event_to_busy_s, load_operators, update_calibration
from scipy.optimize import minimize

from ridgeline.cost import attention
from ridgeline.cost.attention_calls import DECODE_ROWS, priced
from ridgeline.cost.chip import Chip, chip_of
from ridgeline.hardware import device

EVENT_S = 3e-6


def columns(rows: list[dict]) -> dict[str, np.ndarray]:
    made = {k: np.array([r["shape"].get(k, 0) for r in rows], float) for k in ("b", "h", "hkv", "s", "skv", "d", "causal", "mask")}
    made["target"] = np.array([event_to_busy_s(r) for r in rows]) + EVENT_S
    return made


def fit(rows: list[dict], chip: Chip, library: str, phase: str, label: str, rounds: int = 3, verbose: bool = False) -> tuple[dict[str, float], dict]:
    order = np.random.default_rng(0).permutation(len(rows))
    half = len(rows) // 2
    train, test = columns([rows[i] for i in order[:half]]), columns([rows[i] for i in order[half:]])
    start = {**attention.defaults(chip.arch, library, phase), "side_frac": 0.7, "ragged": 0.1}
    names = list(start)
    x0 = np.log([max(start[k], 1e-9) for k in names])

    def seconds(x: np.ndarray, c: dict[str, np.ndarray]) -> np.ndarray:
        return priced(chip, dict(zip(names, np.exp(x), strict=True)), c, phase, library, "bf16")[1] + EVENT_S

    def loss(x: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(seconds(x, train) / train["target"]))) + 1e-3 * np.mean((x - x0) ** 2))

    x, began = x0, time.time()
    for _ in range(rounds):
        x = minimize(loss, x, method="Powell", options={"maxiter": 2, "ftol": 1e-3}).x
    ratio = seconds(x, test) / test["target"]
    logs = np.log(ratio)
    report = {"n": len(ratio), "mape": float(np.mean(np.abs(ratio - 1))), "median_ape": float(np.median(np.abs(ratio - 1))), "bias": float(np.mean(ratio - 1)),
              "log_quantiles": {"q05": float(np.quantile(logs, 0.05)), "q95": float(np.quantile(logs, 0.95))}}
    print(f"{label:16s} n {report['n']:4d}  MAPE {report['mape']:.1%}  median {report['median_ape']:.1%}  bias {report['bias']:+.1%}  ({time.time() - began:.0f} s)", flush=True)
    if verbose:
        for name in ("b", "h", "s", "skv", "d", "causal", "target"):
            edges = np.quantile(test[name], [0, 0.25, 0.5, 0.75, 1.0])
            print("   ", name, [(f"{a:.3g}", f"{np.mean(np.abs(ratio - 1)[(test[name] >= a) & (test[name] <= b)]):.3f}", f"{np.mean((ratio - 1)[(test[name] >= a) & (test[name] <= b)]):+.3f}")
                                for a, b in zip(edges, edges[1:], strict=False)])
        for i in np.argsort(-np.abs(logs))[:8]:
            print("   ", {k: int(test[k][i]) for k in ("b", "h", "hkv", "s", "skv", "d", "causal")}, f"{ratio[i] * test['target'][i] * 1e6:.1f} for {test['target'][i] * 1e6:.1f} us")
        print("   ", {k: float(f"{v:.3g}") for k, v in zip(names, np.exp(x), strict=True)})
    return {k: float(f"{v:.4g}") for k, v in zip(names, np.exp(x), strict=True)}, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    chip = chip_of(device(options.device))
    rows = [r for r in load_operators(options.device) if r["kind"] == "attention"]
    coef: dict[str, float] = {}
    reports = {}
    for library in ("fa2", "cudnn", "efficient"):
        for phase in ("fwd", "bwd"):
            mine = [r for r in rows if r["library"] == library and r["phase"] == phase and r["shape"]["s"] > DECODE_ROWS]
            found, reports[f"{library}_{phase}"] = fit(mine, chip, library, phase, f"{library} {phase}", verbose=options.verbose)
            coef |= {f"{library}_{phase}.{k}": v for k, v in found.items()}
    decode = [r for r in rows if r["shape"]["s"] <= DECODE_ROWS]
    found, reports["fa2_decode"] = fit(decode, chip, "fa2", "fwd", "fa2 decode", verbose=options.verbose)
    for library in ("fa2", "cudnn"):
        coef |= {f"{library}_decode.{k}": v for k, v in found.items()}
    if options.write:
        update_calibration(options.device, families={"attention": {"all": {"coef": coef, "heldout": reports}}})


if __name__ == "__main__":
    main()
