"""``drop_padding``: copy the rows of a padded matrix into a contiguous one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.drop_padding import kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv, float_reason

_FORWARD = Kernel(kernel.tighten_forward, loose=("x_ptr",))
_plans = Plans()
BLOCK_BYTES, WARPS = 8192, 4
"""A program's share of the result: 50,257 columns of 16 bits are 13 programs a row."""


def drop_padding(x: Tensor) -> Tensor:
    """``x.contiguous()`` of a matrix whose rows have gaps between them, at the speed of a copy for odd rows too."""
    return x.contiguous() if x.dim() == 2 and x.stride(1) != 1 else DROP_PADDING(x)


def _forward(x: Tensor) -> Tensor:
    if not launchable(x):
        return DROP_PADDING.on_host(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    key = (x.shape, x.stride(), x.dtype, x.get_device())
    run = _plans.get(key)
    if run is None:
        DROP_PADDING.check(x)
        run = _plans[key] = _bound(x, out)
    run(x, out, *_numbers(x))
    return out


def _bound(x: Tensor, out: Tensor) -> Any:
    return _FORWARD.bind(
        (x, out, *_numbers(x)),
        grid=(x.shape[0] * _numbers(x)[2],),
        constants={"PIECE": 16 // x.element_size(), "BLOCK": BLOCK_BYTES // x.element_size()},
        num_warps=WARPS,
        device=x.get_device(),
        vector=16 // x.element_size(),
    )


def _numbers(x: Tensor) -> tuple[int, int, int]:
    """Columns, elements from row to row, and programs a row; a row may begin inside of a piece of the result."""
    itemsize = x.element_size()
    return x.shape[1], x.stride(0), cdiv(x.shape[1] + 16 // itemsize - 1, BLOCK_BYTES // itemsize)


def _support(x: Tensor) -> str | None:
    if x.dim() != 2 or x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        return f"x is {tuple(x.shape)} with strides {x.stride()}: rows of a wider matrix"
    if x.shape[0] * _numbers(x)[2] >= 2**31:
        return "more programs than a grid has"
    return float_reason(x=x)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    room = torch.randn(of["rows"], of["step"], device=on, dtype=torch.float32, generator=generator)
    return (room.to(getattr(torch, of.dtype))[:, : of["cols"]],)


DROP_PADDING = declare(
    name="drop_padding",
    summary="rows of a wider matrix without their gaps",
    schema="(Tensor x) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(0.0),
    trial=Trial(
        make=_make,
        call=drop_padding,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"shifted": reference.shifted},
        checks=tuple(
            case(dtype, rows=rows, cols=cols, step=step)
            for dtype in DTYPES
            for rows, cols, step in ((5, 4097, 4160), (3, 9001, 9024), (7, 13, 64), (2, 4096, 4160), (4, 8191, 8191))
        ),
        races=(case("bfloat16", rows=4096, cols=50257, step=50304),),
        phases=("fwd",),
        constants=(0,),
    ),
)
