"""Cross-entropy of logits and class indices: label smoothing, z-loss and an ignored index, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.cross_entropy import config, kernel, reference, streamed
from ridgeline.kernels.launcher import (
    INTERPRETING,
    Kernel,
    Plans,
    access_of,
    carved,
    is_widest,
    launchable,
    num_sms,
    overlaps,
    policy,
    vector_of,
)
from ridgeline.kernels.rows import as_rows, cdiv, clamp, float_reason, power_of_two, template
from ridgeline.kernels.split_rows import registers_of

_LOOSE = ("target_ptr", "loss_ptr", "count_ptr", "lse_ptr", "part_ptr")
_STRETCHES = Kernel(kernel.cross_entropy_stretches, vectors=("cols", "x_stride", "length"), loose=_LOOSE)
_MERGE = Kernel(kernel.cross_entropy_merge)
_SHORT = Kernel(kernel.cross_entropy_short, vectors=("cols", "x_stride"), loose=_LOOSE)
_PACKED = Kernel(streamed.cross_entropy_packed, vectors=("cols", "x_stride"), loose=_LOOSE)
_FINISH = Kernel(kernel.cross_entropy_finish, vectors=("num",), loose=("out_ptr", "weight_ptr"))
_BACKWARD = Kernel(kernel.cross_entropy_backward, vectors=("cols", "x_stride", "dx_stride"))
_BACKWARD_FLAT = Kernel(kernel.cross_entropy_backward_flat, loose=("target_ptr", "lse_ptr", "grad_ptr", "weight_ptr"))
_BACKWARD_ROWS = Kernel(
    kernel.cross_entropy_backward_rows,
    vectors=("cols", "x_stride"),
    loose=("target_ptr", "lse_ptr", "grad_ptr", "weight_ptr"),
)
_BACKWARD_ENDS = Kernel(kernel.cross_entropy_backward_ends, loose=("target_ptr", "lse_ptr", "grad_ptr", "weight_ptr"))
_forward_plans, _row_plans, _backward_plans = Plans(), Plans(), Plans()
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits ``[N, C]`` or ``[N, C, …]`` and class indices, as ``F.cross_entropy``.

    ``z_loss`` adds that many times the squared log-sum-exp of each row. The arithmetic is in float32; the result has
    the type of the logits, or float32 under autocast.
    """
    if weight is not None or target.is_floating_point():
        raise KernelError("cross_entropy: class weights and class probabilities have no kernel; use F.cross_entropy")
    if reduction not in REDUCTIONS:
        raise KernelError(f"cross_entropy: reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    shape = target.shape
    if input.dim() != 2:
        input = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1).flatten(0, -2)
        target = target.reshape(-1)
    wide = torch.is_autocast_enabled("cuda")
    loss = CROSS_ENTROPY(input, target, ignore_index, label_smoothing, z_loss, reduction, wide)
    return loss.view(shape) if reduction == "none" else loss


# --- running -----------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return CROSS_ENTROPY.on_host(x, target, ignore_index, smoothing, z_weight, reduction, wide)
    x, (plan, _) = _planned(x, target, smoothing, reduction, wide)
    return plan(x, target, ignore_index, smoothing, z_weight)


def _infer(
    x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str, wide: bool
) -> Tensor:
    if not launchable(x):
        return CROSS_ENTROPY.on_host(x, target, ignore_index, smoothing, z_weight, reduction, wide)[0]
    x, (_, infer) = _planned(x, target, smoothing, reduction, wide)
    return infer(x, target, ignore_index, smoothing, z_weight)


def _planned(x: Tensor, target: Tensor, smoothing: float, reduction: str, wide: bool) -> tuple[Tensor, Any]:
    x, stride = as_rows(x)
    key = (
        x.shape, target.shape, x.dtype, target.dtype, stride, smoothing != 0, reduction, wide, x.get_device(),
        (x.data_ptr() | target.data_ptr()) & 15,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        CROSS_ENTROPY.check(x, target)
        plan = _forward_plans[key] = _plan_forward(x, target, stride, smoothing != 0, reduction, wide)
    return x, plan


def _plan_forward(x: Tensor, target: Tensor, stride: int, smooth: bool, reduction: str, wide: bool) -> Any:
    rows = x.shape[0]
    lse = template((2, rows), torch.float32, x.device)
    scalar = template((), torch.float32 if wide else x.dtype, x.device)
    weight = template((), torch.float32, x.device)
    read, num = _plan_rows(x, target, stride, smooth, reduction != "none")
    sums = template((2 * num,), torch.float32, x.device)
    scratch = template((2 * rows + 2 * num + 4,), torch.float32, x.device)
    finish = _FINISH.bind(
        (sums, sums, scalar, weight, num),
        grid=(1,),
        constants={
            "MEAN": reduction == "mean",
            "BLOCK": clamp(power_of_two(num), 32, 16384),
            "DEPENDENT": overlaps(x.nbytes),
        },
        num_warps=clamp(power_of_two(num) // 256, 1, 32),
        device=x.get_device(),
        vector=4 if num % 4 == 0 else 1,
    )

    def plan(
        x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.empty_like(lse, memory_format=torch.contiguous_format)
        counted = torch.empty_like(weight)
        found = torch.empty_like(sums, memory_format=torch.contiguous_format)
        losses, counts = carved(found, num, num)
        read(x, target, losses, counts, both, ignore_index, smoothing, z_weight)
        if reduction == "none":
            return found[:rows].to(scalar.dtype), both, counted
        loss = torch.empty_like(scalar)
        finish(losses, counts, loss, counted, num)
        return loss, both, counted

    def infer(x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float) -> Tensor:
        """The loss alone: what the backward pass would need shares one piece of memory that nobody keeps."""
        if reduction == "none":
            return plan(x, target, ignore_index, smoothing, z_weight)[0]
        memory = torch.empty_like(scratch, memory_format=torch.contiguous_format)
        losses, counts, counted, both = carved(memory, num, num, 4, 2 * rows)
        loss = torch.empty_like(scalar)
        read(x, target, losses, counts, both, ignore_index, smoothing, z_weight)
        finish(losses, counts, loss, counted, num)
        return loss

    return plan, infer


def _plan_rows(x: Tensor, target: Tensor, stride: int, smooth: bool, summed: bool) -> tuple[Any, int]:
    """What writes losses, counts and every row's lse, and how many losses: short rows whole, long ones in stretches.

    ``summed`` asks for counts, and allows one loss for several rows.
    """
    rows, cols = x.shape
    on = x.get_device()
    vector, unaligned = access_of(x.element_size(), x.data_ptr(), cols, stride)
    numbers, lse = template((rows,), torch.float32, x.device), template((2, rows), torch.float32, x.device)
    short = cols <= config.SHORTEST_STRETCHED
    size = x.element_size()
    default: Any = config.short(rows, cols, size) if short else config.forward(rows, cols, size, num_sms(on), unaligned)
    if size == 2 and is_widest(vector, size) and not unaligned and not INTERPRETING:
        default = config.packed(rows, cols) or default
    chosen: config.Forward | config.Short | config.Packed = tuning.choose(
        "cross_entropy.short" if short else "cross_entropy.forward",
        {"rows": rows, "cols": cols, "dtype": x.dtype},
        default,
    )
    if isinstance(chosen, config.Packed):
        return _plan_packed(x, target, stride, smooth, summed, numbers, lse, chosen)
    if isinstance(chosen, config.Short):
        return _plan_short(x, target, stride, smooth, summed, numbers, lse, vector, unaligned, chosen)
    most = cols + vector - 1 if unaligned else cols
    length = cdiv(cdiv(most, chosen.num_stretches), chosen.block) * chosen.block
    num = cdiv(most, length)
    part = template((3, rows, num), torch.float32, x.device)
    width = min(chosen.block, POINTER_ALIGNMENT_BYTES // x.element_size())
    read = _STRETCHES.bind(
        (x, target, part, numbers, numbers, lse, rows, cols, stride, length, num, -100, 0.0, 0.0),
        grid=(rows * num,),
        constants={"SMOOTH": smooth, "WHOLE": num == 1, "COUNT": summed, "GROUPS": chosen.block // width,
                   "VECTOR": width, "STAGES": chosen.num_stages, "EARLY": overlaps(x.nbytes) and (summed or num > 1),
                   "UNALIGNED": unaligned, "POLICY": policy(chosen.leaves)},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=on,
        vector=vector,
    )  # fmt: skip
    if num == 1:
        return lambda x, target, losses, counts, lse, *scalars: read(
            x, target, lse, losses, counts, lse, rows, cols, stride, length, num, *scalars
        ), rows
    merge = _MERGE.bind(
        (x, target, part, numbers, numbers, lse, rows, cols, stride, num, -100, 0.0, 0.0),
        grid=(rows,),
        constants={"SMOOTH": smooth, "COUNT": summed, "STRETCHES": power_of_two(num), "DEPENDENT": overlaps(x.nbytes)},
        num_warps=1,
        device=on,
    )

    def run(x: Tensor, target: Tensor, losses: Any, counts: Any, lse: Any, *scalars: Any) -> None:
        parts = torch.empty_like(part, memory_format=torch.contiguous_format)
        read(x, target, parts, losses, counts, lse, rows, cols, stride, length, num, *scalars)
        merge(x, target, parts, losses, counts, lse, rows, cols, stride, num, *scalars)

    return run, rows


def _plan_packed(
    x: Tensor, target: Tensor, stride: int, smooth: bool, summed: bool, numbers: Tensor, lse: Tensor,
    chosen: config.Packed,
) -> tuple[Any, int]:  # fmt: skip
    """Rows of 16-byte accesses, each held by a program; programs are persistent over rows."""
    rows, cols = x.shape
    block = 256 * chosen.num_warps
    lines = stride % config.LINE != 0
    programs = min(rows, chosen.programs_per_sm * num_sms(x.get_device()))
    run = _PACKED.bind(
        (x, target, numbers, numbers, lse, rows, cols, stride, -100, 0.0, 0.0),
        grid=(programs,),
        constants={"SMOOTH": smooth, "SUM": summed, "BLOCK": block, "FULL": cols // block, "LINES": lines,
                   "CHUNKS": cdiv(cols + (config.LINE - 8 if lines else 0), block),
                   "EARLY": overlaps(x.nbytes) and summed, "POLICY": policy(chosen.leaves)},
        num_warps=chosen.num_warps,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=x.get_device(),
        vector=POINTER_ALIGNMENT_BYTES // x.element_size(),
    )  # fmt: skip

    def read(x: Tensor, target: Tensor, losses: Any, counts: Any, lse: Any, *scalars: Any) -> None:
        run(x, target, losses, counts, lse, rows, cols, stride, *scalars)

    return read, programs if summed else rows


def row_losses(
    x: Tensor, target: Tensor, losses: Tensor, ignore_index: int, smoothing: float, z_weight: float
) -> Tensor:
    """Every row's loss into ``losses``; returns what the gradient needs of each row."""
    x, stride = as_rows(x)
    lse = torch.empty((2, x.shape[0]), dtype=torch.float32, device=x.device)
    pointers = x.data_ptr() | target.data_ptr() | losses.data_ptr()
    key = (x.shape, x.dtype, target.dtype, stride, smoothing != 0, x.get_device(), pointers & 15)
    run = _row_plans.get(key)
    if run is None:
        run = _row_plans[key] = _plan_rows(x, target, stride, smoothing != 0, summed=False)[0]
    run(x, target, losses, losses, lse, ignore_index, smoothing, z_weight)
    return lse


def _plan_short(
    x: Tensor, target: Tensor, stride: int, smooth: bool, summed: bool, numbers: Tensor, lse: Tensor, vector: int,
    unaligned: bool, chosen: config.Short,
) -> tuple[Any, int]:  # fmt: skip
    rows, cols = x.shape
    most = cols + vector - 1 if unaligned else cols
    programs = min(cdiv(rows, chosen.rows), chosen.programs_per_sm * num_sms(x.get_device()))
    run = _SHORT.bind(
        (x, target, numbers, numbers, lse, rows, cols, stride, -100, 0.0, 0.0),
        grid=(programs,),
        constants={"SMOOTH": smooth, "SUM": summed, "ROWS": chosen.rows, "CHUNKS": cdiv(most, chosen.block),
                   "BLOCK": chosen.block, "FULL": cols // chosen.block, "EVEN": rows % chosen.rows == 0,
                   "STAGES": chosen.num_stages, "EARLY": overlaps(x.nbytes) and summed, "UNALIGNED": unaligned,
                   "VECTOR": vector, "POLICY": policy(chosen.leaves and chosen.num_stages == 1)},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=vector,
    )  # fmt: skip

    def read(x: Tensor, target: Tensor, losses: Any, counts: Any, lse: Any, *scalars: Any) -> None:
        run(x, target, losses, counts, lse, rows, cols, stride, *scalars)

    return read, programs if summed else rows


def _backward(
    grad: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor, ignore_index: int, smoothing: float,
    z_weight: float,
) -> Tensor:  # fmt: skip
    if not launchable(x):
        return CROSS_ENTROPY_BACKWARD.on_host(grad, x, target, lse, weight, ignore_index, smoothing, z_weight)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    write_gradient(grad.contiguous(), x, target, lse, weight, dx, ignore_index, smoothing, z_weight)
    return dx


def write_gradient(
    grad: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor, dx: Tensor, ignore_index: int,
    smoothing: float, z_weight: float,
) -> None:  # fmt: skip
    """The gradient of the logits into ``dx``, which may be the logits themselves."""
    rows, cols = x.shape
    x, stride = as_rows(x)
    key = (
        x.dtype, dx.dtype, target.dtype, grad.dtype, rows, cols, stride, grad.dim(), x.get_device(),
        (x.data_ptr() | dx.data_ptr()) & 15,
    )  # fmt: skip
    run = _backward_plans.get(key)
    if run is None:
        run = _backward_plans[key] = _plan_backward(grad, x, target, lse, weight, dx, stride)
    run(x, target, lse, grad, weight, dx, ignore_index, smoothing, z_weight)


def _plan_backward(
    grad: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor, dx: Tensor, stride: int
) -> Any:
    """A block of a row a program; several short rows; where dense rows are unaligned, a block of the whole."""
    rows, cols = x.shape
    sizes = {"rows": rows, "cols": cols, "dtype": x.dtype}
    chosen = tuning.choose("cross_entropy.backward", sizes, config.backward(cols, x.element_size()))
    pointers = x.data_ptr() | dx.data_ptr()
    vector, unaligned = access_of(x.element_size(), pointers, cols, stride)
    if unaligned and (stride - cols) % vector:
        vector, unaligned = vector_of(x.element_size(), pointers, cols, stride), False
    short = config.backward_rows(cols, vector, unaligned)
    if short is not None:
        tile = tuning.choose("cross_entropy.backward_rows", sizes, short)
        apart = unaligned and tile.ends
        shape = {} if apart else {"ROWS": tile.rows, "UNALIGNED": unaligned}
        several = (_BACKWARD_ENDS if apart else _BACKWARD_ROWS).bind(
            (x, target, lse, grad, weight, dx, rows, cols, stride, -100, 0.0, 0.0),
            grid=(cdiv(rows, tile.rows),),
            constants={"PER_ROW": grad.dim() > 0, **shape, "BLOCK": tile.block, "VECTOR": vector},
            num_warps=tile.num_warps,
            device=x.get_device(),
            vector=vector,
        )  # fmt: skip
        return lambda x, target, lse, grad, weight, dx, *scalars: several(
            x, target, lse, grad, weight, dx, rows, cols, stride, *scalars
        )
    if unaligned and stride == cols:
        block = min(chosen.block, power_of_two(cols + 1) // 2)
        flat = _BACKWARD_FLAT.bind(
            (x, target, lse, grad, weight, dx, rows, cols, -100, 0.0, 0.0),
            grid=(cdiv(rows * cols, block),),
            constants={"PER_ROW": grad.dim() > 0, "BLOCK": block, "VECTOR": vector},
            num_warps=clamp(block // 512, 1, 8),
            device=x.get_device(),
            vector=vector,
        )
        return lambda x, target, lse, grad, weight, dx, *scalars: flat(
            x, target, lse, grad, weight, dx, rows, cols, *scalars
        )
    blocks = cdiv(cols, chosen.block)
    run = _BACKWARD.bind(
        (x, target, lse, grad, weight, dx, rows, cols, stride, cols, blocks, -100, 0.0, 0.0),
        grid=(rows * blocks,),
        constants={"PER_ROW": grad.dim() > 0, "BLOCK": chosen.block},
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector_of(x.element_size(), pointers, cols, stride),
    )
    return lambda x, target, lse, grad, weight, dx, *scalars: run(
        x, target, lse, grad, weight, dx, rows, cols, stride, cols, blocks, *scalars
    )


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(
    x: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    loss = x.new_empty((rows,) if reduction == "none" else (), dtype=torch.float32 if wide else x.dtype)
    return loss, x.new_empty((2, rows), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


def _support(x: Tensor, target: Tensor, *_: Any) -> str | None:
    if x.dim() != 2 or target.shape != x.shape[:1]:
        return f"logits {tuple(x.shape)} and targets {tuple(target.shape)} are not [N, C] and [N]"
    if x.shape[1] == 0:
        return "there are no classes"
    if target.dtype not in (torch.int64, torch.int32):
        return f"targets are {target.dtype}; class indices are int64 or int32"
    if not target.is_contiguous():
        return "targets must be contiguous"
    return float_reason(x=x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, target, ctx.ignore_index, ctx.smoothing, ctx.z_weight, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, target, output[1], output[2])


def _grads(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 7
    x, target, lse, weight = ctx.saved_tensors
    dx = CROSS_ENTROPY_BACKWARD(grad, x, target, lse, weight, ctx.ignore_index, ctx.smoothing, ctx.z_weight)
    return dx, *(None,) * 6


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    rows, cols = of["rows"], of["cols"]
    x = 2 * torch.randn(rows, cols, device=on, dtype=torch.float32, generator=generator)
    target = torch.randint(0, cols, (rows,), device=on, generator=generator)
    if rows > 2:
        target[:: max(2, rows // 5)] = -100
    args = (x.to(getattr(torch, of.dtype)), target)
    return (*args, of["smoothing"], of["z"]) if of.get("smoothing") is not None else args


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols, smoothing=smoothing, z=z)
    for dtype in DTYPES
    for rows, cols, smoothing, z in ((1, 3, 0.0, 0.0), (5, 7, 0.1, 0.0), (64, 1000, 0.0, 0.0), (257, 4096, 0.1, 1e-3),
                                     (300, 32000, 0.0, 0.0), (17, 50257, 0.1, 0.0), (9, 128256, 0.0, 1e-3),
                                     (2, 262144, 0.1, 1e-3), (9000, 1001, 0.1, 1e-3), (1030, 2051, 0.0, 0.0),
                                     (17000, 1000, 0.1, 1e-3), (1100, 16384, 0.1, 0.0), (4100, 3000, 0.1, 1e-3),
                                     (4200, 4096, 0.0, 0.0), (4097, 9992, 0.1, 0.0), (4099, 12000, 0.0, 1e-3),
                                     (4096, 18008, 0.1, 1e-3))
)  # fmt: skip
RACES = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype, rows, cols in (
        ("bfloat16", 8192, 32000), ("bfloat16", 4096, 128256), ("bfloat16", 2048, 151936), ("bfloat16", 1024, 262144),
        ("bfloat16", 65536, 1000), ("float32", 4096, 32000),
        ("bfloat16", 8192, 50257), ("bfloat16", 131072, 1001), ("bfloat16", 262144, 256), ("float32", 4096, 50257),
        ("bfloat16", 32768, 4096), ("bfloat16", 16384, 10000),
    )
)  # fmt: skip
SMALL = tuple(case("bfloat16", rows=rows, cols=cols) for rows, cols in ((8, 4096), (128, 1000)))

CROSS_ENTROPY_BACKWARD = declare(
    name="cross_entropy_backward",
    repeats=True,
    keyed=True,
    summary="gradient of cross_entropy",
    schema="(Tensor grad, Tensor x, Tensor target, Tensor lse, Tensor weight, int ignore_index, float smoothing,"
    " float z_weight) -> Tensor",
    forward=_backward,
    fake=lambda grad, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    reference=reference.backward,
    support=lambda grad, x, target, *_: _support(x, target),
    cost=elementwise_cost(6.0),
)
CROSS_ENTROPY = declare(
    name="cross_entropy",
    repeats=True,
    keyed=True,
    summary="log-softmax and the negative log-likelihood as one",
    schema="(Tensor x, Tensor target, int ignore_index, float smoothing, float z_weight, str reduction, bool wide)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(6.0),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=lambda x, target, smoothing=0.0, z=0.0: cross_entropy(x, target, label_smoothing=smoothing, z_loss=z),
        eager=reference.eager,
        reference=reference.cross_entropy,
        mistakes={"ignored rows counted": reference.ignored_counted, "classes lost": reference.last_classes_lost},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        backward_bytes=lambda args: 2 * args[0].nbytes,
    ),
)
