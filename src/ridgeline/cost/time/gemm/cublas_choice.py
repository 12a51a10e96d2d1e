"""Which kernel cuBLAS takes for a product of odd rows or wide elements: learned from what it launches.

A product captured into a graph that never runs names its kernels and their grids, thousands of shapes a second
(``lab/record/products.py``); ``lab/fit/cublas_choice.py`` grows trees from them. They are of cuBLAS 13.1 on a
Hopper chip with 132 SMs. Products of aligned 16-bit rows are not told: there the library takes the best tile or one
nearly as good, and knowing which says nothing more about the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ridgeline.cost.correction.gemm_attention import Problem, features, pool_of
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.conv.cudnn_choice import Tree, forest

POOLS = ("half.odd", "fp32", "tf32")
FAMILIES = ("turing", "turing_wide", "turing_wmma", "ampere", "ampere_wide", "ampere_wmma", "simt", "xmma",
            "xmma_tensor", "xmma_group", "thin_n", "thin_t", "vector", "long", "other")  # fmt: skip
"""Kernels by the generation they were written for and the units they use; ``wide`` ones write partial sums in single
precision, ``thin`` ones have few rows, ``long`` ones a long inner loop."""
_SMS = 132
_TILES = ((16, 16), (32, 64), (64, 32), (128, 32), (32, 128), (64, 128), (128, 256), (64, 256), (256, 64))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A family, its tile (along columns, along rows, depth), and what runs beside it."""

    family: str
    across: int
    down: int
    depth: int
    stages: int
    loads: int  # elements that one load brings
    reduced: bool  # whether a second kernel adds up slices
    cleared: bool  # whether counters are cleared first
    num_kernels: int
    split: int = 1


def kernel_of(text: str) -> Kernel:
    """``"ampere 128 64 64 3 2 1 0 2"`` → the kernel."""
    family, *numbers = text.split()
    across, down, depth, stages, loads, reduced, cleared, num = (int(number) for number in numbers)
    return Kernel(family, across, down, depth, stages, loads, bool(reduced), bool(cleared), num)


def _power(size: int) -> int:
    """The largest power of two up to eight that divides a size."""
    return min(8, size & -size)


def questions(problem: Problem, dtype: str, aligned: int) -> list[float]:
    """What the trees ask: sizes, what they leave over, and how full tiles and waves are."""
    b, m, n, k, layout = problem
    rows = m if layout[0] == "t" else k, k if layout[1] == "t" else n, n
    found = features(problem, dtype, aligned, _SMS) + [float(_power(row)) for row in rows]
    found += [m % 2, n % 2, k % 2, m % 4, n % 4, k % 4, m % 32, n % 32, k % 32, k % 128, k % 256, n % 256, m % 256,
              m * n * b // 1024, b * m, b * n, m + n, k / n, k / m]  # fmt: skip
    for across, down in _TILES:
        tiles = b * -(-m // down) * -(-n // across)
        found += [tiles, tiles / (-(-tiles // _SMS) * _SMS)]
    return found


@cache
def _trees(pool: str) -> tuple[Tree, Tree | None, tuple[Kernel, ...]] | None:
    known = forest()
    tree = known.tree(f"gemm.{pool}")
    if tree is None:
        return None
    return tree, known.tree(f"gemm.{pool}.slices"), tuple(kernel_of(text) for text in known.choices[f"gemm.{pool}"])


@lru_cache(maxsize=4096)
def _taken(problem: Problem, dtype: str, aligned: int) -> Kernel | None:
    trees = _trees(pool_of(dtype, aligned))
    if trees is None:
        return None
    tree, slices, kernels = trees
    asked = questions(problem, dtype, aligned)
    number = tree.answer(asked)
    if slices is None:
        return kernels[number]
    split = slices.answer([*asked, float(number)])
    return replace(kernels[number], split=max(split, 1 + kernels[number].reduced))  # what is added up are two or more


def taken(problem: Problem, dtype: str, aligned: int, chip: Chip) -> Kernel | None:
    """The kernel that runs a product, or None where nothing was learned of it."""
    if chip.arch != "hopper" or pool_of(dtype, aligned) not in POOLS:  # The architecture whose library was asked
        return None
    return _taken(problem, dtype, aligned)


def told(kernel: Kernel, problem: Problem, itemsize: float, busy_s: float, num_sms: int) -> list[float]:
    """Features of a product whose kernel is known: its tile and grid, and what it would do a second in ``busy_s``."""
    b, m, n, k, _ = problem
    across, down, depth = kernel.across, kernel.down, max(1, kernel.depth)
    tiled = across > 0 and not kernel.family.startswith("thin")
    blocks = b * -(-n // across) * -(-m // down) * kernel.split if tiled else num_sms
    area, inner = max(1, across * down), k / kernel.split
    turns, steps = -(-blocks // num_sms), -(-inner // depth)
    moved, loaded = b * (m * k + n * k + m * n) * itemsize, blocks * (across + down) * inner * itemsize
    found = [float(kernel.family == name) for name in FAMILIES]
    return found + [across, down, area, depth, kernel.stages, kernel.loads, blocks, blocks / num_sms,
                    blocks / num_sms % 1.0, turns, kernel.split, inner, float(kernel.reduced), float(kernel.cleared),
                    kernel.num_kernels, inner * area, turns * steps * area * depth / busy_s, turns * steps / busy_s,
                    moved / busy_s, turns * inner / busy_s, loaded / busy_s]  # fmt: skip
