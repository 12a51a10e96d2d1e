"""A calibration run: measure operators, host costs and sustained loops on this machine's GPU and write recordings."""

from __future__ import annotations

import functools
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.bench.clock import Clock, host_time, kernels_of
from ridgeline.bench.environment import environment
from ridgeline.bench.operators import make
from ridgeline.bench.power import Board, sustained
from ridgeline.bench.sampling import Point, points

CHUNK = 120
RUNS = 4


def record_operators(
    path: Path,
    seed: int,
    budget_s: float,
    scale: float = 1.0,
    progress: Callable[[str], None] = print,
    only: Iterable[Point] | None = None,
) -> int:
    """Time every point of the sample (shuffled, so that a cut budget is still a fair sample); returns how many."""
    todo = list(points(seed, scale)) if only is None else list(only)
    random.Random(seed + 1).shuffle(todo)
    began, done, clock = time.perf_counter(), 0, Clock()
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        size = (
            12 if todo[0].library == "inductor" else CHUNK
        )  # compiled ones take a second each: check the budget often
        for start in range(0, len(todo), size):
            if time.perf_counter() - began > budget_s:
                break
            chunk = todo[start : start + size]
            rows = [_timed(point, clock) for point in chunk]
            _add_kernels(chunk, rows, clock)
            for row in rows:
                out.write(json.dumps(row) + "\n")
            done += len(rows)
            progress(
                f"{done}/{len(todo)} operators, {time.perf_counter() - began:.0f} s, "
                f"{sum('error' in r for r in rows)} refused in this chunk"
            )
    return done


def _timed(point: Point, clock: Clock) -> dict[str, Any]:
    """Event time of a forward operator; a small backward's is the host's time, so only its kernels are recorded."""
    row: dict[str, Any] = asdict(point)
    try:
        run = make(point.kind, point.dtype, point.phase, point.library, point.shape)
        # Bytes that running once allocates at its peak: the result, temporaries and the library's workspace
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        row["run_bytes"] = int(torch.cuda.max_memory_allocated() - before)
        if point.phase == "fwd":
            cold = clock.cold(run, 0.010, 0.040, 60)
            row |= {"cold_s": cold.median_s, "cold_low_s": cold.low_s, "cold_high_s": cold.high_s, "num": cold.num}
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = str(error).split("\n")[0][:200]
        torch.cuda.empty_cache()
    return row


def _add_kernels(chunk: list[Point], rows: list[dict[str, Any]], clock: Clock) -> None:
    """Profiled runs, cold and warm, for the names and pure durations of the kernels (medians over the runs)."""
    fine = [i for i, row in enumerate(rows) if "error" not in row]

    def runs() -> Iterator[Callable[[], Any]]:
        for i in fine:
            point = chunk[i]
            run = make(point.kind, point.dtype, point.phase, point.library, point.shape)
            run()
            for _ in range(RUNS):
                clock.flush.zero_()
                yield run
            for _ in range(RUNS):
                run()
                yield run

    stretches = kernels_of(runs())
    if len(stretches) != 2 * RUNS * len(fine):
        return
    for at, i in enumerate(fine):
        mine = stretches[2 * RUNS * at : 2 * RUNS * (at + 1)]
        rows[i]["kernels"], rows[i]["warm_kernels_s"] = (
            _medians(mine[:RUNS]),
            statistics.median(sum(k[1] for k in run) for run in mine[RUNS:]),
        )


def _medians(runs: list[list[tuple[str, float]]]) -> list[list[Any]]:
    """Median duration of each kernel over runs that launched the same ones; else the first run."""
    if len({len(run) for run in runs}) != 1:
        runs = runs[:1]
    return [[group[0][0][:160], round(statistics.median(k[1] for k in group), 9)] for group in zip(*runs, strict=True)]


def record_host(path: Path) -> None:
    """Host seconds per eager call, by what is called."""
    x, w = (
        torch.randn(16, 64, device="cuda", dtype=torch.bfloat16),
        torch.randn(64, 64, device="cuda", dtype=torch.bfloat16),
    )
    results = {name: host_time(run) for name, run in _host_calls(x, w).items()}
    results |= _autograd_costs(x, w)
    path.write_text(json.dumps({"environment": environment(), "host_s": results}, indent=1))


def _host_calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], Any]]:
    x4 = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    image, kernel = (
        torch.randn(1, 8, 8, 8, device="cuda", dtype=torch.bfloat16),
        torch.randn(8, 8, 3, 3, device="cuda", dtype=torch.bfloat16),
    )
    ids, vec = torch.randint(0, 16, (16,), device="cuda"), torch.randn(64, device="cuda", dtype=torch.bfloat16)
    empty, linear, wrapped = (
        torch.nn.Identity(),
        torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16),
        torch.nn.Sequential(torch.nn.Identity()),
    )
    many = [torch.randn(64, device="cuda") for _ in range(100)]

    def quiet(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return run()

        return call

    calls: dict[str, Callable[[], Any]] = {
        "no_grad_context": lambda: None,
        "view": lambda: x.view(64, 16),
        "transpose": lambda: x.transpose(0, 1),
        "unsqueeze": lambda: x.unsqueeze(0),
        "slice": lambda: x[:, :32],
        "expand": lambda: vec.expand(16, 64),
        "reshape": lambda: x.reshape(-1),
        "empty": lambda: torch.empty(16, 64, device="cuda"),
        "add": lambda: x + x,
        "mul_scalar": lambda: x * 2.0,
        "add_": lambda: x.add_(0.0),
        "silu": lambda: F.silu(x),
        "gelu": lambda: F.gelu(x),
        "cast": lambda: x.float(),
        "mm": lambda: torch.mm(x, w),
        "addmm": lambda: torch.addmm(vec, x, w),
        "linear": lambda: F.linear(x, w),
        "linear_bias": lambda: F.linear(x, w, vec),
        "linear_3d": lambda: F.linear(x4[0], w),
        "bmm": lambda: torch.bmm(x4[0], x4[0].transpose(1, 2)),
        "matmul_4d": lambda: x4 @ x4.transpose(-1, -2),
        "layer_norm": lambda: F.layer_norm(x, (64,), vec, vec),
        "rms_norm": lambda: F.rms_norm(x, (64,), vec),
        "softmax": lambda: F.softmax(x, -1),
        "sum": lambda: x.sum(0),
        "mean": lambda: x.mean(-1, keepdim=True),
        "pow": lambda: x.pow(2),
        "rsqrt": lambda: torch.rsqrt(x),
        "sdpa": lambda: F.scaled_dot_product_attention(x4, x4, x4),
        "sdpa_causal": lambda: F.scaled_dot_product_attention(x4, x4, x4, is_causal=True),
        "conv2d": lambda: F.conv2d(image, kernel, padding=1),
        "batch_norm": lambda: F.batch_norm(
            image, vec[:8].float(), vec[:8].float().abs(), vec[:8].float(), vec[:8].float(), False
        ),
        "max_pool2d": lambda: F.max_pool2d(image, 2),
        "embedding": lambda: F.embedding(ids, w),
        "cat": lambda: torch.cat([x, x], -1),
        "contiguous": lambda: x.t().contiguous(),
        "dropout": lambda: F.dropout(x, 0.1, True),
        "topk": lambda: torch.topk(x, 2),
        "sort": lambda: torch.sort(x),
        "cumsum": lambda: torch.cumsum(x, 0),
        "index": lambda: w[ids],
        "where": lambda: torch.where(x > 0, x, x),
        "arange": lambda: torch.arange(64, device="cuda"),
        "zeros": lambda: torch.zeros(64, device="cuda"),
        "cos": lambda: x.cos(),
        "neg": lambda: -x,
        "argmax": lambda: x.argmax(-1),
        "foreach_add_100": lambda: torch._foreach_add_(many, 1.0),
        "foreach_mul_100": lambda: torch._foreach_mul_(many, many),
        "cross_entropy": lambda: F.cross_entropy(x.float(), ids),
        "embedding_bag": lambda: F.embedding_bag(ids, w, ids[:1] * 0),
        "module_identity": lambda: empty(x),
        "module_nested_identity": lambda: wrapped(x),
        "module_linear": lambda: linear(x),
        "grouped_mm": _grouped_call(x, w),
    }
    return {name: quiet(run) for name, run in calls.items()}


def _grouped_call(x: torch.Tensor, w: torch.Tensor) -> Callable[[], Any]:
    experts, ends = torch.stack([w, w]), torch.tensor([8, 16], device="cuda", dtype=torch.int32)
    return lambda: torch._grouped_mm(x, experts, offs=ends)


def _autograd_costs(x: torch.Tensor, w: torch.Tensor) -> dict[str, float]:
    """What recording a gradient adds to a forward call, and what the backward engine spends per op."""
    leaf, weight = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
    vec = torch.ones(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def chain(fn: Callable[[torch.Tensor], torch.Tensor], length: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = leaf
            for _ in range(length):
                y = fn(y)
            return y

        return run

    found: dict[str, float] = {}
    x4 = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mul": lambda t: t * 1.01,
        "linear": lambda t: F.linear(t, weight),
        "layer_norm": lambda t: F.layer_norm(t, (64,), vec, vec),
        "silu": F.silu,
        "view": lambda t: t.view(16, 64),
        "softmax": lambda t: F.softmax(t, -1),
        "sdpa": lambda t: F.scaled_dot_product_attention(t.view(1, 1, 16, 64), x4[:1, :1], x4[:1, :1]).view(16, 64),
    }
    for name, fn in cases.items():
        one, many = chain(fn, 1), chain(fn, 21)
        found[f"grad_forward_{name}"] = (host_time(many, 70) - host_time(one, 70)) / 20

        def both(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
            def call() -> None:
                leaf.grad = weight.grad = vec.grad = None
                run().sum().backward()

            return call

        found[f"grad_both_{name}"] = (host_time(both(many), 70) - host_time(both(one), 70)) / 20
    return found


def record_power(path: Path, seconds: float = 1.2) -> None:
    """Sustained loops: how board power and clock respond to what is run."""
    board = Board()
    time.sleep(1.0)
    rows: list[dict[str, Any]] = [{"name": "idle", "power_w": board.power_w(), "limit_w": board.limit_w()}]
    for name, point in _power_points():
        try:
            run = make(point.kind, point.dtype, point.phase, point.library, point.shape)
            rows.append({"name": name, **asdict(point), **asdict(sustained(run, board, seconds))})
        except RuntimeError as error:
            rows.append({"name": name, **asdict(point), "error": str(error).split("\n")[0][:200]})
        torch.cuda.empty_cache()
    path.write_text(json.dumps({"environment": environment(), "loops": rows}, indent=1))


def _power_points() -> list[tuple[str, Point]]:
    made = [
        (f"gemm_{dtype}_{size}", Point("gemm", dtype, "fwd", "cublas", {"m": size, "n": size, "k": size}))
        for dtype, sizes in (
            ("bf16", (1024, 2048, 4096, 8192, 16384)),
            ("fp8", (4096, 8192)),
            ("fp32", (4096,)),
            ("tf32", (8192,)),
        )
        for size in sizes
    ]
    made += [
        (f"gemm_skinny_{m}", Point("gemm", "bf16", "fwd", "cublas", {"m": m, "n": 8192, "k": 8192}))
        for m in (1, 16, 64, 256, 1024)
    ]
    made += [
        (f"{kind}_{n}", Point(kind, "bf16", "fwd", "aten", {"n": n, "c": 4096}))
        for kind in ("add", "gelu", "copy", "softmax")
        for n in (1024, 65536)
    ]
    made += [
        (
            f"attention_{lib}_{phase}",
            Point(
                "attention",
                "bf16",
                phase,
                lib,
                {"b": 2, "h": 32, "hkv": 32, "s": 4096, "skv": 4096, "d": 128, "causal": 1},
            ),
        )
        for lib in ("fa2", "cudnn")
        for phase in ("fwd", "bwd")
    ]
    made.append(
        (
            "conv2d",
            Point(
                "conv2d",
                "bf16",
                "fwd",
                "cudnn",
                {"n": 64, "c": 256, "h": 56, "w": 56, "o": 256, "k": 3, "stride": 1, "groups": 1, "nhwc": 1},
            ),
        )
    )
    return made


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=330)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--skip", default="")
    parser.add_argument("--compiled-s", type=float, default=0.0, help="seconds to spend on Inductor's kernels")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if "host" not in options.skip:
        record_host(options.out / "host.json")
        print(f"host costs: {time.perf_counter() - began:.0f} s", flush=True)
    if "power" not in options.skip:
        record_power(options.out / "power.json")
        print(f"power loops: {time.perf_counter() - began:.0f} s", flush=True)
    show = functools.partial(print, flush=True)
    record_operators(options.out / "operators.jsonl.gz", options.seed, options.budget_s, options.scale, show)
    if options.compiled_s:
        record_operators(
            options.out / "inductor.jsonl.gz",
            options.seed,
            options.compiled_s,
            1.0,
            show,
            points(options.seed, compiled=True),
        )
    print(f"all: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
