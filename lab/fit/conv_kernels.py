"""Grows the trees that correct single convolution kernels: what
``cost/time/conv/implicit_gemm.py``, told the choice, leaves over.

    python -m lab.fit.conv_kernels [--only stencil] [--write]

Recorded kernels and cuDNN's answers for their shapes, as ``lab/fit/implicit_gemm_conv.py`` reads them; ways and
passes with at least eighty kernels. Pointwise passes that ran as products of cuBLAS are known by their kernels' names
and corrected against the model of products. Prints the error on a quarter held out; ``--write`` puts the trees into
``data/kernels.npz``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lab.fit.conv import H200
from lab.fit.cudnn_choice import choice_of, shape_of
from lab.fit.gemm_correction import Measured, grow, save
from lab.fit.grouped_conv import conv_of
from lab.fit.implicit_gemm_conv import _seconds, rows
from lab.fit.recordings import DATA, load_operators
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.chip import chip_of
from ridgeline.cost.time.conv import depthwise, kernel_choice, pointwise, problem
from ridgeline.cost.time.conv.implicit_gemm import VECTOR, Choice, implicit_s
from ridgeline.hardware import device

PASSES = ("fprop", "dgrad", "wgrad", "convolve", "ImplicitGemmConv", "S_4conv", "conv2d_grouped")
"""What the names of cuDNN's own kernels contain, and those of products do not."""
PRODUCTS = ("nvjet", "gemm", "gemv")
UNASKED, DOUBT = (6004, 7101), 1.6
"""Recordings that cuDNN was not asked about; another kernel may have run where the time is off by more than this."""
TREES, CLIP, FEWEST, MOST_KERNELS = 120, 0.25, 80, 5


def chosen() -> Iterator[tuple[dict[str, Any], str, Choice, bool]]:
    """Recorded dense passes and what was chosen for them: by cuDNN's own answer, or as the trees tell it."""
    for row, answer in rows():
        if "kernels" in row and row["shape"].get("groups", 1) == 1:
            shape, (engine, knobs, _) = shape_of(*answer[:8]), answer[8]
            yield row, shape.op, choice_of(shape.op, engine, knobs, shape.c if shape.op == "fwd" else shape.o), True
    site = problem.Site(H200, problem.DEFAULTS, 0.0)
    for row in load_operators("h200"):
        if row["seed"] in UNASKED and row["kind"] == "conv2d" and row["shape"]["groups"] == 1:
            for op in ("fwd",) if row["phase"] == "fwd" else ("dgrad", "wgrad"):
                for choice in kernel_choice.chosen_kernel(site, conv_of(row), op)[:1]:
                    yield row, op, choice, False


def kernels() -> dict[str, Measured]:
    """Features, structural and measured time of every recorded kernel whose choice is known, by way and pass."""
    found: dict[str, list[tuple[list[float], float, float]]] = defaultdict(list)
    site = problem.Site(H200, problem.DEFAULTS, 0.0)
    for row, op, choice, told in chosen():
        given = conv_of(row)
        if given.pointwise and given.dtype != "fp32":
            continue  # a product of cuBLAS, most often
        coef, seconds = problem.pass_choice(problem.DEFAULTS, f"{choice.way}.{op}"), _seconds(row, op, choice)
        if seconds <= 0.0 or not coef or choice.way in ("direct", "fourier", "winograd"):
            continue
        if choice.way in VECTOR:
            choice, problem = kernel_choice.vector_choice(site, given, choice, op)
        else:
            problem = kernel_choice.problem_of(site, given, choice, op)
        told_s = implicit_s(H200, coef, problem, choice, row["dtype"])
        if told or 1.0 / DOUBT < told_s / seconds < DOUBT:
            found[f"{choice.way}.{op}"].append((kernel_choice.kernel_features(given, choice, problem), told_s, seconds))
    return {name: _measured(some) for name, some in found.items() if len(some) >= FEWEST}


def _own(row: dict[str, Any]) -> list[tuple[str, float]]:
    """(pass, seconds) of each pass of a pointwise convolution that ran as a product, its sums over slices included."""
    mine, others = list[float](), list[str]()
    for name, seconds in row["kernels"]:
        if "splitKreduce" in name and mine:
            mine[-1] += seconds
        elif any(part in name for part in PASSES) and "reduce_wgrad" not in name:
            others.append(name)
        elif any(part in name for part in PRODUCTS):
            mine.append(seconds)
    if row["phase"] == "fwd":
        return [("fwd", mine[0])] if len(mine) == 1 and not others else []
    if len(mine) == 2 and not others:
        return [("dgrad", mine[0]), ("wgrad", mine[1])]
    if len(mine) != 1 or not others:
        return []
    return [("wgrad" if any("dgrad" in name for name in others) else "dgrad", mine[0])]


def products() -> dict[str, Measured]:
    """The same for products of pointwise passes."""
    found: dict[str, list[tuple[list[float], float, float]]] = defaultdict(list)
    site = problem.Site(chip_of(device("h200")), problem.DEFAULTS, 0.0)
    for row in load_operators("h200"):
        shape = row["shape"]
        if row["kind"] != "conv2d" or row["dtype"] == "fp32" or shape["k"] * shape["stride"] * shape["groups"] > 1:
            continue
        given = conv_of(row)
        for op, seconds in _own(row):
            features = pointwise.product_features(given, pointwise.product_of(given, op)[1])
            found[f"product.{op}"].append((features, pointwise.library_product(site, given, op)[0], seconds))
    return {name: _measured(some) for name, some in found.items()}


def _measured(some: list[tuple[list[float], float, float]]) -> Measured:
    features, told, seconds = (np.array(column) for column in zip(*some, strict=True))
    return Measured(features, told, np.zeros(len(some)), seconds)


def stencils() -> dict[str, Measured]:
    """The same for depthwise passes; gradients whose kernels' names tell which of the two they are."""
    found: dict[str, list[tuple[list[float], float, float]]] = defaultdict(list)
    site = problem.Site(chip_of(device("h200")), problem.DEFAULTS, 0.0)
    for row in load_operators("h200"):
        shape = row["shape"]
        if row["kind"] != "conv2d" or shape["groups"] == 1 or shape["groups"] != shape["c"]:
            continue
        given = conv_of(row)
        of_weight = [s for name, s in row["kernels"] if "wgrad" in name or "grad_weight" in name or "Memset" in name]
        if row["phase"] == "fwd":
            passes = [("fwd", row["busy_s"])]
        elif len(row["kernels"]) <= MOST_KERNELS and 0 < len(of_weight) < len(row["kernels"]):
            passes = [("dgrad", row["busy_s"] - sum(of_weight)), ("wgrad", sum(of_weight))]
        else:
            continue
        for op, seconds in passes:
            found[f"stencil.{op}"].append(
                (depthwise.stencil_features(given), depthwise.stencil(site, given, op)[0], seconds)
            )
    return {name: _measured(some) for name, some in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ways whose names begin so; the file keeps the others")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pools = dict(residue.trees_in(residue.KERNEL_FILE)) if options.only else {}
    given = stencils() | (products() | kernels() if options.only != "stencil" else {})
    for name, mine in sorted(given.items()):
        if not name.startswith(options.only):
            continue
        kept = np.random.default_rng(1).random(len(mine.rows)) < 0.75
        held, part = mine.some(~kept), grow(mine.some(kept), TREES, CLIP)
        after = held.missed(part.logs(held.rows))
        print(f"{name:20s} n {len(mine.rows):4d}  held out {held.missed(0.0):.1%} -> {after:.1%}", flush=True)
        pools[f"{residue.KERNELS}/{name}"] = grow(mine, TREES, CLIP)
    if options.write:
        save(DATA / residue.KERNEL_FILE, pools)


if __name__ == "__main__":
    main()
