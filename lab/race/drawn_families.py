"""Races of all families except row norms on shapes drawn from a seed, beside eager and Liger.

    python -m lab.race.drawn_families --pack kernels --jobs 12               (compiles ours, without a device)
    python -m lab.race.drawn_families --warm --path LIGER --jobs 8           (compiles Liger's, beside others)
    RIDGELINE_KERNEL_PACK=kernels python -m lab.race.drawn_families --out results --path LIGER --budget-s 80
    python -m lab.race.drawn_families --table data/recordings/h200/families_random1.json.gz

Gating, cross-entropy, GroupNorm, heads, quantization, optimizers, tables, products and attention, with sizes as people
have them and sizes that nobody has. Every case is first compared with float64 in fewer rows, then timed in turns with
a cold L2 beside a copy of as many bytes (cross-entropy's forward pass beside a bare read, attention beside cuDNN's and
FlashAttention's kernels); small ones are called again and again as well, launch included, with and without a gradient.
The summary says by family how many cases reach the figure that is asked for. One file, written again after every case.
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
from dataclasses import dataclass
from typing import Any

BEGAN = time.perf_counter()
FILE = "race_families.json.gz"
LARGE_BYTES = 64 << 20
SMALL_BYTES = 4 << 20
"""Cases that move fewer bytes are also timed in a loop, launch included."""
MOST_CHECKED = 6 << 20
"""The most elements that are compared with float64."""
BARE = ("copy", "read")
"""Contenders that only move bytes: a reference."""
WIDTHS = (384, 768, 1024, 1536, 1600, 2048, 2304, 2560, 2816, 3072, 3584, 4096, 4608, 4864, 5120, 5504, 5632, 6144,
          7168, 8192, 8960, 9728, 10240, 11008, 12288, 13696, 14336, 16384, 17920, 18944, 22016, 28672)  # fmt: skip
VOCABULARIES = (1000, 21841, 30522, 32001, 32128, 49152, 50257, 50272, 50280, 51200, 64000, 65024, 92544, 100352,
                102400, 128256, 129280, 151936, 152064, 200064, 250880, 256000, 262144)  # fmt: skip
CHANNELS = (64, 96, 128, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 960, 1024, 1280, 1920, 2560)
SIDES = (7, 8, 13, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 90, 96, 112, 128, 160, 192, 256)
HEADS = ((8, 8), (8, 2), (12, 12), (14, 2), (16, 16), (16, 8), (20, 20), (24, 8), (28, 4), (32, 8), (32, 32), (40, 8),
         (48, 8), (64, 8), (16, 1))  # fmt: skip
NARROW = ("float8_e4m3fn", "float8_e4m3fn", "int8", "float8_e5m2")
NAMED: dict[str, tuple[int, ...]] = {}
"""Drawn lists of parameter sizes, by name."""

Rng = random.Random
Draw = Callable[[Rng], Any]


def log_uniform(rng: Rng, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def width(rng: Rng, known: tuple[int, ...], low: int, high: int) -> int:
    """A third are widths of public models; of the others half are multiples of eight, a quarter even, a quarter odd."""
    if rng.random() < 0.34:
        return rng.choice(known)
    drawn, kind = round(log_uniform(rng, low, high)), rng.random()
    if kind < 0.5:
        return max(8, drawn // 8 * 8)
    return drawn // 8 * 8 + (rng.choice((2, 4, 6)) if kind < 0.75 else rng.choice((1, 3, 5, 7)))


def moved(rng: Rng) -> float:
    """Bytes that a case moves: six of ten above 64 MB, up to 600; the others from 32 KB on."""
    return log_uniform(rng, 64 << 20, 600 << 20) if rng.random() < 0.6 else log_uniform(rng, 32 << 10, 64 << 20)


def kind_of(rng: Rng) -> str:
    return rng.choice(("bfloat16", "bfloat16", "float16", "float32"))


def item(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def rows_of(tensors: float, known: tuple[int, ...] = WIDTHS, low: int = 256, high: int = 32768, **more: Any) -> Draw:
    """Draw rows by columns for so many tensors; ``more`` has further sizes, drawn or given."""
    from ridgeline.kernels.contract import case

    def drawn(rng: Rng) -> Any:
        dtype, cols = kind_of(rng), width(rng, known, low, high)
        rows = max(1, min(1 << 18, round(moved(rng) / (tensors * cols * item(dtype)))))
        return case(dtype, rows=rows, cols=cols, **{key: of(rng) for key, of in more.items()})

    return drawn


def narrowed(rng: Rng) -> Any:
    """Quantization with a scale per tensor, row or block."""
    from ridgeline.kernels.contract import case

    of = rows_of(1.5)(rng)
    per = rng.choice(("tensor", "row", "row", "block"))
    block = rng.choice((32, 64, 128, 128)) if per == "block" else 0
    cols = -(-of["cols"] // block) * block if block else of["cols"]
    return case(of.dtype, rows=of["rows"], cols=cols, kind=rng.choice(NARROW), per=per, block=block)


def narrowed_norm(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    of = rows_of(1.5, high=16384)(rng)
    block = rng.choice((0, 0, 64, 128, 128))
    cols = -(-of["cols"] // block) * block if block else of["cols"]
    return case(of.dtype, rows=of["rows"], cols=cols, kind=rng.choice(NARROW[:3]), block=block)


def images(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    dtype, channels, side = kind_of(rng), rng.choice(CHANNELS), rng.choice(SIDES)
    groups = rng.choice([g for g in (8, 16, 32, 32, 32) if channels % g == 0])
    batch = max(1, min(512, round(moved(rng) / (2 * channels * side * side * item(dtype)))))
    return case(dtype, batch=batch, channels=channels, side=side, groups=groups)


def heads_of(dims: tuple[int, ...]) -> Draw:
    from ridgeline.kernels.contract import case

    def drawn(rng: Rng) -> Any:
        dtype, (heads, keys), dim = kind_of(rng), rng.choice(HEADS), rng.choice(dims)
        tokens = max(1, round(moved(rng) / (2 * (heads + keys) * dim * item(dtype))))
        seq = max(1, min(tokens, round(log_uniform(rng, 1, 8192))))
        return case(dtype, batch=max(1, tokens // seq), seq=seq, heads=heads, keys=keys, dim=dim)

    return drawn


def parameters(rng: Rng, total: float) -> str:
    """The name of a list of tensors with about so many elements in all: matrices, vectors, odd ones."""
    sizes: list[int] = []
    num = round(log_uniform(rng, 3, 300))
    while len(sizes) < num and sum(sizes) < total:
        most = max(2.0, total - sum(sizes))
        drawn = min(most, log_uniform(rng, 1, 4 * total / num + 2)) if rng.random() < 0.7 else rng.choice((1, 64, 4096))
        sizes.append(max(1, round(drawn)))
    sizes.append(max(1, round(total - sum(sizes))))
    return listed(tuple(sizes))


def listed(sizes: tuple[int, ...]) -> str:
    from ridgeline.kernels.grad_norm.op import LISTS

    name = f"{len(sizes)} tensors of {sum(sizes)} ({sum(i * size for i, size in enumerate(sizes)) % 9973})"
    LISTS[name] = NAMED[name] = sizes
    return name


def optimized(bits: int) -> Draw:
    from ridgeline.kernels.contract import case

    def drawn(rng: Rng) -> Any:
        dtype, bound = rng.choice(("float32", "float32", "bfloat16")), rng.choice((-1.0, -1.0, 1.0))
        name = parameters(rng, log_uniform(rng, 2e6, 2e8) if rng.random() < 0.8 else log_uniform(rng, 1e3, 1e6))
        if bits == 8:
            return case(dtype, list=name, max_norm=bound, bits=8, master=dtype != "float32")
        own = dtype != "float32" and rng.random() < 0.6
        return case(dtype, list=name, max_norm=-1.0 if own else bound,
                    **({"own": True} if own else {"master": dtype != "float32"}))  # fmt: skip

    return drawn


def clipped(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    name = parameters(rng, log_uniform(rng, 8e6, 3e8) if rng.random() < 0.8 else log_uniform(rng, 1e3, 1e6))
    return case(rng.choice(("float32", "bfloat16", "float16")), list=name, max_norm=1.0)


def bags(kind: str) -> Draw:
    """Embedding bags: ``many`` tables, ``one`` with its gradient, or many with the ``update`` fused."""
    from ridgeline.kernels.contract import case

    def drawn(rng: Rng) -> Any:
        tables = 1 if kind == "one" else rng.choice((1, 2, 5, 8, 13, 26, 26, 40, 64))
        dim = rng.choice((8, 16, 24, 32, 48, 64, 64, 96, 128, 128, 192, 256, 384))
        length = rng.choice((1, 1, 3, 8, 20, 50))
        dtype = "float32" if kind == "update" else rng.choice(("float32", "float32", "float16", "bfloat16"))
        rows = round(min(log_uniform(rng, 1e3, 2e6), 1.5e9 / (tables * dim * 4)))
        batch = max(16, min(65536, round(log_uniform(rng, 2e6, 4e8) / (tables * dim * length * 4))))
        more: dict[str, Any] = {"mode": rng.choice(("sum", "sum", "mean")), "index": rng.choice(("int64", "int32"))}
        if kind == "update":
            more = {"optimizer": rng.choice(("sgd", "rowwise_adagrad", "adam"))}
        elif kind == "many" and dtype == "float32" and rng.random() < 0.2:
            more["codes"] = True
        return case(dtype, tables=tables, batch=batch, rows=rows, dim=dim, length=length, **more)

    return drawn


def interacting(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    dtype, tables, dim = kind_of(rng), rng.choice((3, 8, 13, 20, 26, 26, 31, 40, 60)), rng.choice((16, 32, 48, 64, 128))
    batch = max(16, round(log_uniform(rng, 2e5, 5e8) / (tables * dim * item(dtype))))
    return case(dtype, batch=min(65536, batch), tables=tables, dim=dim)


def crossed(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    dim = rng.choice((128, 200, 256, 429, 512, 640, 845, 1024, 1504, 2048, 3072))
    rank = rng.choice((0, 0, 32, 64, 128)) if dim >= 512 else 0
    batch = round(log_uniform(rng, 512, 65536))
    return case(kind_of(rng), batch=min(batch, int(3e11 / dim / dim)), dim=dim, rank=rank)


def heads_and_losses(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    hidden, cols = rng.choice((768, 1024, 1536, 2048, 3072, 4096)), width(rng, VOCABULARIES[2:], 20000, 160000)
    return case("bfloat16", rows=round(min(log_uniform(rng, 1000, 16384), 3e12 / hidden / cols)), cols=cols,
                hidden=hidden)  # fmt: skip


def attended(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    heads, keys = rng.choice(HEADS)
    rows = round(log_uniform(rng, 2048, 16384))
    rows = rows // 128 * 128 if rng.random() < 0.5 else rows
    batch = max(1, min(8, round(log_uniform(rng, 3e11, 2e12) / (512 * heads * rows * rows))))
    return case("bfloat16", b=batch, h=heads, k=keys, l=rows, s=rows, d=128, causal=rng.random() < 0.7)


def sequences(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    heads, keys = rng.choice(HEADS)
    lengths = tuple(round(log_uniform(rng, 64, 4096)) for _ in range(rng.choice((3, 6, 12))))
    return case("bfloat16", h=heads, k=keys, d=128, q=lengths, kv=lengths, causal=True, window=None, cap=0.0)


@dataclass(frozen=True, slots=True)
class Family:
    """How cases of a function are drawn, and its target: by phase, relative to the copy or to the best rival."""

    draw: Callable[[], Draw]
    of_copy: tuple[tuple[str, float], ...] = ()
    times: tuple[tuple[str, float], ...] = ()


NORMS = (("fwd", 0.90), ("bwd", 0.85))
NORM_TIMES = (("fwd", 1.0), ("bwd", 1.5))
TWICE = (("fwd", 2.0), ("bwd", 2.0), ("step", 2.0))
FAMILIES: dict[str, Family] = {
    "swiglu": Family(lambda: rows_of(3), NORMS, NORM_TIMES),
    "geglu": Family(lambda: rows_of(3), NORMS, NORM_TIMES),
    "relu2": Family(lambda: rows_of(2), NORMS, NORM_TIMES),
    "cross_entropy": Family(lambda: rows_of(1, VOCABULARIES, 128, 262144), NORMS, NORM_TIMES),
    "group_norm_silu": Family(lambda: images, NORMS, NORM_TIMES),
    "group_norm": Family(lambda: images, NORMS, NORM_TIMES),
    "qk_norm_rope": Family(lambda: heads_of((64, 128, 128, 256)), NORMS, NORM_TIMES),
    "rope": Family(lambda: heads_of((64, 80, 96, 128, 128, 256)), NORMS, NORM_TIMES),
    "dropout_add": Family(lambda: rows_of(3, p=lambda rng: rng.choice((0.1, 0.2, 0.5))), NORMS, NORM_TIMES),
    "quantize": Family(lambda: narrowed, (("fwd", 0.90),), (("fwd", 1.0),)),
    "dequantize": Family(lambda: narrowed, (("fwd", 0.90),), (("fwd", 1.0),)),
    "rms_norm_quant": Family(lambda: narrowed_norm, (("fwd", 0.90),), (("fwd", 1.0),)),
    "layer_norm_quant": Family(lambda: narrowed_norm, (("fwd", 0.90),), (("fwd", 1.0),)),
    "adamw": Family(lambda: optimized(32), (("fwd", 0.90),), (("fwd", 1.0),)),
    "adamw_8bit": Family(lambda: optimized(8), (("fwd", 0.90),), (("fwd", 1.0),)),
    "clip_grad_norm_": Family(lambda: clipped, (("fwd", 0.90),), (("fwd", 1.0),)),
    "embedding_bags": Family(lambda: bags("many"), (), TWICE),
    "embedding_bag": Family(lambda: bags("one"), (), TWICE),
    "embedding_bags_update": Family(lambda: bags("update"), (), TWICE),
    "dot_interaction": Family(lambda: interacting, (), TWICE),
    "cross_layer": Family(lambda: crossed, (), TWICE),
    "linear_cross_entropy": Family(lambda: heads_and_losses, (), (("step", 1.0),)),
    "attention": Family(lambda: attended, (), (("fwd", 1.0), ("bwd", 0.9))),
    "varlen_attention": Family(lambda: sequences, (), (("fwd", 1.0), ("bwd", 0.9))),
}


def shapes(name: str, seed: int, num: int) -> list[Any]:
    """Cases of a function, determined by the seed."""
    rng, draw = random.Random(f"{name} {seed}"), FAMILIES[name].draw()
    found: dict[Any, None] = {}
    while len(found) < num:
        found[draw(rng)] = None
    return list(found)


def fewer(of: Any) -> Any:
    """A smaller case of the same kind, for the comparison with float64."""
    from ridgeline.kernels.contract import case

    sizes = dict(of.sizes)
    if "list" in sizes:
        kept = NAMED[sizes["list"]]
        sizes["list"] = listed(tuple(min(size, 70_001) for size in kept[:40]))
    elif "q" in sizes:
        sizes |= {"q": tuple(min(n, 701) for n in sizes["q"][:4]), "kv": tuple(min(n, 701) for n in sizes["kv"][:4])}
    elif "l" in sizes:
        by = sizes["h"] // sizes["k"]
        sizes |= {"b": 1, "h": 2 * by if sizes["k"] > 1 else by, "k": min(2, sizes["k"])}
        sizes |= {"l": min(sizes["l"], 2048 + sizes["l"] % 128), "s": min(sizes["s"], 2048 + sizes["s"] % 128)}
    elif "length" in sizes:
        sizes |= {"batch": min(sizes["batch"], 65), "rows": min(sizes["rows"], 1000)}
    elif "hidden" in sizes:
        sizes |= {"rows": min(sizes["rows"], 515), "cols": min(sizes["cols"], 20000 + sizes["cols"] % 8)}
    elif "seq" in sizes:
        per = (sizes["heads"] + sizes["keys"]) * sizes["dim"]
        sizes["seq"] = min(sizes["seq"], max(1, MOST_CHECKED // per))
        sizes["batch"] = min(sizes["batch"], max(1, MOST_CHECKED // per // sizes["seq"]))
    elif "side" in sizes:
        sizes["batch"] = min(sizes["batch"], max(1, MOST_CHECKED // (sizes["channels"] * sizes["side"] ** 2)))
    else:
        first = "batch" if "batch" in sizes else "rows"
        per = sizes.get("cols") or sizes["dim"] * max(1, sizes.get("tables", 1))
        sizes[first] = min(sizes[first], max(1, MOST_CHECKED // per))
    return case(of.dtype, **sizes)


def wanted_variants(seed: int, num: int, names: tuple[str, ...]) -> list[Any]:
    """Kernels that a pack must hold for these cases and their comparisons."""
    return variants_for({name: shapes(name, seed, num) for name in names})


def variants_for(drawn: dict[str, list[Any]]) -> list[Any]:
    """Kernels of drawn cases, and of the smaller ones that are compared."""
    import ridgeline.kernels  # noqa: F401
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for name, cases in drawn.items():
        found += variants_of(name, list(dict.fromkeys([*cases, *map(fewer, cases)])))
    return list(dict.fromkeys(found))


def wrong(name: str, of: Any, device: Any) -> list[str]:
    """Errors of results and gradients against float64, and against a second call."""
    from ridgeline.bench.check import check_case

    return [f"{found.what}: {found.note}" for found in check_case(name, fewer(of), device, 1) if not found.ok]


def fused(backend: str) -> Callable[..., Any]:
    """PyTorch's attention by one of its backends."""
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: Any, k: Any, v: Any, is_causal: bool, *_: Any) -> Any:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def each_alone(lengths: tuple[int, ...]) -> Callable[..., Any]:
    """Sequences of these lengths one after the other, by PyTorch's default backend."""
    import torch
    import torch.nn.functional as functional

    def call(q: Any, k: Any, v: Any, *_: Any) -> Any:
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
        grouped = q.shape[1] != k.shape[1]
        outs = [functional.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=grouped) for each in parts]
        return torch.cat([o[0].transpose(0, 1) for o in outs])

    return call


def side_by_side(q: Any, k: Any, v: Any, q_starts: Any, k_starts: Any, longest_q: int, longest_k: int, *_: Any) -> Any:
    """Sequences as one nested tensor."""
    import torch
    import torch.nn.functional as functional

    times = q.shape[1] // k.shape[1]
    k, v = (x if times == 1 else x.repeat_interleave(times, 1) for x in (k, v))
    kept = ((q, q_starts, longest_q), (k, k_starts, longest_k), (v, k_starts, longest_k))
    nested = [
        torch.nested.nested_tensor_from_jagged(x, starts.long(), min_seqlen=1, max_seqlen=longest).transpose(1, 2)
        for x, starts, longest in kept
    ]
    return functional.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()


def entrants(name: str, trial: Any, phase: str, of: Any) -> dict[str, Callable[..., Any]]:
    """The contenders of a phase, ours first."""
    from ridgeline.bench.contenders import GRADIENT_IN_FORWARD, contenders

    found = contenders(name, trial, compiled=False, liger=True)
    if name == "attention":
        found = {"ridgeline": found["ridgeline"], "cudnn": fused("CUDNN_ATTENTION"), "flash": fused("FLASH_ATTENTION")}
    if name == "varlen_attention":
        found = {"ridgeline": found["ridgeline"], "each alone": each_alone(of["q"]), "nested": side_by_side}
    return {who: call for who, call in found.items() if phase != "bwd" or (who, name) not in GRADIENT_IN_FORWARD}


def able(runs: dict[str, Callable[[], Callable[[], Any]]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The contenders that run, and the errors of the others."""
    import torch

    found, errors = {}, {}
    for who, make in runs.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            found[who] = run
        except Exception as error:  # a contender that cannot run the case is listed with its error
            errors[who] = f"{type(error).__name__}: {str(error)[:160]}"
    return found, errors


def bare(name: str, phase: str, num_bytes: int, device: Any) -> dict[str, Callable[[], Any]]:
    """Calls that move as many bytes and compute nothing."""
    import torch

    if name == "cross_entropy" and phase == "fwd":
        from lab.race import bare_read as reading

        read = reading.run(torch.ones(max(1, num_bytes // 4), dtype=torch.int32, device=device), 8, 4096, 1, "")
        return {"read": read}
    source = torch.empty(max(1, num_bytes // 8), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source)}


def timed(name: str, of: Any, course: Any, called: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of every phase of a case: ours, its rivals and the bare copies, in turns.

    ``called``: small cases are also timed in a loop, launch included.
    """
    import torch

    from ridgeline.bench.race import moved_bytes, runner
    from ridgeline.kernels.contract import trials

    trial, device = trials()[name][1], course.device
    generator = torch.Generator(device).manual_seed(0)
    laps = trial.laps(of, device, generator) if trial.laps else None
    args = () if laps else trial.make(of, device, generator)
    for phase in trial.phases:
        num_bytes = laps.num_bytes if laps else moved_bytes(trial, args, phase)
        base = {"family": name, "case": str(of), "phase": phase, "num_bytes": num_bytes}
        if laps:
            runs, errors = able({who: lambda run=run: run for who, run in laps.runs.items()})
        else:
            runs, errors = able(
                {who: lambda call=call: runner(call, args, phase, trial.constants)  # noqa: B023
                 for who, call in entrants(name, trial, phase, of).items()}
            )  # fmt: skip
        yield from (base | {"contender": who, "s": None, "error": text} for who, text in errors.items())
        compared = name not in FAMILIES or FAMILIES[name].of_copy
        beside = bare(name, phase, num_bytes, device) if num_bytes < 4e9 and compared else {}
        samples = course.turns(runs | beside)
        yield from told_of(base, samples)
        small = called and num_bytes < SMALL_BYTES
        if small and phase in ("fwd", "step"):
            yield from told_of(base | {"phase": "call"}, course.calls(runs, num=40, repeats=5))
        if small and phase == "bwd":
            steps = {who: lambda call=call: runner(call, args, "step", trial.constants)
                     for who, call in entrants(name, trial, "step", of).items()}  # fmt: skip
            yield from told_of(base | {"phase": "call step"}, course.calls(able(steps)[0], num=40, repeats=5))


def told_of(base: dict[str, Any], samples: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    for who, found in samples.items():
        yield base | {"contender": who, "s": statistics.median(found), "low_s": min(found)}


def warm(seed: int, num: int, names: tuple[str, ...], part: int, parts: int) -> None:
    warm_cases([(name, of) for name in names for of in shapes(name, seed, num)], part, parts)


def warm_cases(cases: list[tuple[str, Any]], part: int, parts: int) -> None:
    """Run Liger once on a smaller form of every part-th case, to fill Triton's cache."""
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.contenders import liger_form
    from ridgeline.bench.race import runner
    from ridgeline.kernels.contract import trials

    device = torch.device("cuda")
    work = [(name, of) for name, of in cases if liger_form(name)]
    for name, of in work[part::parts]:
        caller, trial = liger_form(name), trials()[name][1]
        for phase in trial.phases:
            try:
                args = trial.make(fewer(of), device, torch.Generator(device).manual_seed(0))
                runner(caller, args, phase, trial.constants)()  # type: ignore[arg-type]
                torch.cuda.synchronize()
            except Exception as error:
                print("not warmed", name, of, f"{type(error).__name__}: {str(error)[:100]}", flush=True)


def by_case(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Seconds of every contender that ran, by function, phase and case."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["s"] is not None:
            key = tuple(row[part] for part in ("family", "phase", "case", "num_bytes"))
            found.setdefault(key, {})[row["contender"]] = row["s"]
    return {key: took for key, took in found.items() if "ridgeline" in took}


def best_of(took: dict[str, float]) -> float:
    """The best rival's time over ours; NaN if there is none."""
    rivals = [s for who, s in took.items() if who not in ("ridgeline", *BARE)]
    return min(rivals) / took["ridgeline"] if rivals else math.nan


def bare_of(took: dict[str, float]) -> float:
    """The bare copy's time over ours; NaN if it was not timed."""
    return next((took[who] / took["ridgeline"] for who in BARE if who in took), math.nan)


def shares(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """By function and phase: how many cases reach the target, and the best rival's ratio."""
    together = by_case(found["rows"])
    for name, phase in dict.fromkeys(key[:2] for key in together):
        cases = {key: took for key, took in together.items() if key[:2] == (name, phase)}
        beside = [ratio for ratio in map(best_of, cases.values()) if not math.isnan(ratio)]
        large = [(key[3] / took["ridgeline"] / found["copy_bytes_per_s"], bare_of(took))
                 for key, took in cases.items() if key[3] > LARGE_BYTES]  # fmt: skip
        asked, times = dict(FAMILIES[name].of_copy).get(phase), dict(FAMILIES[name].times).get(phase, 1.0)
        yield {
            "family": name, "phase": phase, "num": len(cases), "large": len(large) if asked else 0, "asked": asked,
            "reach": sum(of_copy >= asked for of_copy, _ in large) if asked else 0,
            "reach_as_large": sum(max(of_copy, bare) >= asked for of_copy, bare in large) if asked else 0,
            "least": min((of_copy for of_copy, _ in large), default=math.nan) if asked else math.nan,
            "times": times, "over_best": math.exp(statistics.fmean(map(math.log, beside))) if beside else math.nan,
            "below": sum(ratio < times for ratio in beside), "lost": sum(ratio < 1.0 for ratio in beside),
            "worst": min(beside, default=math.nan),
        }  # fmt: skip


def table(found: dict[str, Any]) -> Iterator[str]:
    """The summary and every case as Markdown for a note."""
    copy = found["copy_bytes_per_s"]
    yield f"Copy of 1 GiB in the same run: {copy / 1e12:.2f} TB/s. Seed {found['seed']}."
    yield ""
    yield (
        "| function | phase | cases | over 64 MB | reach the figure | reach it of bytes as many | least"
        " | best rival over ours | asked | below it | slower than a rival | worst |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in shares(found):
        cells = [row["family"], row["phase"], row["num"], *(row[key] if row["asked"] else "" for key in
                 ("large", "reach", "reach_as_large"))]  # fmt: skip
        ends = [f"{row['least']:.0%}" if row["large"] else "", f"{row['over_best']:.2f}", row["times"], row["below"]]
        yield f"| {' | '.join(map(str, [*cells, *ends, row['lost'], format(row['worst'], '.2f')]))} |"
    yield ""
    yield "| function | phase | case | MB | ours, µs | best rival | bytes as many | of the copy | of bytes as many |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (name, phase, of, num_bytes), took in by_case(found["rows"]).items():
        ours, rival, beside = took["ridgeline"], best_of(took), bare_of(took)
        times = [f"{1e6 * ours:.1f}", *("–" if math.isnan(x) else f"{1e6 * x * ours:.1f}" for x in (rival, beside))]
        ends = [f"{num_bytes / ours / copy:.0%}", "" if math.isnan(beside) else f"{beside:.0%}"]
        short = of.replace("bfloat16", "bf16")
        yield f"| {' | '.join([name, phase, short, f'{num_bytes / 1e6:.1f}', *times, *ends])} |"


def told(row: dict[str, Any], copy: float) -> str:
    took = f"{1e6 * row['s']:9.1f} us {row['num_bytes'] / row['s'] / copy:5.0%}" if row["s"] else row["error"][:60]
    return f"{row['family']:15s} {row['phase']:9s} {row['case']:60s} {row['num_bytes'] / 1e6:7.1f} MB" \
           f" {row['contender']:9s} {took}"  # fmt: skip


def direct_calls() -> bool:
    """Whether repeated calls bypass Python (the call cache); builds it first if needed."""
    from contextlib import suppress

    from ridgeline.errors import KernelError
    from ridgeline.kernels import call_cache
    from ridgeline.kernels.files import cache_folder

    if call_cache.module() is None:
        with suppress(KernelError):
            call_cache.build(cache_folder())
    return call_cache.module() is not None


def measure(asked: argparse.Namespace, names: tuple[str, ...]) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, copy_bandwidth

    device = torch.device("cuda")
    course = Course(device, rounds=asked.rounds, budget_s=0.12)
    found: dict[str, Any] = {"seed": asked.seed, "direct": direct_calls(), "rows": [], "wrong": [], "errors": [],
                             "copy_bytes_per_s": copy_bandwidth(Course(device))}  # fmt: skip
    print(f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s, direct calls {found['direct']}", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    drawn = [(name, shapes(name, asked.seed, asked.num)) for name in names]
    for name, of in ((name, cases[i]) for i in range(asked.num) for name, cases in drawn):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({"family": name, "case": str(of), "error": "no time left"})
            continue
        try:
            began = time.perf_counter()
            found["wrong"] += [f"{name} {fewer(of)} {what}" for what in wrong(name, of, device)]
            torch.cuda.empty_cache()
            for row in timed(name, of, course):
                found["rows"].append(row)
                print(told(row, found["copy_bytes_per_s"]), flush=True)
            torch.cuda.empty_cache()
            print(f"{name} took {time.perf_counter() - began:.2f} s", flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            found["errors"].append({"family": name, "case": str(of), "error": text,
                                    "trace": traceback.format_exc()[-1200:]})  # fmt: skip
            print("FAILED", name, of, text, flush=True)
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    print("\n".join(str(row) for row in shares(found)))
    print(f"wrong: {found['wrong']}; {len(found['errors'])} not reached or failed; {time.perf_counter() - BEGAN:.0f} s")


def main() -> None:
    from lab.race.drawn import command

    command(sys.modules[__name__], tuple(FAMILIES), 8, 80.0)


if __name__ == "__main__":
    main()
