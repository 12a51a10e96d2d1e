"""How long a mixture of experts takes on one rank: weights of experts that were hit, padded rows, permutation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.cost.time.chip import Chip, Floats, related_archs
from ridgeline.errors import CostError

MIN_TILE = 16
SHORT_KERNELS = 4
ROUTED_KERNELS = 1  # where routing, permutation and the sum belong to the products' own kernels, as on Blackwell
EVENNESS = 1.5
"""Shape of the experts' popularity: infinite if all were picked alike; real routers on real batches are far from it."""


EXPECTED_MOST = {1: 0.0, 2: 0.56, 4: 1.03, 8: 1.42}
"""Of so many standard normal numbers, what the largest is on average; wider groups move popular experts about."""


def crowding(ranks: int, num_local: float) -> float:
    """Tokens of the fullest rank over the mean, when whole experts of uneven popularity are dealt out to ``ranks``."""
    most = float(np.interp(min(ranks, 8), list(EXPECTED_MOST), list(EXPECTED_MOST.values())))
    return 1.0 + most / float(np.sqrt(EVENNESS * num_local))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Experts of one rank: width after tensor parallelism, and how many of all are here."""

    hidden: int
    ffn: float
    num_local: float
    top_local: float  # experts of a token that live here, on average
    sides: int


_NAMES = ("launch_s", "dram_frac", "tensor_frac", "move_frac", "fill", "blend", "expert_s", "tile")
# Fitted by lab/fit/experts.py to fused expert kernels that serving frameworks measured with balanced loads
# (ai-dynamo/aiconfigurator, snapshot 095f58a51c4c); held-out errors in docs/design/serving.md.
_SETS = {
    "hopper/bf16": (6.03e-5, 0.98, 0.588, 0.526, 0.0098, 1.39, 2.37e-8, 64),
    "hopper/fp8": (3.53e-5, 0.853, 0.351, 0.416, 0.396, 3.01, 1.1e-7, 64),
    "hopper/int4_wo": (7.75e-5, 0.98, 0.23, 0.434, 0.0282, 2.78, 8.83e-8, 64),
    "hopper/mxfp4": (6.58e-5, 0.86, 0.622, 0.905, 0.0245, 1.79, 3.98e-10, 128),
    "blackwell/bf16": (2.3e-5, 0.937, 0.382, 1.67, 0.0085, 2.0, 1.64e-8, 64),
    "blackwell/fp8": (2.32e-5, 0.924, 0.415, 0.867, 0.0111, 1.65, 4.15e-8, 64),
    "blackwell/fp8_block": (4.52e-5, 0.98, 0.172, 0.802, 0.0145, 1.51, 3.57e-10, 64),
    "blackwell/int4_wo": (8.88e-5, 0.98, 0.139, 0.245, 0.031, 1.37, 2.11e-8, 64),
    "blackwell/nvfp4": (2.71e-5, 0.98, 0.481, 0.723, 0.0156, 1.16, 3.7e-8, 64),
    "blackwell/mxfp4": (2.2e-5, 0.95, 0.533, 0.567, 0.02, 1.2, 5.2e-8, 128),
    "ampere/bf16": (4.72e-5, 0.98, 0.129, 0.161, 0.005, 1.28, 9.98e-10, 128),
    "ampere/int4_wo": (5.6e-5, 0.98, 0.266, 0.1, 0.0525, 4.0, 8.99e-10, 64),
    "ada/bf16": (3.14e-5, 0.843, 0.668, 0.993, 0.00577, 1.0, 3.9e-10, 64),
    "ada/fp8": (2.39e-5, 0.842, 0.389, 1.05, 0.0716, 1.0, 2.43e-10, 128),
    "ada/int4_wo": (6.7e-6, 0.8, 0.421, 1.16, 0.0755, 1.85, 1.97e-9, 64),
    "ada/mxfp4": (5.51e-6, 0.732, 0.424, 1.08, 0.402, 2.15, 5.73e-10, 64),
}  # fmt: skip
_LIKE = {"fp16": "bf16", "fp8_block": "fp8", "int8": "fp8", "int8_wo": "int4_wo", "nvfp4": "mxfp4", "mxfp4": "nvfp4"}


def coefficients(arch: str, format_name: str) -> dict[str, float]:
    """Of the architecture and weight format; a format nobody measured there takes that of its kin, then Hopper's."""
    for name in (*related_archs(arch), "hopper"):
        for kind in (format_name, _LIKE.get(format_name, "bf16"), "bf16"):
            if f"{name}/{kind}" in _SETS:
                found = dict(zip(_NAMES, _SETS[f"{name}/{kind}"], strict=True))
                # Two products replayed from a graph; the tables were timed with the host's launches in the way and say
                # more. The short kernels around them (alignment, activation, quantization, sum) are counted with a
                # layer's others.
                return {**found, "launch_s": min(found["launch_s"], 10e-6)}
    raise CostError(f"no expert coefficients for {arch}")


def active_experts(experts: Grouped, tokens: Floats) -> Floats:
    """Experts that at least one token picked, when some are picked more than others (gamma-distributed popularity)."""
    mean = tokens * experts.top_local / experts.num_local
    return np.asarray(experts.num_local * (1 - (1 + mean / EVENNESS) ** -EVENNESS))


def _tiles(rows: Floats, largest: float, *, even: bool) -> tuple[Floats, Floats]:
    """(rows of a tile, tiles an expert needs). Even loads fill powers of two and round up; others do so on average."""
    if even:
        tile = np.clip(2 ** np.ceil(np.log2(rows)), MIN_TILE, largest)
        return tile, np.ceil(rows / tile)
    tile = np.clip(rows * np.sqrt(2), MIN_TILE, largest)
    full = rows / tile
    return tile, full + 0.5 + 0.5 * np.exp(-2 * full)


def experts_s(chip: Chip, coef: Mapping[str, float], experts: Grouped, tokens: Floats, weight_bytes: float,
              peak_flops_per_s: float, *, even: bool = False) -> Floats:  # fmt: skip
    """Seconds of one layer's experts for ``tokens`` tokens of the whole group; ``even`` deals them out like cards."""
    pairs = tokens * experts.top_local
    hit = np.minimum(pairs, experts.num_local) if even else active_experts(experts, tokens)
    hit = np.maximum(hit, 1e-3)
    rows = np.maximum(pairs / hit, 1.0)
    tile, each = _tiles(rows, coef["tile"], even=even)
    blocks = hit * each
    weights = experts.sides * experts.hidden * experts.ffn
    filled = -np.expm1(-blocks * np.ceil(2 * experts.ffn / 128) / (chip.num_sms * coef["fill"]))
    read_s = hit * weights * weight_bytes / (chip.dram_bytes_per_s * coef["dram_frac"] * filled)
    math_s = 2 * blocks * tile * weights / (peak_flops_per_s * coef["tensor_frac"])
    moved_s = pairs * (experts.hidden + experts.ffn) * 6.0 / (chip.dram_bytes_per_s * coef["move_frac"])
    blend = coef["blend"]
    both_s = (read_s**blend + math_s**blend) ** (1 / blend)
    return np.asarray(coef["launch_s"] + both_s + moved_s + hit * coef["expert_s"])
