"""Attention of every head dim beside cuDNN and FlashAttention-2, forward and backward, and of uneven sequences.

    python benchmarks/race_heads.py --out DIR [--budget-s 45]

Contenders in turns, cold L2, medians; results are compared before anything is timed. ``--show FILE`` prints them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from race_attention import gradients, theirs, timed

CASES = (
    (4, 32, 8, 4096, 64, True), (4, 32, 8, 4096, 96, True), (4, 32, 8, 4096, 192, True), (4, 32, 8, 4096, 256, True),
    (4, 32, 8, 4096, 128, True), (2, 16, 16, 3000, 64, False), (2, 16, 16, 3000, 96, False),
    (2, 16, 16, 3000, 192, False), (2, 16, 16, 3000, 256, False), (1, 16, 2, 10000, 64, True),
    (1, 16, 2, 10000, 128, True),
)  # fmt: skip
"""Batch, heads, key heads, rows, head dim, causal."""

PACKED = ((4096, 1000, 3000, 4096, 2000, 2192, 512, 512, 3072, 4096), (700,) * 30, (8000, 100, 100, 8000, 50))
RIVALS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")


def wanted_variants() -> list[Any]:
    """Everything of ours that is launched, forward and backward."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.variants import variants_of

    dense = [case("bfloat16", b=b, h=h, k=k, l=rows, s=rows, d=d, causal=causal) for b, h, k, rows, d, causal in CASES]
    packed = [case("bfloat16", h=32, k=8, d=128, q=lens, kv=lens, causal=True, window=None, cap=0.0) for lens in PACKED]
    found = [*variants_of("attention", dense), *variants_of("varlen_attention", packed)]
    for way in WAYS.values():
        with taken(way):
            found += variants_of("attention", [of for of in dense if of["d"] == 192])
    return list(dict.fromkeys(found))


WAYS = {
    "3 blocks": ((128, 64), (128, 64, 3, 1)),
    "2 blocks, next queries": ((128, 64), (128, 64, 2, 2)),
    "padded to 256": ((256, 0), (128, 64, 2, 1)),
}
"""How heads of 136 to 192 may be multiplied forward: their columns; rows, keys, stages and queries of a tile."""


@contextmanager
def taken(way: tuple[Any, ...]) -> Iterator[None]:
    """Inside, heads of 136 to 192 are planned this way."""
    from race_attention import instead

    from ridgeline.kernels.attention import config

    with (instead(config, "columns", lambda *dims: way[0]), instead(config, "value_columns", lambda *dims: way[0]),
          instead(config, "forward", lambda *dims: config.Attention(*way[1]))):  # fmt: skip
        yield


def tries(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """Every way, for heads of 192 whose values are as wide."""
    import torch

    from ridgeline.kernels.attention import launch

    found: dict[str, Callable[[], Any]] = {}
    given = [x.detach() for x in (q, k, v)]
    for name, way in WAYS.items():
        with taken(way):
            of = launch.Problem(causal, -1, -1, q.shape[3] ** -0.5, 0.0, 0)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            plan = launch.Forward(of, *given, launch.arranged(q, v.shape[3]), lse, None, None, None, None)
        found[name] = partial(_first, plan, given)
    return found


def _first(plan: Any, given: list[Any]) -> Any:
    return plan.run(*given, None, None, None, None, False)[0]


def off(found: Any, meant: Any) -> float:
    return float((found.float() - meant.float()).norm() / meant.float().norm())


def dense_rows(course: Any, of: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """A case forward and backward; PyTorch's own kernels say what is right."""
    import torch

    from ridgeline.kernels import attention

    b, h, k, rows, dim, causal = of
    shapes = ((h, rows), (k, rows), (k, rows))
    q, key, v = (torch.randn(b, n, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                 for heads, n in shapes)  # fmt: skip
    seed = torch.randn(b, rows, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    runs: dict[str, Callable[[], Any]] = {"ridgeline": partial(attention, q, key, v, causal)}
    runs |= {backend: theirs(q, key, v, causal, backend) for backend in RIVALS}
    outs: dict[str, Any] = {}
    for name, run in list(runs.items()):
        try:
            outs[name] = run()
        except Exception as error:
            del runs[name]
            yield {"case": str(of), "contender": name, "note": str(error)[:160]}
    back = {name: gradients(out, (q, key, v), seed) for name, out in outs.items()}
    for name in outs.keys() - {"ridgeline"}:
        pairs = zip((outs["ridgeline"], *back["ridgeline"]()), (outs[name], *back[name]()), strict=True)
        worst = max(off(a, c) for a, c in pairs)
        yield {"case": str(of), "what": f"against {name}", "ok": worst < 0.02, "note": f"off by {worst:.1e}"}
    flops = 4 * b * h * rows * rows * dim * (0.5 if causal else 1.0)
    for name, run in tries(q, key, v, causal).items() if dim == 192 else ():
        worst = off(run(), outs["CUDNN_ATTENTION"])
        yield {"case": str(of), "what": name, "ok": worst < 0.02, "note": f"off by {worst:.1e}"}
        runs |= {name: run} if worst < 0.02 else {}
    with torch.no_grad():
        yield from timed(course, runs, phase="fwd", case=str(of), flops=flops)
    yield from timed(course, back, phase="bwd", case=str(of), flops=2.5 * flops)


def packed_rows(course: Any, lens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Uneven sequences, causal, 32 heads over 8 of 128; PyTorch's own function of this kind where it has one."""
    import torch

    from ridgeline.kernels import varlen_attention

    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()
    q, k, v = (torch.randn(sum(lens), heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
               for heads in (32, 8, 8))  # fmt: skip
    longest = max(lens)
    runs: dict[str, Callable[[], Any]] = {
        "ridgeline": partial(varlen_attention, q, k, v, starts, starts, longest, longest, True)
    }
    wide = [x.detach().repeat_interleave(4, 1).requires_grad_() for x in (k, v)]
    try:
        from torch.nn.attention.varlen import varlen_attn

        other = partial(varlen_attn, q, *wide, starts, starts, longest, longest, window_size=(-1, 0))
        worst = off(runs["ridgeline"](), other())
        yield {"case": str(lens), "what": "against varlen_attn", "ok": worst < 0.02, "note": f"off by {worst:.1e}"}
        runs["varlen_attn, keys repeated"] = other
    except Exception as error:
        yield {"case": str(lens), "contender": "varlen_attn", "note": f"{type(error).__name__}: {str(error)[:160]}"}
    flops = 4 * 32 * 128 * 0.5 * float(sum(n * n for n in lens))
    with torch.no_grad():
        yield from timed(course, dict(runs), phase="fwd", case=str(lens), flops=flops)
    leaves = {"ridgeline": (q, k, v), "varlen_attn, keys repeated": (q, *wide)}
    seed = torch.randn(sum(lens), 32, 128, device="cuda", dtype=torch.bfloat16)
    back = {name: gradients(run(), leaves[name], seed) for name, run in runs.items()}
    yield from timed(course, back, phase="bwd", case=str(lens), flops=2.5 * flops)


def rows(end: float, rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.bench.race import Course

    course = Course(torch.device("cuda"), rounds=rounds)
    course.budget_s = 1.5
    tasks = [*(partial(dense_rows, course, of) for of in CASES),
             *(partial(packed_rows, course, lens) for lens in PACKED)]  # fmt: skip
    for task in tasks:
        if time.perf_counter() > end:
            return
        try:
            yield from task()
        except Exception:
            yield {"note": traceback.format_exc()[-800:]}
        torch.cuda.empty_cache()


def shown(found: list[dict[str, Any]]) -> Iterator[str]:
    """TFLOP/s by case and phase, and ours over the best rival's."""
    wrong = [row for row in found if not row.get("ok", True)]
    yield f"{sum('ok' in row for row in found)} checks, {len(wrong)} wrong"
    yield from (f"- {row}" for row in [*wrong, *(row for row in found if "note" in row and "ok" not in row)])
    races = [row for row in found if "median_s" in row]
    yield "\n| case | phase | TFLOP/s | over the best rival |\n|---|---|---|---|"
    for case, phase in dict.fromkeys((row["case"], row["phase"]) for row in races):
        mine = {row["contender"]: row["tflops"] for row in races if (row["case"], row["phase"]) == (case, phase)}
        best = max((value for name, value in mine.items() if name != "ridgeline"), default=float("nan"))
        cells = ", ".join(f"{name} {value:.0f}" for name, value in mine.items())
        yield f"| {case} | {phase} | {cells} | {mine['ridgeline'] / best:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=45.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dims", type=int, nargs="+", help="only these head dims")
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show:
        with gzip.open(options.show, "rt") as file:
            print("\n".join(shown(json.load(file))))
        return
    from ridgeline.kernels import pack

    if options.dims:
        globals()["CASES"] = tuple(of for of in CASES if of[4] in options.dims)
    end = time.perf_counter() + options.budget_s
    missing = [variant for variant in wanted_variants() if pack.find(variant) is None]
    print("compiled", sum(1 for _ in pack.compiled_all(missing, options.jobs)) if missing else 0, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for row in rows(end, options.rounds):
        found.append(row)
        print(json.dumps(row), flush=True)
        with gzip.open(options.out / "heads.json.gz", "wt") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
