"""Launch configurations of the dot interaction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Warps that share one sample, and columns of it that are multiplied at once."""

    num_warps: int
    piece: int = 128


def forward(features: int, dim: int, itemsize: int) -> Sample:
    """Few warps, so that many samples are on their way; more where the products fill the registers of one."""
    return Sample(4 if features > 32 or dim * itemsize > 256 else 2, 128 if itemsize == 2 else 32)


def backward(features: int, dim: int, itemsize: int) -> Sample:
    return Sample(4 if features * dim > 2048 else 2)
