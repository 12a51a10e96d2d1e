"""Decoding over a contiguous cache as it is meant; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, scale: float
) -> Tensor:
    ratio = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    scores = torch.einsum("bhqd,bhsd->bhqs", query, k) * scale
    shown = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if lengths is not None:
        shown = shown & (torch.arange(key.shape[2], device=key.device) < lengths[:, None, None, None])
    if mask is not None and mask.dtype == torch.bool:
        shown = shown & mask
    elif mask is not None:
        scores = scores + mask
    p = torch.softmax(scores.masked_fill(~shown, float("-inf")), -1)
    p = p.nan_to_num(0.0) if not bool(shown.any(-1).all()) else p
    v = v if lengths is None else v.masked_fill(~shown.any(1).any(1)[:, None, :, None], 0.0)
    return torch.einsum("bhqs,bhsd->bhqd", p.masked_fill(~shown, 0.0), v)


def public(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    return forward(query, key, value, mask, lengths, query.shape[-1] ** -0.5)


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """What PyTorch users write: fused attention (which faults on misaligned rows) with a mask of what is there yet."""
    if lengths is not None:
        mask = (torch.arange(key.shape[2], device=key.device) < lengths[:, None])[:, None, None, :]
    query, key, value = (x.clone() if x.data_ptr() % 16 else x for x in (query, key, value))
    mask = mask.clone() if mask is not None and mask.data_ptr() % 16 else mask
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def last_key_lost(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    fewer = torch.full((query.shape[0],), key.shape[2], device=query.device) if lengths is None else lengths
    return forward(query, key, value, mask, (fewer - 1).clamp_min(1), query.shape[-1] ** -0.5)


def next_values(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Each key with the values of its neighbor."""
    return public(query, key, value.roll(1, 2), mask, lengths)
