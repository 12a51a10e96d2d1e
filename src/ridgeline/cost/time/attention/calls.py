"""Fused attention as calls: which kernels each library launches, and how long their tiles take on the SMs.

A launch cuts the queries (in backward the keys) into tiles that walk over blocks of the other side. A tile alone on an
SM is slowed by latency; several on one SM share it and hide each other's. Tiles make waves over the SMs; causal tiles
are unequal. FlashAttention-2 splits the keys when tiles are few, and backward calls add passes over memory that zero,
convert and sum gradients. Libraries that serving frameworks bring are priced by the tile model of ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, selection
from ridgeline.cost.time.attention.tiles import attention_timing
from ridgeline.cost.time.chip import Chip, bound_of
from ridgeline.cost.time.lanes import only

DECODE_ROWS = 16
"""Queries of a sequence up to which cuDNN streams keys past them instead of cutting query tiles."""

BACKWARD_PRODUCTS = 2.5  # five products for the forward's two
BLEND = 5.0
"""How sharply the longer of SM time and DRAM time decides: the exponent of a power mean."""


SYNC = frozenset({"fa2_fwd", "fa2_decode", "fa2_split", "fa2_bwd", "efficient_fwd", "efficient_bwd", "cudnn_decode"})
"""Kernels that use those instructions on every architecture."""

COEFFICIENTS = {
    "launch_cycles": "time of the main kernel beyond its tiles",
    "start_cycles": "latency of a tile apart from its blocks: first loads, last stores",
    "edge_cycles": "the same per element of head dim",
    "share_cycles": "the same per tile on the SM",
    "block_cycles": "latency of visiting a block whatever its size",
    "tensor_frac_64": "share of the tensor peak that the products of one block reach, head dims to 64",
    "tensor_frac_96": "the same, head dims to 96 where a library has kernels for them",
    "tensor_frac_128": "the same, head dims to 128",
    "tensor_frac_256": "the same, larger head dims",
    "exp_per_clock": "scores an SM turns to probabilities per clock, apart from the products",
    "alone_frac": "pace of a tile alone on its SM, over the pace of a full SM",
    "tail_frac": "share of the last, partial wave that is paid for",
    "uneven_frac": "share of the longest tile that unequal tiles leave at the end",
    "mask_frac": "what a block on the causal diagonal costs more",
    "mask_per_clock": "scores of an explicit mask that an SM reads and adds per clock",
    "ragged_frac": "what kernels cost more that guard every access because a length does not fill its last block",
    "ragged_causal_frac": "what such kernels cost more per block on the causal diagonal",
    "padded_frac": "what a head dim smaller than the kernel's costs more",
    "dram_frac": "share of the datasheet DRAM bandwidth",
    "exposed_frac": "share of the first wave's loads and stores, at full DRAM bandwidth, that nothing hides",
    "miss_cycles": "what a kernel's first loads take longer from DRAM than from L2",
    "pass_cycles": "latency of each memory pass beside the main kernel",
    "pass_frac": "share of the datasheet DRAM bandwidth that passes reach",
    "strided_frac": "the same for passes that read strided: sums over grouped heads, copies of masks",
    "combine_cycles": "latency of combining split keys",
    "combine_split_cycles": "the same per split",
}  # fmt: skip


BASE = {
    "launch_cycles": 3000.0, "start_cycles": 2500.0, "edge_cycles": 5.0, "share_cycles": 1000.0, "block_cycles": 100.0,
    "tensor_frac_64": 0.9, "tensor_frac_96": 0.9, "tensor_frac_128": 0.9, "tensor_frac_256": 0.9, "exp_per_clock": 40.0,
    "alone_frac": 0.8, "tail_frac": 0.8, "uneven_frac": 0.5, "mask_frac": 0.1, "mask_per_clock": 16.0,
    "ragged_frac": 0.02, "ragged_causal_frac": 0.02, "padded_frac": 0.03, "dram_frac": 0.85, "exposed_frac": 0.8,
    "pass_cycles": 4000.0, "pass_frac": 0.75, "strided_frac": 0.6, "combine_cycles": 4000.0,
    "combine_split_cycles": 200.0, "miss_cycles": 1000.0,
}  # fmt: skip
"""Where a fit starts, and what a group uses whose kernels do not know a coefficient."""

SHARED = (
    "launch_cycles", "start_cycles", "edge_cycles", "share_cycles", "block_cycles", "tensor_frac_64", "tensor_frac_128",
    "tensor_frac_256", "exp_per_clock", "tail_frac", "ragged_frac", "padded_frac", "dram_frac", "exposed_frac",
)  # fmt: skip
_CAUSAL = ("uneven_frac", "mask_frac", "ragged_causal_frac")
_BACKWARD = ("pass_cycles", "pass_frac", "strided_frac")
GROUPS = {
    "fa2_fwd": ("alone_frac", "tensor_frac_96", *_CAUSAL),
    "fa2_decode": ("alone_frac",),
    "fa2_split": ("alone_frac", "tensor_frac_96", *_CAUSAL, "combine_cycles", "combine_split_cycles"),
    "fa2_bwd": ("tensor_frac_96", *_CAUSAL, *_BACKWARD),
    "cudnn_fwd": _CAUSAL,
    "cudnn_bwd": (*_CAUSAL, *_BACKWARD),
    "efficient_fwd": ("alone_frac", *_BACKWARD),
    "efficient_bwd": ("alone_frac", "pass_cycles", "pass_frac"),
}
"""Groups of kernels with coefficients of their own, and which beside the shared ones recordings can tell."""

_FITTED = {
    "fa2_fwd": (
        1230, 5220, 2.96, 861, 1870, 0.799, 0.918, 0.769, 43.3, 1, 0.00427, 0.096, 0.61, 0.965, 0.886, 1.11, 0.513,
        0.218, 0.566,
    ),
    "fa2_decode": (
        1750, 2790, 1.76, 1180, 1690, 0.784, 0.926, 0.9, 40.1, 0.96, 0.0224, 0.03, 0.791, 1.93, 0.726,
    ),
    "fa2_split": (
        522, 2080, 1.52, 2210, 2700, 0.62, 0.799, 0.727, 34.9, 0.781, 0.0134, 0.0707, 0.95, 1.18, 0.609, 0.928,
        0.0641, 0.0196, 0.203, 181, 362,
    ),
    "fa2_bwd": (
        392, 6370, 2.19, 1300, 2660, 0.822, 0.937, 0.672, 41.9, 0.964, 0.0451, 0.0663, 0.509, 0.38, 0.901, 0.576,
        0.0694, 0.0103, 5360, 0.766, 0.619,
    ),
    "cudnn_fwd": (
        6980, 524, 3.82, 1010, 23.5, 0.842, 1.08, 1.08, 40, 0.953, 0.0685, 0.00644, 0.95, 1.07, 0.708, 0.207,
        0.0145,
    ),
    "cudnn_bwd": (
        9850, 5880, 4.68, 1030, 378, 0.825, 0.97, 0.472, 40, 1, 0.027, 0.00294, 0.646, 0.268, 0.607, 0.035, 0.0108,
        1740, 0.655, 0.925,
    ),
    "efficient_fwd": (
        514, 226, 2.84, 1340, 8440, 0.903, 0.486, 0.318, 42.2, 0.95, 0.00306, 0.03, 0.44, 1.73, 1, 3140, 0.436,
        0.452,
    ),
    "efficient_bwd": (
        417, 318, 9.8, 1000, 16800, 1.09, 0.366, 0.0773, 68.8, 1, 0.0377, 0.00906, 0.309, 1.08, 0.875, 587, 0.233,
    ),
}  # fmt: skip
"""Fitted to recordings of an H200, in the order of the shared coefficients and the group's own."""


def _fitted(group: str) -> dict[str, float]:
    return dict(zip((*SHARED, *GROUPS[group]), map(float, _FITTED[group]), strict=True))


_SEEN = {
    "fa2_decode": {"miss_cycles": 300.0},
    "fa2_split": {"miss_cycles": 200.0},
    "cudnn_fwd": {"mask_per_clock": 6.0},
    "cudnn_bwd": {"mask_per_clock": 2.5},
    "cudnn_decode": {
        "launch_cycles": 1000.0, "start_cycles": 2000.0, "share_cycles": 500.0, "block_cycles": 1000.0,
        "alone_frac": 1.0, "dram_frac": 0.75, "exposed_frac": 0.1, "combine_cycles": 3400.0,
        "miss_cycles": 300.0,
    },
}  # fmt: skip
"""Set to match repeated calls and single kernels of whole models on an H200."""

_PUBLISHED = {
    "launch_cycles": 8000.0, "start_cycles": 1700.0, "tensor_frac_64": 0.953, "tensor_frac_96": 1.0,
    "tensor_frac_128": 1.04, "tensor_frac_256": 1.08, "uneven_frac": 0.624, "mask_frac": 0.242,
}  # fmt: skip
"""Fitted to FlashAttention-3's published H100 forward figures; what they do not tell is as in cuDNN's kernels."""

_SETS = {
    **{group: _fitted(group) | _SEEN.get(group, {}) for group in GROUPS},
    "cudnn_decode": _SEEN["cudnn_decode"],
    "fa3_fwd": _fitted("cudnn_fwd") | _PUBLISHED,
    "fa3_bwd": _fitted("cudnn_bwd"),
}
DEFAULTS = {f"{group}.{name}": value for group, values in _SETS.items() for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts attention: rows of a tile, rows of the blocks it walks over, and tiles that share an SM.

    ``as_dim`` is the head dim whose share of the tensor peak it reaches, where that is not its own.
    """

    rows: int
    keys: int
    resident: int
    as_dim: int = 0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One library's kernels by the largest head dim each serves."""

    tilings: Mapping[int, Tiling]


def _tilings(**sizes: str) -> Kernel:
    """Tilings written as d64="128 128 2": rows, keys and tiles on an SM for head dims to 64, and as which one."""
    return Kernel({int(name[1:]): Tiling(*map(int, size.split())) for name, size in sizes.items()})


KERNELS = {
    "fa2_fwd": _tilings(
        d32="128 128 2", d64="128 128 2", d96="128 64 2", d128="128 64 2", d192="128 64 1", d256="64 64 2"
    ),
    "fa2_split": _tilings(
        d32="64 256 2", d64="64 256 2", d96="64 128 2", d128="64 128 2", d192="64 64 1", d256="64 64 1"
    ),
    "fa2_bwd": _tilings(
        d32="128 128 1", d64="128 128 1", d96="128 64 1", d128="128 64 1", d192="64 64 1", d256="64 64 1"
    ),
    "fa3_fwd": _tilings(d64="192 128 1", d96="192 128 1", d128="128 128 1", d192="128 112 1", d256="128 80 1"),
    "fa3_bwd": _tilings(d64="128 128 1", d96="128 64 1", d128="128 80 1", d192="96 64 1", d256="80 64 1"),
    "cudnn_fwd": _tilings(d64="128 128 1", d128="128 128 1", d192="128 128 1", d256="128 128 1"),
    "cudnn_bwd": _tilings(d64="128 64 1", d128="128 64 1", d192="64 64 1", d256="64 64 1"),
    "cudnn_decode": _tilings(d64="16 128 4", d128="16 128 4", d256="16 128 2"),
    "efficient_fwd": _tilings(d64="64 64 4", d128="64 128 2", d65536="32 128 4"),
    "efficient_bwd": _tilings(d32="64 64 3", d64="64 64 3", d128="128 128 1", d65536="64 128 2"),
}
"""In backward a tile's rows are keys and it walks over queries. Kernel names and public sources tell the sizes."""
ROOMY = {("blackwell", "cudnn_bwd"): _tilings(d64="128 64 1", d128="128 64 1", d192="128 64 1 128", d256="64 64 1")}
"""Accumulators lie outside the registers there, so that heads of 192 need no smaller tiles: NVIDIA's own benchmark of
cuDNN 9.18 on a GB200 (cudnn-frontend v1.18.0) is as fast with queries of 192 and values of 128 as with 128."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention as the kernel sees it, head dims padded to the kernel's."""

    b: int
    h: int
    hkv: int
    s: int
    skv: int
    d: int
    dv: int
    causal: bool
    window: int
    mask: int
    true_width: int

    def scores(self) -> float:
        """Query-key pairs that the mask leaves, per head."""
        if not self.causal:
            return float(self.s) * min(self.skv, 2 * self.window if self.window else self.skv)
        reach = min(self.s, self.skv)
        pairs = self.s * max(self.skv - self.s, 0) + reach * (reach + 1) / 2
        if self.window and self.window < self.skv:
            pairs = min(pairs, float(self.s) * self.window)
        return float(pairs)


def problem_of(dims: Mapping[str, int], kernel: Kernel) -> Problem:
    d, dv = dims["d"], dims.get("dv", dims["d"])
    return Problem(
        b=dims["b"], h=dims["h"], hkv=dims["hkv"], s=dims["s"], skv=dims["skv"], d=padded(kernel, d),
        dv=padded(kernel, dv), causal=bool(dims.get("causal", 0)), window=dims.get("window", 0),
        mask=dims.get("mask", 0), true_width=d + dv,
    )  # fmt: skip


def padded(kernel: Kernel, d: int) -> int:
    """The head dim of the kernel that runs."""
    return next((size for size in kernel.tilings if d <= size < 65536), d)  # the head dim of kernels for all the rest


def tiling_of(kernel: Kernel, d: int) -> Tiling:
    return next((tiling for size, tiling in kernel.tilings.items() if d <= size), list(kernel.tilings.values())[-1])


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of one kernel: their number and the blocks that a mean and the longest one visit."""

    tiling: Tiling
    tiles: int
    mean_blocks: float
    max_blocks: float
    diagonal_blocks: float
    is_ragged: bool
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a library launches for a call: the main kernel, and bytes of the passes beside it.

    ``first_bytes`` are what the first wave of tiles must load before it computes and store after it.
    """

    group: str
    problem: Problem
    launch: Launch
    products: float
    read_bytes: float
    written_bytes: float
    first_bytes: float
    passes: tuple[float, ...] = ()
    strided_passes: tuple[float, ...] = ()
    splits: int = 1
    num_kernels: int = 1
    operand_bytes: float = 2.0


def launch_of(tiling: Tiling, p: Problem, rows: int, keys: int, heads: int) -> Launch:
    """Tiles over ``rows`` that walk over ``keys``; in backward these are keys and queries."""
    tall, blocks = -(-rows // tiling.rows), -(-keys // tiling.keys)
    is_ragged = rows % tiling.rows > 0 or keys % tiling.keys > 0
    if not p.causal:
        reach: float = min(blocks, 2 * p.window // tiling.keys + 2) if p.window else blocks
        return Launch(tiling, heads * tall, reach, reach, float(is_ragged), is_ragged, False)
    beyond = max(keys - rows, 0) / tiling.keys
    mean = min(_triangle(tall, tiling.rows / tiling.keys) / tall + beyond, blocks)
    reach = min(blocks, (p.window + tiling.rows) / tiling.keys + 1) if p.window else blocks
    diagonal = -(-tiling.rows // tiling.keys) + is_ragged
    return Launch(tiling, heads * tall, min(mean, reach), reach, min(diagonal, mean), is_ragged, True)


def _triangle(tall: int, ratio: float) -> float:
    """Blocks under a diagonal: of ``tall`` tiles, tile i visits (i + 1) * ratio blocks, rounded up."""
    if ratio >= 1:
        return ratio * tall * (tall + 1) / 2
    step = round(1 / ratio)
    full, rest = divmod(tall, step)
    return step * full * (full + 1) / 2 + rest * (full + 1)


def plan_of(dims: Mapping[str, int], library: str, phase: str, num_sms: int, size: float = 2.0, arch: str = "") -> Plan:
    """The launches of a call by one of PyTorch's own backends."""
    if phase == "bwd":
        kernel = ROOMY.get((arch, f"{library}_bwd"), KERNELS[f"{library}_bwd"])
        return _backward_plan(dims, library, kernel, num_sms, size)
    if library == "fa2":
        return _fa2_plan(dims, num_sms, size)
    if library == "cudnn" and dims["s"] <= DECODE_ROWS:
        return _cudnn_decode_plan(dims, num_sms, size)
    kernel = KERNELS[f"{library}_fwd"]
    p = problem_of(dims, kernel)
    launch = launch_of(tiling_of(kernel, dims["d"]), p, p.s, p.skv, p.b * p.h)
    plan = _forward(f"{library}_fwd", p, launch, num_sms, size, num_kernels=2 if library == "cudnn" else 1)
    if library == "efficient" and p.mask and p.skv % 8:  # the mask is copied into rows that start on 16 bytes
        mask = size * p.b * p.s * p.skv
        return replace(plan, passes=(mask,), strided_passes=(2 * mask,), num_kernels=3)
    return plan


def _fa2_plan(dims: Mapping[str, int], num_sms: int, size: float) -> Plan:
    """FlashAttention-2 puts the heads of a group in a decoding tile's rows, and splits keys when tiles are few."""
    decodes = dims["s"] <= DECODE_ROWS
    if dims["s"] == 1 and dims["h"] > dims["hkv"] and not dims.get("window"):
        dims = {**dims, "s": dims["h"] // dims["hkv"], "h": dims["hkv"], "causal": 0}
    split = tiling_of(KERNELS["fa2_split"], dims["d"])
    blocks = -(-dims["skv"] // split.keys)
    splits = num_splits(dims["b"] * dims["h"] * -(-dims["s"] // split.rows), num_sms, blocks)
    kernel = KERNELS["fa2_split" if splits > 1 else "fa2_fwd"]
    p = problem_of(dims, kernel)
    launch = launch_of(tiling_of(kernel, dims["d"]), p, p.s, p.skv, p.b * p.h)
    if splits == 1:
        return _forward("fa2_decode" if decodes else "fa2_fwd", p, launch, num_sms, size)
    each = float(-(-blocks // splits))
    seen = launch.mean_blocks / launch.max_blocks  # splits beyond the diagonal end at once
    launch = replace(launch, tiles=launch.tiles * splits, mean_blocks=each * seen, max_blocks=each)
    partial = 8.0 * splits * p.b * p.h * p.s * p.dv
    return _forward("fa2_split", p, launch, num_sms, size, passes=(partial,), splits=splits, num_kernels=2)


def _cudnn_decode_plan(dims: Mapping[str, int], num_sms: int, size: float) -> Plan:
    """cuDNN gives few queries a kernel of short tiles that splits the keys until every SM has a tile."""
    kernel = KERNELS["cudnn_decode"]
    p = problem_of({**dims, "causal": 0}, kernel)
    launch = launch_of(tiling_of(kernel, dims["d"]), p, p.s, p.skv, p.b * p.h)
    splits = int(max(1, min(num_sms // launch.tiles, launch.max_blocks)))
    each = float(-(-launch.max_blocks // splits))
    launch = replace(launch, tiles=launch.tiles * splits, mean_blocks=each, max_blocks=each)
    return _forward("cudnn_decode", p, launch, num_sms, size, splits=splits, num_kernels=2 if splits > 1 else 1)


def _forward(group: str, p: Problem, launch: Launch, num_sms: int, size: float, **more: Any) -> Plan:
    queries, values = size * p.b * p.h * p.s * p.true_width, size * p.b * p.hkv * p.true_width
    out = queries / 2
    first = min(1.0, num_sms * launch.tiling.resident / launch.tiles)
    read = queries - out + values * p.skv + size * p.b * p.s * p.skv * p.mask
    visited = min(p.skv, launch.tiling.keys * more.get("splits", 1))
    return Plan(group, p, launch, 1.0, read, out, first * (queries + values * visited), **more)


def _backward_plan(dims: Mapping[str, int], library: str, kernel: Kernel, num_sms: int, size: float) -> Plan:
    """Tiles own keys and walk over queries; passes make row sums, convert the gradient of q and sum grouped heads."""
    p, tiling = problem_of(dims, kernel), tiling_of(kernel, dims["d"])
    launch = launch_of(tiling, p, p.skv, p.s, p.b * p.h)
    queries, values = size * p.b * p.h * p.s * p.true_width, size * p.b * p.h * p.skv * p.true_width
    read = 2 * queries + values + size * p.b * p.s * p.skv * p.mask
    first = min(1.0, num_sms * tiling.resident / launch.tiles) * (2 * values + queries * min(1.0, tiling.keys / p.s))
    plan = Plan(f"{library}_bwd", p, launch, BACKWARD_PRODUCTS, read, values, first)
    wide = 4.0 * p.b * p.h * p.s * p.d
    if library == "efficient":
        return _efficient_backward(plan, wide)
    grouped = size * p.b * (p.h + p.hkv) * p.skv * p.true_width / 2
    sums = (grouped, grouped) if p.h != p.hkv else ()
    num_kernels = (4 if library == "cudnn" else 3) + len(sums)
    return replace(plan, passes=(2 * wide, 1.5 * wide), strided_passes=sums, num_kernels=num_kernels)


def _efficient_backward(plan: Plan, wide_bytes: float) -> Plan:
    """The memory-efficient kernel splits keys over tiles unless heads fill the device or gradients need staging."""
    p, launch = plan.problem, plan.launch
    heads, blocks = p.b * p.h, -(-p.skv // launch.tiling.rows)
    parts = 1 if heads >= 256 and blocks <= 2 else blocks
    if p.d > 128:
        parts = max(1, min(parts, 200 // heads))
    visits = launch.max_blocks * -(-blocks // parts)
    seen = launch.mean_blocks / launch.max_blocks
    launch = replace(launch, tiles=heads * parts, mean_blocks=visits * seen, max_blocks=visits)
    zeroes = blocks > 1 or p.d > 128
    return replace(plan, launch=launch, passes=(wide_bytes,) if zeroes else (), num_kernels=2 if zeroes else 1)


def plan_s(chip: Chip, coef: Coef, plan: Plan, peak: float, warm_frac: float = 0.0) -> tuple[float, float, float]:
    """Seconds of all kernels of a call, and the SM and DRAM time of the main one."""
    main_s, busy_s, dram_s = _main_s(chip, coef, plan, peak, warm_frac)
    for moved in plan.passes:
        main_s += _pass_s(chip, coef, moved, coef["pass_frac"])
    for moved in plan.strided_passes:
        main_s += _pass_s(chip, coef, moved, coef["strided_frac"])
    if plan.splits > 1:
        main_s += (coef["combine_cycles"] + coef["combine_split_cycles"] * plan.splits) / chip.clock_hz
    missed_s = (1 + len(plan.passes)) * coef["miss_cycles"] / chip.clock_hz
    return main_s - warm_frac * min(missed_s, 0.2 * main_s), busy_s, dram_s


def _main_s(chip: Chip, coef: Coef, plan: Plan, peak: float, warm_frac: float) -> tuple[float, float, float]:
    launch, p = plan.launch, plan.problem
    width = p.d + p.dv
    busy_s = loop_s(chip, coef, plan, peak / (chip.num_sms * chip.clock_hz))
    if launch.is_ragged and not launch.is_causal:
        busy_s *= 1 + coef["ragged_frac"]
    if p.true_width < width:
        busy_s *= 1 + coef["padded_frac"]
    dram_s = (plan.read_bytes * (1 - warm_frac) + plan.written_bytes) / (coef["dram_frac"] * chip.dram_bytes_per_s)
    long_s, short_s = max(busy_s, dram_s), min(busy_s, dram_s)
    both_s = long_s * (1 + (short_s / long_s) ** BLEND) ** (1 / BLEND)
    first_s = coef["exposed_frac"] * plan.first_bytes * (1 - 0.75 * warm_frac) / chip.dram_bytes_per_s
    return coef["launch_cycles"] / chip.clock_hz + both_s + first_s, busy_s, dram_s


def loop_s(chip: Chip, coef: Coef, plan: Plan, flops_per_clock: float) -> float:
    """Time the SMs need for all tiles, by what the kernel's matrix instructions reach of the operations per clock."""
    # 16-bit operations per clock and SM of warp-wide matrix instructions, all that kernels written for Ampere use
    warp_wide = 2560.0 * 2 / plan.operand_bytes
    if plan.group not in SYNC:
        return _waves_s(chip, coef, plan, flops_per_clock)
    if flops_per_clock < warp_wide:
        # Share of the SM time that remains where no faster instructions exist: FlashAttention-2's published A100
        # figures.
        return 0.83 * _waves_s(chip, coef, plan, flops_per_clock)
    return _waves_s(chip, coef, plan, warp_wide)


def _waves_s(chip: Chip, coef: Coef, plan: Plan, flops_per_clock: float) -> float:
    launch, tiling, width = plan.launch, plan.launch.tiling, plan.problem.d + plan.problem.dv
    reached = _tensor_frac(coef, 2 * tiling.as_dim or width)
    score = 2 * plan.products * width / (flops_per_clock * reached) + 1 / coef["exp_per_clock"]
    work = tiling.rows * tiling.keys * (score + plan.problem.mask / coef["mask_per_clock"])
    alone, lead = 1 / coef["alone_frac"], coef["start_cycles"] + coef["edge_cycles"] * width / 2
    extra = coef["mask_frac"] * launch.diagonal_blocks
    if launch.is_ragged and launch.is_causal:
        extra += coef["ragged_causal_frac"] * launch.diagonal_blocks
    full, rest = divmod(launch.tiles, chip.num_sms * tiling.resident)

    def tile(blocks: float, resident: int) -> float:
        start = lead + coef["share_cycles"] * resident
        return start + blocks * coef["block_cycles"] + (blocks + extra) * work * max(resident, alone)

    if not full:
        return tile(launch.max_blocks, -(-rest // chip.num_sms)) / chip.clock_hz
    busy = tile(launch.mean_blocks, tiling.resident)
    smooth = launch.tiles / (chip.num_sms * tiling.resident) * busy
    if launch.max_blocks > launch.mean_blocks:
        longest = tile(launch.max_blocks, tiling.resident)
        return max(longest, smooth + coef["uneven_frac"] * longest) / chip.clock_hz
    stepped = full * busy + (tile(launch.mean_blocks, -(-rest // chip.num_sms)) if rest else 0.0)
    return (smooth + coef["tail_frac"] * (stepped - smooth)) / chip.clock_hz


def _tensor_frac(coef: Coef, width: int) -> float:
    return coef[next((f"tensor_frac_{d}" for d in (64, 96, 128) if width <= 2 * d), "tensor_frac_256")]


def _pass_s(chip: Chip, coef: Coef, moved_bytes: float, frac: float) -> float:
    return coef["pass_cycles"] / chip.clock_hz + moved_bytes / (frac * chip.dram_bytes_per_s)


@lru_cache(maxsize=4096)
def num_splits(tiles: int, num_sms: int, blocks: int) -> int:
    """FlashAttention-2's choice: the fewest splits whose waves are 85% as full as the fullest."""
    slots = 2 * num_sms
    if tiles >= 0.8 * slots:
        return 1
    fills = {}
    for splits in range(1, min(128, slots, blocks) + 1):  # max splits
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1)):
            waves = tiles * splits / slots
            fills[splits] = waves / math.ceil(waves)
    best = max(fills.values())
    return next(splits for splits, fill in fills.items() if fill >= 0.85 * best)


PLANNED = frozenset({"fa2", "cudnn", "efficient", "fa3"})
"""Libraries whose launches this module plans; others are priced by the tile model of ``attention``."""


@family("attention", "attention", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    if min(dims[name] for name in ("b", "h", "s", "skv")) < 1:
        return Time(0.0, 0.0, "latency", 0)
    if call.library not in PLANNED or (call.library == "fa3" and call.phase == "fwd" and dims["s"] <= DECODE_ROWS):
        return _served(call, chip, warm_frac)
    plan = plan_of(dims, call.library, call.phase, chip.num_sms, ITEMSIZE[call.dtype], chip.arch)
    dtype = matrix_dtype(call, chip)
    if dtype == "tf32":  # three products of narrower operands make one of full precision
        plan = replace(plan, products=3 * plan.products, operand_bytes=4.0)
    peak = chip.peak_flops_per_s(dtype)
    busy_s, sm_s, dram_s = plan_s(chip, group_coef(coef, plan.group), plan, peak, warm_frac)
    floor_s = _floor_s(call, chip, warm_frac, peak)
    bound = "memory" if dram_s > sm_s else "compute" if 2 * sm_s > busy_s else "latency"
    return Time(max(busy_s, floor_s), floor_s, bound, plan.num_kernels)


def _served(call: Call, chip: Chip, warm_frac: float) -> Time:
    """Kernels of serving frameworks, by the tile model and its own coefficients for the architecture."""
    dims = call.dims()
    library = "decode" if call.library == "fa3" and dims["s"] <= DECODE_ROWS else call.library
    found = attention_timing(
        chip, {}, b=dims["b"], h=dims["h"], hkv=dims["hkv"], s=dims["s"], skv=dims["skv"], d=dims["d"],
        dv=dims.get("dv", dims["d"]), causal=dims.get("causal", 0), window=dims.get("window", 0), phase=call.phase,
        library=library, dtype=matrix_dtype(call, chip), warm_frac=warm_frac,
    )  # fmt: skip
    return Time(only(found.expected_s, chip.clock_hz), only(found.floor_s, chip.clock_hz), bound_of(found), 1)


def _floor_s(call: Call, chip: Chip, warm_frac: float, peak: float) -> float:
    """The products of the scores that count at the tensor peak, or each input once from DRAM."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    p = problem_of(dims, Kernel({}))
    products = BACKWARD_PRODUCTS if call.phase == "bwd" else 1.0
    flops = 2 * products * p.true_width * p.b * p.h * p.scores()
    moved = size * p.b * (p.h * p.s * p.d + p.hkv * min(p.skv, p.window + p.s if p.window else p.skv) * p.true_width)
    return max(flops / peak, moved * (1 - warm_frac) / chip.dram_bytes_per_s)


def matrix_dtype(call: Call, chip: Chip) -> str:
    wanted = "tf32" if call.dtype == "fp32" else call.dtype  # fp32 kernels of this kind use the narrower matrix mode
    return wanted if wanted in chip.tensor_flops_per_s else "fp32"


@selection
def group_coef(coef: Coef, group: str) -> dict[str, float]:
    """The coefficients of one group of kernels, under their own names."""
    return BASE | {k.partition(".")[2]: v for k, v in coef.items() if k.startswith(group + ".")}
