"""Fit what software stacks of the past reach on their devices, and judge the fit with whole sources held out.

    python -m lab.fit.software_stacks training_other.csv inference_other.csv [--held-out] [--write] [--rows N]

One fit of all rows. The logarithm of a coefficient is a sum of effects: what all stacks share, the stack's ancestors,
the stack, the device's traits, and the stack on that device. Every effect is pulled towards zero by a bell of its own
width, so a stack or a device with few rows takes what its relatives show. Each source may also be slower or faster as a
whole, and have a slower or faster host, by a little; that part is forgotten when the fit is used, and keeps the eighty
rows of one README from counting as eighty witnesses.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sparse
from scipy.linalg import cho_factor, cho_solve

from ridgeline.errors import RidgelineError
from ridgeline.hardware import device
from ridgeline.resources import data_dir
from ridgeline.sim.stack import MOST_FRAC, NUM_PRODUCT_KINDS, Load, Reach, Trait, idle_factor, peak_of, reach_of
from ridgeline.validation import inference_other, training_other
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Row
from ridgeline.validation.workload import Workload, family_of, predicted_s

START = Reach(
    gemm_frac=0.6, conv_frac=0.5, volume_frac=0.4, thin_frac=0.08, traffic_frac=0.85, norm_frac=0.8, memory_frac=0.8,
    lookup_frac=0.4, depthwise_frac=0.35, kernel_s=3e-6, pass_s=2.5e-6, op_s=8e-6, cast_factor=1.05,
    step_s=1e-4, score_passes=5.0, cell_s=8e-6, winograd=1.3, fp32_frac=1.05, tf32_frac=1.0, int8_frac=0.7,
    sync_frac=0.04, overlap_frac=0.6,
)
EAGER = replace(START, op_s=2.5e-5, step_s=5e-4)
BOUNDS = {  # nothing beats a peak; a stack that fuses passes may seem to beat the memory several times
    "gemm_frac": (0.05, 0.9), "conv_frac": (0.05, 0.9), "volume_frac": (0.03, 0.9), "thin_frac": (0.003, 0.5),
    "traffic_frac": (0.3, 2.0), "norm_frac": (0.1, 8.0), "memory_frac": (0.1, 8.0), "lookup_frac": (0.03, 4.0),
    "depthwise_frac": (0.05, 2.0),
    "kernel_s": (5e-7, 1.5e-5), "pass_s": (5e-8, 1.5e-5), "op_s": (2e-7, 8e-5), "cast_factor": (1.0, 1.6),
    "step_s": (1e-6, 1e-2), "score_passes": (0.5, 30.0), "cell_s": (1e-6, 1e-4), "winograd": (1.0, 2.0),
    "fp32_frac": (0.3, 1.1), "tf32_frac": (0.3, 1.1), "int8_frac": (0.2, 1.1), "sync_frac": (0.005, 0.3),
    "overlap_frac": (0.05, 1.0),
}
WIDTH = {  # how far stacks differ, as the standard deviation of the logarithm
    "gemm_frac": 0.3, "conv_frac": 0.3, "volume_frac": 0.4, "thin_frac": 0.6, "traffic_frac": 0.3, "norm_frac": 0.5,
    "memory_frac": 0.5, "lookup_frac": 0.7, "depthwise_frac": 0.4, "kernel_s": 0.5, "pass_s": 0.6, "op_s": 0.7,
    "cast_factor": 0.1,
    "step_s": 1.2, "score_passes": 0.6, "cell_s": 0.6, "winograd": 0.2, "fp32_frac": 0.2, "tf32_frac": 0.2,
    "int8_frac": 0.3, "sync_frac": 0.8, "overlap_frac": 0.4,
}
TRAITS = {  # coefficients a device moves together, and how far
    "host": (("op_s", "step_s"), 0.5), "kernel": (("kernel_s", "pass_s"), 0.45),
    "compute": (("gemm_frac", "conv_frac", "volume_frac", "thin_frac"), 0.3),
    "memory": (("traffic_frac", "norm_frac", "memory_frac", "lookup_frac", "depthwise_frac"), 0.3),
}
PAIR = 0.5  # a stack on one device against itself elsewhere, relative to WIDTH
NOISE, SOFT = 0.1, 0.12  # of a row; beyond SOFT an error counts by its size, not its square
SOURCE, SOURCE_HOST = 0.08, 0.3
PARENTS = {  # a stack with few rows takes after its nearest relative
    "ngc-mxnet-train": "ngc-pytorch-train", "ngc-tensorflow-train": "ngc-pytorch-train",
    "ngc-xla-train": "ngc-pytorch-train", "ngc-fused-train": "ngc-pytorch-train",
    "torchscript-infer": "ngc-pytorch-infer", "tensorflow-1-infer": "torchscript-infer",
    "pytorch-2.1": "torchscript-infer",
    "pytorch-2.1-fused": "pytorch-2.1",
    "tensorrt-dlrm": "tensorrt", "tensorrt-dlrm-v2": "tensorrt-dlrm", "fastertransformer": "tensorrt",
    "fastertransformer-int8-v1": "fastertransformer", "fastertransformer-int8-v2": "fastertransformer",
    "mlperf-language-train": "mlperf-vision-train", "mlperf-hugectr-train": "mlperf-vision-train",
    "mlperf-hugectr-train-v2": "mlperf-hugectr-train",
}
NAMES = [field.name for field in fields(Reach)]
AT = {name: i for i, name in enumerate(NAMES)}
LOW, HIGH = (np.log([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))
PRODUCTS = [AT[name] for name in ("gemm_frac", "conv_frac", "volume_frac", "thin_frac")]
RATES = [AT[f"{name}_frac"] for name in ("traffic", "traffic", "traffic", "memory", "norm", "memory", "lookup",
                                          "depthwise")]  # fmt: skip
RELATIVE = {name: AT[f"{kind}_frac"] for name, kind in (("fp32", "fp32"), ("tf32", "tf32"), ("int8", "int8"),
                                                       ("fp8", "int8"))}  # fmt: skip
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


class Steps:
    """All rows side by side: their seconds as one function of one coefficient table, a row each."""

    def __init__(self, points: Sequence[Point]) -> None:
        works = [work for work, _, _ in points]
        loads = [_load(work) for work in works]
        chips = [device(work.device) for work in works]
        sizes = [len(load.kind) for load in loads]
        self.num, self.first = len(points), np.cumsum([0, *sizes[:-1]])
        self.row = np.repeat(np.arange(self.num), sizes)
        self.kind, self.num_bytes, self.times = (
            np.concatenate([getattr(load, name) for load in loads]) for name in ("kind", "num_bytes", "times")
        )
        self.flops = np.concatenate([c.flops * idle_factor(c, d.num_cores) for c, d in zip(loads, chips, strict=True)])
        self.score, self.cells, self.ops, self.trains = (
            np.array([getattr(load, name) for load in loads]) for name in ("score_bytes", "cells", "num_ops", "trains")
        )
        self.peak = np.array([peak_of(chip, work.precision) for chip, work in zip(chips, works, strict=True)])
        self.bandwidth = np.array([chip.dram.bandwidth_bytes_per_s for chip in chips])
        self.relative = np.array([RELATIVE.get(work.precision, -1) for work in works])
        self.narrow = np.array([0.5 if work.precision in ("int8", "fp8") else 1.0 for work in works])
        self.single, self.half = (np.array([work.precision == name for work in works]) for name in ("fp32", "fp16"))
        self.comm, self.reduce = (
            np.array([work.comm_s() + work.lookups_s() for work in works]), np.array([w.reduce_s() for w in works])
        )
        self.passes, self.ranks = (np.array([getattr(work, name) for work in works]) for name in ("passes", "ranks"))

    def log_s(self, x: np.ndarray) -> np.ndarray:
        e = np.exp(x)
        busy = self._busy_s(e)
        hidden = e[:, AT["overlap_frac"]] * busy * np.where(self.trains, 2 / 3, 0.0)
        waits = 1.0 + e[:, AT["sync_frac"]] * (1.0 - 1.0 / self.ranks)
        host = self.ops * e[:, AT["op_s"]] * np.where(self.half, e[:, AT["cast_factor"]], 1.0)
        once = np.maximum(busy * waits, host) + np.maximum(0.0, self.comm - hidden)
        return np.log(once * self.passes + e[:, AT["step_s"]] + self.reduce)

    def _busy_s(self, e: np.ndarray) -> np.ndarray:
        row, kind, product = self.row, self.kind, self.kind < NUM_PRODUCT_KINDS
        column = np.array(PRODUCTS)[np.minimum(kind, NUM_PRODUCT_KINDS - 1)]
        share = np.where(product, np.minimum(MOST_FRAC, e[row, column]), 1.0)
        share = np.where((kind == 1) & self.single[row], share * e[row, AT["winograd"]], share)
        known = np.where(self.relative >= 0, e[np.arange(self.num), np.maximum(self.relative, 0)], 1.0)
        compute = self.flops / (self.peak * known)[row] / share
        memory = self.num_bytes * self.narrow[row] / (e[row, np.array(RATES)[kind]] * self.bandwidth[row])
        launch = np.where(product, e[row, AT["kernel_s"]], e[row, AT["pass_s"]])
        nodes = np.add.reduceat(self.times * (launch + np.maximum(compute, memory)), self.first)
        scores = e[:, AT["score_passes"]] * self.score * self.narrow / (e[:, AT["memory_frac"]] * self.bandwidth)
        return nodes + scores + self.cells * e[:, AT["cell_s"]]

    def slopes(self, x: np.ndarray, step: float = 1e-3) -> np.ndarray:
        """Derivatives of every row by its own coefficients."""
        base, out = self.log_s(x), np.empty((self.num, len(NAMES)))
        for j in range(len(NAMES)):
            moved = x.copy()
            moved[:, j] += step
            out[:, j] = (self.log_s(moved) - base) / step
        return out


def _load(work: Workload) -> Load:
    load = work.load if work.factor == 1.0 else work.load.scaled(work.factor)
    return load.split(work.tensor_ranks) if work.tensor_ranks > 1 else load


@dataclass(frozen=True)
class Model:
    """Stacks on the reference device, traits of devices, and what each stack shows on each device."""

    commons: dict[str, Reach]
    traits: dict[str, Trait]
    own: dict[tuple[str, str], Reach]


class Fit:
    """Effects with unit bells, the matrix that adds them up, and a damped Gauss-Newton search."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points, self.steps = points, Steps(points)
        self.stacks = [work.stack for work, _, _ in points]
        self.families = [family_of(work.device) for work, _, _ in points]
        self.measured = np.log([seconds for _, seconds, _ in points])
        self.start = np.log([[getattr(_start(stack), name) for name in NAMES] for stack in self.stacks])
        self.columns: dict[tuple[str, ...], int] = {}
        self.effects = self._effects()
        names = sorted({source for _, _, source in points})
        at = [names.index(source) for _, _, source in points]
        self.sources = sparse.csr_matrix((np.ones(len(at)), (np.arange(len(at)), at)), shape=(len(at), len(names)))

    def _effects(self) -> sparse.csr_matrix:
        rows, columns, values = [], [], []
        for i, (stack, family) in enumerate(zip(self.stacks, self.families, strict=True)):
            for key, j, width in _terms(stack, family):
                rows.append(i * len(NAMES) + j)
                columns.append(self.columns.setdefault(key, len(self.columns)))
                values.append(width)
        shape = (len(self.stacks) * len(NAMES), len(self.columns))
        return sparse.csr_matrix((values, (rows, columns)), shape=shape)

    def _table(self, theta: np.ndarray) -> np.ndarray:
        return self.start + (self.effects @ theta[: len(self.columns)]).reshape(self.start.shape)

    def errors(self, theta: np.ndarray) -> np.ndarray:
        """Relative errors of all rows, nothing known about their sources."""
        return np.exp(self.steps.log_s(np.clip(self._table(theta), LOW, HIGH)) - self.measured) - 1.0

    def _state(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the rows should say, sources included, and the coefficients that say so."""
        num, names = len(self.columns), self.sources.shape[1]
        x = np.clip(self._table(theta), LOW, HIGH)
        host = SOURCE_HOST * (self.sources @ theta[num + names :])
        x[:, [AT["op_s"], AT["step_s"]]] += host[:, None]
        return self.steps.log_s(x) + SOURCE * (self.sources @ theta[num : num + names]), x

    def _jacobian(self, theta: np.ndarray, x: np.ndarray) -> sparse.csr_matrix:
        slopes, raw = self.steps.slopes(x), self._table(theta)
        host = slopes[:, AT["op_s"]] + slopes[:, AT["step_s"]]
        free = np.where((raw < LOW) | (raw > HIGH), 0.0, slopes)
        pointers = np.arange(0, free.size + 1, free.shape[1])
        wide = sparse.csr_matrix((free.ravel(), np.arange(free.size), pointers), shape=(len(free), free.size))
        return sparse.hstack(
            [wide @ self.effects, SOURCE * self.sources, sparse.diags(SOURCE_HOST * host) @ self.sources]
        ).tocsr()

    def solve(self, kept: np.ndarray, rounds: int = 60) -> np.ndarray:
        """Effects that explain the kept rows, from nothing."""
        theta = np.zeros(len(self.columns) + 2 * self.sources.shape[1])
        said, x = self._state(theta)
        cost, damping = self._cost(said, theta, kept), 1.0
        for _ in range(rounds):
            jacobian = self._jacobian(theta, x)[kept]
            tried = self._search(theta, (self.measured - said)[kept], jacobian, cost, damping, kept)
            if tried is None:
                break
            theta, (said, x), new, damping = tried
            cost, gained = new, cost - new
            if gained < 2e-4 * cost:
                break
        return theta

    def _search(self, theta: np.ndarray, rest: np.ndarray, jacobian: sparse.csr_matrix, cost: float, damping: float,
                kept: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], float, float] | None:  # fmt: skip
        weights = NOISE**2 * np.sqrt(1.0 + (rest / SOFT) ** 2)
        square = (jacobian @ jacobian.T).toarray()
        for _ in range(5):
            center = damping * theta / (1.0 + damping)
            matrix = square + np.diag((1.0 + damping) * weights)
            tried = center + jacobian.T @ cho_solve(cho_factor(matrix), rest + jacobian @ (theta - center))
            state = self._state(tried)
            new = self._cost(state[0], tried, kept)
            if new < cost:
                return tried, state, new, max(damping / 6.0, 1e-3)
            damping *= 5.0
        return None

    def _cost(self, said: np.ndarray, theta: np.ndarray, kept: np.ndarray) -> float:
        rest = (self.measured - said)[kept]
        soft = 2.0 * SOFT**2 * (np.sqrt(1.0 + (rest / SOFT) ** 2) - 1.0)
        return float(soft.sum() / NOISE**2 + (theta**2).sum())

    def model(self, theta: np.ndarray) -> Model:
        """Effects added up: what ships."""
        pairs = sorted(set(zip(self.stacks, self.families, strict=True)))
        commons = {stack: self._reach(theta, stack, None) for stack in sorted(set(self.stacks))}
        traits = {family: self._trait(theta, family) for family in sorted(set(self.families))}
        return Model(commons, traits, {pair: self._reach(theta, *pair) for pair in pairs})

    def _reach(self, theta: np.ndarray, stack: str, family: str | None) -> Reach:
        x = np.log([getattr(_start(stack), name) for name in NAMES])
        for key, j, width in _terms(stack, family):
            if key in self.columns:
                x[j] += width * theta[self.columns[key]]
        values = dict(zip(NAMES, np.exp(np.clip(x, LOW, HIGH)).tolist(), strict=True))
        return Reach(**{n: min(v, MOST_FRAC) if AT[n] in PRODUCTS else v for n, v in values.items()})

    def _trait(self, theta: np.ndarray, family: str) -> Trait:
        moved = {name: width * theta[self.columns["device", family, name]] for name, (_, width) in TRAITS.items()}
        return Trait(**{name: float(np.exp(value)) for name, value in moved.items()})


def _terms(stack: str, family: str | None) -> list[tuple[tuple[str, ...], int, float]]:
    """The effects a stack's coefficients on a device are the sum of: name, coefficient, width."""
    found: list[tuple[tuple[str, ...], int, float]] = []
    for j, name in enumerate(NAMES):
        width = WIDTH[name]
        found.append((("all", name), j, width))
        found += [(("stack", ancestor, name), j, width) for ancestor in _line(stack)]
        if family is not None:
            found.append((("pair", stack, family, name), j, PAIR * width))
    if family is not None:
        for trait, (names, width) in TRAITS.items():
            found += [(("device", family, trait), AT[name], width) for name in names]
    return found


def _line(stack: str) -> list[str]:
    return [stack, *_line(PARENTS[stack])] if stack in PARENTS else [stack]


def _start(stack: str) -> Reach:
    return EAGER if stack.startswith(("ngc-", "torchscript")) else START


def held_out(fit: Fit, folds: Sequence[np.ndarray]) -> np.ndarray:
    """Errors of every fold by a fit that never saw it."""
    out = np.zeros(len(fit.points))
    for fold in folds:
        out[fold] = fit.errors(fit.solve(~fold))[fold]
    return out


def thirds(points: Sequence[Point]) -> list[np.ndarray]:
    """Three random parts of the rows."""
    order = np.random.default_rng(0).permutation(len(points))
    return [np.isin(np.arange(len(points)), order[i::3]) for i in range(3)]


def groups(points: Sequence[Point], key: Callable[[str], str], num: int, seed: int) -> list[np.ndarray]:
    """So many groups of whole sources; ``key`` says which belong together."""
    names = [key(source) for _, _, source in points]
    order = np.random.default_rng(seed).permutation(sorted(set(names)))
    group = {name: i % num for i, name in enumerate(order)}
    return [np.array([group[name] == i for name in names]) for i in range(num)]


def document(source: str) -> str:
    """The whole document of a source: all tables of a README, all results of an MLPerf round."""
    for pattern in (r"DeepLearningExamples/(.*?README)", r"(?:training|inference)(?:_results)?_(v[\d.]+)", r"NeuSight"):
        found = re.search(pattern, source)
        if found:
            return found.group(0)
    return re.sub("@.*", "", source)


def line(title: str, found: np.ndarray) -> str:
    mean, median = np.abs(found).mean(), np.median(np.abs(found))
    return f"{title:46s} n={len(found):4d}  mean {mean:6.1%}  median {median:6.1%}  bias {found.mean():+.1%}"


def _show(points: Sequence[Point], found: np.ndarray, num_rows: int) -> None:
    by = defaultdict(list)
    for (work, _, _), error in zip(points, found, strict=True):
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
    fit = Fit(points)
    theta = fit.solve(np.ones(len(points), bool))
    judged = {"all": fit.errors(theta)}
    if args.held_out:
        judged["rows held out"] = held_out(fit, thirds(points))
        judged["sources held out"] = held_out(fit, groups(points, str, 5, 1))
        judged["few sources held out"] = held_out(fit, groups(points, str, 20, 7))
        judged["documents held out"] = held_out(fit, groups(points, document, 10, 3))
    report(points, judged, args.rows)
    if args.write:
        text = json.dumps(tables(fit.model(theta), points, judged.get("rows held out", judged["all"])), indent=1)
        (data_dir() / "stacks.json").write_text(text + "\n")
        check(points, judged["all"])


def report(points: Sequence[Point], judged: dict[str, np.ndarray], num_rows: int) -> None:
    stacks = np.array([work.stack for work, _, _ in points])
    for stack in sorted(set(stacks)):
        mine = stacks == stack
        print("\n".join(line(f"{stack}: {name}", values[mine]) for name, values in judged.items()))
        _show([p for p, own in zip(points, mine, strict=True) if own], judged["all"][mine], num_rows)
    trains = np.array([work.mode == "train" for work, _, _ in points])
    for name, values in judged.items():
        print(line(name, values))
        print(line(f"  {name}: training", values[trains]))
        print(line(f"  {name}: inference", values[~trains]))


def check(points: Sequence[Point], found: np.ndarray) -> None:
    """What ships answers what was fitted, or the two ways of pricing a step have parted."""
    reaches = {(w.stack, family_of(w.device)): reach_of(w.stack, family_of(w.device)).reach for w, _, _ in points}
    again = [predicted_s(w, reaches[w.stack, family_of(w.device)]) / seconds - 1.0 for w, seconds, _ in points]
    worst = float(np.abs(np.array(again) - found).max())
    if worst > 0.01:
        raise SystemExit(f"the file that ships differs from the fit by {worst:.1%} in some row")


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
