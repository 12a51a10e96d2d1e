"""Rewrites a network's first convolution, of images with three channels, to one over squares of four pixels.

cuDNN pads three channels to eight, in a separate pass, and its tensor cores then multiply mostly zeros: 0.96 ms of
ResNet-50 at 128 images, where squares take 0.38. A convolution with stride two is one with stride one over the squares,
with the filter's numbers in another order. Small filters (3 × 3, as in mobile networks) do not gain with cuDNN (156 µs
instead of 152, where memory bandwidth allows 17; 64 images, H200), so our grouped kernel is tried too, with one group.
A race at the first run of a shape decides.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.grouped_conv.config import MOST_WIDTH
from ridgeline.kernels.grouped_conv.op import grouped_convolution
from ridgeline.kernels.linear_epilogue.op import VECTOR
from ridgeline.kernels.pixel_unshuffle.op import CHANNELS, MOST_CHANNELS, unshuffle
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.conv.read import Ints, Settings, settings_of
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import Match

LEAST_CHANNELS, LEAST_SIDE = 3, 3
LEAST_NUMBERS = 1 << 18
NARROW = (torch.bfloat16, torch.float16)
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def stem(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints) -> Tensor:
    """``conv2d`` with stride two, channels last, by the faster implementation; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _stem(x, weight, bias, padding)
    return torch.ops.ridgeline_optimizer.stem(x, weight, bias, padding)


def _stem(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints) -> Tensor:
    given = (x, weight, bias, padding)
    if not x.is_cuda:
        return squares(*given)
    key = (x.shape, x.stride(), weight.shape, x.dtype, bias is None, tuple(padding), x.device)
    ways = {"library": partial(_library, *given), "squares": partial(squares, *given)}
    if weight.shape[0] <= MOST_WIDTH and weight.shape[0] % VECTOR == 0:
        ways["squares, one kernel"] = partial(squares, *given, own=True)
    return CONTEST.run(key, ways, x.device)


def _library(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints) -> Tensor:
    return F.conv2d(x, weight, bias, 2, padding).contiguous(memory_format=torch.channels_last)


def squares(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, *, own: bool = False) -> Tensor:
    """The convolution over squares of four pixels, by the library or by our kernel."""
    half = [-(-side // 2) for side in weight.shape[2:]]
    outs = _outs(x, weight, padding)
    image = unshuffle(x, outs[0] + half[0] - 1, outs[1] + half[1] - 1, *padding)
    if own:
        return grouped_convolution(image, _filters(weight, half), bias)
    found = F.conv2d(image, _filters(weight, half), bias)
    return found.contiguous(memory_format=torch.channels_last)


def _outs(x: Tensor, weight: Tensor, padding: Ints) -> list[int]:
    return [(x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // 2 + 1 for i in range(2)]


def _filters(weight: Tensor, half: Ints) -> Tensor:
    """The filter by squares: [outputs, 16, rows, columns], channels last."""
    lacks = [2 * size - side for size, side in zip(half, weight.shape[2:], strict=True)]
    whole = F.pad(weight, (0, lacks[1], 0, lacks[0]))
    cut = whole.reshape(*weight.shape[:2], half[0], 2, half[1], 2).permute(0, 1, 3, 5, 2, 4)
    flat = cut.reshape(weight.shape[0], 4 * weight.shape[1], *half)
    filled = F.pad(flat, (0, 0, 0, 0, 0, CHANNELS - flat.shape[1]))
    return filled.contiguous(memory_format=torch.channels_last)


_op = torch.library.custom_op("ridgeline_optimizer::stem", _stem, mutates_args=())


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints) -> Tensor:
    return x.new_empty((x.shape[0], *_outs(x, weight, padding), weight.shape[0])).permute(0, 3, 1, 2)


def is_stem(x: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Whether a convolution halves a large 16-bit image of three or four channels."""
    stride, _, dilation, _, groups, transposed = settings
    plain = stride == [2, 2] and dilation == [1, 1] and groups == 1 and not transposed
    return plain and LEAST_CHANNELS <= x.shape[1] <= MOST_CHANNELS and x.dtype in NARROW and x.numel() >= (
        LEAST_NUMBERS
    ) and weight.dtype == x.dtype and min(weight.shape[2:]) >= LEAST_SIDE and x.dim() == 4  # fmt: skip


def stems(ctx: GraphContext) -> list[Match]:
    """All such convolutions of a graph; ordered after rewrites that fuse more ops with them."""
    if ctx.autocast:
        return []
    found = [_put(ctx, read) for node in ctx.nodes if (read := call(node)) is not None and read.op == "conv2d"]
    return [match for match in found if match is not None]


def _put(ctx: GraphContext, read: Call) -> Match | None:
    settings = settings_of(read)
    x, weight, out = (ctx.tensor(each) for each in (read["input"], read["weight"], read.node))
    if settings is None or x is None or weight is None or out is None or not is_stem(x, weight, settings):
        return None
    leaves = (read["input"], read["weight"], read.get("bias"))
    if not out.is_contiguous(memory_format=torch.channels_last) or not ctx.unchanged(leaves, (read.node,), read.node):
        return None
    new = ctx.emit(read.node, stem, *leaves, settings[1])
    if not ctx.replace(read.node, new):
        return None
    ctx.discard(read.node)
    return ctx.match(new, f"{tuple(weight.shape)} over squares")
