"""Paged decoding as it is meant, in its inputs' precision; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gathered(cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """[batch, key heads, longest, head dim] of a [pages, page, key heads, head dim] cache."""
    batch, pages = block_table.shape
    flat = cache[block_table.long()].reshape(batch, pages * cache.shape[1], *cache.shape[2:])
    return flat.transpose(1, 2)


def forward(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    return _attended(query, key_cache, value_cache, block_table, seq_lens, scale, seq_lens)


def public(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    return forward(query, key_cache, value_cache, block_table, seq_lens, query.shape[-1] ** -0.5)


def eager(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """What PyTorch users write: pages gathered, a mask by length, fused attention (which faults on misaligned rows)."""
    query = query.clone() if query.data_ptr() % 16 else query
    k, v = (gathered(cache, block_table, seq_lens) for cache in (key_cache, value_cache))
    seen = torch.arange(k.shape[2], device=query.device)[None, :] < seq_lens[:, None]
    out = F.scaled_dot_product_attention(query[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    return out[:, :, 0]


def last_key_lost(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor
) -> Tensor:
    fewer = (seq_lens - 1).clamp_min(1)
    return _attended(query, key_cache, value_cache, block_table, fewer, query.shape[-1] ** -0.5, fewer)


def next_page(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor
) -> Tensor:
    """Values of the neighboring page."""
    return _attended(
        query, key_cache, value_cache.roll(1, 0), block_table, seq_lens, query.shape[-1] ** -0.5, seq_lens
    )


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, scale: float, seen_lens: Tensor
) -> Tensor:
    k, v = gathered(keys, table, lens), gathered(values, table, lens)
    ratio = query.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    seen = torch.arange(k.shape[2], device=query.device)[None, None, :] < seen_lens[:, None, None]
    scores = ((query[:, :, None] * k).sum(-1) * scale).masked_fill(~seen, float("-inf"))
    p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    return (p[..., None] * v.masked_fill(~seen[..., None], 0.0)).sum(-2)
