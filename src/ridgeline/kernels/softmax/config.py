"""Launch configurations of softmax by shape; the measurements: benchmarks/2026-11-15-kernels.md."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import short_tile
from ridgeline.kernels.rows import cdiv


@dataclass(frozen=True, slots=True)
class Softmax:
    """Rows a program holds, in how many pieces; no pieces: a row block by block. No programs given: one a tile."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0


def forward(rows: int, cols: int, itemsize: int) -> Softmax:
    """As for the norms; past 8k columns 32 warps: 140 against 146 µs for 8192×16384.

    Reading the next row ahead while one program fills the multiprocessor lost at 32k columns: 204 against 174 µs.
    """
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    for num_warps, most in ((4, 5), (8, 4), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 8192 if itemsize == 2 else 4096, 16, 1)


def backward(rows: int, cols: int, itemsize: int) -> Softmax:
    """Two rows are held; past 32k columns large blocks, since what is read twice must still be in the L2."""
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    for num_warps, most in ((4, 4), (8, 4), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 16384 if itemsize == 2 else 8192, 32, 1)
