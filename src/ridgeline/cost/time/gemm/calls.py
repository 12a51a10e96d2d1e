"""Matrix products as calls: dense, batched and grouped, forward and backward, on the GEMM time model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, selection
from ridgeline.cost.correction.gemm_attention import (
    BOUND,
    VECTOR_BOUND,
    VECTORS,
    Boosted,
    features,
    logs,
    pace_features,
    pool_of,
    trees_of,
)
from ridgeline.cost.time.chip import BOUND_NAMES, Chip, Timing, chip_of
from ridgeline.cost.time.gemm.cublas_choice import POOLS, taken, told
from ridgeline.cost.time.gemm.named_kernels import blocks_s
from ridgeline.cost.time.gemm.simt import classic_timing, vector_timing
from ridgeline.cost.time.gemm.tiles import gemm_timing
from ridgeline.cost.time.lanes import Lanes
from ridgeline.cost.unmeasured.related_device import wanted_power_frac
from ridgeline.hardware import device

Problem = tuple[int, int, int, int, str]  # b, m, n, k, layout: nt reads both operands along k, as F.linear does
LEGACY = "ampere"
"""Whose tiles full-precision products take where no older kernels were fitted."""
WIDE = ("fp32", "tf32")
"""Element types whose products the library has no favorite kernels for."""

_ALIGNED_FRACS = {2: 0.9, 4: 0.95}
"""Tensor rate of rows on 4 and 8 bytes over that on 16, where no operand goes through TMA: copies that are narrower, in
kernels that are otherwise the same (published products on a V100 and a T4)."""

DEFAULTS: Coef = {
    "grouped_ratio": 1.24,  # a grouped product over one batched call of the same size: groups of unequal tiles
    "grouped_s": 6.3e-6,  # laying out the groups' problems on the device
    "residue_frac": 0.0,  # share of the factor learned from measured products that applies
    "alone_frac": 0.0,  # whether trees of calls between events tell that factor, where there are some (cost/price.py)
}


KINDS = ("gemm", "bmm", "grouped_gemm")


@family("gemm", " ".join(KINDS), DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """One product, or the two products of its gradients."""
    times = [_product(problem, call, chip, coef, warm_frac) for problem in _problems(call)]
    longest = max(times, key=lambda t: t.busy_s)
    busy_s, num_kernels = sum(t.busy_s for t in times), sum(t.num_kernels for t in times)
    return _grouped(Time(busy_s, sum(t.floor_s for t in times), longest.bound, num_kernels), call, coef)


def _grouped(time: Time, call: Call, coef: Coef) -> Time:
    """The time as it is, or of a grouped product what laying out its groups makes of it."""
    if call.kind != "grouped_gemm":
        return time
    return time._replace(busy_s=time.busy_s * coef["grouped_ratio"] + coef["grouped_s"], num_kernels=2)


def _problems(call: Call) -> list[Problem]:
    dims = call.dims()
    layout = str(dims.get("layout", "nn" if call.kind == "bmm" else "nt"))
    if call.kind == "grouped_gemm":
        groups, m, n, k = dims["groups"], dims["m"], dims["n"], dims["k"]
        if dims.get("reduction"):
            return [(groups, m, n, max(1, k // groups), "tn")]
        return [(groups, max(1, m // groups), n, k, "nt")]
    b, m, n, k = dims.get("b", 1), dims["m"], dims["n"], dims["k"]
    if call.phase == "fwd":
        return [(b, m, n, k, layout)]
    return [_input_gradient(b, m, n, k, layout), _weight_gradient(b, m, n, k, layout)]


def _input_gradient(b: int, m: int, n: int, k: int, layout: str) -> Problem:
    """The left operand's gradient, laid out as that operand is."""
    if layout[0] == "n":
        return b, m, k, n, "n" + ("n" if layout[1] == "t" else "t")
    return b, k, m, n, ("t" if layout[1] == "t" else "n") + "t"


def _weight_gradient(b: int, m: int, n: int, k: int, layout: str) -> Problem:
    """The right operand's gradient, laid out as that operand is."""
    if layout[1] == "t":
        return b, n, k, m, "t" + layout[0]
    return b, k, n, m, ("t" if layout[0] == "n" else "n") + "n"


def alignment(problem: Problem, dtype: str) -> int:
    """Elements up to 16 bytes by which every row of operands and result is aligned."""
    _, m, n, k, layout = problem
    full = max(1, int(16 / ITEMSIZE.get(dtype, 2.0)))
    aligned = full
    for row in (m if layout[0] == "t" and m > 1 else k, k if layout[1] == "t" else n, n):
        while row % aligned:
            aligned //= 2
    return 8 if aligned == full else aligned


@selection
def _split(coef: Coef, group: str) -> dict[str, float]:
    """Coefficients of a group of older kernels; without one, those of the newest."""
    if group:
        return {k.partition(".")[2]: v for k, v in coef.items() if k.startswith(group + ".")}
    return {k: v for k, v in coef.items() if "." not in k and k not in DEFAULTS}


def group_of(problem: Problem, dtype: str) -> str:
    """Which kernels of older generations would run a product; none for those of the newest."""
    b, m, n, _, _ = problem
    step = alignment(problem, dtype)
    if dtype not in WIDE and step == 8:
        return ""
    if min(m, n) == 1 and b == 1:
        return "vector"
    if dtype == "fp32":
        # Full-precision products of up to so many rows or columns run on kernels of their own
        return "thin" if min(m, n) <= 16 else "plain"
    if dtype == "tf32":
        return "even" if step == 8 else "odd"
    return ("odd1" if step == 1 else "odd2") + ("b" if b > 1 else "")


def _classic(problem: Problem, dtype: str, chip: Chip, coef: Coef, warm_frac: float) -> Timing | None:
    """Timing on kernels of older generations, where those were fitted."""
    group = group_of(problem, dtype)
    if not group or f"{group}.launch_s" not in coef:
        return None
    b, m, n, k, _ = problem
    used = _split(coef, group)
    if group == "vector":
        return vector_timing(chip, used, n=max(m, n), k=k, dtype=dtype, warm_frac=warm_frac)
    return classic_timing(chip, used, b=b, m=m, n=n, k=k, dtype=dtype, warm_frac=warm_frac)


def _newest(problem: Problem, dtype: str, chip: Chip, coef: Coef, warm_frac: float) -> Timing:
    """Timing on the kernels the library favors; odd rows slow them down where nothing better is known."""
    b, m, n, k, _ = problem
    used = _split(coef, "")
    measured = len(coef) > len(DEFAULTS)
    if dtype == "fp32" or (measured and alignment(problem, dtype) == 8):
        used = {**used, "unaligned_frac": 1.0}  # the coefficients speak of this alignment already
    elif chip.arch not in ("hopper", "blackwell") and (slower := _ALIGNED_FRACS.get(alignment(problem, dtype))):
        used = {**used, "unaligned_frac": slower}
    if not measured:
        used = {**used, **_hunger(chip, dtype)}
    seen = replace(chip, arch=LEGACY) if dtype == "fp32" and measured else chip
    return gemm_timing(seen, used, b=b, m=m, n=n, k=k, dtype=dtype, warm_frac=warm_frac)


def _hunger(chip: Chip, dtype: str) -> dict[str, float]:
    """What power the product would draw, where only its architecture tells."""
    found = wanted_power_frac(chip.arch, dtype, chip.peak_flops_per_s(dtype), chip.tdp_w)
    # Share of the vector peak that a full-precision main loop reaches, where none was fitted (published products)
    vector = {"tensor_frac": 0.85} if dtype == "fp32" else {}
    return vector if found is None else {**vector, "power_frac": found}


def _computed(dtype: str, chip: Chip) -> str:
    return dtype if dtype == "fp32" or dtype in chip.tensor_flops_per_s else "fp32"


def _product(problem: Problem, call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dtype = _computed(call.dtype, chip)
    timing = _structure(problem, dtype, chip, coef, warm_frac)
    cold = timing if chip.name == chip.origin and warm_frac == 0.0 else None
    return _times(timing, [problem], dtype, chip, coef, call.phase, cold)[0]


def _structure(problem: Problem, dtype: str, chip: Chip, coef: Coef, warm_frac: float) -> Timing:
    classic = _classic(problem, dtype, chip, coef, warm_frac)
    if classic is None:
        return _newest(problem, dtype, chip, coef, warm_frac)
    return _named(classic, problem, dtype, chip, warm_frac)


def _named(classic: Timing, problem: Problem, dtype: str, chip: Chip, warm_frac: float) -> Timing:
    """The same with the time of the kernel that the library takes, where that one was timed often enough.

    Nobody asked the library for products with a column: as rows of their transposes they get kernels of their own.
    """
    if problem[2] == 1:
        return classic
    aligned = alignment(problem, dtype)
    kernel = taken(problem, dtype, aligned, chip)
    time_s = blocks_s(kernel, problem, dtype, aligned, chip, warm_frac) if kernel is not None else None
    if time_s is None:
        return classic
    return replace(classic, expected_s=np.maximum(classic.floor_s, time_s))


@lru_cache(maxsize=32)
def _origin(name: str) -> Chip:
    return chip_of(device(name))


def described(
    problem: Problem, dtype: str, chip: Chip, coef: Coef, paced: bool = False, cold: Timing | None = None
) -> tuple[list[float], int]:
    """Features that the learned factor asks for, and how many kernels run (0: as the structure says).

    They are of the shape alone, on the device as it was measured and with cold operands, so that neither an imagined
    bandwidth nor a warmer cache moves the factor. Products of odd rows and wide elements, and those that are ``paced``,
    are told what the structure makes of them as well (``cold``, where it is known already).
    """
    aligned = alignment(problem, dtype)
    found, kernel = features(problem, dtype, aligned, chip.num_sms), taken(problem, dtype, aligned, chip)
    if kernel is None and not paced:
        return found, 0
    timing, itemsize = cold or _structure(problem, dtype, chip, coef, 0.0), ITEMSIZE.get(dtype, 2.0)
    busy_s, floor_s = float(timing.expected_s[0]), float(timing.floor_s[0])
    num = kernel.num_kernels if kernel is not None else int(timing.num_kernels[0])
    if kernel is not None:
        found += told(kernel, problem, itemsize, busy_s, chip.num_sms)
    found += pace_features(problem, itemsize, busy_s, floor_s, num, chip.num_sms)
    return found, kernel.num_kernels if kernel is not None else 0


def pools_of(problem: Problem, dtype: str, coef: Coef, phase: str) -> list[tuple[str, bool]]:
    """Under which names trees of a product may be kept, the fittest first, and whether they ask for its pace.

    Vectors run kernels of their own, whatever their elements. Calls between events read more than their kernels take,
    gradients are told by their kernels alone: of the products that models have, both have trees apart.
    """
    pool = pool_of(dtype, alignment(problem, dtype))
    if pool in POOLS:
        return [(VECTORS if problem[0] == problem[1] == 1 else pool, True)]
    alone = [(f"{pool}.alone.{phase}", True), (f"{pool}.alone.fwd", True)] if coef.get("alone_frac") else []
    return [*alone, (pool, False)]


def _learned(problem: Problem, dtype: str, chip: Chip, coef: Coef, phase: str) -> tuple[Boosted | None, bool]:
    for pool, paced in pools_of(problem, dtype, coef, phase):
        if (trees := trees_of(chip, pool)) is not None:
            return trees, paced
    return None, False


def _times(
    timing: Timing,
    problems: Sequence[Problem],
    dtype: str,
    chip: Chip,
    coef: Coef,
    phase: str = "fwd",
    cold: Timing | None = None,
) -> list[Time]:
    """What the structure says, times what it leaves over; all of one alignment. ``cold`` is of a single problem."""
    share, expected, floors = coef["residue_frac"], timing.expected_s.tolist(), timing.floor_s.tolist()
    left, nums = [0.0] * len(problems), timing.num_kernels.tolist()
    trees, paced = _learned(problems[0], dtype, chip, coef, phase) if share else (None, False)
    if trees is not None:
        measured = chip if chip.name == chip.origin else _origin(chip.origin)
        rows = [described(problem, dtype, measured, coef, paced, cold) for problem in problems]
        left = logs(trees, [row for row, _ in rows], VECTOR_BOUND if trees is trees_of(chip, VECTORS) else BOUND)
        nums = [num or old for num, old in zip([num for _, num in rows] * (len(nums) // len(rows)), nums, strict=True)]
    if len(timing.expected_s) > len(problems):  # one problem on many devices, to all of which the same factor applies
        busy_s = np.maximum(timing.floor_s, timing.expected_s * math.exp(share * left[0]))
        num = nums[0] if len(set(nums)) == 1 else np.array(nums).view(Lanes)
        return [Time(cast(float, busy_s.view(Lanes)), cast(float, timing.floor_s.view(Lanes)),
                     cast(str, timing.bound), cast(int, num))]  # fmt: skip
    return [
        Time(max(floor, busy_s * math.exp(share * log)), floor, BOUND_NAMES[bound], int(num))
        for log, busy_s, floor, bound, num in zip(left, expected, floors, timing.bound.tolist(), nums, strict=True)
    ]


def plain_problem(call: Call) -> Problem | None:
    """The problem of a single product of aligned rows, many of which can be priced in one go; none of others."""
    if call.phase != "fwd" or call.dtype in WIDE:
        return None
    problem = _problems(call)[0]
    return problem if alignment(problem, call.dtype) == 8 else None


def many(
    calls: Sequence[Call], problems: Sequence[Problem], chip: Chip, coef: Coef, warm_fracs: Sequence[float]
) -> list[Time]:
    """Times of plain products of one element type, as ``model`` would give them one by one."""
    dtype = _computed(calls[0].dtype, chip)
    used = _split(coef, "")
    if len(coef) > len(DEFAULTS):
        used = {**used, "unaligned_frac": 1.0}
    else:
        used = {**used, **_hunger(chip, dtype)}
    seen = replace(chip, arch=LEGACY) if dtype == "fp32" and len(coef) > len(DEFAULTS) else chip
    b, m, n, k = (list(column) for column in zip(*(p[:4] for p in problems), strict=True))
    timing = gemm_timing(seen, used, b=b, m=m, n=n, k=k, dtype=dtype, warm_frac=list(warm_fracs))
    times = _times(timing, problems, dtype, chip, coef)
    return [_grouped(time, call, coef) for time, call in zip(times, calls, strict=True)]
