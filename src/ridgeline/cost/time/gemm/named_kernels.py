"""How long a product takes on a kernel that is known by name: its blocks on the SMs, their steps along k, their bytes.

Products of odd rows and wide elements run on kernels of three generations that no least time chooses among; which one
runs is learned (``cublas_choice.py``), and each was timed often enough to be described by a few numbers of its own.
An SM holds some blocks at a time. A block alone takes a start and so long for every step; blocks side by side share
the SM, which needs so long for a step of each; the longer counts, against L2 and DRAM, and the result is written
behind that. Slices of k that are added up inside the kernel wait for each other, others leave their sums to a second
kernel. ``lab/fit/cublas_kernels.py`` fits the numbers to durations of single kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ridgeline.cost.call import ITEMSIZE
from ridgeline.cost.correction.gemm_attention import Problem, pool_of
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.gemm.cublas_choice import Kernel
from ridgeline.resources import data_dir

FILE = "blocks.json"
UNTILED = ("vector", "other")
"""Families of which nothing tells what a block computes: eleven kernels of vectors go by one name here."""
WHOLE = ("long",)
"""Families priced with all that they launch: clearing and scaling take the same every time."""
_THIN_COLUMNS = {"thin_n": 64, "thin_t": 8}
_LONG_COLUMNS, _LONG_ROWS, _LONG_SLICE, _LONG_SLICES = 64, 8, 640, 8
CLEAR_S = 1.05e-6
"""Clearing the counters that slices are added up by (median of 1,500)."""
SHARP = 4
"""How sharply the longer of two times counts: they add up as the fourth root of fourth powers."""
COEFFICIENTS = {
    "launch_s": "time of the kernel when there is nothing to do",
    "start_s": "first load to last store of a block that is alone on its SM, apart from its steps",
    "step_s": "one step along k of that block",
    "fill_start_s": "what a further block costs a full SM, apart from its steps",
    "fill_step_s": "one step of that block",
    "dram_frac": "share of the datasheet DRAM bandwidth at which operands are read",
    "l2_frac": "share of the device file's L2 bandwidth at which blocks load",
    "out_frac": "share of the DRAM bandwidth at which the result is written",
    "slice_s": "what each further slice of k waits for those before it",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The numbers of one kernel, as ``COEFFICIENTS`` names them, and how many of its blocks an SM holds."""

    launch_s: float
    start_s: float
    step_s: float
    fill_start_s: float
    fill_step_s: float
    dram_frac: float
    l2_frac: float
    out_frac: float
    slice_s: float
    resident: int


Walk = tuple[Any, Any, Any, Any, Any, Any]
"""Blocks of the busiest SM, steps of each, bytes of operands, of the result and of all blocks' loads, slices waited
for: numbers, or arrays of them."""


def walk_of(problem: Problem, itemsize: float, kernel: Kernel, num_sms: int) -> Walk:
    """What a tiled kernel does for a product."""
    b, m, n, k, _ = problem
    split = max(1, kernel.split)
    inner = -(-k // split)
    blocks = b * -(-n // kernel.across) * -(-m // kernel.down) * split
    apart = sums_apart(kernel)
    out_bytes = b * m * n * (4 * split if apart else itemsize)
    steps = -(-inner // max(1, kernel.depth))
    return (-(-blocks // num_sms), steps, b * (m + n) * k * itemsize, out_bytes,
            blocks * (kernel.across + kernel.down) * inner * itemsize, 0 if apart else split - 1)  # fmt: skip


def tiled(kernel: Kernel, problem: Problem) -> Kernel | None:
    """The kernel with what one of its blocks computes, where its name says it otherwise; None where nothing does.

    Columns of a block are read off recorded grids.
    """
    k = problem[3]
    if kernel.family in _THIN_COLUMNS and kernel.across:
        return replace(kernel, across=_THIN_COLUMNS[kernel.family])
    if kernel.family == "long":
        slices = 1 if k < _LONG_SLICE * 0.8 else min(_LONG_SLICES, max(2, round(k / _LONG_SLICE)))
        return replace(kernel, across=_LONG_COLUMNS, down=_LONG_ROWS, depth=4, split=slices)
    return None if kernel.family in UNTILED or not kernel.across else kernel


def sums_apart(kernel: Kernel) -> bool:
    """Whether a second kernel adds up what slices of k left."""
    return kernel.num_kernels - int(kernel.cleared) > 1 and kernel.family not in WHOLE


def walked_s(rates: Rates, walk: Walk, dram_bytes_per_s: float, l2_bytes_per_s: float) -> Any:
    """Duration of the kernel; numbers of a walk may be arrays."""
    queue, steps, read_bytes, out_bytes, loaded_bytes, waits = walk
    alone_s = rates.start_s + rates.step_s * steps
    filled_s = rates.fill_start_s + rates.fill_step_s * steps
    rounds, rest = queue // rates.resident, queue % rates.resident
    sm_s = rounds * _longer(alone_s, rates.resident * filled_s) + (rest > 0) * _longer(alone_s, rest * filled_s)
    read_s = read_bytes / (rates.dram_frac * dram_bytes_per_s)
    load_s = loaded_bytes / (rates.l2_frac * l2_bytes_per_s)
    written_s = out_bytes / (rates.out_frac * dram_bytes_per_s)
    return rates.launch_s + _longer(sm_s, read_s, load_s) + written_s + waits * rates.slice_s


def _longer(*times_s: Any) -> Any:
    return sum(time_s**SHARP for time_s in times_s) ** (1 / SHARP)


@dataclass(frozen=True, slots=True)
class Sums:
    """The kernel that adds up slices: its start, what each slice waits, partial sums and results."""

    start_s: float
    slice_s: float
    bytes_per_s: float
    results_per_s: float


@dataclass(frozen=True, slots=True)
class Known:
    """What was fitted on one device: kernels by name and layout, and those that add up slices by who wrote them."""

    device: str
    peaks: Mapping[str, float]  # matrix operations a second of an SM there, by element type
    kernels: Mapping[str, Rates]
    sums: Mapping[str, Sums]


@cache
def known() -> Known:
    found = json.loads((data_dir() / FILE).read_text())
    kernels = {name: Rates(**dict(zip(found["coefficients"], numbers, strict=True)))
               for name, numbers in found["kernels"].items()}  # fmt: skip
    sums = {who: Sums(*numbers) for who, numbers in found["sums"].items()}
    return Known(found["device"], found["peaks"], kernels, sums)


def name_of(pool: str, kernel: Kernel) -> str:
    """Under which name a kernel's numbers are kept."""
    sizes = (kernel.across, kernel.down, kernel.depth, kernel.stages, kernel.loads)
    return " ".join((pool, kernel.family, *map(str, sizes)))


def adder_of(kernel: Kernel) -> str:
    """Who wrote the kernel that adds up slices: ``xmma`` has its own, slice after slice, others share one."""
    return "xmma" if kernel.family.startswith("xmma") else "other"


def sum_s(kernel: Kernel, problem: Problem, itemsize: float, sums: Sums) -> float:
    """Duration of the kernel that adds up slices."""
    b, m, n, _, _ = problem
    moved_s = b * m * n * (4 * kernel.split + itemsize) / sums.bytes_per_s
    return sums.start_s + sums.slice_s * kernel.split + moved_s + b * m * n / sums.results_per_s


def blocks_s(kernel: Kernel, problem: Problem, dtype: str, aligned: int, chip: Chip, warm_frac: float) -> float | None:
    """Time of a product's kernels, or None where nothing was fitted of them or another device is asked."""
    fitted, found = known(), tiled(kernel, problem)
    if chip.origin != fitted.device or found is None:
        return None
    kernel = found
    name = name_of(pool_of(dtype, aligned), kernel)
    rates = fitted.kernels.get(f"{name} {problem[4]}") or fitted.kernels.get(name)
    if rates is None:
        return None
    itemsize = ITEMSIZE.get(dtype, 2.0)
    queue, steps, read_bytes, *others = walk_of(problem, itemsize, kernel, chip.num_sms)
    slower = fitted.peaks[dtype] * chip.num_sms / chip.peak_flops_per_s(dtype)
    time_s = walked_s(
        _paced(rates, slower) if slower != 1.0 else rates,
        (queue, steps, read_bytes * (1.0 - warm_frac), *others),
        chip.dram_bytes_per_s,
        chip.l2_bytes_per_s,
    )
    if sums_apart(kernel):
        time_s += sum_s(kernel, problem, itemsize, fitted.sums[adder_of(kernel)])
    total_s: float = time_s + CLEAR_S * (kernel.cleared and kernel.family not in WHOLE)
    return total_s


def _paced(rates: Rates, slower: float) -> Rates:
    """The same kernel on SMs that take longer for an operation, as an imagined device may have them."""
    return Rates(
        rates.launch_s, rates.start_s * slower, rates.step_s * slower, rates.fill_start_s * slower,
        rates.fill_step_s * slower, rates.dram_frac, rates.l2_frac, rates.out_frac, rates.slice_s, rates.resident,
    )  # fmt: skip
