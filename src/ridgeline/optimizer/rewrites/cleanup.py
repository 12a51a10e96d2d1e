"""Removes ops without effect: disabled dropout, casts to the same dtype, copies of fresh memory, views of views."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import ANYWHERE, GraphContext, clash, is_written
from ridgeline.optimizer.rewrites.op_names import Call, call, cast, cast_target
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: torch.add,
    operator.isub: torch.sub,
    operator.imul: torch.mul,
    operator.itruediv: torch.div,
    "add_": torch.add,
    "sub_": torch.sub,
    "mul_": torch.mul,
    "div_": torch.div,
    "relu_": torch.relu,
    "sigmoid_": torch.sigmoid,
    "tanh_": torch.tanh,
    "masked_fill_": torch.masked_fill,
    "triu_": torch.triu,
    "tril_": torch.tril,
    "clamp_": torch.clamp,
    "exp_": torch.exp,
    "neg_": torch.neg,
    "sqrt_": torch.sqrt,
    "rsqrt_": torch.rsqrt,
    "pow_": torch.pow,
    torch.relu_: torch.relu,
    F.relu: F.relu,
    F.silu: F.silu,
    F.relu6: F.relu6,
    F.hardswish: F.hardswish,
    F.leaky_relu: F.leaky_relu,
    F.elu: F.elu,
    F.mish: F.mish,
    F.hardsigmoid: F.hardsigmoid,
    F.hardtanh: F.hardtanh,
}
_FREE = Worth(eager=1.02, compiled=1.0001, basis="a call less on the host, 7-14 µs each; compilers drop them too")


@rewrite(
    "in-place",
    summary="in-place ops on tensors without other readers become out-of-place",
    modes=(INFERENCE,),
    worth=Worth(eager=1.0001, compiled=1.0001, basis="lets other rewrites see through; compilers do it anyway"),
    exact="bits",
)
def in_place(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.writers():
        target = _OUT_OF_PLACE.get(node.target)
        if target is None or not node.args or not _is_unobserved(ctx, node, node.args[0]):
            continue
        written, place = node.args[0], ctx.position(node)
        later = {user for user in written.users if ctx.position(user) > place}
        new = _out_of_place(ctx, node, target)
        if ctx.alike(node, new):
            new.meta["example_value"] = ctx.value(node)  # keeps the aliasing information
            node.replace_all_uses_with(new)
            written.replace_all_uses_with(new, delete_user_cb=later.__contains__)
            ctx.erase_writer(node)
            found.append(ctx.match(new, f"{getattr(target, '__name__', target)} out of place"))
        else:
            ctx.discard(new)
    return found


def _out_of_place(ctx: GraphContext, node: fx.Node, target: Any) -> fx.Node:
    """The result of an in-place node as a new tensor, in the dtype of what it was written to."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    args = tuple(node.args) if target not in _FLAGGED else _without_flag(target, node.args)
    new = ctx.emit(node, target, *args, **kwargs)
    like, have = ctx.dtype(node.args[0]), ctx.dtype(new)
    rounds = have != like and have is not None and like is not None and have.is_floating_point
    return ctx.emit(node, cast, new, like) if rounds and like.is_floating_point else new  # type: ignore[union-attr]


_FLAGGED = {F.relu: 1, F.silu: 1, F.relu6: 1, F.hardswish: 1, F.leaky_relu: 2, F.elu: 2, F.mish: 1,
            F.hardsigmoid: 1, F.hardtanh: 3}  # fmt: skip
"""The position of the ``inplace`` argument of these functions."""


def _without_flag(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    at = _FLAGGED[target]
    return (*args[:at], *args[at + 1 :])


def _is_unobserved(ctx: GraphContext, node: fx.Node, written: Any) -> bool:
    """Whether memory that is written is later read only by this node's users and the tensor it wrote to.

    Code that writes in place for its own sake (``scores.masked_fill_(…)``) continues with the tensor it wrote to.
    """
    if not isinstance(written, fx.Node) or written.op == "placeholder" or ctx.tensor(written) is None:
        return False
    place, memory = ctx.position(node), ctx.memory(written)
    for each in ctx.nodes:
        if ctx.position(each) >= place:
            break
        if each is written or not ctx.memory(each) or not clash(memory, ctx.memory(each)):
            continue
        if each.op in ("placeholder", "get_attr") or any(ctx.position(user) > place for user in each.users):
            return False
    return True


@rewrite(
    "identity", summary="drops disabled dropout, and casts and copies without effect", worth=_FREE, exact="bits"
)
def identity(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        source = None if read is None else _same_as(ctx, read)
        if source is None or not _may_alias(ctx, node, source):
            continue
        node.replace_all_uses_with(source)
        found.append(ctx.match(node, f"{read.op} dropped"))  # type: ignore[union-attr]
        ctx.discard(node)
    return found


def _same_as(ctx: GraphContext, read: Call) -> fx.Node | None:
    """The argument that a call returns unchanged in value, dtype and layout; None if it does something."""
    source = _only_nonempty(ctx, read) if read.op == "cat" else read.given.get("input")
    if not isinstance(source, fx.Node) or ctx.tensor(source) is None or not ctx.alike(source, read.node):
        return None
    if read.op == "dropout":
        off = read.get("training", True) is False or read.get("p", 0.5) == 0
        return source if off else None
    if read.op in ("view", "reshape", "contiguous", "expand", "flatten", "cat"):
        return source
    if read.op == "pad":  # only padding by nothing: rows added in front and cut at the end shift the rest
        return source if all(_is_number(each, 0) for each in read.get("pad", (None,))) else None
    if read.op in ("add", "sub") and _is_number(read["other"], 0):  # only integers: -0.0 + 0 is +0.0
        return source if not ctx.tensor(source).is_floating_point() else None  # type: ignore[union-attr]
    if read.op in ("mul", "div") and _is_number(read["other"], 1):
        return source
    if read.op == "transpose":
        return None
    return source if _plain_cast(read) else None


def _only_nonempty(ctx: GraphContext, read: Call) -> Any:
    """The only concatenated tensor with any elements: partial rotary embeddings of whole heads have an empty one."""
    parts = read.given.get("tensors")
    if not isinstance(parts, (list, tuple)) or any(ctx.shape(part) is None for part in parts):
        return None
    filled = [part for part in parts if 0 not in (ctx.shape(part) or ())]
    return filled[0] if len(filled) == 1 else None


def _plain_cast(read: Call) -> bool:
    """A conversion to the same dtype and device, which returns its argument; never one that must copy."""
    if read.get("copy") is True or read.get("memory_format") is not None:
        return False
    if read.op == "to" and any(isinstance(value, bool) and value for value in read.get("to", ())):
        return False
    return cast_target(read) is not None or (read.op == "to" and _only_device(read))


def _only_device(read: Call) -> bool:
    given = (*read.get("to", ()), read.given.get("device"))
    return any(isinstance(value, (str, torch.device)) for value in given)


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _may_alias(ctx: GraphContext, node: fx.Node, source: fx.Node) -> bool:
    """Whether the argument may replace the result: nothing writes to either, and no output changes its identity."""
    if any(user.op == "output" for user in node.users):
        return False
    return not is_written(ctx, source) and not is_written(ctx, node)


@rewrite("views", summary="joins chains of reshapes and of casts", worth=_FREE, exact="bits")
def views(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or not isinstance(read.given.get("input"), fx.Node):
            continue
        first = call(read["input"])
        if first is None or len(first.node.users) != 1 or first.node.op == "placeholder":
            continue
        joined = _joined(ctx, first, read)
        if joined is not None and ctx.replace(node, joined):
            found.append(ctx.match(joined, f"{first.op} and {read.op} joined"))
            ctx.discard(node)
    return found


def _joined(ctx: GraphContext, first: Call, second: Call) -> fx.Node | None:
    """One node for two, or None: a reshape of a reshape, a transposition undone, a widening before a cast."""
    source, shape = first.given.get("input"), ctx.shape(second.node)
    if not isinstance(source, fx.Node) or ctx.tensor(source) is None or shape is None:
        return None
    if is_written(ctx, source) or is_written(ctx, second.node):
        return None
    if first.op in ("view", "reshape", "flatten", "unsqueeze", "squeeze") and second.op in (
        "view",
        "reshape",
        "flatten",
    ):
        if not _views_alike(ctx, first, second):
            return None
        return ctx.emit(second.node, _reshaped, source, shape)
    return _double_cast(ctx, source, first, second)


def _views_alike(ctx: GraphContext, first: Call, second: Call) -> bool:
    """Neither of two reshapes copies: joining them neither adds nor drops a copy."""
    source, last = ctx.tensor(first["input"]), ctx.tensor(second.node)
    return (
        isinstance(source, Tensor)
        and isinstance(last, Tensor)
        and ctx.memory(first["input"]) == ctx.memory(second.node) != {ANYWHERE}
    )


def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.view(shape)


def _double_cast(ctx: GraphContext, source: fx.Node, first: Call, second: Call) -> fx.Node | None:
    """Widening and then rounding is rounding once: the first cast is exact."""
    middle, last = cast_target(first), cast_target(second)
    start = ctx.dtype(source)
    if middle is None or last is None or start is None or not _plain_chain(first, second):
        return None
    if not (start.is_floating_point and middle.is_floating_point) or torch.promote_types(start, middle) != middle:
        return None
    return ctx.emit(second.node, _cast, source, last)


def _plain_chain(first: Call, second: Call) -> bool:
    plain = ("to", "float", "half", "bfloat16", "double", "type_as")
    return first.op in plain and second.op in plain and _plain_cast(first) and _plain_cast(second)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)
