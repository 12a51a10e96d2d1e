"""Shapes of published models, drawn from a seed, for `lab/race/drawn_rows.py --real`.

Columns are hidden sizes, gating widths and vocabularies of public models; rows are batches of sequences: powers of two
times lengths, packed batches of any number of tokens, the few tokens of a decoding step. AdamW gets the tensors of
whole layers. A seed draws model, dtype and tokens; cases that move more than 1.5 GB are drawn again. Cases are compared
and timed as in `lab/race/drawn_families.py`.
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

from lab.race import drawn_families as families

BEGAN = families.BEGAN
FILE = "race_real.json.gz"
MOST_BYTES = 1.5e9
"""The most bytes of a forward pass, so that sixteen shapes per function fit into a minute."""
HIDDEN = (768, 896, 1024, 1152, 1280, 1536, 1600, 1920, 2048, 2304, 2560, 2688, 2816, 2880, 3072, 3200, 3584, 3840,
          4096, 4544, 4608, 5120, 5376, 6144, 6656, 7168, 8192, 9216, 10240, 12288, 14336, 16384, 18432)  # fmt: skip
GATED = (1408, 2048, 3072, 4864, 5504, 5632, 6144, 6912, 7680, 8192, 8960, 9216, 9728, 10240, 11008, 12288, 13696,
         13824, 14336, 15360, 16384, 17408, 17920, 18432, 18944, 20480, 21504, 22016, 24576, 25600, 27648, 28672, 29568,
         53248)  # fmt: skip
VOCABULARIES = (21128, 28996, 30522, 32000, 32001, 32064, 32128, 49152, 49408, 50257, 50265, 50280, 50304, 51200, 51866,
                64000, 65024, 65536, 92544, 99584, 100256, 100352, 102400, 119547, 128000, 128256, 129280, 131072,
                151552, 151669, 151936, 152064, 163840, 200064, 201088, 202048, 248320, 250002, 250880, 255000, 256000,
                256206, 262144, 262208)  # fmt: skip
LENGTHS = (128, 197, 256, 257, 512, 577, 1024, 1500, 2048, 4096, 8192, 16384, 32768)
LAYERS = ((768, 3072), (1024, 4096), (1024, 2816), (1536, 8960), (2048, 5632), (2048, 8192), (2560, 9728), (3072, 8192),
          (3584, 18944), (4096, 11008), (4096, 14336), (5120, 13824))  # fmt: skip
"""Hidden size and gated width of the models whose parameters AdamW updates."""

Rng = random.Random


def tokens(rng: Rng) -> int:
    """Rows of a call: whole batches, packed ones of any size, a prompt, the sequences of a decoding step."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice((1, 2, 4, 8, 16, 32)) * rng.choice(LENGTHS)
    if kind < 0.8:
        return round(families.log_uniform(rng, 1000, 65536))
    return round(families.log_uniform(rng, 16, 1000)) if kind < 0.9 else rng.randint(1, 256)


def kind_of(rng: Rng) -> str:
    return rng.choice(("bfloat16",) * 6 + ("float16",) * 2 + ("float32",) * 2)


def rows_of(tensors: float, known: tuple[int, ...]) -> Callable[[Rng], Any]:
    """Draw rows by columns for so many tensors, until they are small enough."""
    from ridgeline.kernels.contract import case

    def drawn(rng: Rng) -> Any:
        while True:
            dtype, cols, rows = kind_of(rng), rng.choice(known), tokens(rng)
            if tensors * rows * cols * families.item(dtype) <= MOST_BYTES:
                return case(dtype, rows=rows, cols=cols)

    return drawn


def narrowed(rng: Rng) -> Any:
    """Quantized activations before a GEMM, a scale per token or per block of 128 columns."""
    from ridgeline.kernels.contract import case

    of = rows_of(1.5, HIDDEN + GATED)(rng)
    per = rng.choice(("row", "row", "tensor", "block"))
    per = "row" if of["cols"] % 128 else per
    return case(of.dtype, rows=of["rows"], cols=of["cols"], kind=rng.choice(families.NARROW), per=per,
                block=128 if per == "block" else 0)  # fmt: skip


def narrowed_norm(rng: Rng) -> Any:
    from ridgeline.kernels.contract import case

    of = rows_of(1.5, HIDDEN)(rng)
    block = 0 if of["cols"] % 128 else rng.choice((0, 0, 128))
    return case(of.dtype, rows=of["rows"], cols=of["cols"], kind=rng.choice(families.NARROW[:3]), block=block)


def optimized(rng: Rng) -> Any:
    """The tensors of so many layers of a model, with or without an embedding."""
    from ridgeline.kernels.contract import case

    while True:
        (hidden, width), layers = rng.choice(LAYERS), rng.choice((1, 2, 4, 8, 16))
        keys = hidden // rng.choice((1, 4))
        layer = (hidden * hidden, hidden * keys, hidden * keys, hidden * hidden, *(hidden * width,) * 3, hidden, hidden)
        sizes = (*layer * layers, hidden, *((rng.choice(VOCABULARIES) * hidden,) if rng.random() < 0.3 else ()))
        dtype = rng.choice(("float32", "bfloat16"))
        if sum(sizes) * 28 <= 2 * MOST_BYTES:
            break
    own = {"own": True} if dtype != "float32" and rng.random() < 0.5 else {"master": dtype != "float32"}
    bound = -1.0 if "own" in own else rng.choice((-1.0, 1.0))
    return case(dtype, list=families.listed(sizes), max_norm=bound, **own)


FAMILIES: dict[str, families.Family] = {
    name: families.Family(draw, of_copy, times)
    for name, draw, of_copy, times in (
        ("rms_norm", lambda: rows_of(2, HIDDEN), families.NORMS, families.NORM_TIMES),
        ("layer_norm", lambda: rows_of(2, HIDDEN), families.NORMS, families.NORM_TIMES),
        ("add_rms_norm", lambda: rows_of(4, HIDDEN), families.NORMS, families.NORM_TIMES),
        ("add_layer_norm", lambda: rows_of(4, HIDDEN), families.NORMS, families.NORM_TIMES),
        ("softmax", lambda: rows_of(2, VOCABULARIES), families.NORMS, families.NORM_TIMES),
        ("cross_entropy", lambda: rows_of(1, VOCABULARIES), families.NORMS, families.NORM_TIMES),
        ("swiglu", lambda: rows_of(3, GATED), families.NORMS, families.NORM_TIMES),
        ("geglu", lambda: rows_of(3, GATED), families.NORMS, families.NORM_TIMES),
        ("relu2", lambda: rows_of(2, GATED), families.NORMS, families.NORM_TIMES),
        ("rms_norm_quant", lambda: narrowed_norm, (("fwd", 0.90),), (("fwd", 1.0),)),
        ("layer_norm_quant", lambda: narrowed_norm, (("fwd", 0.90),), (("fwd", 1.0),)),
        ("quantize", lambda: narrowed, (("fwd", 0.90),), (("fwd", 1.0),)),
        ("adamw", lambda: optimized, (("fwd", 0.90),), (("fwd", 1.0),)),
    )
}
NAMES = tuple(FAMILIES)


def shapes(name: str, seed: int, num: int) -> list[Any]:
    """Cases of a function, determined by the seed."""
    rng, draw = random.Random(f"real {name} {seed}"), FAMILIES[name].draw()
    found: dict[Any, None] = {}
    while len(found) < num:
        found[draw(rng)] = None
    return list(found)


def wanted_variants(seed: int, num: int, names: tuple[str, ...] = NAMES) -> list[Any]:
    """Kernels that a pack must hold for these cases and their comparisons."""
    return families.variants_for({name: shapes(name, seed, num) for name in names})


def warm(seed: int, num: int, names: tuple[str, ...], part: int, parts: int) -> None:
    families.warm_cases([(name, of) for name in names for of in shapes(name, seed, num)], part, parts)


def standing(name: str, phase: str, found: dict[str, Any]) -> dict[str, Any] | None:
    """One function in one phase: how many cases over 64 MB reach the target, and the best rival's ratio."""
    cases = {key: took for key, took in families.by_case(found["rows"]).items() if key[:2] == (name, phase)}
    if not cases:
        return None
    asked = dict(FAMILIES[name].of_copy)[phase]
    large = [(key[3] / took["ridgeline"] / found["copy_bytes_per_s"], families.bare_of(took))
             for key, took in cases.items() if key[3] > families.LARGE_BYTES]  # fmt: skip
    return {
        "family": name, "phase": phase, "asked": asked, "num": len(cases), "large": len(large),
        "possible": sum(of_copy * bare_over(bare) >= asked for of_copy, bare in large),
        "reach": sum(of_copy >= asked for of_copy, _ in large),
        "reach_as_large": sum(max(of_copy, bare) >= asked for of_copy, bare in large),
        "least_as_large": min((bare for _, bare in large if not math.isnan(bare)), default=math.nan),
        "beside": [ratio for ratio in map(families.best_of, cases.values()) if not math.isnan(ratio)],
    }  # fmt: skip


def bare_over(bare: float) -> float:
    """The bare copy's time over ours; if the copy itself misses the target, no kernel can reach it."""
    return 1.0 / bare if bare and not math.isnan(bare) else 1.0


def standings(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in FAMILIES:
        for phase in ("fwd", "bwd"):
            told = standing(name, phase, found)
            if told is not None:
                yield told


def mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


def summary(found: dict[str, Any]) -> Iterator[str]:
    """A summary by function and phase, and in total, as Markdown."""
    rows = list(standings(found))
    yield (
        "| function | phase | cases | over 64 MB | a bare copy reaches the figure | ours does | ours of bytes as many"
        " | least of these | best rival over ours | slower than it | worst |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    together = [
        {"family": "all", "phase": phase, "least_as_large": min((row["least_as_large"] for row in rows
         if row["phase"] == phase and not math.isnan(row["least_as_large"])), default=math.nan),
         "beside": [ratio for row in rows if row["phase"] == phase for ratio in row["beside"]],
         **{key: sum(row[key] for row in rows if row["phase"] == phase)
            for key in ("num", "large", "possible", "reach", "reach_as_large")}}
        for phase in ("fwd", "bwd")
    ]  # fmt: skip
    for row in [*rows, *together]:
        cells = [row[key] for key in ("family", "phase", "num", "large", "possible", "reach", "reach_as_large")]
        beside = row["beside"]
        ends = [f"{row['least_as_large']:.0%}", f"{mean(beside):.2f}", sum(ratio < 1.0 for ratio in beside),
                f"{min(beside, default=math.nan):.2f}"]  # fmt: skip
        yield f"| {' | '.join(map(str, [*cells, *ends]))} |"


def table(found: dict[str, Any]) -> Iterator[str]:
    """The summary and every case as Markdown for a note."""
    copy = found["copy_bytes_per_s"]
    yield f"Copy of 1 GiB in the same run: {copy / 1e12:.2f} TB/s. Seed {found['seed']}."
    yield ""
    yield from summary(found)
    yield ""
    yield "| function | phase | case | MB | ours, µs | eager | Liger | bytes as many | of the copy | of bytes as many |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, phase, of, num_bytes), took in families.by_case(found["rows"]).items():
        bare = next((took[who] for who in families.BARE if who in took), math.nan)
        times = [took["ridgeline"], took.get("eager", math.nan), took.get("liger", math.nan), bare]
        shown = ["–" if math.isnan(s) else f"{1e6 * s:.1f}" for s in times]
        ours = took["ridgeline"]
        ends = [f"{num_bytes / ours / copy:.0%}", "" if math.isnan(bare) else f"{bare / ours:.0%}"]
        cells = [name, phase, of.replace("bfloat16", "bf16"), f"{num_bytes / 1e6:.1f}", *shown, *ends]
        yield f"| {' | '.join(cells)} |"


def measure(asked: argparse.Namespace, names: tuple[str, ...]) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, copy_bandwidth

    device = torch.device("cuda")
    course = Course(device, rounds=asked.rounds, budget_s=0.08)
    found: dict[str, Any] = {"seed": asked.seed, "copy_bytes_per_s": copy_bandwidth(Course(device)), "rows": [],
                             "wrong": [], "errors": []}  # fmt: skip
    print(f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    drawn = [(name, shapes(name, asked.seed, asked.num)) for name in names]
    for name, of in ((name, cases[i]) for i in range(asked.num) for name, cases in drawn):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({"family": name, "case": str(of), "error": "no time left"})
            continue
        one(name, of, found, course)
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    print("\n".join(summary(found)))
    print(f"wrong: {found['wrong']}; {len(found['errors'])} not reached or failed; {time.perf_counter() - BEGAN:.0f} s")


def one(name: str, of: Any, found: dict[str, Any], course: Any) -> None:
    """Compare and time a case; errors are recorded."""
    import torch

    try:
        found["wrong"] += [f"{name} {families.fewer(of)} {what}" for what in families.wrong(name, of, course.device)]
        torch.cuda.empty_cache()
        for row in families.timed(name, of, course, called=False):
            found["rows"].append(row)
            if row["contender"] == "ridgeline":
                print(families.told(row, found["copy_bytes_per_s"]), flush=True)
        torch.cuda.empty_cache()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}"
        trace = traceback.format_exc()[-1200:]
        found["errors"].append({"family": name, "case": str(of), "error": text, "trace": trace})
        print("FAILED", name, of, text, flush=True)


def main() -> None:
    from lab.race.drawn import command

    command(sys.modules[__name__], NAMES, 12, 70.0)
