"""Attention on the GPU at hand: checks against the reference, then the race against cuDNN and FlashAttention-2.

    python benchmarks/race_attention.py --out DIR [--budget-s 120]

Writes attention.json: every check and every row (seconds, spread, TFLOP/s), lost races included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def check(dtype: str, causal: bool, out: Path) -> None:
    import torch

    from ridgeline.bench.check import LAYOUTS, check_case, check_mistakes
    from ridgeline.kernels.contract import trials

    device = torch.device("cuda")
    mine = [of for of in trials()["attention"][1].checks if of.dtype == dtype and of["causal"] == causal]
    found = []
    for i, of in enumerate(mine):
        layouts = LAYOUTS[:2] if i in (2, 6) else LAYOUTS[:1]
        for layout in layouts:
            found += check_case("attention", of, device, int(time.time()) + i, layout)
    found += check_mistakes("attention", mine[2], device, 7)
    rows = [[f.case, f.layout, f.what, f.ok, f.note] for f in found]
    out.write_text(json.dumps(rows))


def contenders(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Any]:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from ridgeline.kernels import attention

    def theirs(backend: Any) -> Any:
        def run() -> Any:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return run

    return {
        "ridgeline": lambda: attention(q, k, v, causal),
        "cudnn": theirs(SDPBackend.CUDNN_ATTENTION),
        "flash2": theirs(SDPBackend.FLASH_ATTENTION),
    }


def gradients(out: Any, leaves: tuple[Any, ...], seed: Any) -> Any:
    import torch

    return lambda: torch.autograd.grad(out, leaves, seed, retain_graph=True)


def race(budget_s: float) -> list[dict[str, Any]]:
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials

    course = Course(torch.device("cuda"), rounds=11)
    trial, rows, end = trials()["attention"][1], [], time.perf_counter() + budget_s
    for i, of in enumerate(trial.races):
        if time.perf_counter() > end:
            rows.append({"case": str(of), "note": "left out: no time"})
            continue
        args = trial.make(of, course.device, torch.Generator(course.device).manual_seed(int(time.time()) + i))
        q, k, v = (x.detach().requires_grad_() for x in args[:3])
        callers = contenders(q, k, v, of["causal"])
        with torch.no_grad():
            forward = course.turns(callers)
        outs = {name: call() for name, call in callers.items()}
        backward = course.turns({name: gradients(o, (q, k, v), torch.randn_like(q)) for name, o in outs.items()})
        flops = 4 * of["b"] * of["h"] * of["l"] * of["s"] * of["d"] * (0.5 if of["causal"] else 1.0)
        for phase, timed, work in (("fwd", forward, flops), ("bwd", backward, 2.5 * flops)):
            rows += [_row(of, phase, name, samples, work) for name, samples in timed.items()]
            print(phase, of, {r["contender"]: round(r["tflops"], 1) for r in rows[-len(timed) :]}, flush=True)
    return rows


def _row(of: Any, phase: str, name: str, samples: list[float], flops: float) -> dict[str, Any]:
    ordered = sorted(samples)
    middle = statistics.median(ordered)
    facts = {"case": str(of), "phase": phase, "contender": name, "num": len(ordered), "median_s": middle}
    return facts | {"low_s": ordered[0], "high_s": ordered[-1], "tflops": flops / middle / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--race-only", action="store_true", help="skip the checks")
    parser.add_argument("--check", nargs=2, metavar=("DTYPE", "CAUSAL"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.check:
        check(options.check[0], options.check[1] == "causal", options.out / f".check_{'_'.join(options.check)}.json")
        return
    began = time.perf_counter()
    parts = [(dtype, mask) for dtype in ("bfloat16", "float16") for mask in ("causal", "full")]
    parts = [] if options.race_only else parts
    command = [sys.executable, __file__, "--out", str(options.out), "--check"]
    running = [subprocess.Popen([*command, *part]) for part in parts]  # compiling is the slow part: side by side
    codes = [child.wait() for child in running]
    checks = []
    for part, code in zip(parts, codes, strict=True):
        path = options.out / f".check_{'_'.join(part)}.json"
        checks += json.loads(path.read_text()) if code == 0 else [[" ".join(part), "", "run", False, f"exit {code}"]]
        path.unlink(missing_ok=True)
    failed = [row for row in checks if not row[3]]
    took_s = time.perf_counter() - began
    print(f"{len(checks)} checks, {len(failed)} failed, {took_s:.0f} s", *failed, sep="\n", flush=True)
    import torch

    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": checks}
    rows = race(options.budget_s - (time.perf_counter() - began))
    (options.out / "attention.json").write_text(json.dumps(facts | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
