"""Fit what each software generation reaches on each device, from published training runs, and check by leaving out.

    python benchmarks/fit_training.py [--shared FOLDER] [--write] [--only STACK,…] [--left-out]

One set of coefficients a device and generation, none a row or a model. Priors pull every coefficient toward the cost
model (1.0), so that a generation with three rows stays near physics. ``--left-out`` leaves each configuration and each
source out in turn and reports the error on what was left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from ridgeline.basis import Basis
from ridgeline.resources import data_dir
from ridgeline.sim.generation import NEUTRAL, Stack
from ridgeline.sim.published import training_llm as published
from ridgeline.sim.published.verdict import Row
from ridgeline.sim.step import Prices, simulate_step

# name, prior's standard deviation in log space (multipliers) or its scale (seconds and shares, never negative)
MULTIPLIERS = {"matrix": 0.15, "fp8": 0.25, "fp4": 0.25, "grouped": 0.35, "attention": 0.35, "memory": 0.35,
               "up": 0.25, "out": 0.25}  # fmt: skip
AMOUNTS = {"layer_s": 5e-5, "micro_s": 2e-3, "step_s": 2e-2, "straggle": 0.004, "route_s": 2e-4,
           "expert_s": 1e-4}  # fmt: skip
NAMES = (*MULTIPLIERS, *AMOUNTS)
ROW_SPREAD = 0.05
TITLES = {
    "llm-foundry": ("llm-foundry and Composer with FSDP, 2023", 2023, "eager"),
    "neusight": ("PyTorch 2.1 eager, Hugging Face models", 2023, "eager"),
    "megatron-2021": ("Megatron-LM 2020 and 2021, unfused attention", 2021, "compiled"),
    "megatron-2022": ("Megatron-LM 2022, sequence parallelism and selective recomputation", 2022, "compiled"),
    "maxtext": ("MaxText on GPUs, 2024", 2024, "compiled"),
    "megascale": ("MegaScale 2024", 2024, "compiled"),
    "megatron-2023": ("Megatron-LM 2023", 2023, "compiled"),
    "megatron-core-2024": ("Megatron-Core 0.8 and NeMo 24.x", 2024, "compiled"),
    "megatron-bridge-2025": ("NeMo 25.x and Megatron-Bridge 25.x", 2025, "compiled"),
    "megatron-bridge": ("Megatron-Bridge 26.02 to 26.04", 2026, "compiled"),
    "megatron-bridge-2026b": ("Megatron-Bridge 26.06 and later", 2027, "compiled"),
    "mlperf-2023": ("NVIDIA's MLPerf 3.0", 2023, "compiled"),
    "mlperf-2024": ("NVIDIA's MLPerf 3.1 to 4.1", 2024, "compiled"),
    "mlperf-2025": ("NVIDIA's MLPerf 5.x", 2025, "compiled"),
}


BRIDGES = ("megatron-bridge-2025", "megatron-bridge", "megatron-bridge-2026b")
CHOICES = (
    ("attention", "cudnn", (*BRIDGES, "mlperf-2023", "mlperf-2024", "mlperf-2025")),
    ("attention", "fa2", ("llm-foundry", "megatron-core-2024", "megascale", "megatron-2023", "maxtext")),
    ("dispatch", "hybrid", BRIDGES),
)
SPECIAL = ("mlperf-2023", "mlperf-2024", "mlperf-2025", "neusight", "maxtext")
"""Tuned for one benchmark, or seen too little: used when asked for, never by default."""


class Data:
    """Rows with their cases, and one memory of prices for all fits."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            rows = [Row(i + 2, {k.lower(): v for k, v in r.items()}) for i, r in enumerate(csv.DictReader(file))]
        self.prices = Prices(max_kept=4096)
        self.cases = [(row, case, published.measured_s(row, case)) for row, case in published.cases(rows)]

    def predict(self, at: int, coef: dict[str, float]) -> float:
        row, case, _ = self.cases[at]
        stack = Stack(name=case.stack, title="", device=case.cluster.device.name, basis=Basis.FITTED, source="",
                      coef={**NEUTRAL, **coef})  # fmt: skip
        step = simulate_step(published.graph_of(case), case.plan, case.cluster, stack, prices=self.prices)
        return step.step_s - (step.parts["optimizer"] if "optimizer step" in row.text("unit") else 0.0)

    def residual(self, at: int, coef: dict[str, float]) -> float:
        return math.log(self.predict(at, coef) / self.cases[at][2])

    def device(self, at: int) -> str:
        device = self.cases[at][1].cluster.device
        return device.parent or device.name


def unpack(x: np.ndarray) -> dict[str, float]:
    found = {name: math.exp(x[i]) for i, name in enumerate(MULTIPLIERS)}
    shift = len(MULTIPLIERS)
    return found | {name: max(0.0, x[shift + i]) * scale for i, (name, scale) in enumerate(AMOUNTS.items())}


def fit(data: Data, members: list[int], center: np.ndarray, tight: float = 1.0, nfev: int = 7) -> np.ndarray:
    """Coefficients of one group of rows; ``center`` is where the priors pull."""
    if not members:
        return center
    scales = np.array([*MULTIPLIERS.values(), *[1.0] * len(AMOUNTS)]) * tight

    def residuals(x: np.ndarray) -> np.ndarray:
        coef = unpack(x)
        rows = [data.residual(at, coef) / ROW_SPREAD for at in members]
        return np.array([*np.arctan(np.array(rows) / 4.0) * 4.0, *((x - center) / scales)])

    low = np.array([-0.9] * len(MULTIPLIERS) + [0.0] * len(AMOUNTS))
    high = np.array([1.3] * len(MULTIPLIERS) + [60.0] * len(AMOUNTS))
    start = np.clip(center, low + 1e-6, high - 1e-6)
    return least_squares(residuals, start, bounds=(low, high), max_nfev=nfev, diff_step=0.02).x


def groups(data: Data) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, (_, case, _) in enumerate(data.cases):
        found[case.stack][data.device(at)].append(at)
    return found


NOTHING = np.array([0.0] * len(MULTIPLIERS) + [0.05] * (len(AMOUNTS) - 1) + [0.3])


def fit_stack(data: Data, devices: dict[str, list[int]], left_out: frozenset[int] = frozenset(),
              nfev: int = 7) -> dict[str, np.ndarray]:  # fmt: skip
    """A generation: first all its devices together, then each on its own, pulled toward the common fit."""
    kept = {d: [at for at in members if at not in left_out] for d, members in devices.items()}
    everyone = [at for members in kept.values() for at in members]
    common = fit(data, everyone, NOTHING, nfev=nfev)
    if len([d for d in kept if kept[d]]) == 1:
        return dict.fromkeys(devices, common)
    return {d: fit(data, members, common, 0.7, nfev) if members else common for d, members in kept.items()}


def score(errors: list[float]) -> str:
    apes = [abs(e) for e in errors]
    mean, median, bias = (100 * f for f in (statistics.fmean(apes), statistics.median(apes), statistics.fmean(errors)))
    return f"n {len(errors):3d}  mean {mean:5.1f} %  median {median:5.1f} %  bias {bias:+5.1f} %"


def error(data: Data, at: int, x: np.ndarray) -> float:
    return math.exp(data.residual(at, unpack(x))) - 1.0


class Linear:
    """A generation's rows linearized around its fit, so that leaving rows out costs a small solve, not simulations.

    Unknowns are one vector common to the devices and one for each device, tied by the same priors as the fit itself.
    """

    def __init__(self, data: Data, devices: dict[str, list[int]], found: dict[str, np.ndarray]) -> None:
        self.order = list(devices)
        self.rows = [(at, self.order.index(d)) for d, members in devices.items() for at in members]
        self.size = len(NAMES)
        self.at = np.array([found[d] for d in self.order])
        self.residuals, self.slopes = np.zeros(len(self.rows)), np.zeros((len(self.rows), self.size))
        for i, (at, k) in enumerate(self.rows):
            self.residuals[i] = data.residual(at, unpack(self.at[k]))
            for j in range(self.size):
                moved = self.at[k].copy()
                moved[j] += 0.03 if j < len(MULTIPLIERS) else 0.3
                self.slopes[i, j] = (data.residual(at, unpack(moved)) - self.residuals[i]) / (moved[j] - self.at[k][j])

    def solved(self, kept: np.ndarray) -> np.ndarray:
        """Coefficients of each device from the kept rows alone."""
        num = len(self.order)
        scales = np.array([*MULTIPLIERS.values(), *[1.0] * len(AMOUNTS)])
        x = np.concatenate([NOTHING, np.tile(NOTHING, num)])
        for _ in range(12):  # robust weights, as the fit's loss has them
            matrix, wanted = [], []
            for i in np.flatnonzero(kept):
                k = self.rows[i][1]
                own = x[(k + 1) * self.size : (k + 2) * self.size]
                r = (self.residuals[i] + self.slopes[i] @ (own - self.at[k])) / ROW_SPREAD
                weight = 1.0 / math.sqrt(1.0 + (r / 4.0) ** 2)
                line = np.zeros(len(x))
                line[(k + 1) * self.size : (k + 2) * self.size] = self.slopes[i] * weight / ROW_SPREAD
                matrix.append(line)
                wanted.append((self.slopes[i] @ self.at[k] - self.residuals[i]) * weight / ROW_SPREAD)
            for j in range(self.size):
                line = np.zeros(len(x))
                line[j] = 1.0 / scales[j]
                matrix.append(line)
                wanted.append(NOTHING[j] / scales[j])
                for k in range(num):
                    tie = np.zeros(len(x))
                    tie[j], tie[(k + 1) * self.size + j] = -1.0 / (0.7 * scales[j]), 1.0 / (0.7 * scales[j])
                    matrix.append(tie)
                    wanted.append(0.0)
            x = np.linalg.lstsq(np.array(matrix), np.array(wanted), rcond=None)[0]
            amounts = np.tile([False] * len(MULTIPLIERS) + [True] * len(AMOUNTS), num + 1)
            x = np.where(amounts, np.clip(x, 0.0, 60.0), np.clip(x, -0.9, 1.3))
        return x[self.size :].reshape(num, self.size)

    def errors(self, left_out: np.ndarray) -> list[float]:
        """Relative errors of the rows that were left out."""
        solved = self.solved(~left_out)
        found = []
        for i in np.flatnonzero(left_out):
            k = self.rows[i][1]
            found.append(math.exp(self.residuals[i] + self.slopes[i] @ (solved[k] - self.at[k])) - 1.0)
        return found


def cross_validate(data: Data, fits: dict[str, dict[str, np.ndarray]], only: str) -> None:
    """Leave each configuration out (all its releases together), then each source, and predict it from the rest."""
    kinds = (("configuration", _configuration), ("source", lambda row, case: row.text("source")))
    errors: dict[str, list[float]] = {title: [] for title, _ in kinds}
    for stack, devices in groups(data).items():
        if only and stack not in only.split(","):
            continue
        linear = Linear(data, devices, fits[stack])
        for title, key in kinds:
            names = np.array([key(*data.cases[at][:2]) for at, _ in linear.rows])
            if len(set(names)) < 2:
                continue
            each = {name: linear.errors(names == name) for name in sorted(set(names))}
            fresh = [e for found in each.values() for e in found]
            if title == "source":
                print("".join(f"    {score(found)}  {name[-90:]}\n" for name, found in each.items()), end="")
            print(f"  {stack}, each {title} left out: {score(fresh)}", flush=True)
            errors[title] += fresh
    for title, found in errors.items():
        print(f"every {title} left out once: {score(found)}")


def _configuration(row: Row, case: published.Case) -> str:
    return f"{case.name}|{case.seq}|{case.cluster.name}|{case.plan.words()}"


def _precisions(data: Data, members: list[int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for at in members:
        found[data.cases[at][1].plan.precision] += 1
    return dict(sorted(found.items()))


def write(data: Data, stack: str, found: dict[str, np.ndarray], errors: dict[str, list[float]],
          devices_of: dict[str, list[int]]) -> None:  # fmt: skip
    title, year, execution = TITLES[stack]
    plan = {"execution": execution, **{word: value for word, value, stacks in CHOICES if stack in stacks}}
    folder = data_dir() / "generations"
    folder.mkdir(exist_ok=True)
    devices = {}
    for device, x in sorted(found.items()):
        coef = {name: float(f"{value:.4g}") for name, value in unpack(x).items()}
        apes = sorted(abs(e) for e in errors[device])
        spread = apes[min(len(apes) - 1, math.ceil(0.9 * len(apes)) - 1)] if len(apes) >= 5 else 0.15
        devices[device] = {**coef, "spread": float(f"{max(0.04, 1.15 * spread):.3g}")}
    made = {"title": title, "year": year, "basis": "fitted", "plan": plan, "default": stack not in SPECIAL,
            "source": "fitted by benchmarks/fit_training.py to published runs; see benchmarks/2026-11-15-training.md",
            "rows": {d: _precisions(data, members) for d, members in sorted(devices_of.items())},
            "devices": devices}  # fmt: skip
    (folder / f"{stack}.json").write_text(json.dumps(made, indent=1) + "\n")


def kept_fits() -> dict[str, dict[str, np.ndarray]]:
    """The coefficients as they are kept, as vectors."""
    found = {}
    for path in sorted((data_dir() / "generations").glob("*.json")):
        devices = json.loads(path.read_text())["devices"]
        found[path.stem] = {
            d: np.array([*(math.log(c[n]) for n in MULTIPLIERS), *(c[n] / scale for n, scale in AMOUNTS.items())])
            for d, c in devices.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", default=os.environ.get("RIDGELINE_SHARED", ""))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--left-out", action="store_true", help="check the kept fits by leaving rows out")
    args = parser.parse_args()
    shared = next(p for p in (Path(args.shared or "."), ROOT.parent / "shared", ROOT.parent.parent / "shared")
                  if (p / "published" / "training_llm.csv").is_file())  # fmt: skip
    data = Data(shared / "published" / "training_llm.csv")
    started, total = time.perf_counter(), []
    if args.left_out:
        return cross_validate(data, kept_fits(), args.only)
    for stack, devices in groups(data).items():
        if args.only and stack not in args.only.split(","):
            continue
        found = fit_stack(data, devices)
        errors = {d: [error(data, at, found[d]) for at in members] for d, members in devices.items()}
        for device in devices:
            shown = " ".join(f"{k}={v:.3g}" for k, v in unpack(found[device]).items() if v)
            print(f"{stack:22s} {device:16s} {score(errors[device])}  {shown}", flush=True)
            total += errors[device]
        if args.write:
            write(data, stack, found, errors, devices)
    print(f"all: {score(total)} ({time.perf_counter() - started:.0f} s)")
    return None


if __name__ == "__main__":
    main()
