"""How long fused attention takes: query tiles that stream over key blocks, or, in decoding, keys split over the SMs.

A query tile of ``rows`` x d visits the key blocks its mask leaves, and each visit costs the two products at the tensor
rate plus the exponentials at the special-function rate, which overlap little. Starting and finishing a tile costs a
latency and its rows' way through shared memory. Tiles make waves over the SMs; causal tiles are unequal, and taking
long ones first hides part of the last wave. With fewer tiles than SMs, libraries that can split the keys do so and
combine. Decoding has one tile per key-value head and is a race between DRAM, each SM's load rate and tile latency.
Libraries that pack grouped queries put the heads of a group in the rows of one tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ridgeline.cost.time.chip import Chip, Floats, Timing, columns, related_archs, timing
from ridgeline.cost.time.gemm.tiles import itemsize, overlapped, throttled
from ridgeline.errors import CostError, nearest

Flags = NDArray[np.bool_]
SM_PORT_BYTES = 64  # bytes an SM takes from L2 in a clock
BACKWARD_PRODUCTS = 2.5  # five products for the forward's two
MAX_SPLITS = 128

COEFFICIENTS = {
    "launch_s": "time of the call beyond its tiles, all its kernels together",
    "fanout_s": "what the launch takes longer when it reaches every SM instead of one",
    "tile_s": "latency of a tile: first load to last store, apart from its key blocks",
    "row_s": "time a tile spends per query row outside the key loop",
    "pack_frac": "share of 64 B/clock at which packed grouped queries are gathered and scattered",
    "tensor_frac": "share of the datasheet tensor peak the two products reach",
    "exp_per_clock": "exponentials an SM adds to the loop per clock",
    "serial_frac": "share of the shorter of products and exponentials that the longer does not hide",
    "tail_frac": "share of the last, partial wave that is paid for",
    "uneven_frac": "share of the longest tile's excess over the average that outlasts the other SMs",
    "dram_frac": "share of the datasheet DRAM bandwidth",
    "exposed_frac": "share of the shorter of SM time and DRAM time that the longer does not hide",
    "split_s": "fixed cost of combining keys split over SMs",
    "split_each_s": "cost of combining per split",
    "load_frac": "share of 64 B/clock an SM reaches when it streams keys and values",
    "l2_frac": "share of the device file's L2 bandwidth for keys and values already in L2",
    "power_frac": "power wanted at full tensor rate, over the power cap",
    "power_tau_s": "kernel duration at which half of the power cap's slowdown has set in; 0 is the steady state",
}

GENERIC = {
    "launch_s": 5.5e-6, "fanout_s": 1e-6, "tile_s": 2.6e-6, "row_s": 5e-9, "pack_frac": 2.0, "tensor_frac": 0.95,
    "exp_per_clock": 17.0, "serial_frac": 0.9, "tail_frac": 0.75, "uneven_frac": 0.3,
    "dram_frac": 0.9, "exposed_frac": 0.2, "split_s": 4e-6,
    "split_each_s": 5e-8, "load_frac": 0.5, "l2_frac": 0.6, "power_frac": 1.2, "power_tau_s": 300e-6,
}  # fmt: skip
_TILED = (
    "launch_s", "tile_s", "row_s", "pack_frac", "tensor_frac", "exp_per_clock", "serial_frac", "tail_frac",
    "uneven_frac", "dram_frac", "exposed_frac", "split_s",
)  # fmt: skip
_STREAMED = (
    "launch_s", "fanout_s", "tile_s", "row_s", "dram_frac", "exposed_frac", "split_s", "split_each_s", "load_frac",
    "l2_frac",
)  # fmt: skip
# One set per architecture and library, fitted by lab.fit.published_kernels --defaults to serving frameworks' kernels;
# generic is one set for an H200, a B200, an A100 and an L40S together. Sets with a phase are PyTorch's kernels on an
# H200, from data/recordings/h200.
_TILED_SETS = {
    "hopper/fa2/fwd": (3.56e-6, 1.93e-6, 2.49e-9, 2, 0.421, 18.8, 0.901, 0.899, 3.19, 0.463, 0.113, 6.49e-6),
    "hopper/fa2/bwd": (2.23e-7, 1.11e-5, 5.31e-10, 2, 0.33, 22.5, 0.899, 0.712, 1.14, 0.439, 0.164, 0.000297),
    "hopper/cudnn/fwd": (3.56e-6, 1.17e-6, 3.81e-9, 2, 1.03, 14.8, 0.9, 1.01, 2.19, 0.841, 0.2, 4e-6),
    "hopper/cudnn/bwd": (6.09e-6, 4.08e-6, 4.97e-9, 2, 0.791, 7.4, 0.901, 0.983, 0.947, 0.817, 0.155, 4e-6),
    "hopper/efficient/fwd": (4.7e-6, 1.1e-6, 8.08e-9, 2, 0.157, 3.2, 0.897, 0.597, 4.88, 1.81, 0.159, 4e-6),
    "hopper/efficient/bwd": (1.01e-5, 4.16e-6, 8e-9, 2, 0.136, 2.14, 0.903, 0.476, 24.2, 2.1, 0.151, 4e-6),
    "hopper/fa3": (6e-6, 3.09e-6, 5.17e-9, 1.19, 0.988, 14.8, 0.836, 0.293, 1.11, 0.849, 0.291, 4.52e-6),
    "blackwell/trtllm": (6.08e-6, 8.89e-7, 2.31e-9, 2, 0.964, 12, 0.416, 1.06, 1.39, 0.451, 0.5, 4e-6),
    "ampere/flashinfer": (8.32e-6, 1.33e-6, 3.75e-9, 2.05, 0.757, 19.2, 0.883, 0.763, 2.65, 0.641, 0.12, 1.67e-5),
    "ada/fa2_paged": (1.4e-6, 1.22e-6, 6.54e-9, 2, 0.612, 11.8, 1.38, 0.78, 1.11, 0.79, 0.175, 1.14e-5),
    "generic/fa3": (5.46e-6, 2.27e-6, 2.4e-10, 0.366, 0.687, 12.1, 0.224, 0.378, 2.25, 1.34, 0.574, 1.86e-5),
}  # fmt: skip
_STREAMED_SETS = {
    "hopper/decode": (7.42e-6, 8.93e-7, 1.45e-6, 1.64e-8, 0.916, 0.193, 2.01e-6, 5.17e-8, 0.42, 0.551),
    "blackwell/trtllm_decode": (7.94e-6, 8.82e-7, 6.48e-7, 1.17e-8, 0.975, 0.299, 7.58e-7, 8.58e-8, 0.745, 2.9),
    "ampere/decode": (1.04e-5, 7.1e-7, 4.78e-9, 6.97e-11, 0.616, 0.494, 9.17e-6, 6.46e-8, 0.184, 0.166),
    "ada/fa2_decode": (4.74e-6, 9.74e-7, 1.76e-6, 1.46e-10, 0.8, 0.0142, 3.6e-6, 1.45e-7, 0.164, 0.435),
    "generic/decode": (7.31e-6, 1.13e-6, 3.82e-7, 3.77e-8, 0.828, 0.0464, 1.38e-6, 8.98e-8, 0.506, 0.438),
}  # fmt: skip
DEFAULTS: dict[str, dict[str, float]] = {
    key: {**GENERIC, **dict(zip(names, values, strict=True))}
    for names, sets in ((_TILED, _TILED_SETS), (_STREAMED, _STREAMED_SETS))
    for key, values in sets.items()
}


@dataclass(frozen=True, slots=True)
class Library:
    """How a library cuts attention: (query rows, key rows) of a tile by largest head dim, and what it can do."""

    tiles: Mapping[int, tuple[int, int]]
    packs: bool = False
    splits: bool = False
    short_rows: int = 0  # tile height for so few rows that a tall tile would be mostly empty
    only_groups: bool = False  # packs and splits grouped queries without a window only
    streams: bool = False  # made for few queries: keys are streamed past them


LIBRARIES = {
    "fa2": Library({64: (128, 128), 128: (128, 64), 256: (64, 64)}, splits=True),
    "fa2_paged": Library({64: (64, 256), 128: (64, 128), 256: (64, 64)}, splits=True),
    "fa3": Library(
        {64: (192, 128), 128: (128, 128), 192: (128, 112), 256: (128, 80)}, packs=True, splits=True, short_rows=64
    ),
    "flashinfer": Library({64: (128, 128), 128: (128, 64), 256: (64, 64)}, packs=True, splits=True),
    "trtllm": Library({256: (256, 128)}),
    "cudnn": Library({256: (128, 128)}),
    "efficient": Library({64: (64, 64), 256: (64, 64)}),
    "decode": Library({128: (64, 128), 256: (64, 64)}, packs=True, splits=True, streams=True),
    "fa2_decode": Library(
        {64: (64, 256), 128: (64, 128), 256: (64, 64)}, packs=True, splits=True, only_groups=True, streams=True
    ),
    "trtllm_decode": Library({128: (32, 128), 256: (32, 64)}, packs=True, splits=True, streams=True),
}  # fmt: skip


def library_named(name: str) -> Library:
    if name not in LIBRARIES:
        raise CostError(
            f"no attention kernel {name!r}{nearest(name, LIBRARIES)}; unfused attention is two products and softmax"
        )
    return LIBRARIES[name]


def defaults(arch: str, library: str, phase: str = "fwd") -> Mapping[str, float]:
    """Coefficients for a device nobody measured: the same kernel on its kin, else another of the same manner."""
    others = [name for name, other in LIBRARIES.items() if other.streams == library_named(library).streams]
    for name in related_archs(arch):
        for other in (library, *others):
            for key in (f"{name}/{other}/{phase}", f"{name}/{other}"):
                if key in DEFAULTS:
                    return DEFAULTS[key]
    return GENERIC


@dataclass(frozen=True, slots=True)
class _Problem:
    """Attention of many shapes at once; ``window`` is the number of keys a query sees at most."""

    b: Floats
    h: Floats
    hkv: Floats
    s: Floats
    skv: Floats
    d: Floats
    dv: Floats
    window: Floats
    causal: Floats
    is_local: Flags
    warm: Floats

    @property
    def span(self) -> Floats:
        """Keys beyond the window a typical query does not see, as the share of queries that the window cuts."""
        return np.clip((self.skv - self.window) / self.s, 0, 1) * self.causal

    def seen(self, rows: Floats) -> Floats:
        """Mean number of keys between the first and last key that ``rows`` neighboring queries see together."""
        early = (np.maximum(self.skv - self.s, 0) + np.minimum(self.window, self.skv) + rows) / 2
        late = np.minimum(self.window + rows, self.skv)
        masked = (1 - self.span) * np.minimum(early, self.skv) + self.span * late
        return np.asarray(np.where(self.causal > 0, masked, np.minimum(2 * self.window, self.skv)))

    @property
    def flops(self) -> Floats:
        return 2 * self.b * self.h * self.s * self.seen(np.ones_like(self.s)) * (self.d + self.dv)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tiles of a problem: their size, number, and the key blocks an average and the longest one visit."""

    rows: Floats
    keys: Floats
    count: Floats
    mean_blocks: Floats
    max_blocks: Floats
    is_packed: Flags


def _sides(library: Library, d: Floats) -> tuple[Floats, Floats]:
    limits = sorted(library.tiles)
    index = np.minimum(np.searchsorted(limits, d), len(limits) - 1)
    table = np.array([library.tiles[limit] for limit in limits], dtype=np.float64)
    return table[index, 0], table[index, 1]


def _tiled(problem: _Problem, library: Library) -> _Tiles:
    group = problem.h / problem.hkv if library.packs else np.ones_like(problem.h)
    rows, keys = _sides(library, np.maximum(problem.d, problem.dv))
    if library.short_rows:
        rows = np.where(problem.s * group <= library.short_rows, library.short_rows, rows)
    tall = np.ceil(problem.s * group / rows)
    queries = np.minimum(rows / group, problem.s)
    ragged = 1 - np.gcd(np.maximum(rows / group, 1).astype(np.int64), keys.astype(np.int64)) / keys
    seen = problem.seen(queries)
    longest = np.ceil(np.minimum((problem.window + queries) / keys + ragged, problem.skv / keys))
    mean = seen / keys + ragged * (0.5 + 0.5 * problem.span) * problem.causal
    mean = np.clip(mean, 1, longest)
    return _Tiles(rows, keys, problem.b * (problem.h / group) * tall, mean, longest, group > 1)


def _waves(count: Floats, num_sms: int, tail_frac: Floats) -> Floats:
    full = count / num_sms
    return np.asarray(full + tail_frac * (np.ceil(full) - full))


def _tile_loop_s(
    chip: Chip, coef: Mapping[str, float], problem: _Problem, library: Library, peak: float, products: float
) -> Floats:
    """Time the SMs need for all query tiles."""
    tiles = _tiled(problem, library)
    width = problem.d + problem.dv
    product_s = 2 * products * width * chip.num_sms / (peak * coef["tensor_frac"])
    exp_s = 1 / (coef["exp_per_clock"] * chip.clock_hz)
    score_s = np.maximum(product_s, exp_s) + coef["serial_frac"] * np.minimum(product_s, exp_s)
    block_s = tiles.rows * tiles.keys * score_s
    packed_s = width * 2 / (coef["pack_frac"] * SM_PORT_BYTES * chip.clock_hz) * tiles.is_packed
    start_s = coef["tile_s"] + tiles.rows * (coef["row_s"] + packed_s)
    longest_s = start_s + tiles.max_blocks * block_s
    tail_frac = np.maximum(problem.span, coef["tail_frac"])
    many_s = _waves(tiles.count, chip.num_sms, tail_frac) * (start_s + tiles.mean_blocks * block_s)
    sorted_frac = chip.num_sms / (chip.num_sms + tiles.count / problem.b)
    many_s += coef["uneven_frac"] * sorted_frac * (tiles.max_blocks - tiles.mean_blocks) * block_s
    loop_s = np.where(tiles.count <= chip.num_sms, longest_s, np.maximum(many_s, longest_s))
    if not library.splits:
        return np.asarray(loop_s)
    parts = np.clip(np.floor(chip.num_sms / tiles.count), 1, tiles.max_blocks)
    split_s = start_s + np.ceil(tiles.max_blocks / parts) * block_s + coef["split_s"]
    return np.asarray(np.where(parts > 1, np.minimum(loop_s, split_s), loop_s))


def _bytes(problem: _Problem, dtype: str, kv_dtype: str, phase: str) -> tuple[Floats, Floats]:
    """Query-side and key-side bytes that cross DRAM once; backward also reads the output and writes gradients."""
    queries = problem.b * problem.s * problem.h * (problem.d + problem.dv) * itemsize(dtype)
    reach = np.minimum(problem.skv, problem.window + problem.s)
    keys = problem.b * reach * problem.hkv * (problem.d + problem.dv) * itemsize(kv_dtype)
    if phase == "bwd":
        return queries * 2 + problem.b * problem.s * problem.h * problem.d * 8, keys * 2
    return queries, keys


def _stream(
    chip: Chip, coef: Mapping[str, float], problem: _Problem, library: Library, kv_size: float
) -> tuple[Floats, Floats]:
    """Decoding: SM time of the tiles' streams and their latency, with the split of keys that is fastest."""
    rows, keys = _sides(library, problem.d)
    blocks = np.ceil(np.minimum(problem.skv, problem.window) / keys) + (problem.skv > problem.window)
    group = problem.h / problem.hkv
    packs = (group > 1) & ~problem.is_local if library.only_groups else np.ones_like(group, dtype=bool)
    count = problem.b * np.where(packs, problem.hkv * np.ceil(problem.s * group / rows), problem.h)
    block_s = keys * (problem.d + problem.dv) * (kv_size / (coef["load_frac"] * SM_PORT_BYTES * chip.clock_hz))
    start_s = coef["tile_s"] + rows * coef["row_s"] * (problem.d / 128)
    waves = np.ceil(count / chip.num_sms)
    parts = np.clip(np.floor(chip.num_sms / count), 1, np.minimum(blocks, MAX_SPLITS))
    split_s = coef["split_s"] + parts * coef["split_each_s"] + np.ceil(blocks / parts) * block_s
    is_split = packs & (parts > 1) & (split_s < blocks * block_s)
    return (
        np.asarray(np.where(is_split, np.ceil(blocks / parts), waves * blocks) * block_s),
        np.asarray(np.where(is_split, start_s + coef["split_s"] + parts * coef["split_each_s"], waves * start_s)),
    )


def attention_timing(
    chip: Chip,
    coef: Mapping[str, float],
    *,
    b: ArrayLike,
    h: ArrayLike,
    hkv: ArrayLike,
    s: ArrayLike,
    skv: ArrayLike,
    d: ArrayLike,
    dv: ArrayLike | None = None,
    causal: ArrayLike = True,
    window: ArrayLike = 0,
    phase: str = "fwd",
    library: str = "fa3",
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    warm_frac: ArrayLike = 0.0,
) -> Timing:
    """Times of fused attention; ``window`` 0 means none, ``warm_frac`` is the share of input bytes already in L2."""
    if phase not in ("fwd", "bwd"):
        raise CostError(f"attention has the phases 'fwd' and 'bwd', not {phase!r}")
    coef = {**defaults(chip.arch, library, phase), **coef}
    problem = _problem(b, h, hkv, s, skv, d, d if dv is None else dv, window, causal, warm_frac)
    query_bytes, kv_bytes = _bytes(problem, dtype, kv_dtype or dtype, phase)
    chip = chip.along(1)
    peak = chip.peak_flops_per_s(dtype)
    products = BACKWARD_PRODUCTS if phase == "bwd" else 1.0
    cold_s = (query_bytes + kv_bytes) * (1 - problem.warm) / (coef["dram_frac"] * chip.dram_bytes_per_s)
    if library_named(library).streams:
        loop_s, tiles_s = _stream(chip, coef, problem, library_named(library), itemsize(kv_dtype or dtype))
        cold_s = cold_s + kv_bytes * problem.warm / (coef["l2_frac"] * chip.l2_bytes_per_s)
        spread = np.minimum(problem.b * problem.hkv / chip.num_sms, 1)
        latency_s = coef["launch_s"] + coef["fanout_s"] * spread + tiles_s
    else:
        loop_s = _tile_loop_s(chip, coef, problem, library_named(library), peak, products)
        latency_s = np.full_like(loop_s, coef["launch_s"])
    busy_s = latency_s + overlapped(loop_s, cold_s, coef["exposed_frac"])
    flops = problem.flops * products
    floor_s = np.maximum(flops / peak, kv_bytes * (1 - problem.warm) / chip.dram_bytes_per_s)
    return timing(throttled(coef, busy_s, flops, peak), floor_s, loop_s, cold_s, latency_s)


def _problem(*values: ArrayLike) -> _Problem:
    b, h, hkv, s, skv, d, dv, window, causal, warm = columns(*values)
    is_local = window > 0
    return _Problem(b, h, hkv, s, skv, d, dv, np.where(is_local, window, skv), causal, is_local, warm)
