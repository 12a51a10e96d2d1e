"""Record which kernels libraries choose, for many shapes at a run or three each; and a fresh sample to judge by.

    python -m lab.record.choices --out DIR [--section choices] [--budget-s 190] [--seed 5]     on the GPU
    python -m lab.record.choices --out DIR --section blind [--budget-s 55] [--seed 2001]       on the GPU
    python -m lab.record.choices --file DIR --section … [--device h200] [--seed …]             afterwards

``choices`` records kernels and their durations alone (L2 flushed before each run), two to three times as many shapes
a second as a calibration does, in random order so that a cut budget is a fair sample. ``blind`` records as a
calibration does, events included; nobody looks into it, and nothing is fitted on it.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab import ROOT

CHUNK, RUNS = 120, 3
SLOW_S = 0.05
"""An operator slower than this is left out: three runs of it cost as much as ten others."""


def record_choices(path: Path, seed: int, budget_s: float, device: str = "cuda") -> None:
    from lab.record.surveys import choice_points

    todo = list(choice_points(seed))
    random.Random(seed + 1).shuffle(todo)
    record_points(path, todo, seed, budget_s, device)


def record_points(path: Path, todo: list[Any], seed: int, budget_s: float, device: str = "cuda") -> None:
    """Kernels and durations of these points, in this order, until the time is up."""
    from ridgeline.bench.environment import environment

    began, done, kept = time.perf_counter(), 0, 0
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        for chunk in _chunks(todo):
            left_s = budget_s - (time.perf_counter() - began)
            if left_s <= 0:
                break
            try:
                rows = _chunk(chunk, time.perf_counter() + left_s, device)
            except RuntimeError as error:
                print("chunk lost:", str(error).splitlines()[0][:200], flush=True)
                _free()
                continue
            for row in rows:
                out.write(json.dumps(row) + "\n")
            out.flush()
            done, kept = done + len(chunk), kept + sum("kernels" in row for row in rows)
            print(f"{done}/{len(todo)} shapes, {kept} kept, {time.perf_counter() - began:.0f} s", flush=True)


def _chunks(todo: list[Any]) -> Iterator[list[Any]]:
    return (todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK))


def _free() -> None:
    import torch

    torch.cuda.empty_cache()


def _chunk(chunk: Any, until: float, device: str) -> list[dict[str, Any]]:
    """Every point of a chunk run under one profile, those left out for time or refused marked so."""
    import torch

    from ridgeline.bench.clock import FLUSH_BYTES, kernels_of
    from ridgeline.bench.operators import make

    rows, recorded = [asdict(point) for point in chunk], []
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def runs() -> Iterator[Callable[[], Any]]:
        for at, point in enumerate(chunk):
            if time.perf_counter() > until:
                rows[at]["error"] = "out of time"
                continue
            try:
                run = make(point.kind, point.dtype, point.phase, point.library, point.shape, device)
                once_s = _once_s(run)
            except (RuntimeError, NotImplementedError) as error:
                rows[at]["error"] = (str(error).splitlines() or [""])[0][:200]
                _free()
                continue
            if once_s > SLOW_S:
                rows[at] |= {"error": "slow", "once_s": once_s}
                continue
            recorded.append(at)
            for _ in range(RUNS):
                flush.zero_()
                yield run

    stretches = kernels_of(runs())
    if len(stretches) != RUNS * len(recorded):
        raise RuntimeError(f"{len(stretches)} stretches for {len(recorded)} shapes")
    from ridgeline.bench.record import _medians

    for place, at in enumerate(recorded):
        rows[at]["kernels"] = _medians(stretches[RUNS * place : RUNS * (place + 1)])
    return rows


def _once_s(run: Callable[[], Any]) -> float:
    """Seconds of a second run: the first one chooses and loads kernels."""
    import torch

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def record_blind(path: Path, seed: int, budget_s: float, scale: float) -> None:
    from lab.record.surveys import general_points
    from ridgeline.bench.record import record_operators

    record_operators(path, seed, budget_s, 1.0, functools.partial(print, flush=True), general_points(seed, scale))


NAMES = {"choices": "operators", "blind": "blind"}


def file_away(source: Path, section: str, device: str, seed: int) -> None:
    """Put what was recorded where fits and judges look for it."""
    folder = ROOT / "data" / "recordings" / device
    with gzip.open(source / f"{section}.jsonl.gz", "rt") as lines:
        text = "".join(lines)
    with gzip.GzipFile(folder / f"{NAMES[section]}_seed{seed}.jsonl.gz", "wb", mtime=0) as out:
        out.write(text.encode())
    print(section, text.count("\n"), "lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--section", default="choices", choices=tuple(NAMES))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--budget-s", type=float)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the blind sample's shapes")
    options = parser.parse_args()
    blind = options.section == "blind"
    seed = options.seed if options.seed is not None else 2001 if blind else 5
    if options.file:
        file_away(options.file, options.section, options.device, seed)
        return
    if options.out is None:
        parser.error("--out DIR or --file DIR is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    path, budget_s = options.out / f"{options.section}.jsonl.gz", options.budget_s or (55.0 if blind else 190.0)
    if blind:
        record_blind(path, seed, budget_s, options.scale)
    else:
        record_choices(path, seed, budget_s)


if __name__ == "__main__":
    main()
