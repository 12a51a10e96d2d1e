"""Convolutions along sequences, grouped or depthwise, and weight norms, as in speech encoders.

A race at the first run of a shape decides between cuDNN's convolution and ours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.depthwise_conv.op import DEPTHWISE, MOST_ALONG, MOST_STRIDE, depthwise
from ridgeline.kernels.grouped_conv1d.op import NARROW, SEQUENCE_CONVOLUTION, sequence_convolution
from ridgeline.optimizer.rewrites.context import SMALL, GraphContext
from ridgeline.optimizer.rewrites.conv.read import settings_of
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_TAPS, LEAST_OF_GROUP, LEAST_CHANNELS = 8, 16, 64
LEAST_NUMBERS = SMALL
_PASSED = ("gelu", "relu", "silu", "leaky_relu", "mish", "tanh", "hardswish", "batch_norm", "glu")
_INDIFFERENT = ("conv1d", "contiguous", "reshape")
"""Ops that return their own layout for any input."""
_TURNS = ("transpose", "permute", "mT")
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def placed(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, groups: int, last: bool) -> Tensor:
    """``F.conv1d``, with channels or steps last, by the faster implementation; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _placed(x, weight, bias, padding, groups, last)
    return torch.ops.ridgeline_optimizer.placed(x, weight, bias, padding, groups, last)


def _placed(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, groups: int, last: bool) -> Tensor:
    given = (weight, bias, padding, groups)
    if not x.is_cuda:
        return _laid(F.conv1d(x, weight, bias, padding=padding, groups=groups), last)
    rows = x.transpose(1, 2).contiguous().transpose(1, 2)
    ways: dict[str, Any] = {"library": lambda: F.conv1d(x, weight, bias, padding=padding, groups=groups)}
    if SEQUENCE_CONVOLUTION.support(rows, *given) is None:
        ways["ours"] = partial(sequence_convolution, rows, *given)
    key = (x.shape, x.stride(), weight.shape, padding, x.dtype, x.device)
    return _laid(CONTEST.run(key, ways, x.device), last)


def _laid(found: Tensor, last: bool) -> Tensor:
    """The result with channels or steps contiguous."""
    return found.transpose(1, 2).contiguous().transpose(1, 2) if last else found.contiguous()


_op = torch.library.custom_op("ridgeline_optimizer::placed", _placed, mutates_args=())


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, groups: int, last: bool) -> Tensor:
    sizes = (x.shape[0], x.shape[2] + 2 * padding - weight.shape[2] + 1, weight.shape[0])
    return x.new_empty(sizes).transpose(1, 2) if last else x.new_empty((sizes[0], sizes[2], sizes[1]))


@rewrite(
    "sequence-convolution",
    summary="grouped convolutions along sequences with many taps become our kernel, where it beats cuDNN's",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=2.0, basis="wav2vec2's positions: one kernel a group, 2.2 of 7.8 ms, H200; raced"),
    needs_kernels=True,
    exact="reordered",
)
def sequence_convolutions(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_put(ctx, read) for node in ctx.nodes if (read := call(node)) is not None and read.op == "conv1d"]
    return [match for match in found if match is not None]


def _put(ctx: GraphContext, read: Call) -> Match | None:
    settings = settings_of(read)
    x, weight, out = (ctx.tensor(each) for each in (read["input"], read["weight"], read.node))
    if settings is None or x is None or weight is None or out is None or ctx.shape(read.node) is None:
        return None
    stride, padding, dilation, _, groups, _ = settings
    many = groups > 1 and weight.shape[2] >= LEAST_TAPS and weight.shape[1] >= LEAST_OF_GROUP and x.dim() == 3
    if not many or stride != [1] or dilation != [1] or x.dtype not in NARROW or weight.dtype != x.dtype:
        return None
    leaves = (read["input"], read["weight"], read.get("bias"))
    if not ctx.unchanged(leaves, (read.node,), read.node):
        return None
    last = out.stride(1) == 1 and out.shape[1] > 1
    new = ctx.emit(read.node, placed, *leaves, padding[0], groups, last)
    if not ctx.replace(read.node, new):
        return None
    ctx.discard(read.node)
    return ctx.match(new, f"{tuple(weight.shape)} in {groups} groups")


def along(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int) -> Tensor:
    """``F.conv1d`` with channels last, by the faster implementation; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _along(x, weight, bias, stride, padding, dilation)
    return torch.ops.ridgeline_optimizer.along(x, weight, bias, stride, padding, dilation)


def _along(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int) -> Tensor:
    given = (x, weight, bias, stride, padding, dilation)
    ways: dict[str, Any] = {"library": lambda: _laid(F.conv1d(*given), last=True), "last": partial(_as_image, *given)}
    if weight.shape[2] == stride == 1 and padding == 0:
        ways["product"] = partial(_as_product, x, weight, bias)
    key = ("along", x.shape, x.stride(), weight.shape, *given[3:], x.dtype, x.device)
    return CONTEST.run(key, ways, x.device)


def _as_image(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int) -> Tensor:
    """A sequence as an image of one row, because PyTorch always makes the steps of sequences contiguous."""
    image, taps = (t.unsqueeze(2).contiguous(memory_format=torch.channels_last) for t in (x, weight))
    found = F.conv2d(image, taps, bias, (1, stride), (0, padding), (1, dilation)).squeeze(2)
    return _laid(found, last=True)


def _as_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of one tap as a linear layer."""
    return F.linear(x.transpose(1, 2), weight.squeeze(2), bias).transpose(1, 2)


_along_op = torch.library.custom_op("ridgeline_optimizer::along", _along, mutates_args=())


@_along_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, dilation: int) -> Tensor:
    steps = (x.shape[2] + 2 * padding - dilation * (weight.shape[2] - 1) - 1) // stride + 1
    return x.new_empty((x.shape[0], steps, weight.shape[0])).transpose(1, 2)


@rewrite(
    "sequence-last",
    summary="convolutions along sequences run channels last, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="wav2vec2: 0.7 of 7.8 ms turn sequences over for cuDNN and back, H200"),
    needs_kernels=True,
    exact="reordered",
)
def sequences_last(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_turned(ctx, read) for node in ctx.nodes if (read := call(node)) is not None and read.op == "conv1d"]
    return [match for match in found if match is not None]


def _turned(ctx: GraphContext, read: Call) -> Match | None:
    settings = settings_of(read)
    x, weight, out = (ctx.tensor(each) for each in (read["input"], read["weight"], read.node))
    if settings is None or x is None or weight is None or out is None or ctx.shape(read.node) is None:
        return None
    stride, padding, dilation, _, groups, _ = settings
    wide = groups == 1 and min(weight.shape[:2]) >= LEAST_CHANNELS and x.dim() == 3 and out.numel() >= SMALL
    if not wide or x.dtype not in NARROW or weight.dtype != x.dtype or not _is_indifferent(read.node):
        return None
    alone = weight.shape[2] > 1 and not _comes_last(read["input"]) and _is_transposed_back(ctx, read.node)
    if _is_returned(read.node) or alone:
        return None
    leaves = (read["input"], read["weight"], read.get("bias"))
    if not ctx.unchanged(leaves, (read.node,), read.node):
        return None
    new = ctx.emit(read.node, along, *leaves, stride[0], padding[0], dilation[0])
    if (ctx.shape(new), ctx.dtype(new)) != (ctx.shape(read.node), ctx.dtype(read.node)):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    return ctx.match(new, f"{tuple(weight.shape)}, channels last")


def _is_indifferent(node: fx.Node, depth: int = 8) -> bool:
    """Whether no reader of a value depends on its layout, through elementwise ops.

    Transposed, a channels-last sequence is contiguous, which nothing inside a graph depends on.
    """
    for user in node.users:
        if user.target in (along, apart):
            continue
        read = call(user)
        if read is None or depth == 0 or user.op == "output":
            return False
        if read.op in _INDIFFERENT or (read.op in _TURNS and all(each.op != "output" for each in user.users)):
            continue
        passed = read.op in _PASSED or (read.op == "getitem" and _is_cut(read["index"]))
        if not passed or not _is_indifferent(user, depth - 1):
            return False
    return True


def _comes_last(node: Any, depth: int = 8) -> bool:
    """Whether a value is channels last because an earlier convolution was rewritten."""
    if not isinstance(node, fx.Node) or depth == 0:
        return False
    if node.target in (along, apart):
        return True
    read = call(node)
    passed = read is not None and (read.op in _PASSED or read.op == "getitem")
    return passed and read is not None and _comes_last(read.given.get("input"), depth - 1)


def _is_transposed_back(ctx: GraphContext, node: fx.Node) -> bool:
    """Whether a convolution of several taps would transpose its input and its result back: for HiFi-GAN, where every
    second one is added to its input, that took 1.14 times as long (H200)."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        read = call(user)
        if read is None or read.op in _TURNS:
            continue
        if read.op in _PASSED or read.op == "getitem":
            waiting += user.users
        elif read.op == "conv1d" and (ctx.shape(read["weight"]) or (0, 0, 1))[2] > 1 and not _is_indifferent(user):
            return True
    return False


_OWN_LAYOUT = ("linear", "matmul", "mm", "bmm", "conv1d", "conv2d", "layer_norm", "rms_norm", "attention", "contiguous")


def _is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a value with this layout: outputs keep theirs."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            read = call(user)
            if user.op == "output":
                return True
            own = user.target in (along, apart) or (read is not None and read.op in _OWN_LAYOUT)
            if user not in seen and not own:
                seen.add(user)
                waiting.append(user)
    return False


def _is_cut(index: Any) -> bool:
    """Whether an index only cuts steps at an end, as after causal padding."""
    return isinstance(index, tuple) and all(isinstance(each, slice) or each is Ellipsis for each in index)


# depthwise convolutions -------------------------------------------------------------------------------------------


def apart(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, last: bool) -> Tensor:
    """Depthwise ``F.conv1d``, with channels or steps last, by the faster implementation; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _apart(x, weight, bias, stride, padding, last)
    return torch.ops.ridgeline_optimizer.apart(x, weight, bias, stride, padding, last)


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, last: bool) -> Tensor:
    given = (x, weight, bias, stride, padding, last)
    ways: dict[str, Any] = {"library": partial(_apart_by_library, *given)}
    if not x.is_cuda:
        return ways["library"]()
    like = _image(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # other layouts are copied to this one
    if DEPTHWISE.support(like, weight.unsqueeze(2), bias, **_steps(stride, padding)) is None:
        ways["ours"] = partial(_apart_by_ours, *given)
    key = ("apart", x.shape, x.stride(), weight.shape, stride, padding, last, x.dtype, x.device)
    return CONTEST.run(key, ways, x.device)


def _steps(stride: int, padding: int) -> dict[str, Any]:
    return {"stride": (1, stride), "padding": (0, padding)}


def _image(x: Tensor) -> Tensor:
    """A channels-last sequence as an image of one row."""
    return x.transpose(1, 2).contiguous().unsqueeze(1).permute(0, 3, 1, 2)


def _apart_by_library(x: Tensor, weight: Tensor, bias: Any, stride: int, padding: int, last: bool) -> Tensor:
    return _laid(F.conv1d(x, weight, bias, stride, padding, groups=x.shape[1]), last)


def _apart_by_ours(x: Tensor, weight: Tensor, bias: Any, stride: int, padding: int, last: bool) -> Tensor:
    image = _image(x)
    image = image.clone() if image.data_ptr() % 16 else image  # an unaligned slice
    made = depthwise(image, weight.unsqueeze(2), bias, **_steps(stride, padding))
    return _laid(made.squeeze(2), last)


_apart_op = torch.library.custom_op("ridgeline_optimizer::apart", _apart, mutates_args=())


@_apart_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, last: bool) -> Tensor:
    steps = (x.shape[2] + 2 * padding - weight.shape[2]) // stride + 1
    return _laid(x.new_empty((x.shape[0], x.shape[1], steps)), last)


@rewrite(
    "sequence-apart",
    summary="depthwise convolutions along sequences become our kernel, where it beats the library's",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=1.3, basis="a Conformer's: 0.97 of 5.2 ms where memory takes 0.08, H200; raced"),
    needs_kernels=True,
    exact="reordered",
)
def sequences_apart(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = [_kept(ctx, read) for node in ctx.nodes if (read := call(node)) is not None and read.op == "conv1d"]
    return [match for match in found if match is not None]


def _kept(ctx: GraphContext, read: Call) -> Match | None:
    settings = settings_of(read)
    x, weight, out = (ctx.tensor(each) for each in (read["input"], read["weight"], read.node))
    if settings is None or x is None or weight is None or out is None or ctx.shape(read.node) is None:
        return None
    stride, padding, dilation, _, groups, _ = settings
    alone = x.dim() == 3 and groups == x.shape[1] == weight.shape[0] and 1 < weight.shape[2] <= MOST_ALONG
    if not alone or stride[0] > MOST_STRIDE or dilation != [1] or x.dtype not in NARROW or weight.dtype != x.dtype:
        return None
    leaves = (read["input"], read["weight"], read.get("bias"))
    if out.numel() < LEAST_NUMBERS or x.shape[1] % 8 or not ctx.unchanged(leaves, (read.node,), read.node):
        return None
    free = _is_indifferent(read.node) and not _is_returned(read.node)
    last = free or (out.stride(1) == 1 and out.shape[1] > 1)
    new = ctx.emit(read.node, apart, *leaves, stride[0], padding[0], last)
    if (ctx.shape(new), ctx.dtype(new)) != (ctx.shape(read.node), ctx.dtype(read.node)):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    return ctx.match(new, f"{tuple(weight.shape)}, channels apart")


def weight_normed(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """A weight with a given norm along all dims but one."""
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    norm = torch.linalg.vector_norm(v, dim=others, keepdim=True, dtype=torch.float32)
    return (v * (g.float() / norm)).to(v.dtype)


@rewrite(
    "weight-norm",
    summary="weight norm along the last dim is computed by contiguous sums",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=0.99, basis="wav2vec2: 0.59 ms for 17 MB, H200; compilers take it apart too"),
    exact="reordered",
)
def weight_norms(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        match = _renormed(ctx, node) if node.op == "call_function" and node.target is torch._weight_norm else None
        found += [match] if match is not None else []
    return found


def _renormed(ctx: GraphContext, node: fx.Node) -> Match | None:
    given = dict(zip(("v", "g", "dim"), node.args, strict=False)) | dict(node.kwargs)
    dim, v = given.get("dim", 0), ctx.tensor(given["v"])
    if not isinstance(dim, int) or v is None or dim % v.dim() == 0 or ctx.autocast:
        return None
    new = ctx.emit(node, weight_normed, given["v"], given["g"], dim)
    if not ctx.replace(node, new):
        return None
    ctx.discard(node)
    return ctx.match(new, f"weight {tuple(v.shape)} along dim {dim}")
