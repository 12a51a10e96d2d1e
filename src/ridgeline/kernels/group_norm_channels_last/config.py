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


def default(images: int, pixels: int, channels: int) -> Pass:
    """128 bytes of a pixel, eight accesses of sixteen bytes a thread on their way."""
    rows, cols = 128, 64
    wanted = cdiv(1056, images * cdiv(channels, cols))  # eight programs to each of an H200's SMs
    return Pass(rows, cols, clamp(wanted, 1, min(128, cdiv(pixels, rows))))  # most stretches
