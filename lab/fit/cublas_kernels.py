"""Fits the numbers of ``cost/time/gemm/named_kernels.py``: what single kernels of odd products take, by their names.

    python -m lab.fit.cublas_kernels [--device h200] [--leave SEED] [--write]

Reads products recorded with their kernels and grids (``lab/record/products.py``) and, where k was not cut into slices,
those without grids. Every kernel is fitted to the logarithm of its durations, first over all layouts and then for each
layout with ten products or more, kept close to its family where it was timed seldom. ``--leave`` keeps a recording out
and prints the error on it, told which kernel ran.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from lab.fit.cublas_choice import BESIDE, slices_of, text_of
from lab.fit.gemm_correction import problem_of
from lab.fit.recordings import DATA, load_operators
from ridgeline.cost.call import ITEMSIZE
from ridgeline.cost.correction.gemm_attention import Problem, pool_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm.calls import alignment
from ridgeline.cost.time.gemm.cublas_choice import Kernel, kernel_of
from ridgeline.cost.time.gemm.named_kernels import (
    COEFFICIENTS,
    FILE,
    WHOLE,
    Rates,
    Sums,
    Walk,
    adder_of,
    name_of,
    tiled,
    walk_of,
    walked_s,
)
from ridgeline.hardware import device

POOLS = ("half.odd", "fp32")
"""Tf32 runs 146 kernels: told which, a recording left out is off by 8.4 % of durations, and the older structure with
its trees does better (5.3 % where these numbers and trees end at 6.4)."""
RESIDENTS = (1, 2, 3, 4, 6, 8)
NOISE = 0.05  # of a duration's logarithm; beyond, a row counts less
PULLS = np.array([6.0, 0.7, 1.0, 0.7, 1.0, 3.0, 4.0, 2.0, 0.5])
"""How strongly each coefficient is held to its family's, in units of noise for a factor of e."""
OFTEN, ENOUGH = 40, 10
REACHED_FRAC = 0.35


@dataclass(frozen=True, slots=True)
class Timed:
    """A product whose kernels are known, and the duration of the main one and of the one that adds up slices."""

    problem: Problem
    dtype: str
    kernel: Kernel
    main_s: float
    sum_s: float
    seed: int

    @property
    def name(self) -> str:
        return name_of(pool_of(self.dtype, alignment(self.problem, self.dtype)), self.kernel)


def timed_of(row: dict[str, Any]) -> Timed | None:
    """None for a row whose kernel has no tile, or whose slices were not recorded."""
    names = ["Memset" if name.startswith("Memset") else name for name, _ in row["kernels"]]
    mains = [(at, s) for at, (name, s) in enumerate(row["kernels"]) if not BESIDE.search(name)]
    kernel, problem = kernel_of(text := text_of(names)), problem_of(row)
    shaped = tiled(kernel, problem)
    if not mains or shaped is None:
        return None
    if kernel.family in WHOLE:
        return Timed(problem, row["dtype"], shaped, sum(s for _, s in row["kernels"]), 0.0, row["seed"])
    if kernel.family.startswith("thin"):
        return Timed(problem, row["dtype"], shaped, mains[0][1], 0.0, row["seed"])
    sums = sum(s for name, s in row["kernels"] if "splitKreduce" in name) + sum(s for _, s in mains[1:])
    grids = row.get("grids", [])
    if len(grids) == len(names):
        kernel = replace(kernel, split=slices_of(text, problem, grids[mains[0][0]][2]))
    elif sums or kernel.cleared:
        return None
    return Timed(problem, row["dtype"], kernel, mains[0][1], sums, row["seed"])


def walks(rows: list[Timed], chip: Chip) -> Walk:
    found = [walk_of(row.problem, ITEMSIZE[row.dtype], row.kernel, chip.num_sms) for row in rows]
    first, *others = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    return (first, *others)  # type: ignore[return-value]


def start_of(kernel: Kernel, dtype: str, chip: Chip) -> np.ndarray:
    """Logarithms of the coefficients of a kernel that nobody has timed."""
    step_s = 2 * kernel.across * kernel.down * kernel.depth / (chip.peak_flops_per_s(dtype) / chip.num_sms)
    step_s /= REACHED_FRAC
    return np.log([2e-6, 6e-7, max(1.5e-7, 1.3 * step_s), 2e-7, step_s, 0.6, 0.8, 1.5, 1.5e-7])


def fitted(walk: Walk, measured_s: np.ndarray, prior: np.ndarray, pull: float, residents: tuple[int, ...],
           chip: Chip) -> tuple[np.ndarray, int]:  # fmt: skip
    """Coefficients' logarithms and how many blocks an SM holds."""
    best: tuple[float, np.ndarray, int] | None = None
    for resident in residents:

        def off(logs: np.ndarray, resident: int = resident) -> np.ndarray:
            told_s = walked_s(Rates(*np.exp(logs), resident), walk, chip.dram_bytes_per_s, chip.l2_bytes_per_s)
            return np.concatenate([np.log(told_s / measured_s) / NOISE, (logs - prior) * PULLS * pull])

        found = least_squares(off, prior, loss="soft_l1", max_nfev=25)
        if best is None or found.cost < best[0]:
            best = found.cost, found.x, resident
    assert best is not None
    return best[1], best[2]


def kernels_of(rows: list[Timed], chip: Chip) -> dict[str, Rates]:
    """Numbers of every kernel, the often timed ones first: the others are held to theirs."""
    groups: dict[str, list[Timed]] = defaultdict(list)
    for row in rows:
        groups[row.name].append(row)
    families: dict[str, list[np.ndarray]] = defaultdict(list)
    kernels = {}
    for name in sorted(groups, key=lambda name: -len(groups[name])):
        mine, kin = groups[name], families[" ".join(name.split()[:2])]
        start = start_of(mine[0].kernel, mine[0].dtype, chip)
        prior = start + (np.median(kin, axis=0) if kin else 0.0)
        walk, measured_s = walks(mine, chip), np.array([row.main_s for row in mine])
        logs, resident = fitted(walk, measured_s, prior, 1.0 if kin else 0.6, RESIDENTS, chip)
        kernels[name] = Rates(*np.exp(logs).tolist(), resident)
        if len(mine) >= OFTEN:
            kin.append(logs - start)
        for layout in ("nt", "nn", "tn", "tt"):
            here = np.array([row.problem[4] == layout for row in mine])
            if here.sum() >= ENOUGH:
                part = tuple(column[here] for column in walk)
                own, _ = fitted(part, measured_s[here], logs, 1.0, (resident,), chip)  # type: ignore[arg-type]
                kernels[f"{name} {layout}"] = Rates(*np.exp(own).tolist(), resident)
    return kernels


def sums_of(rows: list[Timed]) -> dict[str, Sums]:
    """The kernels that add up slices, by who wrote them; rows that are far off count less from round to round."""
    found = {}
    for who in ("xmma", "other"):
        some = [row for row in rows if row.sum_s > 0 and adder_of(row.kernel) == who]
        results = np.array([float(row.problem[0] * row.problem[1] * row.problem[2]) for row in some])
        slices, measured_s = np.array([float(row.kernel.split) for row in some]), np.array([r.sum_s for r in some])
        moved = results * (4 * slices + np.array([ITEMSIZE[row.dtype] for row in some]))
        sides = np.column_stack([np.full(len(some), 1e-6), slices * 1e-6, moved / 1e12, results / 1e12])
        weight = 1 / measured_s
        for _ in range(8):
            parts = nnls(sides * weight[:, None], measured_s * weight)[0]
            weight = 1 / measured_s / np.sqrt(np.maximum(np.abs(sides @ parts / measured_s - 1), 0.02))
        start, step, per_byte, per_result = np.maximum(parts, 1e-3)
        found[who] = Sums(start * 1e-6, step * 1e-6, 1e12 / per_byte, 1e12 / per_result)
        print(f"sums {who}: n {len(some)}, mean {np.mean(np.abs(sides @ parts / measured_s - 1)):.1%}")
    return found


def judge(kernels: dict[str, Rates], rows: list[Timed], chip: Chip) -> None:
    """Errors of kernels' durations by pool and family."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rates = kernels.get(f"{row.name} {row.problem[4]}") or kernels.get(row.name)
        if rates is None:
            continue
        walk = walk_of(row.problem, ITEMSIZE[row.dtype], row.kernel, chip.num_sms)
        off = abs(walked_s(rates, walk, chip.dram_bytes_per_s, chip.l2_bytes_per_s) / row.main_s - 1)
        for key in (row.name.split()[0], " ".join(row.name.split()[:2])):
            found[key].append(off)
    for key, offs in sorted(found.items()):
        print(f"{key:24s} n {len(offs):5d}  mean {np.mean(offs):.1%}  median {np.median(offs):.1%}")


def write(name: str, chip: Chip, rows: list[Timed], kernels: dict[str, Rates]) -> None:
    sums = sums_of(rows)
    whole = {
        "device": name,
        "basis": "fitted",
        "source": f"data/recordings/{name}, {len(rows)} products (lab/fit/cublas_kernels.py)",
        "coefficients": [*COEFFICIENTS, "resident"],
        "peaks": {dtype: chip.peak_flops_per_s(dtype) / chip.num_sms for dtype in ("bf16", "fp16", "fp32", "tf32")},
        "sums": {who: [float(f"{v:.4g}") for v in astuple(numbers)] for who, numbers in sums.items()},
        "kernels": {key: [float(f"{v:.4g}") for v in astuple(rates)] for key, rates in sorted(kernels.items())},
    }
    text = json.dumps(whole, indent=1)
    (DATA / FILE).write_text(text + "\n")
    print(f"{FILE}: {len(kernels)} entries, {len(text)} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--leave", type=int, default=-1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chip = chip_of(device(options.device))
    rows = []
    for row in load_operators(options.device):
        if row["kind"] in ("gemm", "bmm") and row["phase"] == "fwd" and row["dtype"] in ITEMSIZE:
            pool = pool_of(row["dtype"], alignment(problem_of(row), row["dtype"]))
            if pool in POOLS and (timed := timed_of(row)) is not None:
                rows.append(timed)
    kept = [row for row in rows if row.seed != options.leave]
    kernels = kernels_of(kept, chip)
    judge(kernels, [row for row in rows if row.seed == options.leave] or rows, chip)
    if options.write:
        write(options.device, chip, kept, kernels)


if __name__ == "__main__":
    main()
