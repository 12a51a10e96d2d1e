"""How long a matrix product takes on kernels of older generations: full precision, odd rows, small batches, vectors.

Libraries run these where TMA cannot: on the vector units, or with operands that do not start on 16 bytes. Their tiles
are small and several share an SM. For every tile and split of k of a menu the model works out how many tiles the
busiest SM gets, the time its arithmetic needs at the rate of that tile, and the time their chains of k steps need when
so many run side by side; the longer counts, against L2 and DRAM. The entry with the least time is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.cost.time.chip import Chip, Floats, Timing, columns, timing
from ridgeline.cost.time.gemm.tiles import REDUCTION_L2_FRAC, held_frac, itemsize, out_dtype_of, overlapped, throttled

COEFFICIENTS = {
    "launch_s": "time of the kernel when there is nothing to do",
    "eff_frac": "share of the peak that an infinitely large tile reaches",
    "half_area": "elements of a tile that reaches half of that",
    "start_s": "first load to last store of a tile, apart from its inner loop, smallest tile",
    "start_area": "elements of a tile for which that doubles",
    "store_s": "time an SM spends on an element of its output outside the inner loop, when it is full",
    "depth_s": "least time of one element of the inner loop, smallest tile",
    "depth_area": "elements of a tile for which that doubles",
    "l2_frac": "share of the device file's L2 bandwidth",
    "dram_frac": "share of the datasheet DRAM bandwidth",
    "ramp_s": "what DRAM loses until it streams at that share, in full for a long kernel",
    "ramp_bytes": "traffic at which half of it has been lost",
    "splitk_s": "fixed cost of adding up split-k partial results",
    "exposed_frac": "share of the shorter of SM time and DRAM time that the longer does not hide",
    "power_frac": "power wanted at full rate, over the power cap",
}
VECTOR_COEFFICIENTS = ("launch_s", "depth_s", "dram_frac", "ramp_s", "ramp_bytes")
START: Mapping[str, float] = {
    "launch_s": 2.6e-6, "eff_frac": 0.8, "half_area": 2000.0, "start_s": 2e-7, "start_area": 8000.0,
    "store_s": 1e-11, "depth_s": 2e-8, "depth_area": 8000.0, "l2_frac": 0.7, "dram_frac": 0.6, "ramp_s": 6e-6,
    "ramp_bytes": 2e7, "splitk_s": 3e-6, "exposed_frac": 0.4, "power_frac": 0.9,
}  # fmt: skip
SIDES = (
    (16, 16), (16, 32), (32, 16), (32, 32), (32, 64), (64, 32), (64, 64), (128, 32), (32, 128), (64, 128), (128, 64),
    (128, 128), (256, 64), (64, 256), (256, 128), (128, 256),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
RESIDENT_AREA, MAX_RESIDENT = 32768, 16  # output elements, and tiles, that an SM holds at a time
K_GRAINS = {"fp32": 8}  # elements of k a step takes on the vector units

_MENU = np.array([(high, wide, split) for high, wide in SIDES for split in SPLITS], dtype=np.float64)
_ROWS, _COLS, _SPLITS = (_MENU[:, i][None] for i in range(3))
_AREA = _ROWS * _COLS
_RESIDENT = np.clip(np.floor(RESIDENT_AREA / _AREA), 1, MAX_RESIDENT)


def _loop_s(chip: Chip, coef: Mapping[str, float], tiles: Floats, depth: Floats, size: float, peak: float) -> Floats:
    """Time of the busiest SM, or of the L2, for every entry of the menu."""
    queue = np.ceil(tiles / chip.num_sms)
    rate = peak / chip.num_sms * coef["eff_frac"] * _AREA / (_AREA + coef["half_area"])
    start_s = coef["start_s"] * (1 + _AREA / coef["start_area"])
    chain_s = start_s + depth * (coef["depth_s"] * (1 + _AREA / coef["depth_area"]))
    full_s = queue * (2 * _AREA * depth / rate + _AREA * coef["store_s"])
    l2_s = tiles * (_ROWS + _COLS) * depth * (size / (coef["l2_frac"] * chip.l2_bytes_per_s))
    return np.asarray(np.maximum(np.maximum(full_s, np.ceil(queue / _RESIDENT) * chain_s), l2_s))


def classic_timing(
    chip: Chip,
    coef: Mapping[str, float],
    *,
    b: ArrayLike = 1,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    dtype: str,
    warm_frac: ArrayLike = 0.0,
) -> Timing:
    """Times of ``b`` products of m x k by k x n each; ``warm_frac`` is the share of input bytes already in L2."""
    b, m, n, k, warm = (column[:, None] for column in columns(b, m, n, k, warm_frac))
    one, chip = chip.along(1), chip.along(2)
    size, out_size, peak = itemsize(dtype), itemsize(out_dtype_of(dtype)), chip.peak_flops_per_s(dtype)
    operands, output = b * (m + n) * k * size, b * m * n * out_size
    # share of the L2 that holds output back from DRAM
    written = output * (1 - held_frac(operands + output, 0.15 * chip.l2_bytes))
    moved = operands * (1 - warm) + written
    ramp_s = coef["ramp_s"] * moved / (moved + coef["ramp_bytes"])
    dram_s = np.asarray(moved / (coef["dram_frac"] * chip.dram_bytes_per_s) + ramp_s)
    grain = K_GRAINS.get(dtype, 32)  # and on the matrix units
    tiles, depth = b * np.ceil(m / _ROWS) * np.ceil(n / _COLS) * _SPLITS, np.ceil(k / _SPLITS / grain) * grain
    loop_s = _loop_s(chip, coef, tiles, depth, size, peak)
    partial_s = b * m * n * (8 / (REDUCTION_L2_FRAC * coef["l2_frac"] * chip.l2_bytes_per_s))
    reduce_s = (_SPLITS > 1) * (coef["splitk_s"] + _SPLITS * partial_s)
    busy_s = overlapped(loop_s, np.broadcast_to(dram_s, loop_s.shape), coef["exposed_frac"]) + reduce_s
    busy_s = np.where((_SPLITS > 1) & (b > 1), np.inf, busy_s)
    best = np.argmin(busy_s, axis=1)
    at = np.arange(len(best)), best
    flops = (2 * b * m * n * k)[:, 0]
    capped = {"power_frac": coef["power_frac"], "power_tau_s": 2.25e-4}
    peak = one.peak_flops_per_s(dtype)
    expected_s = throttled(capped, busy_s[at] + coef["launch_s"], flops, peak)
    cold_bytes = (operands * (1 - warm) + np.maximum(output - chip.l2_bytes, 0))[:, 0]
    floor_s = np.maximum(flops / peak, cold_bytes / one.dram_bytes_per_s)
    latency_s, split = np.broadcast_to(coef["launch_s"], flops.shape), _SPLITS[0][best] > 1
    return timing(expected_s, floor_s, loop_s[at], dram_s[:, 0], latency_s, split)


def vector_timing(
    chip: Chip, coef: Mapping[str, float], *, n: ArrayLike, k: ArrayLike, dtype: str, warm_frac: ArrayLike = 0.0
) -> Timing:
    """Times of a vector by a k x n matrix: the matrix streams by, and each thread walks its share of k."""
    n, k, warm = columns(n, k, warm_frac)
    chip = chip.along(1)
    size, peak = itemsize(dtype), chip.peak_flops_per_s(dtype)
    moved = (n * k + k) * size * (1 - warm) + n * itemsize(out_dtype_of(dtype))
    stream_s = moved / (coef["dram_frac"] * chip.dram_bytes_per_s)
    stream_s += coef["ramp_s"] * moved / (moved + coef["ramp_bytes"])
    stream_s += n * k * size * warm / chip.l2_bytes_per_s
    chain_s = coef["launch_s"] + coef["depth_s"] * k
    floor_s = np.maximum(2 * n * k / peak, (n + 1) * k * size * (1 - warm) / chip.dram_bytes_per_s)
    return timing(chain_s + stream_s, floor_s, np.zeros_like(stream_s), stream_s, chain_s)
