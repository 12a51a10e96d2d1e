"""What cuDNN does to the factors of a TensorFloat-32 convolution, told by doing the same in float64.

    python benchmarks/convolution_rounding.py --out results [--budget-s 15]

The first image of a batch is convolved in float64 with both factors as they are, rounded to ten bits (ties away from
zero, or to even), or cut off, in all pairs. The pair whose largest difference from cuDNN's result is the smallest is
what cuDNN does: a difference of float32 sums is left there, about a hundredth of what a wrong guess leaves.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = tuple[int, ...]
CASES: dict[str, tuple[bool, Sizes, Sizes, int, int, int]] = {
    "2/15": (True, (16, 16, 16, 32, 32), (16, 32, 3, 3, 3), 2, 1, 0),
    "2/19": (True, (128, 64, 256, 256), (64, 64, 3, 3), 1, 0, 0),
    "2/60": (True, (128, 3, 16, 32, 32), (3, 16, 3, 3, 3), 2, 1, 0),
    "2/3": (True, (32, 32, 16, 32, 32), (32, 64, 3, 3, 3), 2, 1, 1),
    "2/34": (True, (32, 32, 16, 32, 32), (32, 64, 4, 4, 4), 2, 1, 0),
    "2/11": (True, (512, 64, 32, 32), (64, 128, 5, 5), 1, 1, 0),
    "2/72": (True, (64, 3, 32, 32, 32), (3, 16, 3, 3, 3), 2, 1, 0),
    "plain, 64 channels": (False, (128, 64, 128, 128), (128, 64, 3, 3), 1, 0, 0),
    "plain, 8 channels": (False, (16, 8, 16, 64, 64), (24, 8, 3, 3, 3), 1, 0, 0),
}
"""Whether it is transposed, sizes of image and weight, stride, padding and output padding."""


def whole(x: Tensor) -> Tensor:
    return x.double()


def away(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & -8192).view(torch.float32).double()


def even(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & -8192).view(torch.float32).double()


def cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -8192).view(torch.float32).double()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {"whole": whole, "away": away, "even": even, "cut": cut}


def convolved(case: tuple[bool, Sizes, Sizes, int, int, int], x: Tensor, weight: Tensor) -> Tensor:
    transposed, _, _, stride, padding, more = case
    if transposed:
        call: Callable[..., Tensor] = F.conv_transpose2d if x.dim() == 4 else F.conv_transpose3d
        return call(x, weight, None, stride, padding, more)
    plain: Callable[..., Tensor] = F.conv2d if x.dim() == 4 else F.conv3d
    return plain(x, weight, None, stride, padding)


def told(name: str, device: torch.device) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    x, weight = torch.rand(case[1], device=device), (torch.rand(case[2], device=device) - 0.5) / 8
    found = convolved(case, x, weight)[:1].double()
    apart = {}
    for image, filters in itertools.product(WAYS, WAYS):
        meant = convolved(case, WAYS[image](x[:1]), WAYS[filters](weight))
        apart[f"{image}, {filters}"] = float((found - meant).abs().max())
    return {"name": name, "largest": float(found.abs().max()), "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=15.0)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    until, rows = time.monotonic() + asked.budget_s, []
    for name in CASES:
        if time.monotonic() > until:
            break
        rows.append(told(name, device))
        best = sorted(rows[-1]["apart"].items(), key=lambda pair: pair[1])
        shown = "; ".join(f"{pair} {largest:.1e}" for pair, largest in best)
        print(f"{name}: of {rows[-1]['largest']:.2g} (image, weights) {shown}", flush=True)
        with gzip.open(asked.out / "convolution_rounding.json.gz", "wt") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
