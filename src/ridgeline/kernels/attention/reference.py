"""Attention as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; row i sees keys up to i + shift. A row that sees none gets zeros."""
    scores = _scores(q, k, is_causal, scale, shift)
    lse = torch.logsumexp(scores, -1)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    return p @ _shared(v, q), lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; heads that share keys add up."""
    scores = _scores(q, k, is_causal, scale, shift)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    dp = do @ _shared(v, q).transpose(-1, -2)
    ds = p * (dp - (do * o).sum(-1, keepdim=True)) * scale
    grouped = (q.shape[0], k.shape[1], -1, *k.shape[2:])
    dk = (ds.transpose(-1, -2) @ q).reshape(grouped).sum(2)
    dv = (p.transpose(-1, -2) @ do).reshape(grouped).sum(2)
    return ds @ _shared(k, q), dk, dv


def public(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return forward(q, k, v, is_causal, q.shape[-1] ** -0.5, 0)[0]


def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's function; its fused kernels fault on rows that do not start on 16 bytes, so those are copied first."""
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def diagonal_hidden(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """A causal mask that is off by one."""
    return forward(q, k, v, True, q.shape[-1] ** -0.5, -1)[0] if is_causal else _one_block_lost(q, k, v)


def scale_lost(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Probabilities of scores that were not scaled quite right."""
    return forward(q, k, v, is_causal, q.shape[-1] ** -0.5 * 1.02, 0)[0]


def _one_block_lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = max(1, k.shape[2] - 1)
    return forward(q, k[:, :, :keep], v[:, :, :keep], False, q.shape[-1] ** -0.5, 0)[0]


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float, shift: int) -> Tensor:
    scores = q @ _shared(k, q).transpose(-1, -2) * scale
    if not is_causal:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(shift)
    return scores.masked_fill(~seen, float("-inf"))


def _shared(kv: Tensor, q: Tensor) -> Tensor:
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], 1)
