"""``max_pool1d`` to ``avg_pool3d`` for images, as inference needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.convolution.op import out_sizes
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.pooling import kernel, reference
from ridgeline.kernels.rows import cdiv

_WINDOWS = Kernel(kernel.pool_windows, loose=("x_ptr", "out_ptr"))
_LINES = Kernel(kernel.pool_lines, loose=("out_ptr",))
_plans = Plans()
_active_modes = torch._C._len_torch_dispatch_stack
BLOCK, NUM_WARPS = 1024, 4
"""Pixels of a program: eight a thread, as the depthwise convolution has them."""
Ints = Sequence[int]


def pool(
    x: Tensor, window: Ints, stride: Ints, padding: Ints = (0,), dilation: Ints = (1,), mean: bool = False
) -> Tensor:
    """The largest or mean element of each window, without gradients; padding counts as zeros in a mean."""
    num = x.dim() - 2
    sizes = [list(each) * (num if len(each) == 1 else 1) for each in (window, stride, padding, dilation)]
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return _forward(x, sizes[0], sizes[1], sizes[2], sizes[3], mean)
    return POOL(x, *sizes, mean)


def _forward(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    if not launchable(x):
        return POOL.on_host(x, window, stride, padding, dilation, mean)  # type: ignore[return-value]
    x = x.contiguous()
    aligned = vector_of(4, 0 if x.is_meta else x.data_ptr(), x.shape[-1], padding[-1]) == 4
    sizes = (tuple(window), tuple(stride), tuple(padding), tuple(dilation))
    key = (x.shape, x.dtype, *sizes, mean, aligned, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        POOL.check(x, window, stride, padding, dilation, mean)
        lines = aligned and _are_lines(window, stride, padding, dilation)
        plan = _lines(x, window, padding, mean) if lines else _plan(x, window, stride, padding, dilation, mean)
        _plans[key] = plan
    launch, shape = plan
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel():
        launch(x, out)
    return out


def _are_lines(window: Ints, stride: Ints, padding: Ints, dilation: Ints) -> bool:
    """Windows along the last dim alone, of few elements, that go on by one."""
    ahead = all(each == 1 for each in (*window[:-1], *stride, dilation[-1])) and not any(padding[:-1])
    # elements of a window that is read together with its neighbors: code grows with it
    return ahead and 2 <= window[-1] <= 32


def _lines(x: Tensor, window: Ints, padding: Ints, mean: bool) -> Any:
    wide, out = x.shape[-1], x.shape[-1] + 2 * padding[-1] - window[-1] + 1
    constants = {"W": wide, "OW": out, "KW": window[-1], "PW": padding[-1], "MEAN": mean, "BLOCK": BLOCK}
    launch = _LINES.bind(
        (x, x), grid=(x.shape[:-1].numel() * cdiv(out, BLOCK),), constants=constants, num_warps=NUM_WARPS,
        device=x.get_device(), vector=4,
    )  # fmt: skip
    return launch, (*x.shape[:-1], out)


def _plan(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Any:
    out = out_sizes(x.shape[2:], window, stride, padding, dilation, (), False)
    constants: dict[str, Any] = {"MEAN": mean, "PADDED": any(padding), "BLOCK": BLOCK}
    for names, values, fill in (
        ("D H W", x.shape[2:], 1), ("OD OH OW", out, 1), ("KD KH KW", window, 1), ("SD SH SW", stride, 1),
        ("PD PH PW", padding, 0), ("DD DH DW", dilation, 1),
    ):  # fmt: skip
        constants |= dict(zip(names.split(), [fill] * (3 - len(values)) + [int(v) for v in values], strict=True))
    rows = x.shape[0] * x.shape[1]
    launch = _WINDOWS.bind(
        (x, x), grid=(cdiv(math.prod(out), BLOCK) * rows,), constants=constants, num_warps=NUM_WARPS,
        device=x.get_device(),
    )  # fmt: skip
    return launch, (*x.shape[:2], *out)


def _support(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() not in (3, 4, 5):
        return "images are of 32 or 16 bits, with one to three dims besides their number and channels"
    if mean and any(each != 1 for each in dilation):
        return "means are of dense windows"
    if any(2 * p > w for p, w in zip(padding, window, strict=True)):
        return "padding is at most half a window"
    sizes = out_sizes(x.shape[2:], window, stride, padding, dilation, (), False)
    if min(sizes) <= 0 or max(math.prod(sizes), math.prod(x.shape[2:])) >= 2**31:
        return "the result has no pixels, or a channel has too many"
    return None


def _fake(x: Tensor, window: Ints, stride: Ints, padding: Ints, dilation: Ints, mean: bool) -> Tensor:
    return x.new_empty((*x.shape[:2], *out_sizes(x.shape[2:], window, stride, padding, dilation, (), False)))


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    num = len(of["shape"]) - 2
    x = torch.randn(*of["shape"], device=on, generator=generator).to(getattr(torch, of.dtype))
    window = list(of["window"])
    sizes = [list(of.get(name, default)) for name, default in
             (("stride", window), ("padding", [0] * num), ("dilation", [1] * num))]  # fmt: skip
    return x, window, *sizes, of.get("mean", False)


SMALL = (
    case("float32", shape=(2, 3, 20), window=(4,), stride=(1,), padding=(2,), dilation=(3,)),
    case("float32", shape=(1, 2, 9, 8), window=(3, 2), stride=(2, 1), padding=(1, 1)),
    case("float32", shape=(1, 2, 9, 8), window=(3, 2), mean=True),
    case("float32", shape=(2, 3, 72), window=(8,), stride=(1,), padding=(4,), mean=True),
    case("float32", shape=(1, 2, 3, 40), window=(1, 5), stride=(1, 1)),
    case("float32", shape=(1, 2, 5, 6, 7), window=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), mean=True),
    case("float32", shape=(1, 2, 7, 8, 7), window=(3, 2, 3), stride=(2, 2, 2), padding=(1, 1, 1), dilation=(2, 3, 2)),
    case("bfloat16", shape=(2, 3, 72), window=(8,), stride=(1,), padding=(4,), mean=True),
    case("float16", shape=(1, 2, 9, 8), window=(3, 2), stride=(2, 1), padding=(1, 1)),
)
CHECKS = (
    *SMALL,
    *(
        case("float32", shape=(3, 5, 4100), window=(k,), stride=(1,), padding=(p,), mean=mean)
        for k, p in ((8, 4), (2, 0), (31, 12))
        for mean in (True, False)
    ),
    case("float32", shape=(3, 5, 301, 255), window=(11, 11), mean=True),
    case("float32", shape=(3, 5, 301, 255), window=(4, 4), stride=(1, 1), padding=(1, 1)),
    case("bfloat16", shape=(3, 5, 301, 255), window=(11, 11), mean=True),
    case("float16", shape=(3, 5, 4100), window=(8,), stride=(1,), padding=(4,), mean=True),
    case("bfloat16", shape=(2, 5, 20, 31, 33), window=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1)),
)
RACES = (
    case("float32", shape=(16, 32, 128, 128, 128), window=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1)),
    case("float32", shape=(16, 64, 1024, 1024), window=(11, 11), mean=True),
    case("float32", shape=(64, 128, 65536), window=(8,), stride=(1,), padding=(4,), mean=True),
)

POOL = declare(
    name="pool",
    summary="largest or mean elements of windows",
    schema="(Tensor x, int[] window, int[] stride, int[] padding, int[] dilation, bool mean) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(1.0),
    trial=Trial(
        make=_make,
        call=pool,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"shifted": reference.shifted, "last lost": reference.last_lost},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0,),
        layouts=False,
    ),
)
