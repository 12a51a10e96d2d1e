"""What a norm whose rows the L2 is asked to keep leaves to the kernels after it.

    python benchmarks/l2_after.py --out results
    python benchmarks/l2_after.py --table data/recordings/h200/l2_after1.json.gz

A norm of 268 MB, then three reads of one buffer that fits in the L2: the third is fast where the second could settle
there. With rows that stay as usual, that leave first, and that the L2 is told to keep ("evict_last").
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROWS, COLS = 16384, 4096
ROUNDS = 15
WAYS = {"usual": {}, "rows first": {"reads": "evict_first"}, "rows kept": {"reads": "evict_last"},
        "results first": {"writes": "evict_first"},
        "rows kept, results first": {"reads": "evict_last", "writes": "evict_first"}}  # fmt: skip


def measured(way: dict[str, str], num_bytes: int) -> list[float]:
    """Median seconds of the three reads after a norm that runs this way."""
    import torch

    from ridgeline.kernels import rms_norm, tuning
    from ridgeline.kernels.rms_norm.config import held

    x = torch.randn(ROWS, COLS, device="cuda").bfloat16()
    weight = torch.ones(COLS, device="cuda", dtype=torch.bfloat16)
    buffer = torch.ones(num_bytes // 4, device="cuda")
    total = torch.empty((), device="cuda")
    found: list[list[float]] = []
    with tuning.forced("rms_norm.forward", replace(held(ROWS, COLS, 2), **way)):
        for _ in range(ROUNDS):
            rms_norm(x, weight, 1e-6)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            torch.cuda._sleep(400_000)
            rms_norm(x, weight, 1e-6)
            marks[0].record()
            for mark in marks[1:]:
                torch.sum(buffer, dim=0, out=total)
                mark.record()
            torch.cuda.synchronize()
            found.append([a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)])
    return [statistics.median(values) for values in zip(*found, strict=True)]


def shown(row: dict[str, Any]) -> str:
    reads = " ".join(f"{1e6 * s:7.1f} us" for s in row["reads_s"])
    return f"{row['bytes'] >> 20} MiB {row['way']:26s} {reads}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path, help="a recording to print")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(map(shown, json.loads(gzip.decompress(asked.table.read_bytes())))))
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for megabytes in (16, 32, 44):
        for name, way in WAYS.items():
            reads = measured(way, megabytes << 20)
            rows.append({"way": name, "bytes": megabytes << 20, "reads_s": reads})
            print(shown(rows[-1]), flush=True)
    (asked.out / "l2_after.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))


if __name__ == "__main__":
    main()
