"""The physics of one GPU that the time models of GEMM and attention read, and the arrays they answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a GPU can do per second and hold, without opinion on how well software uses it."""

    name: str
    arch: str
    num_sms: int
    clock_hz: float
    dram_bytes_per_s: float
    l2_bytes: float
    l2_bytes_per_s: float
    smem_bytes: float
    tensor_flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    tdp_w: float
    idle_w: float
