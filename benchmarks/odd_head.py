"""The last product of a language model whose vocabulary is odd (50,257 words), every way that computes it.

    python benchmarks/odd_head.py --out OUT [--budget-s 20]

Seconds of one call inside of a CUDA graph of several, and the largest distance from a product in float32 of some rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import kernels
from ridgeline.optimizer.padding import padded_linear

SIZES = ((4096, 1024, 50257), (2048, 1024, 50265), (4096, 768, 30522), (4096, 768, 30524))
NUM = 4


def ways(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every way, by name; those in parentheses are parts of one."""
    rows, outputs = x.shape[0], w.shape[0]
    wide = -(-outputs // 64) * 64
    room, turned = x.new_empty(rows, wide), x.new_empty(x.shape[1], wide)
    turned[:, :outputs].copy_(w.t())
    padded = F.pad(w, (0, 0, 0, wide - outputs))

    def into_room() -> Tensor:
        return torch.mm(x, w.t(), out=room[:, :outputs])

    return {
        "plain": lambda: F.linear(x, w),
        "padded, copied": lambda: padded_linear(x, w),
        "(padded before, not copied)": lambda: F.linear(x, padded)[:, :outputs],
        "(into wide rows)": into_room,
        "into wide rows, copied": lambda: into_room().contiguous(),
        "(turned before)": lambda: torch.mm(x, turned[:, :outputs]),
        "turned here": lambda: torch.mm(x, turned[:, :outputs].copy_(w.t())),
        "(turning)": lambda: turned[:, :outputs].copy_(w.t()),
        "(copying)": lambda: room[:, :outputs].contiguous(),
        "ours": lambda: kernels.matmul(x, w.t()),
        "ours, linear": lambda: kernels.linear(x, w),
    }


def seconds(call: Callable[[], Tensor]) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM):
            call()
    found = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / NUM)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=20.0)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    began, found = time.monotonic(), []
    for rows, inputs, outputs in SIZES:
        torch.manual_seed(0)
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        wanted = x[:64].float() @ w.float().t()
        for name, call in ways(x, w).items():
            if time.monotonic() - began > asked.budget_s:
                return
            row: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs, "way": name}
            try:
                result = call()
                if result.shape == (rows, outputs) and not name.startswith("(turning") and name != "(copying)":
                    row["apart"] = float((result[:64].float() - wanted).abs().max())
                row["s"] = seconds(call)
            except Exception as error:  # a way that fails leaves the others
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            found.append(row)
            print(row, flush=True)
            (asked.out / "odd_head.json").write_text(json.dumps(found))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
