"""Who attends to whom: documents packed one after the other in training, pages of a cache when generating.

The blocks know attention only as ``context.attend(query, key, value, spec)`` on [tokens, heads, head dim], and
positions only as ``context.positions``. ``Packed`` is the context of training. A context with a key-value cache appends
``key`` and ``value`` of layer ``spec.layer`` to it and attends to everything cached; no block changes for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.llm.model.collectives import Group, gather_rows
from ridgeline.llm.model.config import Rope
from ridgeline.llm.model.rope import tables

MAX_KERNEL_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes."""

    layer: int
    scale: float
    window: int = 0  # keys a query sees, itself included; 0 is all before it
    softcap: float = 0.0
    sinks: Tensor | None = None


class Context(Protocol):
    positions: Tensor

    def rotary(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor: ...


@dataclass(slots=True)
class Packed:
    """Documents that lie one after the other; each token attends to those before it in its own document.

    ``starts`` (int32) says where the queries of each document begin, its last entries where all end; ``key_starts`` the
    same of keys. With context parallelism a rank has some tokens of every sequence: keys are gathered from all ranks,
    and ``key_index`` picks those that each of the rank's pieces of documents sees.
    """

    positions: Tensor
    starts: Tensor
    longest: int
    key_starts: Tensor | None = None
    key_index: Tensor | None = None
    longest_key: int = 0
    group: Group = None
    _tables: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotary(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, computed once a forward pass."""
        key = (id(rope), dtype)
        if key not in self._tables:
            self._tables[key] = tables(rope, self.positions, dtype)
        return self._tables[key]

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        key_starts, longest_key = self.starts, self.longest
        if self.key_index is not None and self.key_starts is not None:
            key_starts, longest_key = self.key_starts, self.longest_key
            k_TKD = gather_rows(k_TKD, self.group)[self.key_index]
            v_TKD = gather_rows(v_TKD, self.group)[self.key_index]
        dim, widest = q_THD.shape[-1], max(q_THD.shape[-1], v_TKD.shape[-1])
        narrow = q_THD.dtype in (torch.bfloat16, torch.float16)
        if q_THD.is_cuda and narrow and widest <= MAX_KERNEL_HEAD_DIM and dim % 8 == 0:
            from ridgeline.kernels import varlen_attention

            window = (spec.window - 1, 0) if spec.window else None
            return varlen_attention(
                q_THD, k_TKD, v_TKD, self.starts, key_starts, self.longest, longest_key, True, spec.scale, window,
                spec.softcap, spec.sinks,
            )  # fmt: skip
        starts, stops = self.starts.tolist(), key_starts.tolist()
        parts = [
            attend(q_THD[a:b], k_TKD[c:d], v_TKD[c:d], spec)
            for a, b, c, d in zip(starts, starts[1:], stops, stops[1:], strict=False)
            if b > a
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(q_LHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of one document in plain PyTorch; the last query sees the last key."""
    num_q, num_k = q_LHD.shape[0], k_SKD.shape[0]
    q, k, v = (x.transpose(0, 1) for x in (q_LHD, k_SKD, v_SKD))
    banded = num_q != num_k or 0 < spec.window < num_k
    mask = None
    if banded or spec.softcap or spec.sinks is not None:
        rows = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
        keys = torch.arange(num_k, device=q.device)
        mask = keys <= rows
        if spec.window:
            mask &= keys > rows - spec.window
    if not spec.softcap and spec.sinks is None:
        group = {"enable_gqa": True} if q.shape[0] != k.shape[0] else {}
        o = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=spec.scale, **group
        )
        return o[0].transpose(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q.to(wide) @ k.to(wide).transpose(1, 2) * spec.scale
    if spec.softcap:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask is not None else scores
    if spec.sinks is None:
        p = scores.softmax(-1)
    else:
        sinks = spec.sinks.to(wide)[:, None, None].expand(-1, num_q, 1)
        p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (p @ v.to(wide)).to(q.dtype).transpose(0, 1)
