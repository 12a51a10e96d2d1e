"""Dropout of x and the residual add, in one pass, with a mask that is computed and never stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.dropout_add import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, access_of, launchable
from ridgeline.kernels.rows import cdiv, float_reason

_FORWARD = Kernel(kernel.dropout_add_forward, vectors=("num",))
_BACKWARD = Kernel(kernel.dropout_backward, vectors=("num",))
_forward_plans, _backward_plans = Plans(), Plans()


def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True, *, seed: Tensor | None = None
) -> Tensor:
    """``dropout(x, p, training) + residual``.

    The mask is a function of ``seed``, an int64 tensor of one element on the device; without one it is drawn from
    PyTorch's generator, so ``torch.manual_seed`` and CUDA graphs work as they do for ``F.dropout``. ``p`` is taken to
    the nearest of 65,536 steps, and what stays is scaled by that step, so that the mean is as it was.
    """
    if not 0.0 <= p < 1.0:
        raise KernelError(f"dropout_add: p is a probability below one, not {p}")
    if not training or p == 0.0:
        return x + residual
    if seed is None:
        seed = torch.randint(2**62, (), device=x.device)
    return DROPOUT_ADD(x, residual, seed, p)


def _forward(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    if not launchable(x):
        return DROPOUT_ADD.on_host(x, residual, seed, p)
    x, residual = x.contiguous(), residual.contiguous()
    num, pointers = x.numel(), x.data_ptr() | residual.data_ptr()
    y = torch.empty_like(x)
    key = (x.shape, residual.shape, x.dtype, residual.dtype, x.get_device(), pointers & 15)
    run = _forward_plans.get(key)
    if run is None:
        DROPOUT_ADD.check(x, residual, seed, p)
        run = _forward_plans[key] = _plan("dropout_add.forward", _FORWARD, (x, residual, seed, y), num, pointers)
    run(x, residual, seed, y, num, reference.threshold(p), reference.scale(p))
    return y


def _backward(dy: Tensor, seed: Tensor, p: float) -> Tensor:
    if not launchable(dy):
        return DROPOUT_BACKWARD.on_host(dy, seed, p)
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    key = (dy.shape, dy.dtype, dy.get_device(), dy.data_ptr() & 15)
    run = _backward_plans.get(key)
    if run is None:
        run = _backward_plans[key] = _plan("dropout_add.backward", _BACKWARD, (dy, seed, dx), dy.numel(), dy.data_ptr())
    run(dy, seed, dx, dy.numel(), reference.threshold(p), reference.scale(p))
    return dx


def _plan(name: str, kind: Kernel, tensors: tuple[Tensor, ...], num: int, pointers: int) -> Any:
    vector, unaligned = access_of(tensors[0].element_size(), pointers | tensors[-1].data_ptr(), num)
    default = config.default(num, tensors[0].element_size(), unaligned)
    chosen = tuning.choose(name, {"num": num, "dtype": tensors[0].dtype}, default)
    return kind.bind(
        (*tensors, num, reference.STEPS, 0.0),
        grid=(cdiv(num, chosen.counters * reference.TOGETHER),),
        constants={"COUNTERS": chosen.counters, "PARTS": chosen.parts, "UNALIGNED": unaligned},
        num_warps=chosen.num_warps,
        device=tensors[0].get_device(),
        vector=vector,
    )


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _support(x: Tensor, residual: Tensor, seed: Tensor, p: float = 0.5) -> str | None:
    if x.shape != residual.shape or x.dtype != residual.dtype:
        return "x and residual differ in shape or type"
    if seed.dtype != torch.int64 or seed.numel() != 1:
        return f"seed is {seed.dtype} with {seed.numel()} elements, not one int64"
    return float_reason(x=x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _grads(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return DROPOUT_BACKWARD(dy, ctx.saved_tensors[0], ctx.p), dy, None, None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    shape = (of["rows"], of["cols"])
    drawn = [torch.randn(shape, device=on, dtype=torch.float32, generator=generator) for _ in range(2)]
    x, residual = (value.to(getattr(torch, of.dtype)) for value in drawn)
    return x, residual, torch.tensor(1234567890123, device=on), of["p"]


DROPOUT_BACKWARD = declare(
    name="dropout_backward",
    summary="gradient of dropout, its mask computed again",
    schema="(Tensor dy, Tensor seed, float p) -> Tensor",
    forward=_backward,
    fake=_like,
    reference=reference.backward,
    support=lambda dy, seed, p: float_reason(dy=dy),
    cost=elementwise_cost(40.0),
    repeats=True,
)
DROPOUT_ADD = declare(
    name="dropout_add",
    summary="dropout(x) + residual, without a stored mask",
    schema="(Tensor x, Tensor residual, Tensor seed, float p) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_like,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(40.0),
    setup=_setup,
    backward=_grads,
    repeats=True,
    trial=Trial(
        make=_make,
        call=lambda x, residual, seed, p: dropout_add(x, residual, p, seed=seed),
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"not scaled": reference.not_scaled, "residual dropped too": reference.residual_dropped},
        checks=tuple(
            case(dtype, rows=rows, cols=cols, p=p)
            for dtype in DTYPES
            for rows, cols, p in ((1, 3, 0.5), (64, 1000, 0.1), (33, 4096, 0.9))
        ),
        races=(case("bfloat16", rows=8192, cols=8192, p=0.1),),
        raced=lambda x, residual, seed, p: reference.pytorch(x, residual, p),
    ),
)
