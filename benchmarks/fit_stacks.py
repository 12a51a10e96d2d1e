"""Fit what software stacks of the past reach on their devices, and judge the fit with whole sources held out.

    python benchmarks/fit_stacks.py training_other.csv inference_other.csv [--write] [--rows N]

One set of coefficients a stack, and for each device family of the stack deviations from it that are pulled towards zero.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from ridgeline.cost.measurements import read_table
from ridgeline.errors import RidgelineError
from ridgeline.resources import data_dir
from ridgeline.sim.published import inference_other, training_other
from ridgeline.sim.published.verdict import Row
from ridgeline.sim.published.workload import Workload, family_of, predicted_s
from ridgeline.sim.stack import Reach

START = Reach(
    gemm_frac=0.6, conv_frac=0.5, thin_frac=0.08, memory_frac=0.8, lookup_frac=0.4, kernel_s=3e-6, op_s=8e-6,
    step_s=1e-4, score_passes=5.0, cell_s=8e-6, fp32_frac=1.3, tf32_frac=1.0, int8_frac=0.7, sync_frac=0.04,
    overlap_frac=0.6,
)
NAMES = [field.name for field in fields(Reach)]
PRIOR, DEVICE_PRIOR = 0.08, 0.35
Point = tuple[Workload, float, str]


def read(training: Path, inference: Path) -> dict[str, list[Point]]:
    """Usable rows by stack: (step, measured seconds, source)."""
    found: dict[str, list[Point]] = defaultdict(list)
    for path, module in ((training, training_other), (inference, inference_other)):
        for line, record in read_table(path)[1]:
            row = Row(line, record)
            try:
                work = module.workload(row)
                seconds = module.measured_s(row, work)
                _ = work.load
            except RidgelineError:
                continue
            source = inference_other.source_of(row) if module is inference_other else row.text("source").split(" (")[0]
            found[work.stack].append((work, seconds, source))
    return found


def residuals(points: Sequence[Point], reach: Reach) -> np.ndarray:
    return np.array([math.log(predicted_s(work, reach) / seconds) for work, seconds, _ in points])


def fit(points: Sequence[Point], start: Reach, prior: float) -> Reach:
    x0 = np.log([getattr(start, name) for name in NAMES])

    def made(x: np.ndarray) -> Reach:
        return Reach(**{name: float(math.exp(value)) for name, value in zip(NAMES, x)})

    def cost(x: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(points, made(x)), prior * (x - x0)])

    found = least_squares(cost, x0, loss="soft_l1", f_scale=0.15, max_nfev=25, diff_step=1e-3)
    return made(found.x)


def fit_stack(points: Sequence[Point]) -> tuple[Reach, dict[str, Reach]]:
    common = fit(points, START, PRIOR)
    by = defaultdict(list)
    for point in points:
        by[family_of(point[0].device)].append(point)
    return common, {name: fit(own, common, DEVICE_PRIOR) for name, own in by.items()}


def errors(points: Sequence[Point], common: Reach, own: dict[str, Reach]) -> np.ndarray:
    ratios = [predicted_s(w, own.get(family_of(w.device), common)) / s - 1 for w, s, _ in points]
    return np.array(ratios)


def held_out(points: Sequence[Point]) -> np.ndarray:
    """Errors of every source by coefficients that never saw it."""
    out = []
    for source in sorted({p[2] for p in points}):
        rest = [p for p in points if p[2] != source]
        mine = [p for p in points if p[2] == source]
        common, own = fit_stack(rest) if rest else (START, {})
        out.append(errors(mine, common, own))
    return np.concatenate(out)


def line(title: str, found: np.ndarray) -> str:
    return f"{title:28s} n={len(found):4d}  mean {np.abs(found).mean():6.1%}  median {np.median(np.abs(found)):6.1%}  bias {found.mean():+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path)
    parser.add_argument("inference", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--held-out", action="store_true", help="also leave each source out in turn (minutes)")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    path = data_dir() / "stacks.json"
    tables = json.loads(path.read_text()) if path.is_file() else {}
    everything, blind = [], []
    for stack, points in sorted(read(args.training, args.inference).items()):
        if args.only and args.only not in stack:
            continue
        common, own = fit_stack(points)
        found = errors(points, common, own)
        everything.append(found)
        print(line(stack, found))
        by = defaultdict(list)
        for (work, _, _), error in zip(points, found):
            by[f"{work.network} {family_of(work.device)} {work.precision}"].append(error)
        for name, values in sorted(by.items()):
            print(f"     {name:44s} n={len(values):3d} mean {np.abs(values).mean():6.1%} bias {np.mean(values):+.1%}")
        if args.held_out:
            blind.append(held_out(points))
            print(line("  sources held out", blind[-1]))
        tables[stack] = {
            "all": rounded(common), "devices": {name: rounded(reach) for name, reach in sorted(own.items())},
            "spread_frac": round(float(np.sqrt(np.mean(np.log1p(found) ** 2))), 3), "rows": len(points),
        }
    print(line("all", np.concatenate(everything)))
    if blind:
        print(line("all, sources held out", np.concatenate(blind)))
    if args.write:
        path.write_text(json.dumps(tables, indent=1) + "\n")


def rounded(reach: Reach) -> dict[str, float]:
    return {name: float(f"{getattr(reach, name):.4g}") for name in NAMES}


if __name__ == "__main__":
    main()
