"""How far two measurements of one call lie apart: products and attention drawn as blind samples are, timed twice.

    python benchmarks/record_repeats.py --out DIR [--seed 6081] [--seconds 26]      on the GPU
    python benchmarks/record_repeats.py --read data/recordings/h200/repeats_seed6081.jsonl.gz

Every reading between events is kept (nanoseconds, the L2 flushed before each), so that medians, means and parts of the
readings can be compared; the second time comes in another order, after all of the first. Kernels are profiled once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from record_products import between_events_ms

from ridgeline.bench.sampling import Point
from ridgeline.bench.surveys import general_points

KINDS = ("gemm", "bmm", "attention")
CHUNK, REPEATS = 60, 60
LATE_US = 4.0  # events that read so much more than kernels took waited for the host (``bench/fitting.py``)
NAME = "repeats.jsonl.gz"


def points(seed: int) -> list[Point]:
    """More than the time allows for, in random order, forward alone."""
    found = [point for point in general_points(seed, 1.0) if point.kind in KINDS and point.phase == "fwd"]
    random.Random(seed).shuffle(found)
    return found


def readings(run: Callable[[], Any], flush: Any) -> list[int]:
    """Nanoseconds between events around each of sixty calls, as ``bench/clock.py`` takes them."""
    import torch

    for _ in range(20):
        run()
    torch.cuda.synchronize()
    return [round(1e6 * ms) for ms in between_events_ms(run, flush, REPEATS)]


def _timed(point: Point, flush: Any) -> dict[str, Any]:
    from ridgeline.bench.operators import make

    row: dict[str, Any] = asdict(point)
    try:
        row["readings_ns"] = readings(make(point.kind, point.dtype, point.phase, point.library, point.shape), flush)
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = str(error).split("\n")[0][:200]
    return row


def record(path: Path, seed: int, seconds: float) -> None:
    from ridgeline.bench.clock import Clock
    from ridgeline.bench.environment import environment
    from ridgeline.bench.record import _add_kernels

    clock, began, todo = Clock(), time.monotonic(), points(seed)
    done: list[Point] = []
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        for start in range(0, len(todo), CHUNK):
            if time.monotonic() - began > 0.55 * seconds:
                break
            chunk = todo[start : start + CHUNK]
            rows = [_timed(point, clock.flush) for point in chunk]
            _add_kernels(chunk, rows, clock)
            out.writelines(json.dumps(row) + "\n" for row in rows)
            out.flush()
            done += [point for point, row in zip(chunk, rows, strict=True) if "error" not in row]
        print(f"{len(done)} calls once, {time.monotonic() - began:.0f} s", flush=True)
        random.Random(seed + 1).shuffle(done)
        for point in done:
            if time.monotonic() - began > seconds:
                break
            out.write(json.dumps({**_timed(point, clock.flush), "again": 1}) + "\n")
            out.flush()
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


# Reading


def statistics_us(readings: list[int]) -> dict[str, float]:
    """What sixty readings may be summed up by, in microseconds."""
    ordered = np.sort(np.array(readings)) / 1e3
    quarter, tenth = len(ordered) // 4, len(ordered) // 10
    return {
        "median": float(np.median(ordered)),
        "mean of the middle half": float(ordered[quarter : len(ordered) - quarter].mean()),
        "mean": float(ordered.mean()),
        "tenth percentile": float(ordered[tenth]),
    }


def pairs_in(path: Path) -> list[tuple[dict[str, Any], dict[str, float], dict[str, float]]]:
    """Each call with its first and second measurement, but for those that waited for the host."""
    with gzip.open(path, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if "readings_ns" in row]
    again = {_name(row): statistics_us(row["readings_ns"]) for row in rows if "again" in row}
    found = []
    for row in rows:
        if "again" in row or "kernels" not in row or _name(row) not in again:
            continue
        kernels_us = sum(seconds for _, seconds in row["kernels"]) * 1e6 + 3.0 + 1.5 * (len(row["kernels"]) - 1)
        both = statistics_us(row["readings_ns"]), again[_name(row)]
        if all(side["median"] - kernels_us < LATE_US for side in both):
            found.append((row, *both))
    return found


def _name(row: dict[str, Any]) -> str:
    return json.dumps([row[part] for part in ("kind", "dtype", "library", "shape")], sort_keys=True)


def read(path: Path) -> None:
    """Mean and median difference of two measurements, by statistic and length."""
    pairs = pairs_in(path)
    for kinds in (("gemm", "bmm"), ("attention",)):
        for low, high in ((0, 12), (12, 1e9), (0, 1e9)):
            mine = [p for p in pairs if p[0]["kind"] in kinds and low <= p[1]["tenth percentile"] < high]
            for name in mine[0][1] if mine else ():
                off = [abs(one[name] / two[name] - 1) for _, one, two in mine]
                print(f"{kinds[0]:9s} {low}..{high:g} us n {len(mine):3d} {name:24s} mean {np.mean(off):.1%} "
                      f"median {np.median(off):.1%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--seed", type=int, default=6081)
    parser.add_argument("--seconds", type=float, default=26.0)
    options = parser.parse_args()
    if options.read:
        read(options.read)
        return
    if options.out is None:
        parser.error("--out DIR or --read FILE is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    record(options.out / NAME, options.seed, options.seconds)


if __name__ == "__main__":
    main()
