"""Launch configuration of GroupNorm with channels last."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp


@dataclass(frozen=True, slots=True)
class Pass:
    """Pixels and channels of a tile, stretches that an image is cut into for its moments, warps."""

    rows: int
    cols: int
    stretches: int
    num_warps: int = 4


MOST_STRETCHES = 128
PROGRAMS = 1056
"""Eight programs to each of an H200's multiprocessors."""


def default(images: int, pixels: int, channels: int) -> Pass:
    """128 bytes of a pixel, eight accesses of sixteen bytes a thread on their way."""
    rows, cols = 128, 64
    wanted = cdiv(PROGRAMS, images * cdiv(channels, cols))
    return Pass(rows, cols, clamp(wanted, 1, min(MOST_STRETCHES, cdiv(pixels, rows))))
