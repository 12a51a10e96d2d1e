"""Time of one implicit-GEMM convolution kernel, told its tile, cluster and split.

Two machines share the work. Kernels fed by TMA run one block an SM, in clusters that must fit into a GPC: a grid of
clusters goes in waves of as many as fit at once, a cluster that reaches over the edge of the output idles, and a last
wave less than half full is shared by all SMs where the kernel may. Kernels fed by asynchronous copies put several
small blocks side by side on an SM, and a lone block's chain of steps has a least time of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ridgeline.cost.time.chip import Chip

Coef = Mapping[str, float]

_GPC_SMS = (18, 18, 18, 18, 16, 16, 16, 12)
"""SMs of the measured chip's GPCs: 15 clusters of eight run at once, 31 of four, 23 of five, by where waves begin."""
_SQUARE = 16384.0
"""Outputs of a 128 x 128 tile, in which times per tile are given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the library takes: a way of computing, a tile (rows, columns, depth), a cluster of tiles, slices."""

    way: str
    rows: int = 0
    columns: int = 0
    depth: int = 0
    cluster_rows: int = 1
    cluster_columns: int = 1
    shared: bool = False  # whether SMs may share the tiles of a last wave
    split: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows x columns of output, ``repeat`` times over; taps x channels of inner loop; bytes from and to memory."""

    rows: int
    columns: int
    channels: int
    taps: float
    read_bytes: float
    written_bytes: float
    itemsize: float
    repeat: int = 1


@lru_cache(maxsize=64)
def clusters_at_once(num_sms: int, size: int) -> int:
    """How many clusters of ``size`` blocks run at once: each lies within one GPC."""
    fitting = sum(sms // size for sms in _GPC_SMS)
    return max(1, fitting * num_sms // sum(_GPC_SMS))


def _peak_macs(chip: Chip, dtype: str, way: str) -> float:
    """Multiplications an SM does in a clock, on its matrix units or its vector ones."""
    flops_per_s = chip.vector_flops_per_s if way in VECTOR else chip.tensor_flops_per_s[dtype]
    return flops_per_s / (2.0 * chip.num_sms * chip.clock_hz)


def _memory_cycles(chip: Chip, coef: Coef, problem: Problem) -> float:
    moved_s = (problem.read_bytes + problem.written_bytes) / (chip.dram_bytes_per_s * coef["dram"])
    # Read traffic at which half of the DRAM ramp has been lost
    return moved_s * chip.clock_hz + coef["ramp"] * problem.read_bytes / (problem.read_bytes + 20e6)


def _joined(a: float, b: float, c: float, power: float) -> float:
    return float((a**power + b**power + c**power) ** (1.0 / power))


def is_shared(choice: Choice, waves: float, steps: float) -> bool:
    """A last wave less than half full is spread over all SMs, if the inner loop is long enough to be worth it."""
    return choice.shared and 0.0 < waves % 1.0 < 0.5 and steps * choice.depth >= 3200


def waves_of(chip: Chip, problem: Problem, choice: Choice) -> float:
    """Waves of clusters, the last in parts."""
    down, across = -(-problem.rows // choice.rows), -(-problem.columns // choice.columns) * problem.repeat
    clusters = -(-down // choice.cluster_rows) * -(-across // choice.cluster_columns)
    return clusters / clusters_at_once(chip.num_sms, choice.cluster_rows * choice.cluster_columns)


def _ragged(coef: Coef, channels: int, depth: int) -> float:
    """Channels that do not fill the last step of a tap are loaded in smaller pieces."""
    if channels % depth == 0:
        return 1.0
    return 1.0 + coef["even" if channels % 16 == 0 else "odd"]


def clustered_s(chip: Chip, coef: Coef, problem: Problem, choice: Choice, dtype: str) -> float:
    """A kernel fed by TMA. ``coef`` are those of its pass."""
    high, wide, deep = choice.rows, choice.columns, choice.depth
    down, across = -(-problem.rows // high), -(-problem.columns // wide) * problem.repeat
    area, steps = high * wide / _SQUARE, problem.taps * -(-problem.channels // deep)
    waves = waves_of(chip, problem, choice)
    over = -(-across // choice.cluster_columns) * choice.cluster_columns / across - 1.0
    step = high * wide * deep / (coef["frac"] * _peak_macs(chip, dtype, choice.way)) + coef["step"]
    step += (high * coef["high"] + wide * coef["wide"]) * deep * problem.itemsize
    step *= (1.0 + coef["idle"] * over / choice.cluster_rows**2) * _ragged(coef, problem.channels, deep)
    tile, extra = steps * step + coef["tile"] * area, 0.0
    if is_shared(choice, waves, steps):
        full, extra = float(int(waves)), coef["share"]
        busy = (full + (waves - full) * coef["share_loop"]) * tile + extra
    else:
        busy = -(-waves // 1.0) * tile
    loaded = (high / choice.cluster_columns + wide / choice.cluster_rows) * deep * problem.itemsize
    cache = down * across * steps * loaded / (coef["l2"] * chip.l2_bytes_per_s) * chip.clock_hz
    joined = _joined(busy, cache, _memory_cycles(chip, coef, problem), coef["power"])
    return (coef["start"] + coef["fill"] * area + joined) / chip.clock_hz


def copied_s(chip: Chip, coef: Coef, problem: Problem, choice: Choice, dtype: str) -> float:
    """A kernel fed by asynchronous copies; slices of the inner loop are further blocks, added up at the end."""
    high, wide, deep = choice.rows, choice.columns, choice.depth
    area = high * wide / _SQUARE
    tiles = -(-problem.rows // high) * -(-problem.columns // wide) * problem.repeat * choice.split
    steps = max(1.0, -(-problem.taps * -(-problem.channels // deep) // choice.split))
    loaded = (high + wide) * deep * problem.itemsize
    step = max(high * wide * deep / (coef["frac"] * _peak_macs(chip, dtype, choice.way)), loaded / coef["bytes"])
    per_sm = -(-tiles // chip.num_sms)
    rounds = -(-per_sm // max(1, min(4, int(2.0 / area))))
    chain = coef["step"] * area**0.25
    busy = rounds * steps * max(chain, per_sm / rounds * step) + per_sm * coef["tile"] * area
    busy *= _ragged(coef, problem.channels, deep)
    cache = tiles * steps * loaded / (coef["l2"] * chip.l2_bytes_per_s) * chip.clock_hz
    joined = _joined(busy, cache, _memory_cycles(chip, coef, problem), coef["power"])
    added = coef["split"] + tiles * high * wide * coef["split_each"] / chip.num_sms if choice.split > 1 else 0.0
    return (coef["start"] + coef["fill"] * area + joined + added) / chip.clock_hz


def implicit_s(chip: Chip, coef: Coef, problem: Problem, choice: Choice, dtype: str) -> float:
    """Seconds of the kernel, by the way it is fed."""
    timed = clustered_s if choice.way in CLUSTERED else copied_s
    return timed(chip, coef, problem, choice, dtype)


CLUSTERED = ("tma", "tma_strided")
VECTOR = ("simt", "vector", "indexed", "scatter", "atomic")
