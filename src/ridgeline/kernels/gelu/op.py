"""GELU, forward and backward: ``F.gelu`` of 16-bit numbers without waiting for erf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.gelu import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, access_of, launchable
from ridgeline.kernels.rows import cdiv

_FORWARD = Kernel(kernel.gelu_forward, vectors=("num",))
_BACKWARD = Kernel(kernel.gelu_backward, vectors=("num",))
_forward_plans, _backward_plans = Plans(), Plans()
KINDS = {"none": 0, "tanh": 1}
NARROW = (torch.bfloat16, torch.float16)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu(x, approximate)`` of 16-bit numbers: exact, or by ``"tanh"``."""
    if approximate not in KINDS:
        raise KernelError(f"gelu: approximate is 'none' or 'tanh', not {approximate!r}")
    return GELU(x, approximate)


def _dense(x: Tensor) -> Tensor:
    """The tensor where it lies one element after the other, channels last too; else a copy that does."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if last or x.is_contiguous() else x.contiguous()


def _forward(x: Tensor, approximate: str) -> Tensor:
    if not launchable(x):
        return GELU.on_host(x, approximate)
    x = _dense(x)
    y = torch.empty_like(x)
    num = x.numel()
    key = (x.dtype, num, approximate, x.get_device(), x.data_ptr() & 15)
    run = _forward_plans.get(key)
    if run is None:
        GELU.check(x, approximate)
        run = _forward_plans[key] = _plan("gelu.forward", _FORWARD, (x, y), num, KINDS[approximate])
    run(x, y, num)
    return y


def _backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    if not launchable(x):
        return GELU_BACKWARD.on_host(dy, x, approximate)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    num = x.numel()
    key = (x.dtype, dy.dtype, num, approximate, x.get_device(), (x.data_ptr() | dy.data_ptr()) & 15)
    run = _backward_plans.get(key)
    if run is None:
        run = _backward_plans[key] = _plan("gelu.backward", _BACKWARD, (dy, x, dx), num, KINDS[approximate])
    run(dy, x, dx, num)
    return dx


def _plan(name: str, kind: Kernel, tensors: tuple[Tensor, ...], num: int, form: int) -> Any:
    chosen = tuning.choose(name, {"num": num, "dtype": tensors[0].dtype}, config.default(num))
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    vector, unaligned = access_of(tensors[-1].element_size(), pointers, num)
    return kind.bind(
        (*tensors, num),
        grid=(cdiv(num, chosen.block),),
        constants={"KIND": form, "BLOCK": chosen.block, "UNALIGNED": unaligned},
        num_warps=chosen.num_warps,
        device=tensors[0].get_device(),
        vector=vector,
    )


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(_dense(x))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def _grads(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return GELU_BACKWARD(dy, ctx.saved_tensors[0], ctx.approximate), None


def _support(x: Tensor, approximate: str = "none") -> str | None:
    return _narrow_reason(x)


def _narrow_reason(*tensors: Tensor) -> str | None:
    wide = next((t for t in tensors if t.dtype not in NARROW), None)
    return None if wide is None else f"a tensor is {wide.dtype}: this form of erf is exact for 16 bits, and no further"


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = 2.0 * torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator)
    return (x.to(getattr(torch, of.dtype)),)


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols)
    for rows, cols in ((1, 3), (3, 7), (64, 1000), (33, 5632), (257, 1))
    for dtype in ("bfloat16", "float16")
)
RACES = (
    case("bfloat16", rows=12608, cols=4096), case("bfloat16", rows=16384, cols=4096),
    case("bfloat16", rows=12000, cols=5120), case("float16", rows=16384, cols=4096),
)  # fmt: skip

GELU_BACKWARD = declare(
    name="gelu_backward",
    repeats=True,
    keyed=True,
    summary="gradient of gelu",
    schema="(Tensor dy, Tensor x, str approximate) -> Tensor",
    forward=_backward,
    fake=lambda dy, x, approximate: torch.empty_like(x, memory_format=torch.contiguous_format),
    reference=reference.backward,
    support=lambda dy, x, approximate: _narrow_reason(x, dy),
    cost=elementwise_cost(16.0),
)
GELU = declare(
    name="gelu",
    repeats=True,
    keyed=True,
    summary="x · Φ(x), exact or by tanh",
    schema="(Tensor x, str approximate) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, approximate: _like(x),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(16.0),
    setup=_setup,
    backward=_grads,
    trials={
        "gelu": Trial(
            make=_make, call=gelu, eager=reference.exact, reference=reference.exact,
            mistakes={"sigmoid form": reference.quick, "no tail": reference.rectified}, checks=CHECKS, races=RACES,
        ),
        "gelu_tanh": Trial(
            make=_make, call=lambda x: gelu(x, "tanh"), eager=reference.by_tanh, reference=reference.by_tanh,
            mistakes={"sigmoid form": reference.quick}, checks=CHECKS, races=RACES[:1],
        ),
    },
)  # fmt: skip
