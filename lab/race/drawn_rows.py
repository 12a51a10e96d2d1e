"""Races of row kernels on shapes drawn from a seed, beside eager, Liger and a copy of as many bytes.

    python -m lab.race.drawn_rows --pack kernels --jobs 12                 (compiles ours, without a device)
    python -m lab.race.drawn_rows --warm --path LIGER --jobs 8             (compiles Liger's, beside others)
    RIDGELINE_KERNEL_PACK=kernels python -m lab.race.drawn_rows --out results --path LIGER --budget-s 60
    python -m lab.race.drawn_rows --table data/recordings/h200/rows_random1.json.gz

``--real`` with any of these draws shapes that published models have instead, of gating, losses, quantization and AdamW
as well (`lab/race/model_rows.py`).

Rows by columns as people have them: widths and vocabularies of public models, multiples of eight, other even numbers,
odd ones; more than half of them move over 64 MB. Every shape is first compared with float64, then timed in turns with a
cold L2. A summary says how many of the shapes over 64 MB reach the figure asked for (90 % of the copy's bandwidth
forward, 85 % backward), how many as much of what a copy of as many bytes does, and how the best contender stands. One
file, written again after every shape.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

BEGAN = time.perf_counter()
FILE = "race_random.json.gz"
NAMES = ("rms_norm", "layer_norm", "softmax")
LARGE_BYTES = 64 << 20
ASKED = {"fwd": 0.90, "bwd": 0.85}
MOST_ROWS = 65536
MOST_CHECKED = 24 << 20
"""The most elements that are compared with float64."""
SMALL_BYTES = 4 << 20
"""Shapes that move fewer bytes are also timed in a loop, launch included."""
WIDTHS = (384, 768, 896, 1152, 1280, 1536, 1600, 1920, 2304, 2560, 2880, 3072, 3200, 3584, 4544, 4608, 5120, 5376, 6144,
          6656, 7168, 8192, 9216, 11008, 12288, 14336, 16384)  # fmt: skip
VOCABULARIES = (1000, 21841, 30522, 32001, 32128, 49152, 50257, 50272, 50280, 51200, 64000, 65024, 92544, 100352,
                102400, 128256, 129280, 151936, 152064, 200064, 250880, 256000, 262144)  # fmt: skip


def columns(name: str, rng: random.Random) -> int:
    """A third are columns of public models, the others between 256 and 20k (softmax: 128 and 256k)."""
    if rng.random() < 0.34:
        return rng.choice(VOCABULARIES if name == "softmax" else WIDTHS)
    low, high = (128, 262144) if name == "softmax" else (256, 20480)
    drawn = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    kind = rng.random()
    if kind < 0.5:
        return max(8, drawn // 8 * 8)
    return drawn // 8 * 8 + (rng.choice((2, 4, 6)) if kind < 0.75 else rng.choice((1, 3, 5, 7)))


def shapes(name: str, seed: int, num: int) -> list[Any]:
    """Cases of a function, determined by the seed."""
    from ridgeline.kernels.contract import case

    rng = random.Random(f"{name} {seed}")
    found: dict[Any, None] = {}
    while len(found) < num:
        dtype = rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
        cols = columns(name, rng)
        low, high = (36 << 20, 512 << 20) if rng.random() < 0.6 else (16 << 10, 36 << 20)
        num_bytes = math.exp(rng.uniform(math.log(low), math.log(high)))
        rows = round(num_bytes / cols / (4 if dtype == "float32" else 2))
        found[case(dtype, rows=max(1, min(MOST_ROWS, rows)), cols=cols)] = None
    return list(found)


def fewer(of: Any, most: int) -> Any:
    """The same columns in fewer rows, still enough for several tiles per CTA."""
    from ridgeline.kernels.contract import case

    return case(of.dtype, rows=min(of["rows"], max(most // of["cols"], 1)), cols=of["cols"])


def wanted_variants(seed: int, num: int, names: tuple[str, ...] = NAMES) -> list[Any]:
    """Kernels that a pack must hold for these shapes and their comparisons."""
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for name in names:
        cases = shapes(name, seed, num)
        found += variants_of(name, list(dict.fromkeys([*cases, *(fewer(of, MOST_CHECKED) for of in cases)])))
    return list(dict.fromkeys(found))


def wrong(name: str, of: Any, device: Any) -> list[str]:
    """Errors of results and gradients against float64, and against a second call."""
    from ridgeline.bench.check import check_case

    return [f"{found.what}: {found.note}" for found in check_case(name, of, device, 1) if not found.ok]


def timed(name: str, of: Any, phase: str, course: Any) -> list[dict[str, Any]]:
    """Rows of one phase: ours, eager, Liger and a copy of as many bytes, in turns."""
    import torch

    from ridgeline.bench.contenders import contenders
    from ridgeline.bench.race import moved_bytes, runner
    from ridgeline.kernels.contract import trials

    trial = trials()[name][1]
    args = trial.make(of, course.device, torch.Generator(course.device).manual_seed(0))
    num_bytes = moved_bytes(trial, args, phase)
    base = {"primitive": name, "dtype": of.dtype, "rows": of["rows"], "cols": of["cols"], "phase": phase,
            "num_bytes": num_bytes}  # fmt: skip
    runs: dict[str, Callable[[], Any]] = {}
    rows = []
    for who, caller in contenders(name, trial, compiled=False, liger=True).items():
        try:
            runs[who] = runner(caller, args, phase, trial.constants)
            runs[who]()
            torch.cuda.synchronize()
        except Exception as error:  # a contender that cannot run the shape is listed with its error
            runs.pop(who, None)
            rows.append(base | {"contender": who, "s": None, "error": f"{type(error).__name__}: {str(error)[:160]}"})
    if phase == "call":
        samples = course.calls(runs)
    else:
        source = torch.empty(max(1, num_bytes // 8), dtype=torch.int32, device=course.device)
        target = torch.empty_like(source)
        runs["copy"] = lambda: target.copy_(source)
        samples = course.turns(runs)
    return rows + [base | {"contender": who, "s": statistics.median(found), "low_s": min(found)}
                   for who, found in samples.items()]  # fmt: skip


def warm(seed: int, num: int, names: tuple[str, ...], part: int, parts: int) -> None:
    """Run Liger once on a few rows of every part-th shape, to fill Triton's cache."""
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.contenders import liger_form
    from ridgeline.bench.race import runner
    from ridgeline.kernels.contract import trials

    device = torch.device("cuda")
    work = [(name, of) for name in names for of in shapes(name, seed, num)]
    for name, of in work[part::parts]:
        caller, trial = liger_form(name), trials()[name][1]
        for phase in ("fwd", "bwd") if caller is not None else ():
            try:
                args = trial.make(fewer(of, 256 * of["cols"]), device, torch.Generator(device).manual_seed(0))
                runner(caller, args, phase, trial.constants)()
                torch.cuda.synchronize()
            except Exception as error:
                print("not warmed", name, of, f"{type(error).__name__}: {str(error)[:100]}", flush=True)


def by_shape(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Seconds of every contender that ran, by function, phase and shape."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = tuple(row[part] for part in ("primitive", "phase", "dtype", "rows", "cols", "num_bytes"))
        if row["s"] is not None:
            found.setdefault(key, {})[row["contender"]] = row["s"]
    return {key: took for key, took in found.items() if "ridgeline" in took}


def shares(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """By function and phase: how many shapes over 64 MB reach the target, and the best contender's ratio."""
    together = by_shape(found["rows"])
    for name in NAMES:
        for phase in ("fwd", "bwd", "call"):
            shapes = {key: took for key, took in together.items() if key[:2] == (name, phase)}
            if not shapes:
                continue
            beside = [min(s for who, s in took.items() if who not in ("ridgeline", "copy")) / took["ridgeline"]
                      for took in shapes.values() if set(took) - {"ridgeline", "copy"}]  # fmt: skip
            large = [(key[5] / took["ridgeline"] / found["copy_bytes_per_s"], took["copy"] / took["ridgeline"])
                     for key, took in shapes.items() if key[5] > LARGE_BYTES and "copy" in took]  # fmt: skip
            asked = ASKED.get(phase, 0.0)
            yield {
                "primitive": name, "phase": phase, "num": len(shapes), "large": len(large),
                "reach": sum(of_copy >= asked for of_copy, _ in large),
                "reach_as_large": sum(max(of_copy, bare) >= asked for of_copy, bare in large),
                "least": min((of_copy for of_copy, _ in large), default=math.nan),
                "over_best": math.exp(statistics.fmean(map(math.log, beside))) if beside else math.nan,
                "lost": sum(ratio < 1.0 for ratio in beside),
            }  # fmt: skip


def table(found: dict[str, Any]) -> Iterator[str]:
    """The summary and every shape as Markdown for a note."""
    copy = found["copy_bytes_per_s"]
    yield f"Copy of 1 GiB in the same run: {copy / 1e12:.2f} TB/s. Seed {found['seed']}."
    yield ""
    yield (
        "| function | phase | shapes | over 64 MB | reach the figure | reach it of a copy as large | least"
        " | best rival over ours | lost |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in shares(found):
        cells = [row["primitive"], row["phase"], row["num"], row["large"], row["reach"], row["reach_as_large"]]
        ends = [f"{row['least']:.0%}" if row["large"] else "", f"{row['over_best']:.2f}", row["lost"]]
        yield f"| {' | '.join(map(str, [*cells, *ends]))} |"
    yield ""
    yield "| function | phase | shape | MB | ours, µs | eager | Liger | copy | of the copy | of one as large |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, phase, dtype, rows, cols, num_bytes), took in sorted(by_shape(found["rows"]).items()):
        ours = took["ridgeline"]
        times = [f"{1e6 * took[who]:.1f}" if who in took else "–" for who in ("ridgeline", "eager", "liger", "copy")]
        ends = [f"{num_bytes / ours / copy:.0%}", f"{took['copy'] / ours:.0%}" if "copy" in took else ""]
        shape = f"{dtype.replace('bfloat16', 'bf16')} {rows}×{cols}"
        yield f"| {' | '.join([name, phase, shape, f'{num_bytes / 1e6:.0f}', *times, *ends])} |"


def told(row: dict[str, Any], copy: float) -> str:
    took = f"{1e6 * row['s']:9.1f} us {row['num_bytes'] / row['s'] / copy:5.0%}" if row["s"] else row["error"][:60]
    return f"{row['primitive']:11s} {row['phase']:4s} {row['dtype']:8s} {row['rows']:6d}x{row['cols']:<6d} " \
           f"{row['num_bytes'] / 1e6:7.1f} MB {row['contender']:9s} {took}"  # fmt: skip


def measure(asked: argparse.Namespace, names: tuple[str, ...]) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, copy_bandwidth

    device = torch.device("cuda")
    course = Course(device, rounds=asked.rounds, budget_s=0.12)
    found: dict[str, Any] = {"seed": asked.seed, "copy_bytes_per_s": copy_bandwidth(Course(device)), "rows": [],
                             "wrong": [], "errors": []}  # fmt: skip
    print(f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    drawn = [(name, shapes(name, asked.seed, asked.num)) for name in names]
    for name, of in ((name, cases[i]) for i in range(asked.num) for name, cases in drawn):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({"primitive": name, "case": str(of), "error": "no time left"})
            continue
        try:
            found["wrong"] += [f"{name} {of} {what}" for what in wrong(name, fewer(of, MOST_CHECKED), device)]
            torch.cuda.empty_cache()
            small = of["rows"] * of["cols"] * 4 < SMALL_BYTES
            for phase in ("fwd", "bwd", "call") if small else ("fwd", "bwd"):
                rows = timed(name, of, phase, course)
                found["rows"] += rows
                print("\n".join(told(row, found["copy_bytes_per_s"]) for row in rows), flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            found["errors"].append({"primitive": name, "case": str(of), "error": text,
                                    "trace": traceback.format_exc()[-1200:]})  # fmt: skip
            print("FAILED", name, of, text, flush=True)
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    print("\n".join(str(row) for row in shares(found)))
    print(f"wrong: {found['wrong']}; {len(found['errors'])} not reached or failed; {time.perf_counter() - BEGAN:.0f} s")


def main() -> None:
    from lab.race.drawn import command

    if "--real" in sys.argv[1:]:
        from lab.race import model_rows as real_rows

        return real_rows.main()
    command(sys.modules[__name__], NAMES, 40, 60.0)


if __name__ == "__main__":
    main()
