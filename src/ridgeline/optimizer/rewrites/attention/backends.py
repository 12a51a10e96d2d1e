"""Chooses what computes attention: masks become flags, repeated keys are shared, then our kernel or cuDNN's."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.kernels.contract import primitive
from ridgeline.optimizer.rewrites.attention.masks import (
    Mask,
    Pattern,
    analyze_mask,
    watch,
)
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite

_RACED = "lab/notes/optimized-models.md: taken only where the race was won"


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of scaled dot-product attention."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    node: fx.Node


def attention_call(node: fx.Node) -> Attention | None:
    read = call(node)
    if read is None or read.op != "attention":
        return None
    names = ("query", "key", "value")
    if not all(isinstance(read.given.get(name), fx.Node) for name in names):
        return None
    p, causal, scale = read.get("dropout_p", 0.0), read.get("is_causal", False), read.given.get("scale")
    if not isinstance(p, (int, float)) or not isinstance(causal, bool) or isinstance(scale, fx.Node):
        return None
    mask, gqa = read.given.get("attn_mask"), bool(read.get("enable_gqa", False))
    q, k, v = (read[name] for name in names)
    return Attention(q, k, v, mask, float(p), causal, scale, gqa, node)


def _replace_call(
    ctx: GraphContext, old: Attention, target: Any = F.scaled_dot_product_attention, **changes: Any
) -> fx.Node | None:
    """Replace the call by one with some arguments changed; None if more than its layout would change."""
    fields = {name: changes.get(name, getattr(old, name)) for name in Attention.__slots__}
    new = ctx.emit(
        old.node, target, fields["query"], fields["key"], fields["value"], attn_mask=fields["mask"],
        dropout_p=fields["dropout_p"], is_causal=fields["is_causal"], scale=fields["scale"],
        enable_gqa=fields["enable_gqa"],
    )  # fmt: skip
    if not ctx.same_shape(old.node, new):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(old.node, new)
    ctx.retire(old.node)
    return new


@rewrite(
    "mask",
    summary="a mask that is causal, or hides nothing, becomes a flag",
    worth=Worth(
        eager=1.3, compiled=1.4, basis="with a mask in memory PyTorch loses its flash kernels: BERT-large 27 -> 40 ms"
    ),
)
def mask(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = attention_call(node)
        if read is None or read.mask is None or read.is_causal:
            continue
        rows, keys = _sizes(ctx, read)
        parts = analyze_mask(ctx, read.mask, rows, keys)
        if parts is None or parts.keys or parts.pattern.shift or parts.pattern.window is not None:
            continue
        new = _replace_call(ctx, read, mask=None, is_causal=parts.pattern.causal)
        if new is not None:
            watch(ctx, parts.buffers)
            found.append(ctx.match(new, "causal mask" if parts.pattern.causal else "mask that hides nothing"))
    return found


def _sizes(ctx: GraphContext, read: Attention) -> tuple[int, int]:
    q, k = ctx.shape(read.query), ctx.shape(read.key)
    return (q[-2], k[-2]) if q is not None and k is not None else (-1, -1)


@rewrite(
    "grouped-keys",
    summary="keys and values repeated for every query head are shared instead",
    worth=Worth(eager=1.1, compiled=1.1, basis="a copy of keys and values less per layer"),
)
def grouped_keys(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = attention_call(node)
        if read is None or read.mask is not None or read.enable_gqa or not _fused_type(ctx, read.query):
            continue
        key, value = repeated(ctx, read.key), repeated(ctx, read.value)
        if key is None or value is None or ctx.shape(key) != ctx.shape(value):
            continue
        if not ctx.unchanged((key, value), (read.key, read.value), node):
            continue
        new = _replace_call(ctx, read, key=key, value=value, enable_gqa=True)
        if new is not None:
            found.append(ctx.match(new, f"{(ctx.shape(key) or (0, 0))[1]} key heads shared"))
    return found


def _fused_type(ctx: GraphContext, node: fx.Node) -> bool:
    """Dtypes whose fused kernels share key heads: float32 kernels do not, and would put scores in memory."""
    value = ctx.tensor(node)
    if value is None or value.shape[-1] > 256:
        return False
    return value.dtype in (torch.bfloat16, torch.float16) or value.device.type == "cpu"


def repeated(ctx: GraphContext, node: fx.Node) -> fx.Node | None:
    """The keys before every head was repeated; heads may have been after positions then."""
    read = call(node)
    if read is None or len(ctx.shape(node) or ()) != 4:
        return None
    if read.op == "contiguous":
        return repeated(ctx, read["input"])
    swapped = read.op == "transpose" and {read["dim0"] % 4, read["dim1"] % 4} == {1, 2}
    if swapped or (read.op == "permute" and tuple(each % 4 for each in read["dims"]) == (0, 2, 1, 3)):
        narrow = _repeated_along(ctx, read["input"], 2)
        return None if narrow is None else ctx.emit(node, torch.transpose, narrow, 1, 2)
    return _repeated_along(ctx, node, 1)


def _repeated_along(ctx: GraphContext, node: Any, dim: int) -> fx.Node | None:
    """The tensor before every element was repeated along a dim."""
    read, shape = call(node), ctx.shape(node)
    if read is None or shape is None or len(shape) != 4:
        return None
    if read.op == "contiguous":
        return _repeated_along(ctx, read["input"], dim)
    if read.op == "repeat_interleave" and read.given.get("dim") in (dim, dim - 4) and isinstance(read["repeats"], int):
        return read["input"] if isinstance(read["input"], fx.Node) else None
    wide = call(read["input"]) if read.op in ("reshape", "view", "flatten") else None
    wide_shape = None if wide is None else ctx.shape(wide.node)
    if wide is None or wide.op != "expand" or wide_shape is None or len(wide_shape) != 5:
        return None
    inner = call(wide["input"])
    narrow = None if inner is None else inner.given.get("input")
    before, behind = wide_shape[: dim + 1], wide_shape[dim + 2 :]
    if inner is None or not isinstance(narrow, fx.Node) or ctx.shape(wide["input"]) != (*before, 1, *behind):
        return None
    new_dim = inner.op == "unsqueeze" and inner["dim"] % 5 == dim + 1
    new_dim = new_dim or (inner.op == "getitem" and _inserts_dim(inner["index"], dim + 1))
    matches = shape == (*before[:-1], before[-1] * wide_shape[dim + 1], *behind)
    return narrow if new_dim and matches and ctx.shape(narrow) == (*before, *behind) else None


def _inserts_dim(index: Any, dim: int) -> bool:
    """Whether an index inserts one new dim at this position and keeps all others."""
    places = index if isinstance(index, tuple) else (index,)
    known = all(each is None or each is Ellipsis or each == slice(None) for each in places)
    if not known or places.count(None) != 1:
        return False
    at = places.index(None)
    return at == dim if Ellipsis not in places[:at] else len(places) - at == 5 - dim


# backends -------------------------------------------------------------------------------------------------------


def cudnn_first(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's function with cuDNN's kernels preferred."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


@rewrite(
    "attention-kernel",
    summary="scaled dot-product attention becomes our kernel, key masks included",
    worth=Worth(eager=1.1, compiled=1.1, basis=_RACED),
    needs_kernels=True,
)
def attention_kernel(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = attention_call(node)
        match = None if read is None or ctx.autocast else _kernel(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _kernel(ctx: GraphContext, read: Attention) -> Match | None:
    if read.dropout_p:
        ctx.refuse(read.node, "attention drops weights at random")
        return None
    parts = Mask(Pattern(causal=read.is_causal), (), ())
    if read.mask is not None:
        found = None if read.is_causal else analyze_mask(ctx, read.mask, *_sizes(ctx, read))
        if found is None:
            ctx.refuse(read.node, "the mask is neither causal nor one of keys")
            return None
        parts = found
    if not _is_wanted(ctx, read, parts):
        return None
    read = _with_shared_keys(ctx, read)
    options = _kernel_options(ctx, read, parts)
    if isinstance(options, str):
        ctx.refuse(read.node, options)
        return None
    new = ctx.emit(read.node, ridgeline_attention, read.query, read.key, read.value, **options)
    if not ctx.same_shape(read.node, new):
        ctx.discard(new)
        ctx.refuse(read.node, "the result's layout matters to what follows")
        return None
    watch(ctx, parts.buffers)
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    kind = " causal" if parts.pattern.causal else ""
    return ctx.match(
        new, f"attention {tuple(ctx.shape(read.query) or ())}{kind}{' key mask' if parts.keys else ''}"
    )


def _with_shared_keys(ctx: GraphContext, read: Attention) -> Attention:
    """The call with keys and values before they were repeated for every query head."""
    key, value = repeated(ctx, read.key), repeated(ctx, read.value)
    if key is None or value is None or (ctx.shape(key) or ())[:3] != (ctx.shape(value) or ())[:3]:
        return read
    shared = ctx.unchanged((key, value), (read.key, read.value), read.node)
    return replace(read, key=key, value=value) if shared else read


def _is_wanted(ctx: GraphContext, read: Attention, parts: Mask) -> bool:
    """Whether our kernel should compute a call; ``options={"attention": "always"}`` forces it."""
    query = ctx.tensor(read.query)
    if query is None or ctx.options.get("attention") == "always":
        return query is not None
    masked = bool(parts.keys) or parts.pattern.window is not None
    return wins(query, parts.pattern.causal, masked, ctx.training)


def wins(query: Tensor, causal: bool, masked: bool, training: bool) -> bool:
    """Whether our kernel is the fastest for a call, according to races; on a host it always runs."""
    if query.device.type != "cuda":
        return True
    # Our kernel assigns blocks of rows to SMs and does not split keys: decoding would use a fraction of them.
    if query.shape[2] < 64:
        return False
    if masked:
        return True
    # From 2,048 rows on our causal kernel with head dim 128 beats cuDNN's forward (1.02 to 1.14x); with fewer rows and
    # other head dims it loses (0.78x at 512 rows of 64), and so does its backward.
    return causal and not training and 96 < query.shape[3] <= 128 and query.shape[2] >= 2048


def _kernel_options(ctx: GraphContext, read: Attention, parts: Mask) -> dict[str, Any] | str:
    """The keyword arguments of our attention for a mask, or the reason why it is not supported."""
    rows, keys = _sizes(ctx, read)
    taken = kernel_arguments()
    options: dict[str, Any] = {"is_causal": parts.pattern.causal, "scale": read.scale}
    if parts.pattern.shift not in (0, keys - rows):
        return "the mask is shifted"
    if parts.pattern.causal and parts.pattern.shift and rows != keys:
        options["lower_right"] = True
    if parts.pattern.window is not None:
        if "window" not in taken:
            return "our kernel has no windows"
        options["window"] = parts.pattern.sides
    if parts.keys:
        if "key_mask" not in taken:
            return "our kernel takes no key masks"
        options["key_mask"] = _shared_key_mask(ctx, ctx.shape(read.query)[0], parts.keys)  # type: ignore[index]
    given = (ctx.value(x) for x in (read.query, read.key, read.value))
    reason = kernel_refusal(*given, **option_values(ctx, options))
    return options if reason is None else reason


def _shared_key_mask(ctx: GraphContext, batch: int, factors: tuple[fx.Node, ...]) -> fx.Node:
    """The mask of keys, computed once after its last factor for all layers that use it."""
    key = ("key mask", batch, factors)
    if key not in ctx.notes or ctx.notes[key]._erased:
        after = max(factors, key=ctx.position).next
        while after.op == "placeholder":
            after = after.next
        ctx.notes[key] = ctx.emit(after, key_mask, batch, *factors)
    return ctx.notes[key]


def option_values(ctx: GraphContext, options: dict[str, Any]) -> dict[str, Any]:
    return {name: ctx.value(value) for name, value in options.items()}


@cache
def kernel_arguments() -> frozenset[str]:
    """The parameters of our attention."""
    return frozenset(inspect.signature(ridgeline_attention).parameters)


def kernel_refusal(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    """Why our attention does not support these arguments, regardless of the device; None if it does."""
    support = primitive("attention").support
    key_mask, sinks, softcap = (options.get(name) for name in ("key_mask", "sinks", "softcap"))
    if not {"key_mask", "sinks", "softcap"} <= kernel_arguments():
        return support(query, key, value)
    scale = query.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    causal = bool(options.get("is_causal", False))
    return support(query, key, value, causal, scale, 0, key_mask, sinks, -1, -1, softcap or 0.0)


def key_mask(batch: int, *factors: Tensor) -> Tensor:
    """One boolean per batch element and key from factors that broadcast over heads and rows."""
    total = factors[0]
    for factor in factors[1:]:
        total = total & factor
    keys = total.shape[-1]
    return (
        total.expand(batch, 1, 1, keys).reshape(batch, keys)
        if total.dim() == 4
        else total.reshape(-1, keys).expand(batch, keys)
    )


@rewrite(
    "attention-cudnn",
    summary="scaled dot-product attention prefers cuDNN to FlashAttention-2",
    worth=Worth(eager=1.0, compiled=1.0, basis="PyTorch 2.11 asks cuDNN first on Hopper anyway; for others"),
    needs_kernels=True,
)
def attention_cudnn(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = attention_call(node)
        value = None if read is None else ctx.tensor(read.query)
        if read is None or value is None or value.dtype not in (torch.bfloat16, torch.float16):
            continue
        new = _replace_call(ctx, read, target=cudnn_first)
        if new is not None:
            found.append(ctx.match(new, f"attention {tuple(value.shape)}"))
    return found
