"""Long rows, long sums, long columns and convolutions in float32: our kernels in several forms, beside PyTorch.

    python benchmarks/race_long.py --pack kernels --jobs 12                      (compiles, without a device)
    python benchmarks/race_long.py --out results --budget-s 25

Shapes are KernelBench's. Every form is compared with a float64 result first, by the error of PyTorch's own, and then
timed in turns with the others; a copy of as many bytes says what is left.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.convolution.config import tiles, turned
from ridgeline.kernels.convolution.op import Sizes
from ridgeline.kernels.convolution.op import planned as planned_convolution
from ridgeline.kernels.convolution.reference import convolved
from ridgeline.kernels.extremum.config import Tile
from ridgeline.kernels.extremum.op import extreme
from ridgeline.kernels.long_norm.op import in_registers, long_norm
from ridgeline.kernels.matmul.config import Pieces
from ridgeline.kernels.matmul.op import planned
from ridgeline.kernels.shares import Streamed
from ridgeline.optimizer.rewrites.conv.elementwise_epilogue import _channels_last
from ridgeline.optimizer.rewrites.linear.split_gemm import _in_pieces
from ridgeline.optimizer.rewrites.rows.long_rows import _library

ROUNDS, TIMES_EAGER = 9, 2.0
STREAMED = (Streamed(16, 4, 3, 2), Streamed(8, 8, 3, 2), Streamed(8, 16, 3, 1), Streamed(16, 8, 3, 1),
            Streamed(8, 4, 3, 4))  # fmt: skip
COLUMNS = tuple(Tile(*sizes, ahead) for sizes in ((16, 128, 4), (32, 64, 4), (64, 32, 4), (32, 64, 8))
                for ahead in (False, True))  # fmt: skip
TILES = (Pieces(), Pieces(64, 128, 32, 4, 3, 2), Pieces(64, 64, 32, 4, 3, 2))


@dataclass(frozen=True)
class Rows:
    """Rows, columns, what is made of them, channels of a row and numbers that go round over them."""

    rows: int
    cols: int
    kind: str
    channels: int = 0
    weights: int = 0
    most: int = 2  # forms

    def made(self, on: torch.device, rows: int) -> tuple[Any, ...]:
        x = torch.rand(rows, self.cols, device=on)
        weight, bias = ((torch.randn(self.weights, device=on) if self.weights else None) for _ in range(2))
        return x, self.kind, self.cols, weight, bias, self.channels, 1e-5

    def calls(self) -> dict[str, tuple[dict[str, Any], Callable[..., Tensor]]]:
        found: dict[str, Any] = {"pytorch": ({}, _library), "in registers": ({}, in_registers)}
        return found | {str(form): ({"long_norm.streamed": form}, long_norm) for form in STREAMED[: self.most]}

    @property
    def moved_bytes(self) -> int:
        return 8 * self.rows * self.cols


@dataclass(frozen=True)
class Sums:
    """Rows, columns and terms of a product."""

    m: int
    n: int
    k: int

    def made(self, on: torch.device, rows: int) -> tuple[Any, ...]:
        return torch.rand(self.m, self.k, device=on), torch.rand(self.k, self.n, device=on), None

    def calls(self) -> dict[str, tuple[dict[str, Any], Callable[..., Tensor]]]:
        found: dict[str, Any] = {"pytorch": ({}, lambda a, b, bias: a @ b), "halves in pieces": ({}, _in_pieces)}
        ours = lambda a, b, bias: planned(a, b, bias, pieces=True)(a, b, bias)
        return found | {str(tile): ({"matmul.pieces": tile}, ours) for tile in TILES}

    @property
    def rows(self) -> int:
        return self.m

    @property
    def moved_bytes(self) -> int:
        return 4 * self.k * (self.m + self.n)


@dataclass(frozen=True)
class Columns:
    """Extremes along a dim that is not the last, or their places."""

    outer: int
    length: int
    inner: int
    place: bool

    def made(self, on: torch.device, rows: int) -> tuple[Any, ...]:
        return torch.rand(min(rows, self.outer), self.length, self.inner, device=on), 1, False, self.place

    def calls(self) -> dict[str, tuple[dict[str, Any], Callable[..., Tensor]]]:
        theirs = lambda x, dim, largest, place: x.argmin(1) if place else x.amin(1)
        found: dict[str, Any] = {"pytorch": ({}, theirs)}
        return found | {str(tile): ({"extremum": tile}, extreme) for tile in COLUMNS}

    @property
    def rows(self) -> int:
        return self.outer

    @property
    def moved_bytes(self) -> int:
        return 4 * self.outer * self.length * self.inner


@dataclass(frozen=True)
class Images:
    """A convolution of images in PyTorch's layout: images and filters, and whether it is transposed."""

    image: tuple[int, ...]
    filters: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    turned: bool = False

    @property
    def settings(self) -> tuple[Any, ...]:
        num = len(self.image) - 2
        return (self.stride,) * num, (self.padding,) * num, (1,) * num, (0,) * num, 1, self.turned

    def made(self, on: torch.device, rows: int) -> tuple[Any, ...]:
        x = torch.rand(min(rows, self.image[0]), *self.image[1:], device=on) - 0.5
        return x, torch.rand(*self.filters, device=on) - 0.5, None, None

    def calls(self) -> dict[str, tuple[dict[str, Any], Callable[..., Tensor]]]:
        library = lambda x, w, bias, vectors: convolved(x, w, bias, *self.settings)
        last = partial(_channels_last, self.settings, "")
        found: dict[str, Any] = {"pytorch": ({}, library), "channels last": ({}, last)}
        return found | {str(tile): ({}, partial(self.ours, tile)) for tile in self.tiles()}

    def ours(self, tile: Any, *given: Any) -> Tensor:
        return planned_convolution(*given, *self.settings, "", tile=tile)(*given)

    def tiles(self) -> tuple[Any, ...]:
        x, w = torch.empty(self.image, device="meta"), torch.empty(self.filters, device="meta")
        sizes = Sizes(x, w, *self.settings)
        plain = tiles(sizes.outputs, sizes.phase_pixels, False, sizes.num_terms)
        turned_tiles = turned(plain, sizes.inputs, 1, sizes.num_terms, math.inf)
        more = (replace(turned_tiles[0], num_warps=8, num_stages=3), replace(turned_tiles[0], depth=64, num_stages=2))
        fit = [tile for tile in more if sizes.inputs % tile.depth == 0]
        return tuple(dict.fromkeys((*plain[:2], *turned_tiles, *fit)))

    @property
    def rows(self) -> int:
        return self.image[0]

    @property
    def moved_bytes(self) -> int:
        return 8 * math.prod(self.image)


Problem = Rows | Sums | Columns | Images
CASES: tuple[Problem, ...] = (
    Images((128, 64, 128, 128), (128, 64, 3, 3)), Images((64, 64, 256, 256), (64, 64, 3, 3)),
    Images((128, 64, 64, 64), (64, 128, 4, 4), 2, 0, True), Images((8, 32, 512, 512), (64, 32, 5, 9)),
    Sums(256, 256, 524288), Columns(128, 4096, 4095, True), Rows(896, 2097152, "norm", 8, 64, 3),
    Images((32, 64, 256, 256), (64, 64, 4, 4), 2, 1, True), Images((32, 32, 16, 32, 32), (32, 64, 4, 4, 4), 2, 1, True),
    Rows(1024, 532512, "norm", 8, 64), Columns(128, 4096, 4095, False),
    Rows(4096, 393216, "log_softmax"), Rows(7168, 262144, "norm"), Rows(512, 516128, "norm", 8, 32),
    Rows(8192, 131072, "l2"), Rows(4096, 393216, "softmax", most=9), Sums(128, 128, 262144), Sums(512, 512, 65536),
)  # fmt: skip
CHECKED_ROWS = 24
"""As many as make the same shares of a row."""


def forms(case: Problem) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    for name, (forced, call) in case.calls().items():

        def run(*args: Any, forced: dict[str, Any] = forced, call: Callable[..., Tensor] = call) -> Tensor:
            return call(*args)

        with ExitStack() as stack:
            for kernel, config in forced.items():
                stack.enter_context(tuning.forced(kernel, config))
            yield name, run


def wanted_variants() -> list[Any]:
    """What a pack must hold."""
    from ridgeline.kernels.launcher import collecting

    found: dict[Any, None] = {}
    for case in CASES:
        for num in dict.fromkeys((case.rows, CHECKED_ROWS)):
            with torch.device("meta"):
                args = case.made(torch.device("meta"), num)
            for name, call in forms(case):
                if name != "pytorch":
                    with collecting() as seen:
                        call(*args)
                    found |= dict.fromkeys(seen)
    return list(found)


def error_of(found: Tensor, meant: Tensor) -> float:
    return float((found.double() - meant).norm() / meant.norm())


def right_forms(case: Problem, on: torch.device) -> dict[str, Any]:
    """Errors of every form on a few rows, and whether each is as right as PyTorch's."""
    args = case.made(on, CHECKED_ROWS)
    wide = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
    meant = _library(*wide) if isinstance(case, Rows) else case.calls()["pytorch"][1](*wide).double()
    found: dict[str, Any] = {}
    for name, call in forms(case):
        try:
            found[name] = error_of(call(*args), meant)
        except Exception as error:
            found[name] = repr(error)[:200]
    allowed = TIMES_EAGER * found["pytorch"] + 2e-7
    return {name: {"error": error, "right": isinstance(error, float) and error <= allowed}
            for name, error in found.items()}  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class Race:
    """Seconds of every form that was right, in turns."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def run(self, case: Problem, on: torch.device, right: dict[str, Any], left_s: Callable[[], float]) -> None:
        args = case.made(on, case.rows)
        source = torch.empty(case.moved_bytes // 8, device=on)
        target = torch.empty_like(source)
        plans = {"copy": lambda: target.copy_(source)}
        for name, call in forms(case):
            if right[name]["right"] and left_s() > 0:
                call(*args)
        for _ in range(3):  # few changes of forms: plans are forgotten with each
            for name, call in forms(case):
                if not right[name]["right"] or left_s() < 0:
                    continue
                call(*args)
                again = partial(call, *args)
                self.samples.setdefault(name, []).extend(seconds(again) for _ in range(ROUNDS // 3))
            self.samples.setdefault("copy", []).extend(seconds(plans["copy"]) for _ in range(ROUNDS // 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=25.0)
    parser.add_argument("--pack", type=Path, help="compile what is raced into this folder, and time nothing")
    parser.add_argument("--jobs", type=int, default=8)
    asked = parser.parse_args()
    if asked.pack:
        from ridgeline.kernels import pack

        print(pack.write(asked.pack, wanted_variants(), jobs=asked.jobs))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    began, on, told = time.monotonic(), torch.device("cuda"), []
    for case in CASES:
        left_s = lambda: asked.budget_s - (time.monotonic() - began)
        if left_s() < 1:
            break
        race, right = Race(), right_forms(case, on)
        race.run(case, on, right, left_s)
        told.append({"case": str(case), **asdict(race), "checks": right, "bytes": case.moved_bytes})
        print(case, flush=True)
        for name, found in sorted(race.samples.items(), key=lambda pair: statistics.median(pair[1])):
            print(f"  {1e3 * statistics.median(found):.3f} ms  {name}  {right.get(name, '')}", flush=True)
        for name, each in right.items():
            if not each["right"]:
                print("  WRONG", name, each["error"], flush=True)
        with gzip.open(asked.out / "race_long.json.gz", "wt") as file:
            json.dump({"rows": told, "torch": torch.__version__}, file)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
