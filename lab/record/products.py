"""Which kernels and grids cuBLAS launches for hundreds of thousands of products, and how long thousands of them take.

    python -m lab.record.products --out DIR [--seconds 22]      on the GPU: about 95 s for everything
    python -m lab.record.products --out DIR --odd 4             only asking, only odd rows and wide elements
    python -m lab.record.products --out DIR --part odd-times    only timing, only odd rows and wide elements
    python -m lab.record.products --out DIR --part general-times  only timing, as products are judged
    python -m lab.record.products --file DIR [--device h200]    afterwards

Products are captured into a graph that never runs: its nodes name every kernel with its grid, some ten thousand shapes
a second, on whatever path the framework and the library take (products of vectors included). At the same time cuDNN is
asked about convolutions in single precision (``lab/record/cudnn_heuristic.py``). Then, alone on the device, products
of the same distribution are timed between events (median of fifteen) and by the profiler (of three), the L2 flushed
before each, and convolutions in single precision after them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import itertools
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lab import ROOT
from lab.record import surveys
from ridgeline.bench.sampling import Point, between
from ridgeline.cost.time.gemm.calls import alignment

BATCH = 400  # products captured into one graph
MAX_ANSWERS = 120_000  # of one capturing process: what four of them write stays below six megabytes
CHUNK, RUNS, REPEATS = 200, 3, 15
ELEMENTS = 1 << 29  # of every operand's buffer
KERNEL, MEMSET, RELAXED = 0, 2, 2  # numbers of the driver's interface
VECTORS_FRAC, GEMM_FRAC = 0.25, 0.75
DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp8")
LAYOUTS = ("nt", "nn", "tn")
Nodes = list[tuple[str, tuple[int, ...]]]
"""Kernels that a product launches, each with its grid and block."""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the driver's interface."""

    _fields_ = [
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]  # fmt: skip


class MemsetNode(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS of the driver's interface."""

    _fields_ = [
        ("dst", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


# Shapes


def product(rng: random.Random) -> Point | None:
    """A product as they are judged, as models have them, or of odd sizes; forward, never its gradients."""
    way = rng.random()
    if way < 0.34:
        point = surveys._general_gemm(rng)
    elif way < 0.46:
        point = surveys._general_bmm(rng)
    elif way < 0.60:
        point = _tall(rng)
    else:
        dtype = rng.choices(("bf16", "fp16", "fp32", "tf32"), (50, 12, 25, 13))[0]
        point = surveys._odd(dtype, batched=rng.random() < 0.3)(rng)
    if point is None:
        return None
    shape = dict(point.shape)
    shape.setdefault("layout", "nt")
    if point.dtype != "fp8" and rng.random() < 0.12:
        shape["layout"] = "tn"
    return Point(point.kind, point.dtype, "fwd", "cublas", shape)


def odd_product(rng: random.Random) -> Point | None:
    """A product that the library has no favorite kernel for, more often than not as they are judged."""
    way = rng.random()
    if way < 0.45:
        point = surveys._general_gemm(rng)
    elif way < 0.6:
        point = surveys._general_bmm(rng)
    else:
        dtype = rng.choices(("bf16", "fp16", "fp32", "tf32"), (44, 10, 26, 20))[0]
        point = surveys._odd(dtype, batched=rng.random() < 0.3)(rng)
    if point is None or point.dtype == "fp8":
        return None
    layout = "tn" if rng.random() < 0.12 else point.shape.get("layout", "nt")
    shape = {**point.shape, "layout": layout}
    problem = (shape.get("b", 1), shape["m"], shape["n"], shape["k"], layout)
    if point.dtype in ("bf16", "fp16") and alignment(problem, point.dtype) == 8:
        return None
    return Point(point.kind, point.dtype, "fwd", "cublas", shape)


def general_product(rng: random.Random) -> Point | None:
    """A product as they are judged, forward; one in four has a single row, which few of those have."""
    if rng.random() < VECTORS_FRAC:
        dtype = rng.choices(("bf16", "fp16", "fp32", "tf32"), (64, 12, 18, 6))[0]
        shape = {"m": 1, "n": surveys._size(rng, 16, 16384), "k": surveys._size(rng, 16, 16384)}
        return Point("gemm", dtype, "fwd", "cublas", {**shape, "layout": rng.choices(LAYOUTS, (57, 38, 5))[0]})
    point = surveys._general_gemm(rng) if rng.random() < GEMM_FRAC else surveys._general_bmm(rng)
    if point is None:
        return None
    return Point(point.kind, point.dtype, "fwd", "cublas", {"layout": "nt", **point.shape})


_WIDTHS = (512, 768, 1024, 1280, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 11008, 12288, 14336,
           16384)  # fmt: skip


def _tall(rng: random.Random) -> Point:
    """Tokens by a layer's widths."""
    m = between(rng, 1, 32768)
    if rng.random() < 0.5:
        m = max(1, m // 64) * 64
    n, k = rng.choice(_WIDTHS), rng.choice(_WIDTHS)
    while m * max(n, k) >= ELEMENTS:
        m //= 2
    dtype = rng.choices(("bf16", "fp16", "fp8", "tf32"), (65, 10, 18, 7))[0]
    layout = "nt" if dtype == "fp8" else rng.choices(LAYOUTS, (65, 25, 10))[0]
    return Point("gemm", dtype, "fwd", "cublas", {"m": m, "n": n, "k": k, "layout": layout})


def flops(shape: dict[str, Any]) -> float:
    return 2.0 * int(shape.get("b", 1) * shape["m"] * shape["n"] * shape["k"])


# Running


class Operands:
    """Buffers that every product reads and writes through views, so that nothing is made anew."""

    def __init__(self, device: str, elements: int = ELEMENTS) -> None:
        import torch

        self.torch = torch
        half = [torch.randn(elements, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.one = torch.ones((), device=device)
        self.buffers: dict[str, list[Any]] = {
            "bf16": half,
            "fp16": [t.to(torch.float16) for t in half],
            "fp8": [t.clamp(-8, 8).to(torch.float8_e4m3fn) for t in half],
            "fp32": [torch.randn(elements // 2, device=device) for _ in range(2)],
        }
        self.buffers["tf32"] = self.buffers["fp32"]
        wide = torch.empty(elements, device=device)
        self.outputs = {"fp32": wide, "tf32": wide, "fp16": wide.view(torch.float16)}
        self.outputs["bf16"] = self.outputs["fp8"] = wide.view(torch.bfloat16)

    def fits(self, shape: dict[str, Any], dtype: str) -> bool:
        b, m, n, k = (shape.get(name, 1) for name in "bmnk")
        return bool(b * max(m * k, n * k, m * n) <= self.buffers[dtype][0].numel())

    def run(self, point: Point) -> Callable[[], Any]:
        torch, shape = self.torch, point.shape
        torch.backends.cuda.matmul.allow_tf32 = point.dtype == "tf32"
        b, m, n, k = (shape.get(name, 1) for name in "bmnk")
        left, right = self.buffers[point.dtype]
        layout = shape["layout"]
        if point.kind == "bmm":
            x = left.as_strided((b, m, k), (m * k, k, 1) if layout[0] == "n" else (m * k, 1, m))
            y = right.as_strided((b, k, n), (n * k, n, 1) if layout[1] == "n" else (n * k, 1, k))
            out = self.outputs[point.dtype].as_strided((b, m, n), (m * n, n, 1))
            return lambda: torch.bmm(x, y, out=out)
        x = left.as_strided((m, k), (k, 1) if layout[0] == "n" else (1, m))
        y = right.as_strided((k, n), (n, 1) if layout[1] == "n" else (1, k))
        out = self.outputs[point.dtype].as_strided((m, n), (n, 1))
        if point.dtype == "fp8":
            one = self.one
            return lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=out)
        return lambda: torch.mm(x, y, out=out)


class Capture:
    """Products recorded into graphs that never run; what their nodes say."""

    def __init__(self) -> None:
        import torch

        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.stream = torch.cuda.Stream()
        self.mark = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.names: dict[int, str] = {}
        half, full = (torch.ones(64, 64, device="cuda", dtype=t) for t in (torch.bfloat16, torch.float32))
        with torch.cuda.stream(self.stream):  # handles and workspaces come with the first product of a stream
            half @ half, full @ full, torch.bmm(half[None], half[None])
        torch.cuda.synchronize()

    def check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: driver error {status}")

    def nodes(self, runs: Iterator[Callable[[], Any]]) -> list[Nodes]:
        """(kernel, grid and block) of each run, told apart by memsets of a mark; empty for a run that was refused."""
        import torch

        handle, graph = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_void_p()
        with torch.cuda.stream(self.stream):
            self.check(self.cuda.cuStreamBeginCapture_v2(handle, RELAXED), "begin")
            number = -1
            for number, run in enumerate(runs):
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    run()
                self.cuda.cuMemsetD32Async(
                    ctypes.c_uint64(self.mark.data_ptr()), ctypes.c_uint(number + 1), ctypes.c_size_t(1), handle
                )
            self.check(self.cuda.cuStreamEndCapture(handle, ctypes.byref(graph)), "end")
        try:
            return self.read(graph, number + 1)
        finally:
            self.cuda.cuGraphDestroy(graph)

    def read(self, graph: ctypes.c_void_p, expected: int) -> list[Nodes]:
        count = ctypes.c_size_t()
        self.check(self.cuda.cuGraphGetNodes(graph, None, ctypes.byref(count)), "count")
        nodes = (ctypes.c_void_p * count.value)()
        self.check(self.cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "nodes")
        kind, kernel, memset = ctypes.c_int(), KernelNode(), MemsetNode()
        found: list[Nodes] = [[]]
        for value in nodes:
            node = ctypes.c_void_p(value)
            self.check(self.cuda.cuGraphNodeGetType(node, ctypes.byref(kind)), "type")
            if kind.value == KERNEL:
                self.check(self.cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(kernel)), "kernel")
                found[-1].append((self.name(kernel), (*kernel.grid, *kernel.block)))
            elif kind.value == MEMSET:
                self.check(self.cuda.cuGraphMemsetNodeGetParams(node, ctypes.byref(memset)), "memset")
                if memset.dst != self.mark.data_ptr():
                    found[-1].append(("Memset", (memset.width * memset.size, memset.height, 0, 0, 0, 0)))
                    continue
                if memset.value != len(found):
                    raise RuntimeError(f"nodes out of order: mark {memset.value} after {len(found) - 1} products")
                found.append([])
        if len(found) != expected + 1:
            raise RuntimeError(f"{len(found) - 1} marks for {expected} products")
        return found[:-1]

    def name(self, node: KernelNode) -> str:
        handle = node.kernel or node.func
        if handle not in self.names:
            text = ctypes.c_char_p()
            ask = self.cuda.cuKernelGetName if node.kernel else self.cuda.cuFuncGetName
            self.check(ask(ctypes.byref(text), ctypes.c_void_p(handle)), "name")
            self.names[handle] = (text.value or b"").decode(errors="replace")[:180]
        return self.names[handle]


def capture_many(path: Path, stream: Iterator[Point | None], seconds: float) -> None:
    """Shapes and what was launched for them, as columns of numbers."""
    operands, capture = Operands("cuda"), Capture()
    answers: dict[tuple[str, ...], int] = {}
    columns: list[tuple[int, ...]] = []
    end, lost = time.monotonic() + seconds, 0
    while time.monotonic() < end and len(columns) < MAX_ANSWERS:
        batch = list(itertools.islice(stream, BATCH))
        if not batch:
            break
        points = [p for p in batch if p and operands.fits(p.shape, p.dtype)]
        try:
            found = capture.nodes(operands.run(p) for p in points)
        except RuntimeError as error:
            lost += 1
            print("graph lost:", error, flush=True)
            if lost > 20:
                break
            continue
        columns += [_row(p, nodes, answers) for p, nodes in zip(points, found, strict=True) if nodes]
    save(path, columns, answers)


def _row(point: Point, nodes: Nodes, answers: dict[tuple[str, ...], int]) -> tuple[int, ...]:
    label = answers.setdefault(tuple(name for name, _ in nodes), len(answers))
    main = next((size for name, size in nodes if name != "Memset"), (0,) * 6)
    b, m, n, k = (int(point.shape.get(name, 1)) for name in "bmnk")
    code = DTYPES.index(point.dtype) * 8 + LAYOUTS.index(point.shape["layout"]) * 2 + (point.kind == "bmm")
    return (code, b, m, n, k, label, *main[:4])


COLUMNS = ("code", "b", "m", "n", "k", "label", "gx", "gy", "gz", "threads")


def save(path: Path, columns: list[tuple[int, ...]], answers: dict[tuple[str, ...], int]) -> None:
    table = np.array(columns, dtype=np.int64).reshape(-1, len(COLUMNS)).T
    narrow = [column.astype(np.min_scalar_type(int(column.max(initial=0)))) for column in table]
    kept = dict(zip(COLUMNS, narrow, strict=True))
    np.savez_compressed(path, allow_pickle=False, **kept, answers=np.array(json.dumps(list(answers))))
    print(f"{len(columns)} products, {len(answers)} answers, {path.stat().st_size} bytes", flush=True)


def recorded() -> Iterator[Point]:
    """Products that fits know already, for the grids that were not recorded with them."""
    for path in sorted((ROOT / "data" / "recordings" / "h200").glob("operators_seed*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for row in map(json.loads, lines):
                if row.get("kind") in ("gemm", "bmm") and row["phase"] == "fwd" and row["dtype"] in DTYPES:
                    shape = {"layout": "nn" if row["kind"] == "bmm" else "nt", **row["shape"]}
                    yield Point(row["kind"], row["dtype"], "fwd", "cublas", shape)


def endless(seed: int, draw: Callable[[random.Random], Point | None] = product) -> Iterator[Point | None]:
    rng = random.Random(seed)
    while True:
        yield draw(rng)


def time_many(
    path: Path, seed: int, seconds: float, draw: Callable[[random.Random], Point | None] = product
) -> None:
    """Products timed one by one, with what a graph of them launches; random order, so that a cut is a fair sample."""
    import torch

    from ridgeline.bench.clock import FLUSH_BYTES, kernels_of
    from ridgeline.bench.environment import environment
    from ridgeline.bench.record import _medians

    operands, capture, rng = Operands("cuda"), Capture(), random.Random(seed)
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    end, kept = time.monotonic() + seconds, 0
    with gzip.open(path, "wt") as out:
        out.write(json.dumps({"environment": environment(), "seed": seed, "date": time.strftime("%Y-%m-%d")}) + "\n")
        while time.monotonic() < end:
            points = [p for p in (draw(rng) for _ in range(CHUNK)) if p and _timed(operands, p)]
            try:
                found = capture.nodes(operands.run(p) for p in points)
                points = [p for p, nodes in zip(points, found, strict=True) if nodes]
                found = [nodes for nodes in found if nodes]
                seen = [_events_s(operands.run(point), flush) for point in points]
                stretches = kernels_of(_runs(points, operands, flush))
            except (RuntimeError, ValueError) as error:
                print("chunk lost:", error, flush=True)
                continue
            if len(stretches) != RUNS * len(points):
                print("chunk lost:", len(stretches), "stretches for", len(points), flush=True)
                continue
            for place, (point, nodes) in enumerate(zip(points, found, strict=True)):
                kernels = _medians(stretches[RUNS * place : RUNS * (place + 1)])
                row = {**asdict(point), **seen[place], "kernels": kernels, "grids": [size[:4] for _, size in nodes]}
                out.write(json.dumps(row) + "\n")
            kept += len(points)
            print(f"{kept} timed, {end - time.monotonic():.0f} s left", flush=True)


def _timed(operands: Operands, point: Point) -> bool:
    work = flops(point.shape)
    return operands.fits(point.shape, point.dtype) and work < (3e10 if point.dtype == "fp32" else 1.2e12)


def between_events_ms(run: Callable[[], Any], flush: Any, repeats: int) -> list[float]:
    """Each of so many runs, one after the other without a wait, the L2 flushed before each."""
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _events_s(run: Callable[[], Any], flush: Any) -> dict[str, float]:
    """Median, tenth and ninetieth percentile between events around a run, the L2 flushed before each."""
    for _ in range(2):
        run()
    found = sorted(1e-3 * ms for ms in between_events_ms(run, flush, REPEATS))
    tenth = REPEATS // 10
    return {"cold_s": found[REPEATS // 2], "cold_low_s": found[tenth], "cold_high_s": found[-1 - tenth]}


def _runs(points: Any, operands: Operands, flush: Any) -> Iterator[Callable[[], Any]]:
    for point in points:
        run = operands.run(point)
        run()
        for _ in range(RUNS):
            flush.zero_()
            yield run


# Convolutions in single precision


def single_points(seed: int) -> list[Point]:
    """Convolutions of one type of kernels that are told badly: full and rounded single precision, both passes."""
    rng, found = random.Random(seed), list[Point]()
    while len(found) < 3000:
        phase = "fwd" if rng.random() < 0.45 else "bwd"
        sort = rng.choices(("dense", "grouped", "depthwise"), (84, 8, 8))[0]
        point = surveys._any_conv(phase, sort, (0, 0, 80, 20), 6e10)(rng)
        if point is not None:
            found.append(point)
    return found


def time_convs(path: Path, seed: int, seconds: float) -> None:
    from lab.record import choices as record_choices

    record_choices.record_points(path, single_points(seed), seed, seconds)


# Everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--part", choices=("capture", "odd", "times", "odd-times", "general-times", "convs"))
    parser.add_argument("--odd", type=int, default=0, help="so many processes ask for odd products; nothing is timed")
    parser.add_argument("--seed", type=int, default=6001)
    parser.add_argument("--seconds", type=float, default=22.0, help="time for each of the three parts")
    options = parser.parse_args()
    if options.file:
        file_away(options.file, options.device, options.seed)
        return
    if options.out is None:
        parser.error("--out DIR or --file DIR is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "capture":
        if options.seed % 2:
            capture_many(options.out / "recorded.npz", recorded(), options.seconds)
        capture_many(options.out / f"products{options.seed}.npz", endless(options.seed), options.seconds)
    elif options.part == "odd":
        capture_many(options.out / f"odd{options.seed}.npz", endless(options.seed, odd_product), options.seconds)
    elif options.part == "times":
        time_many(options.out / "products.jsonl.gz", options.seed, options.seconds)
    elif options.part == "odd-times":
        time_many(options.out / "odd_times.jsonl.gz", options.seed, options.seconds, odd_product)
    elif options.part == "general-times":
        time_many(options.out / "odd_times.jsonl.gz", options.seed, options.seconds, general_product)
    elif options.part == "convs":
        time_convs(options.out / "convs.jsonl.gz", options.seed, options.seconds)
    elif options.odd:
        ask_odd(options.out, options.seed, options.seconds, options.odd)
    else:
        everything(options.out, options.seed, options.seconds)


def ask_odd(out: Path, seed: int, seconds: float, jobs: int) -> None:
    """Odd products from several processes, as one table."""
    me = [sys.executable, "-m", "lab.record.products", "--out", str(out), "--seconds", str(seconds)]
    running = [subprocess.Popen([*me, "--part", "odd", "--seed", str(seed + i)]) for i in range(jobs)]
    for process in running:
        try:
            process.wait(seconds + 60)
        except subprocess.TimeoutExpired:
            process.kill()
    joined(sorted(out.glob("odd*.npz")), out / "answers.npz")


def joined(paths: list[Path], target: Path) -> None:
    """The answers of several files in one, which holds each name once."""
    answers: dict[tuple[str, ...], int] = {}
    columns: list[tuple[int, ...]] = []
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            place = [answers.setdefault(tuple(names), len(answers)) for names in json.loads(str(file["answers"]))]
            table = np.stack([file[name].astype(np.int64) for name in COLUMNS])
        table[COLUMNS.index("label")] = np.array(place)[table[COLUMNS.index("label")]]
        columns += map(tuple, table.T.tolist())
        path.unlink()
    save(target, columns, answers)


def everything(out: Path, seed: int, seconds: float) -> None:
    """Asking side by side, which needs no quiet device; then timing, alone; then one file of it all."""
    me = [sys.executable, "-m", "lab.record.products", "--out", str(out), "--seconds", str(seconds)]
    ask = [sys.executable, "-m", "lab.record.cudnn_heuristic", "--device", "--single", "--workers", "10", "--num",
           "9000", "--seconds", str(seconds), "--seed", str(seed), "--out", str(out / "cudnn")]
    jobs = [[*me, "--part", "capture", "--seed", str(seed + i)] for i in range(2)] + [ask]
    running = [subprocess.Popen(job) for job in jobs]
    for process in running:
        try:
            process.wait(seconds + 45)
        except subprocess.TimeoutExpired:
            process.kill()
    for part in ("times", "convs"):
        try:
            subprocess.run([*me, "--part", part, "--seed", str(seed)], timeout=seconds + 45, check=False)
        except subprocess.TimeoutExpired:
            print(part, "ran out of time", flush=True)
    files = [f for f in sorted(out.rglob("*")) if f.suffix in (".npz", ".gz")]
    with tarfile.open(out / "products.tar", "w") as tar:
        for file in files:
            tar.add(file, file.name if file.parent == out else f"cudnn_{file.name}")
            file.unlink()


def file_away(source: Path, device: str, seed: int) -> None:
    """Put what was timed where fits look for it."""
    folder = ROOT / "data" / "recordings" / device
    if (source / "answers.npz").is_file():
        (folder / f"products_seed{seed}.npz").write_bytes((source / "answers.npz").read_bytes())
        return
    if (source / "odd_times.jsonl.gz").is_file():
        text = gzip.decompress((source / "odd_times.jsonl.gz").read_bytes())
        with gzip.GzipFile(folder / f"operators_seed{seed}.jsonl.gz", "wb", mtime=0) as out:
            out.write(text)
        return
    with tarfile.open(source / "products.tar") as tar:
        for name, target in (("products.jsonl.gz", seed), ("convs.jsonl.gz", seed + 1)):
            text = gzip.decompress(tar.extractfile(name).read())  # type: ignore[union-attr]
            with gzip.GzipFile(folder / f"operators_seed{target}.jsonl.gz", "wb", mtime=0) as out:
                out.write(text)
            print(name, text.count(b"\n"), "lines")


if __name__ == "__main__":
    main()
