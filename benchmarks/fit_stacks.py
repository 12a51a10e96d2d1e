"""Fit what software stacks of the past reach on their devices, and judge the fit with whole sources held out.

    python benchmarks/fit_stacks.py training_other.csv inference_other.csv [--write] [--rows N]

One set of coefficients a stack, four traits a device that all stacks share, and for each pair of both deviations that
are pulled towards zero.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ridgeline.cost.measurements import read_table
from ridgeline.errors import RidgelineError
from ridgeline.resources import data_dir
from ridgeline.sim.published import inference_other, training_other
from ridgeline.sim.published.verdict import Row
from ridgeline.sim.published.workload import Workload, family_of, predicted_s
from ridgeline.sim.stack import Reach, Trait

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
REFERENCE = "a100"
PRIOR, TRAIT_PRIOR, DEVICE_PRIOR = 0.08, 0.3, 0.35
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


def read(training: Path, inference: Path) -> list[Point]:
    """Usable rows: (step, measured seconds, source)."""
    found: list[Point] = []
    for path, module in ((training, training_other), (inference, inference_other)):
        for line, record in read_table(path)[1]:
            row = Row(line, record)
            try:
                work = module.workload(row)
                seconds = module.measured_s(row, work)
                _ = work.load
            except RidgelineError:
                continue
            found.append((work, seconds, row.text("source")))
    return found


@dataclass(frozen=True)
class Model:
    """Stacks on the reference device, traits of devices, and what each stack shows on each device."""

    commons: dict[str, Reach]
    traits: dict[str, Trait]
    own: dict[tuple[str, str], Reach]

    def reach(self, work: Workload) -> Reach:
        family = family_of(work.device)
        known = self.own.get((work.stack, family))
        if known is not None:
            return known
        common = self.commons.get(work.stack) or _start(work.stack)
        return self.traits.get(family, Trait()).applied(common)

    def errors(self, points: Sequence[Point]) -> np.ndarray:
        return np.array([predicted_s(work, self.reach(work)) / seconds - 1 for work, seconds, _ in points])


def solve(cost: Callable[[np.ndarray], np.ndarray], x0: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    x0 = np.clip(x0, low + 1e-3, high - 1e-3)
    found = least_squares(
        cost, x0, bounds=(low, high), loss="soft_l1", f_scale=0.15, max_nfev=25, diff_step=1e-3, x_scale=0.3
    )
    return np.asarray(found.x)


def fit(points: Sequence[Point], start: Reach, prior: float, traits: dict[str, Trait]) -> Reach:
    """The reach that explains these rows, on devices with these traits."""
    x0 = np.log([getattr(start, name) for name in NAMES])

    def made(x: np.ndarray) -> Reach:
        return Reach(**{name: float(math.exp(value)) for name, value in zip(NAMES, x)})

    def cost(x: np.ndarray) -> np.ndarray:
        reach = made(x)
        shown = {family: trait.applied(reach) for family, trait in traits.items()}
        rows = [math.log(predicted_s(w, shown.get(family_of(w.device), reach)) / s) for w, s, _ in points]
        return np.concatenate([rows, prior * (x - x0)])

    low, high = (np.log([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))
    return made(solve(cost, x0, low, high))


def fit_trait(points: Sequence[Point], commons: dict[str, Reach]) -> Trait:
    """What these rows of one device share beside their stacks."""
    names = [field.name for field in fields(Trait)]

    def made(x: np.ndarray) -> Trait:
        return Trait(**{name: float(math.exp(value)) for name, value in zip(names, x)})

    def cost(x: np.ndarray) -> np.ndarray:
        shown = {stack: made(x).applied(common) for stack, common in commons.items()}
        rows = [math.log(predicted_s(w, shown[w.stack]) / s) for w, s, _ in points]
        return np.concatenate([rows, TRAIT_PRIOR * x])

    wide = np.full(len(names), math.log(5.0))
    return made(solve(cost, np.zeros(len(names)), -wide, wide))


def fit_all(points: Sequence[Point]) -> Model:
    """Stacks given devices, devices given stacks, twice; then each pair with a pull towards both."""
    by_stack, by_device, by_pair = defaultdict(list), defaultdict(list), defaultdict(list)
    for point in points:
        family = family_of(point[0].device)
        by_stack[point[0].stack].append(point)
        by_device[family].append(point)
        by_pair[point[0].stack, family].append(point)
    traits: dict[str, Trait] = {}
    commons: dict[str, Reach] = {}
    for _ in range(2):
        for stack in sorted(by_stack, key=lambda name: (_depth(name), name)):
            start = commons.get(stack) or commons.get(PARENTS.get(stack, "")) or _start(stack)
            commons[stack] = fit(by_stack[stack], start, PRIOR, traits)
        traits = {name: fit_trait(rows, commons) for name, rows in by_device.items() if name != REFERENCE}
    own = {
        (stack, family): fit(rows, traits.get(family, Trait()).applied(commons[stack]), DEVICE_PRIOR, {})
        for (stack, family), rows in by_pair.items()
    }
    return Model(commons, traits, own)


def held_out(points: Sequence[Point], folds: Sequence[set[int]]) -> np.ndarray:
    """Errors of every fold by a model that never saw it."""
    out = np.zeros(len(points))
    for fold in folds:
        model = fit_all([p for i, p in enumerate(points) if i not in fold])
        out[sorted(fold)] = model.errors([points[i] for i in sorted(fold)])
    return out


def thirds(points: Sequence[Point]) -> list[set[int]]:
    """Three random parts of the rows."""
    order = np.random.default_rng(0).permutation(len(points))
    return [set(order[i::3].tolist()) for i in range(3)]


def sources(points: Sequence[Point]) -> list[set[int]]:
    """Five groups of whole sources."""
    names = sorted({p[2] for p in points})
    group = {name: i % 5 for i, name in enumerate(np.random.default_rng(1).permutation(names))}
    return [{i for i, p in enumerate(points) if group[p[2]] == k} for k in range(5)]


def line(title: str, found: np.ndarray) -> str:
    mean, median = np.abs(found).mean(), np.median(np.abs(found))
    return f"{title:46s} n={len(found):4d}  mean {mean:6.1%}  median {median:6.1%}  bias {found.mean():+.1%}"


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
    parser.add_argument("--write", action="store_true", help="put the coefficients into data/stacks.json")
    parser.add_argument("--held-out", action="store_true", help="also leave rows and sources out in turn (minutes)")
    parser.add_argument("--rows", type=int, default=0, help="worst rows of each stack to print")
    args = parser.parse_args()
    points = read(args.training, args.inference)
    model = fit_all(points)
    found = model.errors(points)
    judged = {"all": found}
    if args.held_out:
        judged["rows held out"] = held_out(points, thirds(points))
        judged["sources held out"] = held_out(points, sources(points))
    for stack in sorted(model.commons):
        mine = np.array([p[0].stack == stack for p in points])
        print("\n".join(line(f"{stack}: {name}", values[mine]) for name, values in judged.items()))
        _show([p for p, own in zip(points, mine) if own], found[mine], args.rows)
    print("\n".join(line(name, values) for name, values in judged.items()))
    if args.write:
        text = json.dumps(tables(model, points, judged.get("rows held out", found)), indent=1)
        (data_dir() / "stacks.json").write_text(text + "\n")


def tables(model: Model, points: Sequence[Point], judged: np.ndarray) -> dict[str, Any]:
    """The file that ships: traits of devices, and of every stack its coefficients and how far they spread."""
    made: dict[str, Any] = {"devices": {name: rounded(trait) for name, trait in sorted(model.traits.items())}}
    made["stacks"] = {}
    for stack, common in sorted(model.commons.items()):
        mine = np.array([p[0].stack == stack for p in points])
        own = {family: rounded(reach) for (name, family), reach in sorted(model.own.items()) if name == stack}
        made["stacks"][stack] = {
            "all": rounded(common), "devices": own, "spread_frac": spread(judged[mine]), "rows": int(mine.sum()),
        }
    return made


def spread(found: np.ndarray) -> float:
    """The standard deviation of a bell whose 90 % interval holds as many of these errors, at least 5 %."""
    return max(0.05, round(float(np.quantile(np.abs(np.log1p(found)), 0.9)) / 1.645, 3))


def rounded(values: Reach | Trait) -> dict[str, float]:
    return {field.name: float(f"{getattr(values, field.name):.4g}") for field in fields(values)}


if __name__ == "__main__":
    main()
