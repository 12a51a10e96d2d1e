"""Bilinear resizing: our kernel where a race shows it to be faster than the library's.

PyTorch's channels-last kernel takes 930 µs for an image that memory bandwidth allows in 60 (8 × 768 × 128 × 128 in bf16
on an H200): three of them were a third of SegFormer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.resize.op import RESIZE, is_last, resize
from ridgeline.optimizer.rewrites.context import LOWERED_BY, GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 18
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def raced_resize(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    """Resize an image by the library or by our kernel; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _raced(x, h, w, corners, scale_y, scale_x)
    return torch.ops.ridgeline_optimizer.raced_resize(x, h, w, corners, scale_y, scale_x)


def _raced(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    args = (x, h, w, corners, scale_y, scale_x)
    ways = {"library": partial(_library, *args)}
    if (x.is_contiguous() or is_last(x)) and RESIZE.support(*args) is None:
        ways["ours"] = partial(resize, *args)
    return CONTEST.run((x.shape, x.stride(), x.dtype, *args[1:], x.device), ways, x.device)


def _library(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    """PyTorch's op, with explicit scales if they differ from those of the sizes."""
    own = None if corners else [1.0 / scale_y, 1.0 / scale_x]
    told = own if own is not None and (scale_y, scale_x) != (x.shape[2] / h, x.shape[3] / w) else [None, None]
    return torch.ops.aten.upsample_bilinear2d(x, [h, w], corners, *told)


_op = torch.library.custom_op("ridgeline_optimizer::raced_resize", _raced, mutates_args=())


@_op.register_fake
def _(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    return torch.ops.aten.upsample_bilinear2d(x, [h, w], corners)


@rewrite(
    "resizes",
    summary="bilinear resizing becomes our kernel, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(
        eager=2.0,
        compiled=1.2,
        basis="PyTorch's takes 930 µs where memory needs 60, Inductor's 220 to 320 (H200, run 17); raced",
    ),
    exact="rounding",
    needs_kernels=True,
)
def resizes(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    return [match for node in ctx.nodes if (match := _put(ctx, node)) is not None]


def _put(ctx: GraphContext, node: fx.Node) -> Match | None:
    read = call(node)
    if read is None or read.op != "interpolate" or read.get("mode", "nearest") != "bilinear":
        return None
    x, out = ctx.tensor(read.given.get("input")), ctx.tensor(node)
    given = None if x is None or out is None or x.dim() != 4 else _given(read, x, out)
    if x is None or out is None or given is None or not ctx.shape(read["input"]) or out.numel() < LEAST_ELEMENTS:
        return None
    if ctx.options.get(LOWERED_BY, "none") != "none" and not is_last(x):
        return None  # contiguous images are slower by ours (1,461 and 997 µs, H200), and compilers have their own
    dense = x.is_contiguous() or is_last(x)  # for others the library chooses the layout of the result
    if not dense or RESIZE.support(x, *given) is not None or not ctx.unchanged((read["input"],), (node,), node):
        return None
    new = ctx.emit(node, raced_resize, read["input"], *given)
    if not ctx.replace(node, new):
        return None
    ctx.discard(node)
    return ctx.match(new, f"{tuple(x.shape)} to {given[0]} × {given[1]}")


def _given(read: Call, x: Tensor, out: Tensor) -> tuple[int, int, bool, float, float] | None:
    """Height, width, align_corners, and the pixel distances; None for rare arguments."""
    corners, factor = bool(read.get("align_corners", False)), read.get("scale_factor", None)
    if read.get("antialias", False) or read.get("recompute_scale_factor", None):
        return None
    if read.get("size", None) is not None and factor is not None:
        return None
    h, w = int(out.shape[2]), int(out.shape[3])
    if corners:
        return h, w, True, _apart(x.shape[2], h), _apart(x.shape[3], w)
    factors = _pair(factor) if factor is not None else (h / x.shape[2], w / x.shape[3])
    if factors is None or min(factors) <= 0:
        return None
    exact = factor is None
    scales = (x.shape[2] / h, x.shape[3] / w) if exact else (1.0 / factors[0], 1.0 / factors[1])
    return h, w, False, float(scales[0]), float(scales[1])


def _apart(size: int, num: int) -> float:
    return (size - 1) / (num - 1) if num > 1 else 0.0


def _pair(factor: Any) -> tuple[float, float] | None:
    found = tuple(factor) if isinstance(factor, (tuple, list)) else (factor, factor)
    return found if len(found) == 2 and all(isinstance(each, (int, float)) for each in found) else None
