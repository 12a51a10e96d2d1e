"""The few largest or smallest elements of many rows, as for nearest neighbors and expert routing: our kernel, raced.

``torch.topk`` of 32,768 rows of 1,024 elements takes 590 µs where memory bandwidth allows 16 (H200), and code that
sorts rows to take the first few of them waits for the whole sort.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.top_k.op import TOP_K, top_k
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 17
"""Of all rows: smaller calls are bound by launches."""
CONTEST = Contest()
_COPIES = ("add", "mul", "sub", "clone", "contiguous", "softmax", "exp", "neg", "sigmoid", "repeat")
_active_modes = torch._C._len_torch_dispatch_stack


def raced_top_k(x: Tensor, k: int, largest: bool, sorts: bool) -> Tensor:
    """Indices by the library or by our kernel; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _raced(x, k, largest, sorts)
    return torch.ops.ridgeline_optimizer.raced_top_k(x, k, largest, sorts)


def _raced(x: Tensor, k: int, largest: bool, sorts: bool) -> Tensor:
    ways = {"library": partial(_sorted if sorts else _chosen, x, k, largest), "ours": partial(top_k, x, k, largest)}
    return CONTEST.run((x.shape, x.dtype, k, largest, sorts, x.device), ways, x.device)


def _chosen(x: Tensor, k: int, largest: bool) -> Tensor:
    return torch.topk(x, k, dim=-1, largest=largest).indices


def _sorted(x: Tensor, k: int, largest: bool) -> Tensor:
    return torch.sort(x, dim=-1, descending=largest, stable=True).indices[..., :k].contiguous()


_op = torch.library.custom_op("ridgeline_optimizer::raced_top_k", _raced, mutates_args=())


@_op.register_fake
def _(x: Tensor, k: int, largest: bool, sorts: bool) -> Tensor:
    found: Tensor = TOP_K.fake(x, k, largest)
    return found


@dataclass(frozen=True, slots=True)
class Top:
    """What is taken of a row: the source, how many, and the nodes of values and indices."""

    node: fx.Node
    x: fx.Node
    k: int
    largest: bool
    sorts: bool
    values: tuple[fx.Node, ...]
    places: tuple[fx.Node, ...]


@rewrite(
    "top_k",
    summary="the few largest or smallest elements of many rows are found by our kernel, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=1.2, basis="rows read once; raced with the library's when a shape is first run"),
    exact="reordered",
    needs_kernels=True,
)
def largest_few(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    found = [_put(ctx, read) for node in ctx.nodes if (read := _read(ctx, node)) is not None]
    return [match for match in found if match is not None]


def _read(ctx: GraphContext, node: fx.Node) -> Top | None:
    read = call(node)
    if read is None or read.op not in ("topk", "sort", "argsort") or not isinstance(read.given.get("input"), fx.Node):
        return None
    x, dim = ctx.tensor(read["input"]), read.get("dim", -1)
    if x is None or not ctx.shape(read["input"]) or dim not in (-1, x.dim() - 1) or x.numel() < LEAST_ELEMENTS:
        return None
    if read.op == "topk":
        k, largest, parts = read["k"], bool(read.get("largest", True)), _parts(node)
    else:
        k, parts = _first_few(ctx, node, read.op, x.dim())
        largest = bool(read.get("descending", False))
    if parts is None or type(k) is not int or not x.is_contiguous() or TOP_K.support(x, k, largest) is not None:
        return None
    return Top(node, read["input"], k, largest, read.op != "topk", *parts)


def _parts(node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    """The users of values and of indices of a pair; None if there are others."""
    taken: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    for user in node.users:
        read = call(user)
        if read is None or read.op != "getitem" or read["input"] is not node or read["index"] not in (0, 1):
            return None
        taken[read["index"]].append(user)
    return tuple(taken[0]), tuple(taken[1])


def _first_few(ctx: GraphContext, node: fx.Node, op: str, dims: int) -> tuple[Any, Any]:
    """How many elements are taken of what was sorted, and their users, if nothing uses the others."""
    parts = ((), (node,)) if op == "argsort" else _parts(node)
    taken: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    counts = set()
    for number, nodes in enumerate(parts or ()):
        for user in [user for each in nodes for user in each.users]:
            read = call(user)
            index = read["index"] if read is not None and read.op == "getitem" else None
            counts.add(_count(index, dims))
            taken[number].append(user)
    if parts is None or len(counts) != 1 or None in counts:
        return None, None
    return counts.pop(), (tuple(taken[0]), tuple(taken[1]))


def _count(index: Any, dims: int) -> int | None:
    """``k`` of ``[..., :k]`` or ``[:, :, :k]``."""
    index = index if isinstance(index, tuple) else (index,)
    if index[:1] == (Ellipsis,) and len(index) == 2:
        index = (slice(None),) * (dims - 1) + index[1:]
    if len(index) != dims or any(each != slice(None) for each in index[:-1]) or not isinstance(index[-1], slice):
        return None
    last = index[-1]
    fits = last.start in (None, 0) and last.step in (None, 1) and type(last.stop) is int and last.stop > 0
    return last.stop if fits else None


def _taken_dense(ctx: GraphContext, node: fx.Node, new: fx.Node) -> bool:
    """Whether a slice of sorted rows may be contiguous, because all its readers make new tensors."""
    a, b = ctx.tensor(node), ctx.tensor(new)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or a.stride(-1) != 1:
        return False
    return all(_makes_another(user, node) for user in node.users)


def _makes_another(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node gathers by indices or copies them, in any layout."""
    read = call(user)
    if read is not None and read.op in _COPIES:
        return True
    by = user.args[1] if user.target is operator.getitem and len(user.args) == 2 else None
    picked = isinstance(by, (tuple, list)) and any(each is node for each in by)
    return picked or (user.target in (torch.gather, "gather") and user.args[2:3] == (node,))


def _put(ctx: GraphContext, read: Top) -> Match | None:
    ends = (*read.values, *read.places)
    first = min(ends, key=ctx.position, default=None)
    if first is None or not ctx.unchanged((read.x,), (read.node, *ends), first):
        return None
    places = ctx.emit(first, raced_top_k, read.x, read.k, read.largest, read.sorts)
    values = ctx.emit(first, torch.gather, read.x, -1, places) if read.values else None
    made = [(node, values) for node in read.values] + [(node, places) for node in read.places]
    if any(new is None or not (ctx.same_shape(node, new) or _taken_dense(ctx, node, new)) for node, new in made):
        ctx.discard(values if values is not None else places)
        return None
    for node, new in made:
        node.replace_all_uses_with(new)
        ctx.discard(node)
    return ctx.match(places, f"{read.k} of {tuple(ctx.shape(read.x) or ())}")
