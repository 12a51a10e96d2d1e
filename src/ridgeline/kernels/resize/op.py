"""``resize``: bilinear interpolation of images, channels first or last."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.resize import kernel, reference
from ridgeline.kernels.rows import cdiv, float_reason

_FORWARD = Kernel(kernel.resize_forward, vectors=("channels", "x_b", "x_y", "x_x"))
_plans = Plans()
ELEMENTS, WARPS = 2048, 4
"""A program's share of the result."""
MOST_CHANNELS = 256


def resize(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    """``F.interpolate(x, mode="bilinear")`` to ``h`` × ``w`` pixels, which lie ``scale`` pixels of ``x`` apart; with
    ``corners`` those of ``x`` and of the result are the same points (``align_corners``)."""
    return RESIZE(x, h, w, corners, scale_y, scale_x)


def is_last(x: Tensor) -> bool:
    """Whether channels lie beside each other, as PyTorch would go on with them."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _forward(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    if not launchable(x):
        return RESIZE.on_host(x, h, w, corners, scale_y, scale_x)
    out = _like(x, h, w)
    if not out.numel():
        return out
    batch, channels, height, width = x.shape
    numbers = (batch * h * w, channels, height, width, h, w, scale_y, scale_x, *x.stride(), *out.stride())
    key = (numbers, x.dtype, corners, x.data_ptr() % 16, x.get_device())
    run = _plans.get(key)
    if run is None:
        RESIZE.check(x, h, w, corners, scale_y, scale_x)
        run = _plans[key] = _bound(x, out, numbers, corners)
    run(x, out, *numbers)
    return out


def _bound(x: Tensor, out: Tensor, numbers: tuple[Any, ...], corners: bool) -> Any:
    last, channels = is_last(x), x.shape[1]
    wide = min(MOST_CHANNELS, 1 << (channels - 1).bit_length()) if last else 1
    widest = 16 // x.element_size()
    return _FORWARD.bind(
        (x, out, *numbers),
        grid=(cdiv(numbers[0], ELEMENTS // wide), cdiv(channels, wide)),
        constants={"PIXELS": ELEMENTS // wide, "CHANNELS": wide, "CORNERS": corners, "LAST": last},
        num_warps=WARPS,
        device=x.get_device(),
        vector=widest if last and channels % widest == 0 and x.data_ptr() % 16 == 0 else 1,
    )


def _like(x: Tensor, h: int, w: int) -> Tensor:
    if is_last(x):
        return x.new_empty((x.shape[0], h, w, x.shape[1])).permute(0, 3, 1, 2)
    return x.new_empty((*x.shape[:2], h, w))


def _support(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> str | None:
    if x.dim() != 4:
        return f"x is {tuple(x.shape)}: images"
    if min(h, w) < 1 or min(x.shape) < 1:
        return "there are no pixels"
    reach = sum((size - 1) * stride for size, stride in zip(x.shape[2:], x.stride()[2:], strict=True))
    if x.shape[0] * h * w >= 2**31 or reach >= 2**31 or x.shape[1] >= 65536:
        return "more pixels than 32 bits count, or more channels than a grid has"
    return float_reason(x=x)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn((of["b"], of["c"], of["y"], of["x"]), device=on, dtype=torch.float32, generator=generator)
    x = x.to(getattr(torch, of.dtype))
    corners = bool(of.get("corners", False))
    scales = [_scale(of[a], of[b], corners) for a, b in (("y", "h"), ("x", "w"))]
    given = x.contiguous(memory_format=torch.channels_last) if of.get("last", False) else x
    return given, of["h"], of["w"], corners, *scales


def _scale(size: int, num: int, corners: bool) -> float:
    if corners:
        return (size - 1) / (num - 1) if num > 1 else 0.0
    return size / num


def _eager(x: Tensor, h: int, w: int, corners: bool, scale_y: float, scale_x: float) -> Tensor:
    return F.interpolate(x, size=(h, w), mode="bilinear", align_corners=corners)


RESIZE = declare(
    name="resize",
    summary="images made larger or smaller by lines between pixels",
    schema="(Tensor x, int h, int w, bool corners, float scale_y, float scale_x) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, h, w, corners, scale_y, scale_x: _like(x, h, w),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    trial=Trial(
        make=_make,
        call=resize,
        eager=_eager,
        reference=reference.forward,
        mistakes={"nearest": reference.nearest, "turned": reference.turned},
        checks=tuple(
            case(dtype, b=2, c=c, y=y, x=y, h=h, w=w, last=last, corners=corners)
            for dtype in DTYPES
            for c, y, h, w, last, corners in (
                (24, 9, 36, 31, True, False),
                (7, 12, 5, 17, True, True),
                (300, 8, 16, 16, True, False),
                (3, 11, 22, 40, False, False),
                (5, 6, 13, 12, False, True),
            )
        ),
        races=(
            case("bfloat16", b=8, c=768, y=32, x=32, h=128, w=128, last=True, corners=False),
            case("bfloat16", b=8, c=150, y=128, x=128, h=512, w=512, last=False, corners=False),
        ),
        phases=("fwd",),
        constants=(0,),
    ),
)
