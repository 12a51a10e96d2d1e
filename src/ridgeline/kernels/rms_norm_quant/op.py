"""RMSNorm with fp8 or int8 output and a scale a row or a block, with the residual add fused in; for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms
from ridgeline.kernels.rms_norm.op import EPS
from ridgeline.kernels.rms_norm_quant import config, kernel, reference
from ridgeline.kernels.rows import as_rows, cdiv, float_reason, template
from ridgeline.kernels.split_rows import registers_of

_QUANTIZED = Kernel(kernel.rms_norm_quantized, vectors=("cols", "x_stride"))
_plans = Plans()


def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: int = 0,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> tuple[Tensor, ...]:
    """RMSNorm of ``x`` quantized to ``dtype``: returns (q, scale), or (q, scale, x + residual) with a residual.

    ``q * scale`` restores the norm. A scale belongs to a row, or to ``block`` columns of one (a multiple of 32 that
    divides the row). ``dtype`` is float8_e4m3fn, float8_e5m2 or int8. No gradients.
    """
    kind = str(dtype).removeprefix("torch.")
    if kind not in reference.LARGEST:
        raise KernelError(f"rms_norm_quant: dtype is one of {', '.join(reference.LARGEST)}, not {kind}")
    found = RMS_NORM_QUANT(x, residual, weight, EPS if eps is None else eps, offset, kind, block)
    return found if residual is not None else found[:2]


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return RMS_NORM_QUANT.on_host(x, residual, weight, eps, offset, kind, group)
    shape = x.shape
    x, stride = as_rows(x)
    r = x if residual is None else residual.contiguous()
    key = (shape, r.shape, weight.shape, x.dtype, r.dtype, weight.dtype, stride, residual is None, kind, group,
           x.get_device(), (x.data_ptr() | r.data_ptr() | weight.data_ptr()) & 15)  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        RMS_NORM_QUANT.check(x.view(shape) if x.is_contiguous() else x, residual, weight, eps, offset, kind, group)
        plan = _plans[key] = _plan(x, residual, weight, stride, kind, group, shape)
    run, like_q, like_scale, numbers = plan
    q = torch.empty_like(like_q, memory_format=torch.contiguous_format)
    scale = torch.empty_like(like_scale, memory_format=torch.contiguous_format)
    h = x.new_empty(0) if residual is None else torch.empty_like(r)
    run(x, r, weight, q, scale, x if residual is None else h, *numbers, eps, offset, reference.LARGEST[kind])
    return q, scale, h


def _plan(
    x: Tensor, residual: Tensor | None, weight: Tensor, stride: int, kind: str, group: int, shape: torch.Size
) -> tuple[Any, Tensor, Tensor, tuple[int, ...]]:
    cols = shape[-1]
    rows = shape.numel() // cols
    scales = cols // group if group else 1
    chosen = tuning.choose("rms_norm_quant", {"rows": rows, "cols": cols, "dtype": x.dtype, "group": group},
                           config.default(rows, cols, x.element_size(), group))  # fmt: skip
    if not chosen.chunks:
        raise KernelError(f"rms_norm_quant: rows of {cols} columns do not fit in registers; normalize, then quantize")
    q = template(shape, getattr(torch, kind), x.device)
    scale = template((*shape[:-1], scales), torch.float32, x.device)
    numbers = (rows, cols, stride, scales)
    r = x if residual is None else residual
    tiles = cdiv(rows, chosen.rows)
    walking = chosen.programs_per_sm * num_sms(x.get_device())
    pointers = x.data_ptr() | r.data_ptr() | weight.data_ptr()
    vector, unaligned = config.access(chosen, pointers, x.element_size(), rows, cols, stride)
    chunks = cdiv(cols + vector - 1, chosen.block) if unaligned else chosen.chunks
    if unaligned:  # all rows of a program start alike
        tiles, walking = tiles // vector * vector, max(1, walking // vector) * vector
    run = _QUANTIZED.bind(
        (x, r, weight, q, scale, r, *numbers, 0.0, 0.0, 0.0),
        grid=(min(tiles, walking) if walking else tiles,),
        constants={"HAS_RESIDUAL": residual is not None, "INTEGER": kind == "int8", "GROUP": group,
                   "PARTS": chosen.block // group if group else 1, "ROWS": chosen.rows,
                   "CHUNKS": chunks, "BLOCK": chosen.block, "EVEN": cols == chunks * chosen.block,
                   "STAGES": chosen.num_stages, "KEEP": walking > 0, "UNALIGNED": unaligned,
                   "VECTOR": vector if unaligned else 1},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm) if walking else 0,
        device=x.get_device(),
        vector=vector,
    )  # fmt: skip
    return run, q, scale, numbers


def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = x.new_empty(x.shape, dtype=getattr(torch, kind))
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // group if group else 1), dtype=torch.float32)
    h = x.new_empty(0) if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return q, scale, h


def _support(x: Tensor, residual: Tensor | None, weight: Tensor, *rest: Any) -> str | None:
    group = rest[-1] if rest else 0
    if x.dim() < 1 or weight.shape != x.shape[-1:] or not x.shape[-1] or not weight.is_contiguous():
        return f"weight {tuple(weight.shape)} is not one contiguous row of x {tuple(x.shape)}"
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return "residual and x differ in shape or type"
    if group and (group % 32 or group & (group - 1) or x.shape[-1] % group):
        return f"a scale block of {group} columns is no power of two from 32 on that divides {x.shape[-1]}"
    return float_reason(x=x, weight=weight)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    x = torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(of["cols"], device=on, dtype=torch.float32, generator=generator)).to(dtype)
    return x, weight, of["kind"], of["block"]


def _restored(x: Tensor, weight: Tensor, kind: str, group: int) -> Tensor:
    q, scale = rms_norm_quant(x.detach(), weight.detach(), 1e-6, dtype=getattr(torch, kind), block=group)
    return reference.restored(q, scale)


def _timed(x: Tensor, weight: Tensor, kind: str, group: int) -> tuple[Tensor, ...]:
    return rms_norm_quant(x, weight, 1e-6, dtype=getattr(torch, kind), block=group)


RMS_NORM_QUANT = declare(
    name="rms_norm_quant",
    repeats=True,
    keyed=True,
    summary="rms_norm with fp8 or int8 output and a scale a row or a block",
    schema="(Tensor x, Tensor? residual, Tensor weight, float eps, float offset, str kind, int group)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(9.0),
    num_results=3,
    trial=Trial(
        make=_make,
        call=_restored,
        eager=reference.eager,
        reference=reference.meant,
        mistakes={"another row's scale": reference.wrong_row},
        checks=tuple(
            case(dtype, rows=rows, cols=cols, kind=kind, block=block)
            for dtype in DTYPES
            for rows, cols, block in reference.CHECKED
            for kind in reference.LARGEST
        ),
        races=(
            case("bfloat16", rows=16384, cols=4096, kind="float8_e4m3fn", block=0),
            case("bfloat16", rows=16384, cols=4096, kind="float8_e4m3fn", block=128),
            case("bfloat16", rows=8192, cols=8192, kind="int8", block=0),
        ),
        small=(case("bfloat16", rows=16, cols=4096, kind="float8_e4m3fn", block=0),),
        timed=_timed,
        raced=reference.raced,
        forward_bytes=lambda args: args[0].nbytes + args[0].numel() + args[1].nbytes,
        phases=("fwd",),
        constants=(0, 1),  # rounding has no gradient
        layouts=False,
    ),
)
