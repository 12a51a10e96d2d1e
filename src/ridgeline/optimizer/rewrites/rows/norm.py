"""Recognizes RMSNorm and LayerNorm, as separate ops or calls, and fuses the residual sum before them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ridgeline.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ridgeline.kernels.layer_norm.op import LAYER_NORM
from ridgeline.kernels.rms_norm.op import EPS as RMS_EPS
from ridgeline.kernels.rms_norm.op import RMS_NORM
from ridgeline.optimizer.rewrites.context import LOWERED_BY, GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite

_RACED = "lab/notes/rows.md: forward 1.1-1.2x of the best contender, backward 1.66-1.77x"
_NORM_WORTH = {
    INFERENCE: Worth(eager=1.2, compiled=0.95, basis=_RACED + "; inside a compiled graph the norm ends its fusions"),
    TRAINING: Worth(eager=1.6, compiled=1.2, basis=_RACED),
}
_CALL_WORTH = {
    INFERENCE: Worth(eager=1.15, compiled=0.95, basis=_RACED + "; inside a compiled graph the norm ends its fusions"),
    TRAINING: Worth(eager=1.4, compiled=1.2, basis=_RACED),
}


@dataclass(frozen=True, slots=True)
class Normed:
    """A normalization: y = (x - mean?) / sqrt(mean square + eps) · (weight + offset) + bias."""

    x: fx.Node
    out: fx.Node
    eps: float
    centered: bool
    weight: fx.Node | None
    bias: fx.Node | None
    offset: float
    inside: tuple[fx.Node, ...]


@rewrite(
    "norm-casts",
    summary="a norm between a widening and a rounding cast runs on the original dtype",
    worth=Worth(eager=1.5, compiled=1.0001, basis="four passes over memory less; norms sum in float32 by themselves"),
    modes=(INFERENCE,),
    exact="rounding",
)
def widened_norm(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else call(node)
        match = None if read is None or read.op not in _CALLS else _narrowed(ctx, read)
        if match is not None:
            found.append(match)
    return found


_CALLS = ("layer_norm", "rms_norm", "group_norm")


def _narrowed(ctx: GraphContext, read: Call) -> Match | None:
    """The same call without widening, if its only reader rounds the result to the original dtype."""
    user = next(iter(read.node.users)) if len(read.node.users) == 1 else None
    rounded = None if user is None else call(user)
    names = [name for name in ("input", "weight", "bias") if isinstance(read.given.get(name), fx.Node)]
    bare = {name: _uncast(ctx, read[name]) for name in names}
    like = ctx.dtype(bare["input"][0]) if "input" in bare else None
    if like not in (torch.bfloat16, torch.float16) or rounded is None or cast_target(rounded) is not like:
        return None
    if any(ctx.dtype(node) is not like for node, _ in bare.values()):
        return None
    inside = [step for _, steps in bare.values() for step in steps]
    leaves = [node for node, _ in bare.values()]
    if user is None or not ctx.unchanged(leaves, (*inside, read.node), user):
        return None
    swapped = {read[name]: node for name, (node, _) in bare.items()}
    args, kwargs = fx.node.map_arg((read.node.args, read.node.kwargs), lambda node: swapped.get(node, node))
    new = ctx.emit(user, read.node.target, *args, **kwargs)  # type: ignore[arg-type]
    if not ctx.replace(user, new):
        return None
    ctx.discard(user)
    return ctx.match(new, f"{read.op} of {ctx.shape(leaves[0])} without its casts")


@rewrite("norm", summary="separate ops of RMSNorm and LayerNorm become a kernel", worth=_NORM_WORTH, needs_kernels=True)
def spelled_norm(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else spelled(ctx, node)
        if read is not None and (match := _replaced(ctx, read)) is not None:
            found.append(match)
    return found


@rewrite("norm-call", summary="F.layer_norm and F.rms_norm become our kernels", worth=_CALL_WORTH, needs_kernels=True)
def called_norm(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else called(ctx, node)
        if read is None or (read.weight is None and ctx.options.get(LOWERED_BY, "none") != "none"):
            continue  # without weights its backward needs no sum over rows, and a compiler fuses all of it
        if (match := _replaced(ctx, read)) is not None:
            found.append(match)
    return found


def _replaced(ctx: GraphContext, read: Normed) -> Match | None:
    """Replace a normalization by the kernel, if it is supported and nothing writes in between."""
    leaves = (read.x, read.weight, read.bias)
    if not ctx.unchanged(leaves, read.inside, read.out):
        ctx.refuse(read.out, "something is written between the norm's first and last step")
        return None
    reason = _unsupported(ctx, read)
    if reason is not None:
        ctx.refuse(read.out, reason)
        return None
    new = _emitted(ctx, read.out, read)
    fuses = ctx.options.get(LOWERED_BY, "none") != "none"  # a compiler reads strided heads without copying them
    if not (ctx.alike if fuses else ctx.same_shape)(read.out, new):
        ctx.discard(new)
        ctx.refuse(read.out, "the kernel's result would have another type or layout")
        return None
    ctx.replace_any_layout(read.out, new)
    ctx.discard(read.out)
    kind = "LayerNorm" if read.centered else "RMSNorm"
    return ctx.match(new, f"{kind} {tuple(ctx.shape(read.x) or ())}")


def _emitted(ctx: GraphContext, before: fx.Node, read: Normed) -> fx.Node:
    if read.centered:
        return ctx.emit(before, layer_norm, read.x, read.weight, read.bias, read.eps)
    return ctx.emit(before, rms_norm, read.x, read.weight, read.eps, offset=read.offset)


def _unsupported(ctx: GraphContext, read: Normed) -> str | None:
    x, weight, bias = ctx.value(read.x), ctx.value(read.weight), ctx.value(read.bias)
    if read.centered:
        return LAYER_NORM.support(x, weight, bias)
    return RMS_NORM.support(x, weight)


# calls of PyTorch's functions -----------------------------------------------------------------------------------


def called(ctx: GraphContext, node: fx.Node) -> Normed | None:
    """F.layer_norm or F.rms_norm over the last dim."""
    read = call(node)
    if read is None or read.op not in ("layer_norm", "rms_norm") or not isinstance(read["input"], fx.Node):
        return None
    shape = ctx.shape(read["input"])
    if shape is None or tuple(read["normalized_shape"]) != shape[-1:]:
        return None
    centered = read.op == "layer_norm"
    eps = read.get("eps", 1e-5 if centered else RMS_EPS)
    return Normed(read["input"], node, float(eps), centered, read.get("weight"), read.get("bias"), 0.0, (node,))


# separate ops ---------------------------------------------------------------------------------------------------


def spelled(ctx: GraphContext, node: fx.Node) -> Normed | None:
    """A normalization whose scaling step is this node: x · rsqrt(…), x / sqrt(…) or x · (…)^-0.5."""
    scaled = _scaling(node)
    if scaled is None:
        return None
    wide, spread, inside = scaled
    second = _second_moment(ctx, spread)
    if second is None:
        return None
    source, centered, more = second
    start = _centered_source(ctx, wide) if centered else (wide, ())
    if start is None:
        return None
    x, casts = _uncast(ctx, source)
    if _uncast(ctx, start[0])[0] is not x:
        return None
    eps = _added_number(spread)
    if eps is None or eps < 0 or ctx.shape(x) is None:
        return None
    bare = Normed(x, node, eps, centered, None, None, 0.0, (*inside, *more, *start[1], *casts, node))
    return _longest(ctx, bare)


def _scaling(node: fx.Node) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """(what is scaled, the node under the root, inner nodes) of a scaling by an inverse root."""
    read = call(node)
    if read is None or read.op not in ("mul", "div") or read.given.get("rounding_mode"):
        return None
    pairs = [(read["input"], read["other"])]
    if read.op == "mul":
        pairs.append((read["other"], read["input"]))
    for wide, factor in pairs:
        under = _inverse_root(factor) if read.op == "mul" else _root(factor)
        if under is not None and isinstance(wide, fx.Node):
            return wide, under, (factor,)
    return None


def _inverse_root(node: Any) -> fx.Node | None:
    """The argument of an inverse square root."""
    read = call(node)
    if read is None:
        return None
    if read.op == "rsqrt" or (read.op == "pow" and _number(read["other"]) == -0.5):
        return read["input"] if isinstance(read["input"], fx.Node) else None
    if read.op == "reciprocal" or (read.op == "div" and _number(read["input"]) == 1.0):
        return _root(read["input"] if read.op == "reciprocal" else read["other"])
    return None


def _root(node: Any) -> fx.Node | None:
    read = call(node)
    if read is None or not (read.op == "sqrt" or (read.op == "pow" and _number(read["other"]) == 0.5)):
        return None
    return read["input"] if isinstance(read["input"], fx.Node) else None


def _second_moment(ctx: GraphContext, spread: fx.Node) -> tuple[fx.Node, bool, tuple[fx.Node, ...]] | None:
    """(x, centered, nodes) of mean(x²) + eps or var(x) + eps over the last dim."""
    read = call(spread)
    if read is None or read.op != "add" or read.given.get("alpha") not in (None, 1):
        return None
    moment = read["input"] if isinstance(read["input"], fx.Node) else read["other"]
    inner = call(moment)
    if inner is None or not _last_dim_kept(ctx, inner.given, moment):
        return None
    if inner.op == "var" and _is_biased(inner.given) and isinstance(inner["input"], fx.Node):
        return inner["input"], True, (spread, moment)
    squared = _squared(inner["input"]) if inner.op == "mean" else None
    if squared is None:
        return None
    centered = _centered_source(ctx, squared)
    if centered is not None:
        return centered[0], True, (spread, moment, inner["input"], *centered[1])
    return squared, False, (spread, moment, inner["input"])


def _last_dim_kept(ctx: GraphContext, given: dict[str, Any], moment: fx.Node) -> bool:
    source = given.get("input")
    shape = ctx.shape(source)
    dim = given.get("dim")
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if shape is None or given.get("keepdim") is not True or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    return dims[0] % len(shape) == len(shape) - 1 and given.get("dtype") in (None, ctx.dtype(moment))


def _is_biased(given: dict[str, Any]) -> bool:
    """Whether a variance divides by the number of elements, without Bessel's correction."""
    return given.get("unbiased") is False or (given.get("correction") == 0 and given.get("correction") is not None)


def _squared(node: Any) -> fx.Node | None:
    read = call(node)
    if read is None or not isinstance(read.given.get("input"), fx.Node):
        return None
    if read.op == "square" or (read.op == "pow" and _number(read["other"]) == 2.0):
        return read["input"]
    return read["input"] if read.op == "mul" and read["input"] is read["other"] else None


def _centered_source(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """x of x - mean(x) over the last dim."""
    read = call(node)
    if read is None or read.op != "sub" or read.given.get("alpha") not in (None, 1):
        return None
    mean = call(read["other"])
    if mean is None or mean.op != "mean" or mean["input"] is not read["input"]:
        return None
    return (read["input"], (node, mean.node)) if _last_dim_kept(ctx, mean.given, mean.node) else None


def _uncast(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The node before a widening cast, or itself."""
    read = call(node)
    if read is None or cast_target(read) is None or not isinstance(read["input"], fx.Node):
        return node, ()
    start, end = ctx.dtype(read["input"]), ctx.dtype(node)
    if start is None or end is None or not start.is_floating_point or torch.promote_types(start, end) != end:
        return node, ()
    return read["input"], (node,)


def _longest(ctx: GraphContext, bare: Normed) -> Normed | None:
    """The norm with all its further steps, up to the last one with the dtype of x."""
    best = bare if ctx.dtype(bare.out) == ctx.dtype(bare.x) else None
    current = bare
    while (longer := _extended(ctx, current)) is not None:
        current = longer
        if ctx.dtype(current.out) == ctx.dtype(current.x):
            best = current
    return best


def _extended(ctx: GraphContext, norm: Normed) -> Normed | None:
    """The norm with its next step: a cast, the product with the weight, the sum with the bias."""
    if len(norm.out.users) != 1:
        return None
    user = next(iter(norm.out.users))
    read = call(user)
    if read is None:
        return None
    if cast_target(read) is not None and read["input"] is norm.out:
        return _with(norm, out=user)
    other = read.given.get("other")
    side = other if read.given.get("input") is norm.out else read.given.get("input")
    if not isinstance(side, fx.Node) or side is norm.out:
        return None
    if read.op == "mul" and norm.weight is None and norm.bias is None:
        weight = _weight(ctx, side, norm)
        return None if weight is None else _with(norm, out=user, weight=weight[0], offset=weight[1])
    if read.op == "add" and norm.centered and norm.bias is None and read.given.get("alpha") in (None, 1):
        bias = _uncast(ctx, side)[0]
        return _with(norm, out=user, bias=bias) if ctx.shape(bias) == ctx.shape(norm.x)[-1:] else None  # type: ignore[index]
    return None


def _added_number(node: fx.Node) -> float | None:
    """The number that a sum adds, on either side."""
    read = call(node)
    if read is None or read.op != "add":
        return None
    number = _number(read["other"])
    return _number(read["input"]) if number is None else number


def _weight(ctx: GraphContext, side: fx.Node, norm: Normed) -> tuple[fx.Node, float] | None:
    """The weight and its offset: w, or 1 + w."""
    bare, _ = _uncast(ctx, side)
    read = call(bare)
    offset = 0.0
    if read is not None and read.op == "add" and not norm.centered:
        number = _added_number(bare)
        inner = read["input"] if isinstance(read["input"], fx.Node) else read["other"]
        if number is None or not isinstance(inner, fx.Node):
            return None
        bare, offset = _uncast(ctx, inner)[0], number
    return (bare, offset) if ctx.shape(bare) == ctx.shape(norm.x)[-1:] else None  # type: ignore[index]


def _with(norm: Normed, *, out: fx.Node, **changes: Any) -> Normed:
    fields = {name: getattr(norm, name) for name in Normed.__slots__} | changes
    return Normed(**{**fields, "out": out, "inside": (*norm.inside, out)})


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# the residual sum before a norm ------------------------------------------------------------------------------------


@rewrite(
    "norm-residual",
    summary="a residual sum and the norm after it become one kernel",
    worth={
        INFERENCE: Worth(eager=1.4, compiled=0.97, basis="two passes over memory less; compilers fuse it too"),
        TRAINING: Worth(eager=1.6, compiled=1.2, basis=_RACED),
    },
    needs_kernels=True,
)
def residual_norm(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = None if ctx.autocast else _kernel_norm(ctx, node) or called(ctx, node)
        if read is not None and (match := _with_sum(ctx, read)) is not None:
            found.append(match)
    return found


def _kernel_norm(ctx: GraphContext, node: fx.Node) -> Normed | None:
    """A norm inserted by an earlier rewrite."""
    if node.op != "call_function" or node.target not in (layer_norm, rms_norm):
        return None
    if node.target is rms_norm:
        x, weight, eps = node.args
        return Normed(x, node, eps, False, weight, None, node.kwargs["offset"], (node,))  # type: ignore[arg-type]
    x, weight, bias, eps = node.args
    return Normed(x, node, eps, True, weight, bias, 0.0, (node,))  # type: ignore[arg-type]


def _with_sum(ctx: GraphContext, read: Normed) -> Match | None:
    total = call(read.x)
    if total is None or total.op != "add" or total.given.get("alpha") not in (None, 1):
        return None
    a, b = total["input"], total["other"]
    if not all(
        ctx.shape(side) == ctx.shape(read.x) and ctx.dtype(side) == ctx.dtype(read.x) for side in (a, b)
    ):
        return None
    leaves = (a, b, read.x, read.weight, read.bias)
    if not ctx.unchanged(leaves, (total.node,), read.out) or not _known_before(ctx, read, total.node):
        return None
    if _unsupported(ctx, read) is not None:
        return None
    after = total.node.next
    if read.centered:
        both = ctx.emit(after, add_layer_norm, a, b, read.weight, read.bias, read.eps)
    else:
        both = ctx.emit(after, add_rms_norm, a, b, read.weight, read.eps, offset=read.offset)
    normed, summed = (ctx.emit(after, operator.getitem, both, index) for index in (0, 1))
    if not ctx.alike(read.out, normed) or not ctx.alike(total.node, summed):
        ctx.discard(normed)
        ctx.discard(summed)
        return None
    read.out.replace_all_uses_with(normed)
    total.node.replace_all_uses_with(summed, delete_user_cb=lambda user: user is not both)
    ctx.discard(read.out)
    ctx.discard(total.node)
    return ctx.match(normed, f"sum and {'LayerNorm' if read.centered else 'RMSNorm'} {tuple(ctx.shape(a) or ())}")


def _known_before(ctx: GraphContext, read: Normed, at: fx.Node) -> bool:
    """Whether weight and bias exist where the sum is computed."""
    sides = [side for side in (read.weight, read.bias) if isinstance(side, fx.Node)]
    return all(ctx.position(side) < ctx.position(at) for side in sides)
