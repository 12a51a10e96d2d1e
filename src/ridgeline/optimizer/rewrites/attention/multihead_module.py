"""Rewrites ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` to the ops that they consist of.

``nn.MultiheadAttention`` returns its weights unless told not to: it then writes, normalizes and reads a number for
every pair of positions, and averages them over heads. Without weights attention is one call.
``nn.TransformerEncoderLayer`` in evaluation is one op of PyTorch, which no compiler fuses.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.attention.masks import BLOCKED, Constants, watch
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_INPUTS = ("query", "key", "value")
_UNUSED = ("bias_k", "bias_v", "static_k", "static_v")
"""Arguments that must be absent."""
_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@rewrite(
    "multi-head",
    summary="attention modules whose weights are unused become projections and one call of attention",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.3, basis="no weight a pair of positions written and read: two passes saved"),
    exact="reordered",
)
def multi_head(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    nodes = [node for node in ctx.nodes if node.target is F.multi_head_attention_forward]
    return [match for node in nodes if (match := _put(ctx, node)) is not None]


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    given, read = _given(node), list(node.users)
    first = [each for each in read if each.target is operator.getitem and each.args[1] == 0]
    if len(first) != len(read) or not first or given is None or not _is_plain(ctx, given):
        return None
    new = _analyze_mask(ctx, node, given)
    if not all(ctx.alike(each, new) for each in first):
        ctx.discard(new)
        return None
    for each in first:
        each.replace_all_uses_with(new)
        ctx.retire(each)
    ctx.retire(node)
    return ctx.match(new, f"attention module {ctx.shape(given['query'])}, {given['num_heads']} heads")


def _given(node: fx.Node) -> dict[str, Any] | None:
    try:
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_plain(ctx: GraphContext, given: dict[str, Any]) -> bool:
    """No dropout, no bias rows of its own, and masks on which both implementations of attention agree."""
    if any(given[name] is not None for name in _UNUSED) or given["add_zero_attn"]:
        return False
    weights = [given[name] for name in (_WEIGHTS if given["use_separate_proj_weight"] else ("in_proj_weight",))]
    if any(weight is None for weight in weights) or (given["dropout_p"] != 0 and given["training"]):
        return False
    shapes = [ctx.shape(given[name]) for name in _INPUTS]
    if any(shape is None or len(shape) != 3 for shape in shapes):
        return False
    width = given["embed_dim_to_check"]
    same = given["use_separate_proj_weight"] or all(shape is not None and shape[-1] == width for shape in shapes)
    return same and _masks_alike(ctx, given)


def _masks_alike(ctx: GraphContext, given: dict[str, Any]) -> bool:
    """Whether the result without weights, which is computed by fused attention, equals that with weights.

    With weights a row without keys is NaN, and without them zero: every row must be known to see a key.
    """
    masks = [given[name] for name in ("attn_mask", "key_padding_mask") if given[name] is not None]
    if any(ctx.dtype(mask) is not ctx.dtype(given["query"]) for mask in masks):
        return False
    if not given["need_weights"]:
        return True
    if given["key_padding_mask"] is not None:
        return False
    known = Constants(ctx)
    value = known.of(given["attn_mask"]) if masks else None
    if masks and (value is None or not bool((value > BLOCKED).any(-1).all())):
        return False
    watch(ctx, known.buffers)
    return True


def _masked(ctx: GraphContext, node: fx.Node, given: dict[str, Any]) -> dict[str, Any]:
    """The mask for PyTorch's attention: an additive one, or causality."""
    mask, keys = given["attn_mask"], given["key_padding_mask"]
    if given["is_causal"] and keys is None and not given["need_weights"]:
        return {"is_causal": True}
    length, batch, _ = ctx.shape(given["query"]) or (0, 0, 0)
    num_keys = (ctx.shape(given["key"]) or (0,))[0]
    if mask is not None and len(ctx.shape(mask) or ()) == 3:
        heads = (1, 1) if (ctx.shape(mask) or (0,))[0] == 1 else (batch, given["num_heads"])
        mask = ctx.emit(node, torch.reshape, mask, (*heads, length, num_keys))
    if keys is not None:
        hidden = _hidden_keys(ctx, keys) if mask is None else None
        keys = keys if hidden is None else ctx.emit(node, torch.logical_not, hidden)
        keys = ctx.emit(node, torch.reshape, keys, (batch, 1, 1, num_keys))
        mask = keys if mask is None else ctx.emit(node, torch.add, mask, keys)
    return {} if mask is None else {"attn_mask": mask}


def _hidden_keys(ctx: GraphContext, node: fx.Node) -> fx.Node | None:
    """The boolean from which the module made an additive mask of zeros and minus infinity."""
    read = call(node)
    if read is None or read.op != "masked_fill" or read["value"] != float("-inf"):
        return None
    zeros, hidden = call(read["input"]), read["mask"]
    return hidden if zeros is not None and zeros.op == "zeros_like" and ctx.dtype(hidden) is torch.bool else None


def _analyze_mask(ctx: GraphContext, node: fx.Node, given: dict[str, Any]) -> fx.Node:
    emit, heads = ctx.emit, given["num_heads"]
    length, batch, width = ctx.shape(given["query"]) or (0, 0, 0)
    parts = []
    for part in _projected(ctx, node, given):
        apart = emit(node, torch.unflatten, part, -1, (heads, width // heads))
        parts.append(emit(node, torch.permute, apart, (1, 2, 0, 3)))
    mixed = emit(node, F.scaled_dot_product_attention, *parts, **_masked(ctx, node, given))
    turned = emit(node, torch.permute, mixed, (2, 0, 1, 3))
    joined = emit(node, torch.reshape, turned, (length, batch, width))
    return emit(node, F.linear, joined, given["out_proj_weight"], given["out_proj_bias"])


def _projected(ctx: GraphContext, node: fx.Node, given: dict[str, Any]) -> list[fx.Node]:
    """Queries, keys and values, by one GEMM if they are projections of one tensor."""
    x, weight, bias = [given[name] for name in _INPUTS], given["in_proj_weight"], given["in_proj_bias"]
    apart = given["use_separate_proj_weight"]
    if x[0] is x[1] is x[2] and not apart:
        return _thirds(ctx, node, ctx.emit(node, F.linear, x[0], weight, bias), -1)
    weights = [given[name] for name in _WEIGHTS] if apart else _thirds(ctx, node, weight, 0)
    biases = [None] * 3 if bias is None else _thirds(ctx, node, bias, 0)
    return [ctx.emit(node, F.linear, *each) for each in zip(x, weights, biases, strict=True)]


def _thirds(ctx: GraphContext, node: fx.Node, whole: fx.Node, dim: int) -> list[fx.Node]:
    parts = ctx.emit(node, torch.chunk, whole, 3, dim)
    return [ctx.emit(node, operator.getitem, parts, i) for i in range(3)]


_LAYER = getattr(torch, "_transformer_encoder_layer_fwd", None)
_LAYER_NAMES = (
    "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "use_gelu", "norm_first",
    "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_weight_1", "ffn_bias_1",
    "ffn_weight_2", "ffn_bias_2", "mask", "mask_type",
)  # fmt: skip


@rewrite(
    "encoder-layer",
    summary="PyTorch's encoder layer in evaluation becomes norms, projections, attention and two GEMMs",
    modes=(INFERENCE,),
    worth=Worth(eager=1.1, compiled=1.3, basis="what follows products and norms is fused, which it is not in one call"),
    exact="reordered",
)
def encoder_layer(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast or _LAYER is None:
        return []
    nodes = [node for node in ctx.nodes if node.target is _LAYER]
    return [match for node in nodes if (match := _put_layer(ctx, node)) is not None]


def _put_layer(ctx: GraphContext, node: fx.Node) -> Match | None:
    given = dict(zip(_LAYER_NAMES, node.args, strict=False)) | dict(node.kwargs)
    given["mask"] = _narrow(given.get("mask"))
    src = ctx.tensor(given.get("src"))
    if len(ctx.shape(given.get("src")) or ()) != 3 or src is None or src.is_nested or not _shows_all(ctx, given):
        return None
    new = _layer(ctx, node, given)
    if not ctx.alike(node, new):
        ctx.discard(new)
        return None
    node.replace_all_uses_with(new)
    ctx.retire(node)
    return ctx.match(new, f"encoder layer {ctx.shape(given['src'])}, {given['num_heads']} heads")


def _narrow(mask: Any) -> Any:
    """A mask before it was repeated for every sample and head."""
    read = call(mask)
    return read["input"] if read is not None and read.op == "expand" else mask


def _shows_all(ctx: GraphContext, given: dict[str, Any]) -> bool:
    """Whether there is no mask, or a constant one that leaves every row a key."""
    mask, sizes = given.get("mask"), ctx.shape(given.get("src")) or (0, 0, 0)
    if mask is None:
        return True
    known = Constants(ctx)
    by_rows = (ctx.shape(mask) or ())[-2:] == (sizes[1], sizes[1]) and given.get("mask_type") != PADDED_KEYS
    value = known.of(mask) if by_rows else None
    if value is None or not bool((value == 0).any(-1).all()):
        return False
    watch(ctx, known.buffers)
    return True


PADDED_KEYS = 1
"""The layer's number for a mask of padded keys; 0 is a mask of positions, 2 both."""


def _seen(mask: Tensor) -> Tensor:
    """Where a mask shows keys: the layer hides nonzero elements."""
    return mask == 0


def _layer(ctx: GraphContext, node: fx.Node, given: dict[str, Any]) -> fx.Node:
    """The layer with norms first, or after the residual sums."""
    x, first = given["src"], given["norm_first"]
    mixed = _mixed(ctx, node, _normed(ctx, node, x, given, 1) if first else x, given)
    x = ctx.emit(node, torch.add, mixed, x)
    x = x if first else _normed(ctx, node, x, given, 1)
    inner = _normed(ctx, node, x, given, 2) if first else x
    inner = ctx.emit(node, F.linear, inner, given["ffn_weight_1"], given["ffn_bias_1"])
    inner = _activated(ctx, node, inner, given)
    inner = ctx.emit(node, F.linear, inner, given["ffn_weight_2"], given["ffn_bias_2"])
    x = ctx.emit(node, torch.add, inner, x)
    return x if first else _normed(ctx, node, x, given, 2)


def _activated(ctx: GraphContext, node: fx.Node, x: fx.Node, given: dict[str, Any]) -> fx.Node:
    """On a GPU the layer computes GELU by tanh in a GEMM epilogue, whatever the module was configured with."""
    if not given["use_gelu"]:
        return ctx.emit(node, torch.relu, x)
    src = ctx.tensor(given["src"])
    return ctx.emit(node, F.gelu, x, approximate="tanh" if src is not None and src.is_cuda else "none")


def _normed(ctx: GraphContext, node: fx.Node, x: fx.Node, given: dict[str, Any], which: int) -> fx.Node:
    weight, bias = given[f"norm_weight_{which}"], given[f"norm_bias_{which}"]
    return ctx.emit(node, F.layer_norm, x, (given["embed_dim"],), weight, bias, given["eps"])


def _mixed(ctx: GraphContext, node: fx.Node, x: fx.Node, given: dict[str, Any]) -> fx.Node:
    """Self-attention of [B, L, E]."""
    emit, heads, width = ctx.emit, given["num_heads"], given["embed_dim"]
    parts = []
    for part in _thirds(ctx, node, emit(node, F.linear, x, given["qkv_weight"], given["qkv_bias"]), -1):
        parts.append(emit(node, torch.transpose, emit(node, torch.unflatten, part, -1, (heads, width // heads)), 1, 2))
    mask = given.get("mask")
    masked = {} if mask is None else {"attn_mask": emit(node, _seen, mask)}
    turned = emit(node, torch.transpose, emit(node, F.scaled_dot_product_attention, *parts, **masked), 1, 2)
    return emit(node, F.linear, emit(node, torch.flatten, turned, 2), given["proj_weight"], given["proj_bias"])
