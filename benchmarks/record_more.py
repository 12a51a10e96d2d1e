"""Record where predictions are weak, a blind sample to judge by, and what compiled steps keep in memory.

    python benchmarks/record_more.py --out DIR [--budget-s 350] [--seed 3]     on the GPU
    python benchmarks/record_more.py --out DIR --section compiled --only NAME,…     further networks
    python benchmarks/record_more.py --file DIR [--device h200] [--seed 3]     afterwards: into data/recordings

Writes blind.jsonl.gz (operators to judge by, never fitted on) and more.jsonl.gz (operators to fit on, then
compiled networks). Every section runs in a process of its own, so that a fault in one does not end the others.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SECTIONS = {"blind": 0.19, "weak": 0.52, "compiled": 0.29}  # shares of the budget
START_S = 9.0  # of a process: imports and the device's context
COMPILE_S = 30.0  # a network is not started with less than this left


def record_blind(path: Path, seed: int, budget_s: float) -> None:
    from ridgeline.bench.record import record_operators
    from ridgeline.bench.surveys import general_points

    show = functools.partial(print, flush=True)
    record_operators(path, seed + 1000, budget_s, 1.0, show, general_points(seed + 1000))


def record_weak(path: Path, seed: int, budget_s: float) -> None:
    from ridgeline.bench.record import record_operators
    from ridgeline.bench.surveys import weak_points

    record_operators(path, seed, budget_s, 1.0, functools.partial(print, flush=True), weak_points(seed))


def record_compiled(path: Path, seed: int, budget_s: float, only: str = "") -> None:
    """Each small network eager and compiled: memory of every allocation of a step, kernels, and the partition."""
    import torch
    from small_workloads import SMALL

    began = time.perf_counter()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with gzip.open(path, "wt") as out:
        for name in only.split(",") if only else SMALL:
            left_s = budget_s - (time.perf_counter() - began)
            if left_s < COMPILE_S:
                print(f"{name} and what follows left out: {left_s:.0f} s left", flush=True)
                break
            for compiled in (False, True):
                row = _network(name, compiled)
                out.write(json.dumps(row) + "\n")
                out.flush()
                brief = {k: v for k, v in row.items() if k not in ("kernels", "trace", "graphs", "code")}
                print(f"{time.perf_counter() - began:.0f} s", brief, flush=True)


def _network(name: str, compiled: bool) -> dict[str, Any]:
    import torch
    from record_models import step_of
    from small_workloads import SMALL

    work, row = SMALL[name], {"section": "compiled", "name": name, "execution": "compiled" if compiled else "eager"}
    graphs: list[dict[str, Any]] = []
    code: list[str] = []
    try:
        with torch.device("cuda"):  # only while building: a default device slows every eager call
            model, args, kwargs = work.build()
        model.train(work.mode == "train")
        ran: Any = model
        if compiled:
            torch._dynamo.reset()
            _watch_partition(graphs)
            _watch_code(code)
            ran = torch.compile(model)
        row |= _measured(step_of(work, ran, args, kwargs))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    if compiled:
        row |= {"graphs": graphs, "code": code}
    model = ran = args = kwargs = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _measured(step: Callable[[], None]) -> dict[str, Any]:
    import torch
    from record_models import kernels

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    walls = []
    for _ in range(5):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began)
    found = {"wall_s": sorted(walls)[2], "base_bytes": base, "peak_bytes": torch.cuda.max_memory_allocated()}
    found |= kernels(step)
    try:
        return found | {"trace": _allocations(step)}
    except Exception as error:  # a private interface of the allocator: the rest is worth keeping without it
        return found | {"trace_error": f"{type(error).__name__}: {error}"}


def _allocations(step: Callable[[], None]) -> list[int]:
    """Bytes allocated (positive) and freed (negative) during one step, in order."""
    import torch

    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=200_000, clear_history=True)
    try:
        step()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[e["action"]] * int(e["size"]) for e in events if e["action"] in signs]


def _watch_partition(graphs: list[dict[str, Any]]) -> None:
    """Write down the forward and backward graphs that training graphs are cut into."""
    import torch._functorch.config as functorch_config
    from torch._inductor import compile_fx

    functorch_config.enable_autograd_cache = False
    original = getattr(compile_fx, "_unwatched_partition", compile_fx.min_cut_rematerialization_partition)

    def watched(*args: Any, **kwargs: Any) -> Any:
        forward, backward = original(*args, **kwargs)
        graphs.append({"forward": _nodes(forward.graph.nodes), "backward": _nodes(backward.graph.nodes)})
        return forward, backward

    compile_fx._unwatched_partition = original
    compile_fx.min_cut_rematerialization_partition = watched


def _watch_code(found: list[str]) -> None:
    """Write down the lines of the generated wrappers that allocate, free, reuse and launch."""
    from torch._inductor.graph import GraphLowering

    words = ("empty_strided", "del ", "reuse", "extern_kernels", ".run(", "torch.ops.aten", "def call")

    def keep(code: str) -> None:
        lines = (line.strip() for line in code.splitlines())
        found.extend(line[:200] for line in lines if any(word in line for word in words))

    GraphLowering.save_output_code = staticmethod(keep)


def _nodes(nodes: Iterable[Any]) -> list[list[Any]]:
    """[name, what is called, shape, element type, arguments] of every node."""
    found = []
    for node in nodes:
        value = node.meta.get("val")
        shape, dtype = (list(value.shape), str(value.dtype)) if hasattr(value, "shape") else ([], "")
        shape = [int(s) for s in shape]
        found.append([node.name, str(node.target), shape, dtype, [n.name for n in node.all_input_nodes]])
    return found


RECORDERS = {"blind": record_blind, "weak": record_weak, "compiled": record_compiled}


def record_all(out: Path, seed: int, budget_s: float) -> None:
    """The sections one after the other; what one leaves of its time the next ones share."""
    out.mkdir(parents=True, exist_ok=True)
    began, shares = time.perf_counter(), dict(SECTIONS)
    for name in SECTIONS:
        left_s = budget_s - (time.perf_counter() - began)
        mine_s = left_s * shares[name] / sum(shares.values()) - START_S
        shares.pop(name)
        command = [sys.executable, __file__, "--out", str(out), "--section", name, "--seed", str(seed)]
        try:
            subprocess.run([*command, "--budget-s", str(mine_s)], check=False, timeout=1.3 * mine_s + 30.0)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped, it took longer than it may", flush=True)
    _join(out, ("weak", "compiled"), out / "more.jsonl.gz")


def _join(out: Path, names: tuple[str, ...], to: Path) -> None:
    with gzip.open(to, "wt") as joined:
        for name in names:
            for line in _lines(out / f"{name}.jsonl.gz"):
                joined.write(line)
    for name in names:
        (out / f"{name}.jsonl.gz").unlink(missing_ok=True)


def _lines(path: Path) -> list[str]:
    """Whole lines of a file that may have been cut short."""
    found: list[str] = []
    try:
        with gzip.open(path, "rt") as lines:
            found.extend(line for line in lines if line.endswith("\n"))
    except (OSError, EOFError) as error:
        print(f"{path.name}: {error}", flush=True)
    return found


def file_away(source: Path, device: str, seed: int) -> None:
    """Put what was recorded where fits and judges look for it."""
    folder = Path(__file__).resolve().parent.parent / "data" / "recordings" / device
    lines = _lines(source / "more.jsonl.gz")
    networks = [line for line in lines if json.loads(line).get("section") == "compiled"]
    chosen = {f"operators_seed{seed}": [line for line in lines if line not in set(networks)], "compiled": networks}
    for name, found in (chosen | {f"blind_seed{seed + 1000}": _lines(source / "blind.jsonl.gz")}).items():
        with gzip.GzipFile(folder / f"{name}.jsonl.gz", "wb", mtime=0) as out:
            out.write("".join(found).encode())
        print(name, len(found), "lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--section", default="", choices=("", *RECORDERS))
    parser.add_argument("--only", default="", help="networks of the section compiled")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=350.0)
    options = parser.parse_args()
    if options.file:
        file_away(options.file, options.device, options.seed)
    elif options.out is None:
        parser.error("--out DIR or --file DIR is needed")
    elif options.section == "compiled":
        record_compiled(options.out / "compiled.jsonl.gz", options.seed, options.budget_s, options.only)
    elif options.section:
        RECORDERS[options.section](options.out / f"{options.section}.jsonl.gz", options.seed, options.budget_s)
    else:
        record_all(options.out, options.seed, options.budget_s)


if __name__ == "__main__":
    main()
