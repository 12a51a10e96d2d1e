"""``group_norm_last``: GroupNorm and SiLU of images whose channels lie last, and stay there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.group_norm_channels_last import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import FLOATS, cdiv, power_of_two

_STATS = Kernel(kernel.channel_stats, vectors=("channels",))
_ENDS = Kernel(kernel.group_ends, loose=("weight_ptr", "bias_ptr"))
_ENDED = Kernel(kernel.channels_ended, vectors=("channels",))
_plans = Plans()
VECTOR, MOST_OF_GROUP = 8, 1024
"""Elements of a 16-byte access, and channels of a group that one program joins."""


def group_norm_last(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    silu: bool = False,
) -> Tensor:  # fmt: skip
    """``F.group_norm`` of an image, with ``F.silu`` behind it where asked, channels last and without gradients."""
    return GROUP_NORM_LAST(x, num_groups, weight, bias, eps, silu)


def _forward(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool) -> Tensor:
    if not launchable(x):
        return GROUP_NORM_LAST.on_host(x, num_groups, weight, bias, eps, silu)
    x = x.clone() if x.data_ptr() & 15 else x
    images, channels, h, w = x.shape
    kinds = tuple(None if each is None else (each.dtype, each.shape, each.stride()) for each in (weight, bias))
    key = (x.shape, x.stride(), num_groups, x.dtype, kinds, silu, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        GROUP_NORM_LAST.check(x, num_groups, weight, bias, eps, silu)
        plan = _plans[key] = _plan(x, num_groups, weight, bias, silu)
    stats, ends, ended, stretch, num = plan
    part = x.new_empty((2, images, num, channels), dtype=torch.float32)
    factors = x.new_empty((2, images, channels), dtype=torch.float32)
    y = torch.empty_like(x)
    given = (factors if weight is None else weight, factors if bias is None else bias)
    stats(x, part, h * w, channels, stretch, num, images)
    ends(part, *given, factors, h * w, channels, num_groups, stretch, num, images, eps)
    ended(x, factors, y, h * w, channels, images)
    return y


def _plan(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool) -> tuple[Any, ...]:
    images, channels, h, w = x.shape
    pixels, device = h * w, x.get_device()
    chosen = tuning.choose(
        "group_norm_last", {"images": images, "pixels": pixels, "channels": channels},
        config.default(images, pixels, channels),
    )  # fmt: skip
    stretch = cdiv(pixels, chosen.stretches)
    num = cdiv(pixels, stretch)
    wide = cdiv(channels, chosen.cols)
    tile = {"ROWS": chosen.rows, "COLS": chosen.cols}
    numbers = x.new_empty((2,), dtype=torch.float32)
    stats = _STATS.bind(
        (x, numbers, pixels, channels, stretch, num, images), grid=(images * num, wide),
        constants=tile | {"ROWS": max(1, chosen.rows // 2)},  # two sums an element: half as many elements
        num_warps=chosen.num_warps, device=device, vector=VECTOR,
    )  # fmt: skip
    given = (numbers if weight is None else weight, numbers if bias is None else bias)
    ends = _ENDS.bind(
        (numbers, *given, numbers, pixels, channels, num_groups, stretch, num, images, 1e-5),
        grid=(images * num_groups,), device=device, num_warps=4,
        constants={"SHARES": power_of_two(num), "COLS": power_of_two(channels // num_groups),
                   "WEIGHT": weight is not None, "BIAS": bias is not None},
    )  # fmt: skip
    ended = _ENDED.bind(
        (x, numbers, x, pixels, channels, images), grid=(images * cdiv(pixels, chosen.rows), wide),
        constants=tile | {"SILU": silu}, num_warps=chosen.num_warps, device=device, vector=VECTOR,
    )  # fmt: skip
    return stats, ends, ended, stretch, num


def _support(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    silu: bool = False,
) -> str | None:  # fmt: skip
    if x.dtype not in FLOATS or x.dim() != 4 or x.numel() == 0:
        return "the image is no tensor of four dims of a floating type, or empty"
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups or channels // num_groups > MOST_OF_GROUP:
        return f"{channels} channels in {num_groups} groups: evenly, and at most {MOST_OF_GROUP} in each"
    if channels % VECTOR or not x.is_contiguous(memory_format=torch.channels_last):
        return f"channels do not lie last, or are no multiple of {VECTOR}"
    if type(x) is Tensor and not x.is_meta and x.data_ptr() % 16:  # stand-ins lie nowhere
        return "the image does not begin at 16 bytes"
    for each in (weight, bias):
        if each is not None and (each.shape != (channels,) or each.stride(0) != 1 or not each.is_floating_point()):
            return "weight and bias are one dense number a channel"
    return None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    images, channels, h, w = of["shape"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    x = (draw(images, h, w, channels) * 2 + 3 + draw(channels)).to(dtype).permute(0, 3, 1, 2)
    ends = tuple((draw(channels) + 1).to(dtype) if of.get("affine", True) else None for _ in range(2))
    return x, of["groups"], *ends, 1e-5, of.get("silu", True)


SMALL = (
    case("float16", shape=(2, 24, 7, 5), groups=4),
    case("float32", shape=(1, 16, 9, 4), groups=2, silu=False),
    case("float16", shape=(3, 8, 4, 4), groups=8, affine=False),
)
CHECKS = (
    *SMALL,
    case("bfloat16", shape=(4, 320, 64, 64), groups=32),
    case("bfloat16", shape=(2, 1920, 16, 16), groups=32),
    case("bfloat16", shape=(2, 128, 256, 256), groups=32),
    case("float32", shape=(2, 640, 33, 31), groups=32, silu=False),
    case("bfloat16", shape=(3, 1024, 8, 8), groups=1),
)
RACES = (
    case("bfloat16", shape=(4, 320, 64, 64), groups=32),
    case("bfloat16", shape=(4, 1280, 16, 16), groups=32),
    case("bfloat16", shape=(2, 256, 512, 512), groups=32),
)

GROUP_NORM_LAST = declare(
    name="group_norm_last",
    summary="GroupNorm and SiLU of images whose channels lie last",
    schema="(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, bool silu) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.channels_last),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(10.0),
    trial=Trial(
        make=_make,
        call=lambda x, groups, weight, bias, eps, silu: group_norm_last(x, groups, weight, bias, eps, silu=silu),
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"every channel by itself": reference.of_channels, "activation": reference.plain},
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=(0, 2, 3),
        layouts=False,
    ),
)
