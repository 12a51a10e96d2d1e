"""How long a matrix product takes: tiles in waves over the SMs, fed from L2 and DRAM, by the library that really runs.

A library picks a CTA tile and a split of k from a menu. For every entry of the menu the model works out

* the tiles, the waves they make on ``num_sms`` SMs and the padding they waste;
* the main loop of one tile: the slower of tensor cores, the L2 crossbar (operands once per tile, half of the larger one
  when a cluster multicasts it) and the latency of the chain of k steps; then its epilogue;
* DRAM traffic: what is not in L2 already, operands read again when a wave's neighbors no longer find them in L2, and
  the part of the output that the write-back cache cannot hold;
* the second pass that adds the partial results when k is split.

The entry with the least time is what the library is taken to run. A long product then heats the chip into its power cap:
the clock falls with the share of the tensor peak that is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.cost.chip import Chip, Floats, Timing, columns, timing
from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import CostError, nearest

K_STEP = 64  # elements of k per pipeline step
GRAIN = 8  # a flexible tile side shrinks to the next multiple of this
MAX_TILE = 128 * 256  # accumulators of a CTA
REDUCTION_L2_FRAC = 0.8  # share of L2 bandwidth the split-k reduction reaches
POWER_EXPONENT = 0.6  # slowdown = (power wanted / power allowed) ** this: frequency and voltage fall together
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

_HALF = {
    "launch_s": 2.4e-6, "fanout_s": 0.3e-6, "gap_s": 0.1e-6, "tensor_frac": 0.95, "l2_frac": 0.9, "dram_frac": 0.88, "kstep_s": 0.09e-6,
    "kstep_cold_s": 0.03e-6, "epilogue_frac": 0.28, "splitk_s": 2.7e-6, "exposed_frac": 0.25, "power_frac": 1.45,
    "power_tau_s": 250e-6, "writeback_frac": 0.4, "unaligned_frac": 0.5, "ramp_s": 1e-9, "ramp_bytes": 5e7,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, float]] = {"generic/cublas": _HALF, "generic/cutlass": _HALF}


@dataclass(frozen=True, slots=True)
class Menu:
    """The tiles and k splits a library chooses from, one per column; only for ``min_m < m <= max_m``."""

    rows: Floats
    cols: Floats
    rows_flex: Floats
    cols_flex: Floats
    splits: Floats
    min_m: Floats
    max_m: Floats
    is_gated: bool
    multicast: float


def _menu_of(entries: list[tuple[float, ...]], multicast: float) -> Menu:
    table = np.array(entries, dtype=np.float64)
    gated = bool((table[:, 5] > 0).any() or np.isfinite(table[:, 6]).any())
    return Menu(*(table[:, i][None] for i in range(7)), is_gated=gated, multicast=multicast)


def _flexible_menu() -> Menu:
    """nvjet kernels of cuBLAS on Hopper and Blackwell: one side 64, 128 or 256, the other any multiple of 8."""
    widths = (16, 32, 64, 96, 128, 160, 192, 256)
    pairs = [(side, width) for side in (64, 128, 256) for width in widths if side * width <= MAX_TILE]
    tiles = [(s, w, 0, 1) for s, w in pairs] + [(w, s, 1, 0) for s, w in pairs]
    splits = (1, 2, 3, 4, 6, 8, 16, 32)
    return _menu_of([(*tile, split, 0, np.inf) for tile in tiles for split in splits], multicast=2)


def _fixed_menu() -> Menu:
    """Tiles of powers of two, the cuBLAS kernels before Hopper."""
    sides = (16, 32, 64, 128, 256)
    tiles = [(a, b, 0, 0) for a in sides for b in sides if a * b <= MAX_TILE and max(a, b) >= 64]
    splits = (1, 2, 3, 4, 6, 8, 16, 32)
    return _menu_of([(*tile, split, 0, np.inf) for tile in tiles for split in splits], multicast=1)


def _cutlass_menu() -> Menu:
    """Scaled products of CUTLASS as serving frameworks instantiate them: the tile follows m, k is never split."""
    gates = [(16, 64, 0, 16), (64, 64, 16, 64), (64, 128, 64, 128), (128, 128, 128, np.inf), (256, 128, 8191, np.inf)]
    return _menu_of([(rows, cols, 0, 0, 1, low, high) for rows, cols, low, high in gates], multicast=2)


LIBRARIES = ("cublas", "cutlass")
FLEXIBLE_ARCHS = ("hopper", "blackwell")


@lru_cache(maxsize=16)
def menu(arch: str, library: str) -> Menu:
    """What ``library`` chooses from on ``arch``."""
    if library == "cutlass":
        return _cutlass_menu()
    if library != "cublas":
        raise CostError(f"no tile menu for library {library!r}{nearest(library, LIBRARIES)}")
    return _flexible_menu() if arch in FLEXIBLE_ARCHS else _fixed_menu()


def defaults(arch: str, library: str) -> Mapping[str, float]:
    """Coefficients for a device nobody measured: those of its architecture, else the ones all devices share."""
    for key in (f"{arch}/{library}", f"generic/{library}"):
        if key in DEFAULTS:
            return DEFAULTS[key]
    raise CostError(f"no GEMM coefficients for library {library!r}{nearest(library, LIBRARIES)}")


def _shrunk(size: Floats, count: Floats, side: Floats, flex: Floats) -> Floats:
    """The tile side once a flexible kernel has fitted it to the problem."""
    fitted = np.ceil(size / count / GRAIN) * GRAIN
    return np.asarray(side + flex * (fitted - side))


def _loop_s(chip: Chip, coef: Mapping[str, float], menu: Menu, tiling: _Tiling, peak: float, warm: Floats) -> Floats:
    """Time of the SMs: full waves, then the last one, whose fewer CTAs share the crossbar."""
    tm, tn, kc = tiling.rows, tiling.cols, tiling.k_per_cta
    chain = kc * ((coef["kstep_s"] + coef["kstep_cold_s"] * (1 - warm)) / K_STEP)
    math = tm * tn * kc * (2 * chip.num_sms / peak)
    own = np.maximum(math, chain)
    shared = (np.maximum(tm, tn) / menu.multicast + np.minimum(tm, tn)) * kc
    shared *= tiling.in_bytes / (coef["l2_frac"] * chip.l2_bytes_per_s)
    waves = np.floor(tiling.ctas / chip.num_sms)
    rest = tiling.ctas - waves * chip.num_sms
    tail = np.maximum(own, shared * rest) * (rest > 0)
    loop = waves * np.maximum(own, shared * chip.num_sms) + tail
    waves += rest > 0
    store = tm * tn * (tiling.out_bytes / (coef["epilogue_frac"] * 64 * chip.clock_hz))
    spread = np.minimum(tiling.ctas, chip.num_sms) * (coef["fanout_s"] / chip.num_sms)
    return np.asarray(loop + waves * (store + coef["gap_s"]) + (spread - coef["gap_s"]))


@dataclass(frozen=True, slots=True)
class _Tiling:
    """A problem per row cut by a menu entry per column."""

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
    return _Tiling(rows, cols, num_rows, num_cols, b * num_rows * num_cols * menu.splits, k_per_cta, in_bytes, out_bytes)


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
    slowdown = np.maximum(wanted, 1) ** POWER_EXPONENT - 1
    return np.asarray(busy_s * (1 + slowdown * busy_s / (busy_s + coef["power_tau_s"])))


def itemsize(dtype: str) -> float:
    """Bytes of one operand element, with its share of block scales."""
    return SCALED_BYTES.get(dtype, dtype_named(dtype).itemsize)


def out_dtype_of(dtype: str) -> str:
    """The element type a product of ``dtype`` is written in when nobody says."""
    return {"fp8": "bf16", "fp8_e5m2": "bf16", "fp4": "bf16", "int8": "int32", "tf32": "fp32"}.get(dtype, dtype)


def _unaligned(n: Floats, k: Floats, in_bytes: float) -> Floats:
    """Problems whose rows start off 16-byte boundaries, which TMA and wide loads cannot read."""
    return np.asarray((n * in_bytes % 16 > 0) | (k * in_bytes % 16 > 0))


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
    b, m, n, k, warm = columns(b, m, n, k, warm_frac)
    in_bytes, out_bytes = itemsize(dtype), itemsize(out_dtype or out_dtype_of(dtype))
    peak = chip.peak_flops_per_s(dtype)
    picked = _picked(chip, coef, menu(chip.arch, library), (b, m, n, k, warm), (in_bytes, out_bytes), peak)
    loop_s, dram_s, busy_s, reduce_s = picked
    flops = 2 * b * m * n * k
    slow = np.where(_unaligned(n, k, in_bytes), loop_s * (1 / coef["unaligned_frac"] - 1), 0.0)
    expected_s = throttled(coef, busy_s + slow, flops, peak)
    cold_bytes = b * ((m + n) * k * in_bytes * (1 - warm) + np.maximum(m * n * out_bytes - chip.l2_bytes, 0))
    floor_s = np.maximum(flops / peak, cold_bytes / chip.dram_bytes_per_s)
    return timing(expected_s, floor_s, loop_s + slow, dram_s, coef["launch_s"] + reduce_s)


def _picked(
    chip: Chip, coef: Mapping[str, float], menu: Menu, problem: tuple[Floats, ...], widths: tuple[float, float], peak: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """SM time, DRAM time, sum and reduction time of the menu entry that takes the least time."""
    b, m, n, k, warm = (column[:, None] for column in problem)
    in_bytes, out_bytes = widths
    tiling = _tile(b, m, n, k, menu, in_bytes, out_bytes)
    loop_s = _loop_s(chip, coef, menu, tiling, peak * coef["tensor_frac"], warm)
    operands, output = b * (m + n) * k * in_bytes, b * m * n * out_bytes
    written = output * (1 - held_frac(operands + output, coef["writeback_frac"] * chip.l2_bytes))
    moved = operands * (1 - warm) + written + _reread_bytes(chip, tiling, b, m, n, k)
    ramp_s = coef["ramp_s"] * moved / (moved + coef["ramp_bytes"])
    dram_s = np.broadcast_to(moved / (coef["dram_frac"] * chip.dram_bytes_per_s) + ramp_s, loop_s.shape)
    partial_s = b * m * n * (8 / (REDUCTION_L2_FRAC * coef["l2_frac"] * chip.l2_bytes_per_s))
    reduce_s = (menu.splits > 1) * (coef["splitk_s"] + menu.splits * partial_s)
    busy_s = overlapped(loop_s, dram_s, coef["exposed_frac"]) + reduce_s
    if menu.is_gated:
        busy_s = np.where((m > menu.min_m) & (m <= menu.max_m), busy_s, np.inf)
    best = np.argmin(busy_s, axis=1)
    at = np.arange(len(best)), best
    return loop_s[at], dram_s[at], busy_s[at] + coef["launch_s"], reduce_s[at]
