"""The steps of attention's backward pass that docs/guide/attention.md tells of, measured again on the GPU at hand.

    python benchmarks/attention_ladder.py [--rows 4096 8192]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from race_attention import force_fused, gradients, theirs

from ridgeline.bench.race import Course
from ridgeline.kernels import attention
from ridgeline.kernels.attention import config
from ridgeline.kernels.launcher import forget_plans


def by_keys(keys: int, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same with dQ's keys in blocks of this size."""
    before = config.queries

    def inner() -> Any:
        config.queries = lambda *sizes: replace(before(*sizes), keys=keys)
        forget_plans()
        try:
            return run()
        finally:
            config.queries = before

    return inner


def climb(rows: int, causal: bool) -> dict[str, float]:
    """TFLOP/s of every step at 64 query and 8 key heads of 128; plans are made anew outside of what is timed."""
    course = Course(torch.device("cuda"), rounds=9)
    draw = [torch.randn(1, heads, rows, 128, device="cuda", dtype=torch.bfloat16) for heads in (64, 8, 8, 64)]
    leaves = tuple(x.requires_grad_() for x in draw[:3])
    steps = {
        "two kernels": gradients(attention(*leaves, causal), leaves, draw[3]),
        "fused": gradients(attention(*leaves, causal, deterministic=False), leaves, draw[3]),
        "cudnn": gradients(theirs(*leaves, causal, "CUDNN_ATTENTION")(), leaves, draw[3]),
    }
    found = course.turns(steps)
    by_keys(64, steps["two kernels"])()
    found["two kernels, 64 keys"] = course.turns({"": steps["two kernels"]})[""]
    forget_plans()
    flops = 10 * 64 * rows * rows * 128 * (0.5 if causal else 1.0)
    return {name: flops / statistics.median(took) / 1e12 for name, took in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192])
    options = parser.parse_args()
    force_fused()
    for rows in options.rows:
        for causal in (True, False):
            found = {name: round(rate) for name, rate in climb(rows, causal).items()}
            print(rows, "causal" if causal else "full", found, flush=True)


if __name__ == "__main__":
    main()
