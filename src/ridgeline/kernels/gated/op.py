"""SwiGLU and GeGLU: act(gate) · up, forward and backward, on tensors or on halves of one wide projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.gated import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, access_of, launchable, vector_of
from ridgeline.kernels.rows import as_rows, cdiv, float_reason

_FORWARD = Kernel(kernel.gated_forward, vectors=("cols", "gate_stride", "up_stride"))
_BACKWARD = Kernel(kernel.gated_backward, vectors=("cols", "gate_stride", "up_stride"))
_quick_plans, _forward_plans, _backward_plans = Plans(), Plans(), Plans()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``. The two may be halves of one wide tensor: they are read where they lie."""
    return GATED(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``; ``approximate`` is ``"tanh"`` or ``"none"``, as in ``F.gelu``."""
    if approximate not in ("tanh", "none"):
        raise KernelError(f"geglu: approximate is 'tanh' or 'none', not {approximate!r}")
    return GATED(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _rows(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """Both inputs as rows: (gate, up, columns, and how far apart rows are); one long row where both are contiguous."""
    if gate.is_contiguous() and up.is_contiguous():
        num = gate.numel()
        return gate, up, num, num, num
    gate, gate_stride = as_rows(gate)
    up, up_stride = as_rows(up)
    return gate, up, gate.shape[-1], gate_stride, up_stride


def _forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if gate.is_contiguous() and up.is_contiguous():
        key = (gate.shape, up.shape, gate.dtype, up.dtype, kind, gate.get_device(),
               (gate.data_ptr() | up.data_ptr()) & 15)  # fmt: skip
        plan = _quick_plans.get(key)
        if plan is not None:
            run, num, blocks = plan
            out = torch.empty_like(gate)
            run(gate, up, out, num, num, num, blocks)
            return out
    if not launchable(gate):
        return GATED.on_host(gate, up, kind)
    return _forward_planned(gate, up, kind)


def _forward_planned(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    GATED.check(gate, up, kind)
    shape = gate.shape
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up, cols, gate_stride, up_stride = _rows(gate, up)
    pointers = gate.data_ptr() | up.data_ptr()
    key = (gate.dtype, up.dtype, out.numel(), cols, gate_stride, up_stride, kind, gate.get_device(), pointers & 15)
    plan = _forward_plans.get(key)
    if plan is None:
        chosen = tuning.choose("gated.forward", {"cols": cols, "dtype": gate.dtype}, config.forward(cols, gate.nbytes))
        blocks = cdiv(cols, chosen.block)
        vector, unaligned = _access(gate, pointers | out.data_ptr(), cols, gate_stride, up_stride)
        run = _FORWARD.bind(
            (gate, up, out, cols, gate_stride, up_stride, blocks),
            grid=(blocks * (out.numel() // cols if cols else 0),),
            constants=_constants(kind, chosen, out.numel() == cols, unaligned),
            num_warps=chosen.num_warps,
            device=gate.get_device(),
            vector=vector,
        )
        plan = _forward_plans[key] = (run, blocks)
    run, blocks = plan
    run(gate, up, out, cols, gate_stride, up_stride, blocks)
    if cols == out.numel():
        _quick_plans[shape, shape, gate.dtype, up.dtype, kind, gate.get_device(), pointers & 15] = (run, cols, blocks)
    return out


def _access(like: Tensor, pointers: int, cols: int, *strides: int) -> tuple[int, bool]:
    """Elements of an access; and whether one long row ends inside one, which only its last block has to know."""
    if like.numel() == cols:
        return access_of(like.element_size(), pointers, cols)
    return vector_of(like.element_size(), pointers, cols, *strides), False


def _backward(dy: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if not launchable(gate):
        return GATED_BACKWARD.on_host(dy, gate, up, kind)
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dup = torch.empty_like(up, memory_format=torch.contiguous_format)
    dy = dy.contiguous()
    gate, up, cols, gate_stride, up_stride = _rows(gate, up)
    pointers = dy.data_ptr() | gate.data_ptr() | up.data_ptr()
    key = (
        dy.dtype, gate.dtype, up.dtype, dup.numel(), cols, gate_stride, up_stride, kind, gate.get_device(),
        pointers & 15,
    )  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        chosen = tuning.choose("gated.backward", {"cols": cols, "dtype": gate.dtype}, config.backward(cols))
        blocks = cdiv(cols, chosen.block)
        vector, unaligned = _access(gate, pointers, cols, gate_stride, up_stride)
        run = _BACKWARD.bind(
            (dy, gate, up, dgate, dup, cols, gate_stride, up_stride, blocks),
            grid=(blocks * (dup.numel() // cols if cols else 0),),
            constants=_constants(kind, chosen, dup.numel() == cols, unaligned),
            num_warps=chosen.num_warps,
            device=gate.get_device(),
            vector=vector,
        )
        plan = _backward_plans[key] = (run, blocks)
    run, blocks = plan
    run(dy, gate, up, dgate, dup, cols, gate_stride, up_stride, blocks)
    return dgate, dup


def _constants(kind: str, chosen: config.Pointwise, flat: bool, unaligned: bool) -> dict[str, Any]:
    return {
        "KIND": {"silu": 0, "gelu_tanh": 1, "gelu": 2}[kind],
        "BLOCK": chosen.block,
        "FLAT": flat,
        "UNALIGNED": unaligned,
        "READS": chosen.reads,
        "WRITES": chosen.writes,
    }


def _like(gate: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _support(gate: Tensor, up: Tensor, kind: str = "silu") -> str | None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return "gate and up differ in shape or type"
    if gate.dim() < 1:
        return "gate and up have no dim"
    return float_reason(gate=gate, up=up)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _grads(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    return *GATED_BACKWARD(dy, gate, up, ctx.kind), None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    shape = (of["rows"], of["cols"])
    drawn = [torch.randn(shape, device=on, dtype=torch.float32, generator=generator) for _ in range(2)]
    return tuple(value.to(getattr(torch, of.dtype)) for value in drawn)


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype in DTYPES
    for rows, cols in ((1, 3), (3, 7), (64, 1000), (33, 5632), (19, 14336), (257, 1), (3600, 14336))
)
RACES = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype, rows, cols in (
        ("bfloat16", 8192, 14336), ("bfloat16", 16384, 5632), ("bfloat16", 4096, 11008), ("bfloat16", 2048, 8192),
        ("float32", 4096, 11008),
    )
)  # fmt: skip
SMALL = tuple(case("bfloat16", rows=rows, cols=cols) for rows, cols in ((1, 14336), (16, 14336)))


def _trial(call: Any, meant: Any, mistakes: dict[str, Any], races: Any = RACES) -> Trial:
    return Trial(
        make=_make, call=call, eager=meant, reference=meant, mistakes=mistakes, checks=CHECKS, races=races, small=SMALL
    )


GATED_BACKWARD = declare(
    name="gated_backward",
    repeats=True,
    keyed=True,
    summary="gradients of swiglu and geglu",
    schema="(Tensor dy, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    forward=_backward,
    fake=lambda dy, gate, up, kind: (_like(gate), _like(up)),
    reference=reference.backward,
    support=lambda dy, gate, up, kind: _support(gate, up) or float_reason(dy=dy),
    cost=elementwise_cost(14.0),
    num_results=2,
)
GATED = declare(
    name="gated",
    repeats=True,
    keyed=True,
    summary="act(gate) · up: swiglu, geglu",
    schema="(Tensor gate, Tensor up, str kind) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_like,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    setup=_setup,
    backward=_grads,
    trials={
        "swiglu": _trial(swiglu, reference.swiglu, {"swapped": reference.swapped}),
        "geglu": _trial(geglu, reference.geglu, {"sigmoid form": reference.quick}, RACES[:2]),
        "geglu_erf": _trial(
            lambda gate, up: geglu(gate, up, "none"), reference.geglu_erf, {"tanh form": reference.geglu}, ()
        ),
    },
)
