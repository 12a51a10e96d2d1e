"""Cause: unfused attention."""

from __future__ import annotations

import contextlib
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.planted.networks import Trunk, flash
from lab.planted.programs import TRIED, adamw, asked, bf16, fused_adamw, ints, language, training
from lab.planted.registry import Program, Setting, case


def spelled_out(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Attention as the paper writes it: every score goes through memory several times."""
    scores_BHLL = q_BHLD @ k_BHLD.transpose(-2, -1) / math.sqrt(q_BHLD.shape[-1])
    if causal:
        length = scores_BHLL.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).triu(1)
        scores_BHLL = scores_BHLL.masked_fill(future, float("-inf"))
    return torch.softmax(scores_BHLL.float(), dim=-1).to(q_BHLD.dtype) @ v_BHLD


@case("unfused attention", "F.scaled_dot_product_attention(..., is_causal=True)", suite="planted")
def attention_spelled_out(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=6, heads=16, vocab=16384)
    model, batches = language(s, shape, 4, 2048, attend=flash if fixed else spelled_out)
    return Program(training(model, adamw(s, model), batches))


@case("unfused attention", "is_causal=True instead of a dense additive mask", suite="planted")
def attention_dense_mask(s: Setting, fixed: bool) -> Program:
    shape, length = s.shape(width=1024, layers=8, heads=16, vocab=16384), s.pick(4096, 16)
    model, batches = language(s, shape, 2, length)
    mask = torch.full((length, length), float("-inf"), device=s.device, dtype=torch.bfloat16).triu(1)[None, None]
    feed = ((x, y, None if fixed else mask) for x, y in batches)
    return Program(training(model, adamw(s, model), feed))


class Residues(nn.Module):
    """Which residues of a protein are hidden; attention by whichever kernel the context allows."""

    def __init__(self, kinds: int, dim: int, heads: int, depth: int, reference: bool) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(kinds, dim), Trunk(dim, heads, depth)
        self.tell, self.reference = nn.Linear(dim, kinds), reference

    def forward(self, ids: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.reference else contextlib.nullcontext():
            return self.tell(self.trunk(self.embed(ids)))


@case("unfused attention", "no sdpa_kernel(SDPBackend.MATH) around the network", suite="twenty-fifth", **TRIED)
def residues_by_the_reference_kernel(s: Setting, fixed: bool) -> Program:
    """Hidden residues of proteins; a context that was once entered to compare numbers is still there."""
    num, length = s.pick(16, 2), s.pick(1024, 8)
    model = s.place(lambda: Residues(32, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), reference=not fixed))
    ids, hidden, optimizer = ints(s, 32, num, length), ints(s, 32, num, length), fused_adamw(model)

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), hidden.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


class SpatialAttention(nn.Module):
    """Every place of a latent looks at every other: a few heads at a time, as on small devices, or by one kernel."""

    def __init__(self, d: int, h: int, slice_size: int | None) -> None:
        super().__init__()
        self.h, self.slice_size, self.scale = h, slice_size, (d // h) ** -0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.to_out = nn.Linear(d, d)

    def sliced(self, query: Tensor, key: Tensor, value: Tensor, slice_size: int) -> Tensor:
        out = torch.empty_like(query)
        for start in range(0, len(query), slice_size):
            part = slice(start, start + slice_size)
            scores = torch.einsum("bid,bjd->bij", query[part], key[part]) * self.scale
            out[part] = torch.einsum("bij,bjd->bid", scores.softmax(dim=-1), value[part])
        return out

    def forward(self, x: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        query, key, value = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))
        if self.slice_size is None:
            out = F.scaled_dot_product_attention(query, key, value)
        else:
            flat = (t.flatten(0, 1) for t in (query, key, value))
            out = self.sliced(*flat, self.slice_size).unflatten(0, (-1, self.h))
        return self.to_out(out.transpose(1, 2).flatten(2))


class LatentDenoiser(nn.Module):
    def __init__(self, channels: int, d: int, h: int, depth: int, slice_size: int | None) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(channels, d), nn.Linear(d, channels)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth))
        self.attns = nn.ModuleList(SpatialAttention(d, h, slice_size) for _ in range(depth))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(depth)
        )

    def forward(self, latents: Tensor) -> Tensor:
        x = self.inp(latents)
        for i, (attn, ff) in enumerate(zip(self.attns, self.ffs)):
            x = x + attn(self.norms[2 * i](x))
            x = x + ff(self.norms[2 * i + 1](x))
        return self.out(x)


@case("unfused attention", "F.scaled_dot_product_attention over all heads", suite="twenty-fourth", **TRIED)
def heads_a_slice_at_a_time(s: Setting, fixed: bool) -> Program:
    """Pictures drawn out of noise by a network whose attention is sliced, as one does where memory is short."""
    batch, places, channels, dim = s.pick(4, 1), s.pick(4096, 8), s.pick(8, 4), s.pick(512, 16)
    slice_size = None if fixed else s.pick(8, 2)
    model = s.place(lambda: LatentDenoiser(channels, dim, s.pick(8, 2), s.pick(6, 1), slice_size)).eval()
    start, sigmas = bf16(s, batch, places, channels), (1.0, 0.4, 0.0)

    def draw() -> Tensor:
        x = start
        for sigma, next_sigma in itertools.pairwise(sigmas):
            x = x + (next_sigma - sigma) * model(x)
        return x

    return asked(draw)
