"""Attention of few rows with a bias on its scores, as in window attention on images: one kernel.

PyTorch's function copies a bias for every batch element. Shifted windows add, besides the bias of their heads, a mask
that repeats with every image, in a view of five dims. Both are one bias that repeats through the batch. A race at the
first run of a shape decides which implementation is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.short_attention.op import MOST_DIM, MOST_KEYS, NARROW, SHORT_ATTENTION, short_attention
from ridgeline.kernels.short_attention.reference import library
from ridgeline.optimizer.rewrites.attention.backends import Attention, attention_call
from ridgeline.optimizer.rewrites.attention.fused import _factor as factor_of
from ridgeline.optimizer.rewrites.attention.fused import _leads_to_matmul, _product, _scaled, _untransposed, _weights
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

CONTEST = Contest()
LEAST_PROBLEMS = 64
"""Fewer problems leave most of a device idle with either implementation."""
_active_modes = torch._C._len_torch_dispatch_stack


def windowed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention with a repeating bias by the faster implementation; one opaque op for tracers."""
    if type(q) is Tensor and not _active_modes():
        return _windowed(q, k, v, bias, scale)
    return torch.ops.ridgeline_optimizer.windowed(q, k, v, bias, scale)


def _windowed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    given = (q, k, v, bias, scale)
    if not q.is_cuda:
        return short_attention(*given)
    ways: dict[str, Any] = {"library": partial(_library, *given)}
    if SHORT_ATTENTION.support(*given) is None:
        ways["ours"] = partial(short_attention, *given)
    key = (q.shape, q.stride(), k.shape, k.stride(), v.stride(), bias.shape, q.dtype, q.device)
    return CONTEST.run(key, ways, q.device)


def _library(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """PyTorch's function with the layout of our result."""
    return library(q, k, v, bias, scale).transpose(1, 2).contiguous().transpose(1, 2)


_op = torch.library.custom_op("ridgeline_optimizer::windowed", _windowed, mutates_args=())


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)


def total_bias(heads: int, rows: int, keys: int, dtype: torch.dtype, *terms: Tensor) -> Tensor:
    """All terms added to scores as one dense bias, [period, heads, rows, keys]."""
    whole = terms[0]
    for term in terms[1:]:
        whole = whole + term
    whole = whole if whole.dim() == 4 else whole.view((1,) * (4 - whole.dim()) + whole.shape)
    return whole.to(dtype).expand(-1, heads, rows, keys).contiguous()


@rewrite(
    "window-attention",
    summary="attention of few rows with a bias, shifted windows included, becomes one kernel, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.5, basis="scores are read and written five times in Swin; raced when first run"),
    needs_kernels=True,
)
def window_attention(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_put(ctx, node) for node in ctx.nodes if not node._erased]
    return [match for match in found if match is not None]


@dataclass(slots=True)
class Found:
    """Attention with biases: its last node, inner nodes, and the terms added to its scores, of at most four dims."""

    out: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    gain: fx.Node | None = None  # a factor per head, as cosine attention learns it
    terms: list[Any] = field(default_factory=list)  # a node, and the shape it is viewed in
    inside: list[fx.Node] = field(default_factory=list)


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    read = attention_call(node)
    found = _read_unfused(ctx, node) if read is None else _called(ctx, read)
    if found is None or not found.terms or not _fits(ctx, found):
        return None
    terms = [term for term, _ in found.terms]
    leaves = (found.query, found.key, found.value, found.gain, *terms)
    if not ctx.unchanged(leaves, (*found.inside, found.out), found.out):
        return None
    bias = _shared_bias(ctx, found)
    query = found.query if found.gain is None else ctx.emit(found.out, torch.mul, found.query, found.gain)
    new = ctx.emit(found.out, windowed, query, found.key, found.value, bias, found.scale)
    if not ctx.same_shape(found.out, new):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(found.out, new)
    ctx.discard(found.out)
    shape = ctx.shape(bias) or (0,)
    return ctx.match(new, f"attention {tuple(ctx.shape(found.query) or ())} with a bias of period {shape[0]}")


def _shared_bias(ctx: GraphContext, found: Found) -> fx.Node:
    """The sum of all biases, computed once for layers with the same terms."""
    q, k = ctx.shape(found.query) or (0, 0, 0, 0), ctx.shape(found.key) or (0, 0, 0, 0)
    key = ("bias", q[1], q[2], k[2], ctx.dtype(found.query), *found.terms)
    if key not in ctx.notes or ctx.notes[key]._erased:
        seen = [term if ctx.shape(term) == shape else ctx.emit(found.out, torch.reshape, term, shape)
                for term, shape in found.terms]  # fmt: skip
        ctx.notes[key] = ctx.emit(found.out, total_bias, q[1], q[2], k[2], ctx.dtype(found.query), *seen)
    return ctx.notes[key]


def _fits(ctx: GraphContext, found: Found) -> bool:
    """Few rows and keys, many problems, 16 bits, and biases that repeat evenly."""
    q, k, v = (ctx.tensor(each) for each in (found.query, found.key, found.value))
    if q is None or k is None or v is None or None in map(ctx.shape, (found.query, found.key, found.value)):
        return False
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.dtype not in NARROW:
        return False
    if max(q.shape[2], k.shape[2]) > MOST_KEYS or q.shape[3] > MOST_DIM or q.shape[0] * q.shape[1] < LEAST_PROBLEMS:
        return False
    sizes = {1: q.shape[1], 2: q.shape[2], 3: k.shape[2]}
    periods, full = {1}, False
    for term, shape in found.terms:
        kind = ctx.dtype(term)
        if kind is None or not kind.is_floating_point or len(shape) > 4:
            return False
        whole = (1,) * (4 - len(shape)) + tuple(shape)
        if any(whole[dim] not in (1, size) for dim, size in sizes.items()):
            return False
        full = full or whole[2:] == (q.shape[2], k.shape[2])
        periods.add(whole[0])
    return full and len(periods) <= 2 and q.shape[0] % max(periods) == 0  # key masks have other kernels


def _called(ctx: GraphContext, read: Attention) -> Found | None:
    """A call of PyTorch's function with a bias."""
    plain = not read.dropout_p and not read.is_causal and not read.enable_gqa
    if read.mask is None or not plain or ctx.tensor(read.mask) is None or ctx.shape(read.mask) is None:
        return None
    q = ctx.shape(read.query)
    if q is None or ctx.dtype(read.mask) is torch.bool:
        return None
    scale = q[-1] ** -0.5 if read.scale is None else read.scale
    found = Found(read.node, read.query, read.key, read.value, scale)
    found.terms.append((read.mask, ctx.shape(read.mask)))
    return found


def _read_unfused(ctx: GraphContext, node: fx.Node) -> Found | None:
    """Attention as separate ops with biases added to its scores, also in views of five dims."""
    product = _product(node)
    if product is None or not isinstance(product["other"], fx.Node):
        return None
    scores, inside, sinks = _weights(ctx, product["input"])
    if scores is None or sinks is not None:
        return None
    found = Found(node, node, node, product["other"], 1.0, inside=list(inside))
    made = _followed(ctx, scores, found)
    if made is None or not isinstance(made["input"], fx.Node) or not isinstance(made["other"], fx.Node):
        return None
    q, q_scale, q_inside = _scaled(made["input"])
    k, k_scale, k_inside = _scaled(made["other"])
    key, turned, turn_inside = _untransposed(ctx, k)
    if turned:
        return None
    found.query, found.key, found.scale = q, key, found.scale * q_scale * k_scale
    found.inside += [*q_inside, *k_inside, *turn_inside]
    return found


def _followed(ctx: GraphContext, node: fx.Node, found: Found) -> Call | None:
    """The matmul that scores come from; biases on the way are collected."""
    whole = ctx.shape(node)
    while whole is not None and len(whole) == 4:
        read = call(node)
        if read is None or len(node.users) != 1:
            return None
        found.inside.append(node)
        if read.op in ("matmul", "bmm"):
            return read if ctx.shape(node) == whole else None
        factor = factor_of(read)
        if cast_target(read) is not None or (read.op in ("view", "reshape") and _keeps(ctx, node, whole)):
            node = read["input"]
        elif factor is not None:
            found.scale, node = found.scale * factor[0], factor[1]
        elif read.op == "mul" and found.gain is None and (gained := _gained(ctx, read, whole)) is not None:
            node, found.gain = gained
        elif read.op == "add" and read.given.get("alpha") in (None, 1) and found.scale == 1.0 and not found.gain:
            step = _added(ctx, read, found, whole)  # backwards: nothing scales the scores after the sum
            if step is None:
                return None
            node = step
        else:
            return None
    return None


def _gained(ctx: GraphContext, read: Call, whole: tuple[int, ...]) -> tuple[fx.Node, fx.Node] | None:
    """(scores, factors) of scores multiplied by a number per head, in the dtype of the scores."""
    for scores, gain in ((read["input"], read["other"]), (read["other"], read["input"])):
        if not isinstance(scores, fx.Node) or not isinstance(gain, fx.Node):
            continue
        shape = ctx.shape(gain)
        if ctx.shape(scores) == whole and shape is not None and shape[-3:] == (whole[1], 1, 1):
            same = all(size == 1 for size in shape[:-3]) and ctx.dtype(gain) == ctx.dtype(scores)
            return (scores, gain) if same else None
    return None


def _keeps(ctx: GraphContext, node: fx.Node, whole: tuple[int, ...]) -> bool:
    """Whether a view of scores only splits or merges their batch."""
    shape = ctx.shape(node)
    return shape is not None and len(shape) in (4, 5) and shape[-3:] == whole[-3:]


def _added(ctx: GraphContext, read: Call, found: Found, whole: tuple[int, ...]) -> fx.Node | None:
    """The scores before a bias was added; the bias is collected in its repeating shape."""
    for scores, term in ((read["input"], read["other"]), (read["other"], read["input"])):
        if not isinstance(scores, fx.Node) or not isinstance(term, fx.Node):
            continue
        seen, shape = ctx.shape(scores), ctx.shape(term)
        if seen is None or shape is None or seen[-3:] != whole[-3:] or ctx.shape(read.node) != seen:
            continue
        if len(shape) > len(seen) or (seen == shape and not _leads_to_matmul(scores)):  # either may be the scores
            continue
        if len(seen) == 5 and len(shape) == 5:
            if shape[0] != 1:
                continue
            shape = shape[1:]  # the first of five dims counts images, which share the bias
        found.terms.append((term, shape))
        return scores
    return None
