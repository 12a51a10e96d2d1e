"""``amax``, ``amin``, ``argmax`` and ``argmin`` of float32 tensors along a dim that is not the last."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.amax import config, kernel, reference
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv

_ROWS = Kernel(kernel.extreme_rows, loose=("x_ptr", "out_ptr"))
_PLACES = Kernel(kernel.extreme_places, loose=("x_ptr", "out_ptr"))
_plans = Plans()
_active_modes = torch._C._len_torch_dispatch_stack


def amax(x: Tensor, dim: int, largest: bool = True, place: bool = False) -> Tensor:
    """The largest or smallest elements along a dim, or where each first is, without gradients."""
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return _forward(x, dim, largest, place)
    return AMAX(x, dim, largest, place)


def _forward(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    if not launchable(x):
        return AMAX.on_host(x, dim, largest, place)  # type: ignore[return-value]
    x = x.contiguous()
    key = (x.shape, x.dtype, dim, largest, place, x.get_device())
    plan = _plans.get(key)
    if plan is None:
        AMAX.check(x, dim, largest, place)
        plan = _plans[key] = _plan(x, dim % x.dim(), largest, place)
    launch, shape, numbers = plan
    out = torch.empty(shape, dtype=torch.int64 if place else x.dtype, device=x.device)
    if out.numel():
        launch(x, out, *numbers)
    return out


def _plan(x: Tensor, dim: int, largest: bool, place: bool) -> Any:
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    outer, rows, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    chosen = tuning.choose("extremum", {"rows": rows, "inner": inner}, config.Tile())
    numbers = (rows, inner, cdiv(inner, chosen.cols))
    launch = (_PLACES if place else _ROWS).bind(
        (x, x.new_empty(1, dtype=torch.int64) if place else x, *numbers),
        grid=(outer * numbers[2],),
        constants={"LARGEST": largest, "AHEAD": chosen.ahead, "BR": chosen.rows, "BI": chosen.cols},
        num_warps=chosen.num_warps,
        device=x.get_device(),
    )
    return launch, shape, numbers


def _support(x: Tensor, dim: int, largest: bool, place: bool) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() < 2:
        return "elements are of 32 or 16 bits, in two dims at least"
    dim %= x.dim()
    outer, rows, inner = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    if dim == x.dim() - 1 or inner < config.LEAST_INNER:
        return "elements next to each other along the dim: PyTorch's own kernels are right for those"
    if not rows or rows * inner >= 2**31 or outer * cdiv(inner, config.LEAST_INNER) >= 2**31:
        return "there is nothing to choose from, or there are too many elements"
    return None


def _fake(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    dim %= x.dim()
    return x.new_empty((*x.shape[:dim], *x.shape[dim + 1 :]), dtype=torch.int64 if place else x.dtype)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(*of["shape"], device=on, generator=generator).to(getattr(torch, of.dtype))
    return x, of["dim"], of.get("largest", True), of.get("place", False)


def _called(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    """A check compares numbers: of places the elements that are there."""
    found = amax(x, dim, largest, place)
    return reference.at_places(x, dim, largest, found) if place and not x.is_meta else found


SMALL = (
    case("float32", shape=(2, 37, 40), dim=1),
    case("float32", shape=(35, 3, 50), dim=0, largest=False),
    case("float32", shape=(2, 19, 130), dim=-2, place=True),
    case("float32", shape=(50, 33), dim=0, largest=False, place=True),
    case("bfloat16", shape=(2, 37, 40), dim=1, place=True),
    case("float16", shape=(35, 3, 50), dim=0, largest=False),
)
CHECKS = (
    *SMALL,
    *(case("float32", shape=(5, 1001, 4095), dim=1, largest=largest, place=place)
      for largest in (True, False) for place in (True, False)),
    *(case(dtype, shape=(5, 1001, 4095), dim=1, largest=place, place=place)
      for dtype in ("bfloat16", "float16") for place in (True, False)),
)  # fmt: skip
RACES = (
    case("float32", shape=(128, 4096, 4095), dim=1),
    case("float32", shape=(128, 4096, 4095), dim=1, largest=False, place=True),
)

AMAX = declare(
    name="amax",
    summary="largest or smallest elements along a dim that is not the last, or their places",
    schema="(Tensor x, int dim, bool largest, bool place) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(1.0),
    trial=Trial(
        make=_make,
        call=_called,
        eager=reference.eager,
        reference=reference.eager,
        mistakes={"first half": reference.first_half, "opposite": reference.opposite},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0,),
        layouts=False,
    ),
)
