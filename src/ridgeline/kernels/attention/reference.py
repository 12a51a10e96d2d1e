"""Attention as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[int, int]


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int, key_mask: Tensor | None = None,
    sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp; a row that sees no key gets zeros."""
    scores, _ = _scores(q, k, is_causal, scale, shift, key_mask, left, right, softcap)
    lse = _log_sum(scores, sinks)
    return _probabilities(scores, lse) @ _shared(v, q), lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float, shift: int,
    key_mask: Tensor | None = None, sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the sinks; heads that share keys add up."""
    scores, slope = _scores(q, k, is_causal, scale, shift, key_mask, left, right, softcap)
    p = _probabilities(scores, lse)
    dp = do @ _shared(v, q).transpose(-1, -2)
    delta = (do * o).sum(-1, keepdim=True)
    ds = p * (dp - delta) * slope * scale
    group = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    dk = (ds.transpose(-1, -2) @ q).reshape(*group, *k.shape[2:]).sum(2)
    dv = (p.transpose(-1, -2) @ do).reshape(*group, *v.shape[2:]).sum(2)
    return ds @ _shared(k, q), dk, dv, sink_gradient(delta.squeeze(-1), lse, sinks)


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """What a head's sink takes away from every row of it; nothing where there are none."""
    if sinks is None:
        return delta.new_empty(0)
    return -((sinks[:, None] - lse).exp() * delta).sum((0, 2))


def public(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None, lower_right: bool = False,
    key_mask: Tensor | None = None, window: Window | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:  # fmt: skip
    shift = k.shape[2] - q.shape[2] if lower_right else 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return forward(q, k, v, is_causal, scale, shift, key_mask, sinks, *(window or (-1, -1)), softcap)[0]


def eager(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None, lower_right: bool = False,
    key_mask: Tensor | None = None, window: Window | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:  # fmt: skip
    """PyTorch's function; its fused kernels fault on rows that do not start on 16 bytes, so those are copied first.

    What it does not do is written out in the type of the inputs.
    """
    if key_mask is not None or window is not None or softcap or sinks is not None or lower_right:
        return _written_out(q, k, v, is_causal, scale, lower_right, key_mask, window, softcap, sinks)
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, lower_right: bool, key_mask: Tensor | None,
    window: Window | None, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """As models do it: products in the type of the inputs, the softmax between them in float32."""
    shift = k.shape[2] - q.shape[2] if lower_right else 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ _shared(k, q).transpose(-1, -2)).float() * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_seen(scores, is_causal, shift, key_mask, *(window or (-1, -1))), float("-inf"))
    p = _probabilities(scores, _log_sum(scores, None if sinks is None else sinks.float()))
    return p.to(v.dtype) @ _shared(v, q)


def diagonal_hidden(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *rest: Any) -> Tensor:
    """A causal mask that is off by one, or a key lost."""
    return forward(q, k, v, True, q.shape[-1] ** -0.5, -1)[0] if is_causal else _one_key_lost(q, k, v)


def scale_lost(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *rest: Any) -> Tensor:
    """Probabilities of scores that were not scaled quite right."""
    return forward(q, k, v, is_causal, q.shape[-1] ** -0.5 * 1.02, 0)[0]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int,
    is_causal: bool, scale: float, sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sequences one after the other, each attended by itself, bands aligned to the last row and key."""
    outs, sums = [q.new_zeros(q.shape[0], q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], q.shape[0])]
    for a, b, c, d in _pieces(q_starts, k_starts):
        one = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
        o, lse = forward(one[0], one[1], one[2], is_causal, scale, (d - c) - (b - a), None, sinks, left, right, softcap)
        outs.append(F.pad(o[0].transpose(0, 1), (0, 0, 0, 0, a, q.shape[0] - b)))
        sums.append(F.pad(lse[0], (a, q.shape[0] - b)))
    return torch.stack(outs).sum(0), torch.stack(sums).sum(0)


def varlen_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_starts: Tensor, k_starts: Tensor,
    longest_q: int, longest_k: int, is_causal: bool, scale: float, sinks: Tensor | None = None, left: int = -1,
    right: int = -1, softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dsinks = q.new_zeros(0 if sinks is None else sinks.shape[0])
    for a, b, c, d in _pieces(q_starts, k_starts):
        one = [x[None].transpose(1, 2) for x in (do[a:b], q[a:b], k[c:d], v[c:d], o[a:b])]
        found = backward(
            one[0], one[1], one[2], one[3], one[4], lse[None, :, a:b], is_causal, scale, (d - c) - (b - a), None, sinks,
            left, right, softcap,
        )  # fmt: skip
        dq[a:b], dk[c:d], dv[c:d] = (x[0].transpose(0, 1) for x in found[:3])
        dsinks = dsinks + found[3]
    return dq, dk, dv, dsinks


def varlen_public(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int,
    is_causal: bool = False, scale: float | None = None, window: Window | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, deterministic: bool = True,
) -> Tensor:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    edges = window or (-1, -1)
    return varlen(q, k, v, q_starts, k_starts, longest_q, longest_k, is_causal, scale, sinks, *edges, softcap)[0]


def varlen_eager(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int,
    is_causal: bool = False, scale: float | None = None, window: Window | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, deterministic: bool = True,
) -> Tensor:  # fmt: skip
    """One sequence after the other, in the type of the inputs."""
    outs = []
    for a, b, c, d in _pieces(q_starts, k_starts):
        one = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
        found = _written_out(one[0], one[1], one[2], is_causal, scale, True, None, window, softcap, sinks)
        outs.append(found[0].transpose(0, 1))
    return torch.cat(outs)


def neighbors_seen(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int,
    is_causal: bool = False, *rest: Any,
) -> Tensor:  # fmt: skip
    """A first key that belongs to the sequence before."""
    shifted = (k_starts - 1).clamp_min(0)
    shifted[-1] = k_starts[-1]
    return varlen_public(q, k, v, q_starts, shifted, longest_q, longest_k, is_causal)


def _pieces(q_starts: Tensor, k_starts: Tensor) -> list[tuple[int, int, int, int]]:
    a, c = q_starts.tolist(), k_starts.tolist()
    return list(zip(a[:-1], a[1:], c[:-1], c[1:], strict=True))


def _one_key_lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = max(1, k.shape[2] - 1)
    return forward(q, k[:, :, :keep], v[:, :, :keep], False, q.shape[-1] ** -0.5, 0)[0]


def _scores(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, shift: int, key_mask: Tensor | None, left: int, right: int,
    softcap: float,
) -> tuple[Tensor, Tensor | float]:  # fmt: skip
    """Scores with minus infinity where a key is not seen, and their slope against the ones before the cap."""
    scores: Tensor = q @ _shared(k, q).transpose(-1, -2) * scale
    slope: Tensor | float = 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, 1 - capped * capped
    seen = _seen(scores, is_causal, shift, key_mask, left, right)
    return scores.masked_fill(~seen, float("-inf")), slope


def _seen(scores: Tensor, is_causal: bool, shift: int, key_mask: Tensor | None, left: int, right: int) -> Tensor:
    """Which keys a row sees: a band around its own position, and those the mask keeps."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if is_causal or right >= 0:
        seen = seen.tril(shift + (0 if is_causal else right))
    if left >= 0:
        seen = seen.triu(shift - left)
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def _log_sum(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over keys and, where there is one, the sink; minus infinity where nothing is seen, with gradients of zero."""
    nothing = (scores == float("-inf")).all(-1)
    if scores.shape[-1] == 0:
        lse = scores.sum(-1).masked_fill(nothing, float("-inf"))
    else:
        lse = torch.logsumexp(scores.masked_fill(nothing[..., None], 0.0), -1).masked_fill(nothing, float("-inf"))
    if sinks is None:
        return lse
    sink = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
    return torch.where(nothing, sink, torch.logaddexp(lse.masked_fill(nothing, 0.0), sink))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()


def _shared(kv: Tensor, q: Tensor) -> Tensor:
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], 1)
