"""RMSNorm of query and key heads and rotary embedding as one pass, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.qk_norm_rope import config, kernel, reference
from ridgeline.kernels.rms_norm.op import plan_reduce
from ridgeline.kernels.rope.op import ROPE
from ridgeline.kernels.rope.tables import rope_tables
from ridgeline.kernels.rows import cdiv, float_reason, template
from ridgeline.kernels.split_rows import registers_of

_STRIDES = tuple("q_batch q_seq q_head k_batch k_seq k_head cos_batch cos_seq".split())
_GRADIENTS = tuple("dq_batch dq_seq dq_head dk_batch dk_seq dk_head".split())
_FORWARD = Kernel(kernel.qk_norm_rope_forward, vectors=_STRIDES)
_BACKWARD = Kernel(kernel.qk_norm_rope_backward, vectors=_STRIDES + _GRADIENTS)
_forward_plans, _backward_plans = Plans(), Plans()


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    sequence_dim: int = 2,
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the head dim of queries and keys, then the rotary embedding in halves, read and written once.

    ``q`` and ``k`` are ``[B, H, S, D]``, or ``[B, S, H, D]`` with ``sequence_dim=1``; ``cos`` and ``sin`` as for
    ``rope``, over the whole head dim. Results lie position by position in memory, as attention kernels like them.
    """
    return QK_NORM_ROPE(q, k, q_weight, k_weight, cos, sin, eps, offset, sequence_dim % 4)


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    sequence_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not launchable(q):
        return QK_NORM_ROPE.on_host(q, k, q_weight, k_weight, cos, sin, eps, offset, sequence_dim)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    key = (q.shape, k.shape, q.stride(), k.stride(), q_weight.shape, k_weight.shape, cos.shape, sin.shape, q.dtype,
           k.dtype, q_weight.dtype, k_weight.dtype, cos.dtype, sin.dtype, sequence_dim, q.get_device(),
           _pointers(q, k, q_weight, k_weight, cos, sin) & 15)  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        plan = _forward_plans[key] = _plan_forward(q, k, q_weight, k_weight, cos, sin, sequence_dim)
    run, like_rstd, numbers = plan
    q_out, k_out = _position_major(q, sequence_dim), _position_major(k, sequence_dim)
    rstd = torch.empty_like(like_rstd, memory_format=torch.contiguous_format)
    run(q, k, q_weight, k_weight, cos, sin, q_out, k_out, rstd, *numbers, eps, offset)
    return q_out, k_out, rstd


def _pointers(*tensors: Tensor) -> int:
    found = 0
    for tensor in tensors:
        found |= tensor.data_ptr()
    return found


def _position_major(x: Tensor, sequence_dim: int) -> Tensor:
    """A tensor of the shape of ``x`` that lies as [B, S, heads, D] in memory."""
    if sequence_dim == 1:
        return x.new_empty(x.shape)
    batch, heads, seq, dim = x.shape
    return x.new_empty((batch, seq, heads, dim)).transpose(1, 2)


def _numbers(q: Tensor, k: Tensor, cos: Tensor, sequence_dim: int, *others: Tensor) -> tuple[int, ...]:
    heads = 3 - sequence_dim
    dims = (0, sequence_dim, heads)
    strides = [t.stride(d) for t in (*others, q, k) for d in dims]
    tables = [cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2)]
    seq = q.shape[sequence_dim]
    return q.shape[0] * seq, seq, q.shape[heads], k.shape[heads], *strides, *tables


def _plan_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, sequence_dim: int
) -> tuple[Any, ...]:
    QK_NORM_ROPE.check(q, k, q_weight, k_weight, cos, sin, 0.0, 0.0, sequence_dim)
    heads = 3 - sequence_dim
    numbers = _numbers(q, k, cos, sequence_dim)
    rstd = template((q.shape[0], numbers[1], numbers[2] + numbers[3]), torch.float32, q.device)
    sizes = {"heads": numbers[2], "dim": q.shape[-1]}
    chosen = tuning.choose("qk_norm_rope.forward", sizes, config.forward(q.shape[-1]))
    tiles = sum(cdiv(numbers[0] * t.shape[heads], chosen.rows) for t in (q, k))
    run = _FORWARD.bind(
        (q, k, q_weight, k_weight, cos, sin, q, k, rstd, *numbers, 0.0, 0.0),
        grid=(tiles,),
        constants={"Q_HEADS": q.shape[heads], "K_HEADS": k.shape[heads], "HALF": q.shape[-1] // 2, "ROWS": chosen.rows,
                   "SAVE": True},
        num_warps=chosen.num_warps,
        device=q.get_device(),
        vector=vector_of(q.element_size(), _pointers(q, k, q_weight, k_weight, cos, sin), *numbers[4:]),
    )  # fmt: skip
    return run, rstd, numbers


def _backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, offset: float, sequence_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not launchable(q):
        args = (dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, offset, sequence_dim)
        return QK_NORM_ROPE_BACKWARD.on_host(*args)
    q, k, dq, dk = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, dq, dk))
    cos, sin = cos.contiguous(), sin.contiguous()
    key = (q.shape, k.shape, dq.shape, dk.shape, q.stride(), k.stride(), dq.stride(), dk.stride(), q_weight.shape,
           k_weight.shape, cos.shape, q.dtype, k.dtype, dq.dtype, dk.dtype, q_weight.dtype, k_weight.dtype, cos.dtype,
           sin.dtype, sequence_dim, q.get_device(),
           _pointers(dq, dk, q, k, q_weight, k_weight, cos, sin) & 15)  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _plan_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, sequence_dim)
    run, reduce, like_shares, programs, numbers = plan
    q_grad, k_grad = _position_major(q, sequence_dim), _position_major(k, sequence_dim)
    q_dw, k_dw = torch.empty_like(q_weight), torch.empty_like(k_weight)
    shares = torch.empty_like(like_shares, memory_format=torch.contiguous_format)
    run(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, q_grad, k_grad, shares, *numbers, offset)
    reduce(shares, q_dw, k_dw, programs, q.shape[-1])
    return q_grad, k_grad, q_dw, k_dw


def _plan_backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    rstd: Tensor, sequence_dim: int,
) -> tuple[Any, ...]:  # fmt: skip
    QK_NORM_ROPE.check(q, k, q_weight, k_weight, cos, sin, 0.0, 0.0, sequence_dim)
    heads, dim, on = 3 - sequence_dim, q.shape[-1], q.get_device()
    numbers = _numbers(q, k, cos, sequence_dim, dq, dk)
    sizes = {"heads": numbers[2], "dim": dim}
    chosen = tuning.choose("qk_norm_rope.backward", sizes, config.backward(dim))
    tiles = cdiv(numbers[0] * max(numbers[2:4]), chosen.rows)
    programs = max(1, min(tiles, chosen.programs_per_sm * num_sms(on)))
    shares = template((2, programs, dim), torch.float32, q.device)
    run = _BACKWARD.bind(
        (dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, q, k, shares, *numbers, 0.0),
        grid=(programs,),
        constants={"Q_HEADS": q.shape[heads], "K_HEADS": k.shape[heads], "HALF": dim // 2, "ROWS": chosen.rows},
        num_warps=chosen.num_warps,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=on,
        vector=vector_of(q.element_size(), _pointers(dq, dk, q, k, q_weight, k_weight, cos, sin), *numbers[4:]),
    )
    return run, plan_reduce(shares, q_weight, programs, dim, on, second=k_weight), shares, programs, numbers


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    sequence_dim = rest[-1]
    heads = 3 - sequence_dim
    rstd = q.new_empty((q.shape[0], q.shape[sequence_dim], q.shape[heads] + k.shape[heads]), dtype=torch.float32)
    return _position_major(q, sequence_dim), _position_major(k, sequence_dim), rstd


def _backward_fake(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sequence_dim = rest[-1]
    grads = _position_major(q, sequence_dim), _position_major(k, sequence_dim)
    return *grads, torch.empty_like(q_weight), torch.empty_like(k_weight)


def _support(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *rest: Any
) -> str | None:
    reason = ROPE.support(q, k, cos, sin, False, rest[-1] if rest else 2)
    if reason is not None:
        return reason
    dim = q.shape[-1]
    if dim & (dim - 1) or cos.shape[-1] not in (dim // 2, dim):
        return f"head dim {dim} must be a power of two, and all of it rotated"
    if q_weight.shape != (dim,) or k_weight.shape != (dim,):
        return f"weights have shapes {tuple(q_weight.shape)} and {tuple(k_weight.shape)}, the head dim is {dim}"
    return float_reason(q_weight=q_weight, k_weight=k_weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.offset, ctx.sequence_dim = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])


def _grads(ctx: Any, dq: Tensor, dk: Tensor, *_: Any) -> tuple[Any, ...]:
    found = QK_NORM_ROPE_BACKWARD(dq, dk, *ctx.saved_tensors, ctx.offset, ctx.sequence_dim)
    return *found, None, None, None, None, None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    batch, seq, heads, keys, dim = (of[name] for name in ("batch", "seq", "heads", "keys", "dim"))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    q, k = (drawn(batch, seq, num, dim).to(dtype).transpose(1, 2) for num in (heads, keys))
    weights = tuple((1 + 0.3 * drawn(dim)).to(dtype) for _ in range(2))
    cos, sin = rope_tables(torch.arange(seq, device=on).unsqueeze(0), dim)
    return q, k, *weights, *(torch.cat((t, t), -1).to(dtype) for t in (cos, sin))


def _problem(dtype: str, batch: int, seq: int, heads: int, keys: int, dim: int) -> Case:
    return case(dtype, batch=batch, seq=seq, heads=heads, keys=keys, dim=dim)


QK_NORM_ROPE_BACKWARD = declare(
    name="qk_norm_rope_backward",
    repeats=True,
    keyed=True,
    summary="gradients of qk_norm_rope",
    schema="(Tensor dq, Tensor dk, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " Tensor rstd, float offset, int sequence_dim) -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    reference=reference.backward,
    support=lambda dq, dk, q, k, qw, kw, cos, sin, rstd, offset, dim: _support(q, k, qw, kw, cos, sin, dim),
    cost=elementwise_cost(16.0),
    num_results=4,
)
QK_NORM_ROPE = declare(
    name="qk_norm_rope",
    repeats=True,
    keyed=True,
    summary="RMSNorm of query and key heads and their rotary embedding",
    schema="(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, float offset,"
    " int sequence_dim) -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(9.0),
    num_results=2,
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=qk_norm_rope,
        eager=reference.eager,
        reference=reference.qk_norm_rope,
        mistakes={"weights swapped": reference.weights_swapped},
        checks=tuple(
            _problem(dtype, *sizes)
            for dtype in DTYPES
            for sizes in ((1, 2, 1, 1, 8), (2, 5, 3, 1, 64), (2, 33, 32, 8, 128), (1, 9, 16, 8, 256))
        ),
        races=(_problem("bfloat16", 4, 4096, 32, 8, 128), _problem("bfloat16", 2, 8192, 64, 8, 128)),
        small=(_problem("bfloat16", 1, 1, 32, 8, 128),),
        constants=(4, 5),
        backward_bytes=lambda args: 3 * (args[0].nbytes + args[1].nbytes),
    ),
)
