"""``grouped_convolution``: a convolution in groups, channels last, with norm, bias and activation in its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.convolution.op import out_sizes
from ridgeline.kernels.depthwise_conv.op import columns_reason, image_reason
from ridgeline.kernels.grouped_conv import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.linear_epilogue.op import ACTIVATIONS, NARROW, VECTOR
from ridgeline.kernels.rows import cdiv, power_of_two

Ints = Sequence[int]
_LOOSE = ("bias_ptr", "mean_ptr", "var_ptr", "gamma_ptr", "beta_ptr")
_FORWARD = Kernel(kernel.grouped_forward, vectors=("size_in", "size_out"), loose=_LOOSE)
_plans = Plans()
_active_modes = torch._C._len_torch_dispatch_stack
MOST_TAPS = 7


def grouped_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mean: Tensor | None = None, var: Tensor | None = None,
    gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, activation: str = "none",
    stride: int = 1, padding: Ints = (0, 0), groups: int = 1,
) -> Tensor:  # fmt: skip
    """``act(norm(conv2d(x, weight, groups=groups) + bias))`` of 16-bit images, channels last, without gradients."""
    args = (x, weight, bias, mean, var, gamma, beta, eps, activation, stride, list(padding), groups)
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return tiled(*args)
    return GROUPED_CONVOLUTION(*args)


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: int, padding: Ints, groups: int,
) -> Tensor:  # fmt: skip
    args = (x, w, bias, mean, var, gamma, beta, eps, activation, stride, padding, groups)
    return tiled(*args) if launchable(x) else GROUPED_CONVOLUTION.on_host(*args)  # type: ignore[return-value]


def tiled(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: int, padding: Ints, groups: int,
    tile: config.Tile | None = None,
) -> Tensor:  # fmt: skip
    """The convolution by one kernel, with this tile or the usual one; weights are laid by bundles before it."""
    columns = (bias, mean, var, gamma, beta)
    run, numbers, bundle = planned(x, w, *columns, eps, activation, stride, padding, groups, tile)
    out = x.new_empty((x.shape[0], numbers[6], numbers[7], w.shape[0]))
    run(x, by_bundle(w, groups, bundle), out, *(out if each is None else each for each in columns), *numbers)
    return out.permute(0, 3, 1, 2)


def planned(
    x: Tensor, w: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, eps: float, activation: str, stride: int, padding: Ints, groups: int,
    tile: config.Tile | None = None,
) -> tuple[Any, tuple[Any, ...], int]:  # fmt: skip
    """The launch of a convolution, compiled, the numbers it is launched with and the groups of a bundle."""
    columns = (bias, mean, var, gamma, beta)
    kinds = tuple(None if each is None else (each.dtype, each.shape, each.stride()) for each in columns)
    image = (x.shape, x.stride(), x.dtype, w.shape, w.dtype, x.get_device(), x.data_ptr() & 15)
    key = (*image, kinds, eps, activation, stride, *padding, groups, tile)
    plan = _plans.get(key)
    if plan is None:
        GROUPED_CONVOLUTION.check(x, w, *columns, eps, activation, stride, padding, groups)
        plan = _plans[key] = _plan(x, w, columns, eps, activation, stride, padding, groups, tile)
    return plan  # type: ignore[no-any-return]


def by_bundle(w: Tensor, groups: int, bundle: int) -> Tensor:
    """[bundles, taps, inputs, outputs], zeros between groups of a bundle."""
    size_in, taps = w.shape[1], w.shape[2:].numel()
    apart = w.reshape(groups // bundle, bundle, -1, size_in, taps).permute(0, 4, 3, 2, 1)
    if bundle == 1:
        return apart.squeeze(4).contiguous()
    laid = w.new_zeros(groups // bundle, taps, bundle, size_in, bundle, apart.shape[3])
    laid.diagonal(dim1=2, dim2=4).copy_(apart)
    return laid.flatten(4, 5).flatten(2, 3)


def _plan(
    x: Tensor, w: Tensor, columns: tuple[Tensor | None, ...], eps: float, activation: str, stride: int, padding: Ints,
    groups: int, tile: config.Tile | None,
) -> tuple[Any, tuple[Any, ...], int]:  # fmt: skip
    images, _, h, wide = x.shape
    out_h, out_w = out_sizes(x.shape[2:], w.shape[2:], (stride, stride), padding, (1, 1), (), False)
    bundle = config.bundled(groups, w.shape[1], w.shape[0] // groups)
    bundles, size_in, size_out = groups // bundle, bundle * w.shape[1], bundle * (w.shape[0] // groups)
    sizes = {"inputs": size_in, "outputs": size_out}
    chosen = tile or tuning.choose("grouped_convolution", sizes, config.default(size_out))
    pixels = images * out_h * out_w
    numbers = (pixels, bundles, size_in, size_out, h, wide, out_h, out_w, eps)
    bias, mean, _, gamma, beta = columns
    run = _FORWARD.bind(
        (x, x, x, *(x if each is None else each for each in columns), *numbers),
        grid=(cdiv(pixels, chosen.pixels), bundles),
        constants={
            "KH": w.shape[2], "KW": w.shape[3], "STRIDE": stride, "TOP": padding[0], "LEFT": padding[1],
            "BM": chosen.pixels, "BK": max(16, power_of_two(size_in)), "BN": max(16, power_of_two(size_out)),
            "BIAS": bias is not None, "NORM": mean is not None, "GAMMA": gamma is not None, "BETA": beta is not None,
            "ACT": ACTIVATIONS[activation],
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=VECTOR,
    )  # fmt: skip
    return run, numbers, bundle


def _support(
    x: Tensor, w: Tensor, bias: Tensor | None = None, mean: Tensor | None = None, var: Tensor | None = None,
    gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, activation: str = "none",
    stride: int = 1, padding: Ints = (0, 0), groups: int = 1,
) -> str | None:  # fmt: skip
    if x.dtype not in NARROW or w.dtype != x.dtype:
        return "image and weight are not of one 16-bit type"
    if activation not in ACTIVATIONS:
        return f"no activation {activation!r}: one of {', '.join(ACTIVATIONS)}"
    if x.dim() != 4 or w.dim() != 4 or groups < 1 or x.shape[1] != groups * w.shape[1] or w.shape[0] % groups:
        return f"{tuple(x.shape)} by {tuple(w.shape)} in {groups} groups"
    if max(w.shape[2:]) > MOST_TAPS or stride not in (1, 2):
        return f"more than {MOST_TAPS} taps a side, or steps of more than two"
    if not config.bundled(groups, w.shape[1], w.shape[0] // groups):
        return "no number of groups makes a bundle of 16 to 128 channels in whole pieces of 16 bytes"
    return _layout_reason(x, w, stride, padding) or columns_reason(w.shape[0], bias, mean, var, gamma, beta)


def _layout_reason(x: Tensor, w: Tensor, stride: int, padding: Ints) -> str | None:
    out = out_sizes(x.shape[2:], w.shape[2:], (stride, stride), padding, (1, 1), (), False)
    if min(out) <= 0 or x.numel() == 0:
        return "the result has no pixels"
    if max(x.numel(), x.shape[0] * (out[0] * out[1]) * w.shape[0]) >= 2**31 - 2**24:
        return "2³¹ elements or more"
    return image_reason(x)


def _fake(
    x: Tensor, w: Tensor, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, activation: str,
    stride: int, padding: Ints, groups: int,
) -> Tensor:  # fmt: skip
    out = out_sizes(x.shape[2:], w.shape[2:], (stride, stride), padding, (1, 1), (), False)
    return x.new_empty((x.shape[0], *out, w.shape[0])).permute(0, 3, 1, 2)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Every tensor moved once."""
    flops = 2.0 * outputs[0].numel * inputs[1].shape[1] * inputs[1].shape[2] * inputs[1].shape[3]
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    (images, channels, h, w), side, parts, groups = of["shape"], of["side"], of.get("parts", ""), of["groups"]
    outputs, dtype = of.get("outputs", channels), getattr(torch, of.dtype)

    def draw(*shape: int, scale: float = 1.0, positive: bool = False) -> Tensor:
        drawn = torch.randn(*shape, device=on, dtype=torch.float32, generator=generator) * scale
        return (drawn.abs() + 0.5 if positive else drawn).to(dtype)

    def some(letter: str, positive: bool = False) -> Tensor | None:
        return draw(outputs, positive=positive) if letter in parts else None

    x = draw(images, h, w, channels).permute(0, 3, 1, 2)
    size = channels // groups
    norm = (some("n"), some("n", positive=True), some("g"), some("e"))
    weight = draw(outputs, size, side, side, scale=(size * side * side) ** -0.5)
    padding = of.get("padding", side // 2)
    return (x, weight, some("b"), *norm, 1e-5, of.get("activation", "none"), of.get("stride", 1), [padding, padding],
            groups)  # fmt: skip


def _call(
    x: Tensor, w: Tensor, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float, activation: str,
    stride: int, padding: Ints, groups: int,
) -> Tensor:  # fmt: skip
    return grouped_convolution(x, w, bias, mean=mean, var=var, gamma=gamma, beta=beta, eps=eps, activation=activation,
                               stride=stride, padding=padding, groups=groups)  # fmt: skip


SMALL = (
    case("float16", shape=(2, 32, 5, 6), side=3, groups=8, parts="bnge", activation="relu"),
    case("float16", shape=(1, 48, 7, 5), side=3, groups=2, stride=2, parts="n", activation="silu"),
    case("float16", shape=(1, 16, 4, 4), outputs=32, side=1, groups=2, padding=0),
    case("float16", shape=(2, 16, 7, 5), outputs=24, side=2, groups=1, padding=0, parts="b"),
)
CHECKS = (
    *SMALL,
    case("bfloat16", shape=(4, 128, 56, 56), side=3, groups=32, parts="nge", activation="relu"),
    case("bfloat16", shape=(3, 216, 29, 28), side=3, groups=9, stride=2, parts="nge", activation="relu"),
    case("bfloat16", shape=(2, 1024, 14, 14), side=3, groups=32, parts="b"),
    case("float16", shape=(2, 448, 14, 14), side=5, groups=4, parts="nge", activation="gelu"),
)
RACES = (
    case("bfloat16", shape=(64, 128, 56, 56), side=3, groups=32, parts="nge", activation="relu"),
    case("bfloat16", shape=(64, 216, 28, 28), side=3, groups=9, parts="nge", activation="relu"),
    case("bfloat16", shape=(64, 512, 14, 14), side=3, groups=32, parts="nge", activation="relu"),
)

GROUPED_CONVOLUTION = declare(
    name="grouped_convolution",
    summary="act(norm(conv(x) + bias)) in groups, of 16-bit images whose channels lie last",
    schema="(Tensor x, Tensor w, Tensor? bias, Tensor? mean, Tensor? var, Tensor? gamma, Tensor? beta, float eps, "
           "str activation, int stride, int[] padding, int groups) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
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
