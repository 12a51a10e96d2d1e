"""The last product of a language model whose vocabulary is odd (50,257 words), every way that computes it; and images
made larger by lines between pixels, by the library and by our kernel.

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
from ridgeline.optimizer.in_place import padded_linear as padding

IMAGES = (
    (8, 768, 16, 128, True),
    (8, 768, 64, 128, True),
    (8, 150, 128, 512, False),
    (8, 19, 128, 512, False),
    (4, 256, 32, 64, True),
)
"""Images, channels, pixels across before and after, and whether channels lie beside each other."""
SIZES = ((4096, 1024, 50257), (2048, 1024, 50265), (4096, 768, 30522), (4096, 768, 30524))
NUM = 4


def ways(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every way, by name; those in parentheses are parts of one."""
    rows, outputs = x.shape[0], w.shape[0]
    wide = -(-outputs // 64) * 64
    room = x.new_zeros(rows, wide)
    padded = F.pad(w, (0, 0, 0, wide - outputs))

    whole = outputs - outputs % 64

    def parts() -> Tensor:
        torch.mm(x, w[:whole].t(), out=room[:, :whole])
        torch.mm(x, w[whole:].t(), out=room[:, whole:outputs])
        return room[:, :outputs]

    return {
        "(parts)": parts,
        "parts, tightened": lambda: kernels.tighten(parts()),
        "(tightening)": lambda: kernels.tighten(room[:, :outputs]),
        "(the few)": lambda: torch.mm(x, w[whole:].t(), out=room[:, whole:outputs]),
        "padded, copied": lambda: padding._padded(x, w, None),
        "(padded before, not copied)": lambda: F.linear(x, padded)[:, :outputs],
        "(copying)": lambda: room[:, :outputs].contiguous(),
        "plain": lambda: F.linear(x, w),
    }


def resized(x: Tensor, size: int) -> dict[str, Callable[[], Tensor]]:
    apart = x.shape[2] / size
    return {
        "library": lambda: F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False),
        "ours": lambda: kernels.resize(x, size, size, False, apart, apart),
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
    book = Book(asked.out / "odd_head.json", time.monotonic() + asked.budget_s)
    _images(book)
    _heads(book)


class Book:
    """What was found, written down at once, until the time is over."""

    def __init__(self, path: Path, until: float) -> None:
        self.path, self.until, self.found = path, until, list[dict[str, Any]]()

    def add(self, row: dict[str, Any], call: Callable[[], Tensor], wanted: Callable[[Tensor], float | None]) -> None:
        """Seconds of one way, and how far it is from what is wanted; nothing once the time is over."""
        if time.monotonic() > self.until:
            return
        try:
            row["apart"] = wanted(call())
            row["s"] = seconds(call)
        except Exception as error:  # a way that fails leaves the others
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        self.found.append(row)
        print(row, flush=True)
        self.path.write_text(json.dumps(self.found))
        torch.cuda.empty_cache()


def _images(book: Book) -> None:
    for batch, channels, before, after, last in IMAGES:
        torch.manual_seed(0)
        x = torch.randn(batch, channels, before, before, device="cuda", dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        wanted = F.interpolate(x[:1].float(), size=(after, after), mode="bilinear", align_corners=False)
        for name, call in resized(x, after).items():
            shape = {"image": (batch, channels, before, after), "last": last, "way": name}
            book.add(shape, call, lambda found, wanted=wanted: float((found[:1].float() - wanted).abs().max()))  # type: ignore[misc]


def _heads(book: Book) -> None:
    for rows, inputs, outputs in SIZES:
        torch.manual_seed(0)
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        wanted = x[:64].float() @ w.float().t()

        def apart(result: Tensor, wanted: Tensor = wanted, rows: int = rows) -> float | None:
            same = result.shape == (rows, wanted.shape[1])
            return float((result[:64].float() - wanted).abs().max()) if same else None

        for name, call in ways(x, w).items():
            book.add({"rows": rows, "inputs": inputs, "outputs": outputs, "way": name}, call, apart)


if __name__ == "__main__":
    with torch.no_grad():
        main()
