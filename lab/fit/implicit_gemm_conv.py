"""Fits the coefficients of ``cost/time/conv/implicit_gemm.py`` to single kernels of the recorded convolutions.

    python -m lab.fit.implicit_gemm_conv [--only tma.fwd,copy.fwd] [--out FILE]

Each recorded kernel is known by name and by the engine and knobs that cuDNN's heuristic gives for its shape
(``data/recordings/h200/cudnn_answers.jsonl.gz``, written by ``lab/record/cudnn_heuristic.py --recorded``). Prints the
error of each way and pass; ``--out`` has the coefficients, as they stand in ``cost/time/conv/conv.py``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab import ROOT
from lab.fit.conv import H200
from lab.fit.cudnn_choice import choice_of, shape_of
from ridgeline.cost.call import Call
from ridgeline.cost.time.conv import kernel_choice, problem
from ridgeline.cost.time.conv.implicit_gemm import VECTOR, Choice, Problem, implicit_s

RECORDINGS = ROOT / "data" / "recordings" / "h200"
NAMES = {"fwd": r"fprop|convolve", "dgrad": r"dgrad", "wgrad": r"_wgrad|wgrad_|ImplicitGemmConvolution|S_4conv"}
"""What the names of a pass's own kernels contain."""
OTHER = re.compile("nchwTo|nhwcTo|Padding|ransform|Slice|reduc|Memset|convertTensor|scalePacked|_ZN17.*S_9reduction")
PULL = 0.12  # how strongly a coefficient is held to where it stands, in logarithms


@dataclass(frozen=True, slots=True)
class Kernel:
    """One recorded kernel: the problem it solved, the choice it was, and its seconds."""

    problem: Problem
    choice: Choice
    dtype: str
    seconds: float


def rows() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Recorded calls with the heuristic's answer for one of their passes."""
    with gzip.open(RECORDINGS / "cudnn_answers.jsonl.gz", "rt") as lines:
        told = [json.loads(line) for line in lines]
    recorded: dict[str, list[dict[str, Any]]] = {}
    for name, place, answer in told:
        if name not in recorded:
            with gzip.open(RECORDINGS / name, "rt") as lines:
                recorded[name] = [json.loads(line) for line in lines]
        yield recorded[name][place], answer


def _seconds(row: dict[str, Any], op: str, choice: Choice) -> float:
    """The pass's own kernels; pieces of a large filter on vector units run beside each other."""
    found = [s for name, s in row["kernels"] if re.search(NAMES[op], name) and not OTHER.search(name)]
    if choice.way == "indexed" and op == "fwd":
        return max((s for _, s in row["kernels"]), default=0.0)
    return float(sum(found))


def kernels() -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    site = problem.Site(H200, problem.DEFAULTS, 0.0)
    for row, answer in rows():
        if "kernels" not in row or row["shape"].get("groups", 1) > 1:
            continue
        shape, (engine, knobs, _) = shape_of(*answer[:8]), answer[8]
        if shape.taps == 1 and shape.stride == 1 and shape.dtype != "fp32":
            continue  # a product of cuBLAS, most often
        choice = choice_of(shape.op, engine, knobs, shape.c if shape.op == "fwd" else shape.o)
        given = problem.conv_of_call(
            Call(row["kind"], row["dtype"], "fwd", "cudnn", tuple(row["shape"].items())), row["shape"]
        )
        seconds = _seconds(row, shape.op, choice)
        if seconds <= 0.0 or choice.way == "direct":
            continue
        if choice.way in VECTOR:
            taken, problem = kernel_choice.vector_choice(site, given, choice, shape.op)
        else:
            taken, problem = choice, kernel_choice.problem_of(site, given, choice, shape.op)
        found.setdefault(f"{choice.way}.{shape.op}", []).append(Kernel(problem, taken, row["dtype"], seconds))
    return found


def fit(group: str, given: list[Kernel]) -> dict[str, float]:
    from scipy.optimize import least_squares

    start = problem.pass_choice(problem.DEFAULTS, group)
    names = [name for name, value in start.items() if 1e-6 < value < 9e4]
    at, seconds = np.log([start[name] for name in names]), np.array([k.seconds for k in given])

    def logs(point: np.ndarray) -> np.ndarray:
        coef = {**start, **dict(zip(names, np.exp(point).tolist(), strict=True))}
        told = [implicit_s(H200, coef, k.problem, k.choice, k.dtype) for k in given]
        return np.log(np.array(told) / seconds)

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.concatenate([logs(point), (point - at) * PULL])

    best = least_squares(residuals, at, loss="soft_l1", f_scale=0.08, max_nfev=12, diff_step=0.03)
    off = np.abs(np.exp(logs(best.x)) - 1.0)
    before = np.abs(np.exp(logs(at)) - 1.0)
    print(
        f"{group:20s} n {len(given):4d}  mape {before.mean():.1%} -> {off.mean():.1%}  median {np.median(off):.1%}",
        flush=True,
    )
    return {**start, **{name: float(f"{value:.3g}") for name, value in zip(names, np.exp(best.x), strict=True)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ways and passes, such as tma.fwd, with commas")
    parser.add_argument("--out", type=Path, help="write the coefficients to this JSON file")
    args = parser.parse_args()
    given = kernels()
    groups = args.only.split(",") if args.only else sorted(g for g, k in given.items() if len(k) >= 20)
    found = {f"{group}.{name}": value for group in groups for name, value in fit(group, given[group]).items()}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
