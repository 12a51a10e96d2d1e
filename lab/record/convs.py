"""Times convolutions between events, forward and backward, with the host kept ahead: what overlaps is counted once.

    python -m lab.record.convs --out FOLDER [--seconds 60] [--seed 4001]

Groups run one after another are put on several streams, so that the sum of their kernels' durations is up to five
times what passes between two events. A spin before the first event lets the host enqueue everything first. Writes
``FOLDER/convs_seed*.jsonl.gz``, a row a shape and phase; ``--dry`` draws the shapes and measures nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.record import surveys

SPIN_CYCLES = 2_500_000
REPEATS = 4
FLUSH_BYTES = 256 * 2**20


def shapes(seed: int) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Dense, depthwise and grouped by turns, as networks have them and free; type, sort and dimensions."""
    rng = random.Random(seed)
    while True:
        for sort in ("dense", "grouped", "dense", "depthwise", "dense", "grouped", "dense"):
            drawn = (surveys._conv_shape if rng.random() < 0.5 else surveys._free_conv_shape)(rng, sort)
            if drawn is None:
                continue
            drawn["nhwc"] = int(rng.random() < 0.4)
            dtype = rng.choices(("bf16", "fp16", "tf32", "fp32"), (60, 12, 14, 14))[0]
            out = -(-drawn["h"] // drawn["stride"]) * -(-drawn["w"] // drawn["stride"])
            flops = 2.0 * drawn["n"] * out * drawn["o"] * (drawn["c"] // drawn["groups"]) * drawn["k"] ** 2
            if flops < (4e10 if dtype == "fp32" else 1.5e11):
                yield dtype, sort, drawn


def between_events(run: Callable[[], Any], flush: Any) -> list[float]:
    import torch

    found = []
    for _ in range(REPEATS):
        flush.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e-3)
    return found


def passes(dtype: str, d: dict[str, int]) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    form = torch.channels_last if d["nhwc"] else torch.contiguous_format
    x = torch.randn(d["n"], d["c"], d["h"], d["w"], device="cuda", dtype=kind).to(memory_format=form)
    w = torch.randn(d["o"], d["c"] // d["groups"], d["k"], d["k"], device="cuda", dtype=kind).to(memory_format=form)
    pad = d["k"] // 2
    y = F.conv2d(x, w, None, d["stride"], pad, 1, d["groups"])
    grad = torch.randn_like(y)
    args = (None, [d["stride"]] * 2, [pad] * 2, [1, 1], False, [0, 0], d["groups"], [True, True, False])
    return {
        "fwd": lambda: F.conv2d(x, w, None, d["stride"], pad, 1, d["groups"]),
        "bwd": lambda: torch.ops.aten.convolution_backward.default(grad, x, w, *args),
    }


def record(seed: int, seconds: float, out: Path) -> int:
    import torch

    flush, end, count = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda"), time.monotonic() + seconds, 0
    with gzip.open(out / f"convs_seed{seed}.jsonl.gz", "wt") as file:
        file.write(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "seed": seed,
                               "device": torch.cuda.get_device_name()}) + "\n")  # fmt: skip
        for dtype, _, shape in shapes(seed):
            if time.monotonic() > end:
                return count
            torch.backends.cudnn.allow_tf32 = dtype == "tf32"
            row = {"kind": "conv2d", "dtype": dtype, "library": "cudnn", "shape": shape}
            try:
                for phase, run in passes(dtype, shape).items():
                    run()
                    times = between_events(run, flush)
                    file.write(json.dumps({**row, "phase": phase, "cold_s": statistics.median(times),
                                           "cold_low_s": min(times), "cold_high_s": max(times)}) + "\n")  # fmt: skip
                    count += 1
            except RuntimeError as error:
                file.write(json.dumps({**row, "error": str(error)[:200]}) + "\n")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=4001)
    parser.add_argument("--dry", action="store_true", help="draw shapes, measure nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.dry:
        drawn = shapes(args.seed)
        print(*(next(drawn) for _ in range(5)), sep="\n")
        return
    print(f"{record(args.seed, args.seconds, args.out)} rows in {args.out}")


if __name__ == "__main__":
    main()
