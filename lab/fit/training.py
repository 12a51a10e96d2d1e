"""Fit what each software generation reaches on each device, from all published training runs together.

    python -m lab.fit.training [--shared FOLDER] [--write] [--left-out] [--rounds 4]

One set of coefficients a device and generation, none a row or a model. The logarithm of a coefficient is a sum of
effects, each with a bell around nothing: what all share, then frameworks, families and generations, architectures and
devices, and their pairs. A generation with three rows, or a device with one, stays near its relatives. A document's
and a configuration's own effects are estimated beside them and forgotten. Rows are linearized around the current
fit (a step is nearly linear in its coefficients), everything is solved at once, and again around what was found.
``--left-out`` solves without the rows it then simulates: random thirds, whole sources, publishers, generations.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab import ROOT
from ridgeline.basis import Basis
from ridgeline.hardware import device as device_named
from ridgeline.resources import data_dir
from ridgeline.sim.generation import NEUTRAL, Stack, family_of
from ridgeline.sim.step import Prices, simulate_step
from ridgeline.validation import training_llm as published
from ridgeline.validation.verdict import Row

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Prior:
    """Where a coefficient is expected (a rate at the cost model's, an amount where it is plausible), how far in
    logarithms an effect of 1 goes, and which column of ``EFFECTS`` it takes."""

    center: float
    reach: float
    kind: int


RATE, AMOUNT = 0, 1
PRIORS = {
    "matrix": Prior(1.0, 0.15, RATE), "fp8": Prior(1.0, 0.18, RATE), "fp4": Prior(1.0, 0.21, RATE),
    "grouped": Prior(1.0, 0.25, RATE), "attention": Prior(1.0, 0.25, RATE), "memory": Prior(1.0, 0.25, RATE),
    "up": Prior(1.0, 0.34, RATE), "out": Prior(1.0, 0.18, RATE), "layer_s": Prior(3e-5, 0.46, AMOUNT),
    "micro_s": Prior(1e-3, 0.31, AMOUNT), "step_s": Prior(15e-3, 0.39, AMOUNT), "straggle": Prior(1e-3, 0.46, AMOUNT),
    "route_s": Prior(3e-5, 0.54, AMOUNT), "expert_s": Prior(1e-4, 0.54, AMOUNT),
}  # fmt: skip
NAMES = tuple(PRIORS)
CENTER = np.array([math.log(prior.center) for prior in PRIORS.values()])
EFFECTS = {  # how far each goes, of rates and of amounts
    "all": (0.48, 0.6), "framework": (0.32, 0.3), "family": (0.28, 0.9), "architecture": (0.72, 0.3),
    "device": (0.36, 0.3), "generation": (0.84, 0.4), "generation, architecture": (0.4, 0.2), "pair": (0.24, 0.2),
}  # fmt: skip
LIBRARIES = {  # attention over the cost model's, by the library that each generation brought, where one was measured
    ("llm-foundry", ""): 2.0, ("megatron-bridge-2025a", "blackwell"): 1.5, ("mlperf-2025", "blackwell"): 1.5,
    ("megatron-bridge", "blackwell"): 0.91, ("megatron-bridge-2026b", "blackwell"): 0.91,
}  # fmt: skip
"""llm-foundry ran FlashAttention 1 in 2023 (its recipes say ``attn_impl: triton``, its setup pins flash-attn 1.0), half
as fast as version 2, at which it is priced. Blackwell by NVIDIA's own benchmarks in cudnn-frontend, forward and
backward over what the cost model says of the same shapes: cuDNN 9.9.0, which containers of April 2025 hold, 1.53 to
1.64 (iterations of a 1B model on a B200, as many tokens in longer sequences); 9.10 1.09 to 1.15; 9.18, of January 2026,
0.91."""
ROW_SPREAD, DOCUMENT_SPREAD, CONFIGURATION_SPREAD, STRAY = 0.036, 0.02, 0.03, 3.0
"""Of a row's logarithm: noise, what its document and its configuration share; and from how many noises on a row
counts as a stray."""
FAMILIES = {
    "llm-foundry": "eager", "neusight": "eager", "maxtext": "xla", "megatron-2021": "old", "megatron-2022": "old",
    "megatron-2023": "middle", "megascale": "middle", "megatron-core-2024": "middle",
    "megatron-bridge-2025a": "bridge", "megatron-bridge-2025": "bridge", "megatron-bridge": "bridge",
    "megatron-bridge-2026b": "bridge", "mlperf-2023": "mlperf", "mlperf-2024": "mlperf", "mlperf-2025": "mlperf",
    "mlperf-2025b": "mlperf",
}  # fmt: skip
TITLES = {
    "llm-foundry": ("llm-foundry and Composer with FSDP, 2023", 2023, "eager"),
    "neusight": ("PyTorch 2.1 eager, Hugging Face models", 2023, "eager"),
    "megatron-2021": ("Megatron-LM 2020 and 2021, unfused attention", 2021, "compiled"),
    "megatron-2022": ("Megatron-LM 2022, sequence parallelism and selective recomputation", 2022, "compiled"),
    "maxtext": ("MaxText on GPUs, 2024", 2024, "compiled"),
    "megascale": ("MegaScale 2024", 2024, "compiled"),
    "megatron-2023": ("Megatron-LM 2023", 2023, "compiled"),
    "megatron-core-2024": ("Megatron-Core 0.8 and NeMo 24.x", 2024, "compiled"),
    "megatron-bridge-2025a": ("NeMo 25.04, the first for Blackwell", 2025, "compiled"),
    "megatron-bridge-2025": ("NeMo 25.x and Megatron-Bridge 25.x", 2025, "compiled"),
    "megatron-bridge": ("Megatron-Bridge 26.02 to 26.04", 2026, "compiled"),
    "megatron-bridge-2026b": ("Megatron-Bridge 26.06 and later", 2027, "compiled"),
    "mlperf-2023": ("NVIDIA's MLPerf 3.0", 2023, "compiled"),
    "mlperf-2024": ("NVIDIA's MLPerf 3.1 to 4.1", 2024, "compiled"),
    "mlperf-2025": ("NVIDIA's MLPerf 5.0", 2025, "compiled"),
    "mlperf-2025b": ("NVIDIA's MLPerf 5.1", 2026, "compiled"),
}


BRIDGES = ("megatron-bridge-2025a", "megatron-bridge-2025", "megatron-bridge", "megatron-bridge-2026b")
CHOICES = (
    ("attention", "cudnn", (*BRIDGES, "mlperf-2023", "mlperf-2024", "mlperf-2025", "mlperf-2025b")),
    ("attention", "fa2", ("llm-foundry", "megatron-core-2024", "megascale", "megatron-2023", "maxtext")),
    ("dispatch", "hybrid", BRIDGES),
)
SPECIAL = ("mlperf-2023", "mlperf-2024", "mlperf-2025", "mlperf-2025b", "megatron-bridge-2025a", "neusight", "maxtext")
"""Tuned for one benchmark, or seen too little: used when asked for, never by default."""


class Data:
    """Rows with their cases, and one memory of prices for all fits."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            rows = [Row(i + 2, {k.lower(): v for k, v in r.items()}) for i, r in enumerate(csv.DictReader(file))]
        self.prices = Prices(max_kept=4096)
        self.cases = [(row, case, published.measured_s(row, case)) for row, case in published.cases(rows)]
        self.groups = [self._group(case) for _, case, _ in self.cases]
        self.sources = [published.source_of(row) for row, _, _ in self.cases]

    @staticmethod
    def _group(case: published.Case) -> Group:
        device = case.cluster.device
        return Group.of(case.stack, device.parent or device.name)

    def names(self, how: str) -> list[str]:
        """What rows are left out by."""
        if how in ("generation", "pair"):
            return [g.stack if how == "generation" else f"{g.stack} {g.device}" for g in self.groups]
        if how == "file":
            return [row.text("source") for row, _, _ in self.cases]
        return [publisher(source) if how == "publisher" else source for source in self.sources]

    def residual(self, at: int, x: Floats) -> float:
        row, case, measured = self.cases[at]
        stack = Stack(name=case.stack, title="", device=case.cluster.device.name, basis=Basis.FITTED, source="",
                      coef={**NEUTRAL, **unpack(x)})  # fmt: skip
        step = simulate_step(published.graph_of(case), case.plan, case.cluster, stack, prices=self.prices)
        return math.log((step.step_s - published.outside_s(row, step)) / measured)


def publisher(source: str) -> str:
    """Who stands behind a source: a repository, whatever the release; of MLPerf the submitter, whatever the round."""
    found = re.match(r"github:mlcommons/training_results_v[\d.]+/([^/]+)", source)
    if found:
        return f"MLPerf, {found[1]}"
    found = re.match(r"github:([^/]+/[^/@ ]+)", source)
    return found[1] if found else source


@dataclass(frozen=True)
class Group:
    """A generation on a device; without a device's name on any of its architecture."""

    stack: str
    device: str
    arch: str

    @classmethod
    def of(cls, stack: str, device: str) -> Group:
        return cls(stack, device, family_of(device_named(device)))

    def keys(self) -> dict[str, str]:
        """Whom the group shares each effect with."""
        family, own = FAMILIES[self.stack], self.device or f"any {self.arch} {self.stack}"
        return {
            "all": "", "framework": str(family in ("eager", "xla")), "family": family, "architecture": self.arch,
            "device": own, "generation": self.stack, "generation, architecture": f"{self.stack} {self.arch}",
            "pair": f"{self.stack} {own}",
        }  # fmt: skip


def unpack(x: Floats) -> dict[str, float]:
    return {name: math.exp(value) for name, value in zip(NAMES, x, strict=True)}


class Surrogate:
    """Every row as a step that is linear in its coefficients, around a point for each group."""

    def __init__(self, data: Data, points: Mapping[Group, Floats]) -> None:
        self.around = np.exp([points[group] for group in data.groups])
        self.residuals = np.zeros(len(data.cases))
        self.slopes = np.zeros_like(self.around)
        typical = np.exp(CENTER)
        for at, group in enumerate(data.groups):
            point = points[group]
            self.residuals[at] = data.residual(at, point)
            for j in range(len(NAMES)):
                far = max(0.03 * self.around[at, j], 0.3 * typical[j] if PRIORS[NAMES[j]].kind != RATE else 0.0)
                moved = point.copy()
                moved[j] = math.log(self.around[at, j] + far)
                self.slopes[at, j] = math.expm1(data.residual(at, moved) - self.residuals[at]) / far

    def at(self, x: Floats) -> tuple[Floats, Floats]:
        """Logarithms of predicted over measured, and their slopes, where row i has coefficients exp(x[i])."""
        coef = np.exp(x)
        grown = np.maximum(1.0 + (self.slopes * (coef - self.around)).sum(1), 0.05)
        return self.residuals + np.log(grown), self.slopes * coef / grown[:, None]


class Joint:
    """Effects of all groups, solved from any subset of the rows."""

    def __init__(self, data: Data, more: Sequence[Group] = ()) -> None:
        self.groups = list(dict.fromkeys([*data.groups, *more]))
        numbers = {group: number for number, group in enumerate(self.groups)}
        self.of = np.array([numbers[group] for group in data.groups])
        self.center = np.stack([_center(group) for group in self.groups])
        self.between = np.zeros((len(NAMES), len(self.groups), len(self.groups)))
        keys = [group.keys() for group in self.groups]
        for effect, spreads in EFFECTS.items():
            same = _same([key[effect] for key in keys])
            for j, prior in enumerate(PRIORS.values()):
                self.between[j] += same * (spreads[prior.kind] * prior.reach) ** 2
        configurations = [_configuration(row, case) for row, case, _ in data.cases]
        self.beside = DOCUMENT_SPREAD**2 * _same(data.sources) + CONFIGURATION_SPREAD**2 * _same(configurations)

    def solve(self, rows: Surrogate, kept: Mask, iterations: int = 12) -> Floats:
        """Coefficients' logarithms of every group from the kept rows alone, strays counting less, from the centers."""
        x, at = self.center.copy(), np.flatnonzero(kept)
        of, weight = self.of[at], np.ones(len(at))
        between = self.between[:, of][:, :, of]
        for turn in range(iterations):
            residuals, slopes = (found[at] for found in rows.at(x[self.of]))
            wanted = (slopes * (x - self.center)[of]).sum(1) - residuals
            noise = np.diag(ROW_SPREAD**2 / weight)
            spread = np.einsum("aj,jab,bj->ab", slopes, between, slopes) + self.beside[np.ix_(at, at)] + noise
            pull = np.linalg.solve(spread, wanted)
            step = self.center + np.einsum("jgb,bj,b->gj", self.between[:, :, of], slopes, pull) - x
            x = x + np.clip(step, -0.5, 0.5) * (1.0 if turn < 4 else 0.8)
            weight = 1.0 / (1.0 + (ROW_SPREAD / weight * pull / STRAY) ** 2)
        return x


def _center(group: Group) -> Floats:
    """Where the group's coefficients are expected before any row is seen."""
    found, stack = CENTER.copy(), group.stack
    found[NAMES.index("attention")] += math.log(LIBRARIES.get((stack, group.arch), LIBRARIES.get((stack, ""), 1.0)))
    return found


def _same(names: Sequence[str]) -> Mask:
    numbers = np.unique(names, return_inverse=True)[1]
    return numbers[:, None] == numbers[None, :]


def _configuration(row: Row, case: published.Case) -> str:
    return f"{case.name}|{case.seq}|{case.cluster.name}|{case.plan.words()}"


def fit(data: Data, rounds: int = 4, kept: Mask | None = None, joint: Joint | None = None) -> tuple[Floats, Surrogate]:
    """From the priors' centers: solve, linearize around what was found, and again."""
    joint = joint or Joint(data)
    x, chosen = joint.center, np.ones(len(data.cases), bool) if kept is None else kept
    for _ in range(rounds):
        rows = Surrogate(data, dict(zip(joint.groups, x, strict=True)))
        x = joint.solve(rows, chosen)
    return x, rows


def errors(data: Data, joint: Joint, x: Floats, chosen: Mask) -> Floats:
    """Relative errors of the chosen rows, simulated."""
    return np.array([math.expm1(data.residual(at, x[joint.of[at]])) for at in np.flatnonzero(chosen)])


def left_out(data: Data, joint: Joint, rows: Surrogate, names: Sequence[str]) -> Floats:
    """Relative errors of all rows, each simulated under coefficients solved without the rows that share its name."""
    found, given = np.zeros(len(data.cases)), np.array(names)
    for name in sorted(set(names)):
        out = given == name
        found[out] = errors(data, joint, joint.solve(rows, ~out), out)
    return found


def thirds(num: int, seed: int) -> list[str]:
    return [str(part) for part in np.random.default_rng(seed).permutation(num) % 3]


def biases(sources: Sequence[str], found: Floats, at_least: int = 1) -> list[tuple[str, int, float]]:
    """(source, rows, bias) of those with enough rows, the largest first."""
    each: dict[str, list[float]] = defaultdict(list)
    for source, error in zip(sources, found, strict=True):
        each[source].append(error)
    told = [(name, len(es), statistics.fmean(es)) for name, es in each.items() if len(es) >= at_least]
    return sorted(told, key=lambda item: -abs(item[2]))


def score(found: Floats) -> str:
    apes = 100 * np.abs(found)
    mean, median, bias = apes.mean(), np.median(apes), 100 * found.mean()
    return f"n {len(found):3d}  mean {mean:5.1f} %  median {median:5.1f} %  bias {bias:+5.1f} %"


def cross_validate(data: Data, rounds: int) -> None:
    joint = Joint(data)
    _, rows = fit(data, rounds, joint=joint)
    schemes: list[tuple[str, Callable[[], list[str]]]] = [
        *((f"third {seed}", lambda seed=seed: thirds(len(data.cases), seed)) for seed in range(4)),
        *((how, lambda how=how: data.names(how)) for how in ("source", "file", "publisher", "generation")),
    ]
    for title, names in schemes:
        found = left_out(data, joint, rows, names())
        print(f"each {title} left out: {score(found)}")
        for source, num, bias in biases(data.sources, found, 3):
            if abs(bias) > 0.08:
                print(f"    {100 * bias:+6.1f} % {num:3d} rows  {source[-100:]}", flush=True)


def _precisions(data: Data, members: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for at in members:
        found[data.cases[at][1].plan.precision] += 1
    return dict(sorted(found.items()))


def _told(x: Floats) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in unpack(x).items()}


def _spread(found: Floats) -> float:
    """Log half-width of a 90 % interval from the errors of a group."""
    apes = sorted(np.abs(found))
    wide = apes[min(len(apes) - 1, math.ceil(0.9 * len(apes)) - 1)] if len(apes) >= 5 else 0.15
    return float(f"{max(0.04, 1.15 * wide):.3g}")


def write(data: Data, joint: Joint, x: Floats, stack: str, found: Floats) -> None:
    """A generation's file: coefficients of the devices it was seen on, and what its relatives say of architectures."""
    title, year, execution = TITLES[stack]
    plan = {"execution": execution, **{word: value for word, value, stacks in CHOICES if stack in stacks}}
    own = [group for group in joint.groups if group.stack == stack]
    members = {g.device: [at for at, other in enumerate(data.groups) if other == g] for g in own if g.device}
    at = {group: x[number] for number, group in enumerate(joint.groups)}
    made = {"title": title, "year": year, "basis": "fitted", "plan": plan, "default": stack not in SPECIAL,
            "source": "fitted by lab/fit/training.py to published runs; see lab/notes/published-training.md",
            "rows": {d: _precisions(data, members[d]) for d in sorted(members)},
            "devices": {g.device: {**_told(at[g]), "spread": _spread(found[members[g.device]])}
                        for g in sorted(own, key=lambda g: g.device) if g.device},
            "architectures": {g.arch: {**_told(at[g]), "spread": 0.25}
                              for g in sorted(own, key=lambda g: g.arch) if not g.device}}  # fmt: skip
    (data_dir() / "generations" / f"{stack}.json").write_text(json.dumps(made, indent=1) + "\n")


def relatives(data: Data) -> Iterator[Group]:
    """Every generation on every architecture, for devices nobody published; AMD's ran in single precision alone."""
    seen = {group.arch for group in data.groups} - {"cdna"}
    for stack in sorted({group.stack for group in data.groups}):
        yield from (Group(stack, "", arch) for arch in sorted(seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", default=os.environ.get("RIDGELINE_SHARED", ""))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--left-out", action="store_true", help="check by leaving rows out")
    args = parser.parse_args()
    shared = next(p for p in (Path(args.shared or "."), ROOT.parent / "shared", ROOT.parent.parent / "shared")
                  if (p / "published" / "training_llm.csv").is_file())  # fmt: skip
    data, started = Data(shared / "published" / "training_llm.csv"), time.perf_counter()
    if args.left_out:
        return cross_validate(data, args.rounds)
    joint = Joint(data, list(relatives(data)))
    x, _ = fit(data, args.rounds, joint=joint)
    found = errors(data, joint, x, np.ones(len(data.cases), bool))
    for number, group in enumerate(joint.groups):
        if (members := joint.of == number).any():
            shown = " ".join(f"{k}={v:.3g}" for k, v in unpack(x[number]).items())
            print(f"{group.stack:22s} {group.device:16s} {score(found[members])}  {shown}", flush=True)
    for stack in sorted({group.stack for group in data.groups}) if args.write else ():
        write(data, joint, x, stack, found)
    print(f"all: {score(found)} ({time.perf_counter() - started:.0f} s)")
    return None


if __name__ == "__main__":
    main()
