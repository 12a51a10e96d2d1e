"""Linear layer and cross-entropy as one: the logits exist a chunk at a time, and their gradient in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import narrowed, widens
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare
from ridgeline.kernels.cross_entropy.op import row_losses, write_gradient
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.linear_cross_entropy import config, kernel, reference
from ridgeline.kernels.rows import cdiv, float_reason

REDUCTIONS = ("mean", "sum")
SCALED_AT_ONCE = 4096
_SCALED = Kernel(kernel.scaled_unless_one, vectors=("size",), loose=("factor_ptr",))
_plans = Plans()


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """``cross_entropy(linear(input, weight), target)`` without ever holding all logits.

    ``input`` is ``[…, H]``, ``weight`` ``[C, H]``, ``target`` ``[…]``. Where a gradient is needed it is computed with
    the loss, chunk by chunk; the backward pass only scales it.
    """
    if reduction not in REDUCTIONS:
        raise KernelError(f"linear_cross_entropy: reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    recorded = torch.is_grad_enabled()
    input, weight = narrowed(input, weight)
    x = input.reshape(-1, input.shape[-1])
    flat = target.reshape(-1)
    want = recorded and x.requires_grad, recorded and weight.requires_grad
    wide = widens(x)
    return LINEAR_CROSS_ENTROPY(x, weight, flat, ignore_index, label_smoothing, z_loss, reduction, *want, wide)


def _forward(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_weight: float, reduction: str,
    want_x: bool, want_w: bool, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not launchable(x):
        args = (x, weight, target, ignore_index, smoothing, z_weight, reduction, want_x, want_w, wide)
        return LINEAR_CROSS_ENTROPY.on_host(*args)
    LINEAR_CROSS_ENTROPY.check(x, weight, target)
    rows, cols = x.shape[0], weight.shape[0]
    sizes = {"rows": rows, "cols": cols, "dtype": x.dtype}
    step = tuning.choose("linear_cross_entropy", sizes, config.default(rows, cols, x.element_size())).rows
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    counted = _counted(target, ignore_index, reduction)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_x else x.new_empty(0)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if want_w else weight.new_empty(0)
    if want_w and not rows:
        dw.zero_()
    parts, width = _parts(x, cols, smoothing)
    buffer = x.new_empty((min(step, rows), width))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        logits = buffer[: part.stop - start]
        for at in parts:
            torch.mm(x[part], weight[at].t(), out=logits[:, at])
        if width > cols:
            logits[:, cols:] = -torch.inf  # what is beside the classes counts nothing, and has no gradient
        lse = row_losses(logits, target[part], losses[part], ignore_index, smoothing, z_weight)
        if want_x or want_w:
            write_gradient(one, logits, target[part], lse, counted, logits, ignore_index, smoothing, z_weight)
        for at in parts:
            if want_x:
                _add(dx[part], logits[:, at], weight[at], at.start == 0)
            if want_w:
                _add(dw[at], logits[:, at].t(), x[part], start == 0)
    loss = losses.sum() / counted
    return (loss if wide else loss.to(x.dtype)), dx, dw


def _add(to: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``a @ b`` into ``to``, or added to it."""
    if first:
        torch.mm(a, b, out=to)
    else:
        torch.addmm(to, a, b, out=to)


def _parts(x: Tensor, cols: int, smoothing: float) -> tuple[list[slice], int]:
    """Classes whose products are made at once, and columns of a row of logits, which start on 16 bytes.

    Products of an odd number of 16-bit columns take cuBLAS eight times as long as of whole tiles, so the last classes
    are products of their own. Smoothed labels count every column, so that there may be none beside the classes.
    """
    whole = cols // config.TILE * config.TILE
    if x.element_size() != 2 or cols % config.ALIGNED == 0 or smoothing or not whole:
        return [slice(0, cols)], cols
    return [slice(0, whole), slice(whole, cols)], cdiv(cols, config.ALIGNED) * config.ALIGNED


def _counted(target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """What losses are divided by: the rows that are not ignored, or one."""
    if reduction == "sum":
        return torch.ones((), dtype=torch.float32, device=target.device)
    return (target != ignore_index).sum(dtype=torch.float32)


def _infer(*args: Any) -> Tensor:
    return _forward(*args)[0]


def _fake(x: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_x, want_w, wide = (*rest, False)[4:7]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want_x else x.new_empty(0)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if want_w else weight.new_empty(0)
    return x.new_empty((), dtype=torch.float32 if wide else x.dtype), dx, dw


def _support(x: Tensor, weight: Tensor, target: Tensor, *_: Any) -> str | None:
    if x.dim() != 2 or weight.dim() != 2 or target.shape != x.shape[:1] or weight.shape[1] != x.shape[1]:
        shapes = f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        return f"input, weight and target {shapes} are not [N, H], [C, H] and [N]"
    if x.dtype != weight.dtype:
        return f"input is {x.dtype} and weight {weight.dtype}: matrix units multiply one type"
    if target.dtype not in (torch.int64, torch.int32) or not target.is_contiguous():
        return "targets are not contiguous int64 or int32"
    return float_reason(x=x, weight=weight)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **options: Any) -> dict[str, float]:
    """One product for the loss and one for each gradient; the logits pass through memory four times."""
    x, weight = inputs[0], inputs[1]
    (rows, hidden), cols = x.shape, weight.shape[0]
    products = 1 + bool(options.get("want_x")) + bool(options.get("want_w"))
    matrix = 2.0 * rows * hidden * cols * products
    logits = float(rows * cols * x.num_bytes / max(1, rows * hidden))
    moved = sum(t.num_bytes for t in (*inputs, *outputs))
    return {
        "flops": matrix + 10.0 * rows * cols,
        "matrix_flops": matrix,
        "read_bytes": moved + logits * (products + (products > 1)),
        "written_bytes": sum(t.num_bytes for t in outputs) + logits * (1 + (products > 1)),
    }


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.want, ctx.num = inputs[7:9], len(inputs)
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _grads(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * ctx.num
    dx, dw = ctx.saved_tensors
    want_x, want_w = ctx.want
    scaled = _scaled if _asked_once() else Tensor.mul
    none = (None,) * (ctx.num - 2)
    return (scaled(dx, grad) if want_x else None), (scaled(dw, grad) if want_w else None), *none


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times a number on the device, in its place; untouched where that is one."""
    plain = type(x) is Tensor and type(factor) is Tensor and factor.device == x.device and x.is_contiguous()
    if not plain or not launchable(x) or not x.numel():
        return x.mul_(factor)
    size = x.numel()
    key = (size, x.dtype, factor.dtype, x.get_device())
    run = _plans.get(key)
    if run is None:
        run = _plans[key] = _SCALED.bind(
            (x, factor, size),
            grid=(min(cdiv(size, SCALED_AT_ONCE), 16 * num_sms(x.get_device())),),
            constants={"BLOCK": SCALED_AT_ONCE},
            num_warps=4,
            device=x.get_device(),
            vector=vector_of(x.element_size(), x.data_ptr(), size),
        )
    run(x, factor, size)
    return x


def _asked_once() -> bool:
    """Whether this gradient is never asked for again, so that it may be scaled in its place: the graph is not kept.

    A second copy of the weight's gradient would be most of what the backward pass takes.
    """
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    plain = not torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()
    return plain and kept is not None and not kept()


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    rows, cols, hidden = of["rows"], of["cols"], of["hidden"]
    x = torch.randn(rows, hidden, device=on, dtype=torch.float32, generator=generator).to(dtype)
    weight = (torch.randn(cols, hidden, device=on, dtype=torch.float32, generator=generator) / hidden**0.5).to(dtype)
    target = torch.randint(0, cols, (rows,), device=on, generator=generator)
    if rows > 2:
        target[:: max(2, rows // 5)] = -100
    return x, weight, target


LINEAR_CROSS_ENTROPY = declare(
    name="linear_cross_entropy",
    summary="cross-entropy of a linear layer that never holds all its logits",
    schema="(Tensor x, Tensor weight, Tensor target, int ignore_index, float smoothing, float z_weight, str reduction,"
    " bool want_x, bool want_w, bool wide=False) -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=linear_cross_entropy,
        eager=reference.eager,
        reference=reference.linear_cross_entropy,
        mistakes={"last chunk lost": reference.last_chunk_lost},
        checks=tuple(
            case(dtype, rows=rows, cols=cols, hidden=hidden)
            for dtype in DTYPES
            for rows, cols, hidden in ((7, 33, 16), (300, 1000, 64), (1030, 5000, 128))
        ),
        races=(
            case("bfloat16", rows=8192, cols=32000, hidden=4096),
            case("bfloat16", rows=16384, cols=128256, hidden=4096),
        ),
        phases=("step",),
        layouts=False,
    ),
)  # fmt: skip
