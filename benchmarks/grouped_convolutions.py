"""Convolutions in groups with batch norm and ReLU: cuDNN's with one pass behind it, and our kernel with several tiles;
and first convolutions of images, by cuDNN, by squares and by our kernel over squares.

    python benchmarks/grouped_convolutions.py --out OUT [--budget-s 40]

Seconds of one call inside of a CUDA graph of several, and the root mean square of the distance from float32 over that
of the result, of the first image.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from odd_head import Book
from torch import Tensor

from ridgeline.engine.autotune import prepared
from ridgeline.kernels.grouped import op as together
from ridgeline.kernels.grouped import reference
from ridgeline.kernels.grouped.config import Tile
from ridgeline.optimizer.rewrites.conv import stem as stems
from ridgeline.optimizer.rewrites.conv.batch_norm_epilogue import _convolved, _rows, finished

SHAPES = (
    ("RegNetY-3.2GF", 64, 576, 14, 24, 1),
    ("RegNetY-3.2GF", 64, 216, 28, 9, 1),
    ("RegNetY-3.2GF", 64, 72, 56, 3, 1),
    ("RegNetY-3.2GF", 64, 1512, 7, 63, 1),
    ("RegNetY-3.2GF", 64, 576, 28, 24, 2),
    ("ResNeXt-50", 64, 128, 56, 32, 1),
    ("ResNeXt-50", 64, 512, 14, 32, 1),
    ("ResNeXt-50", 64, 1024, 14, 32, 2),
    ("RegNetY-16GF", 64, 1232, 14, 11, 1),
)
"""Network, images, channels, pixels across, groups and steps; three taps a side."""
STEMS = ((64, 32, 3, 224), (64, 24, 3, 224), (128, 16, 3, 224), (128, 64, 7, 224))
"""Images, outputs, taps a side and pixels across; steps of two."""
TILES = (Tile(128, 4, 3), Tile(64, 4, 4), Tile(128, 4, 5), Tile(256, 8, 3), Tile(128, 8, 3), Tile(64, 2, 3))


def ways(given: tuple[Any, ...]) -> dict[str, Callable[[], Tensor]]:
    """Every way, by name."""
    x, w, bias, *norm, eps, activation, stride, padding, groups = given
    first, filters = x.contiguous(), w.contiguous()

    def library() -> Tensor:
        made = _convolved(x, w, [stride, stride], padding, [1, 1], groups)
        finished(_rows(made), bias, None, *norm, eps, activation, False)
        return made

    prepared(partial(together.planned, *given, tile=tile) for tile in TILES)
    found: dict[str, Callable[[], Tensor]] = {
        "library": library,
        "(convolution, channels last)": lambda: F.conv2d(x, w, None, stride, padding, 1, groups),
        "(convolution, channels first)": lambda: F.conv2d(first, filters, None, stride, padding, 1, groups),
        "(weights laid)": lambda: together.by_bundle(w, groups, together.planned(*given)[2]),
    }
    return found | {repr(tile): partial(together.tiled, *given, tile=tile) for tile in TILES}


def drawn(images: int, channels: int, side: int, groups: int, stride: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(images, channels, side, side, **like).contiguous(memory_format=torch.channels_last)
    w = torch.randn(channels, channels // groups, 3, 3, **like) * (9 * channels // groups) ** -0.5
    mean, gamma, beta = (torch.randn(channels, **like) for _ in range(3))
    var = torch.rand(channels, **like) + 0.5
    w = w.contiguous(memory_format=torch.channels_last)
    return (x, w, None, mean, var, gamma, beta, 1e-5, "relu", stride, [1, 1], groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=40.0)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    book = Book(asked.out / "grouped_convolutions.json", time.monotonic() + asked.budget_s)
    _stems(book)
    _groups(book)


def _groups(book: Book) -> None:
    for name, *shape in SHAPES:
        if time.monotonic() > book.until:
            return
        given = drawn(*shape)
        wide = [each.float() if isinstance(each, Tensor) else each for each in given]
        meant = reference.forward(wide[0][:1], *wide[1:])  # type: ignore[arg-type]
        for way, call in ways(given).items():
            book.add({"network": name, "shape": shape, "way": way}, call, partial(_apart, meant))


def _stems(book: Book) -> None:
    for images, outputs, side, pixels in STEMS:
        torch.manual_seed(0)
        x = torch.randn(images, 3, pixels, pixels, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, 3, side, side, device="cuda", dtype=torch.bfloat16) * (3 * side * side) ** -0.5
        w, padding = w.contiguous(memory_format=torch.channels_last), [side // 2, side // 2]
        meant = F.conv2d(x[:1].float(), w.float(), None, 2, padding)
        for way, call in {
            "library": partial(stems._library, x, w, None, padding),
            "squares": partial(stems.squares, x, w, None, padding),
            "squares, one kernel": partial(stems.squares, x, w, None, padding, own=True),
        }.items():
            book.add({"stem": (images, outputs, side, pixels), "way": way}, call, partial(_apart, meant))


def _apart(meant: Tensor, result: Tensor) -> float | None:
    same = result.shape[1:] == meant.shape[1:]
    return float((result[:1].float() - meant).norm() / meant.norm()) if same else None


if __name__ == "__main__":
    with torch.no_grad():
        main()
