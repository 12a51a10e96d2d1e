"""What the structure of a product or of attention leaves over: a bounded factor, learned from thousands measured.

The time model of a product knows tiles, waves, splits and memory; what it misses is no noise but regular in the shape
(which tile the library's heuristic takes where several are near, how a short inner loop fills its pipeline, how a few
tiles share a cache slice). Boosted trees of a few levels, each asking the same questions of every shape, learn the
logarithm of that factor; ``lab/fit/gemm_correction.py`` grows them. A device whose calibration does not say
``residue_frac`` has none, one that nobody measured has that of a measured sibling of its architecture, and the factor
never leaves ``BOUND``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ridgeline.cost.time.chip import Chip
from ridgeline.resources import data_dir

FILE = "gemm_attention.npz"
LEFT_OVER = "calls_alone.npz"
"""Trees of calls alone on the device (``cost/correction/rows.py``), which no model needs."""
BOUND = 0.45
"""Largest logarithm of the factor."""
VECTORS, VECTOR_BOUND = "vector", 0.9
"""Products of one row run eleven kernels that one structure stands for: a sixth of them are further off than others."""
DONORS = {"hopper": "h100-sxm", "blackwell": "b200", "ampere": "a100-sxm-80gb", "ada": "l40s"}
"""Whose factor a device of the same architecture takes that was not measured itself."""
KERNELS, KERNEL_FILE = "h200 kernels", "kernels.npz"
"""Under which name, and where, the factors of single convolution kernels are kept."""
_TILES = ((32, 32), (64, 64), (128, 64), (128, 128), (256, 128))
_PACE_TILES = ((64, 8), (8, 64), (64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128),
               (128, 192))  # fmt: skip
_LAYOUTS = ("nt", "nn", "tn", "tt")

Problem = tuple[int, int, int, int, str]


def features(problem: Problem, dtype: str, aligned: int, num_sms: int) -> list[float]:
    """Sizes, products of sizes, what they leave over in tiles, and how full tiles and waves are."""
    b, m, n, k, layout = problem
    low, high, out = min(m, n), max(m, n), m * n
    found = [float(_LAYOUTS.index(layout)), float(aligned), float(dtype == "fp16"), b, m, n, k, low, high, out, b * out,
             b * out * k, m * k, n * k, b * (out + (m + n) * k), n / m, k / math.sqrt(out), m % 8, n % 8, k % 8, m % 16,
             m % 64, n % 64, k % 64, m % 128, n % 128]  # fmt: skip
    for across, down in _TILES:
        tiles = b * -(-m // down) * -(-n // across)
        found += [tiles, tiles / (-(-tiles // num_sms) * num_sms), out * b / (tiles * down * across)]
    return found


def pace_features(
    problem: Problem, itemsize: float, busy_s: float, floor_s: float, num: int, num_sms: int
) -> list[float]:
    """What a product would do a second in ``busy_s``, and how many steps tiles of many sizes take for it."""
    b, m, n, k, _ = problem
    moved, work = b * ((m + n) * k * itemsize + m * n * max(2.0, itemsize)), b * m * n * k
    found = [busy_s, work / busy_s, moved / busy_s, moved, floor_s / busy_s, num, itemsize]
    for down, across in _PACE_TILES:
        steps = -(-b * -(-m // down) * -(-n // across) // num_sms) * k
        found += [steps, steps * down * across / busy_s]
    return found


def attention_features(dims: Mapping[str, int], num_sms: int) -> list[float]:
    """The same for attention."""
    b, h, hkv, s, skv, d = (dims[name] for name in ("b", "h", "hkv", "s", "skv", "d"))
    short, long, lists = b * h * -(-s // 64) / num_sms, b * h * -(-s // 128) / num_sms, b * hkv / num_sms
    return [b, h, hkv, h / hkv, s, skv, d, dims.get("window", 0), b * h, b * hkv, b * h * s, b * hkv * skv,
            b * h * s * skv * d, b * hkv * skv * d, b * s * h * d, s % 64, s % 128, skv % 64, long, long % 1.0, lists,
            lists % 1.0, short % 1.0]  # fmt: skip


def pool_of(dtype: str, aligned: int) -> str:
    """Trees are grown apart by the kernels that products meet."""
    if dtype in ("bf16", "fp16"):
        return "half" if aligned == 8 else "half.odd"
    return dtype


@dataclass(frozen=True, slots=True)
class Boosted:
    """Trees of ``depth`` questions each: question ``i`` of a tree is the same for all of its branches."""

    feature: NDArray[np.intp]  # trees x depth
    limit: NDArray[np.float64]
    leaf: NDArray[np.float64]  # trees x 2 ** depth, one after another
    start: NDArray[np.intp]  # where a tree's leaves begin
    weight: NDArray[np.intp]  # of a question's answer in the number of the leaf

    def logs(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """One logarithm for each row of features."""
        above = rows.take(self.feature, axis=1) > self.limit
        return np.asarray(self.leaf.take(above @ self.weight + self.start).sum(axis=1))


def boosted(feature: NDArray[np.intp], limit: NDArray[np.float64], leaf: NDArray[np.float64]) -> Boosted:
    """From questions (trees x depth) and leaves (trees x 2 ** depth)."""
    trees, depth = feature.shape
    start, weight = np.arange(trees) << depth, 1 << np.arange(depth - 1, -1, -1)
    return Boosted(feature.astype(np.intp), limit.astype(np.float64), leaf.astype(np.float64).ravel(), start, weight)


def _pools() -> dict[str, Boosted]:
    return trees_in(FILE)


@cache
def trees_in(name: str) -> dict[str, Boosted]:
    """All trees of a file, by pool."""
    with np.load(data_dir() / name, allow_pickle=False) as file:
        places = json.loads(str(file["index"]))
        parts = {
            depth: [file[f"{part}{depth}"] for part in ("feature", "limit", "leaf")]
            for depth in {depth for _, (depth, _, _) in places}
        }
        return {name: boosted(*(part[at:end] for part in parts[depth])) for name, (depth, at, end) in places}


@cache
def _measured() -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in _pools())


def trees_of(chip: Chip, pool: str) -> Boosted | None:
    """What was learned of a device's products or attention of one pool, or of its sibling's."""
    owner = chip.origin if chip.origin in _measured() else DONORS.get(chip.arch, "")
    return _pools().get(f"{owner}/{pool}")


def logs(trees: Boosted | None, rows: Sequence[Sequence[float]], bound: float = BOUND) -> list[float]:
    """Logarithm of what each product, described by its features, takes over what its structure says."""
    if trees is None:
        return [0.0] * len(rows)
    found = trees.logs(np.array(rows, dtype=np.float64))
    return [min(bound, max(-bound, log)) for log in found.tolist()]


def kernel_trees(name: str) -> Boosted | None:
    """What was learned of a convolution's kernel, such as ``tma.fwd``, on the device where they were timed."""
    return trees_in(KERNEL_FILE).get(f"{KERNELS}/{name}")


def attention_log(pool: str, dims: Mapping[str, int], chip: Chip) -> float:
    """The same for attention as serving frameworks run it; ``pool`` is the calibration's entry, such as ``decode``."""
    return logs(trees_of(chip, pool), [attention_features(dims, chip.num_sms)])[0]
