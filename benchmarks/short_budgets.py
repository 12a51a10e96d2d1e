"""A search of seconds in a new process, where PyTorch's compiler is not even imported: what it reaches.

    python benchmarks/short_budgets.py --out results --budgets 5,10 --folder kernelbench --problems "1/30;2/17"

Every problem and budget has a process of its own, one after another. Told are the seconds until ``ridgeline`` was
imported, those of the search and of its steps, whether torch.compile was measured, and what the receipt says of the
guarantee.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

MARK = "SHORT "


def search(folder: Path, name: str, budget_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    import kernelbench_like as like
    import torch

    import ridgeline

    like.read_folder(folder)
    (problem,) = [each for each in like.PROBLEMS if each.name == name]
    torch.manual_seed(0)
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(on):
        model, args = problem.make(like.Scale(1.0))
    model, args = model.to(on), tuple(x.to(on) if isinstance(x, torch.Tensor) else x for x in args)
    imported_s = time.perf_counter() - began
    phases = watched()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        fast = ridgeline.optimize(model, args, budget_s=budget_s, use_cache=False)
        wall_s = time.perf_counter() - began
    receipt = fast.receipt
    tried = [{"name": e.name, "status": e.status, "s": e.measured_s, "build_s": e.build_s, "reason": e.reason[:120]}
             for e in receipt.entries]  # fmt: skip
    return {"name": name, "budget_s": budget_s, "imported_s": imported_s, "wall_s": wall_s, "winner": receipt.winner,
            "eager_s": receipt.eager_s, "stock_s": receipt.stock_s, "final_s": receipt.final_s,
            "guarantee": receipt.guarantee, "phases_s": phases, "tried": tried}  # fmt: skip


PHASES = {"Search": ("_prepare", "_price", "_facts", "_built", "_raced", "_proved", "_finish"), "Prover": ("__init__",)}
"""Steps of a search whose seconds are told; some are inside of others."""


def watched() -> dict[str, float]:
    """Seconds by step, filled in while a search runs."""
    from ridgeline.optimizer.search import search as searching

    spent_s: dict[str, float] = {}

    def timed(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                spent_s[name] = spent_s.get(name, 0.0) + time.perf_counter() - began

        return run

    for owner, names in PHASES.items():
        for name in names:
            kind = getattr(searching, owner)
            setattr(kind, name, timed(f"{owner}.{name}", getattr(kind, name)))
    return spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a checkout of the public benchmark")
    parser.add_argument("--problems", default="1/30;2/17")
    parser.add_argument("--budgets", default="5,10")
    parser.add_argument("--total-s", type=float, default=60.0)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(MARK + json.dumps(search(asked.folder, asked.one, float(asked.budgets))), flush=True)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    until, rows = time.monotonic() + asked.total_s, []
    for budget in asked.budgets.split(","):
        for name in asked.problems.split(";"):
            left_s = until - time.monotonic()
            if left_s < 5:
                break
            passed = ["--out", str(asked.out), "--folder", str(asked.folder), "--budgets", budget, "--one", name]
            try:
                said = subprocess.run([sys.executable, __file__, *passed], capture_output=True, text=True,
                                      timeout=left_s, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                break
            found = [line for line in said.stdout.splitlines() if line.startswith(MARK)]
            rows.append(json.loads(found[0].removeprefix(MARK)) if found else {"name": name, "why": said.stderr[-800:]})
            print(json.dumps(rows[-1])[:1500], flush=True)
            with gzip.open(asked.out / "short_budgets.json.gz", "wt") as file:
                json.dump(rows, file)


if __name__ == "__main__":
    main()
