"""One round on the GPU: a fresh blind sample, Inductor's kernels among it; convolutions and products to learn from.

    python -m lab.record.blind_round --out DIR [--seed 6003] [--parts blind,compiled,convs,products] [--seconds 40]
    python -m lab.record.blind_round --file DIR --seed 6003 [--device h200]                          afterwards

``blind`` draws every kind that ``validate`` promises (``surveys.py``), and convolutions of all sorts once more,
since a hundred of them say little; single precision there is as PyTorch leaves it, rounded to tf32. Nothing is fitted
on it. ``convs`` are many convolutions, mostly of the sorts that are told badly. Convolutions of both parts are run for
the time from the first kernel's start to the last one's end as well: groups run beside each other. ``products`` are
those of ``lab/record/products.py``. Everything comes back as one file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.record import surveys
from ridgeline.bench import sampling
from ridgeline.bench.sampling import Point

PARTS = ("blind", "compiled", "convs", "products")
CHUNK, RUNS = 100, 3
SLOW_S = 0.02
GROUPS_FROM = 7000  # seeds above draw groups more often than not
SPIN_CYCLES = 700_000  # the host gets 0.4 ms ahead; four times that where groups are launched one by one


def blind_points(seed: int, scale: float) -> list[Point]:
    """What somebody might check, and as many convolutions again."""
    return [*surveys.general_points(seed, scale), *surveys.convolution_points(seed, scale)]


def conv_points(seed: int) -> list[Point]:
    """Convolutions to learn from: full and rounded single precision and groups more often than networks have them."""
    rng, found = random.Random(seed), list[Point]()
    sorts = (30, 58, 12) if seed > GROUPS_FROM else (50, 35, 15)
    while len(found) < 4000:
        phase = "fwd" if rng.random() < 0.5 else "bwd"
        sort = rng.choices(("dense", "grouped", "depthwise"), sorts)[0]
        dtypes = (34, 8, 24, 34) if sort == "dense" else (50, 12, 12, 26)
        point = surveys._any_conv(phase, sort, dtypes, 6e10)(rng)
        if point is not None:
            found.append(point)
    return found


def record_convs(path: Path, todo: list[Point], seed: int, seconds: float) -> None:
    from ridgeline.bench.environment import environment

    end, kept = time.monotonic() + seconds, 0
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        for start in range(0, len(todo), CHUNK):
            if time.monotonic() > end:
                return
            try:
                rows = _chunk(todo[start : start + CHUNK], end)
            except RuntimeError as error:
                print("chunk lost:", str(error).splitlines()[0][:200], flush=True)
                continue
            for row in rows:
                out.write(json.dumps(row) + "\n")
            out.flush()
            kept += sum("kernels" in row for row in rows)
            print(f"{start + len(rows)} shapes, {kept} kept, {end - time.monotonic():.0f} s left", flush=True)


def _chunk(chunk: list[Point], end: float) -> list[dict[str, Any]]:
    """Every point of a chunk under one profile; those refused, too slow or out of time say so."""
    import torch

    from ridgeline.bench.clock import FLUSH_BYTES, device_events
    from ridgeline.bench.record import _medians

    rows, recorded = [asdict(point) for point in chunk], list[int]()
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for at, point in enumerate(chunk):
            run = _prepared(point, rows[at]) if time.monotonic() < end else None
            if run is None:
                continue
            recorded.append(at)
            for _ in range(RUNS):
                flush.zero_()
                torch.cuda._sleep(SPIN_CYCLES * (4 if 1 < point.shape["groups"] < point.shape["c"] else 1))
                run()
                torch.cuda._sleep(100)
        torch.cuda.synchronize()
    stretches = stretches_of(device_events(prof))
    if len(stretches) != RUNS * len(recorded):
        raise RuntimeError(f"{len(stretches)} stretches for {len(recorded)} shapes")
    for place, at in enumerate(recorded):
        mine = stretches[RUNS * place : RUNS * (place + 1)]
        rows[at]["kernels"] = _medians([[(name, s) for _, name, s in run] for run in mine])
        rows[at]["span_s"] = round(statistics.median(map(span_s, mine)), 9)
        if len(mine[-1]) > 3 and 1 < chunk[at].shape["groups"] < chunk[at].shape["c"]:
            rows[at]["timeline"] = timeline(mine[-1])
    return rows


def timeline(kernels: list[tuple[int, str, float]]) -> dict[str, list[Any]]:
    """One run's kernels as they lay beside each other: nanoseconds from the first start, and each name once."""
    names = sorted({name[:160] for _, name, _ in kernels})
    return {
        "names": names,
        "spans": [[names.index(name[:160]), at - kernels[0][0], round(s * 1e9)] for at, name, s in kernels],
    }


def _prepared(point: Point, row: dict[str, Any]) -> Callable[[], Any] | None:
    """A callable whose kernels are chosen and loaded, or None and the row says why."""
    import torch

    from ridgeline.bench.operators import make

    try:
        run = make(point.kind, point.dtype, point.phase, point.library, point.shape)
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once_s = time.perf_counter() - began
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = (str(error).splitlines() or [""])[0][:200]
        torch.cuda.empty_cache()
        return None
    if once_s > SLOW_S:
        row["error"] = "slow"
        return None
    return run


def stretches_of(events: list[tuple[int, str, float]]) -> list[list[tuple[int, str, float]]]:
    """(start in ns, name, seconds) of what ran between an opening and a closing marker, for each pair of them.

    What ran before the first opening marker of a shape (its first calls, flushes) is dropped.
    """
    from ridgeline.bench.clock import MARK

    found: list[list[tuple[int, str, float]]] = []
    inside = False
    for event in events:
        if MARK in event[1]:
            inside = not inside
            if inside:
                found.append([])
        elif inside:
            found[-1].append(event)
    return found


def span_s(kernels: list[tuple[int, str, float]]) -> float:
    """From the first kernel's start to the last end."""
    if not kernels:
        return 0.0
    return max(start * 1e-9 + s for start, _, s in kernels) - kernels[0][0] * 1e-9


def record(part: str, out: Path, seed: int, seconds: float, scale: float) -> None:
    from lab.record import products as record_products
    from ridgeline.bench.record import record_operators

    show = functools.partial(print, flush=True)
    path = out / f"{part}.jsonl.gz"
    if part == "blind":
        todo = blind_points(seed, scale)
        record_operators(path, seed, 45.0, 1.0, show, todo)
        record_convs(out / "spans.jsonl.gz", [point for point in todo if point.kind == "conv2d"], seed, 12.0)
    elif part == "compiled":
        record_operators(path, seed, 12.0, 1.0, show, sampling.points(seed, compiled=True))
    elif part == "convs":
        record_convs(path, conv_points(seed + 1), seed + 1, seconds)
    else:
        record_products.time_many(path, seed + 2, seconds / 2)


def everything(out: Path, parts: list[str], seed: int, seconds: float, scale: float) -> None:
    """A process for each part, so that an error of the device loses no other part; then one file of it all."""
    me = [sys.executable, "-m", __spec__.name, "--out", str(out), "--seed", str(seed)]
    for part in parts:
        began = time.monotonic()
        command = [*me, "--part", part, "--seconds", str(seconds), "--scale", str(scale)]
        try:
            subprocess.run(command, timeout=seconds + 50, check=False)
        except subprocess.TimeoutExpired:
            print(part, "ran out of time", flush=True)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    with tarfile.open(out / "round.tar", "w") as tar:
        for file in sorted(out.glob("*.jsonl.gz")):
            tar.add(file, file.name)
            file.unlink()


NAMES = {"blind": "blind_seed{0}", "compiled": "compiled_blind_seed{0}", "convs": "operators_seed{1}",
         "products": "operators_seed{2}"}  # fmt: skip


def file_away(source: Path, device: str, seed: int) -> None:
    """Put what was recorded where fits and judges look for it."""
    folder = ROOT / "data" / "recordings" / device
    with tarfile.open(source / "round.tar") as tar:
        for part, pattern in NAMES.items():
            if f"{part}.jsonl.gz" not in tar.getnames():
                continue
            text = _whole(tar.extractfile(f"{part}.jsonl.gz"))
            if part == "blind" and "spans.jsonl.gz" in tar.getnames():
                text = _with_spans(text, _whole(tar.extractfile("spans.jsonl.gz")))
            with gzip.GzipFile(folder / f"{pattern.format(seed, seed + 1, seed + 2)}.jsonl.gz", "wb", mtime=0) as out:
                out.write(text)
            print(part, text.count(b"\n"), "lines")


def _with_spans(text: bytes, spans: bytes) -> bytes:
    """Convolutions with the time from their first kernel's start to the last end, host ahead."""

    def key(row: dict[str, Any]) -> str:
        return json.dumps([row.get(name) for name in ("kind", "dtype", "phase", "shape")], sort_keys=True)

    known = {key(row): row["span_s"] for row in map(json.loads, spans.splitlines()) if "span_s" in row}
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [{**row, "span_s": known[key(row)]} if key(row) in known else row for row in rows]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _whole(packed: Any) -> bytes:
    """The lines of a file that a killed process may have cut short."""

    def lines() -> Iterator[bytes]:
        with gzip.open(packed) as file, contextlib.suppress(EOFError):
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    return b"".join(lines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seed", type=int, default=6003)
    parser.add_argument("--part", choices=PARTS, help="this one in this process")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of convolutions to learn from; half for products")
    parser.add_argument("--scale", type=float, default=0.4, help="share of the blind sample's shapes")
    options = parser.parse_args()
    if options.file:
        file_away(options.file, options.device, options.seed)
        return
    if options.out is None:
        parser.error("--out DIR or --file DIR is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        record(options.part, options.out, options.seed, options.seconds, options.scale)
    else:
        everything(options.out, options.parts.split(","), options.seed, options.seconds, options.scale)


if __name__ == "__main__":
    main()
