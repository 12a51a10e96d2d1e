"""Latent decoding as it is meant, in its inputs' precision; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.paged_attention.reference import gathered


def forward(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int, scale: float
) -> Tensor:
    k = gathered(cache[:, :, None], block_table, seq_lens)[:, 0]
    seen = torch.arange(k.shape[1], device=query.device)[None, None, :] < seq_lens[:, None, None]
    scores = (query @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    return p @ k[..., :value_dim].masked_fill(~seen.transpose(1, 2), 0.0)


def public(query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int = 512) -> Tensor:
    return forward(query, cache, block_table, seq_lens, value_dim, query.shape[-1] ** -0.5)


def eager(query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int = 512) -> Tensor:
    """What PyTorch users write: pages gathered, a mask by length, attention with one shared key head."""
    k = gathered(cache[:, :, None], block_table, seq_lens)
    seen = torch.arange(k.shape[2], device=query.device)[None, :] < seq_lens[:, None]
    q = query[:, None].clone()  # [batch, one head, heads as rows, dim]
    return F.scaled_dot_product_attention(q, k, k[..., :value_dim].contiguous(), attn_mask=seen[:, None, None])[:, 0]


def last_key_lost(query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int = 512) -> Tensor:
    return public(query, cache, block_table, (seq_lens - 1).clamp_min(1), value_dim)


def rotary_part_lost(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, value_dim: int = 512
) -> Tensor:
    """Scores of the latent part alone."""
    kept = torch.arange(query.shape[-1], device=query.device) < value_dim
    return public(query * kept, cache, block_table, seq_lens, value_dim)
