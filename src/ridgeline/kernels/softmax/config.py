"""Launch configurations of softmax by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Softmax:
    """Rows a program holds at once and the warps that hold them; ``rows`` of 0: blocks of a row, one after another."""

    rows: int
    block: int
    num_warps: int
    num_stages: int = 1


LONGEST_FORWARD = 32768


def longest_backward(itemsize: int) -> int:
    """Two rows of that many columns fit in the registers of a program without spilling (read from the compiler)."""
    return 16384


def forward(rows: int, cols: int, itemsize: int) -> Softmax:
    """As for the norms: 16 elements a thread; long rows in blocks of 32 KB, the next one on its way."""
    block = power_of_two(cols)
    if block > LONGEST_FORWARD:
        return Softmax(0, 16384 * 2 // itemsize // 2, 16, 3)
    tile_rows = clamp(2048 // block, 1, power_of_two(cdiv(rows, 132)))
    return Softmax(tile_rows, block, clamp(tile_rows * block // 512, 1, 32))


def backward(rows: int, cols: int, itemsize: int) -> Softmax:
    block = power_of_two(cols)
    if block > longest_backward(itemsize):
        return Softmax(0, 8192 * 2 // itemsize, 16, 3)
    tile_rows = clamp(2048 // block, 1, power_of_two(cdiv(rows, 132)))
    return Softmax(tile_rows, block, clamp(tile_rows * block // 512, 1, 32))
