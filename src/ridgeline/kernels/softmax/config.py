"""Launch configurations of softmax by shape; the measurements: benchmarks/2026-11-15-kernels.md."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import short_tile
from ridgeline.kernels.rows import cdiv


@dataclass(frozen=True, slots=True)
class Softmax:
    """Rows a program holds, in how many pieces; no pieces: a row block by block. No programs given: one a tile.

    ``share``: several programs take a row, so many columns each at most, and all of them are on the device at once.
    """

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0
    share: int = 0


def forward(rows: int, cols: int, itemsize: int) -> Softmax:
    """As for the norms; past 8k columns 32 warps: 140 against 146 µs for 8192×16384.

    Past 16k columns several programs hold a row, two on a multiprocessor: while one waits, the other reads.
    """
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    for num_warps, most in ((4, 5), (8, 4), (32, 2)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 4096, 8, 1, 4, 16384)


def backward(rows: int, cols: int, itemsize: int) -> Softmax:
    """Two rows are held; past 32k columns by several programs, of which the registers leave room for one each."""
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    for num_warps, most in ((4, 4), (8, 4), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 4096, 8, 1, 4, 8192)


def twice(itemsize: int) -> Softmax:
    """A row too long for all programs together is read twice."""
    return Softmax(1, 0, 16384 // itemsize, 16, 1)
