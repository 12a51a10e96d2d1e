"""Fit what software stacks of the past reach on their devices, and judge the fit with whole sources held out.

    python benchmarks/fit_stacks.py training_other.csv inference_other.csv [--write] [--rows N]

One set of coefficients a stack, and for each device family of it deviations that are pulled towards zero.
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
    gemm_frac=0.6, conv_frac=0.5, volume_frac=0.4, thin_frac=0.08, traffic_frac=0.85, norm_frac=0.8, memory_frac=0.8,
    lookup_frac=0.4, kernel_s=3e-6, op_s=8e-6, step_s=1e-4, score_passes=5.0, cell_s=8e-6, winograd=1.3, fp32_frac=1.05,
    tf32_frac=1.0, int8_frac=0.7, sync_frac=0.04, overlap_frac=0.6,
)
EAGER = replace(START, op_s=2.5e-5, step_s=5e-4)
NAMES = [field.name for field in fields(Reach)]
BOUNDS = {  # nothing beats a peak; a stack that fuses passes may seem to beat the memory several times
    "gemm_frac": (0.05, 0.9), "conv_frac": (0.05, 0.9), "volume_frac": (0.03, 0.9), "thin_frac": (0.003, 0.5),
    "traffic_frac": (0.3, 2.0), "norm_frac": (0.1, 8.0), "memory_frac": (0.1, 8.0), "lookup_frac": (0.03, 4.0),
    "kernel_s": (5e-7, 1.5e-5),
    "op_s": (2e-7, 8e-5), "step_s": (1e-6, 1e-2), "score_passes": (0.5, 30.0), "cell_s": (1e-6, 1e-4),
    "winograd": (1.0, 2.0),
    "fp32_frac": (0.3, 1.1), "tf32_frac": (0.3, 1.1), "int8_frac": (0.2, 1.1), "sync_frac": (0.005, 0.3),
    "overlap_frac": (0.05, 1.0),
}
PRIOR, DEVICE_PRIOR = 0.08, 0.35
PARENTS = {  # a stack with few rows starts from its nearest relative
    "ngc-mxnet-train": "ngc-pytorch-train", "ngc-tensorflow-train": "ngc-pytorch-train",
    "ngc-xla-train": "ngc-pytorch-train", "ngc-fused-train": "ngc-pytorch-train",
    "tensorflow-1-infer": "torchscript-infer", "pytorch-2.1": "torchscript-infer",
    "pytorch-2.1-fused": "pytorch-2.1",
    "tensorrt-dlrm": "tensorrt", "tensorrt-dlrm-v2": "tensorrt-dlrm", "fastertransformer": "tensorrt",
    "fastertransformer-int8-v1": "fastertransformer", "fastertransformer-int8-v2": "fastertransformer",
    "mlperf-language-train": "mlperf-vision-train", "mlperf-hugectr-train": "mlperf-vision-train",
}
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
            found[work.stack].append((work, seconds, row.text("source")))
    return found


def residuals(points: Sequence[Point], reach: Reach) -> np.ndarray:
    return np.array([math.log(predicted_s(work, reach) / seconds) for work, seconds, _ in points])


def fit(points: Sequence[Point], start: Reach, prior: float) -> Reach:
    x0 = np.log([getattr(start, name) for name in NAMES])

    def made(x: np.ndarray) -> Reach:
        return Reach(**{name: float(math.exp(value)) for name, value in zip(NAMES, x)})

    def cost(x: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(points, made(x)), prior * (x - x0)])

    low, high = (np.log([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))
    x0 = np.clip(x0, low + 1e-3, high - 1e-3)
    found = least_squares(
        cost, x0, bounds=(low, high), loss="soft_l1", f_scale=0.15, max_nfev=30, diff_step=1e-3, x_scale=0.3
    )
    return made(found.x)


def fit_stack(points: Sequence[Point], start: Reach) -> tuple[Reach, dict[str, Reach]]:
    common = fit(points, start, PRIOR)
    by = defaultdict(list)
    for point in points:
        by[family_of(point[0].device)].append(point)
    return common, {name: fit(own, common, DEVICE_PRIOR) for name, own in by.items()}


def errors(points: Sequence[Point], common: Reach, own: dict[str, Reach]) -> np.ndarray:
    ratios = [predicted_s(w, own.get(family_of(w.device), common)) / s - 1 for w, s, _ in points]
    return np.array(ratios)


def held_out(points: Sequence[Point], start: Reach, folds: Sequence[set[int]]) -> np.ndarray:
    """Errors of every fold by coefficients that never saw it."""
    out = np.zeros(len(points))
    for fold in folds:
        rest = [p for i, p in enumerate(points) if i not in fold]
        mine = [points[i] for i in sorted(fold)]
        common, own = fit_stack(rest, start) if rest else (start, {})
        out[sorted(fold)] = errors(mine, common, own)
    return out


def thirds(points: Sequence[Point]) -> list[set[int]]:
    """Three random parts of the rows."""
    order = np.random.default_rng(0).permutation(len(points))
    return [set(order[i::3].tolist()) for i in range(3)]


def sources(points: Sequence[Point]) -> list[set[int]]:
    """Five groups of whole sources."""
    names = sorted({p[2] for p in points})
    group = {name: i % 5 for i, name in enumerate(np.random.default_rng(1).permutation(names))}
    folds = [{i for i, p in enumerate(points) if group[p[2]] == k} for k in range(5)]
    return [fold for fold in folds if fold]


def line(title: str, found: np.ndarray) -> str:
    mean, median = np.abs(found).mean(), np.median(np.abs(found))
    return f"{title:28s} n={len(found):4d}  mean {mean:6.1%}  median {median:6.1%}  bias {found.mean():+.1%}"


def _start(stack: str) -> Reach:
    return EAGER if stack.startswith(("ngc-", "torchscript")) else START


def _depth(stack: str) -> int:
    return 1 + _depth(PARENTS[stack]) if stack in PARENTS else 0


def _show(points: Sequence[Point], found: np.ndarray, num_rows: int) -> None:
    by = defaultdict(list)
    for (work, _, _), error in zip(points, found):
        by[f"{work.network} {family_of(work.device)} {work.precision}"].append(error)
    for name, values in sorted(by.items()):
        print(f"     {name:44s} n={len(values):3d} mean {np.abs(values).mean():6.1%} bias {np.mean(values):+.1%}")
    for i in np.argsort(-np.abs(found))[:num_rows]:
        work, seconds, _ = points[i]
        print(f"        {found[i]:+.0%} {seconds * 1e3:.3f} ms  {work}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path)
    parser.add_argument("inference", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--held-out", action="store_true", help="also leave each source out in turn (minutes)")
    parser.add_argument("--only", default="", help="stacks whose name holds this")
    parser.add_argument("--rows", type=int, default=0, help="worst rows of each stack to print")
    args = parser.parse_args()
    path = data_dir() / "stacks.json"
    tables = json.loads(path.read_text()) if path.is_file() else {}
    everything, part, whole, starts = [], [], [], dict[str, Reach]()
    data = read(args.training, args.inference)
    for stack in sorted(data, key=lambda name: (_depth(name), name)):
        points, start = data[stack], starts.get(PARENTS.get(stack, ""), _start(stack))
        common, own = fit_stack(points, start)
        starts[stack] = common
        if args.only and args.only not in stack:
            continue
        found = errors(points, common, own)
        everything.append(found)
        print(line(stack, found))
        _show(points, found, args.rows)
        if args.held_out:
            part.append(held_out(points, start, thirds(points)))
            whole.append(held_out(points, start, sources(points)))
            print(line("  rows held out", part[-1]))
            print(line("  sources held out", whole[-1]))
        judged = part[-1] if args.held_out else found
        tables[stack] = {
            "all": rounded(common), "devices": {name: rounded(reach) for name, reach in sorted(own.items())},
            "spread_frac": spread(judged), "rows": len(points),
        }
    print(line("all", np.concatenate(everything)))
    if part:
        print(line("all, rows held out", np.concatenate(part)))
        print(line("all, sources held out", np.concatenate(whole)))
    if args.write:
        path.write_text(json.dumps(tables, indent=1) + "\n")


def spread(found: np.ndarray) -> float:
    """The standard deviation of a bell whose 90 % interval holds as many of these errors, at least 5 %."""
    return max(0.05, round(float(np.quantile(np.abs(np.log1p(found)), 0.9)) / 1.645, 3))


def rounded(reach: Reach) -> dict[str, float]:
    return {name: float(f"{getattr(reach, name):.4g}") for name in NAMES}


if __name__ == "__main__":
    main()
