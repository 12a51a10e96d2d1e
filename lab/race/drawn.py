"""The common command line of races on shapes drawn from a seed: `lab/race/drawn_rows.py` and
`lab/race/drawn_families.py`. Each of these scripts draws shapes, compiles, warms up, measures and prints a table.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def command(room: Any, names: tuple[str, ...], num: int, budget_s: float) -> None:
    asked = _arguments(room, names, num, budget_s)
    sys.path[:0] = asked.path
    chosen = tuple(asked.names.split(","))
    if asked.table:
        return print("\n".join(room.table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        made = pack.write(asked.pack, room.wanted_variants(asked.seed, asked.num, chosen), jobs=asked.jobs)
        return print(f"{len(made.entries)} kernels in {time.perf_counter() - room.BEGAN:.0f} s")
    if asked.warm and asked.part < 0:
        given = ["--seed", str(asked.seed), "--num", str(asked.num), "--names", asked.names]
        given += ["--real"] if asked.real else []
        return _warm_all(sys.argv[0], [*given, *(f"--path={folder}" for folder in asked.path)], asked.jobs)
    if asked.warm:
        return room.warm(asked.seed, asked.num, chosen, asked.part, asked.jobs)
    room.measure(asked, chosen)


def _arguments(room: Any, names: tuple[str, ...], num: int, budget_s: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=room.__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=num, help="shapes of a function")
    parser.add_argument("--names", default=",".join(names))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=budget_s)
    parser.add_argument("--path", action="append", default=[], help="folder for the import path, for Liger")
    parser.add_argument("--pack", type=Path, help="compile what these shapes need into this folder, and time nothing")
    parser.add_argument("--warm", action="store_true", help="run Liger on a few rows of every shape, and time nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--part", type=int, default=-1)
    parser.add_argument("--real", action="store_true", help="shapes of published models (race_random.py)")
    return parser.parse_args()


def _warm_all(script: str, arguments: list[str], jobs: int) -> None:
    """Start as many processes as asked for, each with its part of the shapes."""
    runs = [subprocess.Popen([sys.executable, script, "--warm", *arguments, "--part", str(i), "--jobs", str(jobs)])
            for i in range(jobs)]  # fmt: skip
    for run in runs:
        run.wait()
