"""Fuses convolutions with the batch norm, the residual sum and the activation after them.

For 16-bit channels-last tensors. A pointwise convolution is a GEMM with all of it as epilogue, where that is faster: a
race at the first run of a shape decides. Grouped and depthwise convolutions are raced against kernels of ours. Other
convolutions stay with cuDNN, followed by one in-place kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest, prepared
from ridgeline.kernels.depthwise_conv import config as strips
from ridgeline.kernels.depthwise_conv import op as apart
from ridgeline.kernels.depthwise_conv.op import DEPTHWISE
from ridgeline.kernels.grouped_conv import config as bundles
from ridgeline.kernels.grouped_conv import op as together
from ridgeline.kernels.grouped_conv.op import GROUPED_CONVOLUTION
from ridgeline.kernels.linear_epilogue import config
from ridgeline.kernels.linear_epilogue.op import DENSE, NARROW, VECTOR, finished, planned, tiled
from ridgeline.kernels.linear_epilogue.reference import finish
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.conv.read import Ints, settings_of
from ridgeline.optimizer.rewrites.conv.stem import MOST_CHANNELS, is_stem, stem, stems
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_NUMBERS = 1 << 18
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack
_PLAIN = ("relu", "silu", "relu6", "hardswish")


def ended_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints,
    dilation: Ints, groups: int,
) -> Tensor:  # fmt: skip
    """act(norm(conv2d(x) + bias) + added), channels last; one opaque op for tracers."""
    args = (x, weight, bias, added, mean, var, gamma, beta, eps, activation, stride, padding, dilation, groups)
    if type(x) is Tensor and not _active_modes():
        return _ended(*args)
    return torch.ops.ridgeline_optimizer.ended_convolution(*args)


def _ended(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints,
    dilation: Ints, groups: int,
) -> Tensor:  # fmt: skip
    ends = (bias, _rows(added), mean, var, gamma, beta, eps, activation, False)
    if not x.is_cuda:
        return _on_host(x, weight, ends, stride, padding, dilation, groups)
    if is_depthwise(weight, stride, dilation, groups):
        return _apart(x, weight, ends, stride, padding)
    if is_grouped(weight, stride, dilation, groups):
        return _bundled(x, weight, ends, stride, padding, groups)
    if not is_product(weight, stride, padding, groups):
        made = _convolved(x, weight, stride, padding, dilation, groups)
        finished(_rows(made), *ends)  # type: ignore[arg-type]
        return made
    rows, filters = _rows(x), weight.flatten(1)
    assert rows is not None
    key = (rows.shape, filters.shape, x.dtype, activation, *(each is None for each in ends[:6]), x.device)
    if key not in CONTEST.won and DENSE.support(rows, filters, *ends) is None:  # compile all tiles in parallel
        tiles = config.tiles(rows.shape[0], *filters.shape)
        prepared(partial(planned, rows, filters, *ends, tile=tile) for tile in tiles)  # type: ignore[misc]
    made = CONTEST.run(key, _ways(rows, filters, ends), x.device)
    return made.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)


def _apart(x: Tensor, weight: Tensor, ends: tuple[Any, ...], stride: Ints, padding: Ints) -> Tensor:
    """A depthwise convolution: cuDNN's and one elementwise kernel, or ours."""
    bias, added, *norm, eps, activation, _ = ends
    given = (x, weight, bias, *norm, eps, activation, stride, padding)
    bare = activation == "none" and norm[0] is None and added is None

    def library() -> Tensor:
        if bare:
            made = F.conv2d(x, weight, bias, stride, padding, groups=x.shape[1])
            return made.contiguous(memory_format=torch.channels_last)
        made = _convolved(x, weight, stride, padding, [1, 1], x.shape[1])
        finished(_rows(made), *ends)  # type: ignore[arg-type]
        return made

    ways: dict[str, Any] = {"library": library}
    absent = tuple(each is None for each in ends[:6])
    key = (x.shape, weight.shape, x.dtype, activation, *absent, *stride, *padding, x.device)
    if added is None and DEPTHWISE.support(*given) is None:
        tiles = strips.tiles(_outs(x, weight, stride, padding)[0], x.shape[1], weight.shape[2])
        ways |= {str(tile): partial(apart.tiled, *given, tile=tile) for tile in tiles}  # type: ignore[misc]
        if key not in CONTEST.won:
            prepared(partial(apart.planned, *given, tile=tile) for tile in tiles)  # type: ignore[misc]
    return CONTEST.run(key, ways, x.device)


def _bundled(x: Tensor, weight: Tensor, ends: tuple[Any, ...], stride: Ints, padding: Ints, groups: int) -> Tensor:
    """A grouped convolution: cuDNN's and one elementwise kernel, or ours."""
    bias, added, *norm, eps, activation, _ = ends
    given = (x, weight, bias, *norm, eps, activation, stride[0], padding, groups)

    def library() -> Tensor:
        made = _convolved(x, weight, stride, padding, [1, 1], groups)
        finished(_rows(made), *ends)  # type: ignore[arg-type]
        return made

    ways: dict[str, Any] = {"library": library}
    absent = tuple(each is None for each in ends[:6])
    key = (x.shape, weight.shape, x.dtype, activation, *absent, *stride, *padding, groups, x.device)
    if added is None and GROUPED_CONVOLUTION.support(*given) is None:
        size = weight.shape[0] // groups
        tiles = bundles.tiles(size * bundles.bundled(groups, weight.shape[1], size))
        ways |= {str(tile): partial(together.tiled, *given, tile=tile) for tile in tiles}  # type: ignore[misc]
        if key not in CONTEST.won:
            prepared(partial(together.planned, *given, tile=tile) for tile in tiles)  # type: ignore[misc]
    return CONTEST.run(key, ways, x.device)


def _outs(x: Tensor, weight: Tensor, stride: Ints, padding: Ints) -> list[int]:
    return [(x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in range(2)]


def _convolved(x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Tensor:
    """The convolution alone, channels last."""
    if is_stem(x, weight, (stride, padding, dilation, [0, 0], groups, False)):
        return stem(x, weight, None, padding)
    made = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    return made.contiguous(memory_format=torch.channels_last)


def _ways(rows: Tensor, filters: Tensor, ends: tuple[Any, ...]) -> dict[str, Any]:
    """cuBLAS and one elementwise kernel, and our GEMM with every tile worth trying."""
    found: dict[str, Any] = {"library": lambda: finished(F.linear(rows, filters), *ends)}
    if DENSE.support(rows, filters, *ends) is None:
        for tile in config.tiles(rows.shape[0], *filters.shape):
            found[str(tile)] = partial(tiled, rows, filters, *ends, tile=tile)  # type: ignore[misc]
    return found


def _on_host(
    x: Tensor, weight: Tensor, ends: tuple[Any, ...], stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    made = F.conv2d(x, weight, None, stride, padding, dilation, groups).permute(0, 2, 3, 1)
    wide = [each.float() if isinstance(each, Tensor) else each for each in ends]
    flat = finish(made.reshape(-1, made.shape[3]).float(), *wide)
    return flat.to(x.dtype).view(made.shape).permute(0, 3, 1, 2)


def _rows(x: Tensor | None) -> Tensor | None:
    """[pixels, channels] of a channels-last image."""
    return None if x is None else x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


_op = torch.library.custom_op("ridgeline_optimizer::ended_convolution", _ended, mutates_args=())


@_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints,
    dilation: Ints, groups: int,
) -> Tensor:  # fmt: skip
    sizes = F.conv2d(x, weight, None, stride, padding, dilation, groups).shape
    return x.new_empty((sizes[0], *sizes[2:], sizes[1])).permute(0, 3, 1, 2)


def is_product(weight: Tensor, stride: Ints, padding: Ints, groups: int) -> bool:
    """Whether a convolution is pointwise with stride one."""
    return weight.shape[2:].numel() == 1 and set(stride) == {1} and not any(padding) and groups == 1


def is_depthwise(weight: Tensor, stride: Ints, dilation: Ints, groups: int) -> bool:
    """Whether a convolution is depthwise, with a stride that our kernel supports."""
    sizes = weight.shape[1] == 1 and 1 < max(weight.shape[2:]) <= apart.MOST_TAPS
    return sizes and groups == weight.shape[0] and max(stride) <= apart.MOST_STRIDE and set(dilation) == {1}


def is_grouped(weight: Tensor, stride: Ints, dilation: Ints, groups: int) -> bool:
    """Whether a convolution has groups of several channels, of sizes and strides that our kernel supports."""
    plain = len(set(stride)) == 1 and stride[0] in (1, 2) and set(dilation) == {1}
    if not plain or groups == 1 or weight.shape[1] == 1 or max(weight.shape[2:]) > together.MOST_TAPS:
        return False
    return bundles.bundled(groups, weight.shape[1], weight.shape[0] // groups) > 0


@dataclass(slots=True)
class Chain:
    """A convolution, the ops fused with it and the last node of those."""

    last: fx.Node
    inside: list[fx.Node]
    norm: Call | None = None
    added: fx.Node | None = None
    activation: str = "none"


@rewrite(
    "pointwise",
    summary="pointwise convolutions with batch norm, sum and activation become one GEMM, where it beats cuDNN",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.2, basis="ResNet-50 5.4 → 4.4 ms with its stem, H200; raced when first run"),
    needs_kernels=True,
)
def pointwise(ctx: GraphContext) -> list[Match]:
    return _ended_all(ctx, "pointwise")


@rewrite(
    "depthwise",
    summary="depthwise convolutions with batch norm and activation become our kernel, where it beats cuDNN's",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.3, basis="cuDNN's take 2.65 of ConvNeXt-B's 8.8 ms, H200; raced when first run"),
    needs_kernels=True,
    exact="reordered",
)
def depthwise(ctx: GraphContext) -> list[Match]:
    return _ended_all(ctx, "depthwise")


@rewrite(
    "grouped",
    summary="grouped convolutions with batch norm and activation become our kernel, where it beats cuDNN's",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.5, basis="cuDNN's takes 57 µs where 3 MB are moved, H200; raced when first run"),
    needs_kernels=True,
    exact="reordered",
)
def grouped(ctx: GraphContext) -> list[Match]:
    return _ended_all(ctx, "grouped")


@rewrite(
    "convolution-end",
    summary="batch norm, sum and activation after a convolution become one kernel",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=0.98, basis="one pass instead of three; compilers fuse them too"),
    needs_kernels=True,
)
def convolution_end(ctx: GraphContext) -> list[Match]:
    return _ended_all(ctx, "other")


def _ended_all(ctx: GraphContext, kind: str) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_put(ctx, read, kind) for node in ctx.nodes if (read := call(node)) and read.op == "conv2d"]
    return [match for match in found if match is not None]


def _put(ctx: GraphContext, layer: Call, kind: str) -> Match | None:
    settings = settings_of(layer)
    if settings is None or not _fits(ctx, layer):
        return None
    stride, padding, dilation, _, groups, _ = settings
    weight = ctx.tensor(layer["weight"])
    if weight is None or _kind(weight, stride, padding, dilation, groups) != kind:
        return None
    own = kind in ("depthwise", "grouped")
    chain = _chain(ctx, layer, sums=not own)
    if chain.last is layer.node and not own:
        return None
    norm = (None, None, None, None, 1e-5) if chain.norm is None else (
        *(chain.norm.get(name) for name in ("running_mean", "running_var", "weight", "bias")),
        float(chain.norm.get("eps", 1e-5)),
    )  # fmt: skip
    leaves = (layer["input"], layer["weight"], layer.get("bias"), chain.added, *norm[:4])
    if not ctx.unchanged(leaves, chain.inside, chain.last):
        return None
    new = ctx.emit(chain.last, ended_convolution, *leaves, norm[4], chain.activation, stride, padding, dilation,
                     groups)  # fmt: skip
    if not ctx.replace(chain.last, new):
        return None
    ctx.discard(chain.last)
    what = ", ".join(name for name, there in (("norm", chain.norm), ("sum", chain.added)) if there is not None)
    return ctx.match(new, f"{tuple(weight.shape)} with {what}{' and ' if what else ''}{chain.activation}")


def _kind(weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> str:
    if is_product(weight, stride, padding, groups):
        return "pointwise"
    if is_grouped(weight, stride, dilation, groups):
        return "grouped"
    return "depthwise" if is_depthwise(weight, stride, dilation, groups) else "other"


def _fits(ctx: GraphContext, layer: Call) -> bool:
    """Large 16-bit channels-last images with aligned channels."""
    x, weight, out = (ctx.tensor(each) for each in (layer["input"], layer["weight"], layer.node))
    if x is None or weight is None or out is None or x.dim() != 4 or ctx.shape(layer.node) is None:
        return False
    bias = layer.get("bias")
    last = torch.channels_last
    lies = (x.shape[1] % VECTOR == 0 and x.is_contiguous(memory_format=last)) or x.shape[1] <= MOST_CHANNELS
    fits = (
        lies and out.is_contiguous(memory_format=last) and out.shape[1] % VECTOR == 0 and out.numel() >= LEAST_NUMBERS
    )
    return fits and x.dtype in NARROW and weight.dtype == x.dtype and (bias is None or isinstance(bias, fx.Node))


def _chain(ctx: GraphContext, layer: Call, *, sums: bool) -> Chain:
    """The ops after a convolution without other users: a norm, a sum (if ``sums``) and an activation, in this order."""
    chain = Chain(layer.node, [layer.node])
    while len(chain.last.users) == 1:
        (user,) = chain.last.users
        read = call(user)
        if read is None or (read.op == "add" and not sums) or not _taken(ctx, chain, read):
            break
        chain.last = user
        chain.inside.append(user)
        if chain.activation != "none":
            break
    return chain


def _taken(ctx: GraphContext, chain: Chain, read: Call) -> bool:
    if read.op == "batch_norm" and chain.norm is None and chain.added is None:
        fits = read["input"] is chain.last and _is_settled(ctx, read)
        chain.norm = read if fits else None
        return fits
    if read.op == "add" and chain.added is None and read.given.get("alpha") in (None, 1):
        other = read["other"] if read["input"] is chain.last else read["input"]
        if other is chain.last or not _alike(ctx, chain.last, other):
            return False
        chain.added = other
        return True
    activation = _activation(read)
    if activation is None or read["input"] is not chain.last:
        return False
    chain.activation = activation
    return True


def _is_settled(ctx: GraphContext, norm: Call) -> bool:
    """Whether a batch norm is in evaluation mode, with all its arguments in the graph."""
    stats = norm.get("running_mean"), norm.get("running_var")
    given = (*stats, norm.get("weight"), norm.get("bias"))
    plain = all(each is None or _is_dense(ctx.tensor(each)) for each in given)
    return norm.get("training", False) is False and None not in stats and plain


def _is_dense(vector: Tensor | None) -> bool:
    return vector is not None and vector.dim() == 1 and vector.stride(0) == 1


def _alike(ctx: GraphContext, a: fx.Node, b: Any) -> bool:
    x, y = ctx.tensor(a), ctx.tensor(b)
    return x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype and (
        y.is_contiguous(memory_format=torch.channels_last)
    )  # fmt: skip


def _activation(read: Call) -> str | None:
    if read.op in _PLAIN:
        return read.op
    if read.op == "gelu":
        return "gelu_tanh" if read.get("approximate", "none") == "tanh" else "gelu"
    if read.op == "hardtanh" and read.get("min_val", -1.0) == 0 and read.get("max_val", 1.0) == 6:
        return "relu6"
    return None


rewrite(
    "stem",
    summary="a stride-two convolution of three channels runs on squares of four pixels, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.5, basis="ResNet-50's 0.96 → 0.38 ms, EfficientNet's 0.15 → 0.12, H200; raced"),
    needs_kernels=True,
    exact="reordered",
)(stems)
