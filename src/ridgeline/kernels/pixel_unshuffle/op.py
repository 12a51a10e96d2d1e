"""``unshuffle``: images of up to four channels with every square of four pixels laid beside each other as channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.pixel_unshuffle import kernel, reference
from ridgeline.kernels.rows import cdiv, float_reason

_FORWARD = Kernel(kernel.unshuffle_forward, loose=("x_ptr",))
_plans = Plans()
CHANNELS, MOST_CHANNELS = 16, 4
PIXELS = 64


def unshuffle(x: Tensor, h: int, w: int, top: int = 0, left: int = 0) -> Tensor:
    """[B, 16, h, w], channels last: ``F.pixel_unshuffle`` of the image framed by zeros, ``top`` and ``left`` of them
    before it and as many behind as make it ``2h`` × ``2w``; channels it does not have are zeros too."""
    return UNSHUFFLE(x, h, w, top, left)


def _forward(x: Tensor, h: int, w: int, top: int, left: int) -> Tensor:
    if not launchable(x):
        return UNSHUFFLE.on_host(x, h, w, top, left)
    out = _like(x, h, w)
    batch, channels, height, width = x.shape
    numbers = (batch * h * w, channels, height, width, h, w, top, left, *x.stride())
    key = (numbers, x.dtype, x.get_device())
    run = _plans.get(key)
    if run is None:
        UNSHUFFLE.check(x, h, w, top, left)
        run = _plans[key] = _FORWARD.bind(
            (x, out, *numbers),
            grid=(cdiv(numbers[0], PIXELS),),
            constants={"PIXELS": PIXELS},
            num_warps=4,
            device=x.get_device(),
            vector=16 // x.element_size(),
        )
    run(x, out, *numbers)
    return out


def _like(x: Tensor, h: int, w: int) -> Tensor:
    return x.new_empty((x.shape[0], h, w, CHANNELS)).permute(0, 3, 1, 2)


def _support(x: Tensor, h: int, w: int, top: int = 0, left: int = 0) -> str | None:
    if x.dim() != 4 or x.shape[1] > MOST_CHANNELS:
        return f"x is {tuple(x.shape)}: images of at most {MOST_CHANNELS} channels"
    if min(h, w) < 1 or min(top, left) < 0 or 2 * h < x.shape[2] - 1 + top or 2 * w < x.shape[3] - 1 + left:
        return f"{h} × {w} squares do not hold {tuple(x.shape[2:])} pixels"
    if x.shape[0] * h * w >= 2**31:
        return "more pixels than 32 bits count"
    return float_reason(x=x)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    shape = (of["b"], of["c"], of["y"], of["x"])
    x = torch.randn(shape, device=on, dtype=torch.float32, generator=generator).to(getattr(torch, of.dtype))
    return x, of["h"], of["w"], of.get("top", 0), of.get("left", 0)


UNSHUFFLE = declare(
    name="unshuffle",
    summary="squares of four pixels as channels",
    schema="(Tensor x, int h, int w, int top, int left) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, h, w, top, left: _like(x, h, w),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(0.0),
    trial=Trial(
        make=_make,
        call=unshuffle,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"turned": reference.turned},
        checks=tuple(
            case(dtype, b=2, c=c, y=y, x=x, h=h, w=w, top=top, left=left)
            for dtype in DTYPES
            for c, y, x, h, w, top, left in ((3, 13, 20, 9, 13, 3, 3), (4, 8, 6, 4, 3, 0, 0), (3, 21, 9, 12, 6, 1, 2))
        ),
        races=(case("bfloat16", b=128, c=3, y=224, x=224, h=115, w=115, top=3, left=3),),
        phases=("fwd",),
        constants=(0,),
    ),
)
