"""``depthwise``: a convolution that keeps channels apart, channels last, with norm, bias and activation in its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.convolution.op import out_sizes
from ridgeline.kernels.depthwise_conv import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.linear_epilogue.op import ACTIVATIONS, NARROW, VECTOR
from ridgeline.kernels.rows import cdiv

Ints = Sequence[int]
_LOOSE = ("bias_ptr", "mean_ptr", "var_ptr", "gamma_ptr", "beta_ptr")
_FORWARD = Kernel(kernel.depthwise_forward, vectors=("channels",), loose=_LOOSE)
_plans = Plans()
_active_modes = torch._C._len_torch_dispatch_stack
MOST_TAPS, MOST_STRIDE, MOST_ALONG = 11, 2, 64
"""Beyond so many taps in a column it no longer fits into registers; along a row they are taken one after the other."""


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mean: Tensor | None = None, var: Tensor | None = None,
    gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, activation: str = "none",
    stride: Ints = (1, 1), padding: Ints = (0, 0),
) -> Tensor:  # fmt: skip
    """``act(norm(conv2d(x, weight, groups=channels) + bias))`` of 16-bit images, channels last, without gradients."""
    args = (x, weight, bias, mean, var, gamma, beta, eps, activation, list(stride), list(padding))
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return tiled(*args)
    return DEPTHWISE(*args)


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints,
) -> Tensor:  # fmt: skip
    args = (x, w, bias, mean, var, gamma, beta, eps, activation, stride, padding)
    return tiled(*args) if launchable(x) else DEPTHWISE.on_host(*args)  # type: ignore[return-value]


def tiled(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints, tile: config.Tile | None = None,
) -> Tensor:  # fmt: skip
    """The convolution by one kernel, with this tile or the usual one; the weight is turned before it."""
    args = (x, w, bias, mean, var, gamma, beta, eps, activation, stride, padding)
    run, numbers = planned(*args, tile)
    out_h, out_w = numbers[4:6]
    out = x.new_empty((x.shape[0], out_h, out_w, x.shape[1]))
    taps = w.flatten(1).t().contiguous()
    run(x, taps, out, *(out if each is None else each for each in (bias, mean, var, gamma, beta)), *numbers)
    return out.permute(0, 3, 1, 2)


def planned(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: Ints, padding: Ints, tile: config.Tile | None = None,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """The launch of a convolution, compiled, and the numbers it is launched with."""
    columns = (bias, mean, var, gamma, beta)
    kinds = tuple(None if each is None else (each.dtype, each.shape, each.stride()) for each in columns)
    image = (x.shape, x.stride(), x.dtype, w.shape, w.dtype)
    key = (*image, kinds, eps, activation, *stride, *padding, tile, x.get_device(), x.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        DEPTHWISE.check(x, w, *columns, eps, activation, stride, padding)
        plan = _plans[key] = _plan(x, w, columns, eps, activation, stride, padding, tile)
    return plan  # type: ignore[no-any-return]


def _plan(
    x: Tensor, w: Tensor, columns: tuple[Tensor | None, ...], eps: float, activation: str, stride: Ints, padding: Ints,
    tile: config.Tile | None,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    images, channels, h, wide = x.shape
    out_h, out_w = out_sizes(x.shape[2:], w.shape[2:], stride, padding, (1, 1), (), False)
    usual = config.default(out_h, channels, w.shape[2])
    sizes = {"rows": out_h, "channels": channels, "taps": w.shape[2]}
    chosen = tile or tuning.choose("depthwise", sizes, usual)
    slots = images * cdiv(out_h, chosen.strip) * out_w
    numbers = (slots, channels, h, wide, out_h, out_w, eps)
    bias, mean, _, gamma, beta = columns
    run = _FORWARD.bind(
        (x, x, x, *(x if each is None else each for each in columns), *numbers),
        grid=(cdiv(slots, chosen.slots), cdiv(channels, chosen.channels)),
        constants={
            "KH": w.shape[2], "KW": w.shape[3], "STRIDE_H": stride[0], "STRIDE_W": stride[1], "TOP": padding[0],
            "LEFT": padding[1], "STRIP": chosen.strip, "SLOTS": chosen.slots, "BC": chosen.channels,
            "BIAS": bias is not None, "NORM": mean is not None, "GAMMA": gamma is not None, "BETA": beta is not None,
            "ACT": ACTIVATIONS[activation],
        },
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=VECTOR,
    )  # fmt: skip
    return run, numbers


def _support(
    x: Tensor, w: Tensor, bias: Tensor | None = None, mean: Tensor | None = None, var: Tensor | None = None,
    gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, activation: str = "none",
    stride: Ints = (1, 1), padding: Ints = (0, 0),
) -> str | None:  # fmt: skip
    if x.dtype not in NARROW or w.dtype != x.dtype:
        return "image and weight are not of one 16-bit type"
    if activation not in ACTIVATIONS:
        return f"no activation {activation!r}: one of {', '.join(ACTIVATIONS)}"
    if x.dim() != 4 or w.dim() != 4 or w.shape[:2] != (x.shape[1], 1):
        return f"{tuple(x.shape)} by {tuple(w.shape)}: an image and one filter a channel"
    if w.shape[2] > MOST_TAPS or w.shape[3] > MOST_ALONG or max(stride) > MOST_STRIDE or min(stride) < 1:
        return f"more than {MOST_TAPS} taps down, {MOST_ALONG} along, or steps of more than {MOST_STRIDE}"
    return _layout_reason(x, w, stride, padding) or columns_reason(x.shape[1], bias, mean, var, gamma, beta)


def _layout_reason(x: Tensor, w: Tensor, stride: Ints, padding: Ints) -> str | None:
    out = out_sizes(x.shape[2:], w.shape[2:], stride, padding, (1, 1), (), False)
    if min(out) <= 0 or x.numel() == 0:
        return "the result has no pixels"
    if max(x.numel(), x.shape[0] * x.shape[1] * (out[0] + MOST_TAPS) * (out[1] + MOST_ALONG)) >= 2**31:
        return "2³¹ elements or more"
    return image_reason(x)


def image_reason(x: Tensor) -> str | None:
    """Why a kernel that reads channels in accesses of 16 bytes cannot take an image."""
    if x.shape[1] % VECTOR or not x.is_contiguous(memory_format=torch.channels_last):
        return f"channels do not lie last, or are no multiple of {VECTOR}"
    return "the image does not begin at 16 bytes" if not x.is_meta and x.data_ptr() % 16 else None


def columns_reason(channels: int, *columns: Tensor | None) -> str | None:
    """Why a kernel cannot apply a bias and a norm (bias, mean, var, …) in its last step."""
    if (columns[1] is None) != (columns[2] is None):
        return "mean and var come together"
    for each in columns:
        if each is not None and (each.shape != (channels,) or each.stride(0) != 1 or not each.is_floating_point()):
            return "bias and norm are one dense number a channel"
    return None


def _fake(
    x: Tensor, w: Tensor, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, activation: str,
    stride: Ints, padding: Ints,
) -> Tensor:  # fmt: skip
    out = out_sizes(x.shape[2:], w.shape[2:], stride, padding, (1, 1), (), False)
    return x.new_empty((x.shape[0], *out, x.shape[1])).permute(0, 3, 1, 2)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    (images, channels, h, w), side, parts = of["shape"], of["side"], of.get("parts", "")
    dtype = getattr(torch, of.dtype)

    def draw(*shape: int, scale: float = 1.0, positive: bool = False) -> Tensor:
        drawn = torch.randn(*shape, device=on, dtype=torch.float32, generator=generator) * scale
        return (drawn.abs() + 0.5 if positive else drawn).to(dtype)

    def some(letter: str, positive: bool = False) -> Tensor | None:
        return draw(channels, positive=positive) if letter in parts else None

    x = draw(images, h, w, channels).permute(0, 3, 1, 2)
    norm = (some("n"), some("n", positive=True), some("g"), some("e"))
    stride, padding, along = of.get("stride", 1), of.get("padding", side // 2), of.get("along", side)
    weight = draw(channels, 1, side, along, scale=(side * along) ** -0.5)
    return (x, weight, some("b"), *norm, 1e-5, of.get("activation", "none"), [1 if h == 1 else stride, stride],
            [padding, along // 2 if along != side else padding])  # fmt: skip


def _call(
    x: Tensor, w: Tensor, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, activation: str,
    stride: Ints, padding: Ints,
) -> Tensor:  # fmt: skip
    return depthwise(x, w, bias, mean=mean, var=var, gamma=gamma, beta=beta, eps=eps, activation=activation,
                     stride=stride, padding=padding)  # fmt: skip


SMALL = (
    case("float16", shape=(2, 24, 9, 7), side=3, parts="bnge", activation="silu"),
    case("float16", shape=(1, 16, 6, 5), side=7, parts="b"),
    case("float16", shape=(2, 8, 11, 10), side=5, stride=2, padding=2, parts="n", activation="relu"),
    case("float16", shape=(2, 24, 1, 37), side=1, along=31, parts="b"),
)
CHECKS = (
    *SMALL,
    case("bfloat16", shape=(4, 128, 56, 56), side=7, parts="b"),
    case("bfloat16", shape=(3, 144, 57, 31), side=3, parts="nge", activation="silu", stride=2),
    case("bfloat16", shape=(2, 240, 28, 28), side=5, parts="nge", activation="hardswish", stride=2, padding=1),
    case("bfloat16", shape=(2, 320, 32, 32), side=3, parts="b", activation="gelu"),
    case("float16", shape=(5, 72, 7, 7), side=11, parts="", padding=5),
    case("bfloat16", shape=(3, 512, 1, 500), side=1, along=31, parts="bnge", activation="silu"),
    case("bfloat16", shape=(2, 264, 1, 333), side=1, along=4, stride=2, parts=""),
)
RACES = (
    case("bfloat16", shape=(64, 128, 56, 56), side=7, parts="b"),
    case("bfloat16", shape=(64, 512, 14, 14), side=7, parts="b"),
    case("bfloat16", shape=(64, 144, 56, 56), side=3, parts="nge", activation="silu"),
    case("bfloat16", shape=(64, 240, 28, 28), side=5, parts="nge", activation="silu"),
    case("bfloat16", shape=(64, 96, 112, 112), side=3, parts="nge", activation="silu", stride=2),
    case("bfloat16", shape=(16, 512, 1, 500), side=1, along=31, parts="b"),
)

DEPTHWISE = declare(
    name="depthwise",
    summary="act(norm(conv(x) + bias)) of 16-bit images whose channels lie last and stay apart",
    schema="(Tensor x, Tensor w, Tensor? bias, Tensor? mean, Tensor? var, Tensor? gamma, Tensor? beta, float eps, "
           "str activation, int[] stride, int[] padding) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(98.0),
    trial=Trial(
        make=_make,
        call=_call,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"taps turned": reference.turned, "norm forgotten": reference.unscaled},
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=tuple(range(7)),
        layouts=False,
    ),
)  # fmt: skip
