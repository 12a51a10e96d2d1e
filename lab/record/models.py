"""Measure whole models on this machine's GPU: busy time, wall time, peak memory, power; eager and compiled.

python -m lab.record.models --out models.jsonl.gz [--only NAME,…] [--compiled-s SECONDS]
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lab.workloads import WORKLOADS, Workload
from ridgeline.bench.clock import device_events
from ridgeline.bench.environment import environment
from ridgeline.bench.power import Board, sustained


def scalar(output: Any) -> torch.Tensor:
    """What ``capture`` differentiates too: the model's own loss, else the mean of its first tensor."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    first = output if isinstance(output, torch.Tensor) else output[0]
    return first.float().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-5),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-5),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=1e-5, momentum=0.9),
}


def step_of(work: Workload, model: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    cache = kwargs.get("past_key_values")
    if work.mode == "infer":

        def infer() -> None:
            with torch.no_grad():
                model(*args, **kwargs)
            if cache is not None:
                cache.crop(-1)

        return infer
    optimizer = OPTIMIZERS[str(work.optimizer)](model.parameters())

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        scalar(model(*args, **kwargs)).backward()
        optimizer.step()

    return train


def measure(step: Callable[[], None], board: Board, power_s: float) -> dict[str, Any]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    synced = []
    for _ in range(8):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        synced.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "wall_s": statistics.median(synced),
        "base_bytes": base,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    found |= kernels(step)
    if power_s:
        loop = sustained(step, board, power_s, 0.5)
        found |= {"loop_s": loop.iteration_s, "power_w": loop.power_w, "clock_hz": loop.clock_hz}
    return found


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    events = device_events(prof)
    third = len(events) // 3
    return {
        "busy_s": sum(e[2] for e in events) / 3,
        "num_kernels": third,
        "kernels": [[e[1][:110], round(e[2] * 1e6, 2)] for e in events[-third:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--compiled", default="", help="names to compile; default: those marked so")
    parser.add_argument("--compiled-s", type=float, default=300.0)
    parser.add_argument("--power-s", type=float, default=1.2)
    parser.add_argument("--budget-s", type=float, default=560.0)
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    names = options.only.split(",") if options.only else list(WORKLOADS)
    compiled_names = options.compiled.split(",") if options.compiled else [n for n in names if WORKLOADS[n].compiled]
    began, compiled_s, board = time.perf_counter(), 0.0, Board()
    with gzip.open(options.out, "wt") as out:
        out.write(json.dumps({"environment": environment(), "date": time.strftime("%Y-%m-%d")}) + "\n")
        for wants_compiled in (False, True):
            for name in compiled_names if wants_compiled else names:
                work = WORKLOADS[name]
                if (
                    wants_compiled and compiled_s > options.compiled_s
                ) or time.perf_counter() - began > options.budget_s:
                    continue
                at = time.perf_counter()
                row: dict[str, Any] = {"name": name, "execution": "compiled" if wants_compiled else "eager"}
                try:
                    with torch.device("cuda"):  # only while building: a default device slows every eager call
                        model, args, kwargs = work.build()
                    model.train(work.mode == "train")
                    if wants_compiled:
                        torch._dynamo.reset()
                        model = torch.compile(model)
                    row |= measure(step_of(work, model, args, kwargs), board, options.power_s)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
                if wants_compiled:
                    compiled_s += time.perf_counter() - at
                out.write(json.dumps(row) + "\n")
                out.flush()
                shown = {k: (f"{v:.4g}" if isinstance(v, float) else v) for k, v in row.items() if k != "kernels"}
                print(f"{time.perf_counter() - began:.0f}s ({time.perf_counter() - at:.0f})", shown, flush=True)
                model = args = kwargs = None
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
