"""The race with torch.compile(mode="max-autotune") taking part, compiled by several processes before the clock starts.

    python -m lab.race.compiled --out results --budget-s 170 --warm
    python -m lab.race.compiled --out results --budget-s 90 --race-s 25
    python -m lab.race.compiled --out results --budget-s 300 --go results/go
    python -m lab.race.compiled --table data/recordings/h200/rows_compiled2.json.gz

Compiling needs a minute and more of many cores and hardly the GPU, racing needs the GPU alone and seconds: every case
has a process, ``--jobs`` of them compile at a time, report, and wait until the file ``--go`` exists (without ``--go``:
until all are ready, or only ``--race-s`` seconds are left). Then they race one after the other; those not ready are
left out.

``--real 1`` races the shapes that `lab/race/drawn_rows.py --real --seed 1` draws instead of a function's own: ``--names
rms_norm:0+2`` are its first and its third.

``--warm`` compiles and races nothing: it fills a compiler cache beside ``--out``, which the next run uses. The choices
of Inductor's autotuning are deleted in between, and measured again by the run that races, because a warm run may share
the device.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "compiled.json.gz"
CASES: dict[str, tuple[int, ...]] = {
    "rms_norm": (0, 4, 1, 5, 12, 7, 3, 9),
    "cross_entropy": (0, 4, 1, 5, 7, 8, 10, 11),
    "layer_norm": (0, 4, 5, 2, 8, 6),
    "qk_norm_rope": (0, 1),
    "softmax": (0, 3, 5),
    "swiglu": (0, 3),
    "group_norm": (1, 0),
    "group_norm_silu": (1,),
    "rope": (0,),
    "geglu": (0,),
    "relu2": (0,),
    "add_rms_norm": (0,),
    "rms_norm_quant": (0,),
    "dropout_add": (0,),
    "dot_interaction": (0,),
    "cross_layer": (0,),
}
"""Which of a function's races, those that matter most first: each has a process of its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One case of the race, and the files with which its process reports its progress."""

    name: str
    index: int

    @property
    def label(self) -> str:
        return f"{self.name}-{self.index}"


def entries(names: list[str], most: int) -> list[Entry]:
    """First cases of all functions, then second ones, so that cases compiled in time are spread over functions.

    A name may select some of its races: ``softmax:0+3``.
    """
    asked = [(name, [int(i) for i in which.split("+")] if which else CASES[name])
             for name, _, which in (text.partition(":") for text in names)]  # fmt: skip
    ranks = [[Entry(name, cases[i]) for name, cases in asked if i < len(cases)] for i in range(most)]
    return [entry for rank in ranks for entry in rank]


def told(out: Path, name: str, **what: Any) -> None:
    """Append a line on what a process did, at once."""
    with (out / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(what, default=str) + "\n")


def prepared(name: str, trial: Any, of: Any, device: Any) -> Any:
    """Contenders of a case, each run once in every phase, so that nothing is compiled during the race."""
    import torch

    from ridgeline.bench.contenders import contenders
    from ridgeline.bench.race import runner

    callers = contenders(name, trial, compiled=True, liger=True)
    args = trial.make(of, device, torch.Generator(device).manual_seed(0))
    for who, caller in callers.items():
        for phase in trial.phases:
            try:
                runner(caller, args, phase, trial.constants)()
            except Exception:
                if who == "compiled":
                    raise
    torch.cuda.synchronize()
    return callers


CHOSEN = "*.best_config"
"""Files with the choices of Inductor's autotuning."""


def forget_choices(cache: Path) -> int:
    """Delete autotuning choices made on a shared device, but not the compiled code; returns their number."""
    found = list(cache.rglob(CHOSEN))
    for path in found:
        path.unlink()
    return len(found)


def case_of(entry: Entry, trial: Any, real: int) -> Any:
    """A function's own race, or a model shape drawn from a seed."""
    if not real:
        return trial.races[entry.index]
    from lab.race import model_rows as real_rows

    return real_rows.shapes(entry.name, real, entry.index + 1)[entry.index]


def child(out: Path, entry: Entry, go: Path, until_s: float, warm: bool = False, real: int = 0) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, race
    from ridgeline.kernels.contract import trials

    began = time.perf_counter()
    trial, device = trials()[entry.name][1], torch.device("cuda")
    of = case_of(entry, trial, real)
    try:
        callers = prepared(entry.name, trial, of, device)
        told(out, entry.label, compiled=str(of), took_s=time.perf_counter() - began)
    except Exception as error:
        return told(out, entry.label, failed=str(of), error=f"{type(error).__name__}: {str(error)[:300]}",
                    trace=traceback.format_exc()[-1200:])  # fmt: skip
    torch.cuda.empty_cache()
    if warm:
        return None
    if go.exists():
        return told(out, entry.label, failed=str(of), error="compiled after the race had begun")
    (out / f"{entry.label}.ready").touch()
    while not go.exists() and time.time() < until_s:
        time.sleep(0.1)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if time.time() > until_s:
            return told(out, entry.label, failed=str(of), error="no time left for its race")
        try:
            course = Course(device, rounds=12, budget_s=0.25)
            for row in race(entry.name, of, course, phases=trial.phases, compiled=True, callers=callers):
                told(out, entry.label, row=row.to_dict())
        except Exception as error:
            told(out, entry.label, failed=str(of), error=f"race: {type(error).__name__}: {str(error)[:300]}")


def gathered(out: Path, work: list[Entry]) -> dict[str, Any]:
    found: dict[str, Any] = {"race": [], "compiled": [], "errors": []}
    for entry in work:
        path = out / f"{entry.label}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            told_of = json.loads(line)
            if "row" in told_of:
                found["race"].append(told_of["row"])
            else:
                found["errors" if "failed" in told_of else "compiled"].append({"primitive": entry.name, **told_of})
    return found


class Field:
    """Processes of the race: a few compile at a time, all of them wait for the start."""

    def __init__(self, out: Path, work: list[Entry], jobs: int, command: list[str], cache: Path) -> None:
        self.out, self.waiting, self.jobs, self.command = out, list(work), jobs, command
        self.running: list[tuple[Entry, subprocess.Popen[bytes]]] = []
        self.env = dict(os.environ) | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

    def ready(self, entry: Entry) -> bool:
        return (self.out / f"{entry.label}.ready").exists()

    def compiling(self) -> list[tuple[Entry, subprocess.Popen[bytes]]]:
        return [(entry, run) for entry, run in self.running if not self.ready(entry) and run.poll() is None]

    def fill(self) -> bool:
        """Start what may start; False once nothing is left to compile."""
        while self.waiting and len(self.compiling()) < self.jobs:
            entry = self.waiting.pop(0)
            with (self.out / f"{entry.label}.log").open("w") as log:
                command = [*self.command, "--child", entry.name, "--index", str(entry.index)]
                self.running.append((entry, subprocess.Popen(command, env=self.env, stdout=log, stderr=log)))
        return bool(self.waiting or self.compiling())

    def start(self) -> None:
        """Start the race, and kill processes that still compile."""
        for entry, run in self.compiling():
            run.kill()
            told(self.out, entry.label, failed="all", error="not compiled in time")
        for entry in self.waiting:
            told(self.out, entry.label, failed="all", error="not begun in time")

    def finish(self, until_s: float) -> None:
        for _, run in self.running:
            try:
                run.wait(max(1.0, until_s - time.time()))
            except subprocess.TimeoutExpired:
                run.kill()


def warmed(field: Field, listed: list[Entry], until_s: float) -> None:
    """Compile until all is compiled or the time is over."""
    while field.fill() and time.time() < until_s:
        time.sleep(0.2)
    for _, run in field.compiling():
        run.kill()
    found = gathered(field.out, listed)
    took = max((done["took_s"] for done in found["compiled"]), default=0.0)
    print(f"{len(found['compiled'])} of {len(listed)} cases compiled, the slowest in {took:.0f} s", flush=True)


def table(found: dict[str, Any], copy: float) -> Iterator[str]:
    """The rows of a recording as Markdown for a note, and a summary by function."""
    from ridgeline.bench.race import Row, paired, standings

    rows = [Row(**row) for row in found["race"]]
    took = {(row.primitive, row.phase, row.dtype, row.sizes, row.contender): 1e6 * row.median_s for row in rows}
    yield (
        "| function | phase | case | MB | ours, µs | torch.compile | eager | Liger | best rival over ours"
        f" | of the copy ({copy / 1e12:.2f} TB/s) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for ours, best in sorted(paired(rows), key=lambda pair: (pair[0].primitive, pair[0].phase, pair[0].sizes)):
        theirs = [
            took.get((ours.primitive, ours.phase, ours.dtype, ours.sizes, who), math.nan)
            for who in ("compiled", "eager", "liger")
        ]
        times = [f"{1e6 * ours.median_s:.1f}", *("–" if math.isnan(value) else f"{value:.1f}" for value in theirs)]
        named = [ours.primitive, ours.phase, f"{ours.dtype.replace('bfloat16', 'bf16')} {ours.sizes}"]
        shares = [f"{best.median_s / ours.median_s:.2f}", f"{ours.bytes_per_s / copy:.0%}"]
        yield f"| {' | '.join([*named, f'{ours.num_bytes / 1e6:.0f}', *times, *shares])} |"
    for found_of in standings(rows):
        stands = f"{found_of.speedup:.2f} over {found_of.num_cases}, {found_of.num_lost} lost"
        yield f"{found_of.primitive} {found_of.phase}: {stands}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--copy", type=float, default=4.24e12, help="bytes a second of the copy of its day")
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--go", type=Path, help="races begin when this file is there")
    parser.add_argument("--race-s", type=float, default=60.0, help="seconds the races may take")
    parser.add_argument("--most", type=int, default=9, help="cases of a function")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile at a time")
    parser.add_argument("--names", default=",".join(CASES), help="functions, each with cases or without: softmax:0+3")
    parser.add_argument("--path", action="append", default=[], help="folder for the import path, for Liger")
    parser.add_argument("--warm", action="store_true", help="compile for a later run, which races")
    parser.add_argument("--real", type=int, default=0, help="the seed of shapes that models have")
    parser.add_argument("--child", default="")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--until-s", type=float, default=0.0)
    parser.add_argument("--work", type=Path, default=None, help="where processes leave notes; a folder beside --out")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())), asked.copy)))
    if asked.out is None:
        parser.error("--out or --table")
    sys.path[:0] = asked.path
    beside = asked.out.parent / f"{asked.out.name}-work"
    work = asked.work or (beside / "warm" if asked.warm else beside)
    work.mkdir(parents=True, exist_ok=True)
    go = asked.go or work / "go"
    if asked.child:
        return child(work, Entry(asked.child, asked.index), go, asked.until_s, asked.warm, asked.real)
    until_s = time.time() + asked.budget_s
    command = [sys.executable, "-m", __spec__.name, "--out", str(asked.out), "--work", str(work), "--go", str(go)]
    command += [f"--path={folder}" for folder in asked.path] + ["--until-s", str(until_s)]
    command += [*(["--warm"] if asked.warm else []), "--real", str(asked.real)]
    listed = entries(asked.names.split(","), asked.most)
    field = Field(work, listed, asked.jobs, command, beside / "inductor")
    if asked.warm:
        return warmed(field, listed, until_s)
    print(f"{forget_choices(beside / 'inductor')} choices forgotten", flush=True)
    while not go.exists() and time.time() < until_s - asked.race_s:
        if not field.fill() and asked.go is None:
            break
        time.sleep(0.2)
    field.start()
    go.touch()
    began = time.time()
    field.finish(min(until_s, began + asked.race_s) + 5)
    asked.out.mkdir(parents=True, exist_ok=True)
    found = gathered(work, listed) | {"race_s": time.time() - began}
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    print(
        f"{len(found['race'])} rows in {found['race_s']:.0f} s, {len(found['compiled'])} cases compiled,"
        f" {len(found['errors'])} failed",
        flush=True,
    )


if __name__ == "__main__":
    main()
