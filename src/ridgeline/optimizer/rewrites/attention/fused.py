"""Rewrites attention written as matmul, softmax and matmul to one call, with its masks, scales and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.kernels import attention as ridgeline_attention
from ridgeline.optimizer.rewrites.attention.backends import kernel_arguments, kernel_refusal, option_values, repeated
from ridgeline.optimizer.rewrites.attention.masks import (
    BLOCKED,
    Constants,
    Pattern,
    allowed_by,
    analyze_mask,
    pattern_of,
    watch,
)
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call, cast_target
from ridgeline.optimizer.rewrites.registry import Match, Worth, rewrite


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """softmax(q · kᵀ · scale + mask) · v, found as separate ops."""

    query: fx.Node
    key: fx.Node
    key_is_transposed: bool
    value: fx.Node
    scale: float
    softcap: float
    sinks: fx.Node | None
    mask: Any
    out: fx.Node
    inside: tuple[fx.Node, ...]
    is_transposed: bool = False  # value and result are transposed: v · weightsᵀ, positions last


@dataclass(frozen=True, slots=True)
class BiasAndMask:
    """A bias added to scores, and a mask applied after it."""

    added: fx.Node
    hidden: tuple[fx.Node, bool, float]


@dataclass(frozen=True, slots=True)
class Folded:
    """Biases added to scores while rows and keys are reshaped to the sides of an image."""

    parts: tuple[fx.Node, ...]
    folded: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Scores:
    """The ops between the first matmul and the softmax, read backwards."""

    scale: float
    softcap: float
    added: fx.Node | Folded | None
    hidden: tuple[fx.Node, bool, float] | None  # a boolean, whether it hides where true, and the filled-in score
    product: Call
    inside: tuple[fx.Node, ...]


@rewrite(
    "attention",
    summary="matmul, softmax, matmul becomes one call of scaled dot-product attention",
    worth=Worth(eager=2.0, compiled=1.5, basis="no scores in memory: 4 passes over rows x keys less"),
)
def spelled_attention(ctx: GraphContext) -> list[Match]:
    found: list[Match | None] = []
    for node in ctx.nodes:
        read = None if ctx.autocast else _read_unfused(ctx, node)
        if read is not None and not _is_special(read) and (match := _called(ctx, read)) is not None:
            found.append(match)
        elif read is None and (merged := _merged(ctx, node)) is not None:
            found.append(_replace_merged(ctx, merged))
    return [match for match in found if match is not None]


@rewrite(
    "attention-special",
    summary="attention as separate ops with capped scores or with sinks becomes our kernel",
    worth=Worth(eager=2.0, compiled=1.5, basis="no scores in memory; PyTorch's function has neither"),
    needs_kernels=True,
)
def special_attention(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else _read_unfused(ctx, node)
        if read is not None and _is_special(read) and (match := _special(ctx, read)) is not None:
            found.append(match)
    return found


def _is_special(read: UnfusedAttention) -> bool:
    """Whether scores are capped or there are sinks, which PyTorch's function does not support."""
    return bool(read.softcap) or read.sinks is not None


def _special(ctx: GraphContext, read: UnfusedAttention) -> Match | None:
    """Replace attention with capped scores or sinks by our kernel, if it supports the mask."""
    turned = read.key_is_transposed or read.is_transposed
    if not {"softcap", "sinks"} <= kernel_arguments() or len(ctx.shape(read.query) or ()) != 4 or turned:
        return None
    pattern, buffers = _known_pattern(ctx, read)
    if pattern is None:
        ctx.refuse(read.out, "the mask is neither causal nor a window")
        return None
    key, value = repeated(ctx, read.key), repeated(ctx, read.value)
    if key is None or value is None:
        key, value = read.key, read.value
    if not ctx.unchanged((read.query, key, value, read.sinks), (*read.inside, read.key, read.value), read.out):
        return None
    options: dict[str, Any] = {"is_causal": pattern.causal, "scale": read.scale}
    options |= {"softcap": read.softcap, "sinks": read.sinks}
    reason = kernel_refusal(*(ctx.value(x) for x in (read.query, key, value)), **option_values(ctx, options))
    if reason is not None:
        ctx.refuse(read.out, reason)
        return None
    if pattern.sides is not None:
        options["window"] = pattern.sides
    new = ctx.emit(read.out, ridgeline_attention, read.query, key, value, **options)
    if not ctx.same_shape(read.out, new):
        ctx.discard(new)
        return None
    watch(ctx, buffers)
    ctx.replace_any_layout(read.out, new)
    ctx.discard(read.out)
    return ctx.match(
        new, f"attention with {'capped scores' if read.softcap else 'sinks'}, {tuple(ctx.shape(read.query) or ())}"
    )


def _known_pattern(ctx: GraphContext, read: UnfusedAttention) -> tuple[Pattern | None, tuple[fx.Node, ...]]:
    """The constant mask pattern added to scores, and the buffers it was read from."""
    if read.mask is None:
        return Pattern(causal=False), ()
    if not isinstance(read.mask, fx.Node):
        return None, ()
    parts = analyze_mask(ctx, read.mask, *_lengths(ctx, read))
    if parts is None or parts.keys or parts.pattern.shift:
        return None, ()
    return parts.pattern, parts.buffers


def _read_unfused(ctx: GraphContext, node: fx.Node) -> UnfusedAttention | None:
    """Read the attention whose last matmul this node is."""
    product = _product(node)
    if product is None or not isinstance(product["other"], fx.Node):
        return None
    value, is_transposed = product["other"], False
    weights, inside, sinks = _weights(ctx, product["input"])
    if weights is None:
        value, (weights, inside, sinks), is_transposed = (
            product["input"],
            _transposed_weights(ctx, product["other"]),
            True,
        )
    if weights is None or not isinstance(value, fx.Node):
        return None
    scores = _scores(ctx, weights)
    if scores is None or scores.product["input"] is None:
        return None
    q, q_scale, q_inside = _scaled(scores.product["input"])
    k, k_scale, k_inside = _scaled(scores.product["other"])
    key, turned, turn_inside = _untransposed(ctx, k)
    scale = scores.scale * q_scale * k_scale
    mask: Any = scores.added if scores.hidden is None else scores.hidden
    if isinstance(scores.added, Folded) and scores.hidden is not None:
        return None
    if scores.hidden is not None and isinstance(scores.added, fx.Node):
        mask = BiasAndMask(scores.added, scores.hidden)
    everything = (*inside, *scores.inside, *q_inside, *k_inside, *turn_inside, node)
    return UnfusedAttention(q, key, turned, value, scale, scores.softcap, sinks, mask, node, everything, is_transposed)


def _product(node: Any) -> Call | None:
    read = call(node)
    return read if read is not None and read.op in ("matmul", "bmm") else None


def _transposed_weights(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...], fx.Node | None]:
    """The weights, transposed before the matmul with the values: v · weightsᵀ, in code that keeps channels before
    positions (early diffusion networks, non-local attention)."""
    inner, turned, step = _untransposed(ctx, node)
    if turned or len(node.users) != 1:
        return None, (), None
    weights, inside, sinks = _weights(ctx, inner)
    return weights, (*inside, *step), sinks


def _weights(ctx: GraphContext, node: Any) -> tuple[fx.Node | None, tuple[fx.Node, ...], fx.Node | None]:
    """(scores, nodes, sinks) of a softmax over the last dim, through casts, disabled dropout and dropped sinks."""
    nothing: tuple[None, tuple[fx.Node, ...], None] = (None, (), None)
    inside: list[fx.Node] = []
    dropped = False
    while True:
        read = call(node)
        if read is None or len(node.users) != 1:
            return nothing
        inside.append(node)
        if read.op == "softmax":
            break
        off = read.op == "dropout" and (read.get("training", True) is False or read.get("p", 0.5) == 0)
        last_dropped = read.op == "getitem" and read["index"] == (Ellipsis, slice(None, -1, None))
        if not off and not last_dropped and cast_target(read) is None:
            return nothing
        dropped = dropped or last_dropped
        node = read["input"]
    shape = ctx.shape(node)
    dim = read.given.get("dim")
    if shape is None or not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        return nothing
    if not dropped:
        return (read["input"], tuple(inside), None) if isinstance(read["input"], fx.Node) else nothing
    found = _before_sinks(ctx, read["input"])
    return nothing if found is None else (found[0], (*inside, *found[2]), found[1])


def _before_sinks(ctx: GraphContext, node: Any) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """(scores, sinks, nodes) of scores with one more column, the sink of each head, minus their maximum or not."""
    inside: list[fx.Node] = []
    read = call(node)
    if read is not None and read.op == "sub" and _is_row_maximum(read["other"], read["input"]):
        inside.append(node)
        node = read["input"]
        read = call(node)
    if read is None or read.op != "cat" or len(read["tensors"]) != 2 or read.get("dim", 0) not in (-1, 3):
        return None
    scores, column = read["tensors"]
    wide = call(column)
    turned = None if wide is None or wide.op != "expand" else call(wide["input"])
    if turned is None or turned.op not in ("view", "reshape") or not isinstance(turned["input"], fx.Node):
        return None
    heads = (ctx.shape(scores) or (0, 0))[1]
    if ctx.shape(turned.node) != (1, heads, 1, 1) or ctx.shape(turned["input"]) != (heads,):
        return None
    return scores, turned["input"], (*inside, node)


def _is_row_maximum(node: Any, of: Any) -> bool:
    """Whether a node is the maximum of each row of another, whose subtraction does not change a softmax."""
    read = call(node)
    if read is not None and read.op == "getitem" and read["index"] == 0:
        read = call(read["input"])
    if read is None or read.op not in ("max", "amax") or read["input"] is not of:
        return False
    return read.given.get("dim") in (-1, 3) and read.get("keepdim", False) is True


def _scores(ctx: GraphContext, node: fx.Node) -> Scores | None:
    """Follow scores back to their matmul: casts, scales, a bias and a mask after it.

    A scale after the mask scales the mask too: allowed only if it is a pattern before and after.
    """
    scale, softcap, hidden = 1.0, 0.0, None
    added: fx.Node | Folded | None = None
    inside: list[fx.Node] = []
    while True:
        read = call(node)
        if read is None or sum(not _reads_metadata(user, node) for user in node.users) != 1:
            return None
        inside.append(node)
        if read.op in ("matmul", "bmm"):
            return Scores(scale, softcap, added, hidden, read, tuple(inside))
        if cast_target(read) is not None:
            node = read["input"]
        elif not softcap and scale == 1.0 and (cap := _cap(read)) is not None:
            softcap, scale, node, steps = cap
            inside += steps
        elif (factor := _factor(read)) is not None:
            # backwards: everything met so far was done to the scaled scores
            scale, node = scale * factor[0], factor[1]
        elif added is None and not softcap and (step := _masking(ctx, read)) is not None:
            if step[2] is not None and hidden is not None:
                return None
            if scale != 1.0 and (hidden is not None or not _hides_after_scaling(ctx, step[1], scale, node)):
                return None
            node, added, hidden = step[0], step[1], hidden if step[2] is None else step[2]
        elif added is None and hidden is None and scale == 1.0 and (fold := _image_bias(ctx, read)) is not None:
            node, added, steps = fold
            inside += steps
        else:
            return None


def _image_bias(ctx: GraphContext, read: Call) -> tuple[fx.Node, Folded, list[fx.Node]] | None:
    """(scores, biases, nodes) of scores reshaped to the sides of an image for a sum, and back: relative positions by
    rows and columns (Segment Anything)."""
    sizes, folded = ctx.shape(read.node), ctx.shape(read.given.get("input"))
    if read.op not in ("view", "reshape") or sizes is None or folded is None or len(folded) <= len(sizes):
        return None
    parts: list[fx.Node] = []
    steps: list[fx.Node] = []
    node = read["input"]
    while True:
        inner = call(node)
        if inner is None or len(node.users) != 1:
            return None
        steps.append(node)
        if inner.op in ("view", "reshape") and ctx.shape(inner["input"]) == sizes:
            found = Folded(tuple(parts), folded, sizes)
            return (inner["input"], found, steps) if parts else None
        sides = (inner.given.get("input"), inner.given.get("other")) if inner.op == "add" else ()
        whole = [side for side in sides if ctx.shape(side) == folded]
        other = [side for side in sides if side not in whole and isinstance(side, fx.Node)]
        if len(whole) != 1 or len(other) != 1 or inner.given.get("alpha") not in (None, 1):
            return None
        node = whole[0]
        parts.append(other[0])


def flat_image_bias(folded: Sequence[int], sizes: Sequence[int], *parts: Tensor) -> Tensor:
    """The sum of the biases on the sides of an image, reshaped to rows and keys."""
    return sum(parts[1:], parts[0]).expand(folded).reshape(sizes)


def _hides_after_scaling(ctx: GraphContext, added: fx.Node | None, scale: float, scores: fx.Node) -> bool:
    """Whether the bias is a constant that leaves every row a key, and hides the others after scaling too (CodeGen)."""
    sizes = ctx.shape(scores)
    if added is None or sizes is None or not 0 < scale < float("inf"):
        return False
    key = ("scaled mask", added, scale, sizes[-2:])
    if key not in ctx.notes:
        plain = _constant_pattern(ctx, added, "added", *sizes[-2:]) is not None
        value = Constants(ctx).of(added) if plain else None
        ctx.notes[key] = value is not None and allowed_by(value * scale) is not None
    return ctx.notes[key]


def _reads_metadata(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node reads only the shape or dtype of another."""
    read = call(user)
    if read is None or read.op in ("full_like", "ones_like", "zeros_like"):
        return read is not None
    return read.op == "type_as" and read["other"] is node and read["input"] is not node


def _cap(read: Call) -> tuple[float, float, fx.Node, list[fx.Node]] | None:
    """(c, scale, x, nodes) of c · tanh(x · scale / c)."""
    outer = _factor(read)
    bent = None if outer is None else call(outer[1])
    if outer is None or bent is None or bent.op != "tanh" or len(outer[1].users) != 1:
        return None
    inner_read = call(bent["input"])
    inner = None if inner_read is None or len(bent["input"].users) != 1 else _factor(inner_read)
    if inner is None or outer[0] <= 0:
        return None
    return outer[0], inner[0] * outer[0], inner[1], [outer[1], bent["input"]]


def _factor(read: Call) -> tuple[float, fx.Node] | None:
    """(number, node) of a multiplication or division by a number."""
    if read.op == "div" and not read.given.get("rounding_mode"):
        number = _number(read["other"])
        return (1.0 / number, read["input"]) if number and isinstance(read["input"], fx.Node) else None
    if read.op != "mul":
        return None
    for node, other in ((read["input"], read["other"]), (read["other"], read["input"])):
        number = _number(other)
        if number is not None and isinstance(node, fx.Node):
            return number, node
    return None


def _masking(ctx: GraphContext, read: Call) -> tuple[fx.Node, fx.Node | None, Any] | None:
    """(scores, bias, mask) of an op that masks scores."""
    if read.op == "add" and read.given.get("alpha") in (None, 1):
        return _added(read)
    if read.op == "masked_fill" and isinstance(read["input"], fx.Node):
        value = _filled(ctx, read["value"])
        return None if value is None else (read["input"], None, (read["mask"], True, value))
    if read.op == "where" and isinstance(read.given.get("condition"), fx.Node):
        for scores, fill, where_true in ((read["input"], read["other"], False), (read["other"], read["input"], True)):
            value = _filled(ctx, fill)
            if value is not None and isinstance(scores, fx.Node):
                return scores, None, (read["condition"], where_true, value)
    return None


def _added(read: Call) -> tuple[fx.Node, fx.Node | None, Any] | None:
    """Which operand of a sum the scores are: the one that leads to a matmul."""
    for scores, mask in ((read["input"], read["other"]), (read["other"], read["input"])):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and _leads_to_matmul(scores):
            return scores, mask, None
    return None


def _leads_to_matmul(node: Any, depth: int = 6) -> bool:
    read = call(node)
    if read is None or depth == 0:
        return False
    if read.op in ("matmul", "bmm"):
        return True
    factor = _factor(read)
    passes = cast_target(read) is not None or read.op == "tanh"
    inner = factor[1] if factor is not None else read["input"] if passes else None
    return inner is not None and _leads_to_matmul(inner, depth - 1)


def _filled(ctx: GraphContext, value: Any) -> float | None:
    """The value of hidden scores, if it hides them."""
    number = _number(value)
    if number is None and isinstance(value, fx.Node):
        number = _fill_value(value)
    if number is None and isinstance(value, fx.Node):
        known = Constants(ctx).of(value)
        number = float(known) if known is not None and known.numel() == 1 else None
    return number if number is not None and number <= BLOCKED else None


def _fill_value(node: fx.Node) -> float | None:
    """The fill value of a ``full_like`` or ``ones_like``, through scales."""
    read = call(node)
    if read is None or read.op in ("full_like", "ones_like"):
        return None if read is None else 1.0 if read.op == "ones_like" else _number(read.given.get("fill_value"))
    factor = _factor(read)
    inner = None if factor is None else _fill_value(factor[1])
    return None if factor is None or inner is None else factor[0] * inner


def _scaled(node: fx.Node) -> tuple[fx.Node, float, tuple[fx.Node, ...]]:
    """A node before it was scaled, and the factor."""
    read = call(node)
    factor = None if read is None or len(node.users) != 1 else _factor(read)
    return (node, 1.0, ()) if factor is None else (factor[1], factor[0], (node,))


def _untransposed(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, bool, tuple[fx.Node, ...]]:
    """(key, False) if a node is a transposed key; (node, True) if it is stored transposed."""
    read = call(node)
    num = len(ctx.shape(node) or ())
    if read is not None and isinstance(read.given.get("input"), fx.Node) and num >= 3:
        dims = {d % num for d in (read.given.get("dim0"), read.given.get("dim1")) if isinstance(d, int)}
        order = tuple(d % num for d in read.given.get("dims", ()) if isinstance(d, int))
        swaps = read.op == "permute" and order == (*range(num - 2), num - 1, num - 2)
        if (read.op == "transpose" and dims == {num - 1, num - 2}) or read.op == "mT" or swaps:
            return read["input"], False, (node,)
    return node, True, ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _called(ctx: GraphContext, read: UnfusedAttention) -> Match | None:
    """Replace the ops by PyTorch's function."""
    read = _narrowed(ctx, read)
    shapes = [ctx.shape(node) for node in (read.query, read.key, read.value)]
    if any(shape is None or len(shape) not in (3, 4) for shape in shapes) or len({len(s) for s in shapes if s}) != 1:
        return None
    if len({ctx.dtype(node) for node in (read.query, read.key, read.value)}) != 1:
        return None
    masks = (read.mask.added, read.mask.hidden[0]) if isinstance(read.mask, BiasAndMask) else (read.mask,)
    masks = read.mask.parts if isinstance(read.mask, Folded) else masks
    leaves = (read.query, read.key, read.value, *(each for each in masks if isinstance(each, fx.Node)))
    if not ctx.unchanged(leaves, read.inside, read.out):
        ctx.refuse(read.out, "something is written between the scores and the result")
        return None
    mask = _mask_argument(ctx, read)
    if mask is None:
        ctx.refuse(read.out, "what is added to the scores has a type or shape that the function does not take")
        return None
    new = _emit_call(ctx, read, *mask)
    if read.is_transposed and not ctx.same_shape(read.out, new):
        new = ctx.emit(read.out, torch.clone, new, memory_format=torch.contiguous_format)
    if not ctx.same_shape(read.out, new):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.out, new)
    ctx.discard(read.out)
    return ctx.match(new, f"attention written out, {tuple(shapes[0] or ())}{' causal' if mask[1] else ''}")


def _narrowed(ctx: GraphContext, read: UnfusedAttention) -> UnfusedAttention:
    """Queries and keys before both were cast to float32 while values were not (GPT-J).

    Products of 16-bit numbers are exact in float32, in which the fused kernels keep scores.
    """
    like = ctx.dtype(read.value)
    casts = [call(node) for node in (read.query, read.key)]
    if ctx.training or like not in (torch.bfloat16, torch.float16) or ctx.dtype(read.out) != like:
        return read
    if any(each is None or cast_target(each) is not torch.float32 for each in casts):
        return read
    query, key = (each["input"] for each in casts if each is not None)
    if not all(isinstance(node, fx.Node) and ctx.dtype(node) == like for node in (query, key)):
        return read
    return replace(read, query=query, key=key, inside=(*read.inside, read.query, read.key))


# heads merged with the batch in the matmuls, and separate in the softmax (BLOOM) -----------------------------------


@dataclass(frozen=True, slots=True)
class Merged:
    """softmax(q · kᵀ · scale + bias · beta + mask) · v of tensors with heads merged into the batch."""

    leaves: tuple[fx.Node, fx.Node, fx.Node]
    scale: float
    bias: fx.Node
    beta: float
    mask: fx.Node | None
    sizes: tuple[int, ...]  # of the scores: batch, heads, rows, keys
    out: fx.Node
    inside: tuple[fx.Node, ...]


def _merged(ctx: GraphContext, node: fx.Node) -> Merged | None:
    product = None if ctx.training or ctx.autocast else _product(node)
    split = None if product is None else _viewed(ctx, product["input"], 4, 3)
    if product is None or split is None:
        return None
    scores, inside, sinks = _weights(ctx, split)
    mask, read = None, call(scores)
    if read is not None and read.op == "add" and read.given.get("alpha") in (None, 1) and len(read.node.users) == 1:
        inside, mask, scores = (*inside, read.node), read["other"], read["input"]
    merged = None if sinks is not None or scores is None else _viewed(ctx, scores, 3, 4)
    sizes = ctx.shape(scores)
    read = call(merged)
    if read is None or read.op != "baddbmm" or len(read.node.users) != 1 or sizes is None:
        return None
    scale, beta = _number(read.get("alpha", 1)), _number(read.get("beta", 1))
    key, turned, turn = _untransposed(ctx, read["batch2"])
    if not scale or not beta or turned or not isinstance(mask, (fx.Node, type(None))):
        return None
    leaves, everything = (read["batch1"], key, product["other"]), (*inside, *turn, split, scores, read.node, node)
    found = Merged(leaves, scale, read["input"], beta, mask, sizes, node, everything)
    return found if _fits(ctx, found) else None


def _viewed(ctx: GraphContext, node: Any, before: int, after: int) -> fx.Node | None:
    """The input of a view that only merges or splits the first two of four dims."""
    read = call(node)
    inner = None if read is None or read.op not in ("view", "reshape") or len(node.users) != 1 else read["input"]
    a, b = ctx.shape(inner), ctx.shape(node)
    if a is None or b is None or (len(a), len(b)) != (before, after):
        return None
    four, three = (a, b) if before == 4 else (b, a)
    return inner if (four[0] * four[1], *four[2:]) == three else None


def _fits(ctx: GraphContext, read: Merged) -> bool:
    """Whether shapes and dtypes are those of attention, and bias and mask may be added up first.

    In float16 the sum of a bias and the lowest number may overflow, which changes rows without keys.
    """
    batch, heads, rows, keys = read.sizes
    given = (*read.leaves, read.bias, *(() if read.mask is None else (read.mask,)))
    if len({ctx.dtype(node) for node in given}) != 1 or ctx.dtype(read.bias) not in (torch.bfloat16, torch.float32):
        return False
    q, k, v, bias = (ctx.shape(node) for node in given[:4])
    if q is None or k is None or v is None or {len(q), len(k), len(v)} != {3} or bias is None:
        return False
    mask = (1,) * 4 if read.mask is None else ctx.shape(read.mask)
    if mask is None or len(mask) != 4 or any(have not in (1, want) for have, want in zip(mask, read.sizes)):
        return False
    alike = q == (batch * heads, rows, k[2]) and k[:2] == v[:2] == (batch * heads, keys)
    return alike and bias in ((batch * heads, 1, keys), (batch * heads, rows, keys))


def _replace_merged(ctx: GraphContext, read: Merged) -> Match | None:
    """PyTorch's function on tensors with heads split from the batch; the bias is computed once for all layers."""
    key = ("merged bias", read.bias, read.beta, read.mask, read.sizes)
    known = ctx.notes.get(key)
    shared = (known,) if known is not None and not known._erased else ()
    given = (*read.leaves, read.bias, *(() if read.mask is None else (read.mask,)))
    if not ctx.unchanged(given, (*read.inside, *shared), read.out):
        ctx.refuse(read.out, "something is written between the scores and the result")
        return None
    added = shared[0] if shared else ctx.emit(read.out, merged_bias, read.bias, read.beta, read.mask, read.sizes)
    q, k, v = (_apart(ctx, node, read) for node in read.leaves)
    new = ctx.emit(read.out, F.scaled_dot_product_attention, q, k, v, attn_mask=added, scale=read.scale)
    old, put = read.out, new
    views = [user for user in old.users if (ctx.shape(user) == ctx.shape(new) and call(user) is not None)]
    view = call(views[0]) if len(views) == len(old.users) == 1 else None
    if view is not None and view.op in ("view", "reshape") and ctx.same_shape(view.node, new):
        old = view.node
    else:
        put = ctx.emit(read.out, torch.reshape, new, ctx.shape(read.out))
    if not ctx.same_shape(old, put):
        ctx.discard(put)
        return None
    ctx.notes[key] = added
    ctx.replace_any_layout(old, put)
    ctx.discard(old)
    return ctx.match(put, f"attention written out, heads merged with the batch, {tuple(ctx.shape(q) or ())}")


def _apart(ctx: GraphContext, node: fx.Node, read: Merged) -> fx.Node:
    """A tensor with heads split from the batch, or as it was before they were merged."""
    sizes = (*read.sizes[:2], *(ctx.shape(node) or ())[1:])
    inner = call(node)
    if inner is not None and inner.op in ("view", "reshape") and ctx.shape(inner["input"]) == sizes:
        if ctx.unchanged((inner["input"],), (node, *read.inside), read.out):
            return inner["input"]
    return ctx.emit(read.out, torch.reshape, node, sizes)


def merged_bias(bias: Tensor, beta: float, mask: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """The sum of a bias with heads merged into the batch, and a mask."""
    apart = (bias if beta == 1 else bias * beta).reshape(*sizes[:2], -1, sizes[3])
    return finite_mask(apart if mask is None else apart + mask)


LOWEST = -1e30
"""Lower finite values are raised to this. Kernels scale scores to base 2, which makes the lowest number of a dtype
infinite: a row without keys is the mean of all values in eager code, and was zero there (torch 2.11, H200)."""


def finite_mask(added: Tensor) -> Tensor:
    if added.dtype is torch.float16:
        return added
    return torch.where(added == float("-inf"), added, added.clamp_min(LOWEST))


def _finite_mask(ctx: GraphContext, mask: fx.Node, at: fx.Node) -> fx.Node:
    """A mask for fused kernels, computed once for all layers; a constant that leaves every row a key is unchanged."""
    constant = Constants(ctx).of(mask)
    if constant is not None and not bool((constant <= LOWEST).all(-1).any()):
        return mask
    key = ("finite_mask", mask)
    known = ctx.notes.get(key)
    if known is None or known._erased or not ctx.unchanged((mask,), (known,), at):
        known = ctx.notes[key] = ctx.emit(at, finite_mask, mask)
    return known


def _emit_call(ctx: GraphContext, read: UnfusedAttention, mask: fx.Node | None, causal: bool) -> fx.Node:
    q, k, v, at = read.query, read.key, read.value, read.out
    if read.key_is_transposed:
        k = ctx.emit(at, torch.transpose, k, -2, -1)
    if read.is_transposed:
        v = ctx.emit(at, torch.transpose, v, -2, -1)
    flat = len(ctx.shape(q) or ()) == 3
    if flat:
        q, k, v = (ctx.emit(at, torch.unsqueeze, x, 1) for x in (q, k, v))
        mask = None if mask is None else ctx.emit(at, torch.unsqueeze, mask, -3)
    new = ctx.emit(
        at, F.scaled_dot_product_attention, q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=causal, scale=read.scale
    )
    new = ctx.emit(at, torch.squeeze, new, 1) if flat else new
    return ctx.emit(at, torch.transpose, new, -2, -1) if read.is_transposed else new


def _mask_argument(ctx: GraphContext, read: UnfusedAttention) -> tuple[fx.Node | None, bool] | None:
    """(mask, is_causal) for PyTorch's function; None if the mask is not supported."""
    if read.mask is None:
        return None, False
    rows, keys = _lengths(ctx, read)
    if isinstance(read.mask, fx.Node):
        found = _constant_pattern(ctx, read.mask, "added", rows, keys)
        if found is not None:
            watch(ctx, found[1])
            return None, found[0].causal
        bias = ctx.tensor(read.mask)
        if bias is None or bias.dtype != ctx.dtype(read.query) or (ctx.training and bias.requires_grad):
            return None
        return _finite_mask(ctx, read.mask, read.out), False
    if isinstance(read.mask, BiasAndMask):
        condition, hides, number = read.mask.hidden
        like, bias = ctx.dtype(read.query), ctx.tensor(read.mask.added)
        known = bias is not None and bias.dtype == like and ctx.dtype(condition) is torch.bool
        if not known or ctx.training or like is None:
            return None
        number = number if number == float("-inf") else max(number, torch.finfo(like).min, LOWEST)
        return ctx.emit(read.out, masked_bias, read.mask.added, condition, hides, number), False
    if isinstance(read.mask, Folded):
        fold = read.mask
        alike = all(ctx.dtype(part) == ctx.dtype(read.query) for part in fold.parts) and not ctx.training
        return (ctx.emit(read.out, flat_image_bias, fold.folded, fold.sizes, *fold.parts), False) if alike else None
    condition, hides, number = read.mask
    found = _constant_pattern(ctx, condition, "hidden" if hides else "seen", rows, keys)
    if found is not None:
        watch(ctx, found[1])
        return None, found[0].causal
    if ctx.dtype(condition) is not torch.bool:
        return None
    if number == float("-inf"):
        allowed = ctx.emit(read.out, torch.logical_not, condition) if hides else condition
        return allowed, False
    like = ctx.dtype(read.query)
    limit = max(torch.finfo(like).min, LOWEST)  # type: ignore[arg-type]
    added = ctx.emit(read.out, additive_mask, condition, hides, max(number, limit), like)
    return added, False


def masked_bias(added: Tensor, condition: Tensor, hides: bool, number: float) -> Tensor:
    return torch.where(condition, number, added) if hides else torch.where(condition, added, number)


def additive_mask(condition: Tensor, hides: bool, number: float, dtype: torch.dtype) -> Tensor:
    """An additive mask with a finite number, so that rows without keys stay finite."""
    zero = torch.zeros((), dtype=dtype, device=condition.device)
    return torch.where(condition, number, zero) if hides else torch.where(condition, zero, number)


def _constant_pattern(
    ctx: GraphContext, node: fx.Node, kind: str, rows: int, keys: int
) -> tuple[Pattern, tuple[fx.Node, ...]] | None:
    """The pattern of a constant mask and the buffers it was read from, computed once for all layers."""
    key = ("pattern", node, kind, rows, keys)
    if key not in ctx.notes:
        known = Constants(ctx)
        value = known.of(node)
        allowed = None
        if value is not None and kind == "added":
            allowed = allowed_by(value) if value.is_floating_point() else None
        elif value is not None and value.dtype is torch.bool:
            allowed = ~value if kind == "hidden" else value
        pattern = None if allowed is None else pattern_of(allowed, rows, keys)
        plain = pattern is not None and pattern.shift == 0 and pattern.window is None
        ctx.notes[key] = (pattern, tuple(known.buffers)) if plain else None
    return ctx.notes[key]


def _lengths(ctx: GraphContext, read: UnfusedAttention) -> tuple[int, int]:
    q, k = ctx.shape(read.query), ctx.shape(read.key)
    return q[-2], k[-1] if read.key_is_transposed else k[-2]  # type: ignore[index]
