"""How long a matrix product takes: tiles in waves over the SMs, fed from L2 and DRAM, by the library that really runs.

A library picks a CTA tile and a split of k from a menu. For every entry of the menu the model works out

* the tiles, the waves they make on ``num_sms`` SMs and the padding they waste;
* the main loop of one tile: the slower of tensor cores, the L2 crossbar (operands once per tile, half of the larger one
  when a cluster multicasts it) and the latency of the chain of k steps; then its epilogue;
* DRAM traffic: what is not in L2 already, operands read again when a wave's neighbors no longer find them in L2, and
  the part of the output that the write-back cache cannot hold;
* the second pass that adds the partial results when k is split.

The entry with the least time is what the library is taken to run. A long product then meets the chip's power cap: the
clock falls with the share of the tensor peak that is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ridgeline.cost.time.chip import Chip, Floats, Timing, columns, related_archs, timing
from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import CostError, nearest

K_STEP = 64  # elements of k per pipeline step
GRAIN = 8  # a flexible tile side shrinks to the next multiple of this
MAX_TILE = 128 * 256  # accumulators of a CTA
REDUCTION_L2_FRAC = 0.8  # share of L2 bandwidth the split-k reduction reaches
WARM_EDGE = 0.5  # relative width of the fall from cached to uncached as a footprint outgrows its share of L2
SCALED_BYTES = {"fp4": 0.5625}  # a nibble and its share of the block scale

COEFFICIENTS = {
    "launch_s": "time from the first instruction of the kernel to the last, when there is nothing to do",
    "fanout_s": "what the launch takes longer when it reaches every SM instead of one",
    "gap_s": "time an SM loses between two tiles",
    "tensor_frac": "share of the datasheet tensor peak a main loop reaches while the clock is not capped",
    "l2_frac": "share of the device file's L2 bandwidth that operand loads reach",
    "dram_frac": "share of the datasheet DRAM bandwidth",
    "ramp_s": "what DRAM loses until it streams at that share, in full for a long kernel",
    "ramp_bytes": "traffic at which half of it has been lost",
    "kstep_s": "least time of one 64-element step along k with operands in L2: latency over pipeline depth",
    "kstep_cold_s": "what the step takes longer when operands come from DRAM",
    "epilogue_frac": "share of 64 B/clock at which an SM writes its finished tile",
    "splitk_s": "fixed cost of adding up split-k partial results",
    "exposed_frac": "share of the shorter of SM time and DRAM time that the longer does not hide",
    "power_frac": "power wanted at full tensor rate, over the power cap",
    "power_tau_s": "kernel duration at which half of the power cap's slowdown has set in; 0 is the steady state",
    "writeback_frac": "share of L2 that holds output back from DRAM",
    "unaligned_frac": "tensor rate when rows are not 16-byte aligned, relative to aligned",
}

_SHARED = {"unaligned_frac": 0.5, "ramp_s": 1e-9, "ramp_bytes": 5e7}
_FITTED = (
    "launch_s", "fanout_s", "gap_s", "tensor_frac", "l2_frac", "dram_frac", "kstep_s", "kstep_cold_s", "epilogue_frac",
    "splitk_s", "exposed_frac", "power_frac", "power_tau_s", "writeback_frac",
)  # fmt: skip
# One set per architecture and library, fitted by lab.fit.published_kernels --defaults to short bursts with warm caches;
# generic is one set for an H200, a B200, an A100 and an L40S together.
_SETS = {
    "hopper/cublas": (
        2.45e-6, 5.21e-7, 3.13e-7, 0.935, 0.997, 0.872, 9.13e-8,
        2.22e-8, 0.352, 2.64e-6, 0.297, 1.41, 0.000313, 0.13,
    ),
    "hopper/cutlass": (
        2.47e-6, 9.4e-7, 9.58e-7, 0.867, 0.857, 0.814, 4.16e-8,
        1.08e-8, 4.01, 2.7e-6, 0.324, 5.44, 0.0195, 0.345,
    ),
    "blackwell/cublas": (
        1.8e-6, 1.22e-6, 1.2e-7, 0.9, 0.883, 0.823, 7.74e-8,
        2.06e-8, 0.836, 3.1e-6, 0.431, 2.02, 0.000315, 0.372,
    ),
    "blackwell/cutlass": (
        8.66e-7, 4.18e-7, 3.97e-7, 1.17, 1.7, 0.817, 3.93e-8,
        9.05e-9, 0.284, 2.7e-6, 0.466, 1.75, 1.12e-5, 0.174,
    ),
    "ampere/cublas": (
        3.26e-6, 9.44e-8, 9.81e-7, 0.925, 0.49, 0.733, 3.23e-7,
        1.22e-8, 0.198, 2.44e-6, 0.186, 1.42, 0.000895, 0.0713,
    ),
    "ada/cublas": (
        1.73e-6, 3.59e-7, 1.81e-8, 0.847, 0.695, 0.788, 2.71e-7,
        5.92e-9, 0.125, 1.98e-6, 0.252, 1.81, 9.43e-5, 0.515,
    ),
    "ada/cutlass": (
        1.98e-6, 1.73e-6, 7.27e-6, 1.07, 0.529, 0.747, 7.27e-8,
        1.07e-8, 0.0543, 2.7e-6, 0.955, 2.1, 3.92e-5, 0.0161,
    ),
    "generic/cublas": (
        2.25e-6, 1.32e-6, 6.54e-7, 0.822, 0.809, 0.781, 8.5e-8,
        6.95e-9, 5.16, 2.59e-6, 0.364, 1.4, 0.000602, 0.145,
    ),
    "generic/cutlass": (
        2.06e-6, 4.31e-7, 5.65e-7, 0.935, 1.63, 0.697, 4.43e-8,
        1.59e-9, 0.665, 2.7e-6, 0.531, 2.76, 0.000238, 0.00795,
    ),
}  # fmt: skip
DEFAULTS: dict[str, dict[str, float]] = {
    key: {**_SHARED, **dict(zip(_FITTED, values, strict=True))} for key, values in _SETS.items()
}


@dataclass(frozen=True, slots=True)
class Menu:
    """The tiles a library chooses from, and how often it splits k: every tile in every split.

    Arrays are [problem, split, tile], of length one where they say the same of all; a tile is only for
    ``min_m < m <= max_m``.
    """

    rows: Floats
    cols: Floats
    rows_flex: Floats
    cols_flex: Floats
    splits: Floats
    min_m: Floats
    max_m: Floats
    is_gated: bool
    multicast: float


def _menu_of(tiles: list[tuple[float, ...]], splits: tuple[int, ...], multicast: float) -> Menu:
    table = np.array(tiles, dtype=np.float64)
    gated = bool((table[:, 4] > 0).any() or np.isfinite(table[:, 5]).any())
    rows, cols, rows_flex, cols_flex, min_m, max_m = (np.ascontiguousarray(table[:, i])[None, None] for i in range(6))
    counts = np.array(splits, dtype=np.float64)[None, :, None]
    return Menu(rows, cols, rows_flex, cols_flex, counts, min_m, max_m, gated, multicast)


SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)


def _flexible_menu() -> Menu:
    """nvjet kernels of cuBLAS on Hopper and Blackwell: one side 64, 128 or 256, the other any multiple of 8."""
    widths = (16, 32, 64, 96, 128, 160, 192, 256)
    pairs = [(side, width) for side in (64, 128, 256) for width in widths if side * width <= MAX_TILE]
    tiles = [(s, w, 0, 1) for s, w in pairs] + [(w, s, 1, 0) for s, w in pairs]
    return _menu_of([(*tile, 0, np.inf) for tile in tiles], SPLITS, multicast=2)


def _fixed_menu() -> Menu:
    """Tiles of powers of two, the cuBLAS kernels before Hopper."""
    sides = (16, 32, 64, 128, 256)
    tiles = [(a, b, 0, 0) for a in sides for b in sides if a * b <= MAX_TILE and max(a, b) >= 64]
    return _menu_of([(*tile, 0, np.inf) for tile in tiles], SPLITS, multicast=1)


def _cutlass_menu() -> Menu:
    """Scaled products of CUTLASS as serving frameworks instantiate them: the tile follows m, k is never split."""
    gates = [(16, 64, 0, 16), (64, 64, 16, 64), (64, 128, 64, 128), (128, 128, 128, np.inf), (256, 128, 8191, np.inf)]
    return _menu_of([(rows, cols, 0, 0, low, high) for rows, cols, low, high in gates], (1,), multicast=2)


LIBRARIES = ("cublas", "cutlass")


@lru_cache(maxsize=16)
def menu(arch: str, library: str) -> Menu:
    """What ``library`` chooses from on ``arch``."""
    if library == "cutlass":
        return _cutlass_menu()
    if library != "cublas":
        raise CostError(f"no tile menu for library {library!r}{nearest(library, LIBRARIES)}")
    return _flexible_menu() if arch in ("hopper", "blackwell") else _fixed_menu()


def defaults(arch: str, library: str) -> Mapping[str, float]:
    """Coefficients for a device nobody measured: those of its architecture, else the ones all devices share."""
    for name in related_archs(arch):
        if f"{name}/{library}" in DEFAULTS:
            return DEFAULTS[f"{name}/{library}"]
    raise CostError(f"no GEMM coefficients for library {library!r}{nearest(library, LIBRARIES)}")


def _shrunk(size: Floats, count: Floats, side: Floats, flex: Floats) -> Floats:
    """The tile side once a flexible kernel has fitted it to the problem."""
    fitted = np.ceil(size / count / GRAIN) * GRAIN
    return np.asarray(side + flex * (fitted - side))


def _loop_s(chip: Chip, coef: Mapping[str, float], menu: Menu, tiling: _Tiling, peak: float, warm: Floats) -> Floats:
    """Time of the SMs: full waves, then the last one, whose fewer CTAs share the crossbar."""
    tm, tn, kc = tiling.rows, tiling.cols, tiling.k_per_cta
    chain = kc * ((coef["kstep_s"] + coef["kstep_cold_s"] * (1 - warm)) / K_STEP)
    area = tm * tn
    own = np.maximum(area * kc * (2 * chip.num_sms / peak), chain)
    shared = (np.maximum(tm, tn) / menu.multicast + np.minimum(tm, tn)) * kc
    shared = shared * (tiling.in_bytes / (coef["l2_frac"] * chip.l2_bytes_per_s))
    turns = tiling.ctas / chip.num_sms
    full = np.floor(turns)
    waves = np.ceil(turns)
    tail = np.maximum(own, shared * (tiling.ctas - full * chip.num_sms)) * (waves - full)  # one where it is not full
    loop = np.maximum(own, shared * chip.num_sms) * full + tail
    store = area * (tiling.out_bytes / (coef["epilogue_frac"] * 64 * chip.clock_hz))
    spread = np.minimum(tiling.ctas, chip.num_sms) * (coef["fanout_s"] / chip.num_sms) - coef["gap_s"]
    return np.asarray(loop + waves * (store + coef["gap_s"]) + spread)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Problems cut by every tile and split of a menu."""

    rows: Floats
    cols: Floats
    num_rows: Floats
    num_cols: Floats
    ctas: Floats
    k_per_cta: Floats
    in_bytes: float
    out_bytes: float


def _tile(b: Floats, m: Floats, n: Floats, k: Floats, menu: Menu, in_bytes: float, out_bytes: float) -> _Tiling:
    num_rows, num_cols = np.ceil(m / menu.rows), np.ceil(n / menu.cols)
    rows = _shrunk(m, num_rows, menu.rows, menu.rows_flex)
    cols = _shrunk(n, num_cols, menu.cols, menu.cols_flex)
    k_per_cta = np.ceil(k / (menu.splits * K_STEP)) * K_STEP
    ctas = b * num_rows * num_cols * menu.splits
    return _Tiling(rows, cols, num_rows, num_cols, ctas, k_per_cta, in_bytes, out_bytes)


def _reread_bytes(chip: Chip, tiling: _Tiling, b: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
    """Operand bytes fetched again because the smaller operand does not stay in L2 between waves."""
    small = np.minimum(m, n) * k * tiling.in_bytes
    missed = np.maximum(1 - chip.l2_bytes / small, 0)
    if not missed.any():
        return np.zeros_like(small)
    high = np.minimum(tiling.num_rows, np.sqrt(chip.num_sms * tiling.cols / tiling.rows))
    wave = high * tiling.rows + np.minimum(chip.num_sms / high, tiling.num_cols) * tiling.cols
    fetched = tiling.ctas / chip.num_sms * wave * tiling.k_per_cta
    return np.asarray(np.maximum(fetched - b * (m + n) * k, 0) * (missed * tiling.in_bytes))


def _whole_k(m: Floats, n: Floats, k: Floats) -> NDArray[np.bool_]:
    """Where the library does not split k, as measured on an L40S: too few multiplications, or tall and thin."""
    thin = (n <= 64) & (m * n >= 72_000)
    return np.asarray((k <= 8192) & (m > 1) & (thin | (m * n * k < (2.0**21))))


def held_frac(footprint_bytes: Floats, held_bytes: float) -> Floats:
    """Share of a footprint that a cache of ``held_bytes`` keeps: one while it fits, none once it is well beyond."""
    return np.clip((1 + WARM_EDGE / 2 - footprint_bytes / held_bytes) / WARM_EDGE, 0, 1)


def overlapped(a_s: Floats, b_s: Floats, exposed_frac: float) -> Floats:
    """Two streams at once: the longer, and of the shorter what sticks out, which counts only when they are close."""
    long_s = np.maximum(a_s, b_s)
    ratio = np.minimum(a_s, b_s) / long_s
    return np.asarray(long_s * (1 + min(exposed_frac, 0.5) * ratio * ratio * ratio))


def throttled(coef: Mapping[str, float], busy_s: Floats, flops: Floats, peak: float) -> Floats:
    """The same work when the tensor cores draw more than the cap allows, for kernels long enough to be noticed."""
    wanted = coef["power_frac"] * flops / (busy_s * peak)
    # slowdown = (power wanted / power allowed) ** this: frequency and voltage fall together
    slowdown = np.maximum(wanted, 1) ** 0.6 - 1
    return np.asarray(busy_s * (1 + slowdown * busy_s / (busy_s + coef["power_tau_s"])))


def itemsize(dtype: str) -> float:
    """Bytes of one operand element, with its share of block scales."""
    return SCALED_BYTES.get(dtype, dtype_named(dtype).itemsize)


def out_dtype_of(dtype: str) -> str:
    """The element type a product of ``dtype`` is written in when nobody says."""
    return {"fp8": "bf16", "fp8_e5m2": "bf16", "fp4": "bf16", "int8": "int32", "tf32": "fp32"}.get(dtype, dtype)


def gemm_timing(
    chip: Chip,
    coef: Mapping[str, float],
    *,
    b: ArrayLike = 1,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    dtype: str,
    out_dtype: str | None = None,
    warm_frac: ArrayLike = 0.0,
    library: str = "cublas",
) -> Timing:
    """Times of ``b`` products of m x k by k x n each; ``warm_frac`` is the share of input bytes already in L2."""
    coef = {**defaults(chip.arch, library), **coef}
    (b, m, n, k), (warm,) = columns(b, m, n, k), columns(warm_frac)
    in_bytes, out_bytes = itemsize(dtype), itemsize(out_dtype or out_dtype_of(dtype))
    picked = _picked(chip.along(3), coef, menu(chip.arch, library), (b, m, n, k, warm), (in_bytes, out_bytes), dtype)
    loop_s, dram_s, busy_s, reduce_s = picked
    chip = chip.along(1)
    peak = chip.peak_flops_per_s(dtype)
    flops = 2 * b * m * n * k
    slow: Floats | float = 0.0
    if coef["unaligned_frac"] != 1.0:
        # Problems whose rows start off 16-byte boundaries, which TMA and wide loads cannot read
        unaligned = np.asarray((n * in_bytes % 16 > 0) | (k * in_bytes % 16 > 0))
        slow = np.where(unaligned, loop_s * (1 / coef["unaligned_frac"] - 1), 0.0)
    expected_s = throttled(coef, busy_s + slow, flops, peak)
    cold_bytes = b * (m + n) * k * in_bytes * (1 - warm) + np.maximum(b * m * n * out_bytes - chip.l2_bytes, 0)
    floor_s = np.maximum(flops / peak, cold_bytes / chip.dram_bytes_per_s)
    return timing(expected_s, floor_s, loop_s + slow, dram_s, coef["launch_s"] + reduce_s, reduce_s > 0)


def _picked(
    chip: Chip,
    coef: Mapping[str, float],
    menu: Menu,
    problem: tuple[Floats, ...],
    widths: tuple[float, float],
    dtype: str,
) -> tuple[Floats, Floats, Floats, Floats]:
    """SM time, DRAM time, sum and reduction time of the menu entry that takes the least time."""
    b, m, n, k, warm = (column[:, None, None] for column in problem)
    in_bytes, out_bytes = widths
    tiling = _tile(b, m, n, k, menu, in_bytes, out_bytes)
    loop_s = _loop_s(chip, coef, menu, tiling, chip.peak_flops_per_s(dtype) * coef["tensor_frac"], warm)
    operands, output = b * (m + n) * k * in_bytes, b * m * n * out_bytes
    written = output * (1 - held_frac(operands + output, coef["writeback_frac"] * chip.l2_bytes))
    moved = operands * (1 - warm) + written + _reread_bytes(chip, tiling, b, m, n, k)
    ramp_s = coef["ramp_s"] * moved / (moved + coef["ramp_bytes"])
    dram_s = moved / (coef["dram_frac"] * chip.dram_bytes_per_s) + ramp_s
    partial_s = b * m * n * (8 / (REDUCTION_L2_FRAC * coef["l2_frac"] * chip.l2_bytes_per_s))
    reduce_s = (menu.splits > 1) * (coef["splitk_s"] + menu.splits * partial_s)
    busy_s = overlapped(loop_s, dram_s, coef["exposed_frac"]) + reduce_s
    if menu.is_gated:
        busy_s = np.where((m > menu.min_m) & (m <= menu.max_m), busy_s, np.inf)
    if chip.arch in ("ada", "blackwell-consumer"):  # cuBLAS leaves k whole there for little work and for few columns
        busy_s = np.where((menu.splits > 1) & _whole_k(b * m, n, k), np.inf, busy_s)
    by_tile = busy_s.transpose(0, 2, 1).reshape(len(busy_s), -1)  # of equals the first tile, then the fewest splits
    tile, split = np.divmod(by_tile.argmin(axis=1), menu.splits.size)
    found_s = [_taken(part, split, tile) for part in (loop_s, dram_s, busy_s, reduce_s)]
    return found_s[0], found_s[1], found_s[2] + coef["launch_s"], found_s[3]


def _taken(part: Floats, split: NDArray[np.intp], tile: NDArray[np.intp]) -> Floats:
    """Of every problem its entry, from an array that may say the same of all splits or tiles."""
    problems, splits, tiles = part.shape
    at = np.arange(problems) * (splits * tiles)
    if splits > 1:
        at = at + split * tiles
    if tiles > 1:
        at = at + tile
    return np.asarray(part.ravel().take(at))
