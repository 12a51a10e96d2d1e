"""Launch configurations of RMSNorm by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows a program holds at once, and warps that hold them; a block of 0 columns means rows are too long for that."""

    rows: int
    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Backward:
    """A persistent program's tile, how many tiles are on their way, and how many programs share a multiprocessor."""

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    keep_weight: bool


LONGEST_FORWARD = 32768
LONG_BLOCK = 8192


def forward(rows: int, cols: int, itemsize: int) -> Forward:
    """16 elements a thread: two 16-byte loads of a 16-bit type are in flight before the first is needed."""
    block = power_of_two(cols)
    if block > LONGEST_FORWARD:
        return Forward(1, 0, 16)
    tile_rows = clamp(2048 // block, 1, power_of_two(cdiv(rows, 132)))
    return Forward(tile_rows, block, clamp(tile_rows * block // 512, 1, 32))


def longest_backward(itemsize: int) -> int:
    """Rows a program can hold with its share of the weight's gradient without spilling (read from the compiler)."""
    return 16384 if itemsize < 4 else 8192


def backward(rows: int, cols: int, itemsize: int) -> Backward:
    """About 4096 elements a tile: two programs of 128 registers share a multiprocessor and keep 64 KB in flight."""
    block = power_of_two(cols)
    if block > longest_backward(itemsize):
        return Backward(1, 0, 16, 1, 1, False)
    if block > 8192:
        return Backward(1, block, 32, 2, 1, False)
    if block > 4096:
        return Backward(1, block, 16, 3, 1, True)
    tile_rows = clamp(4096 // block, 1, power_of_two(cdiv(rows, 264)))
    num_warps = clamp(tile_rows * block // 512, 1, 8)
    return Backward(tile_rows, block, num_warps, 3, 2 if num_warps == 8 else 4, True)
