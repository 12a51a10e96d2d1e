"""Implicit GEMM on the matrix units: tiles, waves and the loop over filter taps."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.call import ITEMSIZE
from ridgeline.cost.time.conv.problem import (
    SHARED_DEPTH,
    WIDE_SIDE,
    Conv,
    Cost,
    Site,
    both_costs,
    memset_cost,
    padded_channels,
    sum_costs,
)


@dataclass(frozen=True, slots=True)
class Loop:
    """An implicit GEMM: rows x columns of output, ``repeat`` times over; taps x channels of inner loop; bytes moved."""

    rows: int
    columns: int
    channels: int
    taps: float
    read_bytes: float
    written_bytes: float
    effort: float = 1.0
    repeat: int = 1
    segment: str = "segment"
    stride: int = 1


Tile = tuple[int, int, int, bool]
"""Rows, columns and depth of a tile, and whether TMA feeds it."""


def _tile(loop: Loop, wide: bool, tma: bool) -> Tile:
    """The tile that the library's heuristic takes most often for a problem of this size."""
    rows, columns, channels = loop.rows, loop.columns, loop.channels
    squares = -(-rows // 128) * -(-columns // 128)
    if wide or not tma or channels < 16:
        return copy_tile(columns, squares)
    if loop.taps <= 1.0:
        return _single_tap_tile(rows, columns, channels, squares)
    small = -(-rows // 64) * -(-columns // 64)
    if columns <= 32:
        return _column_tile(channels, squares, small)
    if loop.stride > 2 and rows >= 300:
        return _skipping_tile(columns, channels)
    if channels < 64:
        return _shallow_tile(rows, columns, channels, squares, loop.taps in (4, 16))
    if columns <= 64:
        return _narrow_tile(rows, channels)
    if small <= 150:
        return (64, 64, 64, channels >= 128)
    return (64, 128, 64, True) if squares <= 66 else _large_tile(loop, squares)


def _large_tile(loop: Loop, squares: int) -> Tile:
    rows, columns, channels = loop.rows, loop.columns, loop.channels
    if 0 < columns % 128 <= 64 and rows >= 4000:
        return (256, 64, 32, True)
    if squares >= 780 and columns >= 1024 and channels >= 768:
        return (128, 256, 64, True)
    if squares >= 780 and loop.taps * channels >= 1700 and columns >= 384 and (columns <= 512 or channels >= 640):
        return (256, 128, 64, True)
    return (128, 128, 64, True)


def copy_tile(columns: int, squares: int) -> Tile:
    if columns <= 32:
        return (64, 32, 64, False)
    if squares <= 20:
        return (64, 64, 64, False)
    return (128, 128, 32, False) if columns > 64 else (256, 64, 32, False)


def _single_tap_tile(rows: int, columns: int, channels: int, squares: int) -> Tile:
    if channels <= 48:
        return (64, 128, 32 if channels <= 32 else 64, True) if squares > 700 else (64, 64, 64, False)
    return (128, 128, 64, True) if squares > 16 or (channels >= 1024 and rows > 500) else (64, 64, 64, False)


def _skipping_tile(columns: int, channels: int) -> Tile:
    """Strides of three and more: no small tiles."""
    if channels < 64:
        return (128, 128, 32, True)
    if columns <= 64:
        return (256, 64, 64, True)
    return (256, 128, 64, True) if channels >= 320 and columns >= 384 else (128, 128, 64, True)


def _column_tile(channels: int, squares: int, small: int) -> Tile:
    if channels < 64:
        return (64, 64, 32, False) if squares <= 60 else (128, 32, 32, False)
    return (64, 64, 64, True) if small <= 132 else (64, 32, 64, False)


def _narrow_tile(rows: int, channels: int) -> Tile:
    if rows <= 24000:
        return (64, 64, 64, channels >= 128)
    return (256, 64, 32, True) if channels >= 128 else (128, 64, 64, True)


def _shallow_tile(rows: int, columns: int, channels: int, squares: int, even: bool) -> Tile:
    if even and columns > 64 and squares > 32:
        return (128, 128, 64, True)
    if squares <= 32:
        return (64, 64, 64 if channels > 24 and columns > 64 else 32, False)
    if squares <= 200 or rows <= 14000:
        return (64, 128 if columns > 64 else 64, 32, False)
    return (128, 128, 32, True) if columns > 64 and channels <= 32 else (256, 64, 32, True)


def loop_s(site: Site, loop: Loop, tile: Tile, dtype: str, segmented: bool = False) -> float:
    """Seconds of one implicit GEMM with a given tile; ``segmented`` lets several SMs share a tile's inner loop."""
    coef, chip = site.coef, site.chip
    high, wide, deep, tma = tile
    way = "tma" if tma else "copy"
    frac = coef[way + "_frac" if site.tma else "copy_native_frac"]
    peak_macs = chip.tensor_flops_per_s[dtype] / (2.0 * chip.num_sms * chip.clock_hz)
    steps = loop.taps * -(-loop.channels // deep)
    step_bytes = (high + wide) * deep * ITEMSIZE[dtype]
    step = max(high * wide * deep / (peak_macs * frac), step_bytes / coef[way + "_bytes_per_cycle"])
    if not tma:
        step = max(step, coef["copy_step_cycles"])
    step *= loop.effort
    if tma and loop.channels % 32 and loop.channels % deep:
        step *= 1.0 + coef["tma_ragged"]
    tiles = -(-loop.rows // high) * -(-loop.columns // wide) * loop.repeat
    area = high * wide / 16384.0
    start, per_sm = coef[way + "_start_cycles"], float(-(-tiles // chip.num_sms))
    if tma:
        start += coef["tma_fill_cycles"] * area
    if segmented:
        start += coef[loop.segment + "_cycles"]
        per_sm = max(tiles / chip.num_sms, 1.0 / max(steps, 1.0)) * coef[loop.segment + "_loop"]
    busy = site.cycles_s(per_sm * (steps * step + coef[way + "_tile_cycles"] * area))
    cache_s = tiles * steps * step_bytes / (coef["loop_l2_frac"] * chip.l2_bytes_per_s)
    memory_s = site.dram_s(loop.read_bytes + loop.written_bytes, "loop_dram_frac")
    memory_s += site.ramp_s(loop.read_bytes, "ramp_cycles")
    return site.cycles_s(start) + both_costs(max(busy, cache_s), memory_s)


def _gemm_loop(site: Site, loop: Loop, tile: Tile, dtype: str, splittable: bool) -> Cost:
    """One kernel, or the variant that shares tiles between SMs where the library would gain by it."""
    plain = loop_s(site, loop, tile, dtype), 1
    if tile[3] and loop.repeat == 1 and -(-loop.rows // tile[0]) * -(-loop.columns // tile[1]) > 2 * site.chip.num_sms:
        plain = sum_costs(plain, memset_cost(site))  # the counter from which a persistent grid draws its tiles
    if not splittable or loop.taps * loop.channels < SHARED_DEPTH:
        return plain
    return min(plain, (loop_s(site, loop, tile, dtype, True), 2))


def cold_share(site: Site, conv: Conv, num_bytes: float) -> float:
    """Bytes of an operand that come from DRAM: transforms leave channels-first operands in L2."""
    return num_bytes * (1.0 - (site.warm_frac if conv.channels_last else site.held(num_bytes)))


def forward_loop(site: Site, conv: Conv) -> Cost:
    read = cold_share(site, conv, conv.touched_bytes) + cold_share(site, conv, conv.weight_bytes)
    loop = Loop(
        conv.n * conv.out_px, conv.o, padded_channels(conv.c), conv.taps, read, conv.output_bytes, stride=conv.stride
    )
    tile = _tile(loop, conv.side >= WIDE_SIDE, site.tma)
    return _gemm_loop(site, loop, tile, conv.dtype, tile[3] and conv.stride <= 2)


def input_grad_loop(site: Site, conv: Conv) -> Cost:
    """Rows are input pixels; under a stride each of them meets only its share of the taps, in all but small kernels."""
    rows, columns, channels = conv.n * conv.in_px, padded_channels(conv.c), padded_channels(conv.o)
    read = cold_share(site, conv, conv.output_bytes) + cold_share(site, conv, conv.weight_bytes)
    if conv.stride > 1 and conv.taps > 1 and -(-rows // 128) * -(-columns // 128) <= 24:
        loop = Loop(rows, columns, channels, conv.taps, read, conv.input_bytes, site.coef["small_grad"])
        return loop_s(site, loop, (64, 64, 64, False), conv.dtype), 1
    share = conv.stride**conv.rank if conv.stride > 1 else 1
    effort = site.coef["strided_grad"] if conv.stride > 1 else 1.0
    loop = Loop(rows, columns, channels, conv.taps / share, read, conv.input_bytes, effort)
    tile = _input_grad_tile(site, conv, loop)
    return _gemm_loop(site, loop, tile, conv.dtype, tile[3])


def _input_grad_tile(site: Site, conv: Conv, loop: Loop) -> Tile:
    if conv.stride > 2:
        return (128, 64, 64, False)
    if loop.channels <= 32 and loop.columns >= 384:
        return _flat_tile(loop)
    if loop.columns <= 32 and loop.channels >= 64 and loop.rows >= 80_000 and site.tma:
        return (256, 64, 32, True)
    return _tile(loop, False, site.tma)


def _flat_tile(loop: Loop) -> Tile:
    """Many input channels from few output channels."""
    if -(-loop.rows // 128) * -(-loop.columns // 128) <= 32:
        return (64, 64, 32, False)
    return (128, 64, 32 if loop.rows <= 60_000 else 64, False)


def weight_grad_loop(site: Site, conv: Conv) -> Cost:
    """Rows are output channels, columns taps x input channels, the inner loop runs over all output pixels."""
    read = cold_share(site, conv, conv.touched_bytes) + cold_share(site, conv, conv.output_bytes)
    channels = padded_channels(conv.c)
    tile = _weight_tile(conv, site.tma and conv.side < WIDE_SIDE)
    effort = site.coef["weight_grad"] if tile[3] else 1.0
    columns, repeat = (channels, conv.taps) if tile[3] else (channels * conv.taps, 1)
    loop = Loop(conv.o, columns, conv.n * conv.out_px, 1.0, read, conv.weight_bytes, effort, repeat,
                "weight_segment")  # fmt: skip
    return _gemm_loop(site, loop, tile, conv.dtype, True)


def _weight_tile(conv: Conv, tma: bool) -> Tile:
    """Weight gradients take wide tiles where there are many filters; short loops take the kernels that start fast."""
    columns, pixels = conv.c * conv.taps, conv.n * conv.out_px
    if not tma or pixels <= 128:
        return (256, 64, 32, False) if conv.o > 64 else (64, 64, 64, False)
    if pixels <= 1000 and conv.o * columns <= 800_000:
        return (64, 32, 64, False)
    if conv.o >= 256 and -(-conv.o // 128) * -(-columns // 128) >= 400:
        return (256, 128, 64, True)
    return (64 if conv.o <= 64 else 128, 64 if columns <= 800 or conv.c <= 96 else 128, 64, True)
