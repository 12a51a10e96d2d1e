"""Quantize to fp8 or int8 with a scale a tensor, row or block, and back; no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import COMMON_WIDTHS, DTYPES, Case, Laps, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms, overlaps, vector_of
from ridgeline.kernels.quantize import config, kernel, reference
from ridgeline.kernels.quantize.reference import LARGEST, scale_shape
from ridgeline.kernels.rows import FLOATS, as_rows, cdiv, float_reason, power_of_two, template
from ridgeline.kernels.split_rows import most_registers

_ROWS = Kernel(kernel.quantize_rows, vectors=("cols", "x_stride"))
_LONG_ROWS = Kernel(kernel.quantize_long_rows, vectors=("cols", "x_stride"))
_SHARES = Kernel(kernel.largest_shares)
_SCALE = Kernel(kernel.scale_of_shares)
_ALL = Kernel(kernel.quantize_all)
_BACK_ROWS = Kernel(kernel.dequantize_rows, vectors=("cols",))
_BACK_ALL = Kernel(kernel.dequantize_all)
_plans, _back_plans = Plans(), Plans()
PER = ("tensor", "row", "block")


def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    per: str = "row",
    block: int = 128,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x`` in ``dtype`` (float8_e4m3fn, float8_e5m2 or int8) and the float32 scale that restores it: (q, scale).

    ``q * scale`` is ``x``, rounded. A scale belongs to the whole tensor (shape ``[]``), to a row (``[..., 1]``) or to
    ``block`` columns of one (``[..., cols / block]``). A ``scale`` that is given, for a whole tensor, is used as it
    is: one pass; what lies outside its range becomes the largest number.
    """
    kind = str(dtype).removeprefix("torch.")
    if kind not in LARGEST:
        raise KernelError(f"quantize: dtype is one of {', '.join(LARGEST)}, not {kind}")
    if per not in PER:
        raise KernelError(f"quantize: per is one of {', '.join(PER)}, not {per!r}")
    return QUANTIZE(x, scale, kind, per, block if per == "block" else 0)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``q * scale`` in ``dtype``, with scales as ``quantize`` returns them."""
    if dtype not in FLOATS:
        raise KernelError(f"dequantize: dtype is float32, float16 or bfloat16, not {dtype}")
    return DEQUANTIZE(q, scale, str(dtype).removeprefix("torch."))


# --- running -----------------------------------------------------------------------------------------------------


def _forward(x: Tensor, scale: Tensor | None, kind: str, per: str, block: int) -> tuple[Tensor, Tensor]:
    """As a registered op, which may not return what it was given."""
    q, found = _quantize(x, scale, kind, per, block)
    return q, found if scale is None else found.clone()


def _quantize(x: Tensor, scale: Tensor | None, kind: str, per: str, block: int) -> tuple[Tensor, Tensor]:
    if not launchable(x):
        QUANTIZE.check(x, scale, kind, per, block)
        return reference.quantized(x.detach().float(), kind, per, block, scale)
    if per == "row":
        shape, (x, stride) = x.shape, as_rows(x)
    else:
        shape, x, stride = x.shape, x.contiguous(), x.shape[-1] if x.dim() else 1
    key = (shape, x.dtype, stride, kind, per, block, scale is None, x.get_device(), x.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        QUANTIZE.check(x.view(shape) if x.is_contiguous() else x, scale, kind, per, block)
        make = _plan_tensor if per == "tensor" else _plan_rows
        plan = _plans[key] = make(x, shape, stride, kind, block, scale)
    return plan(x, scale)


def _plan_rows(x: Tensor, shape: torch.Size, stride: int, kind: str, block: int, _: Tensor | None) -> Any:
    cols = block or shape[-1]
    rows = shape.numel() // cols
    step = block or stride
    q = template(shape, getattr(torch, kind), x.device)
    scale = template(scale_shape(shape, "block" if block else "row", block), torch.float32, x.device)
    size = x.element_size()
    chosen = tuning.choose(
        "quantize.rows", {"rows": rows, "cols": cols, "dtype": x.dtype}, config.rows(rows, cols, size)
    )
    constants: dict[str, Any] = {"INTEGER": kind == "int8"}
    if chosen.chunks:
        constants |= {"ROWS": chosen.rows, "CHUNKS": chosen.chunks, "BLOCK": chosen.block}
    else:
        constants |= {"BLOCK": config.LONG_BLOCK}
    run = (_ROWS if chosen.chunks else _LONG_ROWS).bind(
        (x, q, scale, rows, cols, step, 0.5),
        grid=(cdiv(rows, chosen.rows),),
        constants=constants,
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector_of(size, x.data_ptr(), cols, step),
        max_registers=most_registers(chosen),
    )
    top = LARGEST[kind]

    def plan(x: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
        narrow = torch.empty_like(q, memory_format=torch.contiguous_format)
        scales = torch.empty_like(scale, memory_format=torch.contiguous_format)
        run(x, narrow, scales, rows, cols, step, top)
        return narrow, scales

    return plan


def _plan_tensor(x: Tensor, shape: torch.Size, _: int, kind: str, __: int, given: Tensor | None) -> Any:
    n, on, top = shape.numel(), x.get_device(), LARGEST[kind]
    chosen = tuning.choose("quantize.tensor", {"n": n, "dtype": x.dtype}, config.flat(x.element_size()))
    blocks = cdiv(n, chosen.block)
    num = max(1, min(cdiv(blocks, 2), chosen.programs_per_sm * num_sms(on), 1024))
    q, one = template(shape, getattr(torch, kind), x.device), template((), torch.float32, x.device)
    share = template((num,), torch.float32, x.device)
    early = given is None and overlaps(x.nbytes)
    common = {"num_warps": chosen.num_warps, "device": on, "vector": vector_of(x.element_size(), x.data_ptr())}
    look = _SHARES.bind((x, share, n), grid=(num,), constants={"BLOCK": 2 * chosen.block, "EARLY": early}, **common)  # type: ignore[arg-type]
    settle = _SCALE.bind(
        (share, one, one, num, 0.5),
        grid=(1,),
        constants={"SHARES": power_of_two(num), "DEPENDENT": early},
        num_warps=4,
        device=on,
    )
    run = _ALL.bind(
        (x, q, one, n, 0.5),
        grid=(blocks,),
        constants={"GIVEN": given is not None, "INTEGER": kind == "int8", "BLOCK": chosen.block, "DEPENDENT": early},
        **common,  # type: ignore[arg-type]
    )

    def plan(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        narrow = torch.empty_like(q, memory_format=torch.contiguous_format)
        if given is not None:
            run(x, narrow, given, n, top)
            return narrow, given
        if not n:
            return narrow, torch.full_like(one, reference.LEAST / top)
        scale, by = torch.empty_like(one), torch.empty_like(one)
        shares = torch.empty_like(share, memory_format=torch.contiguous_format)
        look(x, shares, n)
        settle(shares, scale, by, num, top)
        run(x, narrow, by, n, top)
        return narrow, scale

    return plan


def _dequantize(q: Tensor, scale: Tensor, kind: str) -> Tensor:
    dtype = getattr(torch, kind)
    if not launchable(q):
        DEQUANTIZE.check(q, scale, kind)
        return reference.restored(q, scale).to(dtype)
    q, scale = q.contiguous(), scale.contiguous()
    key = (q.shape, scale.shape, q.dtype, kind, q.get_device(), (q.data_ptr() | scale.data_ptr()) & 15)
    plan = _back_plans.get(key)
    if plan is None:
        DEQUANTIZE.check(q, scale, kind)
        plan = _back_plans[key] = _plan_back(q, scale, dtype)
    run, like, numbers = plan
    x = torch.empty_like(like, memory_format=torch.contiguous_format)
    run(q, scale, x, *numbers)
    return x


def _plan_back(q: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor, tuple[int, ...]]:
    like = template(q.shape, dtype, q.device)
    on, vector = q.get_device(), vector_of(1, q.data_ptr())
    if scale.dim() == 0:
        n = q.numel()
        flat = tuning.choose("dequantize.tensor", {"n": n, "dtype": dtype}, config.Flat(4096, 8))
        run = _BACK_ALL.bind(
            (q, scale, like, n), grid=(cdiv(n, flat.block),), constants={"BLOCK": flat.block},
            num_warps=flat.num_warps, device=on, vector=vector,
        )  # fmt: skip
        return run, like, (n,)
    rows = scale.numel()
    cols = q.numel() // max(1, rows)
    tile = tuning.choose("dequantize.rows", {"rows": rows, "cols": cols, "dtype": dtype}, config.tile(rows, cols))
    blocks = cdiv(cols, tile.block)
    run = _BACK_ROWS.bind(
        (q, scale, like, rows, cols, blocks),
        grid=(cdiv(rows, tile.rows) * blocks,),
        constants={"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
        device=on,
        vector=vector_of(1, q.data_ptr(), cols),
    )
    return run, like, (rows, cols, blocks)


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(x: Tensor, scale: Tensor | None, kind: str, per: str, block: int) -> tuple[Tensor, Tensor]:
    q = x.new_empty(x.shape, dtype=getattr(torch, kind))
    return q, x.new_empty(scale_shape(x.shape, per, block), dtype=torch.float32)


def _support(
    x: Tensor, scale: Tensor | None = None, kind: str = "int8", per: str = "row", block: int = 0
) -> str | None:
    if x.dim() < 1 or x.shape[-1] == 0:
        return "x needs a last dim of at least one element"
    if scale is not None and (per != "tensor" or scale.dim() != 0 or scale.dtype != torch.float32):
        return "a scale can be given for a whole tensor, as a float32 scalar"
    if per == "block" and (block < 8 or block & (block - 1) or x.shape[-1] % block):
        return f"a block of {block} columns is no power of two from 8 on that divides {x.shape[-1]}"
    return float_reason(x=x)


def _back_support(q: Tensor, scale: Tensor, *_: Any) -> str | None:
    if str(q.dtype).removeprefix("torch.") not in LARGEST:
        return f"q is {q.dtype}; it is one of {', '.join(LARGEST)}"
    if scale.dtype != torch.float32:
        return f"scale is {scale.dtype}, not float32"
    if scale.dim() and (scale.shape[:-1] != q.shape[:-1] or not scale.shape[-1] or q.shape[-1] % scale.shape[-1]):
        return f"scales {tuple(scale.shape)} belong to no rows or blocks of q {tuple(q.shape)}"
    return None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator)
    return x.to(getattr(torch, of.dtype)), of["kind"], of["per"], of["block"]


def _call(x: Tensor, kind: str, per: str, block: int) -> Tensor:
    return reference.restored(*quantize(x.detach(), getattr(torch, kind), per=per, block=block))


def _laps(of: Case, on: torch.device, generator: torch.Generator) -> Laps:
    """Quantization alone: what trials check also restores."""
    x, kind, per, block = _make(of, on, generator)
    dtype = getattr(torch, kind)
    passes = 2 if per == "tensor" else 1

    def eager() -> Any:
        return reference.quantized(x.float(), kind, per, block)

    runs = {"ridgeline": lambda: quantize(x, dtype, per=per, block=block), "eager": eager}
    return Laps(runs, passes * x.nbytes + x.numel(), eager)


def _back_make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x, kind, per, block = _make(of, on, generator)
    if on.type == "meta":
        shape = scale_shape(x.shape, per, block)
        return x.to(getattr(torch, kind)), torch.empty(shape, device=on), x.dtype
    q, scale = reference.quantized(x.float(), kind, per, block)
    return q, scale, x.dtype


SHAPES = ((1, 8, "row", 0), (33, 1000, "row", 0), (17, 5120, "row", 0), (3, 40000, "row", 0), (5, 4096, "block", 128),
          (64, 512, "block", 32), (7, 1001, "tensor", 0), (300, 4096, "tensor", 0))  # fmt: skip
CHECKS = tuple(
    case(dtype, rows=rows, cols=cols, kind=kind, per=per, block=block)
    for dtype in DTYPES
    for i, (rows, cols, per, block) in enumerate(SHAPES)
    for kind in (tuple(LARGEST) if i % 2 else ("int8", "float8_e4m3fn"))
)
RACES = tuple(
    case("bfloat16", rows=rows, cols=cols, kind=kind, per=per, block=block)
    for rows, cols, kind, per, block in (
        (16384, 4096, "float8_e4m3fn", "row", 0), (16384, 4096, "int8", "row", 0),
        (16384, 4096, "float8_e4m3fn", "block", 128), (8192, 14336, "float8_e4m3fn", "row", 0),
        (16384, 4096, "float8_e4m3fn", "tensor", 0), (65536, 4096, "float8_e5m2", "tensor", 0),
    )
)  # fmt: skip

QUANTIZE = declare(
    name="quantize",
    summary="fp8 or int8 with a scale a tensor, row or block",
    schema="(Tensor x, Tensor? scale, str kind, str per, int block) -> (Tensor, Tensor)",
    forward=_forward,
    infer=_quantize,
    fake=_fake,
    reference=lambda x, scale, kind, per, block: reference.quantized(x, kind, per, block, scale),
    support=_support,
    cost=elementwise_cost(4.0),
    num_results=2,
    trial=Trial(
        make=_make,
        call=_call,
        eager=reference.eager,
        reference=reference.meant,
        mistakes={"half the range": reference.half_range, "toward zero": reference.truncated},
        times_eager=1.02,
        checks=CHECKS,
        races=RACES,
        packs=tuple(
            case("bfloat16", rows=rows, cols=cols, kind=kind, per="row", block=0)
            for cols in COMMON_WIDTHS
            for rows in (8, 16384)
            for kind in ("float8_e4m3fn", "int8")
        ),
        small=(case("bfloat16", rows=16, cols=4096, kind="float8_e4m3fn", per="row", block=0),),
        phases=("fwd",),
        constants=(0,),
        laps=_laps,
    ),
)
DEQUANTIZE = declare(
    name="dequantize",
    summary="fp8 or int8 times its scales",
    schema="(Tensor q, Tensor scale, str kind) -> Tensor",
    forward=_dequantize,
    fake=lambda q, scale, kind: q.new_empty(q.shape, dtype=getattr(torch, kind)),
    reference=lambda q, scale, kind: reference.restored(q, scale),
    support=_back_support,
    cost=elementwise_cost(1.0),
    trial=Trial(
        make=_back_make,
        call=dequantize,
        eager=lambda q, scale, dtype: reference.restored(q, scale).to(dtype),
        reference=lambda q, scale, dtype: reference.restored(q, scale),
        mistakes={"another row's scale": reference.dequantized_wrong_row},
        checks=tuple(of for of in CHECKS if of["per"] != "tensor" or of["rows"] == 7),
        races=(RACES[0], RACES[2], RACES[4]),
        phases=("fwd",),
        constants=(0, 1),
        layouts=False,
    ),
)
