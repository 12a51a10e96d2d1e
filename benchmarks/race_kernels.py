"""Check, sweep and race the kernels on a GPU, and write everything found to one file.

    python benchmarks/race_kernels.py --out results --budget-s 200 --parts pack,host,check,special,sweep,race
    python benchmarks/race_kernels.py --out results --compiled --parts pack,race,ladder
    python benchmarks/race_kernels.py --out results --pack DIR --stages 'build=60;host=30;check=40;sweep=50;race'

Liger-Kernel joins the race where it can be imported (``--path DIR`` adds a folder to the import path).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
FILE = "kernels.json.gz"
COMPILED_CASES = 2
"""Cases of each function in which torch.compile takes part: it needs seconds for each."""

PARTS = ("pack", "build", "host", "check", "special", "floor", "sweep", "memory", "race", "split", "compiled",
         "ladder")  # fmt: skip


class Book:
    """What was found so far; written again after every entry, so that nothing is lost when time runs out."""

    def __init__(self, out: Path, budget_s: float) -> None:
        self.path = out / FILE
        self.budget_s = budget_s
        self.found: dict[str, Any] = {"errors": []}
        self.saved_s = 0.0
        out.mkdir(parents=True, exist_ok=True)

    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - BEGAN)

    def add(self, part: str, entry: Any) -> None:
        self.found.setdefault(part, []).append(entry)
        if time.perf_counter() - self.saved_s > 5:
            self.save()

    def save(self) -> None:
        self.saved_s = time.perf_counter()
        made = self.path.with_suffix(".tmp")
        made.write_bytes(gzip.compress(json.dumps(self.found, default=str).encode()))
        made.replace(self.path)

    def attempt(self, what: str, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {str(error)[:300]}"
            print("FAILED", text, flush=True)
            self.found["errors"].append({"what": what, "error": text, "trace": traceback.format_exc()[-1500:]})
            return None


# --- the parts ---------------------------------------------------------------------------------------------------


def sweeps() -> Iterator[tuple[str, str, str, Any, list[Any]]]:
    """(kernel, function, phase, case, configurations): what the defaults are chosen from."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.shares import Streamed as T

    def soft(phase: str, rows: int, cols: int, *given: Any) -> Any:
        kernel = {"fwd": "forward", "bwd": "backward"}[phase]
        return f"softmax.{kernel}", "softmax", phase, case("bfloat16", rows=rows, cols=cols), list(given)

    yield from image_sweeps()
    for rows, cols in ((2048, 65536), (512, 262144), (4096, 50257)):
        yield soft("fwd", rows, cols, T(8, 2, 3, 8))
    yield soft("fwd", 4096, 32768, T(8, 4, 3, 4), T(8, 2, 3, 8))
    yield soft("bwd", 4096, 50257, T(4, 4, 3, 4))
    yield soft("bwd", 2048, 65536)
    yield from odd_sweeps()
    yield from list_sweeps()


def image_sweeps() -> Iterator[tuple[str, str, str, Any, list[Any]]]:
    """GroupNorm: long and short pieces, SiLU's slope kept or computed twice, fewer and more programs."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images as Im

    for name in ("group_norm_silu", "group_norm"):
        for batch, channels, side in ((4, 512, 128), (16, 512, 128), (32, 320, 56)):
            of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
            first = batch == 4
            ahead = [Im(4, 4, 3, 8), Im(8, 4, 3, 4, accesses=1)] if first else []
            back = [Im(4, 4, 3, 4), Im(4, 8, 3, 2, accesses=1)] if first else [Im(4, 4, 3, 4)]
            if first and name == "group_norm_silu":
                back += [Im(4, 8, 3, 2, kept=False), Im(8, 4, 3, 2)]
            yield "group_norm.streamed", name, "fwd", of, ahead
            yield "group_norm.backward_streamed", name, "bwd", of, back


def odd_sweeps() -> Iterator[tuple[str, str, str, Any, list[Any]]]:
    """Rows that start inside accesses, their ends apart (the default) and not."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy.config import Rows
    from ridgeline.kernels.rms_norm.config import Backward, Forward
    from ridgeline.kernels.softmax.config import Softmax as S

    def bf16(rows: int, cols: int) -> Any:
        return case("bfloat16", rows=rows, cols=cols)

    odd, short, long = bf16(32768, 4099), bf16(131072, 1001), bf16(16384, 7001)
    yield "softmax.forward", "softmax", "fwd", bf16(32768, 4097), [S(1, 5, 1024, 4), S(1, 2, 2048, 8, ends=True)]
    yield "softmax.backward", "softmax", "bwd", bf16(32768, 4097), [S(1, 5, 1024, 4)]
    for name in ("layer_norm", "rms_norm"):
        walks = [Forward(1, 4, 1024, 4, 3, 3), Forward(1, 2, 2048, 8, 3, 2)]
        yield f"{name}.forward", name, "fwd", odd, [Forward(1, 5, 1024, 4), *walks]
    held = [Backward(1, 5, 1024, 4, 3, 2, False), Backward(1, 2, 2048, 8, 3, 1, True, True)]
    yield "layer_norm.backward", "layer_norm", "bwd", odd, held
    yield "cross_entropy.backward_rows", "cross_entropy", "bwd", short, [Rows(4, 1024, 4), Rows(1, 1024, 2, True)]
    for phase, kernel in (("fwd", "softmax.forward"), ("bwd", "softmax.backward")):
        yield kernel, "softmax", phase, short, [S(4, 4, 256, 4)]
    for name in ("layer_norm", "rms_norm"):
        yield f"{name}.forward", name, "fwd", short, [Forward(4, 4, 256, 4)]
    yield "layer_norm.backward", "layer_norm", "bwd", short, [Backward(1, 4, 256, 1, 3, 8, True)]
    yield "layer_norm.forward", "layer_norm", "fwd", long, [Forward(1, 4, 2048, 8)]
    held = [Backward(1, 4, 2048, 8, 3, 1, True, True), Backward(1, 2, 4096, 16, 3, 1, True, True)]
    yield "layer_norm.backward", "layer_norm", "bwd", long, held
    wide = case("float32", rows=16384, cols=4099)
    for name in ("layer_norm", "rms_norm"):
        yield f"{name}.forward", name, "fwd", wide, [Forward(1, 8, 512, 4, 3, 3), Forward(1, 8, 512, 4, 3, 2)]
    yield "layer_norm.backward", "layer_norm", "bwd", wide, [Backward(1, 8, 512, 4, 3, 2, True, True)]
    yield "softmax.forward", "softmax", "fwd", case("float32", rows=2048, cols=50257), [S(1, 0, 4096, 16)]


def list_sweeps() -> Iterator[tuple[str, str, str, Any, list[Any]]]:
    """What runs over lists, tables and features."""
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.cross_layer import config as cross
    from ridgeline.kernels.rms_norm_quant import config as narrow

    def raced(name: str, i: int) -> Any:
        return trials()[name][1].races[i]

    def tried(kernel: str, name: str, i: int, kind: Any, *given: tuple[Any, ...], phase: str = "fwd") -> Any:
        return kernel, name, phase, raced(name, i), [kind(*values) for values in given]

    yield tried("layer_norm_quant", "layer_norm_quant", 1, narrow.Tile, (1, 4, 1024, 4, 3, 3), (1, 2, 2048, 8, 3, 2))
    tiles = ((128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (0, 0, 0, 0, 0))
    for i in (0, 1, 3, 4):
        yield tried("cross_layer.product", "cross_layer", i, cross.Product, *tiles)


def wanted_variants(parts: set[str], names: list[str], short: bool) -> list[Any]:
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for name in names:
        trial = trials()[name][1]
        if parts & {"race", "host", "ladder", "compiled", "split"} or (
            "memory" in parts and name == "linear_cross_entropy"
        ):
            found += variants_of(name, [*trial.races, *trial.small])
        if "check" in parts:
            found += variants_of(name, checks_of(trial, short))
            odd = [of for of in trial.checks if of.dtype == "bfloat16"][1:5]
            found += variants_of(name, odd, aligned=False)
    if "sweep" in parts:
        for kernel, name, _, of, configs in sweeps():
            for config in configs if name in names else []:
                with tuning.forced(kernel, config):
                    found += variants_of(name, [of])
    return list(dict.fromkeys(found))


def checks_of(trial: Any, short: bool) -> list[Any]:
    """Every case in float32 and bfloat16, a third of them in float16."""
    half = [of for of in trial.checks if of.dtype == "float16"]
    rest = [of for of in trial.checks if of.dtype != "float16"]
    return rest[::2] if short else rest + half[::3]


def part_pack(book: Book, folder: Path, variants: list[Any]) -> None:
    from ridgeline.kernels import pack

    began = time.perf_counter()
    jobs = max(1, min(14, (os.cpu_count() or 2) - 2))
    made = pack.write(folder, variants, jobs=jobs, direct=True)
    size = (folder / pack.CUBINS).stat().st_size
    entry = {"variants": len(made.entries), "seconds": time.perf_counter() - began, "bytes": size, "jobs": jobs}
    print("pack", entry, flush=True)
    book.add("pack", entry)


def part_build(book: Book, variants: Callable[[], list[Any]]) -> None:
    """Direct calls for this PyTorch; and a pack, where the one at hand was made from other source."""
    from ridgeline.kernels import direct, pack
    from ridgeline.kernels.files import cache_folder

    began = time.perf_counter()
    book.attempt("direct calls", lambda: direct.build(cache_folder()))
    took_s = time.perf_counter() - began
    print(f"direct calls: {took_s:.1f} s, {'built' if direct.module() else 'NOT BUILT'}", flush=True)
    book.add("build", {"direct_s": took_s, "built": direct.module() is not None})
    if pack.opened(pack.pack_folder()) is None:
        print("no pack of this source: making one", flush=True)
        part_pack(book, pack.pack_folder(), variants())


COLD = """
import os, time, torch
x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
torch.nn.functional.rms_norm(x, (4096,), w); torch.cuda.synchronize()
t = time.perf_counter(); import ridgeline.kernels as rk; imported = time.perf_counter() - t
t = time.perf_counter(); rk.rms_norm(x, w, 1e-6); torch.cuda.synchronize(); first = time.perf_counter() - t
t = time.perf_counter(); rk.rms_norm(x, w, 1e-6); torch.cuda.synchronize(); second = time.perf_counter() - t
print("COLD", imported, first, second)
"""


def part_host(book: Book, names: list[str]) -> None:
    """What a call costs the host, and what the first call costs in a fresh process, with and without the pack."""
    import torch

    import ridgeline.kernels as rk
    from ridgeline.bench.clock import host_time
    from ridgeline.kernels import direct
    from ridgeline.kernels.contract import primitive

    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    b = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
    up = torch.randn_like(x)
    labels = torch.arange(16, device="cuda")
    functional = torch.nn.functional
    print("host direct calls:", "built" if direct.module() else "NOT BUILT", flush=True)
    with torch.no_grad():
        timed = {
            "rms_norm": lambda: rk.rms_norm(x, w, 1e-6),
            "rms_norm in Python": lambda: primitive("rms_norm").slow(x, w, 1e-6, 0.0),
            "rms_norm out=": lambda: rk.rms_norm(x, w, 1e-6, out=y),
            "rms_norm registered op": lambda: torch.ops.ridgeline_kernels.rms_norm(x, w, 1e-6, 0.0),
            "F.rms_norm": lambda: functional.rms_norm(x, (4096,), w, 1e-6),
            "layer_norm": lambda: rk.layer_norm(x, w, b, 1e-5),
            "F.layer_norm": lambda: functional.layer_norm(x, (4096,), w, b, 1e-5),
            "softmax": lambda: rk.softmax(x),
            "torch.softmax": lambda: torch.softmax(x, -1),
            "cross_entropy": lambda: rk.cross_entropy(x, labels),
            "F.cross_entropy": lambda: functional.cross_entropy(x, labels),
            "swiglu": lambda: rk.swiglu(x, up),
            "silu * up": lambda: functional.silu(x) * up,
            "empty_like": lambda: torch.empty_like(x),
            "add": lambda: x + x,
        }
        y = torch.empty_like(x)
        rk.rms_norm(x, w, 1e-6)
        for name, call in timed.items():
            seconds = book.attempt(name, lambda call=call: host_time(call))
            book.add("host", {"what": name, "host_s": seconds})
            print(f"host {name:28s} {1e6 * (seconds or 0):7.2f} us", flush=True)
    xg = x.clone().requires_grad_()
    wg = w.clone().requires_grad_()
    bg = b.clone().requires_grad_()
    seed = torch.randn_like(x)

    def step(call: Callable[..., Any], *leaves: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), leaves, seed)

    recorded: dict[str, Callable[[], Any]] = {
        "rms_norm with gradient": lambda: rk.rms_norm(xg, wg, 1e-6),
        "F.rms_norm with gradient": lambda: functional.rms_norm(xg, (4096,), wg, 1e-6),
        "layer_norm with gradient": lambda: rk.layer_norm(xg, wg, bg, 1e-5),
        "F.layer_norm with gradient": lambda: functional.layer_norm(xg, (4096,), wg, bg, 1e-5),
        "softmax with gradient": lambda: rk.softmax(xg),
        "torch.softmax with gradient": lambda: torch.softmax(xg, -1),
    }
    leaves = {"rms": (xg, wg), "layer": (xg, wg, bg), "soft": (xg,)}
    steps = {
        name.replace("with gradient", "and its backward pass"): step(
            call, *next(found for key, found in leaves.items() if key in name)
        )
        for name, call in recorded.items()
    }
    for name, call in (recorded | steps).items():
        seconds = book.attempt(name, lambda call=call: host_time(call))
        book.add("host", {"what": name, "host_s": seconds})
        print(f"host {name:28s} {1e6 * (seconds or 0):7.2f} us", flush=True)
    for label, change in (
        ("with pack", {}),
        ("without pack", {"RIDGELINE_KERNEL_PACK": "/nonexistent", "TRITON_CACHE_DIR": str(book.path.parent / "cold")}),
    ):
        env = dict(os.environ) | {"PYTHONPATH": str(HERE.parent / "src")} | change
        done = subprocess.run([sys.executable, "-c", COLD], env=env, capture_output=True, text=True, timeout=120)
        line = [row for row in done.stdout.splitlines() if row.startswith("COLD")]
        values = [float(v) for v in line[0].split()[1:]] if line else done.stderr[-500:]
        book.add("cold", {"what": label, "import_first_second_s": values})
        print("cold", label, values, flush=True)


def part_check(book: Book, names: list[str], limit_s: float, short: bool) -> None:
    import torch

    from ridgeline.bench.check import LAYOUTS, check_case, check_mistakes, mistake_case
    from ridgeline.kernels import direct
    from ridgeline.kernels.contract import trials

    device = torch.device("cuda")
    direct.RECORD_AFTER = 0  # so that the repeated call is one without Python
    stop_s = time.perf_counter() + limit_s
    for name in names:
        trial = trials()[name][1]
        jobs = [(of, "contiguous") for of in checks_of(trial, short)]
        odd = [of for of in trial.checks if of.dtype == "bfloat16"][1:5]
        jobs += [(of, layout) for of in odd for layout in LAYOUTS[1:] if trial.layouts]
        good = bad = 0
        for i, (of, layout) in enumerate(jobs):
            if time.perf_counter() > stop_s:
                book.add("check", {"primitive": name, "skipped": len(jobs) - i})
                break
            found = book.attempt(f"check {name} {of} {layout}", check_case, name, of, device, i, layout) or []
            for finding in found:
                good, bad = good + finding.ok, bad + (not finding.ok)
                book.add("check", asdict(finding))
                if not finding.ok:
                    print("WRONG", finding, flush=True)
        for finding in book.attempt(f"mistakes {name}", check_mistakes, name, mistake_case(trial), device, 3) or []:
            book.add("mistakes", asdict(finding))
            if not finding.ok:
                print("MISTAKE PASSES", finding, flush=True)
        print(f"check {name:16s} {good} right, {bad} wrong, {book.left_s():.0f} s left", flush=True)


def part_special(book: Book, word: str) -> None:
    """What no table of shapes covers: graphs, streams, compile, infinities, very large tensors."""
    from kernels_special import specials

    for name, run in ((name, run) for name, run in specials().items() if word in name):
        outcome = book.attempt(name, run)
        book.add("special", {"what": name, "outcome": outcome})
        print("special", name, outcome, flush=True)


def apart(first: Any, second: Any) -> float:
    """The largest difference of two results as a share of their largest number; 0 where there is nothing to compare."""
    import torch

    if isinstance(first, (tuple, list)):
        return max((apart(a, b) for a, b in zip(first, second, strict=True)), default=0.0)
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or not first.numel():
        return 0.0
    a, b = first.float(), second.float()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def part_sweep(book: Book, names: list[str], limit_s: float) -> None:
    import statistics

    import torch

    from ridgeline.bench.race import Course, copy_bandwidth, moved_bytes, runner
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials

    course = Course(torch.device("cuda"), rounds=12, budget_s=0.15)
    book.found["copy_bytes_per_s"] = copy_bandwidth(course)
    generator = torch.Generator("cuda").manual_seed(0)
    stop_s = time.perf_counter() + limit_s
    for kernel, name, phase, of, configs in sweeps():
        if name not in names:
            continue
        if time.perf_counter() > stop_s:
            print("sweep ran out of time at", kernel, of, flush=True)
            break
        trial = trials()[name][1]
        args = () if trial.laps else trial.make(of, torch.device("cuda"), generator)

        def prepared(trial: Any = trial, args: Any = args, of: Any = of, phase: str = phase) -> tuple[Any, int]:
            """What runs in a sweep, and the bytes it must move."""
            if trial.laps:
                made = trial.laps(of, torch.device("cuda"), generator)
                return made.runs["ridgeline"], made.num_bytes
            return runner(trial.timed or trial.call, args, phase, trial.constants), moved_bytes(trial, args, phase)

        with tuning.asked() as choices:
            prepared()[0]()
        sizes, default = next((found[1:] for found in choices if found[0] == kernel), ({}, None))
        times: dict[Any, float] = {}
        meant: list[Any] = []
        for config in dict.fromkeys([default, *configs]):

            def measure(config: Any = config, meant: list[Any] = meant) -> Any:
                with tuning.forced(kernel, config):  # noqa: B023
                    torch.manual_seed(0)  # gradients of the results are drawn: the same for every configuration
                    run, num_bytes = prepared()
                    found = run()
                    meant[:] = meant or [found]
                    return statistics.median(course.turns({"x": run})["x"]), num_bytes, apart(meant[0], found)

            measured = book.attempt(f"sweep {kernel} {config}", measure)
            torch.cuda.empty_cache()
            if measured:
                seconds, num_bytes, off = measured
                times[config] = seconds
                rate = num_bytes / seconds / 1e12
                entry = {
                    "primitive": name,
                    "kernel": kernel,
                    "case": str(of),
                    "config": asdict(config),
                    "s": seconds,
                    "tb_s": rate,
                    "off": off,
                }
                book.add("sweep", entry | {"default": config == default})
                mark = "*" if config == default else " "
                line = f"{mark}{config!s:100s} {1e6 * seconds:8.1f} us {rate:5.2f} {off:.1e}"
                print(f"sweep {kernel:22s} {of!s:34s} {line}", flush=True)
        best = min(times, key=times.__getitem__, default=default)
        if best != default and type(best) is type(default) and times.get(default, 0.0) > 1.015 * times[best]:
            tuning.record(kernel, sizes, best)
            book.add(
                "tuned", {"kernel": kernel, "sizes": {k: str(v) for k, v in sizes.items()}, "config": asdict(best)}
            )


def part_floor(book: Book) -> None:
    """What a bare copy takes by the clock of the race at the sizes of its cases: nobody can be faster."""
    import statistics

    import torch

    from ridgeline.bench.race import Course

    course = Course(torch.device("cuda"))
    for megabytes in (33, 67, 100, 134, 201, 268, 403, 537, 805, 1074):
        x = torch.randint(0, 1 << 20, (megabytes * 125_000,), dtype=torch.int32, device="cuda")
        y = torch.empty_like(x)
        samples = course.turns({"copy": lambda x=x, y=y: y.copy_(x)})["copy"]
        entry = {"moved_bytes": 2 * x.nbytes, "s": statistics.median(samples)}
        book.add("floor", entry)
        print(f"floor {entry['moved_bytes'] / 1e6:7.0f} MB {1e6 * entry['s']:7.1f} us", flush=True)
        del x, y
        torch.cuda.empty_cache()


def part_split(book: Book, names: list[str], limit_s: float) -> None:
    """What each kernel of a call takes by the profiler, with a cold L2: launches and gaps are the rest of a race."""
    import statistics

    import torch

    from ridgeline.bench.clock import FLUSH_BYTES, kernels_of
    from ridgeline.bench.race import runner
    from ridgeline.kernels.contract import trials

    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    stop_s = time.perf_counter() + limit_s
    for name in names:
        trial = trials()[name][1]
        for of in trial.races:
            if time.perf_counter() > stop_s:
                return
            args = () if trial.laps else trial.make(of, torch.device("cuda"), generator)
            for phase in trial.phases:
                if trial.laps:
                    run = trial.laps(of, torch.device("cuda"), generator).runs["ridgeline"]
                else:
                    run = runner(trial.timed or trial.call, args, phase, trial.constants)
                for _ in range(3):
                    run()

                def cold(run: Any = run) -> Iterator[Any]:
                    for _ in range(5):
                        flush.zero_()
                        torch.cuda.synchronize()
                        yield run

                found = book.attempt(f"split {name} {of}", kernels_of, cold()) or []
                kinds = dict.fromkeys(kind for stretch in found for kind, _ in stretch)
                times = {
                    kind: statistics.median(sum(s for k, s in stretch if k == kind) for stretch in found)
                    for kind in kinds
                }
                book.add("split", {"primitive": name, "case": str(of), "phase": phase, "kernels_s": times})
                cells = " ".join(f"{kind[:40]} {1e6 * s:.1f}" for kind, s in times.items())
                print(f"split {name:15s} {of!s:50s} {phase} {cells}", flush=True)


def part_race(
    book: Book, names: list[str], compiled_cases: int, limit_s: float, part: str = "race", alone: tuple[str, ...] = (),
    cases: str = "",
) -> None:  # fmt: skip
    import torch

    from ridgeline.bench.race import Course, copy_bandwidth, race
    from ridgeline.kernels.contract import trials

    course = Course(torch.device("cuda"))
    book.found["copy_bytes_per_s"] = copy_bandwidth(course)
    print(f"copy {book.found['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    stop_s = time.perf_counter() + limit_s
    for name in names:
        trial = trials()[name][1]
        races = [of for of in trial.races if re.search(cases, str(of))][: 1 if part == "compiled" else None]
        work = [(of, trial.phases, i < compiled_cases) for i, of in enumerate(races)]
        work += [(of, ("call",), False) for of in trial.small if part == "race" and not cases]
        for of, which, timely in work:
            if time.perf_counter() > stop_s:
                print("race ran out of time at", name, of, flush=True)
                book.add("skipped", f"race {name} {of}")
                continue
            began = time.perf_counter()
            with_liger = name not in alone
            rows = book.attempt(
                f"race {name} {of}", race, name, of, course, phases=which, compiled=timely, liger=with_liger
            )
            torch.cuda.empty_cache()
            for row in rows or []:
                book.add(part, row.to_dict())
            show(rows or [], time.perf_counter() - began)


def show(rows: list[Any], took_s: float) -> None:
    cases: dict[str, list[Any]] = {}
    for row in rows:
        cases.setdefault(row.phase, []).append(row)
    for phase, together in cases.items():
        ours = together[0]
        cells = " ".join(f"{r.contender} {1e6 * r.median_s:.1f}us/{r.bytes_per_s / 1e12:.2f}" for r in together)
        print(f"race {ours.primitive:15s} {ours.dtype} {ours.sizes:38s} {phase:4s} {cells} ({took_s:.1f}s)", flush=True)


def part_memory(book: Book) -> None:
    """Time and peak memory of one training step through the last layer and its loss: fused, unfused, and Liger's."""
    import torch

    from ridgeline.bench.contenders import liger_form
    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import case, trials

    trial = trials()["linear_cross_entropy"][1]
    device = torch.device("cuda")
    course = Course(device, rounds=7, budget_s=4.0)
    for rows, cols, hidden in ((16384, 128256, 4096), (8192, 32000, 4096)):
        args = trial.make(case("bfloat16", rows=rows, cols=cols, hidden=hidden), device, torch.Generator("cuda"))
        leaves = [value.requires_grad_() if value.is_floating_point() else value for value in args]
        calls = {"ridgeline": trial.call, "eager": trial.eager, "liger": liger_form("linear_cross_entropy")}
        runs: dict[str, Callable[[], Any]] = {}
        for who, call in calls.items():
            if call is None:
                continue

            def step(call: Any = call, leaves: Any = leaves) -> None:
                torch.autograd.grad(call(*leaves), leaves[:2])

            step()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            peak = torch.cuda.max_memory_allocated()
            book.add("memory", {"who": who, "rows": rows, "cols": cols, "hidden": hidden, "peak_bytes": peak,
                                "above_inputs_bytes": peak - before})  # fmt: skip
            runs[who] = step
        for who, samples in course.turns(runs).items():
            entry = {"who": who, "rows": rows, "cols": cols, "hidden": hidden, "s": sorted(samples)}
            book.add("memory", entry)
        for entry in book.found["memory"][-2 * len(runs) :]:
            print("memory", entry, flush=True)
        del runs, args, leaves
        torch.cuda.empty_cache()


def part_ladder(book: Book) -> None:
    """The backward pass of RMSNorm from naive to final: the numbers of the guide's chapter."""
    from kernels_ladder import climb

    for step in climb(book.attempt):
        book.add("ladder", step)
        print("ladder", step, flush=True)


def in_stages(asked: argparse.Namespace) -> None:
    """Every stage in a process of its own, so that one that crashes takes nothing with it; one file at the end."""
    shared = Path(tempfile.mkdtemp())
    env = dict(os.environ) | {
        "RIDGELINE_KERNEL_PACK": str(shared / "pack"),
        "RIDGELINE_KERNEL_CACHE": str(shared / "cache"),
        "RIDGELINE_KERNEL_TUNING": str(shared / "tuning.json"),
        "PYTHONUNBUFFERED": "1",
    }
    if asked.pack and (asked.pack / "index.json").exists():
        shutil.copytree(asked.pack, shared / "pack")
    merged: dict[str, Any] = {"errors": []}
    asked.out.mkdir(parents=True, exist_ok=True)
    for i, stage in enumerate(asked.stages.split(";")):
        parts, _, limit = stage.partition("=")
        left_s = asked.budget_s - (time.perf_counter() - BEGAN) - 2
        limit_s = min(left_s, float(limit)) if limit else left_s
        if limit_s < 5:
            merged["errors"].append({"what": f"stage {parts}", "error": "no time left"})
            continue
        out = shared / f"stage{i}"
        command = [sys.executable, __file__, "--out", str(out), "--budget-s", str(limit_s - 3), "--parts", parts]
        command += ["--pack-for", asked.stages] + ([f"--compiled={asked.compiled}"] if asked.compiled else [])
        command += (["--short"] if asked.short else []) + [f"--path={folder}" for folder in asked.path]
        command += ["--names", asked.names] if asked.names else []
        command += ["--compiled-names", asked.compiled_names] if asked.compiled_names else []
        command += ["--check-names", asked.check_names] if asked.check_names else []
        command += ["--special", asked.special] if asked.special else []
        try:
            code = subprocess.run(command, env=env, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            merged["errors"].append({"what": f"stage {parts}", "error": f"exit code {code}"})
            print(f"stage {parts} ended with {code}", flush=True)
        if (out / FILE).exists():
            found = json.loads(gzip.decompress((out / FILE).read_bytes()))
            for key, value in found.items():
                merged[key] = merged.get(key, []) + value if isinstance(value, list) else value
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(merged).encode()))
        print(f"=== {parts} after {time.perf_counter() - BEGAN:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--names", default="")
    parser.add_argument("--cases", default="", help="only races whose sizes match this regular expression")
    parser.add_argument("--special", default="", help="only situations that have this word in their name")
    parser.add_argument("--stages", default="", help="parts in processes of their own: 'pack=70;host,check=60;race'")
    parser.add_argument("--pack", type=Path, help="a pack made elsewhere, with part 'build' instead of 'pack'")
    parser.add_argument("--compiled-names", default="", help="whose first case part 'compiled' races again")
    parser.add_argument("--without-liger", default="", help="whom Liger does not race: it compiles ten seconds a case")
    parser.add_argument("--check-names", default="", help="what is checked, where that is not what is raced")
    parser.add_argument("--pack-for", default="", help="further parts whose kernels the pack holds")
    parser.add_argument(
        "--compiled",
        type=int,
        nargs="?",
        const=COMPILED_CASES,
        default=0,
        help="cases with torch.compile: seconds each",
    )
    parser.add_argument("--limits", default="", help="seconds of single parts: 'check=15,sweep=20,race=25'")
    parser.add_argument("--short", action="store_true", help="half of the checks")
    parser.add_argument("--path", action="append", default=[], help="folder for the import path, for Liger")
    asked = parser.parse_args()
    if asked.stages:
        return in_stages(asked)
    sys.path[:0] = [*asked.path, str(HERE)]
    parts = set(asked.parts.split(","))
    packed = parts | {part.partition("=")[0] for stage in asked.pack_for.split(";") for part in stage.split(",")}
    folder = Path(os.environ.setdefault("RIDGELINE_KERNEL_PACK", str((asked.out / "pack").resolve())))
    os.environ.setdefault("RIDGELINE_KERNEL_CACHE", str((asked.out / "cache").resolve()))
    book = Book(asked.out, asked.budget_s)

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.environment import environment
    from ridgeline.kernels.contract import trials

    first = ["rms_norm", "layer_norm", "softmax", "cross_entropy", "swiglu", "linear_cross_entropy", "add_rms_norm"]
    names = asked.names.split(",") if asked.names else [*first, *(name for name in trials() if name not in first)]
    compiling = asked.compiled_names.split(",") if asked.compiled_names else names
    checked = asked.check_names.split(",") if asked.check_names else names
    if "build" in parts:
        book.attempt("build", lambda: part_build(book, lambda: wanted_variants(packed, names, asked.short)))
    if "pack" in parts:
        variants = book.attempt("variants", lambda: wanted_variants(packed, names, asked.short)) or []
        book.attempt("pack", lambda: part_pack(book, folder, variants))
    book.found["environment"] = environment()
    book.save()

    limits = {name: float(s) for name, _, s in (pair.partition("=") for pair in asked.limits.split(",") if pair)}

    alone = tuple(asked.without_liger.split(","))

    def share(part: str, wanted: float) -> float:
        """Seconds of a part: as given, else of the time left; all but a little of it where nothing follows."""
        if part in limits:
            return min(limits[part], book.left_s() - 3)
        return (wanted if len(parts - {"pack", "host"}) > 1 else 0.9) * book.left_s()

    steps: list[tuple[str, Callable[[], None]]] = [
        ("host", lambda: part_host(book, names)),
        ("check", lambda: part_check(book, checked, share("check", 0.4), asked.short)),
        ("special", lambda: part_special(book, asked.special)),
        ("floor", lambda: part_floor(book)),
        ("sweep", lambda: part_sweep(book, names, share("sweep", 0.75))),
        ("memory", lambda: part_memory(book)),
        ("ladder", lambda: part_ladder(book)),
        ("race", lambda: part_race(book, names, asked.compiled, share("race", 0.9), alone=alone,
                                   cases=asked.cases)),
        ("split", lambda: part_split(book, names, book.left_s() - 3)),
        ("compiled", lambda: part_race(book, compiling, 1, book.left_s() - 15, "compiled")),
    ]
    for name, run in steps:
        if name in parts:
            book.attempt(name, run)
            book.save()
            print(f"--- {name} done, {book.left_s():.0f} s left", flush=True)
    book.save()
    for kept in (asked.out / "pack", asked.out / "cache", asked.out / "cold"):  # only the one file goes home
        shutil.rmtree(kept, ignore_errors=True)


if __name__ == "__main__":
    main()
