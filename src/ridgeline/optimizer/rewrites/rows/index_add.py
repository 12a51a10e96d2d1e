"""Sums of rows by index, as in graph networks: sorted once, then summed like embedding bags, without atomics.

``zeros.index_add_(0, target, x[source])`` writes every message and adds it with one atomic per element. In the order of
their targets, edges are bags of rows of ``x``: each sum is made in registers, in float32, and written once. All layers
over the same edges share one sort.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels import embedding_bags
from ridgeline.optimizer.rewrites.context import GraphContext, clash
from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 22
"""Of all messages: smaller sums are bound by launches."""
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ADDS = {"index_add_": "index", "index_add": "index", torch.index_add: "index",
         "scatter_add_": "scatter", "scatter_add": "scatter", torch.scatter_add: "scatter"}  # fmt: skip


def sorted_edges(index: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The sorting order of an index, and the start of each of ``num`` values in it, and the end."""
    if type(index) is Tensor and not _active_modes():
        return _sorted(index, num)
    return torch.ops.ridgeline_optimizer.sorted_edges(index, num)


def _sorted(index: Tensor, num: int) -> tuple[Tensor, Tensor]:
    if _library_won(index, num):  # rows are still picked by it: return valid indices
        return index.new_zeros(index.shape, dtype=torch.int64), index.new_zeros(num + 1, dtype=torch.int64)
    values, order = torch.sort(index.to(torch.int32), stable=True)
    ends = torch.arange(num + 1, device=index.device, dtype=torch.int32)
    return order, torch.searchsorted(values, ends)


def _library_won(index: Tensor, num: int) -> bool:
    """Whether the library won every race over so many edges: then the sort is skipped."""
    found = [name for key, name in CONTEST.won.items() if key[:3] == (index.numel(), num, index.device)]  # type: ignore[index]
    return bool(found) and "bags" not in found


def from_end(index: Tensor, num: int) -> Tensor:
    """Negative indices as nonnegative ones."""
    return torch.where(index < 0, index + num, index)


def index_sum(
    x: Tensor, rows: Tensor | None, factors: Tensor | None, index: Tensor, order: Tensor, picked: Tensor,
    offsets: Tensor, num: int,
) -> Tensor:  # fmt: skip
    """Sums of ``x`` (or of its ``rows``), times ``factors``, by index; ``picked`` are the rows in order."""
    given = (x, rows, factors, index, order, picked, offsets, num)
    if type(x) is Tensor and not _active_modes():
        return _summed(*given)
    return torch.ops.ridgeline_optimizer.index_sum(*given)


def _summed(
    x: Tensor, rows: Tensor | None, factors: Tensor | None, index: Tensor, order: Tensor, picked: Tensor,
    offsets: Tensor, num: int,
) -> Tensor:  # fmt: skip
    ways = {
        "library": partial(_library, x, rows, factors, index, num),
        "bags": partial(_bags, x, factors, order, picked, offsets),
    }
    key = (index.numel(), num, index.device, x.shape, x.dtype, rows is None, factors is None)
    if key not in CONTEST.won and _library_won(index, num):  # without a sort bags would be empty, and fast
        return ways["library"]()
    return CONTEST.run(key, ways, x.device)


def _library(x: Tensor, rows: Tensor | None, factors: Tensor | None, index: Tensor, num: int) -> Tensor:
    messages = x if rows is None else x[rows]
    if factors is not None:
        messages = messages * factors.view(-1, *([1] * (x.dim() - 1)))
    return x.new_zeros(num, *x.shape[1:]).index_add_(0, index, messages)


def _bags(x: Tensor, factors: Tensor | None, order: Tensor, picked: Tensor, offsets: Tensor) -> Tensor:
    weights = None if factors is None else factors.view(-1)[order]
    found = embedding_bags(x.reshape(x.shape[0], -1), picked, offsets, None, mode="sum", per_sample_weights=weights)
    return found.view(-1, *x.shape[1:])


_order_op = torch.library.custom_op("ridgeline_optimizer::sorted_edges", _sorted, mutates_args=())
_sum_op = torch.library.custom_op("ridgeline_optimizer::index_sum", _summed, mutates_args=())


@_order_op.register_fake
def _(index: Tensor, num: int) -> tuple[Tensor, Tensor]:
    return index.new_empty(index.shape, dtype=torch.int64), index.new_empty(num + 1, dtype=torch.int64)


@_sum_op.register_fake
def _(
    x: Tensor, rows: Tensor | None, factors: Tensor | None, index: Tensor, order: Tensor, picked: Tensor,
    offsets: Tensor, num: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(num, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum by index: of rows of ``x`` or of all of it, times a factor per row."""

    node: fx.Node
    base: fx.Node
    index: fx.Node
    column: bool  # whether the index is an expanded column
    x: fx.Node
    rows: fx.Node | None = None
    wraps: bool = False  # whether rows may have negative indices
    factors: fx.Node | None = None
    inside: tuple[fx.Node, ...] = ()


@rewrite(
    "index-sums",
    summary="sums of rows by index are sorted once and computed as embedding bags, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.5, basis="by bytes; raced with the library's when a shape is first run"),
    exact="reordered",
    needs_kernels=True,
)
def index_sums(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    found: list[Match] = []
    orders: dict[Any, tuple[fx.Node, fx.Node, fx.Node, fx.Node]] = {}
    for node in ctx.nodes:
        read = _read(ctx, node)
        if read is not None and (match := _put(ctx, read, orders)) is not None:
            found.append(match)
    return found


def _read(ctx: GraphContext, node: fx.Node) -> Sum | None:
    kind = _ADDS.get(node.target) if node.op in ("call_function", "call_method") else None
    given = None if kind is None else _arguments(node, kind)
    if given is None:
        return None
    base, dim, index, messages = given
    where, what, into = ctx.tensor(index), ctx.tensor(messages), ctx.tensor(base)
    if where is None or what is None or into is None or ctx.shape(messages) is None or ctx.shape(base) is None:
        return None
    if what.dim() < 2 or dim not in (0, -what.dim()) or what.dtype not in _DTYPES or what.dtype != into.dtype:
        return None
    column = kind == "scatter"
    expanded = column and where.shape == what.shape and where.dim() == 2 and where.stride(1) == 0
    if where.dtype not in (torch.int64, torch.int32) or not (expanded if column else where.dim() == 1):
        return None
    fits = into.shape[1:] == what.shape[1:] and what.numel() >= LEAST_ELEMENTS and into.shape[0] < 2**31 - 1
    # The embedding-bag kernel takes rows of up to so many columns.
    if not fits or what.shape[1:].numel() > 1024 or not _is_fresh_zeros(ctx, base, node):
        return None
    return _messages(ctx, Sum(node, base, index, column, messages, inside=(node,)))


def _arguments(node: fx.Node, kind: str) -> tuple[Any, Any, Any, Any] | None:
    names = ("input", "dim", "index", "source" if kind == "index" else "src", "alpha")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if set(given) - {"alpha"} != set(names[:4]) or given.get("alpha", 1) != 1:
        return None
    return given["input"], given["dim"], given["index"], given[names[3]]


def _is_fresh_zeros(ctx: GraphContext, base: Any, node: fx.Node) -> bool:
    """Whether the sum starts from zeros without other users."""
    zeros = isinstance(base, fx.Node) and (base.target in (torch.zeros, torch.zeros_like, "new_zeros"))
    if not zeros or any(user is not node and ctx.position(user) < ctx.position(node) for user in base.users):
        return False
    memory = ctx.memory(base)
    others = [each for each in ctx.nodes if each is not base and ctx.position(each) < ctx.position(node)]
    return not any(ctx.memory(each) and clash(memory, ctx.memory(each)) for each in others)


def _messages(ctx: GraphContext, read: Sum) -> Sum | None:
    """What is summed: gathered rows of a matrix with one factor per row, or all of it."""
    scaled, factors = _scaled(ctx, read.x)
    gathered = _gathered(ctx, scaled if scaled is not None else read.x)
    inside = read.inside
    if gathered is not None:
        x, rows, wraps, node = gathered
        inside = (*inside, node, *((read.x,) if scaled is not None else ()))
        read = Sum(read.node, read.base, read.index, read.column, x, rows, wraps, factors, inside)
    elif scaled is not None:
        inside = (*inside, read.x)
        read = Sum(read.node, read.base, read.index, read.column, scaled, None, False, factors, inside)
    x_value = ctx.tensor(read.x)
    return read if x_value is not None and x_value.is_contiguous() else None


def _scaled(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Rows and the column they are multiplied by; None if a node is no such product."""
    read, value = call(node), ctx.tensor(node)
    if read is None or read.op != "mul" or value is None:
        return None, None
    for rows, column in ((read["input"], read["other"]), (read["other"], read["input"])):
        a, b = ctx.tensor(rows), ctx.tensor(column)
        if a is None or b is None or a.shape != value.shape or a.dtype != value.dtype or b.dtype != a.dtype:
            continue
        if b.shape == (value.shape[0], *([1] * (value.dim() - 1))) and b.is_contiguous():
            return rows, column
    return None, None


def _gathered(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node] | None:
    """Rows of a tensor picked by an index: the tensor, the index, and whether indices may be negative."""
    if node.op == "call_function" and node.target is operator.getitem and len(node.args) == 2:
        x, rows = node.args
        rows = rows[0] if isinstance(rows, tuple) and len(rows) == 1 else rows
        wraps = True
    elif node.target in (torch.index_select, "index_select") and len(node.args) == 3 and node.args[1] == 0:
        (x, _, rows), wraps = node.args, False
    elif node.target in (F.embedding, torch.embedding) and len(node.args) >= 2:
        (rows, x), wraps = node.args[:2] if node.target is F.embedding else node.args[1::-1], False
        if any(each is not None and each is not False for each in (*node.args[3:], *map(_asked, node.kwargs.items()))):
            return None
    else:
        return None
    value, by = ctx.tensor(x), ctx.tensor(rows)
    if value is None or by is None or by.dim() != 1 or by.dtype not in (torch.int64, torch.int32) or value.dim() < 2:
        return None
    assert isinstance(x, fx.Node) and isinstance(rows, fx.Node)
    return x, rows, wraps, node


def _asked(pair: tuple[str, Any]) -> Any:
    """An argument of an embedding that changes its rows; others affect only gradients."""
    return pair[1] if pair[0] in ("max_norm",) else None


def _put(ctx: GraphContext, read: Sum, orders: dict[Any, tuple[fx.Node, fx.Node, fx.Node, fx.Node]]) -> Match | None:
    leaves = [each for each in (read.x, read.rows, read.factors, read.index) if each is not None]
    if not ctx.unchanged(leaves, read.inside, read.node):
        return None
    num, node = int(ctx.shape(read.base)[0]), read.node  # type: ignore[index]
    key = (read.index, read.column, num, read.rows, read.wraps, ctx.shape(read.x)[0])  # type: ignore[index]
    if key in orders and not ctx.unchanged((read.index, read.rows), (orders[key][1],), node):
        return None
    if key not in orders:
        orders[key] = _ordered(ctx, read, num)
    index, order, picked, offsets = orders[key]
    new = ctx.emit(node, index_sum, read.x, read.rows, read.factors, index, order, picked, offsets, num)
    if not ctx.alike(node, new):
        ctx.discard(new)
        return None
    node.replace_all_uses_with(new)
    if str(node.target).endswith("_"):
        for user in [user for user in read.base.users if user is not node]:
            user.replace_input_with(read.base, new)
        ctx.erase_writer(node)
        ctx.discard(read.base)
    else:
        ctx.discard(node)
    shape = ctx.shape(read.x)
    return ctx.match(new, f"{ctx.shape(index)} of {shape} to {num}")


def _ordered(ctx: GraphContext, read: Sum, num: int) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """The index as one dim, its sorting order, the rows in that order and the start of each value."""
    at = read.node
    index = ctx.emit(at, torch.select, read.index, 1, 0) if read.column else read.index
    both = ctx.emit(at, sorted_edges, index, num)
    order, offsets = (ctx.emit(at, operator.getitem, both, i) for i in range(2))
    if read.rows is None:
        return index, order, order, offsets
    rows = read.rows
    if read.wraps:
        rows = ctx.emit(at, from_end, rows, int(ctx.shape(read.x)[0]))  # type: ignore[index]
    return index, order, ctx.emit(at, torch.index_select, rows, 0, order), offsets
