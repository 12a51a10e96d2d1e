"""Attention of few rows in large batches: columns of tables, frames of a video at every pixel, patches of a series.

PyTorch's kernels give a tile of 64 or 128 mostly empty rows to each of thousands of problems. The kernel for windows
loops over many problems per CTA; a race at the first run of a shape decides which is faster.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.short_attention.op import MOST_DIM, MOST_KEYS, NARROW, SHORT_ATTENTION, VECTOR, short_attention
from ridgeline.optimizer.rewrites.attention.backends import Attention, attention_call
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def short(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention of few rows by the faster implementation; one opaque op for tracers."""
    if type(q) is Tensor and not _active_modes():
        return _short(q, k, v, bias, causal, scale)
    return torch.ops.ridgeline_optimizer.short(q, k, v, bias, causal, scale)


def _short(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, scale: float) -> Tensor:
    library = partial(_library, q, k, v, causal, scale)
    if not q.is_cuda:
        return library()
    ways: dict[str, Any] = {"library": library}
    if SHORT_ATTENTION.support(q, k, v, bias, scale) is None:
        ways["ours"] = partial(short_attention, q, k, v, bias, scale)
    key = (q.shape, q.stride(), k.shape, k.stride(), v.stride(), causal, q.dtype, q.device)
    return CONTEST.run(key, ways, q.device)


def _library(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """PyTorch's function with the layout of our result."""
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return found.transpose(1, 2).contiguous().transpose(1, 2)


_op = torch.library.custom_op("ridgeline_optimizer::short", _short, mutates_args=())


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, scale: float) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)


def plain_bias(q: Tensor, heads: int, rows: int, keys: int, causal: bool) -> Tensor:
    """The bias of plain or causal attention."""
    full = q.new_full((heads, rows, keys), float("-inf") if causal else 0.0)
    return (full.triu(1) if causal else full).unsqueeze(0).contiguous()


@rewrite(
    "short-attention",
    summary="attention of at most 128 rows and keys in large batches becomes one kernel for many, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=1.2, basis="a tile of 128 rows for 16 or 40; raced when first run"),
    needs_kernels=True,
)
def short_attentions(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_put(ctx, read) for node in ctx.nodes if (read := attention_call(node)) is not None]
    return [match for match in found if match is not None]


def _put(ctx: GraphContext, read: Attention) -> Match | None:
    q, k, v = (ctx.tensor(each) for each in (read.query, read.key, read.value))
    if read.mask is not None or read.dropout_p or read.enable_gqa or q is None or k is None or v is None:
        return None
    if None in map(ctx.shape, (read.query, read.key, read.value)) or not _fits(q, k, v, read.is_causal):
        return None
    scale = q.shape[3] ** -0.5 if read.scale is None else read.scale
    bias = _shared_bias(ctx, read, (q.shape[1], q.shape[2], k.shape[2]))
    new = ctx.emit(read.node, short, read.query, read.key, read.value, bias, read.is_causal, scale)
    if not ctx.same_shape(read.node, new):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    return ctx.match(new, f"attention {tuple(q.shape)}{' causal' if read.is_causal else ''}")


def _fits(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Few rows and keys, many problems, 16 bits, no shared heads."""
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return False
    if q.dtype not in NARROW or k.dtype != q.dtype or v.dtype != q.dtype or q.shape[3] % VECTOR:
        return False
    few = max(q.shape[2], k.shape[2]) <= MOST_KEYS and q.shape[3] <= MOST_DIM and (not causal or q.shape == k.shape)
    # With fewer problems no CTA would have more than one of them on the largest devices.
    return few and q.shape[0] * q.shape[1] >= 512 and min(q.shape[2], k.shape[2]) > 1


def _shared_bias(ctx: GraphContext, read: Attention, sizes: tuple[int, int, int]) -> fx.Node:
    """The bias equivalent to the call's causality, made once for all layers."""
    key = ("plain bias", sizes, read.is_causal, ctx.dtype(read.query))
    if key not in ctx.notes or ctx.notes[key]._erased:
        ctx.notes[key] = ctx.emit(read.node, plain_bias, read.query, *sizes, read.is_causal)
    return ctx.notes[key]
