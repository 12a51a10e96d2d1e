"""Calls to learn from, many and quickly: attention, norms, sums, sorts and the like, drawn as blind samples are.

    python -m lab.record.calls --out DIR [--seed 6061] [--seconds 55]      on the GPU
    python -m lab.record.calls --file DIR [--device h200] [--seed 6061]    afterwards

Times are taken as in other recordings (events around a call, the L2 flushed before each, kernels by the profiler), with
medians of fifteen instead of sixty. Rows are written as they come, in random order: a cut is a fair sample.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.record.surveys import general_points
from ridgeline.bench.sampling import Point
from ridgeline.cost.correction.rows import KINDS

CHUNK = 60
SCALE = 6.0
NAME = "calls.jsonl.gz"


def points(seed: int) -> list[Point]:
    """More than a minute can time."""
    found = [point for point in general_points(seed, SCALE) if point.kind in KINDS]
    random.Random(seed).shuffle(found)
    return found


def _timed(point: Point, clock: Any) -> dict[str, Any]:
    from ridgeline.bench.operators import make

    row: dict[str, Any] = asdict(point)
    try:
        run = make(point.kind, point.dtype, point.phase, point.library, point.shape)
        run()
        if point.phase == "fwd":
            cold = clock.cold(run, 0.0005, 0.01, 15)
            row |= {"cold_s": cold.median_s, "cold_low_s": cold.low_s, "cold_high_s": cold.high_s, "num": cold.num}
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = str(error).split("\n")[0][:200]
    return row


def record(path: Path, seed: int, seconds: float) -> None:
    from ridgeline.bench.clock import Clock
    from ridgeline.bench.environment import environment
    from ridgeline.bench.record import _add_kernels

    clock, end, kept, todo = Clock(), time.monotonic() + seconds, 0, points(seed)
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        for start in range(0, len(todo), CHUNK):
            if time.monotonic() > end:
                break
            chunk = todo[start : start + CHUNK]
            rows = [_timed(point, clock) for point in chunk]
            _add_kernels(chunk, rows, clock)
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            kept += len(rows)
            print(f"{kept} calls, {end - time.monotonic():.0f} s left", flush=True)


def file_away(source: Path, device: str, seed: int) -> None:
    """Put what was timed where fits look for it."""
    folder = ROOT / "data" / "recordings" / device
    text = gzip.decompress((source / NAME).read_bytes())
    with gzip.GzipFile(folder / f"operators_seed{seed}.jsonl.gz", "wb", mtime=0) as out:
        out.write(text)
    print(text.count(b"\n"), "lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seed", type=int, default=6061)
    parser.add_argument("--seconds", type=float, default=55.0)
    options = parser.parse_args()
    if options.file:
        file_away(options.file, options.device, options.seed)
        return
    if options.out is None:
        parser.error("--out DIR or --file DIR is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    record(options.out / NAME, options.seed, options.seconds)


if __name__ == "__main__":
    main()
