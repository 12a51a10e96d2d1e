"""Pooling and cumulative sums: our kernels where they win their race against PyTorch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.pooling.op import POOL, pool
from ridgeline.kernels.pooling.reference import forward as pooled
from ridgeline.kernels.scan.op import SCAN, scan
from ridgeline.kernels.scan.reference import forward as scanned
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.conv.read import Ints, ints
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 20
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def raced_pool(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    """Pooling by the library or by our kernel; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _pooled(x, window, stride, padding, dilation, mean)
    return torch.ops.ridgeline_optimizer.raced_pool(x, window, stride, padding, dilation, mean)


def _pooled(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    args = (x, window, stride, padding, dilation, mean)
    ways = {"library": partial(pooled, *args), "ours": partial(pool, *args)}
    key = (x.shape, x.dtype, tuple(window), tuple(stride), tuple(padding), tuple(dilation), mean, x.device)
    return CONTEST.run(key, ways, x.device)


_pool_op = torch.library.custom_op("ridgeline_optimizer::raced_pool", _pooled, mutates_args=())


@_pool_op.register_fake
def _(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    return POOL.fake(x, window, stride, padding, dilation, mean)  # type: ignore[no-any-return]


def raced_scan(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    """A cumulative sum or product by the library or by our kernel; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _scanned(x, keep, dim, product, reverse, exclusive)
    return torch.ops.ridgeline_optimizer.raced_scan(x, keep, dim, product, reverse, exclusive)


def _scanned(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    library = partial(scanned, x, keep, dim, product, reverse, exclusive)
    ours = partial(scan, x, keep, dim, product=product, reverse=reverse, exclusive=exclusive)
    key = (x.shape, keep is None, dim, product, reverse, exclusive, x.device)
    return CONTEST.run(key, {"library": library, "ours": ours}, x.device)


_scan_op = torch.library.custom_op("ridgeline_optimizer::raced_scan", _scanned, mutates_args=())


@_scan_op.register_fake
def _(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    return x.new_empty(x.shape)


@rewrite(
    "pool",
    summary="pooling without indices becomes our kernel, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=0.99, basis="no places written; the faster is taken by a race"),
    exact="reordered",
    needs_kernels=True,
)
def pool_windows(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        args = None if read is None or ctx.training or ctx.autocast else _pool_args(ctx, read)
        if args is None or POOL.support(ctx.value(args[0]), *args[1:]) is not None:
            continue
        new = ctx.emit(node, raced_pool, *args)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"{'mean' if args[-1] else 'max'} pool {ctx.shape(args[0])}"))
    return found


def _pool_args(ctx: GraphContext, read: Call) -> tuple[Any, ...] | None:
    """(x, window, stride, padding, dilation, mean) of a pooling of a large contiguous image without indices."""
    if read.op not in ("max_pool", "avg_pool") or read.get("ceil_mode", False) or read.get("return_indices", False):
        return None
    mean = read.op == "avg_pool"
    if mean and (read.get("count_include_pad", True) is not True or read.get("divisor_override") is not None):
        return None
    x = ctx.tensor(read["input"])
    if x is None or ctx.shape(read["input"]) is None or not x.is_contiguous() or x.numel() < LEAST_ELEMENTS:
        return None
    if x.dim() not in (3, 4, 5):
        return None
    num = x.dim() - 2
    window = ints(read.get("kernel_size"), num)
    sizes = (window, ints(read.get("stride") or window, num), ints(read.get("padding", 0), num),
             ints(read.get("dilation", 1), num))  # fmt: skip
    return None if any(each is None for each in sizes) else (read["input"], *sizes, mean)


@rewrite(
    "scan",
    summary="cumulative sums and products, reversed, exclusive and masked too, become our kernel, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.2, basis="flips, masks and shifts are no passes; the faster is taken by a race"),
    exact="reordered",
    needs_kernels=True,
)
def scan_rows(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op not in ("cumsum", "cumprod") or ctx.training or ctx.autocast:
            continue
        match = _scan(ctx, read)
        if match is not None:
            found.append(match)
    return found


def _scan(ctx: GraphContext, read: Call) -> Match | None:
    shape, dim = ctx.shape(read["input"]), read.given.get("dim")
    if not shape or not isinstance(dim, int) or read.given.get("dtype") is not None:
        return None
    dim %= len(shape)
    out, x, reverse = _flipped(ctx, read, dim, len(shape))
    exclusive = False
    if not reverse and read.op == "cumsum":
        out, x, exclusive = _shifted(ctx, read, dim)
    x, keep = _masked(ctx, x)
    value = ctx.tensor(x)
    args = (dim, read.op == "cumprod", reverse, exclusive)
    if value is None or value.numel() < LEAST_ELEMENTS or not value.is_contiguous():
        return None
    if SCAN.support(value, ctx.tensor(keep), *args) is not None:
        return None
    inside = [node for node in (read.node, out) if node is not None]
    if not ctx.unchanged((x, keep), inside, out):
        return None
    new = ctx.emit(out, raced_scan, x, keep, *args)
    if not ctx.replace(out, new):
        return None
    ctx.discard(out)
    words = [word for word, said in (("backwards", reverse), ("before itself", exclusive), ("masked", keep)) if said]
    return ctx.match(new, " ".join([f"{read.op} {ctx.shape(x)}", *words]))


def _flipped(ctx: GraphContext, read: Call, dim: int, num: int) -> tuple[fx.Node, Any, bool]:
    """(last node, input, reverse) of a scan between two flips, or of the scan alone."""
    before = call(read["input"])
    users = list(read.node.users)
    after = call(users[0]) if len(users) == 1 else None
    if before is not None and after is not None and before.op == after.op == "flip":
        dims = [tuple(d % num for d in each.get("dims", ())) for each in (before, after)]
        if dims == [(dim,), (dim,)]:
            return after.node, before["input"], True
    return read.node, read["input"], False


def _shifted(ctx: GraphContext, read: Call, dim: int) -> tuple[fx.Node, Any, bool]:
    """(last node, input, exclusive) of a sum over all but one element with a zero before it."""
    narrow, users = call(read["input"]), list(read.node.users)
    joined = call(users[0]) if len(users) == 1 else None
    plain = (read.node, read["input"], False)
    if narrow is None or joined is None or joined.op != "cat" or len(joined["tensors"]) != 2:
        return plain
    zeros, behind = joined["tensors"]
    made = call(zeros)
    shape = ctx.shape(narrow.given.get("input"))
    if shape is None or behind is not read.node or made is None or made.op not in ("zeros_like",):
        return plain
    if joined.get("dim", 0) % len(shape) != dim or ctx.shape(zeros) != (*shape[:dim], 1, *shape[dim + 1 :]):
        return plain
    return (joined.node, narrow["input"], True) if _is_all_but_last(narrow, shape, dim) else plain


def _is_all_but_last(read: Call, shape: tuple[int, ...], dim: int) -> bool:
    if read.op == "narrow":
        start, length = read.get("start", None), read.get("length", None)
        return read["dim"] % len(shape) == dim and (start or 0) == 0 and length == shape[dim] - 1
    if read.op != "getitem" or not isinstance(read["index"], tuple) or len(read["index"]) != dim + 1:
        return False
    *others, last = read["index"]
    return all(each == slice(None) for each in others) and last in (slice(None, -1), slice(0, -1))


def _masked(ctx: GraphContext, node: Any) -> tuple[Any, fx.Node | None]:
    """(numbers, flags) of a product with flags that only the scan reads; otherwise (node, None)."""
    read = call(node)
    if read is None or read.op != "mul" or len(node.users) != 1:
        return node, None
    a, b = read.given.get("input"), read.given.get("other")
    for numbers, flags in ((a, b), (b, a)):
        if ctx.dtype(flags) is torch.bool and ctx.dtype(numbers) is torch.float32:
            if ctx.shape(flags) == ctx.shape(numbers) and ctx.tensor(flags).is_contiguous():  # type: ignore[union-attr]
                return numbers, flags
    return node, None
