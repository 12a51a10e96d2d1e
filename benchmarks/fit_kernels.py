"""Grows the trees that correct single convolution kernels: what ``cost/implicit.py``, told the choice, leaves over.

    python benchmarks/fit_kernels.py [--write]

Recorded kernels and cuDNN's answers for their shapes, as ``fit_implicit.py`` reads them; ways and passes with at least
eighty kernels. Prints the error on a quarter held out; ``--write`` puts the trees into ``data/residue.npz``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
from fit_conv import H200
from fit_implicit import _seconds, rows
from fit_products import PATH, Measured, grow, save
from fit_selection import choice_of, shape_of

from ridgeline.cost import conv, residue
from ridgeline.cost.call import Call
from ridgeline.cost.implicit import VECTOR, implicit_s

TREES, CLIP, FEWEST = 120, 0.25, 80


def kernels() -> dict[str, Measured]:
    """Features, structural and measured time of every recorded kernel whose choice is known, by way and pass."""
    found: dict[str, list[tuple[list[float], float, float]]] = defaultdict(list)
    site = conv.Site(H200, conv.DEFAULTS, 0.0)
    for row, answer in rows():
        if "kernels" not in row or row["shape"].get("groups", 1) > 1:
            continue
        shape, (engine, knobs, _) = shape_of(*answer[:8]), answer[8]
        if shape.taps == 1 and shape.stride == 1 and shape.dtype != "fp32":
            continue  # a product of cuBLAS, most often
        choice = choice_of(shape.op, engine, knobs, shape.c if shape.op == "fwd" else shape.o)
        given = conv._conv(Call(row["kind"], row["dtype"], "fwd", "cudnn", tuple(row["shape"].items())), row["shape"])
        coef, seconds = conv._pass(conv.DEFAULTS, f"{choice.way}.{shape.op}"), _seconds(row, shape.op, choice)
        if seconds <= 0.0 or not coef:
            continue
        if choice.way in VECTOR:
            choice, problem = conv._vector_choice(site, given, choice, shape.op)
        else:
            problem = conv._problem(site, given, choice, shape.op)
        told_s = implicit_s(H200, coef, problem, choice, row["dtype"])
        found[f"{choice.way}.{shape.op}"].append((conv.kernel_features(given, choice, problem), told_s, seconds))
    return {
        name: Measured(np.array([f for f, _, _ in some]), np.array([t for _, t, _ in some]), np.zeros(len(some)),
                       np.array([s for _, _, s in some]))
        for name, some in found.items() if len(some) >= FEWEST
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pools = {}
    for name, mine in sorted(kernels().items()):
        kept = np.random.default_rng(1).random(len(mine.rows)) < 0.75
        held, part = mine.some(~kept), grow(mine.some(kept), TREES, CLIP)
        after = held.missed(part.logs(held.rows))
        print(f"{name:20s} n {len(mine.rows):4d}  held out {held.missed(0.0):.1%} -> {after:.1%}", flush=True)
        pools[f"{residue.KERNELS}/{name}"] = grow(mine, TREES, CLIP)
    if options.write:
        save(PATH, {name: trees for name, trees in residue._pools().items() if name not in pools} | pools)


if __name__ == "__main__":
    main()
