"""Fit the attention coefficients of a recorded device, by group of kernels, and write them into its calibration.

    python -m lab.fit.attention [--device h200] [--write] [--verbose]

Errors are those of cross-validation, every point predicted by a fit that did not see it; the coefficients written are
fitted to all points.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import numpy as np
from scipy.optimize import minimize

from lab.fit.recordings import DATA, event_to_busy_s, load_operators, update_calibration
from ridgeline.cost.time.attention.calls import BASE, GROUPS, SHARED, plan_of, plan_s
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.hardware import device

EVENT_S = 3e-6
ROUNDS = 6
PRIOR = 1e-3  # pull of a coefficient's logarithm towards its start, so that what no point tells stays put
MOST = {
    "dram_frac": 0.95,
    "pass_frac": 0.95,
    "strided_frac": 0.95,
    "alone_frac": 1.0,
    "tail_frac": 1.0,
}  # what is possible
Row = dict[str, Any]


class Target:
    """Rows of one group of kernels with what was measured of them."""

    def __init__(self, rows: list[Row], chip: Chip) -> None:
        self.rows, self.chip, self.peak = rows, chip, chip.peak_flops_per_s("bf16")
        self.measured_s = np.array([event_to_busy_s(r) for r in rows]) + EVENT_S

    def ratios(self, coef: dict[str, float]) -> np.ndarray:
        busy_s = [plan_s(self.chip, coef, r["plan"], self.peak)[0] for r in self.rows]
        return (np.array(busy_s) + EVENT_S) / self.measured_s


def fitted(target: Target, group: str) -> dict[str, float]:
    """Coefficients of the group with the least mean |log ratio|."""
    names = [*SHARED, *GROUPS[group]]
    start = np.log([BASE[name] for name in names])

    def coef(x: np.ndarray) -> dict[str, float]:
        found = zip(names, np.exp(x).tolist(), strict=True)
        return BASE | {name: min(value, MOST.get(name, value)) for name, value in found}

    def loss(x: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(target.ratios(coef(x))))) + PRIOR * np.mean((x - start) ** 2))

    x = start
    for _ in range(ROUNDS):
        x = minimize(loss, x, method="Powell", options={"maxiter": 2, "ftol": 1e-3}).x
    return {name: coef(x)[name] for name in names}


def report(ratio: np.ndarray) -> dict[str, Any]:
    logs, missed = np.log(ratio), np.abs(ratio - 1)
    return {
        "n": len(ratio), "mape": float(missed.mean()), "median_ape": float(np.median(missed)),
        "bias": float(np.mean(ratio - 1)),
        "log_quantiles": {"q05": float(np.quantile(logs, 0.05)), "q95": float(np.quantile(logs, 0.95))},
    }  # fmt: skip


def features(row: Row, seconds: float) -> list[tuple[str, object]]:
    s = row["shape"]
    return [
        ("d", s["d"]), ("causal", s["causal"]), ("ragged", s["s"] % 128 > 0), ("grouped", s["h"] != s["hkv"]),
        ("cross", s["s"] != s["skv"]), ("log10 s", round(2 * np.log10(seconds)) / 2),
    ]  # fmt: skip


def tell(target: Target, ratio: np.ndarray) -> None:
    """Error by feature, and the worst points."""
    by: dict[tuple[str, object], list[float]] = defaultdict(list)
    for row, found, seconds in zip(target.rows, ratio, target.measured_s, strict=True):
        for feature in features(row, seconds):
            by[feature].append(found)
    for (name, value), found in sorted(by.items(), key=str):
        missed = np.mean(np.abs(np.array(found) - 1))
        print(f"    {name:8s} {value!s:6s} n {len(found):4d}  MAPE {missed:.1%}  median {np.median(found) - 1:+.1%}")
    for i in np.argsort(-np.abs(np.log(ratio)))[:8]:
        print(f"    {ratio[i]:.2f} x {target.measured_s[i] * 1e6:.1f} us  {target.rows[i]['shape']}")


def heldout(rows: list[Row], chip: Chip, group: str, folds: int, verbose: bool) -> np.ndarray:
    """Ratios of predicted to measured, each point's by a fit that did not see its fold."""
    began = time.time()
    fold = np.random.default_rng(0).permutation(len(rows)) % folds
    ratio = np.empty(len(rows))
    for k in range(folds):
        coef = fitted(Target([r for r, f in zip(rows, fold, strict=True) if f != k], chip), group)
        ratio[fold == k] = Target([r for r, f in zip(rows, fold, strict=True) if f == k], chip).ratios(BASE | coef)
    found = report(ratio)
    errors = f"MAPE {found['mape']:.1%}  median {found['median_ape']:.1%}  bias {found['bias']:+.1%}"
    print(f"{group:14s} n {found['n']:4d}  {errors}  ({time.time() - began:.0f} s)", flush=True)
    if verbose:
        tell(Target(rows, chip), ratio)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--only", default="", help="one group of kernels")
    options = parser.parse_args()
    chip = chip_of(device(options.device))
    rows = [r for r in load_operators(options.device) if r["kind"] == "attention"]
    for row in rows:
        row["plan"] = plan_of(row["shape"], row["library"], row["phase"], chip.num_sms)
    missed = [row for row in rows if len(row["kernels"]) != row["plan"].num_kernels]
    print(f"{len(rows)} points, {len(missed)} with another number of kernels than planned")
    coef: dict[str, float] = {}
    reports, everything = {}, []
    for group in GROUPS:
        mine = [r for r in rows if r["plan"].group == group]
        if len(mine) < 10 or options.only not in ("", group):
            continue
        ratio = heldout(mine, chip, group, options.folds, options.verbose)
        everything.append(ratio)
        reports[group] = report(ratio)
        if options.write or options.verbose:
            coef |= {f"{group}.{k}": float(f"{v:.4g}") for k, v in fitted(Target(mine, chip), group).items()}
    print("all", {k: v for k, v in report(np.concatenate(everything)).items() if k != "log_quantiles"})
    if options.verbose:
        print(coef)
    if options.write and not options.only:
        path = DATA / "calibrations" / f"{options.device}.json"
        kept = json.loads(path.read_text()).get("families", {}).get("attention", {}) if path.is_file() else {}
        fits = {**kept, "all": {"coef": coef, "heldout": reports}}
        update_calibration(options.device, families={"attention": fits})


if __name__ == "__main__":
    main()
