"""Grows the trees of ``cost/time/gemm/cublas_choice.py``: which kernel cuBLAS takes for a product
of odd rows or wide elements.

    python -m lab.fit.cublas_choice [--share 0.9] [--all] [--write]

Reads what graphs of products launched (``products_seed*.npz``, written by ``lab/record/products.py``). Shapes that were
timed as well are left out, so that the factor that ``lab/fit/gemm_correction.py`` learns from those meets choices as
they are for any other shape; ``--all`` takes them in, for the trees that ship, after the factor has been learned.
Prints how often the kernel, its family and its slices are right on the share not grown from. ``--write`` puts the
trees into ``data/selection.npz`` beside those of convolutions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lab.fit.cudnn_choice import Grown, _flat, _grown
from lab.fit.recordings import DATA
from lab.record.products import DTYPES, LAYOUTS
from ridgeline.cost.correction.gemm_attention import pool_of
from ridgeline.cost.time.conv.cudnn_choice import FILE
from ridgeline.cost.time.gemm.calls import Problem, alignment
from ridgeline.cost.time.gemm.cublas_choice import POOLS, questions

Row = tuple[Problem, str, str, int]  # the product, its element type, its kernel as text, slices
BESIDE = re.compile(r"^Memset|splitKreduce|scal_kernel|reduce_1Block")
"""Kernels that are not the product itself."""
MOST_LEAVES, MOST_SLICE_LEAVES = 24000, 7000
CUTLASS = {"75": "turing", "80": "ampere"}


def family_of(name: str) -> str:
    """Who wrote a kernel, for what units, by its name."""
    found = re.search(r"cutlass_(\d\d)_(wmma_)?(tensorop|simt)_", name)
    if found:
        if found[3] == "simt":
            return "simt"
        wide = re.search(r"tensorop_s(1688|16816)gemm_(bf16|f16)", name)
        return CUTLASS[found[1]] + ("_wmma" if found[2] else "_wide" if wide else "")
    if "xmma_gemm" in name:
        return "xmma" if "ffma" in name else "xmma_group" if "warpgroup" in name else "xmma_tensor"
    for part, family in (("gemmSN_NN", "thin_n"), ("gemmSN_TN", "thin_t"), ("gemv", "vector"), ("dot_kernel", "vector"),
                         ("largek", "long")):  # fmt: skip
        if part in name:
            return family
    return "other"


def tile_of(name: str) -> tuple[int, int, int, int, int]:
    """(along columns, along rows, depth, stages, elements of a load), none of them where the name does not say."""
    found = re.search(r"gemm_(?:[a-z][a-z0-9]*_)?(\d+)x(\d+)(?:_(\d+)x(\d+))?_\w\w_align(\d)", name)
    if found:
        across, down, depth, stages, loads = (int(part or 0) for part in found.groups())
        return across, down, depth or 32, stages or 2, loads
    found = re.search(r"tilesize(\d+)x(\d+)x(\d+)_(?:stage(\d))?", name)
    if found:
        loads = re.search(r"aligna(\d)", name)
        down, across, depth, stages = (int(part or 0) for part in found.groups())  # rows of the output come first here
        return across, down, depth, stages, int(loads[1]) if loads else 4
    found = re.search(r"gemmSN_\w\w_kernelI\wLi(\d+)ELi(\d+)ELi\d+ELi\d+ELi(\d+)ELi(\d+)", name) or re.search(
        r"gemmSN_\w\w_kernel<\w+, (\d+), (\d+), \d+, \d+, (\d+), (\d+)", name
    )
    if found:
        threads, depth, rows, stages = (int(part) for part in found.groups())
        return threads, rows, depth, stages, 0
    return 0, 0, 0, 0, 0


def text_of(names: Sequence[str]) -> str:
    """What runs for a product, as ``heuristic.kernel_of`` reads it."""
    main = next((name for name in names if not BESIDE.search(name)), names[0])
    reduced = any("splitKreduce" in name for name in names)
    numbers = (*tile_of(main), int(reduced), int(names[0] == "Memset"), len(names))
    return " ".join((family_of(main), *map(str, numbers)))


def slices_of(text: str, problem: Problem, layers: int) -> int:
    """Layers of the grid for each matrix of the output; its other sides are padded by how blocks are ordered."""
    family, across = text.split()[:2]
    if int(across) == 0 or family.startswith("thin"):
        return 1
    return max(1, layers // problem[0])


def timed(folder: Path) -> set[tuple[str, Problem]]:
    """Products whose time was recorded with their grids."""
    found = set()
    for path in folder.glob("operators_seed*.jsonl.gz"):
        with gzip.open(path, "rt") as lines:
            for row in map(json.loads, lines):
                if "grids" in row:
                    s = row["shape"]
                    found.add((row["dtype"], (s.get("b", 1), s["m"], s["n"], s["k"], s["layout"])))
    return found


def launched(folder: Path, every: bool) -> Iterator[tuple[str, Row]]:
    """Pool and row of every product that was captured."""
    skipped = set() if every else timed(folder)
    for path in sorted(folder.glob("products_*.npz" if every else "products_seed*.npz")):
        with np.load(path, allow_pickle=False) as file:
            texts = [text_of(names) for names in json.loads(str(file["answers"]))]
            columns = [
                file[name].astype(np.int64).tolist() for name in ("code", "b", "m", "n", "k", "label", "gz")
            ]
        for code, b, m, n, k, label, layers in zip(*columns, strict=True):
            dtype, problem = DTYPES[code // 8], (b, m, n, k, LAYOUTS[code % 8 // 2])
            pool = pool_of(dtype, alignment(problem, dtype))
            if pool in POOLS and (dtype, problem) not in skipped:
                text = texts[label]
                yield pool, (problem, dtype, text, slices_of(text, problem, layers))


def grow(grown: Grown, pool: str, rows: list[Row], share: float) -> None:
    values = np.array([questions(p, dtype, alignment(p, dtype)) for p, dtype, _, _ in rows], np.float32)
    known = sorted({row[2] for row in rows})
    number = {text: at for at, text in enumerate(known)}
    labels, slices = np.array([number[row[2]] for row in rows]), np.array([row[3] for row in rows])
    kept = np.random.default_rng(0).random(len(rows)) < share
    tree = _grown(values[kept], labels[kept], MOST_LEAVES)
    with_choice = np.column_stack([values, labels])
    sliced = _grown(with_choice[kept], slices[kept], MOST_SLICE_LEAVES)
    grown.put(f"gemm.{pool}", _flat(tree, [int(k) for k in tree.classes_]))
    grown.put(f"gemm.{pool}.slices", _flat(sliced, [int(k) for k in sliced.classes_]))
    grown.choices[f"gemm.{pool}"] = known
    line = f"{pool:9s} {len(rows):6d} products, {len(known)} kernels"
    if not kept.all():
        told = tree.predict(values[~kept])
        families = np.array([text.split()[0] for text in known])
        right = families[told] == families[labels[~kept]]
        off = np.abs(np.log(sliced.predict(np.column_stack([values[~kept], told])) / slices[~kept]))
        line += (
            f": right {np.mean(told == labels[~kept]):.1%}, family {right.mean():.1%}, slices {np.mean(off < 0.2):.1%}"
        )
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--share", type=float, default=0.9, help="of the products that trees are grown from")
    parser.add_argument("--all", action="store_true", help="take in the shapes that were timed")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pools: dict[str, list[Row]] = defaultdict(list)
    for pool, row in launched(DATA / "recordings" / options.device, options.all):
        pools[pool].append(row)
    grown = Grown()
    for pool in POOLS:
        grow(grown, pool, pools[pool], options.share)
    if options.write:
        grown.keep(DATA / FILE)
        grown.write(DATA / FILE)
        print(f"{(DATA / FILE).stat().st_size / 1e3:.0f} kB in {FILE}")


if __name__ == "__main__":
    main()
