"""Rewrites attention of one new token over a cache to our kernel, which splits the keys and skips hidden ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.kernels import decode_attention
from ridgeline.kernels.decode_attention.op import DECODE_ATTENTION
from ridgeline.kernels.launcher import overlapped, recording
from ridgeline.optimizer.rewrites.attention.backends import attention_call, cudnn_first, key_mask, repeated
from ridgeline.optimizer.rewrites.attention.masks import Constants, conjuncts
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite


@dataclass(frozen=True, slots=True)
class Found:
    """An attention call with one query position; a key mask is [batch, keys], and ``lengths`` replace one."""

    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float | None
    node: fx.Node
    is_key_mask: bool = False
    lengths: Any = None


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_key_mask: bool,
    lengths: Tensor | None = None,
) -> Tensor:
    """Our kernel; a key mask gets the dims of heads and queries.

    During a capture it is launched with programmatic dependent launch: its prologue overlaps the kernel before it.
    """
    mask = mask[:, None, None, :] if is_key_mask and mask is not None else mask
    with overlapped(recording()):
        return decode_attention(query, key, value, mask, lengths, scale)


def num_seen(last: Tensor, more: int, keys: int) -> Tensor:
    """The number of keys that each sequence sees, as a new tensor, because the source may change.

    Kernels count in 32 bits, so the number is clamped to the keys.
    """
    return last.reshape(-1).clamp(-1, keys) + more


@rewrite(
    "decode-attention",
    summary="attention of one query position over many keys becomes our kernel, key heads shared",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="lab/notes/attention.md"),
    exact="reordered",
    needs_kernels=True,
)
def decoding(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast or ctx.training else _read(ctx, node)
        if read is not None and (match := _put(ctx, read)) is not None:
            found.append(match)
    return found


def _read(ctx: GraphContext, node: fx.Node) -> Found | None:
    """An attention call whose query has one position."""
    found = _plain(node) or _ours(node)
    shape = None if found is None else ctx.shape(found.query)
    keys = None if found is None else ctx.shape(found.key)
    if found is None or shape is None or keys is None or len(shape) != 4 or shape[2] != 1 or len(keys) != 4:
        return None
    key, value = repeated(ctx, found.key), repeated(ctx, found.value)
    if key is not None and value is not None and ctx.unchanged((key, value), (found.key, found.value), node):
        found = replace(found, key=key, value=value)
    lengths = None if found.mask is None else _lengths(ctx, found, shape[0], keys[2])
    return found if lengths is None else replace(found, mask=None, is_key_mask=False, lengths=lengths)


def _lengths(ctx: GraphContext, found: Found, batch: int, keys: int) -> fx.Node | None:
    """Lengths equivalent to a mask that shows keys up to a number; keys beyond it are not read.

    Static caches mask their unwritten slots so. One node serves all layers with the same mask.
    """
    if not isinstance(found.mask, fx.Node):
        return None
    key = ("lengths", found.mask, batch, keys)
    if key not in ctx.notes or (ctx.notes[key] is not None and ctx.notes[key]._erased):
        ctx.notes[key] = _lengths_of(ctx, found.mask, batch, keys)
    return ctx.notes[key]


def _lengths_of(ctx: GraphContext, mask: fx.Node, batch: int, keys: int) -> fx.Node | None:
    sources = [each for each in mask.args[1:] if isinstance(each, fx.Node)] if mask.target is key_mask else [mask]
    known, limits = Constants(ctx), []
    for factor in (each for source in sources for each in conjuncts(ctx, source)):
        value = known.of(factor)
        if value is None:
            limits.append((factor, _limit(ctx, known, factor, batch, keys)))
        elif value.dtype is not torch.bool or not bool(value.all()):
            return None
    if len(limits) != 1 or known.buffers:
        return None
    factor, limit = limits[0]
    return None if limit is None else ctx.emit(factor, num_seen, *limit, keys)


def _limit(ctx: GraphContext, known: Constants, node: fx.Node, batch: int, keys: int) -> tuple[fx.Node, int] | None:
    """(number, 1) of ``arange(keys) <= number``, (number, 0) of ``arange(keys) < number``; per sequence or for all."""
    read = call(node)
    if read is None or read.op not in ("le", "lt", "ge", "gt"):
        return None
    places, last = (read["input"], read["other"]) if read.op in ("le", "lt") else (read["other"], read["input"])
    value, shape = known.of(places), ctx.shape(last)
    if value is None or shape is None or ctx.dtype(last) not in (torch.int64, torch.int32):
        return None
    if value.dim() == 0 or value.shape[-1] != keys or value.numel() != keys or value.is_floating_point():
        return None
    if not torch.equal(value.reshape(-1), torch.arange(keys, device=value.device, dtype=value.dtype)):
        return None
    padded = (1,) * (4 - len(shape)) + shape
    fits = len(padded) == 4 and padded[0] in (1, batch) and padded[1:] == (1, 1, 1)
    return (last, int(read.op in ("le", "ge"))) if fits else None


def _plain(node: fx.Node) -> Found | None:
    """PyTorch's function, or the one that prefers cuDNN. A causal mask over one row would hide all keys but one."""
    if node.target is cudnn_first:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if given.get("dropout_p") or given.get("is_causal"):
            return None
        return Found(given["query"], given["key"], given["value"], given.get("attn_mask"), given.get("scale"), node)
    read = attention_call(node)
    if read is None or read.dropout_p or read.is_causal:
        return None
    return Found(read.query, read.key, read.value, read.mask, read.scale, node)


def _ours(node: fx.Node) -> Found | None:
    """Our attention, inserted by an earlier rewrite."""
    if node.target is not ridgeline_attention or len(node.args) != 3:
        return None
    given = {name: value for name, value in node.kwargs.items() if value not in (None, False)}
    causal = given.pop("is_causal", False)
    whole = given.pop("lower_right", False)
    scale, mask = given.pop("scale", None), given.pop("key_mask", None)
    if given or (causal and not whole):
        return None
    query, key, value = node.args
    return Found(query, key, value, mask, scale, node, mask is not None)


def _put(ctx: GraphContext, found: Found) -> Match | None:
    mask = ctx.value(found.mask)
    if found.is_key_mask and isinstance(mask, Tensor):
        mask = mask[:, None, None, :]
    given = [ctx.value(each) for each in (found.query, found.key, found.value)]
    reason = DECODE_ATTENTION.support(*given, mask, ctx.value(found.lengths))
    if reason is not None:
        ctx.refuse(found.node, reason)
        return None
    new = ctx.emit(
        found.node, attended, found.query, found.key, found.value, found.mask, found.scale, found.is_key_mask,
        found.lengths,
    )  # fmt: skip
    if not ctx.same_shape(found.node, new):
        ctx.discard(new)
        return None
    found.node.replace_all_uses_with(new)
    ctx.relaxed = True
    ctx.discard(found.node)
    hidden = "" if found.lengths is None else ", those behind a length not read"
    return ctx.match(new, f"decoding over {(ctx.shape(found.key) or (0, 0, 0))[2]} keys{hidden}")
