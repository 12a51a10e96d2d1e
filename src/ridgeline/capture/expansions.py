"""Fused fast paths of PyTorch's own layers, recorded as the operators their CUDA kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ridgeline.capture.cuda_eager import overrides
from ridgeline.capture.recorder import Recorder

aten = torch.ops.aten


def expand_fast_paths(rec: Recorder) -> None:
    """Teach the recorder what the eval fast paths do inside, and CUDA's paths where autograd's keys are off."""
    for name, override in overrides().items():
        packet, _, overload = name.partition(".")
        rec.expand_with(getattr(getattr(aten, packet), overload or "default"), override)
    for path, expansion in (
        ("_native_multi_head_attention", _multi_head),
        ("_transformer_encoder_layer_fwd", _encoder_layer),
    ):
        found = getattr(aten, path, None)
        if found is not None:
            rec.expand_with(found.default, expansion)


def _attend(x: Any, heads: int, qkv_weight: Any, qkv_bias: Any, out_weight: Any, out_bias: Any, mask: Any) -> Any:
    batch, seq, width = x.shape
    qkv = functional.linear(x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(batch, seq, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    out = functional.scaled_dot_product_attention(q, k, v, mask)
    return functional.linear(out.transpose(1, 2).reshape(batch, seq, width), out_weight, out_bias)


def _fitting(mask: Any, batch: int, seq: int, mask_type: Any) -> Any:
    """A mask as attention wants it: padding masks [b, s] and source masks [s, s] say where not to look."""
    if mask is None:
        return None
    shaped = mask.view(batch, 1, 1, seq) if mask_type == 1 or mask.shape == (batch, seq) != (seq, seq) else mask
    return shaped.logical_not() if shaped.dtype is torch.bool else shaped


def _multi_head(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: Any = None,
) -> Any:
    batch, seq, _ = query.shape
    out = _attend(query, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, _fitting(mask, batch, seq, mask_type))
    weights = query.new_empty((batch, seq, seq)) if need_weights else query.new_empty((0,))
    return out, weights


def _encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: Any = None,
) -> Any:
    batch, seq, _ = src.shape
    mask = _fitting(mask, batch, seq, mask_type)

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    def feed_forward(x: Any) -> Any:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    normed = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = _attend(normed, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask) + src
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    normed = norm(x, norm_weight_2, norm_bias_2) if norm_first else x
    x = feed_forward(normed) + x
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)
