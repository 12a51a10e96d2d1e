"""Fewer bits on one GPU: kernels against their references, narrow products by configuration, models within a budget.

``--parts`` chooses among ``checks`` (numbers of the narrow kernels), ``sweep`` (narrow products of 1, 4 and 16 rows
over configurations), ``defaults`` (the same as they run), ``wide`` (cuBLAS and our own of full width), ``fp8`` (large
products), ``llama`` (a decoding step), ``bert`` (an encoder in bfloat16), ``vit`` (float32). Models go through
``rl.optimize(..., error_budget=…)`` and are judged there; whole receipts are kept. ``recommender``, ``experts`` and
``autocast`` are candidates with rewrites of those families beside the same without, raced in turns, no error allowed.
Results are written to ``--out``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from optimize_decode import ROTATED_BYTES, Book, per_call_s

import ridgeline as rl
from ridgeline import kernels
from ridgeline.bench.check import check_case
from ridgeline.engine.example_inputs import Inputs, leaves
from ridgeline.kernels import launcher, pack, tuning
from ridgeline.kernels.contract import trials
from ridgeline.kernels.linear.config import Linear
from ridgeline.kernels.narrow_linear.op import NARROW_LINEAR
from ridgeline.kernels.variants import variants_of
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.precision.formats import FORMATS
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Built, Candidate, build
from ridgeline.optimizer.search.timing import Track

CHECKED = ("narrow_linear", "narrow_linear_gated")
SHAPES = ((4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (6144, 4096, False), (128256, 4096, False))
ROWS = (1, 16)
ROW_CONFIGS = [
    Linear("row", outputs, step, warps)
    for outputs, step, warps in ((1, 2048, 4), (1, 4096, 8), (2, 2048, 4), (4, 2048, 4))
]
TILE_CONFIGS = [
    Linear("tile", outputs, 128, warps, stages, shares)
    for outputs, warps, stages, shares in (
        (64, 4, 5, 1), (64, 4, 5, 4), (16, 1, 6, 1), (16, 1, 6, 4), (32, 2, 6, 1), (32, 2, 6, 4),
    )
]  # fmt: skip
EIGHT_TILES = [Linear("tile", 32, 256, 2, 4), Linear("tile", 64, 256, 4, 3)]
LARGE = ((16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 1024), (2048, 4096, 4096), (512, 4096, 4096))


def configs(bits: int, rows: int) -> list[Linear]:
    eight = [*(ROW_CONFIGS if rows == 1 else ()), *EIGHT_TILES] if bits == 8 else []
    return [*eight, *TILE_CONFIGS]


def _arguments(rows: int, n: int, k: int, bits: int, gated: bool) -> tuple[Any, ...]:
    """A call's arguments without values, for the compiler."""
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(n, k * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8, device="meta")
    sizes, kind = ((n,), torch.float32) if bits == 8 else ((n, k // 128), torch.float16)
    norm = torch.empty(k, dtype=torch.bfloat16, device="meta") if gated else None
    scale = torch.empty(sizes, dtype=kind, device="meta")
    return x, weight, scale, None, norm, None, 1e-6, 0.0, "silu" if gated else "none", gated


def precompile(parts: list[str], jobs: int) -> None:
    """Every variant of the checks and the sweep, into a pack that the launches then find."""
    began, found = time.monotonic(), []
    if "checks" in parts:
        found += [variant for name in CHECKED for variant in variants_of(name, trials()[name][1].checks)]
    if "sweep" in parts:
        for n, k, gated in SHAPES:
            for rows in ROWS:
                for bits in (8, 4):
                    for chosen in configs(bits, rows):
                        with tuning.forced("narrow_linear", chosen), launcher.collecting() as seen:
                            NARROW_LINEAR(*_arguments(rows, n, k, bits, gated))
                        found += seen
    if not found:
        return
    folder = Path(tempfile.mkdtemp()) / "pack"
    os.environ.setdefault("RIDGELINE_KERNEL_PACK", str(folder))  # where another is in use, Triton's cache has these
    pack.write(folder, found, jobs=jobs)
    print(f"--- {len(set(found))} variants compiled in {time.monotonic() - began:.0f} s", flush=True)


def checks(book: Book) -> None:
    for name in CHECKED:
        for of in trials()[name][1].checks:
            for finding in check_case(name, of, torch.device("cuda"), 3):
                book.add(part="checks", name=name, case=str(of), ok=bool(finding.ok), said=str(finding))
    wrong = [row for row in book.rows if row["part"] == "checks" and not row["ok"]]
    num = sum(row["part"] == "checks" for row in book.rows)
    print(f"checks: {num} findings, {len(wrong)} wrong {[row['said'] for row in wrong[:3]]}", flush=True)


def _copies(n: int, k: int, bits: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Narrow weights enough that none is in the cache; their bits do not matter for time, their scales are small."""
    num = max(2, -(-ROTATED_BYTES // (n * k * bits // 8)))
    made = []
    for _ in range(num):
        if bits == 8:
            weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
            made.append((weight, torch.full((n,), 1e-3, device="cuda")))
        else:
            weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
            made.append((weight, torch.full((n, k // 128), 1e-3, device="cuda", dtype=torch.float16)))
    return made


def narrow_race(book: Book, quick: bool) -> None:
    for n, k, gated in SHAPES:
        for bits in (8, 4):
            weights = _copies(n, k, bits)
            num_bytes = weights[0][0].nbytes + weights[0][1].nbytes
            for rows in ROWS:
                if book.left_s() < 5:
                    return
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                norm = torch.ones(k, device="cuda", dtype=torch.bfloat16) if gated else None
                given = {"activation": "silu", "gated": True, "norm_weight": norm} if gated else {}

                def make(i: int, x: Any = x, weights: Any = weights, given: Any = given) -> Callable[[], Any]:
                    return lambda: kernels.narrow_linear(x, *weights[i], **given)

                row = {"part": "defaults" if quick else "sweep", "n": n, "k": k, "rows": rows, "bits": bits,
                       "gated": gated}  # fmt: skip
                for chosen in [None] if quick else configs(bits, rows):
                    _one(book, row, chosen, make, len(weights), num_bytes)
                best = min((r for r in book.rows if all(r.get(key) == v for key, v in row.items()) and "s" in r),
                           key=lambda r: r["s"], default=None)  # fmt: skip
                if best and not quick:  # what follows in this run uses it
                    chosen = next(each for each in configs(bits, rows) if str(each) == best["config"])
                    sizes = {"rows": rows, "k": k, "n": n // 2 if gated else n, "bits": bits, "gated": gated}
                    tuning.record("narrow_linear", sizes, chosen)
                if best:
                    print(f"{row['part']} {n}x{k} rows {rows} bits {bits}: {1e6 * best['s']:.1f} µs "
                          f"{best['bytes_per_s'] / 1e12:.2f} TB/s {best['config']}", flush=True)  # fmt: skip
            del weights
            torch.cuda.empty_cache()


def _one(book: Book, row: dict[str, Any], chosen: Linear | None, make: Any, copies: int, num_bytes: int) -> None:
    try:
        if chosen is None:
            spent_s = per_call_s(make, copies)
        else:
            with tuning.forced("narrow_linear", chosen):
                spent_s = per_call_s(make, copies)
    except Exception as error:  # a configuration that does not fit is one that lost
        book.add(**row, config=str(chosen), error=str(error)[:200])
        return
    book.add(**row, config=str(chosen), s=spent_s, bytes_per_s=num_bytes / spent_s)


def wide_race(book: Book) -> None:
    """cuBLAS and our products of full width on the same shapes."""
    for n, k, gated in SHAPES:
        num = max(2, -(-ROTATED_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5) for _ in range(num)]
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            given = {"activation": "silu", "gated": True} if gated else {}
            ways = {"cublas": lambda i, x=x, w=weights: lambda: F.linear(x, w[i]),
                    "linear": lambda i, x=x, w=weights, g=given: lambda: kernels.linear(x, w[i], **g)}  # fmt: skip
            for name, make in ways.items():
                if book.left_s() > 5:
                    book.add(part="wide", name=name, n=n, k=k, rows=rows, gated=gated, s=per_call_s(make, num))
        del weights
        torch.cuda.empty_cache()


def fp8_race(book: Book) -> None:
    for rows, n, k in LARGE:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)
        made = FORMATS["fp8"].make(weight)
        meant = F.linear(x[:256].double(), weight.double())
        found = FORMATS["fp8"](x[:256], made, None).double()
        wide_s = per_call_s(lambda i, x=x, w=weight: lambda: F.linear(x, w), 1)
        narrow_s = per_call_s(lambda i, x=x, m=made: lambda: FORMATS["fp8"](x, m, None), 1)
        error_frac = float((found - meant).norm() / meant.norm())
        book.add(part="fp8", rows=rows, n=n, k=k, bf16_s=wide_s, fp8_s=narrow_s, error_frac=error_frac)
        print(f"fp8 {rows}x{n}x{k}: bf16 {1e6 * wide_s:.0f} µs, fp8 {1e6 * narrow_s:.0f} µs, "
              f"error {error_frac:.1e}", flush=True)  # fmt: skip


def llama() -> tuple[Any, tuple[Any, ...], dict[str, Any], float]:
    """A decoding step of eight layers of Llama 8B over a static cache of 1,024 places."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=8,
                         num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()
    cache = StaticCache(config=config, max_cache_len=1024)
    ids = torch.randint(0, 128256, (1, 512), device="cuda")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    step = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True,
            "cache_position": torch.tensor([512], device="cuda")}  # fmt: skip
    return model, (), step, 0.05


def bert() -> tuple[Any, tuple[Any, ...], dict[str, Any], float]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda"):
        model = BertModel(config).bfloat16().eval()
    return model, (torch.randint(0, 30000, (32, 512), device="cuda"),), {}, 0.05


def vit() -> tuple[Any, tuple[Any, ...], dict[str, Any], float]:
    from transformers import ViTConfig, ViTModel

    with torch.device("cuda"):
        model = ViTModel(ViTConfig(num_hidden_layers=6)).eval()
    return model, (torch.randn(64, 3, 224, 224, device="cuda"),), {}, 0.01


def searched(book: Book, name: str, make: Callable[[], Any], budget_s: float) -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model, args, kwargs, error_budget = make()
    began = time.monotonic()
    fast = rl.optimize(model, args, kwargs, budget_s=budget_s, error_budget=error_budget, use_cache=False)
    receipt = fast.receipt
    book.add(part=name, optimize_s=time.monotonic() - began, receipt=receipt.to_dict())
    for entry in receipt.entries:
        took = "" if entry.measured_s is None else f"{1e3 * entry.measured_s:.3f} ms"
        error_frac = "" if not entry.verdict else f"error {entry.verdict['rms_frac']}"
        print(f"  {name}: {entry.name}: {entry.status} {took} {error_frac} {entry.reason}", flush=True)
    print("\n".join(str(receipt).splitlines()[:6]), *receipt.notes, sep="\n", flush=True)


def _racing(book: Book, name: str, model: Any, args: tuple[Any, ...], candidates: list[Candidate]) -> None:
    """Candidates beside eager in turns, each with its error against eager's own results."""
    inputs = Inputs(args)
    track = Track(model, inputs, "infer", None, torch.device("cuda"))
    track.settle(model)
    runners = {"eager": Built(Candidate(name="eager"), model, Report())}
    for candidate in candidates:
        try:
            runners[candidate.name] = build(candidate, model, inputs, "infer")
        except Exception as error:
            print(f"{name}: {candidate.name} failed: {str(error)[:300]}", flush=True)
            book.add(part=name, candidate=candidate.name, failed=str(error)[:500])
        track.restore()
    timed = track.race(runners, 1.5)
    with torch.no_grad():
        meant = [t.float() for _, t in leaves(model(*args))]
        for each, found in timed.items():
            with runners[each].switched() as call:
                ours = [t.float() for _, t in leaves(call(*args))]
            error_frac = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, meant, strict=True))
            counts = runners[each].report.counts()
            book.add(part=name, candidate=each, s=found.median_s, error_frac=error_frac, counts=counts)
            print(f"{name}: {each}: {1e3 * found.median_s:.3f} ms, {error_frac:.1e} from eager, {counts}", flush=True)


def recommender(book: Book) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from optimize_recommender import make

    model, args, _ = make()
    some = ("identity", "views")
    _racing(book, "recommender", model, args, [
        Candidate(name="graph", graphed=True),
        Candidate(name="rewritten, without", rewrites=some, graphed=True),
        Candidate(name="bags", rewrites=(*some, "bags"), graphed=True),
        Candidate(name="interaction", rewrites=(*some, "interaction"), graphed=True),
        Candidate(name="both", rewrites=(*some, "bags", "interaction"), graphed=True),
    ])  # fmt: skip


def experts(book: Book) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    config = Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4,
                            num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128)  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3MoeModel(config).bfloat16().eval()
    for tokens in (4096, 16):
        ids = torch.randint(0, 1000, (1, tokens), device="cuda")
        _racing(book, f"experts of {tokens} tokens", model, (ids,), [
            Candidate(name="graph", graphed=True),
            Candidate(name="experts", substituted=("experts",), graphed=True),
        ])  # fmt: skip


def cast(book: Book) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda"):
        model = BertModel(config).eval()
    ids = torch.randint(0, 30000, (16, 512), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        _racing(book, "autocast", model, (ids,), [
            Candidate(name="graph", graphed=True),
            Candidate(name="rewritten", rewrites=recommended("inference"), graphed=True),
            Candidate(name="torch.compile", compiler="stock", graphed=True),
        ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=80.0)
    parser.add_argument("--search-s", type=float, default=22.0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--parts", nargs="+", default=["checks", "defaults", "fp8", "llama", "bert", "vit", "sweep"])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ["RIDGELINE_KERNEL_TUNING"] = str(Path(tempfile.mkdtemp()) / "tuning.json")
    precompile(asked.parts, asked.jobs)
    book = Book(asked.out, asked.budget_s)
    book.path = asked.out / "precision.json.gz"
    runs: dict[str, Callable[[], None]] = {
        "checks": lambda: checks(book), "sweep": lambda: narrow_race(book, quick=False),
        "defaults": lambda: narrow_race(book, quick=True), "wide": lambda: wide_race(book),
        "fp8": lambda: fp8_race(book), "recommender": lambda: recommender(book), "experts": lambda: experts(book),
        "autocast": lambda: cast(book),
        **{name: lambda name=name, make=make: searched(book, name, make, asked.search_s)
           for name, make in (("llama", llama), ("bert", bert), ("vit", vit))},
    }  # fmt: skip
    for part in asked.parts:
        if book.left_s() < 5:
            print(f"--- {part}: out of time", flush=True)
            continue
        try:
            runs[part]()
        except Exception:
            print(f"--- {part} failed", traceback.format_exc()[-1500:], sep="\n", flush=True)
            book.add(part=part, failed=traceback.format_exc()[-1500:])
        book.save()
    print(f"done in {book.budget_s - book.left_s():.0f} s", flush=True)


if __name__ == "__main__":
    main()
