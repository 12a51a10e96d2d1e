"""Launch configurations of softmax by shape; the measurements: benchmarks/2026-11-15-kernels.md."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm.config import short_tile
from ridgeline.kernels.rows import cdiv, power_of_two
from ridgeline.kernels.shares import Streamed


@dataclass(frozen=True, slots=True)
class Softmax:
    """Rows a program holds, in how many pieces; no pieces: a row block by block. No programs given: one a tile."""

    rows: int
    chunks: int
    block: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 0


TWICE_FORWARD = 32768
"""From here on a row is read twice forward: 182 µs for 4096×32768, 191 held."""

HELD_BYTES = 32768
"""Longer rows pass through shared memory where their accesses can be sixteen bytes wide."""


def forward(rows: int, cols: int, itemsize: int) -> Softmax:
    """As for the norms: at most 40 elements a thread, 16 warps at most (8192×16384: 146 µs, 150 with 32 warps)."""
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    for num_warps, most in ((4, 5), (8, 4), (16, 4), (32, 3)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most and cols < TWICE_FORWARD:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return twice(itemsize)


def backward(rows: int, cols: int, itemsize: int) -> Softmax:
    """Two rows are held, in one piece where that fits: 195 against 200 µs for 8192×16384, 205 against 208 for 32768."""
    short = short_tile(rows, cols, itemsize, 4)
    if short is not None:
        return Softmax(*short)
    if 8192 < cols <= 32768 and power_of_two(cols) == cols:
        return Softmax(1, 1, cols, 32)
    for num_warps, most in ((4, 4), (8, 4), (32, 4)):
        chunks = cdiv(cols, 256 * num_warps)
        if chunks <= most:
            return Softmax(1, chunks, 256 * num_warps, num_warps)
    return Softmax(1, 0, 32768 // itemsize, 32, 1)


def twice(itemsize: int) -> Softmax:
    """One program a row, read twice."""
    return Softmax(1, 0, 16384 // itemsize, 16, 1)


def streamed(cols: int, itemsize: int, num_inputs: int) -> Streamed | None:
    """Three shares of 64 KB, or None where a row is short enough to be held in registers."""
    if cols * itemsize <= HELD_BYTES:
        return None
    return Streamed(8 // num_inputs, 16, 3, 1)
