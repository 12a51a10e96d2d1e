"""Launch configurations of the quantizing LayerNorm: the quantizing RMSNorm's, or rows held two numbers a word."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rms_norm_quant.config import Tile, default

__all__ = ["Tile", "Words", "default", "words"]


@dataclass(frozen=True, slots=True)
class Words:
    """16-bit rows to fp8, a program each, sixteen columns a lane: its warps, and programs of a multiprocessor."""

    num_warps: int
    programs_per_sm: int


def words(rows: int, cols: int, group: int) -> Words | None:
    """None until it has been timed."""
    return None
