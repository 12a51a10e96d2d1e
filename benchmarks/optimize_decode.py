"""Decoding on one GPU: skinny products against cuBLAS, attention over a cache, and a whole step of Llama 8B.

``--parts`` chooses among ``checks`` (numbers against references), ``halves`` (float32 products), ``products`` (every
shape and number of rows over a list of configurations), ``defaults`` (the same as they run), ``attention``, ``chain``
(a step made by hand of our kernels in a CUDA graph, kernels overlapped or not) and ``llama`` (the Hugging Face model,
eager and rewritten). Times of kernels are those of a CUDA graph of many calls over rotating copies of the weights, so
that none is in the cache: launches are in, the host is not. Results are written to ``--out`` as they come.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline import kernels
from ridgeline.bench.check import check_case
from ridgeline.kernels import launcher, pack, tuning
from ridgeline.kernels.compiler import Variant
from ridgeline.kernels.contract import trials
from ridgeline.kernels.decode_attention import config as decode
from ridgeline.kernels.linear import op as linear_op
from ridgeline.kernels.linear.config import Linear
from ridgeline.kernels.matmul.config import Product
from ridgeline.kernels.variants import variants_of

ROTATED_BYTES = 256 << 20
CHECKED = ("linear", "linear_gated", "decode_attention", "matmul")
SHAPES = ((4096, 4096), (6144, 4096), (1024, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROWS = (1, 2, 4, 8, 16)
ROW_CONFIGS = [
    Linear("row", outputs, step, warps)
    for outputs in (1, 2, 4, 8)
    for step, warps in ((512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
]
FEW_ROW_CONFIGS = [
    Linear("row", o, s, w) for o, s, w in ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (2, 2048, 8), (4, 512, 2))
]
TILE_CONFIGS = [
    Linear("tile", outputs, step, warps, stages, shares)
    for outputs, step, warps, stages, shares in (
        (64, 128, 4, 3, 1),
        (64, 128, 4, 4, 1),
        (64, 64, 4, 6, 1),
        (64, 256, 4, 3, 1),
        (128, 64, 4, 4, 1),
        (128, 128, 8, 3, 1),
        (16, 256, 1, 3, 1),
        (16, 256, 1, 4, 1),
        (16, 128, 1, 6, 1),
        (32, 128, 2, 4, 1),
        (32, 256, 2, 3, 1),
        (16, 256, 2, 4, 1),
        (64, 128, 4, 4, 2),
        (64, 128, 4, 4, 4),
        (64, 128, 4, 3, 4),
        (64, 128, 4, 4, 8),
        (64, 256, 4, 3, 4),
        (64, 64, 4, 6, 4),
        (16, 256, 1, 4, 2),
        (32, 128, 2, 4, 4),
    )
]
GATED_CONFIGS = [
    *(
        Linear("row", o, s, w)
        for o, s, w in ((1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (1, 2048, 4), (2, 2048, 8), (2, 512, 2))
    ),
    *(Linear("tile", o, s, w, g) for o, s, w, g in ((64, 64, 4, 4), (64, 128, 4, 3), (16, 128, 1, 4), (32, 128, 2, 3))),
]

DECODE_CONFIGS = [
    decode.Decode(keys, shares, warps, stages)
    for keys, warps, stages in ((32, 2, 2), (64, 4, 2), (64, 4, 3))
    for shares in (8, 16, 32, 64)
]
OTHER_CONFIGS = [Linear("row", o, s, 4) for o in (1, 2, 4) for s in (512, 1024)]


HALVES_CONFIGS = [
    Product(*c)
    for c in (
        (128, 128, 64, 8, 8, 3),
        (128, 128, 64, 8, 8, 2),
        (128, 128, 32, 8, 8, 4),
        (128, 128, 32, 8, 8, 6),
        (128, 64, 64, 8, 4, 3),
        (64, 128, 64, 8, 4, 2),
        (128, 64, 64, 8, 4, 2),
        (64, 64, 64, 8, 4, 3),
        (128, 128, 64, 16, 8, 3),
    )
]
HALVES_SHAPES = (
    (4096, 4096, 4096, False, 0),
    (1024, 8192, 8192, True, 0),
    (2048, 4096, 8192, False, 0),
    (512, 2048, 1024, False, 32),
    (8205, 5921, 2949, False, 0),
    (512, 512, 1024, True, 0),
    (65536, 2304, 768, True, 0),
    (256, 8192, 8192, True, 0),
)


def precompile(parts: list[str]) -> None:
    """Every variant of the sweeps, by as many processes as there are cores, into a pack that the launches then find."""
    began, found = time.monotonic(), []
    with torch.device("meta"):
        if "products" in parts:
            found += [variant for rows in ROWS for variant in _product_variants(rows)]
        if "halves" in parts:
            found += _halves_variants()
    if "checks" in parts:
        found += [variant for name in CHECKED for variant in variants_of(name, trials()[name][1].checks)]
    if not found:
        return
    folder = Path(tempfile.mkdtemp()) / "pack"
    os.environ["RIDGELINE_KERNEL_PACK"] = str(folder)
    pack.write(folder, found, jobs=max(1, (os.cpu_count() or 2) - 2))
    print(f"--- {len(set(found))} variants compiled in {time.monotonic() - began:.0f} s", flush=True)


def _product_variants(rows: int) -> list[Variant]:
    found = []
    for n in (4096, 28672):
        for chosen in plain_configs(n, rows):
            found += _collected(chosen, torch.bfloat16, rows, n, {}, chosen.kernel == "row")
    for chosen in GATED_CONFIGS:
        if rows <= 4 or chosen.kernel == "tile":
            given = {"norm_weight": torch.empty(4096, dtype=torch.bfloat16), "activation": "silu", "gated": True}
            found += _collected(chosen, torch.bfloat16, rows, 28672, given, True)
    if rows in (1, 8, 16):
        for dtype in (torch.float32, torch.float16):
            for chosen in OTHER_CONFIGS:
                found += _collected(chosen, dtype, rows, 4096, {}, False)
    return found


def _halves_variants() -> list[Variant]:
    found = []
    for m, n, k, turned, z in HALVES_SHAPES:
        a = torch.empty(*((z,) if z else ()), m, k)
        b = torch.empty(*((z,) if z else ()), *((n, k) if turned else (k, n)))
        for chosen in HALVES_CONFIGS:
            with tuning.forced("matmul", chosen), launcher.collecting() as seen:
                kernels.matmul(a, b.mT if turned else b)
            found += seen
    return found


def _collected(
    chosen: Linear, dtype: torch.dtype, rows: int, n: int, given: dict[str, Any], overlapped: bool
) -> list[Variant]:
    x, w = torch.empty(rows, 4096, dtype=dtype), torch.empty(n, 4096, dtype=dtype)
    with tuning.forced("linear", chosen), launcher.collecting() as found:
        kernels.linear(x, w, **given)
        if overlapped:
            with launcher.overlapped():
                kernels.linear(x, w, **given)
    return found


class Book:
    """Rows of results, written to a file every few seconds."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.path, self.rows, self.began = folder / "decode.json.gz", [], time.monotonic()
        self.budget_s, self.saved = budget_s, 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.began)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if time.monotonic() - self.saved > 5:
            self.save()

    def save(self) -> None:
        self.saved = time.monotonic()
        with gzip.open(self.path, "wt") as file:
            json.dump(self.rows, file)


def graphed(calls: list[Callable[[], Any]], overlapped: bool = False) -> torch.cuda.CUDAGraph:
    """All calls in one CUDA graph; outputs live and die in its pool."""
    around = launcher.overlapped() if overlapped else nullcontext()
    with around:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph, num: int, warm: int = 2) -> float:
    """Median seconds of a replay."""
    for _ in range(warm):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in events)


def per_call_s(make: Callable[[int], Callable[[], Any]], copies: int, overlapped: bool = False) -> float:
    """Seconds of one call inside a graph of many, over rotating copies."""
    num = max(copies, 12)
    graph = graphed([make(i % copies) for i in range(num)], overlapped)
    return replay_s(graph, 5) / num


def weights(n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    copies = max(2, -(-ROTATED_BYTES // (n * k * dtype.itemsize)))
    return [torch.randn(n, k, device="cuda", dtype=dtype).mul_(k**-0.5) for _ in range(copies)]


def error(found: torch.Tensor, meant: torch.Tensor) -> float:
    return float((found.double() - meant).norm() / meant.norm())


def default_race(book: Book) -> None:
    """Every shape and number of rows as our default runs them, against cuBLAS."""
    product_race(book, quick=True)


def product_race(book: Book, quick: bool = False) -> None:
    """Every shape, number of rows and configuration, against cuBLAS."""
    for n, k in SHAPES:
        w = weights(n, k, torch.bfloat16)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            _race(
                book,
                "linear",
                n,
                k,
                rows,
                x,
                w,
                {},
                lambda x, w: F.linear(x, w),
                [] if quick else plain_configs(n, rows),
            )
        del w
    w = weights(28672, 4096, torch.bfloat16)
    g = torch.randn(4096, device="cuda", dtype=torch.bfloat16)

    def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(F.rms_norm(x, (4096,), g, 1e-6), w).chunk(2, -1)
        return F.silu(gate) * up

    for rows in ROWS:
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        given = {"norm_weight": g, "activation": "silu", "gated": True}
        found = [] if quick else [c for c in GATED_CONFIGS if rows <= 4 or c.kernel == "tile"]
        _race(book, "gated", 28672, 4096, rows, x, w, given, mlp, found)
    for dtype in (torch.float32, torch.float16):
        w = weights(4096, 4096, dtype)
        for rows in (1, 8, 16):
            x = torch.randn(rows, 4096, device="cuda", dtype=dtype)
            _race(
                book,
                f"linear {dtype}",
                4096,
                4096,
                rows,
                x,
                w,
                {},
                lambda x, w: F.linear(x, w),
                [] if quick else OTHER_CONFIGS,
            )


def plain_configs(n: int, rows: int) -> list[Linear]:
    few = n <= 8192
    tiles = [c for c in TILE_CONFIGS if few or c.shares == 1]
    if rows == 1:
        return ROW_CONFIGS + tiles[3:5]
    return (FEW_ROW_CONFIGS if rows <= 8 else []) + tiles


def _race(
    book: Book,
    name: str,
    n: int,
    k: int,
    rows: int,
    x: torch.Tensor,
    w: list[torch.Tensor],
    given: dict[str, Any],
    theirs: Callable[..., Any],
    configs: list[Linear],
) -> None:
    if book.left_s() < 5:
        return
    num_bytes = w[0].nbytes
    meant = theirs(x.double(), w[0].double()) if not given else None
    base_s = per_call_s(lambda i: lambda: theirs(x, w[i]), len(w))
    base_error = error(theirs(x, w[0]), meant) if meant is not None else 0.0
    book.add(what=name, n=n, k=k, rows=rows, who="cublas", s=base_s, bytes_per_s=num_bytes / base_s, error=base_error)
    print(
        f"{name:22} {n:6}×{k:<6} rows {rows:2}  cuBLAS {base_s * 1e6:7.2f} µs {num_bytes / base_s / 1e12:5.2f} TB/s",
        flush=True,
    )
    for overlapped in (False, True):
        s = _config_s(book, "default", None, name, n, k, rows, x, w, given, meant, theirs, overlapped)
        print(
            f"      default{' overlapped' if overlapped else ''} {s * 1e6:7.2f} µs {num_bytes / s / 1e12:5.2f} TB/s",
            flush=True,
        )
    found = []
    for chosen in configs:
        if book.left_s() < 5:
            break
        s = _config_s(book, str(chosen), chosen, name, n, k, rows, x, w, given, meant, theirs, False)
        found.append((s, chosen))
    for s, chosen in sorted(found, key=lambda pair: pair[0])[:3]:
        print(f"      {s * 1e6:7.2f} µs {num_bytes / s / 1e12:5.2f} TB/s  {chosen}", flush=True)
    if found:
        s, chosen = min(found, key=lambda pair: pair[0])
        s = _config_s(book, str(chosen), chosen, name, n, k, rows, x, w, given, meant, theirs, True)
        print(f"      {s * 1e6:7.2f} µs {num_bytes / s / 1e12:5.2f} TB/s  the best, overlapped", flush=True)


def _config_s(
    book: Book,
    label: str,
    chosen: Linear | None,
    name: str,
    n: int,
    k: int,
    rows: int,
    x: torch.Tensor,
    w: list[torch.Tensor],
    given: dict[str, Any],
    meant: torch.Tensor | None,
    theirs: Callable[..., Any],
    overlapped: bool,
) -> float:
    try:
        with tuning.forced("linear", chosen) if chosen else nullcontext():
            found = kernels.linear(x, w[0], **given)
            wrong = error(found, theirs(x, w[0]).double() if meant is None else meant)
            s = per_call_s(lambda i: lambda: kernels.linear(x, w[i], **given), len(w), overlapped)
    except Exception as problem:  # a configuration that does not compile or fit is a result too
        torch.cuda.synchronize()
        book.add(what=name, n=n, k=k, rows=rows, who=label, overlapped=overlapped, problem=str(problem)[:300])
        print(f"      {label}: {str(problem)[:120]}", flush=True)
        return float("inf")
    book.add(
        what=name, n=n, k=k, rows=rows, who=label, overlapped=overlapped, s=s, bytes_per_s=w[0].nbytes / s, error=wrong
    )
    if wrong > 0.01:
        print(f"      WRONG {label} rows {rows}: error {wrong:.3e}", flush=True)
    return s


def attention_race(book: Book) -> None:
    """One query token over contiguous caches, several ways to share the keys out."""
    for b, h, kh, s, masked in (
        (1, 32, 8, 2048, False),
        (1, 32, 8, 2048, True),
        (1, 32, 32, 2048, False),
        (8, 32, 8, 2048, False),
        (1, 32, 8, 16384, False),
    ):
        if book.left_s() > 5:
            _attention(book, b, h, kh, s, masked)


def _attention(book: Book, b: int, h: int, kh: int, s: int, masked: bool) -> None:
    copies = max(2, -(-ROTATED_BYTES // (b * kh * s * 128 * 4)))
    q = torch.randn(b, h, 1, 128, device="cuda", dtype=torch.bfloat16)
    kv = [torch.randn(2, b, kh, s, 128, device="cuda", dtype=torch.bfloat16).unbind() for _ in range(copies)]
    mask = (torch.rand(b, 1, 1, s, device="cuda") < 0.9) if masked else None
    num_bytes = 2 * kv[0][0].nbytes

    def theirs(i: int) -> Callable[[], Any]:
        return lambda: F.scaled_dot_product_attention(q, *kv[i], attn_mask=mask, enable_gqa=h != kh)

    def ours(i: int) -> Callable[[], Any]:
        return lambda: kernels.decode_attention(q, *kv[i], mask)

    base_s = per_call_s(theirs, copies)
    label = f"attention b{b} h{h}/{kh} s{s}{' masked' if masked else ''}"
    book.add(what=label, who="sdpa", s=base_s, bytes_per_s=num_bytes / base_s)
    print(f"{label}: SDPA {base_s * 1e6:.2f} µs", flush=True)
    meant = theirs(0)().double()
    for chosen in (None, *(c for c in DECODE_CONFIGS if c.keys * c.shares <= s and c.shares * b * kh <= 1056)):
        try:
            with tuning.forced("decode_attention", chosen) if chosen else nullcontext():
                wrong = error(ours(0)(), meant)
                took = per_call_s(ours, copies)
        except Exception as problem:
            book.add(what=label, who=str(chosen), problem=str(problem)[:300])
            continue
        book.add(what=label, who=str(chosen), s=took, bytes_per_s=num_bytes / took, error=wrong)
        flag = " WRONG" if wrong > 0.01 else ""
        print(f"      {took * 1e6:7.2f} µs {num_bytes / took / 1e12:5.2f} TB/s {chosen}{flag}", flush=True)


def chain(book: Book) -> None:
    """The kernels of a Llama 8B step at batch 1 over 2,048 keys, by hand: what the rewrites aim at."""
    dtype = torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype).mul_(shape[-1] ** -0.5)

    layers = [
        (
            draw(6144, 4096),
            draw(4096, 4096),
            draw(28672, 4096),
            draw(4096, 14336),
            draw(1, 8, 2048, 128),
            draw(1, 8, 2048, 128),
            draw(4096),
            draw(4096),
        )
        for _ in range(32)
    ]
    head = draw(128256, 4096)
    cos, sin = kernels.rope_tables(torch.arange(2047, 2048, device="cuda"), 128)
    position = torch.tensor([2047], device="cuda")
    x0 = draw(1, 1, 4096)

    def step() -> torch.Tensor:
        x = x0
        for qkv, o, up, down, keys, values, g1, g2 in layers:
            y = kernels.linear(x, qkv, norm_weight=g1)
            q, k, v = y.split([4096, 1024, 1024], -1)
            q, k = kernels.rope(q.view(1, 1, 32, 128).transpose(1, 2), k.view(1, 1, 8, 128).transpose(1, 2), cos, sin)
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v.view(1, 1, 8, 128).transpose(1, 2))
            a = kernels.decode_attention(q, keys, values)
            x = kernels.linear(a.transpose(1, 2).reshape(1, 1, 4096), o, residual=x)
            h = kernels.linear(x, up, norm_weight=g2, activation="silu", gated=True)
            x = kernels.linear(h, down, residual=x)
        return kernels.linear(x, head)

    total = sum(t.nbytes for layer in layers for t in layer) + head.nbytes
    for overlapped in (0, 1, 2):
        linear_op.EARLY = overlapped or 1
        launcher.forget_plans()
        graph = graphed([step], bool(overlapped))
        s = replay_s(graph, 20)
        book.add(what="chain", overlapped=overlapped, s=s, bytes_per_s=total / s)
        print(f"chain, overlapped {overlapped}: {s * 1e3:.3f} ms, {total / s / 1e12:.2f} TB/s", flush=True)
        for name, seconds, num in kernel_table(graph):
            book.add(what="chain kernel", overlapped=overlapped, name=name, s=seconds, num=num)
            print(f"      {num:4} × {seconds / num * 1e6:7.2f} µs  {name[:90]}", flush=True)


def kernel_table(graph: torch.cuda.CUDAGraph) -> Iterator[tuple[str, float, int]]:
    """Device kernels of a replay: name, seconds together, how many."""
    from ridgeline.bench.clock import device_events

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for _, name, seconds in device_events(found):
        sums.setdefault(name, []).append(seconds)
    for name, times in sorted(sums.items(), key=lambda pair: -sum(pair[1])):
        yield name, sum(times), len(times)


def copy_s(num_bytes: int = 1 << 30) -> tuple[float, float]:
    """Bytes a second of a large copy, and of a large sum (reads alone)."""
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    copied = per_call_s(lambda i: lambda: target.copy_(source), 2)
    summed = per_call_s(lambda i: lambda: source.sum(), 2)
    return 2 * num_bytes / copied, num_bytes / summed


def llama_step(book: Book) -> None:
    """Llama 8B as Hugging Face writes it, one token over 2,048 cached: eager, and rewritten in a CUDA graph."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(
        **sizes, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rope_theta=5e5
    )
    config._attn_implementation = "sdpa"
    began = time.monotonic()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    print(f"model made in {time.monotonic() - began:.0f} s", flush=True)
    token = torch.tensor([[17]], device="cuda")
    prompt = torch.randint(0, 128256, (1, KEYS - 1), device="cuda")
    floor_bytes = (
        sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes + 32 * KEYS * 8 * 128 * 4
    )
    for kind in ("static", "dynamic"):
        if book.left_s() < 20:
            return
        cache = StaticCache(config=config, max_cache_len=KEYS + 32) if kind == "static" else DynamicCache(config=config)
        model(prompt, past_key_values=cache, use_cache=True)
        _steps(book, model, token, cache, kind, floor_bytes)


KEYS = 2048


def _steps(book: Book, model: Any, token: torch.Tensor, cache: Any, kind: str, floor_bytes: int) -> None:
    """Wall time of a step, eager and ours, the cache put back behind every call."""
    from ridgeline.engine.replay.inference import graph_inference
    from ridgeline.optimizer.backend import Report, compiled
    from ridgeline.optimizer.rewrites import recommended

    given = {"past_key_values": cache, "use_cache": True}
    kept = [(layer, layer.keys, layer.values, getattr(layer, "cumulative_length", None)) for layer in cache.layers]
    lengths = [None if length is None else torch.as_tensor(length).clone() for *_, length in kept]

    def reset() -> None:
        for (layer, keys, values, length), was in zip(kept, lengths, strict=True):
            layer.keys, layer.values = keys, values
            if isinstance(length, torch.Tensor):
                length.copy_(was)
            elif length is not None:
                layer.cumulative_length = length

    def wall_s(call: Callable[..., Any], num: int) -> float:
        samples = []
        for _ in range(num):
            reset()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call(token, **given)
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples[2:])

    eager_s = wall_s(model, 8)
    reset()
    meant = model(token, **given).logits.float()
    _tell(book, f"llama {kind}", "eager", eager_s, floor_bytes)
    report = Report()
    names = recommended("inference", "none", "cuda")
    began = time.monotonic()
    call = compiled(model, rewrites=names, compiler="none", report=report)
    reset()
    logits = call(token, **given).logits.float()
    print(f"rewritten in {time.monotonic() - began:.0f} s: {report}", flush=True)
    wrong = error(logits, meant.double())
    print(
        f"      against eager: error {wrong:.2e}, same token {bool((logits.argmax() == meant.argmax()).item())}",
        flush=True,
    )
    book.add(what=f"llama {kind}", who="report", report=report.counts(), breaks=report.breaks, error=wrong)
    _tell(book, f"llama {kind}", "rewritten", wall_s(call, 8), floor_bytes)
    reset()
    began = time.monotonic()
    fast = graph_inference(call, (token,), given, model)
    print(f"recorded in {time.monotonic() - began:.0f} s", flush=True)
    reset()
    print(
        f"      graph against eager: error {error(fast(token, **given).logits.float(), meant.double()):.2e}", flush=True
    )
    _tell(book, f"llama {kind}", "rewritten, CUDA graph", wall_s(fast, 24), floor_bytes)
    _kernels_of_step(book, lambda: (reset(), fast(token, **given)), kind)


def _tell(book: Book, what: str, who: str, s: float, floor_bytes: int) -> None:
    book.add(what=what, who=who, s=s, bytes_per_s=floor_bytes / s)
    print(f"{what}: {who} {s * 1e3:.3f} ms, {floor_bytes / s / 1e12:.2f} TB/s of what must be read", flush=True)


def _kernels_of_step(book: Book, run: Callable[[], Any], kind: str) -> None:
    from ridgeline.bench.clock import device_events

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for _, name, seconds in device_events(found):
        sums.setdefault(name, []).append(seconds)
    for name, times in sorted(sums.items(), key=lambda pair: -sum(pair[1]))[:24]:
        book.add(what=f"llama {kind} kernel", name=name, s=sum(times), num=len(times))
        print(f"      {len(times):4} × {sum(times) / len(times) * 1e6:7.2f} µs  {name[:90]}", flush=True)


def checks(book: Book) -> None:
    """Every declared check of our kernels against their references, on this device."""
    for name in CHECKED:
        found = []
        for i, of in enumerate(trials()[name][1].checks):
            try:
                found += check_case(name, of, torch.device("cuda"), i)
            except Exception as problem:
                print(f"      {name} {of}: {problem!r}", flush=True)
                book.add(what="check", name=name, case=str(of), problem=repr(problem)[:300])
        wrong = [f for f in found if not f.ok]
        for finding in found:
            book.add(what="check", name=name, case=finding.case, part=finding.what, ok=finding.ok, note=finding.note)
        print(f"{name}: {len(found)} findings, {len(wrong)} wrong", flush=True)
        for finding in wrong[:6]:
            print(f"      {finding.case} {finding.what}: {finding.note}", flush=True)


def halves(book: Book) -> None:
    """Float32 products from halves against cuBLAS in float32: speed, and error against float64."""
    for m, n, k, turned, z in HALVES_SHAPES:
        if book.left_s() > 10:
            _halves(book, m, n, k, turned, z)


def _halves(book: Book, m: int, n: int, k: int, turned: bool, z: int) -> None:
    a = torch.rand(*((z,) if z else ()), m, k, device="cuda")
    b = torch.rand(*((z,) if z else ()), *((n, k) if turned else (k, n)), device="cuda") - 0.3
    b = b.mT if turned else b
    meant = a[..., :256, :].double() @ b.double()
    flops = 2.0 * m * n * k * max(1, z)
    label = f"float32 {m}x{n}x{k}{' turned' if turned else ''}{f' x{z}' if z else ''}"
    print(label, flush=True)

    def timed(who: str, call: Callable[[], torch.Tensor]) -> None:
        wrong = error(call()[..., :256, :], meant)
        s = replay_s(graphed([call] * 3), 4) / 3
        book.add(what=label, who=who, s=s, flops_per_s=flops / s, error=wrong)
        print(f"      {s * 1e6:9.0f} µs {flops / s / 1e12:6.1f} TFLOP/s error {wrong:.2e} {who}", flush=True)

    timed("cuBLAS", lambda: a @ b)
    for chosen in (None, *HALVES_CONFIGS):
        try:
            with tuning.forced("matmul", chosen) if chosen else nullcontext():
                timed(str(chosen), lambda: kernels.matmul(a, b))
        except Exception as problem:
            book.add(what=label, who=str(chosen), problem=str(problem)[:300])
            print(f"      {chosen}: {str(problem)[:120]}", flush=True)


PARTS = {
    "checks": checks,
    "halves": halves,
    "chain": chain,
    "attention": attention_race,
    "products": product_race,
    "defaults": default_race,
    "llama": llama_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--parts", default="chain,attention,products")
    given = parser.parse_args()
    book = Book(given.out, given.budget_s)
    torch.manual_seed(0)
    precompile(given.parts.split(","))
    with torch.no_grad():
        copied, read = copy_s()
        book.add(what="bandwidth", copy_bytes_per_s=copied, read_bytes_per_s=read, device=torch.cuda.get_device_name())
        print(f"copy {copied / 1e12:.2f} TB/s, sum {read / 1e12:.2f} TB/s", flush=True)
        for part in given.parts.split(","):
            began = time.monotonic()
            try:
                PARTS[part](book)
            except Exception as problem:
                book.add(what=part, problem=repr(problem))
                print(f"{part}: {problem!r}", flush=True)
            torch.cuda.empty_cache()
            print(f"--- {part}: {time.monotonic() - began:.0f} s", flush=True)
    book.save()


if __name__ == "__main__":
    main()
