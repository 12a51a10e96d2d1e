"""Where the time of a norm's backward pass goes: all of it, without its last sums, without any, beside bare passes.

    python benchmarks/norm_parts.py --pack kernels                      (compiles, without a device)
    RIDGELINE_KERNEL_PACK=kernels python benchmarks/norm_parts.py --out results --budget-s 20
    python benchmarks/norm_parts.py --table data/recordings/h200/norm_parts1.json.gz

``full`` is the call; ``walked`` leaves out the small kernel that adds up the programs' shares of the weights'
gradients; ``bare`` wants no such gradients; ``add`` reads two tensors and writes one, as the pass must; ``copy`` moves
as many bytes. Times are taken in turns with a cold L2.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
FILE = "norm_parts.json.gz"
LAYER_NORM = (
    ("bfloat16", 2470, 12288), ("bfloat16", 7519, 5376), ("float16", 5430, 4544), ("bfloat16", 4845, 3200),
    ("float16", 3758, 6848), ("bfloat16", 16384, 4096), ("bfloat16", 4096, 14336), ("bfloat16", 16384, 5003),
    ("float16", 9354, 8111), ("bfloat16", 65536, 608), ("float32", 15784, 768), ("float32", 59728, 256),
)  # fmt: skip
RMS_NORM = (
    ("bfloat16", 2470, 12288), ("bfloat16", 3048, 11450), ("bfloat16", 6906, 2942), ("bfloat16", 65536, 384),
    ("bfloat16", 12164, 1918), ("float32", 12782, 1152), ("float16", 65536, 642), ("float32", 4780, 2560),
)  # fmt: skip
SHAPES = tuple(("layer_norm", *shape) for shape in LAYER_NORM) + tuple(("rms_norm", *shape) for shape in RMS_NORM)


def parts(name: str, dtype: str, rows: int, cols: int, device: Any) -> dict[str, Callable[[], Any]]:
    """Calls that take the same tensors and write to the same ones."""
    from importlib import import_module

    import torch

    from ridgeline.kernels.contract import case, trials

    module = import_module(f"ridgeline.kernels.{name}.op")
    meta = device.type == "meta"
    generator = None if meta else torch.Generator(device).manual_seed(0)
    args = trials()[name][1].make(case(dtype, rows=rows, cols=cols), device, generator)
    x, weight = args[0], args[1]
    stats = [torch.zeros(rows, device=device), torch.ones(rows, device=device)][-1 if name == "rms_norm" else 0 :]
    dy, dx, dw = torch.empty_like(x) if meta else torch.randn_like(x), torch.empty_like(x), torch.empty_like(weight)
    sums, last = ([dw], [0.0]) if name == "rms_norm" else ([dw, torch.empty_like(dw)], [])
    kept = module.plan_reduce

    def planned(want: int, reduce: Any) -> Callable[[], Any]:
        module.plan_reduce = reduce
        try:
            plan = module._plan_backward(dy, x, weight, *stats, dy, dx, cols, False, want)
        finally:
            module.plan_reduce = kept
        return lambda: plan(dy, x, weight, *stats, dy, dx, *sums, *last)

    none: Any = lambda *_, **__: lambda *_: None
    every: Any = True if name == "rms_norm" else 3
    runs = {"full": planned(every, kept), "walked": planned(every, none), "bare": planned(type(every)(0), none)}
    if meta:
        return runs
    source = torch.empty(3 * x.nbytes // 8, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return runs | {"add": lambda: torch.add(x, dy, out=dx), "copy": lambda: target.copy_(source)}


def wanted_variants() -> list[Any]:
    import torch

    from ridgeline.kernels.launcher import collecting

    with collecting() as found:
        for shape in SHAPES:
            for run in parts(*shape, torch.device("meta")).values():
                run()
    return list(dict.fromkeys(found))


def table(found: dict[str, Any]) -> Iterator[str]:
    yield f"Copy of 1 GiB in the same run: {found['copy_bytes_per_s'] / 1e12:.2f} TB/s."
    yield ""
    yield "| function | shape | MB | full, µs | walked | bare | add | copy |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["rows"]:
        times = " | ".join(f"{1e6 * row['s'][who]:.1f}" for who in ("full", "walked", "bare", "add", "copy"))
        shape = f"{row['dtype'].replace('bfloat16', 'bf16')} {row['rows']}×{row['cols']}"
        yield f"| {row['primitive']} | {shape} | {row['num_bytes'] / 1e6:.0f} | {times} |"


def measure(asked: argparse.Namespace) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, copy_bandwidth

    device = torch.device("cuda")
    course = Course(device, rounds=11, budget_s=0.1)
    found: dict[str, Any] = {"copy_bytes_per_s": copy_bandwidth(Course(device)), "rows": [], "errors": []}
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, dtype, rows, cols in SHAPES:
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append(f"no time left for {name} {dtype} {rows}x{cols}")
            continue
        try:
            runs = parts(name, dtype, rows, cols, device)
            took = {who: statistics.median(s) for who, s in course.turns(runs).items()}
            size = 4 if dtype == "float32" else 2
            found["rows"].append({"primitive": name, "dtype": dtype, "rows": rows, "cols": cols,
                                  "num_bytes": 3 * size * rows * cols, "s": took})  # fmt: skip
            print(name, dtype, rows, cols, {who: round(1e6 * s, 1) for who, s in took.items()}, flush=True)
        except Exception as error:
            found["errors"].append(f"{name} {dtype} {rows}x{cols}: {type(error).__name__}: {str(error)[:300]}")
            print(found["errors"][-1], flush=True)
        torch.cuda.empty_cache()
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument("--pack", type=Path, help="compile what these shapes need into this folder, and time nothing")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        return print(f"{len(pack.write(asked.pack, wanted_variants()).entries)} kernels")
    return measure(asked)


if __name__ == "__main__":
    main()
