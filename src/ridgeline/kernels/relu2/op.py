"""Squared ReLU: max(x, 0)², forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, access_of, launchable
from ridgeline.kernels.relu2 import config, kernel, reference
from ridgeline.kernels.rows import cdiv, float_reason

_FORWARD = Kernel(kernel.relu2_forward, vectors=("num",))
_BACKWARD = Kernel(kernel.relu2_backward, vectors=("num",))
_forward_plans, _backward_plans = Plans(), Plans()


def relu2(x: Tensor) -> Tensor:
    """``relu(x) ** 2``."""
    return RELU2(x)


def _forward(x: Tensor) -> Tensor:
    if not launchable(x):
        return RELU2.on_host(x)
    x = x.contiguous()
    y = torch.empty_like(x)
    num = x.numel()
    key = (x.dtype, num, x.get_device(), x.data_ptr() & 15)
    run = _forward_plans.get(key)
    if run is None:
        RELU2.check(x)
        run = _forward_plans[key] = _plan("relu2.forward", _FORWARD, (x, y), num)
    run(x, y, num)
    return y


def _backward(dy: Tensor, x: Tensor) -> Tensor:
    if not launchable(x):
        return RELU2_BACKWARD.on_host(dy, x)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    num = x.numel()
    key = (x.dtype, dy.dtype, num, x.get_device(), (x.data_ptr() | dy.data_ptr()) & 15)
    run = _backward_plans.get(key)
    if run is None:
        run = _backward_plans[key] = _plan("relu2.backward", _BACKWARD, (dy, x, dx), num)
    run(dy, x, dx, num)
    return dx


def _plan(name: str, kind: Kernel, tensors: tuple[Tensor, ...], num: int) -> Any:
    chosen = tuning.choose(name, {"num": num, "dtype": tensors[0].dtype}, config.default(num))
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    vector, unaligned = access_of(tensors[-1].element_size(), pointers, num)
    return kind.bind(
        (*tensors, num),
        grid=(cdiv(num, chosen.block),),
        constants={"BLOCK": chosen.block, "UNALIGNED": unaligned},
        num_warps=chosen.num_warps,
        device=tensors[0].get_device(),
        vector=vector,
    )


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _grads(ctx: Any, dy: Tensor) -> Tensor:
    return RELU2_BACKWARD(dy, ctx.saved_tensors[0])


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator)
    return (x.to(getattr(torch, of.dtype)),)


RELU2_BACKWARD = declare(
    name="relu2_backward",
    repeats=True,
    keyed=True,
    summary="gradient of relu2",
    schema="(Tensor dy, Tensor x) -> Tensor",
    forward=_backward,
    fake=lambda dy, x: _like(x),
    reference=reference.backward,
    support=lambda dy, x: float_reason(x=x, dy=dy),
    cost=elementwise_cost(3.0),
)
RELU2 = declare(
    name="relu2",
    repeats=True,
    keyed=True,
    summary="max(x, 0)²",
    schema="(Tensor x) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_like,
    reference=reference.forward,
    support=lambda x: float_reason(x=x),
    cost=elementwise_cost(2.0),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=relu2,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"sign kept": reference.signed},
        checks=tuple(
            case(dtype, rows=rows, cols=cols)
            for dtype in DTYPES
            for rows, cols in ((1, 3), (3, 7), (64, 1000), (33, 5632), (257, 1))
        ),
        races=(case("bfloat16", rows=8192, cols=14336), case("float32", rows=4096, cols=11008)),
        small=(case("bfloat16", rows=16, cols=14336),),
    ),
)
