"""LayerNorm: y = (x − mean) / sqrt(var + eps) · weight + bias, forward and backward, with the residual add fused in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, common_rows, declare, elementwise_cost
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, access_of, launchable, num_sms, vector_of
from ridgeline.kernels.layer_norm import config, kernel, reference
from ridgeline.kernels.rms_norm.config import share_pitch
from ridgeline.kernels.rms_norm.op import (
    ends_access,
    past_access,
    pieces_of,
    plan_copies,
    plan_reduce,
    plan_words,
    start_places,
    walkers,
    words_access,
)
from ridgeline.kernels.rows import as_rows, cdiv, float_reason, template
from ridgeline.kernels.split_rows import most_registers, registers_of

_FORWARD = Kernel(kernel.layer_norm_forward, vectors=("cols", "x_stride"))
_FORWARD_LONG = Kernel(kernel.layer_norm_forward_long, vectors=("cols", "x_stride"))
_FORWARD_APART = Kernel(kernel.layer_norm_forward_apart, vectors=("width",))
_BACKWARD = Kernel(kernel.layer_norm_backward, vectors=("cols", "x_stride"))
_BACKWARD_LONG = Kernel(kernel.layer_norm_backward_long, vectors=("cols", "x_stride"))
_BACKWARD_ENDS = Kernel(kernel.layer_norm_backward_ends)
_SHARES = Kernel(kernel.layer_norm_column_shares, vectors=("cols", "x_stride"))

_infer_plans, _forward_plans, _backward_plans = Plans(), Plans(), Plans()
_empty_like = torch.empty_like
WANT_WEIGHT, WANT_BIAS = 1, 2


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Center and scale the last dim of ``x``, as ``F.layer_norm`` does over one dim.

    ``out`` takes the result where no gradient is needed.
    """
    if out is not None:
        return _into(out, x, weight, bias, eps)
    return LAYER_NORM(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its LayerNorm, in one pass: returns (norm of h, h)."""
    return ADD_LAYER_NORM(x, residual, weight, bias, eps)


def _into(out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise KernelError("layer_norm: out must be contiguous, with the shape, type and device of x")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, out)):
        raise KernelError("layer_norm: out= does not record gradients; call it under torch.no_grad()")
    if not launchable(x):
        return out.copy_(_infer(x, weight, bias, eps))
    _run(x, None, weight, bias, eps, save=False, y=out)
    return out


# --- running -----------------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return LAYER_NORM.on_host(x, weight, bias, eps)
    y, _, mean, rstd = _run(x, None, weight, bias, eps, save=True)
    return y, mean, rstd


def _infer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The shortest way from Python to the device: one lookup, one allocation, one launch."""
    if weight is None or bias is None or not (x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()):
        return _infer_other(x, weight, bias, eps)
    key = (
        x.shape, weight.shape, bias.shape, x.dtype, weight.dtype, bias.dtype, x.get_device(),
        (x.data_ptr() | weight.data_ptr() | bias.data_ptr()) & 15,
    )  # fmt: skip
    plan = _infer_plans.get(key)
    if plan is None:
        if not launchable(x):
            return LAYER_NORM.on_host(x, weight, bias, eps)[0]
        y = _empty_like(x)
        plan = _infer_plans[key] = _plan_forward(x, x, weight, bias, y, y, y, y, x.shape[-1], save=False)
    run, rows, cols, _ = plan
    y = _empty_like(x)
    run(x, x, weight, bias, y, y, y, y, rows, cols, cols, eps)
    return y


def _infer_other(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not launchable(x):
        return LAYER_NORM.on_host(x, weight, bias, eps)[0]
    return _run(x, None, weight, bias, eps, save=False)[0]


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launchable(x):
        return ADD_LAYER_NORM.on_host(x, residual, weight, bias, eps)
    return _run(x, residual, weight, bias, eps, save=True)


def _add_infer(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if not launchable(x):
        return ADD_LAYER_NORM.on_host(x, residual, weight, bias, eps)[:2]
    return _run(x, residual, weight, bias, eps, save=False)[:2]


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    save: bool,
    y: Any = None,
) -> tuple[Tensor, Any, Any, Any]:
    if y is None:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = y if residual is None else torch.empty_like(y)
    stride = x.shape[-1]
    if not x.is_contiguous():
        x, stride = as_rows(x)
    if residual is None:
        residual = x
    elif not residual.is_contiguous():
        residual = residual.contiguous()
    w, b = x if weight is None else weight, x if bias is None else bias
    key = (
        y.shape, w.shape, b.shape, residual.shape, x.dtype, w.dtype, b.dtype, residual.dtype, stride, weight is None,
        bias is None, residual is x, save, x.get_device(),
        (x.data_ptr() | w.data_ptr() | b.data_ptr() | residual.data_ptr() | y.data_ptr()) & 15,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        plan = _forward_plans[key] = _plan_forward(x, residual, weight, bias, y, h, y, y, stride, save)
    run, rows, cols, stats = plan
    mean = torch.empty_like(stats, memory_format=torch.contiguous_format) if save else y
    rstd = torch.empty_like(stats, memory_format=torch.contiguous_format) if save else y
    run(x, residual, w, b, y, h, mean, rstd, rows, cols, stride, eps)
    return y, h, mean, rstd


def _plan_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, h: Tensor, mean: Tensor,
    rstd: Tensor, stride: int, save: bool,
) -> tuple[Any, int, int, Tensor]:  # fmt: skip
    has_residual = h is not y
    LAYER_NORM.check(y, weight, bias, 0.0)
    if has_residual and (residual.shape.numel() != y.numel() or residual.dtype != y.dtype):
        raise KernelError("add_layer_norm: residual must have the shape and type of x")
    cols = y.shape[-1]
    rows = y.numel() // cols
    size = y.element_size()
    w, b = x if weight is None else weight, x if bias is None else bias
    stats = template(y.shape[:-1], torch.float32, y.device)
    if save:
        mean = rstd = stats
    pointers = x.data_ptr() | residual.data_ptr() | y.data_ptr() | h.data_ptr() | w.data_ptr() | b.data_ptr()
    constants: dict[str, Any] = {
        "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": has_residual, "SAVE": save,
    }  # fmt: skip
    kind = _FORWARD_LONG
    vector = vector_of(size, pointers, cols, stride)
    ends = ends_access(size, pointers, cols, stride)
    apart = config.apart(rows, cols // ends * ends, size) if ends else None
    chosen = tuning.choose(
        "layer_norm.forward",
        {"rows": rows, "cols": cols, "dtype": y.dtype},
        apart or config.forward(rows, cols, size),
    )
    if ends and chosen.apart and w.dtype == b.dtype:
        return _plan_apart(chosen, x, residual, weight, bias, y, h, rows, cols, stride, ends, save), rows, cols, stats
    if chosen.chunks:
        kind = _FORWARD
        vector, unaligned, chunks = pieces_of(chosen, size, pointers, cols, stride)
        constants |= {"ROWS": chosen.rows, "CHUNKS": chunks, "BLOCK": chosen.block, "UNALIGNED": unaligned,
                      "VECTOR": vector, "READS": "" if has_residual else chosen.reads,
                      "WRITES": chosen.writes, "EARLY": chosen.early}  # fmt: skip
    else:
        constants |= {"BLOCK": chosen.block or config.LONG_BLOCK}
    run = kind.bind(
        (x, residual, w, b, y, h, mean, rstd, rows, cols, stride, 0.0),
        grid=(cdiv(rows, chosen.rows),),
        constants=constants,
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector,
        max_registers=most_registers(chosen),
    )
    return run, rows, cols, stats


def _plan_apart(
    chosen: config.Forward, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor,
    h: Tensor, rows: int, cols: int, stride: int, vector: int, save: bool,
) -> Any:  # fmt: skip
    """Unaligned rows, a program each, weight and bias from copies that start where rows can."""
    width, copies = plan_copies(weight, bias, cols, vector, x)
    w, b = x if weight is None else weight, x if bias is None else bias
    given = weight is not None or bias is not None
    stats = template(y.shape[:-1], torch.float32, y.device) if save else y
    run = _FORWARD_APART.bind(
        (x, residual, w, b, w, y, h, stats, stats, cols, stride, width, 0.0),
        grid=(rows,),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": h is not y,
                   "SAVE": save, "CHUNKS": cdiv(cols // vector * vector, chosen.block), "BLOCK": chosen.block,
                   "VECTOR": vector, "READS": "" if h is not y else chosen.reads,
                   "DEPENDENT": given and not INTERPRETING},
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector,
    )  # fmt: skip

    def plan(
        x: Tensor, residual: Tensor, w: Tensor, b: Tensor, y: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, rows: int,
        cols: int, stride: int, eps: float,
    ) -> None:  # fmt: skip
        run(x, residual, w, b, copies(w, b, x), y, h, mean, rstd, cols, stride, width, eps)

    return plan


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dh: Tensor | None, want: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return LAYER_NORM_BACKWARD.on_host(dy, x, weight, mean, rstd, dh, want)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    stride = cols = x.shape[-1]
    if not x.is_contiguous():
        x, stride = as_rows(x)
    dy = dy if dy.is_contiguous() else dy.contiguous()
    dh = dh if dh is None or dh.is_contiguous() else dh.contiguous()
    w, extra = x if weight is None else weight, dy if dh is None else dh
    key = (
        dx.shape, w.shape, dy.shape, x.dtype, w.dtype, dy.dtype, stride, weight is None, dh is None, want,
        x.get_device(),
        (x.data_ptr() | w.data_ptr() | dy.data_ptr() | extra.data_ptr()) & 15,
    )  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _plan_backward(dy, x, weight, mean, rstd, extra, dx, stride, dh is not None, want)
    row = w if weight is not None else w.new_empty(cols)
    dw, db = torch.empty_like(row), torch.empty_like(row)
    plan(dy, x, w, mean, rstd, extra, dx, dw, db)
    return dx, dw if want & WANT_WEIGHT else dw[:0], db if want & WANT_BIAS else db[:0]


def _plan_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, stride: int,
    has_dh: bool, want: int,
) -> Any:  # fmt: skip
    LAYER_NORM_BACKWARD.check(dy, dx, weight)
    cols = dx.shape[-1]
    rows = dx.numel() // cols
    size = max(dx.element_size(), dy.element_size())
    w = x if weight is None else weight
    on = x.get_device()
    pointers = x.data_ptr() | dy.data_ptr() | dx.data_ptr() | dh.data_ptr() | w.data_ptr()
    vector = vector_of(min(dx.element_size(), dy.element_size()), pointers, cols, stride)
    shifts = access_of(min(dx.element_size(), dy.element_size()), pointers, cols, stride)[1]
    ends = ends_access(min(dx.element_size(), dy.element_size()), pointers, cols, stride)
    packed_words = words_access(dy, x, w, pointers, rows, cols, stride)
    past = has_dh and packed_words and past_access(dh, x, shifts)
    waits = packed_words and not has_dh
    chosen = tuning.choose(
        "layer_norm.backward",
        {"rows": rows, "cols": cols, "dtype": dx.dtype},
        (config.past_words(rows, cols) if past else None)
        or (config.persistent_pipelined(rows, cols, size, shifts) if waits else None)
        or (config.backward_ends(rows, cols // ends * ends, size, waits) if ends else None)
        or config.backward(rows, cols, size, shifts, waits),
    )
    if (chosen.again or chosen.ahead) and (waits or past):
        programs = walkers(rows, chosen, start_places(x, cols), on)
        partial = template((2, programs, share_pitch(cols)), torch.float32, x.device)
        gone = dh if past else None
        return _plan_backward_words(chosen, dy, x, weight, mean, gone, dx, partial, rows, cols, stride, want)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_DH": has_dh}
    if not chosen.chunks:
        return _plan_backward_long(dy, x, w, mean, rstd, dh, dx, rows, cols, stride, want, flags, vector)
    programs = max(1, min(cdiv(rows, chosen.rows), chosen.programs_per_sm * num_sms(on)))
    unaligned, chunks = False, chosen.chunks
    if chosen.rows == 1:
        narrow = min(dx.element_size(), dy.element_size())
        vector, unaligned, chunks = pieces_of(chosen, narrow, pointers, cols, stride)
        programs = max(1, programs // vector) * vector if unaligned else programs
    apart = ends and chosen.ends
    tile = {"KEEP_WEIGHT": chosen.keep_weight, "ROWS": chosen.rows, "CHUNKS": chunks, "UNALIGNED": unaligned}
    if apart:
        vector, programs = ends, walkers(rows, chosen, ends, on)
        tile = {"CHUNKS": cdiv(cols // ends * ends, chosen.block)}
    pitch = share_pitch(cols) if unaligned or apart else cols
    partial = template((2, programs, pitch), torch.float32, x.device)
    early = chosen.early and not INTERPRETING
    run = (_BACKWARD_ENDS if apart else _BACKWARD).bind(
        (dy, x, w, mean, rstd, dh, dx, partial, rows, cols, stride),
        grid=(programs,),
        constants=flags
        | tile
        | {"WANT_DW": bool(want & WANT_WEIGHT), "WANT_DB": bool(want & WANT_BIAS), "BLOCK": chosen.block,
           "STAGES": chosen.num_stages, "EARLY": bool(want) and early, "VECTOR": vector},
        num_stages=chosen.num_stages,
        num_warps=chosen.num_warps,
        device=on,
        vector=vector,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm) if apart else 0,
    )  # fmt: skip
    reduce = plan_reduce(partial, w, programs, cols, on, second=w, early=early)

    def plan(
        dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, *sums: Tensor
    ) -> None:
        shares = torch.empty_like(partial, memory_format=torch.contiguous_format) if want else dx
        run(dy, x, w, mean, rstd, dh, dx, shares, rows, cols, stride)
        if want:
            reduce(shares, *sums, programs, cols)

    return plan


def _plan_backward_words(
    chosen: config.Backward, dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, dh: Tensor | None, dx: Tensor,
    partial: Tensor, rows: int, cols: int, stride: int, want: int,
) -> Any:  # fmt: skip
    """Rows of which words wait in shared memory."""
    w, on, programs = x if weight is None else weight, x.get_device(), partial.shape[1]
    wants = (bool(want & WANT_WEIGHT), bool(want & WANT_BIAS))
    run = plan_words(chosen, dy, x, weight, stats, dh, dx, partial, rows, cols, stride, *wants, True)
    reduce = plan_reduce(partial, w, programs, cols, on, second=w, early=chosen.early)

    def plan(
        dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, *sums: Tensor
    ) -> None:
        shares = torch.empty_like(partial, memory_format=torch.contiguous_format) if want else dx
        gone = () if chosen.ahead else (dh,)
        run(dy, x, w, mean, rstd, *gone, dx, shares, rows, cols, stride, 0.0)
        if want:
            reduce(shares, *sums, programs, cols)

    return plan


def _plan_backward_long(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, rows: int, cols: int,
    stride: int, want: int, flags: dict[str, Any], vector: int,
) -> Any:  # fmt: skip
    on = x.get_device()
    run = _BACKWARD_LONG.bind(
        (dy, x, w, mean, rstd, dh, dx, rows, cols, stride),
        grid=(rows,),
        constants=flags | {"BLOCK": config.LONG_BLOCK},
        num_warps=16,
        device=on,
        vector=vector,
    )
    block = 512
    groups = max(1, min(cdiv(rows, 8), cdiv(4 * num_sms(on), cdiv(cols, block))))
    partial = template((2, groups, share_pitch(cols)), torch.float32, x.device)
    share = _SHARES.bind(
        (dy, x, mean, rstd, partial, rows, cols, stride),
        grid=(cdiv(cols, block), groups),
        constants={"ROWS": 8, "BLOCK": block},
        num_stages=3,
        num_warps=8,
        device=on,
        vector=vector,
    )
    reduce = plan_reduce(partial, w, groups, cols, on, second=w)

    def plan(
        dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, *sums: Tensor
    ) -> None:
        run(dy, x, w, mean, rstd, dh, dx, rows, cols, stride)
        if want:
            shares = torch.empty_like(partial, memory_format=torch.contiguous_format)
            share(dy, x, mean, rstd, shares, rows, cols, stride)
            reduce(shares, *sums, groups, cols)

    return plan


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stats = [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats[0], stats[1]


def _add_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _fake(x, weight, bias, eps)
    return y, torch.empty_like(y), mean, rstd


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dh: Tensor | None, want: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if weight is None else weight.dtype
    cols = x.shape[-1]
    sums = [x.new_empty(cols if want & flag else 0, dtype=dtype) for flag in (WANT_WEIGHT, WANT_BIAS)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums[0], sums[1]


def _support(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> str | None:
    if x.dim() < 1 or x.shape[-1] == 0:
        return "x needs a last dim of at least one element"
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[-1:]:
            return f"{name} has shape {tuple(value.shape)}, the last dim of x is {x.shape[-1]}"
        if value is not None and not value.is_contiguous():
            return f"{name} must be contiguous"
    return float_reason(x=x, weight=weight, bias=bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.want, ctx.bias_dtype = _wanted(weight, bias)


def _wanted(weight: Tensor | None, bias: Tensor | None) -> tuple[int, torch.dtype | None]:
    want = (WANT_WEIGHT if weight is not None and weight.requires_grad else 0) | (
        WANT_BIAS if bias is not None and bias.requires_grad else 0
    )
    return want, None if bias is None else bias.dtype


def _sums(ctx: Any, dw: Tensor, db: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return (
        dw if ctx.want & WANT_WEIGHT else None,
        (db if db.dtype == ctx.bias_dtype else db.to(ctx.bias_dtype)) if ctx.want & WANT_BIAS else None,
    )


def _grads(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dw, db = LAYER_NORM_BACKWARD(dy, x, weight, mean, rstd, None, ctx.want)
    return dx, *_sums(ctx, dw, db), None


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, output[2], output[3])
    ctx.want, ctx.bias_dtype = _wanted(weight, bias)


def _add_grads(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
    h, weight, mean, rstd = ctx.saved_tensors
    if dy is None:
        return dh, dh, None, None, None
    dx, dw, db = LAYER_NORM_BACKWARD(dy, h, weight, mean, rstd, dh, ctx.want)
    return dx, dx, *_sums(ctx, dw, db), None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    x = (drawn(of["rows"], of["cols"]) + 0.5).to(dtype)
    return x, (1 + 0.3 * drawn(of["cols"])).to(dtype), (0.3 * drawn(of["cols"])).to(dtype), 1e-5


def _add_make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x, *rest = _make(of, on, generator)
    return x, _make(of, on, generator)[0], *rest


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype in DTYPES
    for rows, cols in ((1, 3), (3, 7), (1, 4096), (1000, 128), (257, 1000), (64, 4096), (33, 5120), (19, 8192),
                       (9, 16384), (5, 20001), (3, 40000), (2, 131072), (300, 24576),
                       (900, 4099), (5001, 1001), (4101, 4099), (4100, 7001), (12300, 4096), (9001, 1001),
                       (4101, 2049), (700, 12289), (4097, 5003), (520, 18748), (520, 18749), (8300, 603), (4200, 1248))
)  # fmt: skip
RACES = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype, rows, cols in (
        ("bfloat16", 16384, 4096), ("bfloat16", 8192, 8192), ("bfloat16", 4096, 12288), ("bfloat16", 32768, 1024),
        ("bfloat16", 1024, 12288), ("bfloat16", 65536, 768), ("float32", 8192, 4096),
        ("bfloat16", 65536, 2048), ("bfloat16", 32768, 4099),
    )
)  # fmt: skip
SMALL = tuple(case("bfloat16", rows=rows, cols=cols) for rows, cols in ((1, 4096), (16, 4096), (128, 1024)))

LAYER_NORM_BACKWARD = declare(
    name="layer_norm_backward",
    repeats=True,
    keyed=True,
    summary="gradients of layer_norm, and of add_layer_norm with the gradient of its sum",
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? dh, int want)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    reference=reference.backward,
    support=lambda dy, x, weight, *_: (
        (None if dy.shape == x.shape else "dy and x differ in shape") or _support(x, weight) or float_reason(dy=dy)
    ),
    cost=elementwise_cost(15.0),
    num_results=3,
)
LAYER_NORM = declare(
    name="layer_norm",
    repeats=True,
    keyed=True,
    summary="(x − mean) / deviation · weight + bias",
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=layer_norm,
        eager=reference.eager,
        reference=reference.layer_norm,
        mistakes={
            "not centered": reference.not_centered,
            "padding counted": reference.unbiased,
            "bias ignored": reference.bias_ignored,
        },
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        packs=common_rows(),
    ),
)
ADD_LAYER_NORM = declare(
    name="add_layer_norm",
    repeats=True,
    keyed=True,
    summary="h = x + residual and layer_norm(h), in one pass",
    schema="(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_add_forward,
    infer=_add_infer,
    fake=_add_fake,
    reference=reference.add_forward,
    support=lambda x, residual, weight=None, bias=None, *_: (
        _support(x, weight, bias)
        or (
            None if (residual.shape, residual.dtype) == (x.shape, x.dtype) else "residual and x differ in shape or type"
        )
    ),
    cost=elementwise_cost(9.0),
    num_results=2,
    setup=_add_setup,
    backward=_add_grads,
    trial=Trial(
        make=_add_make,
        call=add_layer_norm,
        eager=reference.add_eager,
        reference=reference.add_layer_norm,
        mistakes={"residual ignored": lambda x, r, w, b, eps: (reference.layer_norm(x, w, b, eps), x + r)},
        checks=CHECKS,
        races=RACES[:3],
        small=SMALL,
        backward_bytes=lambda args: 4 * args[0].nbytes,  # the sum and two gradients in, one out
    ),
)
