"""Angles of the rotary embedding: the common scalings as tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError

KINDS = ("none", "linear", "ntk", "llama3", "yarn")


def rope_tables(
    positions: Tensor, rotary_dim: int, *, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[…, S, rotary_dim / 2]`` in float32 for integer positions ``[…, S]``.

    ``scaling`` is what model configurations call ``rope_scaling``: ``{"rope_type": "llama3", "factor": 8.0, …}``.
    """
    if rotary_dim % 2:
        raise KernelError(f"rope_tables: rotary_dim must be even, not {rotary_dim}")
    given = dict(scaling or {"rope_type": "none"})
    kind = given.get("rope_type", given.get("type"))
    kind = "none" if kind in (None, "default") else kind
    if kind not in KINDS:
        raise KernelError(f"rope_tables: rope_type is one of {', '.join(KINDS)}, not {kind!r}")
    inverse, magnitude = _frequencies(kind, given, rotary_dim, base, positions.device)
    angles = positions.unsqueeze(-1).to(torch.float64) * inverse
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def _frequencies(kind: str, given: dict[str, Any], dim: int, base: float, device: torch.device) -> tuple[Tensor, float]:
    """Radians a position of each pair, and what cosines and sines are multiplied with."""
    factor = float(given.get("factor", 1.0))
    if kind == "ntk":
        base = base * factor ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    plain = base**-exponent
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        return _llama3(plain, given, factor), 1.0
    if kind == "yarn":
        return _yarn(plain, given, factor, dim, base)
    return plain, 1.0


def _llama3(plain: Tensor, given: dict[str, Any], factor: float) -> Tensor:
    """Long waves slowed by the factor, short ones kept, those between blended."""
    low, high = float(given.get("low_freq_factor", 1.0)), float(given.get("high_freq_factor", 4.0))
    length = float(given.get("original_max_position_embeddings", 8192))
    turns = length * plain / (2 * math.pi)  # rotations over the context the model was trained on
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(plain: Tensor, given: dict[str, Any], factor: float, dim: int, base: float) -> tuple[Tensor, float]:
    """Dims that turn often are kept, those that turn rarely are slowed, with a ramp between; attention is sharpened."""
    fast, slow = float(given.get("beta_fast", 32.0)), float(given.get("beta_slow", 1.0))
    length = float(given.get("original_max_position_embeddings", 4096))

    def dim_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim_of(fast)), 0), min(math.ceil(dim_of(slow)), dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float64, device=plain.device)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    magnitude = given.get("attention_factor")
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain / factor * ramp + plain * (1 - ramp), float(magnitude)
