"""The blocks of a decoder layer: norms, attention in both forms, the gated MLP.

Shapes: T tokens, H heads, K key heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.llm.model.collectives import Group, Groups, copy_to, rank
from ridgeline.llm.model.config import Latent, ModelConfig
from ridgeline.llm.model.context import AttentionSpec, Context
from ridgeline.llm.model.rope import rotate


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor, group: Group = None) -> Tensor:
        """``group``: ranks that each normalize some of the heads with the same weight."""
        weight = copy_to(self.weight, group)
        if x.is_cuda:
            from ridgeline.kernels import rms_norm

            return rms_norm(x, weight, self.eps, offset=self.offset)
        return F.rms_norm(x, weight.shape, weight + self.offset if self.offset else weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""
        if x.is_cuda:
            from ridgeline.kernels import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)
        x = x + residual
        return self(x), x


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """The outputs of linear layers that share an input.

    Plain layers, and those of a class with a ``together`` of its own, have one backward pass: the products of the
    input's gradient add to one tensor. Split or adapted layers are called one by one.
    """
    kind = type(layers[0])
    whole = x.dim() == 2 and all(type(layer) is kind and not hasattr(layer.weight, "to_local") for layer in layers)
    if whole and kind is nn.Linear and torch.is_grad_enabled():
        return _Projections.apply(x, *(p for layer in layers for p in (layer.weight, layer.bias)))
    if whole and hasattr(kind, "together"):
        return kind.together(x, layers)
    return tuple(layer(x) for layer in layers)


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = params[::2], params[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad
        dx, found = None, []
        for i, (dy, weight) in enumerate(zip(grads, weights, strict=True)):
            if need_x:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            found += [dy.t() @ x if need[2 * i] else None, dy.sum(0) if need[2 * i + 1] else None]
        return dx, *found


class Attention(nn.Module):
    """Grouped-query attention: rotary, windows, caps, sinks and norms of queries and keys by configuration."""

    def __init__(self, config: ModelConfig, layer: int, groups: Groups) -> None:
        super().__init__()
        hidden, dim = config.hidden, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(dim, config.norm_eps, config.norm_offset)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        window = config.window(layer)
        self.rope = config.local_rope if window and config.local_rope else config.rope
        self.spec = AttentionSpec(layer, config.attention_scale or dim**-0.5, window, config.attention_softcap)
        self.dim, self.qk_norm, self.group = dim, config.qk_norm, groups.tensor

    def forward(self, x: Tensor, context: Context) -> Tensor:
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.dim)) for y in projected)
        if self.qk_norm:
            q, k = self.q_norm(q, self.group), self.k_norm(k, self.group)
        q, k = rotate(q, k, *context.rotary(self.rope, x.dtype), False)
        spec = self.spec
        if self.sinks is not None:
            heads = q.shape[1]  # those that this rank computes
            sinks = copy_to(self.sinks, self.group)[rank(self.group) * heads :][:heads]
            spec = replace(spec, sinks=sinks)
        return self.o_proj(context.attend(q, k, v, spec).flatten(1))


class LatentAttention(nn.Module):
    """DeepSeek's attention: a token's keys and values of all heads come from one compressed vector."""

    def __init__(self, config: ModelConfig, layer: int, groups: Groups) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent: Latent = config.latent
        hidden, heads, of = config.hidden, config.num_heads, config.latent
        if of.q_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, of.q_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(of.q_rank, 1e-6)
            self.q_b_proj = nn.Linear(of.q_rank, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, of.kv_rank + of.rope_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(of.kv_rank, 1e-6)
        self.kv_b_proj = nn.Linear(of.kv_rank, heads * (of.nope_dim + of.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * of.value_dim, hidden, bias=config.o_bias)
        self.spec, self.rope = AttentionSpec(layer, config.attention_scale), config.rope
        self.dim, self.group = config.head_dim, groups.tensor

    def forward(self, x: Tensor, context: Context) -> Tensor:
        of = self.latent
        q = self.q_proj(x) if of.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_pass, q_turned = q.unflatten(-1, (-1, self.dim)).split((of.nope_dim, of.rope_dim), -1)
        compressed, k_turned = self.kv_a_proj_with_mqa(x).split((of.kv_rank, of.rope_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (-1, of.nope_dim + of.value_dim))
        k_pass, v = kv.split((of.nope_dim, of.value_dim), -1)
        k_turned = copy_to(k_turned, self.group)[:, None]
        tables = context.rotary(self.rope, x.dtype)
        q_turned, k_turned = rotate(q_turned, k_turned, *tables, self.rope.interleaved)
        q = torch.cat((q_pass, q_turned), -1)
        k = torch.cat((k_pass, k_turned.expand(-1, q.shape[1], -1)), -1)
        return self.o_proj(context.attend(q, k, v, self.spec).flatten(1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated(gate, up, self.activation))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of ``gate``, times ``up``."""
    if gate.is_cuda and activation == "silu":
        from ridgeline.kernels import swiglu

        return swiglu(gate, up)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


class Embedding(nn.Embedding):
    """Token embeddings, scaled as Gemma does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.hidden)
        self.scale = config.embed_scale

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        # The factor is rounded to the model's type first, as the weights were trained; on the host, as a graph needs
        return x if self.scale == 1.0 else x * float(torch.tensor(self.scale, dtype=x.dtype, device="cpu"))
