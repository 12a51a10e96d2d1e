"""Attention on the GPU at hand: checks against the reference, then races against cuDNN and FlashAttention-2.

    python -m lab.race.attention --out DIR [--budget-s 150] [--jobs 14] [--parts checks host backward ...]

Writes attention.json after every part: each check and each row (seconds, spread, TFLOP/s), lost races included. Kernels
that no pack holds are compiled by many processes first (``--write-pack FOLDER`` makes one, without a GPU);
checks run in a few processes side by side, races alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

PARTS = ("checks", "launching", "host", "backward", "encoders", "paged", "forward", "variants", "latent", "stages",
         "orders", "reading", "decode", "special", "products", "pieces")  # fmt: skip
HEADS = (64, 8, 128)
PAGED = ((2, 64, 4, 3, 2, "leaves"), (2, 64, 4, 3, 1, "leaves"), (2, 64, 4, 3, 0, "leaves"),
         (2, 64, 4, 3, 2, "stays"), (1, 128, 4, 3, 1, "leaves"), (3, 64, 4, 2, 2, "leaves"),
         (3, 64, 4, 3, 2, ""))  # fmt: skip
"""CTAs per SM (0: one per sequence and key head), keys of a block, warps, stages, when the joining kernel may start,
and the L2 policy of the cache where the copy engine reads it (empty: threads do)."""

DECODE = ((2, 64, 4, 3, 2), (2, 64, 4, 4, 2), (4, 32, 4, 4, 2))
"""For a contiguous cache: the same, and when the joining kernel may start (0 after it, 1 at once, 2 late)."""

DECODE_CASES = ((1, 32, 8, 2048), (1, 32, 32, 2048), (8, 32, 8, 2048), (1, 32, 8, 16384), (8, 32, 8, 8192))

LATENT = ((64, 1, 4, 2, "leaves"), (64, 1, 4, 2, "stays"), (32, 2, 4, 3, ""))
"""Keys of a block, CTAs per SM, warps, stages and L2 policy for few heads; the kernel for many heads beside it."""

LATENT_CASES = ((64, 16, 4096, 64, False), (16, 16, 8192, 64, False), (9, 16, 11000, 64, False),
                (40, 16, 3001, 16, False), (100, 16, 2000, 64, True), (1, 16, 65536, 64, False))  # fmt: skip
"""Batch, heads, keys, page, uneven lengths."""

PAGED_CASES = ((1, 32, 8, 16400, 16, False), (3, 32, 8, 9001, 16, False), (1, 32, 8, 32768, 16, False),
               (5, 32, 8, 9100, 16, False), (8, 32, 8, 8192, 16, False), (24, 32, 8, 8192, 16, True),
               (19, 32, 8, 7001, 16, False), (1, 32, 8, 2048, 16, False), (4, 32, 8, 1000, 16, False),
               (16, 32, 8, 700, 16, True), (7, 32, 8, 5001, 64, False), (100, 64, 8, 1200, 16, True))  # fmt: skip
"""Batch, heads, key heads, keys, page, uneven lengths."""

STAGES = ((128, 128, 2, 2), (128, 128, 3, 2), (128, 64, 4, 2))
"""Rows and keys of a tile, stages of keys and of queries, in the forward pass of narrow heads."""

READING = ((8, 4096, 1, ""), (8, 4096, 1, "evict_first"), (16, 4096, 1, "evict_first"))
"""CTAs per SM, numbers of a block, stages, policy, for a kernel that only reads memory."""


def wanted_variants(parts: Sequence[str], brief: bool = False) -> list[Any]:
    """Everything that these parts launch, in all configurations."""
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    if brief:
        for name, i, _ in checks(parts, brief) if "checks" in parts else ():
            found += variants_of(name, [checked_cases(name)[i]])
        if set(parts) - {"checks", "paged", "latent", "decode", "products", "reading", "special",
                         "pieces"}:
            found += variants_of("attention", raced_cases(parts))
    else:
        for name in ("attention", "varlen_attention", "paged_attention", "decode_attention", "paged_latent_attention"):
            found += variants_of(name)
    for chosen in PAGED if "paged" in parts else ():
        with paged_by(*chosen):
            found += variants_of("paged_attention", [paged_case(*of) for of in PAGED_CASES])
    if {"paged", "latent", "products"} & set(parts):
        found += tested_variants(parts)
    for chosen in DECODE if "decode" in parts else ():
        with decode_by(*chosen):
            found += variants_of("decode_attention", [decode_case(*of) for of in DECODE_CASES])
    for of in LATENT_CASES if "latent" in parts else ():
        for chosen in (None, *LATENT):
            with latent_by(chosen):
                found += variants_of("paged_latent_attention", [latent_case(*of)])
    for chosen in STAGES if "stages" in parts else ():
        with forward_by(*chosen):
            found += [v for v in variants_of("attention", narrow()) if v.kernel == "attention_forward"]
    return list(dict.fromkeys(found))


def tested_variants(parts: Sequence[str]) -> list[Any]:
    """Everything that the GPU tests of these families launch."""
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    names = {"paged": "paged_attention", "latent": "paged_latent_attention", "products": "matmul"}
    for name in (names[part] for part in parts if part in names):
        trial = trials()[name][1]
        found += variants_of(name, [*trial.checks, *trial.races])
        odd = [of for of in trial.checks if of.dtype == "bfloat16"][1:5] if trial.layouts else []
        found += variants_of(name, odd, aligned=False)
    if "special" in parts:  # unwritten caches
        found += variants_of("paged_attention", [paged_case(4, 32, 8, 700, 64, False)])
        found += variants_of("paged_latent_attention", [latent_case(4, h, 700, 64, False) for h in (8, 128)])
    return found


def raced_cases(parts: Sequence[str]) -> list[Any]:
    """Cases of the races of plain attention."""
    from ridgeline.kernels.attention.op import ENCODERS, RACES
    from ridgeline.kernels.contract import case

    found = [*RACES, case("bfloat16", b=1, h=8, k=8, l=64, s=64, d=64, causal=False)]
    found += ENCODERS if "encoders" in parts else ()
    of = {"b": 4, "h": 32, "k": 32, "l": 4096, "s": 4096, "d": 128, "causal": True}
    more = ({"window": (1023, 0)}, {"cap": 30.0}, {"sinks": True}, {"d": 192, "dv": 128}, {"d": 256}, {"mask": 0.7})
    found += [case("bfloat16", **of | options) for options in more] if "variants" in parts else ()
    heads, keys, dim = HEADS
    found += [
        case("bfloat16", b=1, h=heads, k=keys, l=rows, s=rows, d=dim, causal=causal, deterministic=same)
        for rows in (2048, 4096, 8192, 16384) for causal in (False, True) for same in (False, True)
    ]  # fmt: skip
    return found


def checked_cases(name: str) -> list[Any]:
    """Cases of a check."""
    from ridgeline.kernels.attention import op
    from ridgeline.kernels.contract import trials

    return [*trials()[name][1].checks, *op.FUSED]


@contextmanager
def instead(module: Any, name: str, value: Any) -> Iterator[None]:
    """Override a configuration inside the context."""
    from ridgeline.kernels.launcher import forget_plans

    before = getattr(module, name)
    setattr(module, name, value)
    forget_plans()
    try:
        yield
    finally:
        setattr(module, name, before)
        forget_plans()


def paged_by(programs: int, keys: int, warps: int, stages: int, early: int, words: str) -> Any:
    """Override how paged attention splits and stages, inside the context."""
    from ridgeline.kernels.paged_attention import config

    fed: dict[str, Any] = {}
    if words:
        registers = 80 if programs == 3 else config.FED_REGISTERS
        fed = {"fed": True, "leaves": words == "leaves", "max_registers": registers}

    def choose(*sizes: Any, num_sms: int, **named: Any) -> Any:
        return config.Paged(keys, programs * num_sms, warps, stages, early, **fed)

    return instead(config, "choose", choose)


def decode_by(programs: int, keys: int, warps: int, stages: int, early: int) -> Any:
    """The same for attention over a contiguous cache."""
    from ridgeline.kernels.decode_attention import config
    from ridgeline.kernels.rows import cdiv, clamp

    def choose(batch: int, key_heads: int, longest: int, head_dim: int, num_sms: int) -> Any:
        shares = clamp(cdiv(programs * num_sms, batch * key_heads), 1, max(1, longest // keys))
        return config.Decode(keys, shares, warps, stages, early)

    return instead(config, "choose", choose)


def latent_by(chosen: tuple[Any, ...] | None) -> Any:
    """The same for latent attention of few heads; None takes the kernel for many."""
    from ridgeline.kernels.latent_attention import config

    if chosen is None:
        return instead(config, "takes_few", lambda *sizes: False)
    keys, programs, warps, stages, words = chosen

    def choose(*sizes: Any, num_sms: int, fed: bool, page: int, **named: Any) -> Any:
        if words and fed:
            ring = config.RING if page % keys else 0
            return config.Few(keys, programs * num_sms, warps, stages, fed=True, leaves=words == "leaves", ring=ring)
        return config.Few(32, 2 * num_sms)

    both = contextlib.ExitStack()
    both.enter_context(instead(config, "takes_few", lambda *sizes: True))
    both.enter_context(instead(config, "choose_few", choose))
    return both


def narrow() -> list[Any]:
    """Cases of heads of 64, short and long."""
    from ridgeline.kernels.attention.op import ENCODERS, RACES

    return [of for of in (*ENCODERS, *RACES) if of["d"] == 64]


def forward_by(*chosen: int) -> Any:
    """Override rows, keys and stages of the forward pass inside the context."""
    from ridgeline.kernels.attention import config

    return instead(config, "forward", lambda *sizes: config.Attention(*chosen))


def paged_case(b: int, h: int, k: int, s: int, page: int, uneven: bool) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, k=k, s=s, d=128, page=page, uneven=uneven)


def decode_case(b: int, h: int, k: int, s: int) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, k=k, s=s, d=128, hide="")


def latent_case(b: int, h: int, s: int, page: int, uneven: bool) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, s=s, d=512, e=64, page=page, uneven=uneven)


def compile_all(parts: Sequence[str], jobs: int, brief: bool) -> dict[str, Any]:
    """Compile what no pack holds (RIDGELINE_KERNEL_PACK)."""
    from ridgeline.kernels import pack

    began = time.perf_counter()
    wanted = [variant for variant in wanted_variants(parts, brief) if pack.find(variant) is None]
    num = sum(1 for _ in pack.compiled_all(wanted, jobs)) if wanted else 0
    return {"num_variants": num, "took_s": time.perf_counter() - began}


def write_pack(parts: Sequence[str], jobs: int, folder: Path, brief: bool) -> None:
    """Compile what these parts launch into a pack, on any machine."""
    from ridgeline.kernels import pack

    wanted = wanted_variants(parts, brief)
    pack.write(folder, wanted, jobs=jobs, progress=lambda done, total: print(done, "of", total, flush=True))
    print(f"{len(wanted)} variants in {folder}")


BRIEF = {
    "attention": (1, 3, 6, 8, 11, 12, 13, 14, 28, 33, 36, 39, 44, 46, 48, 52, 53, 54, 57),
    "varlen_attention": (0, 1), "paged_attention": (4, 7, 8, 9), "decode_attention": (2, 3, 9),
    "paged_latent_attention": (0, 1, 2, 4),
}  # fmt: skip
"""Checks of a short run, one of each kind."""


def checks(parts: Sequence[str], brief: bool) -> list[tuple[str, int, str]]:
    """(primitive, index of a case, layout) of everything that is checked."""
    from ridgeline.kernels.contract import trials

    if brief:
        return [(name, i, "contiguous") for name, chosen in BRIEF.items() for i in chosen]
    found = [("attention", i, "contiguous") for i in range(len(checked_cases("attention")))]
    found += [("attention", 2, "sliced"), ("attention", 6, "misaligned"), ("attention", 12, "transposed")]
    for name in ("varlen_attention", "paged_attention", "decode_attention", "paged_latent_attention"):
        found += [(name, i, "contiguous") for i in range(len(trials()[name][1].checks))]
    return found


def force_fused() -> None:
    """Always use the fused kernel for gradients that need not be deterministic."""
    from ridgeline.kernels.attention import config

    config.prefers_fused = lambda *sizes: True  # type: ignore[assignment]


def check_one(task: tuple[str, int, str]) -> list[list[Any]]:
    import torch

    from ridgeline.bench.check import check_case

    force_fused()
    name, i, layout = task
    of = checked_cases(name)[i]
    try:
        again = of.get("deterministic", True)
        found = check_case(name, of, torch.device("cuda"), int(time.time()) + i, layout, repeat=again)
        torch.cuda.synchronize()
        return [[name, f.case, f.layout, f.what, f.ok, f.note] for f in found]
    except Exception as error:
        return [[name, str(of), layout, "run", False, f"{type(error).__name__}: {str(error)[:300]}"]]


def checked(tasks: list[Any], num: int, end: float) -> Iterator[list[Any]]:
    """Findings of all tasks; a kernel that hangs costs only the tasks beside it."""
    while tasks:
        if time.perf_counter() > end:
            yield ["", str(tasks), "", "time", False, "checks did not fit into the time"]
            return
        with multiprocessing.get_context("spawn").Pool(num) as pool:
            waiting = dict(enumerate(tasks))
            running = pool.imap_unordered(numbered_check, list(waiting.items()))
            try:
                while waiting:
                    i, found = running.next(timeout=25)
                    del waiting[i]
                    yield from found
                return
            except multiprocessing.TimeoutError:
                stuck = list(waiting.values())[:num]
                yield ["", str(stuck), "", "hung", False, "one of these never ended"]
                tasks = list(waiting.values())[num:]


def numbered_check(task: tuple[int, tuple[str, int, str]]) -> tuple[int, list[list[Any]]]:
    return task[0], check_one(task[1])


def part_checks(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.bench.check import check_mistakes
    from ridgeline.kernels.contract import trials

    for row in checked(checks(options.parts, options.brief), min(8, options.jobs), time.perf_counter() + budget_s):
        yield dict(zip(("primitive", "case", "layout", "what", "ok", "note"), row, strict=True))
    for name in () if options.brief else ("attention", "varlen_attention"):
        of = trials()[name][1].checks[2]
        for f in check_mistakes(name, of, torch.device("cuda"), 7):
            yield {"primitive": name, "case": f.case, "layout": "", "what": f.what, "ok": f.ok, "note": f.note}


def part_launching(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """New addresses at every call, another stream, a replayed graph: the same numbers each time."""
    import torch

    from ridgeline.kernels import attention

    def draw() -> tuple[Any, ...]:
        return tuple(torch.randn(2, h, 300, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))

    def step(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def agree(a: Any, b: Any) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    sets = [draw() for _ in range(80)]
    before = [[y.clone() for y in step(*x)] for x in sets]
    yield {"what": "80 addresses twice", "ok": all(agree(step(*x), y) for x, y in zip(sets, before, strict=True))}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = step(*sets[3])
        side.synchronize()
    yield {"what": "another stream", "ok": agree(found, before[3])}
    fixed = tuple(x.clone() for x in sets[0])
    with torch.cuda.stream(side):
        for _ in range(2):
            step(*fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*fixed)
    ok = True
    for i in (5, 9, 0):
        for mine, new in zip(fixed, sets[i], strict=True):
            mine.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        ok = ok and agree(out, before[i])
    yield {"what": "a graph replayed with new inputs", "ok": ok}
    yield from _paged_graph()


def _paged_graph() -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.kernels.contract import case, trials

    trial = trials()["paged_attention"][1]
    of = case("bfloat16", b=2, h=32, k=8, s=5000, d=128, page=16, uneven=True)
    args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
    meant = trial.call(*args).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trial.call(*args)
    same = True
    for _ in range(20):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same = same and torch.equal(out, meant)
    yield {"what": "paged decoding in a graph, join started early", "ok": same}


def part_special(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Empty caches, and CUDA graphs."""
    from lab.race.special_cases import attention_in_graphs, unwritten_caches

    for run in (unwritten_caches, attention_in_graphs):
        note = run()
        yield {"what": run.__doc__, "ok": "WRONG" not in note, "note": note}


def theirs(q: Any, k: Any, v: Any, causal: bool, backend: str, mask: Any = None) -> Callable[[], Any]:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = getattr(SDPBackend, backend)
    seen = None if mask is None else mask[:, None, None, :]

    def run() -> Any:
        with sdpa_kernel([kind]):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return run


def gradients(out: Any, leaves: tuple[Any, ...], seed: Any) -> Callable[[], Any]:
    import torch

    return lambda: torch.autograd.grad(out, leaves, seed, retain_graph=True)


def timed(course: Any, runs: dict[str, Callable[[], Any]], **facts: Any) -> Iterator[dict[str, Any]]:
    """One row per contender; one that cannot run gets a row with the reason."""
    import torch

    able = {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            able[name] = run
        except Exception as error:
            yield {**facts, "contender": name, "note": f"{type(error).__name__}: {str(error)[:160]}"}
    flops, num_bytes = facts.pop("flops", 0.0), facts.pop("num_bytes", 0)
    for name, samples in (course.turns(able) if able else {}).items():
        middle = statistics.median(samples)
        row = {**facts, "contender": name, "num": len(samples), "median_s": middle, "low_s": min(samples)}
        row |= {"high_s": max(samples), "tflops": flops / middle / 1e12, "bytes_per_s": num_bytes / middle}
        yield row


def part_host(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """The host time of a call that is repeated from Python."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention

    course = Course(torch.device("cuda"))
    q, k, v = (torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    seed = torch.randn_like(q)

    def quiet(run: Callable[[], Any]) -> Callable[[], Any]:
        def inner() -> Any:
            with torch.no_grad():
                return run()

        return inner

    def stepped(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), leaves, seed)

    runs = {
        "fwd ridgeline": quiet(lambda: attention(q, k, v)),
        "fwd sdpa": quiet(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        "step ridgeline": stepped(lambda: attention(*leaves)),
        "step sdpa": stepped(lambda: torch.nn.functional.scaled_dot_product_attention(*leaves)),
    }
    for name, samples in course.calls(runs).items():
        yield {"what": name, "call_s": statistics.median(samples)}


def part_backward(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Two kernels, and the fused one, against cuDNN."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention

    course, end = Course(torch.device("cuda"), rounds=9), time.perf_counter() + budget_s
    heads, keys, dim = HEADS
    for rows, causal in (
        (4096, True),
        (8192, True),
        (16384, True),
        (2048, True),
        (4096, False),
        (8192, False),
        (2048, False),
    ):
        if time.perf_counter() > end:
            return
        draw = [torch.randn(1, rows, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, keys, keys, heads)]
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in draw[:3])
        seed = draw[3].transpose(1, 2)
        outs = {name: attention(q, k, v, causal, deterministic=name == "two kernels")
                for name in ("two kernels", "fused")}  # fmt: skip

        runs = {name: gradients(out, (q, k, v), seed) for name, out in outs.items()}
        meant = gradients(outs["two kernels"], (q, k, v), seed)()
        found = runs["fused"]()
        off = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, meant, strict=True)]
        yield {"what": "fused against two kernels", "rows": rows, "causal": causal, "ok": max(off) < 0.01,
               "note": str(off)}  # fmt: skip
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            try:
                out = theirs(q, k, v, causal, backend)()
            except Exception as error:
                yield {"contender": backend, "note": str(error)[:160]}
                continue
            runs[backend] = gradients(out, (q, k, v), seed)
        flops = 10 * heads * rows * rows * dim * (0.5 if causal else 1.0)
        yield from timed(course, runs, phase="bwd", rows=rows, causal=causal, flops=flops)


def part_encoders(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention
    from ridgeline.kernels.attention import op

    course, end = Course(torch.device("cuda"), rounds=15), time.perf_counter() + budget_s
    for of in op.ENCODERS:
        if time.perf_counter() > end:
            return
        args = op._make(of, course.device, torch.Generator("cuda").manual_seed(5))
        q, k, v = (x.detach().requires_grad_() for x in args[:3])
        mask = args[6]
        runs: dict[str, Callable[[], Any]] = {
            "ridgeline": partial(attention, q, k, v, key_mask=mask, deterministic=True)
        }
        if of["d"] == 128:
            runs["fused"] = partial(attention, q, k, v, key_mask=mask, deterministic=False)
        runs |= {b: theirs(q, k, v, False, b, mask)
                 for b in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")}  # fmt: skip
        flops = 4 * of["b"] * of["h"] * of["l"] * of["s"] * of["d"]
        with torch.no_grad():
            yield from timed(course, dict(runs), phase="fwd", case=str(of), flops=flops)
        grads = {}
        for name, run in runs.items():
            try:
                grads[name] = gradients(run(), (q, k, v), torch.randn_like(q))
            except Exception:
                continue
        yield from timed(course, grads, phase="bwd", case=str(of), flops=2.5 * flops)


def part_forward(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention
    from ridgeline.kernels.attention import op

    course, end = Course(torch.device("cuda"), rounds=9), time.perf_counter() + budget_s
    for of in op.RACES:
        if time.perf_counter() > end:
            return
        q, k, v = op._make(of, course.device, torch.Generator("cuda").manual_seed(6))[:3]
        causal = of["causal"]
        flops = 4 * of["b"] * of["h"] * of["l"] * of["s"] * of["d"] * (0.5 if causal else 1.0)
        runs: dict[str, Callable[[], Any]] = {"ridgeline": partial(attention, q, k, v, causal)}
        runs |= {b: theirs(q, k, v, causal, b) for b in ("CUDNN_ATTENTION", "FLASH_ATTENTION")}
        with torch.no_grad():
            yield from timed(course, runs, phase="fwd", case=str(of), flops=flops)


def part_variants(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Windows, caps, sinks, wide heads and uneven sequences beside plain causal attention of the same size."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention, varlen_attention

    course, rows = Course(torch.device("cuda"), rounds=7), 4096
    settings: dict[str, tuple[int, int, dict[str, Any]]] = {
        "causal": (128, 128, {}), "window 1024": (128, 128, {"window": (1023, 0)}),
        "softcap": (128, 128, {"softcap": 30.0}), "sinks": (128, 128, {"sinks": torch.randn(32, device="cuda")}),
        "192/128": (192, 128, {}), "256": (256, 256, {}), "key mask": (128, 128, {"key_mask": _padded_mask(4, rows)}),
    }  # fmt: skip
    for name, (dim, value_dim, options) in settings.items():
        draw = [torch.randn(4, 32, rows, d, device="cuda", dtype=torch.bfloat16) for d in (dim, dim, value_dim)]
        q, k, v = (x.requires_grad_() for x in draw)
        out = attention(q, k, v, True, deterministic=True, **options)
        flops = 2 * 4 * 32 * rows * rows * (dim + value_dim) * 0.5
        runs = {"ridgeline": _no_grad(partial(attention, q, k, v, True, **options))}
        if not options:
            runs["CUDNN_ATTENTION"] = _no_grad(theirs(q, k, v, True, "CUDNN_ATTENTION"))
        yield from timed(course, runs, phase="fwd", case=name, flops=flops)
        back = {"ridgeline": gradients(out, (q, k, v), torch.randn_like(out))}
        if not options:
            try:
                other = theirs(q, k, v, True, "CUDNN_ATTENTION")()
                back["CUDNN_ATTENTION"] = gradients(other, (q, k, v), torch.randn_like(out))
            except Exception as error:
                yield {"case": name, "contender": "CUDNN_ATTENTION", "note": str(error)[:160]}
        yield from timed(course, back, phase="bwd", case=name, flops=2.5 * flops)
    lens = torch.tensor([4096, 1000, 3000, 4096, 2000, 2192, 512, 512, 3072, 4096], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).to(torch.int32)]).cuda()
    q, k, v = (torch.randn(int(lens.sum()), 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flops = 2 * 32 * float((lens.double() ** 2).sum()) * 256 * 0.5
    runs = {"ridgeline": _no_grad(lambda: varlen_attention(q, k, v, starts, starts, 4096, 4096, True))}
    yield from timed(course, runs, phase="fwd", case="uneven sequences", flops=flops)


def _padded_mask(batch: int, keys: int) -> Any:
    import torch

    ends = torch.linspace(keys * 0.5, keys, batch, device="cuda")
    return torch.arange(keys, device="cuda")[None, :] < ends[:, None]


def _no_grad(run: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    def inner() -> Any:
        with torch.no_grad():
            return run()

    return inner


def clean_course(rounds: int) -> Any:
    """A course whose cold L2 holds clean lines: the usual flush leaves 50 MB to write back during the measurement."""
    import torch

    from ridgeline.bench.race import Course

    class Clean(Course):
        def turns(self, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
            flush = self.flush
            self.flush = Flushed(flush, torch.empty((), dtype=torch.int32, device=self.device))
            try:
                return super().turns(runs)
            finally:
                self.flush = flush

    class Flushed:
        """Replaces the flush buffer: it is written and then read, which leaves nothing to write back."""

        def __init__(self, buffer: Any, out: Any) -> None:
            self.buffer, self.out = buffer, out

        def zero_(self) -> None:
            self.buffer.zero_()
            torch.amax(self.buffer, dim=0, out=self.out)

    return Clean(torch.device("cuda"), rounds=rounds)


def part_paged(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Every configuration at every size in turns, as a share of what a copy reaches."""
    import torch

    from ridgeline.bench.race import Course, copy_bandwidth

    courses = {"dirty": Course(torch.device("cuda"), rounds=21, budget_s=1.0), "clean": clean_course(21)}
    end = time.perf_counter() + budget_s
    copied = copy_bandwidth(courses["dirty"])
    yield {"what": "copy", "bytes_per_s": copied, "clean_bytes_per_s": copy_bandwidth(courses["clean"])}
    for of in PAGED_CASES:
        if time.perf_counter() > end:
            return
        yield from _paged(of, courses, copied)


def _paged(of: tuple[Any, ...], courses: dict[str, Any], copied: float) -> Iterator[dict[str, Any]]:
    """All configurations on one case, the default, and eager PyTorch where it is quick."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["paged_attention"][1]
    args = trial.make(paged_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
    num_bytes, meant = trial.forward_bytes(args), trial.eager(*args).float()
    runs = {"default": _no_grad(partial(trial.call, *args))}
    for chosen in PAGED:
        with paged_by(*chosen):
            runs[str(chosen)] = planned(args)
    for name, run in runs.items():
        found = [run().clone() for _ in range(3)]
        off = float((found[0].float() - meant).norm() / meant.norm())
        same = all(torch.equal(found[0], x) for x in found[1:])
        yield {"what": f"{name} against eager", "case": str(of), "ok": off < 0.01 and same, "note": f"{off} {same}"}
    if num_bytes < 64_000_000:
        runs["eager"] = _no_grad(partial(trial.eager, *args))
    for lines, on in courses.items():
        for row in timed(on, runs, phase="fwd", case=str(of), num_bytes=num_bytes, lines=lines):
            yield {**row, "share_frac": row.get("bytes_per_s", math.nan) / copied, "num_bytes": num_bytes}


def planned(args: tuple[Any, ...]) -> Callable[[], Any]:
    """A call of paged attention with the current configuration."""
    import torch

    from ridgeline.kernels.paged_attention import op

    scale, out = args[0].shape[-1] ** -0.5, torch.empty_like(args[0])
    plan = op._Plan(args, out, scale)

    def run() -> Any:
        plan.run(args, out, scale)
        return out

    return run


def part_pieces(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Microseconds by part: reading alone, joining alone, no keys, one or two blocks per CTA."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.paged_attention import op

    trial, courses = trials()["paged_attention"][1], {"dirty": Course(torch.device("cuda"), rounds=31, budget_s=1.0)}
    courses["clean"] = clean_course(31)
    args = trial.make(paged_case(1, 32, 8, 32768, 16, False), torch.device("cuda"), torch.Generator("cuda"))
    out, scale = torch.empty_like(args[0]), 128**-0.5
    plan = op._Plan(args, out, scale)
    part, seen = plan._room(out)
    assert plan.parts is not None

    def reading(lens: Any) -> Callable[[], Any]:
        return lambda: plan.share(*args[:4], lens, out, part, seen, scale * op.LOG2_E, *plan.rest)

    def whole(lens: Any) -> Callable[[], Any]:
        return lambda: plan.run((*args[:4], lens), out, scale)

    lengths = {keys: torch.full_like(args[4], keys) for keys in (0, 2112, 4224, 16384, 32768)}
    runs = {f"reading {keys}": reading(lens) for keys, lens in lengths.items()}
    runs |= {f"whole {keys}": whole(lens) for keys, lens in lengths.items()}
    runs["joining"] = lambda: plan.parts.join(part, seen, args[4], out)
    word = torch.zeros(1, device="cuda")
    runs["a kernel of PyTorch's"] = lambda: word.fill_(1.0)
    for lines, on in courses.items():
        yield from timed(on, runs, phase="fwd", case="pieces", lines=lines)


def part_decode(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Every configuration over a contiguous cache, and PyTorch's fused attention."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials

    course, end = Course(torch.device("cuda"), rounds=15), time.perf_counter() + budget_s
    clean, trial = clean_course(15), trials()["decode_attention"][1]
    for sizes in DECODE_CASES:
        if time.perf_counter() > end:
            return
        args = trial.make(decode_case(*sizes), course.device, torch.Generator("cuda").manual_seed(2))
        num_bytes, meant = 2 * args[1].nbytes, trial.call(*args).float()
        for chosen in (*DECODE, None):
            with decode_by(*chosen) if chosen else contextlib.nullcontext():
                run = partial(trial.call if chosen else trial.eager, *args)
                off = float((run().float() - meant).norm() / meant.norm())
                yield {"what": f"{chosen} against the default", "case": str(sizes), "ok": off < 0.01, "note": str(off)}
                for lines, on in (("dirty", course), ("clean", clean)):
                    runs = {str(chosen or "eager"): _no_grad(run)}
                    yield from timed(on, runs, phase="fwd", case=str(sizes), num_bytes=num_bytes, lines=lines)


def part_latent(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Every configuration of latent decoding with few heads, and the kernel for many."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials

    courses = {"dirty": Course(torch.device("cuda"), rounds=15), "clean": clean_course(15)}
    end, trial = time.perf_counter() + budget_s, trials()["paged_latent_attention"][1]
    for of in LATENT_CASES:
        if time.perf_counter() > end:
            return
        args = trial.make(latent_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
        facts = {"phase": "fwd", "case": str(of), "num_bytes": trial.forward_bytes(args)}
        meant = trial.eager(*args).float()
        for chosen in (None, *LATENT):
            with latent_by(chosen):
                name = str(chosen or "many")
                found = [trial.call(*args) for _ in range(3)]
                off = float((found[0].float() - meant).norm() / meant.norm())
                same = all(torch.equal(found[0], x) for x in found[1:])
                yield {"what": f"{name} against eager", "case": str(of), "ok": off < 0.01 and same,
                       "note": f"{off} {same}"}  # fmt: skip
                for lines, on in courses.items():
                    yield from timed(on, {name: _no_grad(partial(trial.call, *args))}, lines=lines, **facts)


def part_products(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Float32 GEMMs beside PyTorch's, and the errors of both against float64."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import case, trials

    course, end = Course(torch.device("cuda"), rounds=9), time.perf_counter() + budget_s
    trial = trials()["matmul"][1]
    long = [case("float32", m=m, n=n, k=16384, weight=weight, positive=positive) for positive in (True, False)
            for m, n, weight in ((33, 257, True), (300, 200, False), (200, 1000, True))]  # fmt: skip
    for of in (*trial.races, *trial.checks, *long):
        if time.perf_counter() > end:
            return
        args = trial.make(of, course.device, torch.Generator("cuda").manual_seed(4))
        meant = args[0].double() @ args[1].double() + (0.0 if args[2] is None else args[2])
        off = [float((y.double() - meant).norm() / meant.norm()) for y in (trial.call(*args), trial.eager(*args))]
        yield {"what": "error against float64, ours and PyTorch's", "case": str(of), "ok": off[0] <= 2 * off[1] + 3e-8,
               "note": str(off)}  # fmt: skip
        runs = {"ridgeline": _no_grad(partial(trial.call, *args)), "PyTorch": _no_grad(partial(trial.eager, *args))}
        yield from timed(course, runs, phase="fwd", case=str(of))


def orders(module: Any) -> Iterator[tuple[str, Any]]:
    """Orders of a backward pass's work by name: as chosen, and all heads next to each other."""
    yield "as chosen", contextlib.nullcontext()
    yield "all side by side", instead(module, "side_by_side", lambda lengths, heads, *rest: heads)


def part_orders(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """The backward pass with its work in other orders."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention
    from ridgeline.kernels.attention import config

    course, end = Course(torch.device("cuda"), rounds=7), time.perf_counter() + budget_s
    heads, keys, dim = HEADS
    for rows, causal in ((4096, True), (8192, True), (4096, False)):
        draw = [torch.randn(1, rows, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, keys, keys, heads)]
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in draw[:3])
        outs = {name: attention(q, k, v, causal, deterministic=name == "two kernels")
                for name in ("two kernels", "fused")}  # fmt: skip
        flops = 10 * heads * rows * rows * dim * (0.5 if causal else 1.0)
        for name, order in orders(config):
            if time.perf_counter() > end:
                return
            with order:
                runs = {f"{who}, {name}": gradients(out, (q, k, v), draw[3].transpose(1, 2))
                        for who, out in outs.items()}  # fmt: skip
                yield from timed(course, runs, phase="bwd", rows=rows, causal=causal, flops=flops)


def part_reading(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """The time of reading alone at the sizes of caches, launch and drain included: the ceiling of paged decoding."""
    import torch

    from lab.race import bare_read as reading
    from ridgeline.bench.race import Course, copy_bandwidth

    course, clean, end = Course(torch.device("cuda"), rounds=15), clean_course(15), time.perf_counter() + budget_s
    for lines, on in (("dirty", course), ("clean", clean)):
        yield {"what": "copy", "lines": lines, "bytes_per_s": copy_bandwidth(on)}
        for num_bytes in (4096, 67_174_400, 134_217_728, 268_435_456, 545_000_000):
            if time.perf_counter() > end:
                return
            data = torch.randint(0, 99, (num_bytes // 4,), dtype=torch.int32, device="cuda")
            runs = {str(chosen): reading.run(data, *chosen) for chosen in READING}
            runs["sum"] = partial(torch.sum, data.view(torch.float32))
            yield from timed(on, runs, phase="read", case=str(num_bytes), num_bytes=num_bytes, lines=lines)


def part_stages(budget_s: float, options: Any) -> Iterator[dict[str, Any]]:
    """Blocks and stages of the forward pass at the sizes of encoders."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels import attention
    from ridgeline.kernels.attention import op

    course, end = Course(torch.device("cuda"), rounds=15), time.perf_counter() + budget_s
    for of in narrow():
        if time.perf_counter() > end:
            return
        args = op._make(of, course.device, torch.Generator("cuda").manual_seed(5))
        flops = 4 * of["b"] * of["h"] * of["l"] * of["s"] * of["d"] * (0.5 if of["causal"] else 1.0)
        for chosen in STAGES:
            with forward_by(*chosen):
                run = _no_grad(partial(attention, *args[:4], key_mask=args[6]))
                yield from timed(course, {str(chosen): run}, phase="fwd", case=str(of), flops=flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--parts", nargs="+", default=list(PARTS[:8]), choices=PARTS)
    parser.add_argument("--file", default="attention.json", help="what the results are called")
    parser.add_argument("--brief", action="store_true", help="one check of a kind")
    parser.add_argument("--write-pack", type=Path, help="compile what the parts need into this folder, and end")
    options = parser.parse_args()
    force_fused()
    if options.write_pack:
        write_pack(options.parts, options.jobs, options.write_pack, options.brief)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found: dict[str, Any] = {"parts": {}}

    def write() -> None:
        (options.out / options.file).write_text(json.dumps(found, indent=1))

    def give_up() -> None:
        found["note"] = "stopped: something never ended"
        print(found["note"], list(found["parts"]), flush=True)
        write()
        os._exit(3)

    watch = threading.Timer(options.budget_s + 15, give_up)
    watch.daemon = True
    watch.start()
    found["compiled"] = compile_all(options.parts, options.jobs, options.brief)
    print("compiled", found["compiled"], flush=True)
    import torch

    found |= {"torch": torch.__version__}
    for name in options.parts:
        left_s = options.budget_s - (time.perf_counter() - began)
        rows = found["parts"][name] = []
        if left_s <= 5:
            rows.append({"note": "left out: no time"})
            continue
        try:
            for row in globals()[f"part_{name}"](left_s, options):
                rows.append(row)
                if name != "checks" or not row["ok"]:
                    print(name, json.dumps({k: _short(v) for k, v in row.items()}), flush=True)
        except Exception:
            rows.append({"note": traceback.format_exc()[-2000:]})
            print(name, "stopped:", traceback.format_exc()[-2000:], flush=True)
        print(f"{name}: {len(rows)} rows, {sum(not r.get('ok', True) for r in rows)} failed, "
              f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
        write()
    found["device"] = torch.cuda.get_device_name()
    write()


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
