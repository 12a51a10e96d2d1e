"""Fit the software costs of compiled serving engines to published runs; one set an engine and architecture.

    python -m lab.fit.serving ../shared/published --group trtllm-engine/hopper [--rows 44] [--rounds 3] [--write]
    python -m lab.fit.serving ../shared/published --all --write

Rows are drawn at random from inference_llm.csv. A robust Gauss-Newton search moves ten coefficients away from physical
starting values, each held by a prior, so that what no row depends on stays where it began. Leaving out one model at a
time, with the same derivatives, says how well a set carries over to models it has not seen. A row takes about 30 ms, a
group one to three minutes. Engines that were served under load are fitted together by fit_engines.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import RidgelineError
from ridgeline.resources import data_dir
from ridgeline.sim.serving.engine import COEFFICIENTS, DEFAULTS, engine
from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import Deployment, simulate
from ridgeline.sim.serving.workload import Workload
from ridgeline.validation import inference_llm
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Row

Floats = NDArray[np.float64]
LATER = ("rank_s", "draft_s", "gemm_many", "experts_many", "link_many")  # of engines that were served
NAMES = tuple(name for name in COEFFICIENTS if name not in LATER)
OFFLINE = ("request_s", "token_s")  # what runs without a server do not show
SPREAD = {
    "gemm": 0.35, "experts": 0.35, "decode": 0.4, "prefill": 0.4, "link": 0.4, "kernel_s": 0.6, "iteration_s": 1.0,
    "sequence_s": 1.5, "mixed_s": 1.5, "call_s": 1.0, "request_s": 1.0, "token_s": 1.5,
}  # fmt: skip
BOUNDS = {
    "gemm": (0.6, 2.5), "experts": (0.4, 2.5), "decode": (0.5, 3), "prefill": (0.4, 3), "link": (0.4, 3),
    "kernel_s": (2e-7, 6e-6), "iteration_s": (2e-5, 1e-2), "sequence_s": (1e-8, 5e-5), "mixed_s": (1e-5, 5e-2),
    "call_s": (2e-6, 1.5e-4), "request_s": (2e-3, 0.3), "token_s": (1e-8, 2e-5),
}  # fmt: skip
COMPILED = ("fastertransformer/ampere", "trtllm-engine/ampere", "trtllm-engine/ada", "trtllm-engine/hopper")
SHARED_START = {"link": 1.3}  # as of engines that were served, which is where sets without rows stay
START = {"fastertransformer": {"call_s": 5e-6, "mixed_s": 2e-4, "sequence_s": 3e-7}}
STEP, SOFT, PRIOR = 0.08, 0.12, 0.02


@dataclass(frozen=True)
class Sample:
    """One published run: how to simulate it, what was measured, and how the simulation compares."""

    key: str
    model: str
    deployment: Deployment
    workload: Workload
    compare: Callable[[Deployment], tuple[float, ...]]


def compiled_samples(folder: Path, group: str) -> list[Sample]:
    name, _, arch = group.partition("/")
    found = []
    for line, record in read_table(folder / "inference_llm.csv")[1]:
        row = Row(line, record)
        try:
            case = inference_llm.case_of(row)
        except (RidgelineError, ValueError):
            continue
        if case.deployment.engine.name == name and case.deployment.device.arch == arch:
            compare = lambda d, case=case: _offline(d, case)
            found.append(Sample(row.text("config_id"), row.text("model"), case.deployment, case.workload, compare))
    return found


def _offline(deployment: Deployment, case: inference_llm.Case) -> tuple[float]:
    coef = {**deployment.engine.coef, **dict.fromkeys(OFFLINE, 0.0)}
    made = replace(deployment, engine=replace(deployment.engine, coef=coef))
    return (float(np.log(inference_llm.seconds_of(case, metrics(simulate(made, case.workload))) / case.measured_s)),)


def errors(samples: Sequence[Sample], names: Sequence[str], x: Floats, base: dict[str, float]) -> Floats:
    """Weighted log errors, a row a sample; what cannot be simulated is not a number."""
    coef = {**base, **dict(zip(names, np.exp(x).tolist(), strict=True))}
    rows = []
    for sample in samples:
        made = replace(sample.deployment, engine=replace(sample.deployment.engine, coef=coef))
        try:
            rows.append(sample.compare(made))
        except RidgelineError:
            rows.append((np.nan,))
    width = max(len(row) for row in rows)
    return np.array([row if len(row) == width else (np.nan,) * width for row in rows])


@dataclass
class Fit:
    """A search under way: the samples, the coefficients in logarithms and their pull."""

    samples: list[Sample]
    names: list[str]
    base: dict[str, float]
    start: Floats
    x: Floats
    rest: Floats
    slope: Floats

    def pull(self, x: Floats) -> Floats:
        spread = np.array([SPREAD[name] for name in self.names])
        return (x - self.start) / spread

    def cost(self, rest: Floats, x: Floats) -> float:
        soft = 2 * SOFT**2 * (np.sqrt(1 + (rest / SOFT) ** 2) - 1)
        return float(soft.sum() + 0.5 * PRIOR * (self.pull(x) ** 2).sum())

    def step(self, rest: Floats, slope: Floats, x: Floats, damping: float) -> Floats:
        spread = np.array([SPREAD[name] for name in self.names])
        weight = 1 / np.sqrt(1 + (rest / SOFT) ** 2)
        matrix = (slope * weight[:, None]).T @ slope + np.diag(PRIOR * (1 + damping) / spread**2)
        gradient = (slope * weight[:, None]).T @ rest + PRIOR * self.pull(x) / spread
        low, high = (np.log([BOUNDS[name][i] for name in self.names]) for i in (0, 1))
        return np.clip(np.clip(x - np.linalg.solve(matrix, gradient), x - 0.8, x + 0.8), low, high)


def fit(group: str, samples: list[Sample], rounds: int) -> Fit:
    name = group.partition("/")[0]
    names = [n for n in NAMES if n not in OFFLINE]
    base = {**DEFAULTS, **SHARED_START, **START.get(name, {})}
    known = engine(name, samples[0].deployment.device).coef
    start = np.log([base[n] for n in names])
    x = np.log([known[n] for n in names])
    found = errors(samples, names, x, base)
    usable = np.isfinite(found).all(axis=1)
    samples = [sample for sample, good in zip(samples, usable, strict=True) if good]
    state = Fit(samples, names, base, start, x, found[usable], np.zeros(0))
    print(f"{group}: {len(samples)} rows, {told(state.rest)}", flush=True)
    damping = 1.0
    for _ in range(rounds):
        state.slope = _slope(state)
        flat = state.rest.ravel()
        before = state.cost(flat, state.x)
        for _ in range(4):
            tried = state.step(flat, state.slope, state.x, damping)
            rest = errors(state.samples, names, tried, base)
            if np.isfinite(rest).all() and state.cost(rest.ravel(), tried) < before:
                state.x, state.rest, damping = tried, rest, damping / 5
                break
            damping *= 6
        print(f"  {told(state.rest)}", flush=True)
        if before - state.cost(state.rest.ravel(), state.x) < 0.003 * before:
            break
    if not rounds:
        state.slope = _slope(state)
    return state


def _slope(state: Fit) -> Floats:
    columns = []
    for i in range(len(state.x)):
        moved = state.x.copy()
        moved[i] += STEP
        columns.append(((errors(state.samples, state.names, moved, state.base) - state.rest) / STEP).ravel())
    return np.stack(columns, axis=1)


def kept(group: str, samples: list[Sample]) -> Fit:
    """The coefficients that ship, with the derivatives of all rows around them."""
    return fit(group, samples, 0)


def left_out(state: Fit, names: Sequence[str] = ()) -> Floats:
    """Errors of every model (or whatever ``names`` says a row belongs to) under coefficients that were moved to fit
    all the others, by the last derivatives; with no others, the coefficients go back to where they began."""
    width = state.rest.shape[1]
    names_of = np.array(names or [sample.model for sample in state.samples])
    rest = state.rest.copy()
    for name in sorted(set(names_of)):
        others = np.repeat(names_of != name, width)
        if not others.any():
            begun = errors(state.samples, state.names, state.start, state.base)
            rest[:] = np.where(np.isfinite(begun), begun, rest)
            continue
        x, flat = state.x.copy(), state.rest.ravel().copy()
        for _ in range(6):
            tried = state.step(flat[others], state.slope[others], x, 0.0)
            flat = state.rest.ravel() + state.slope @ (tried - state.x)
            x = tried
        rest[names_of == name] = flat.reshape(-1, width)[names_of == name]
    return rest


def told(rest: Floats) -> str:
    """Mean and median absolute errors in words."""
    missed = np.abs(np.expm1(rest[:, 0]))
    return f"time mean {missed.mean():.1%} median {np.median(missed):.1%}"


def _title(group: str) -> str:
    name = group.partition("/")[0]
    return f'"{name}"' if "." in name else name


def write(group: str, state: Fit) -> None:
    """Replace the group's table in data/engines.toml."""
    path = data_dir() / "engines.toml"
    arch = group.partition("/")[2]
    lines = [f"{n} = {float(f'{v:.3g}')!r}" for n, v in zip(state.names, np.exp(state.x), strict=True)]
    width = float(np.quantile(np.abs(state.rest[:, -1]), 0.9))
    title = _title(group)
    text = f"[{title}.coef.{arch}]\n" + "\n".join(lines) + f"\nwidth = {width:.2f}\n"
    whole = path.read_text()
    pattern = rf"\[{re.escape(title)}\.coef\.{arch}\]\n(?:[a-z_]+ = .*\n)*"
    if re.search(pattern, whole):
        path.write_text(re.sub(pattern, text, whole))
    else:
        path.write_text(f"{whole.rstrip()}\n\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path)
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rows", type=int, default=44)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for group in COMPILED if options.all else options.group:
        made = compiled_samples(options.published, group)
        np.random.default_rng(options.seed).shuffle(made)  # type: ignore[arg-type]
        state = fit(group, made[: options.rows], options.rounds)
        print(f"  models left out one at a time: {told(left_out(state))}")
        print("  " + ", ".join(f"{n} {v:.3g}" for n, v in zip(state.names, np.exp(state.x), strict=True)), flush=True)
        if options.write:
            write(group, state)


if __name__ == "__main__":
    main()
