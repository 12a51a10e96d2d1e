"""Rotary position embedding: inverse frequencies of every scaling in use, and the rotation itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.llm.model.config import Rope


def frequencies(rope: Rope, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2], and the factor that cosines and sines are multiplied by."""
    exponent = torch.arange(0, rope.dim, 2, device=device, dtype=dtype) / rope.dim
    plain = 1.0 / rope.theta**exponent
    scaling, factor = rope.scaling, float(rope.scaling.get("factor") or 1.0)
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        length, low, high = (
            float(scaling[key]) for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        turns = length * plain / (2 * math.pi)  # rotations within the trained length
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if rope.kind == "yarn":
        length = float(scaling["original_max_position_embeddings"])

        def dim_of(turns: float) -> float:
            return rope.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        first, last = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.dim - 1)
        index = torch.arange(rope.dim // 2, device=device, dtype=dtype)
        stretched = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
        found = plain / factor * stretched + plain * (1 - stretched)
        mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if scaling.get("attention_factor") is not None:
            return found, float(scaling["attention_factor"])
        if mscale and all_dims:
            return found, yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
        return found, yarn_scale(factor, 1.0)
    return plain, 1.0


def yarn_scale(factor: float, mscale: float) -> float:
    """How much longer contexts sharpen attention, after YaRN."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def tables(rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, dim / 2] in the model's type, computed in float32 or better."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse, factor = frequencies(rope, positions.device, wide)
    angles = positions.to(wide)[:, None] * inverse
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(q_THD: Tensor, k_TKD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; interleaved pairs come out in halves, which leaves their products the same."""
    if q_THD.is_cuda and not interleaved:
        from ridgeline.kernels import rope

        q, k = rope(q_THD[None], k_TKD[None], cos, sin, sequence_dim=1)
        return q.squeeze(0), k.squeeze(0)  # whose gradient is a view; that of q[0] is a copy
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turned(q_THD), turned(k_TKD)
