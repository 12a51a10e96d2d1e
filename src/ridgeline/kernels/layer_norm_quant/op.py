"""LayerNorm with fp8 or int8 output and a scale a row or a block, with the residual add fused in; for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms
from ridgeline.kernels.layer_norm_quant import config, kernel, reference
from ridgeline.kernels.rows import as_rows, cdiv, float_reason, template
from ridgeline.kernels.split_rows import registers_of

_QUANTIZED = Kernel(kernel.layer_norm_quantized, vectors=("cols", "x_stride"))
_plans = Plans()


def layer_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: int = 0,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """LayerNorm of ``x`` quantized to ``dtype``: returns (q, scale), or (q, scale, x + residual) with a residual.

    ``q * scale`` restores the norm. A scale belongs to a row, or to ``block`` columns of one (a multiple of 32 that
    divides the row). ``dtype`` is float8_e4m3fn, float8_e5m2 or int8. No gradients.
    """
    kind = str(dtype).removeprefix("torch.")
    if kind not in reference.LARGEST:
        raise KernelError(f"layer_norm_quant: dtype is one of {', '.join(reference.LARGEST)}, not {kind}")
    found = LAYER_NORM_QUANT(x, residual, weight, bias, eps, kind, block)
    return found if residual is not None else found[:2]


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return LAYER_NORM_QUANT.on_host(x, residual, weight, bias, eps, kind, group)
    shape = x.shape
    x, stride = as_rows(x)
    r = x if residual is None else residual.contiguous()
    w, b = x if weight is None else weight, x if bias is None else bias
    pointers = x.data_ptr() | r.data_ptr() | w.data_ptr() | b.data_ptr()
    key = (shape, r.shape, w.shape, b.shape, x.dtype, r.dtype, w.dtype, b.dtype, stride, residual is None,
           weight is None, bias is None, kind, group, x.get_device(), pointers & 15)  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        LAYER_NORM_QUANT.check(x.view(shape) if x.is_contiguous() else x, residual, weight, bias, eps, kind, group)
        plan = _plans[key] = _plan(x, residual, weight, bias, stride, kind, group, shape)
    run, like_q, like_scale, numbers = plan
    q = torch.empty_like(like_q, memory_format=torch.contiguous_format)
    scale = torch.empty_like(like_scale, memory_format=torch.contiguous_format)
    h = x.new_empty(0) if residual is None else torch.empty_like(r)
    run(x, r, w, b, q, scale, x if residual is None else h, *numbers, eps, reference.LARGEST[kind])
    return q, scale, h


def _plan(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, stride: int, kind: str, group: int,
    shape: torch.Size,
) -> tuple[Any, Tensor, Tensor, tuple[int, ...]]:  # fmt: skip
    cols = shape[-1]
    rows = shape.numel() // cols
    scales = cols // group if group else 1
    chosen = tuning.choose("layer_norm_quant", {"rows": rows, "cols": cols, "dtype": x.dtype, "group": group},
                           config.default(rows, cols, x.element_size(), group, centered=True))  # fmt: skip
    if not chosen.chunks:
        raise KernelError(f"layer_norm_quant: rows of {cols} columns do not fit in registers; normalize, then quantize")
    q = template(shape, getattr(torch, kind), x.device)
    scale = template((*shape[:-1], scales), torch.float32, x.device)
    numbers = (rows, cols, stride, scales)
    r = x if residual is None else residual
    w, b = x if weight is None else weight, x if bias is None else bias
    pointers = x.data_ptr() | r.data_ptr() | w.data_ptr() | b.data_ptr()
    tiles = cdiv(rows, chosen.rows)
    walking = chosen.programs_per_sm * num_sms(x.get_device())
    vector, unaligned = config.access(chosen, pointers, x.element_size(), rows, cols, stride)
    # a piece without a column of the row is none: only the last one of a row is masked
    chunks = cdiv(cols + vector - 1 if unaligned else cols, chosen.block)
    if unaligned:  # all rows of a program start alike
        tiles, walking = tiles // vector * vector, max(1, walking // vector) * vector
    run = _QUANTIZED.bind(
        (x, r, w, b, q, scale, r, *numbers, 0.0, 0.0),
        grid=(min(tiles, walking) if walking else tiles,),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
                   "INTEGER": kind == "int8", "GROUP": group, "PARTS": chosen.block // group if group else 1,
                   "ROWS": chosen.rows, "CHUNKS": chunks, "BLOCK": chosen.block, "EVEN": cols == chunks * chosen.block,
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
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = x.new_empty(x.shape, dtype=getattr(torch, kind))
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // group if group else 1), dtype=torch.float32)
    h = x.new_empty(0) if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return q, scale, h


def _support(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, *rest: Any
) -> str | None:
    group = rest[-1] if rest else 0
    if x.dim() < 1 or not x.shape[-1]:
        return "x needs a last dim of at least one element"
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or not vector.is_contiguous()):
            return f"{name} {tuple(vector.shape)} is not one contiguous row of x {tuple(x.shape)}"
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        return "residual and x differ in shape or type"
    if group and (group % 32 or group & (group - 1) or x.shape[-1] % group):
        return f"a scale block of {group} columns is no power of two from 32 on that divides {x.shape[-1]}"
    return float_reason(x=x, weight=weight, bias=bias)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    x = torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(of["cols"], device=on, dtype=torch.float32, generator=generator)).to(dtype)
    bias = (0.5 * torch.randn(of["cols"], device=on, dtype=torch.float32, generator=generator)).to(dtype)
    return x, weight, bias, of["kind"], of["block"]


def _timed(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> tuple[Tensor, ...]:
    return layer_norm_quant(x, weight, bias, 1e-5, dtype=getattr(torch, kind), block=group)


def _restored(x: Tensor, weight: Tensor, bias: Tensor, kind: str, group: int) -> Tensor:
    return reference.restored(*_timed(x.detach(), weight.detach(), bias.detach(), kind, group))


LAYER_NORM_QUANT = declare(
    name="layer_norm_quant",
    repeats=True,
    keyed=True,
    summary="layer_norm with fp8 or int8 output and a scale a row or a block",
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, str kind, int group)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(10.0),
    num_results=3,
    trial=Trial(
        make=_make,
        call=_restored,
        eager=reference.eager,
        reference=reference.meant,
        mistakes={"another row's scale": reference.wrong_row, "bias lost": reference.bias_lost},
        checks=tuple(
            case(dtype, rows=rows, cols=cols, kind=kind, block=block)
            for dtype in DTYPES
            for rows, cols, block in reference.CHECKED
            for kind in reference.LARGEST
        ),
        races=(
            case("bfloat16", rows=16384, cols=4096, kind="float8_e4m3fn", block=0),
            case("bfloat16", rows=16384, cols=4096, kind="float8_e4m3fn", block=128),
            case("bfloat16", rows=65536, cols=768, kind="int8", block=0),
        ),
        small=(case("bfloat16", rows=16, cols=4096, kind="float8_e4m3fn", block=0),),
        timed=_timed,
        raced=reference.raced,
        forward_bytes=lambda args: args[0].nbytes + args[0].numel() + 2 * args[1].nbytes,
        phases=("fwd",),
        constants=(0, 1, 2),  # rounding has no gradient
        layouts=False,
    ),
)
