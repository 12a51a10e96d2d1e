"""Rotary position embedding of queries and keys, forward and backward, in either layout of pairs and of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, is_widest, launchable, vector_of
from ridgeline.kernels.rope import config, kernel, reference
from ridgeline.kernels.rope.tables import rope_tables
from ridgeline.kernels.rows import float_reason, power_of_two

_STRIDES = ("q_batch q_seq q_head k_batch k_seq k_head qo_batch qo_seq qo_head ko_batch ko_seq ko_head"
            " cos_batch cos_seq half").split()  # fmt: skip
_ROTATE, _PIECES = (Kernel(form, vectors=_STRIDES) for form in (kernel.rope_rotate, kernel.rope_pieces))
_plans = Plans()


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, sequence_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: ``[B, H, S, D]``, or ``[B, S, H, D]`` with ``sequence_dim=1``.

    ``cos`` and ``sin`` are ``[S, W]`` or ``[B, S, W]`` where W is half the rotated dims, or all of them with the second
    half repeating the first. Dims past the rotated ones are copied. ``interleaved`` pairs neighbors (GPT-J) instead of
    halves (GPT-NeoX, Llama). ``rope_tables`` makes the tables for the common scalings.
    """
    return ROPE(q, k, cos, sin, interleaved, sequence_dim % 4)


def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int
) -> tuple[Tensor, Tensor]:
    if not launchable(q):
        return ROPE.on_host(q, k, cos, sin, interleaved, sequence_dim)
    return _run(q, k, cos, sin, interleaved, sequence_dim, backward=False)


def _backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int
) -> tuple[Tensor, Tensor]:
    if not launchable(dq):
        return ROPE_BACKWARD.on_host(dq, dk, cos, sin, interleaved, sequence_dim)
    return _run(dq, dk, cos, sin, interleaved, sequence_dim, backward=True)


def _run(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int, backward: bool
) -> tuple[Tensor, Tensor]:
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    key = (
        q.dtype, k.dtype, cos.dtype, sin.dtype, q.shape, k.shape, cos.shape, sin.shape, q.stride(), k.stride(),
        interleaved, sequence_dim, backward, q.get_device(),
        (q.data_ptr() | k.data_ptr() | cos.data_ptr() | sin.data_ptr()) & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(q, k, cos, sin, q_out, k_out, interleaved, sequence_dim, backward)
    run, numbers = plan
    run(q, k, cos, sin, q_out, k_out, *numbers)
    return q_out, k_out


def _plan(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, interleaved: bool, sequence_dim: int,
    backward: bool,
) -> tuple[Any, tuple[int, ...]]:  # fmt: skip
    ROPE.check(q, k, cos, sin, interleaved, sequence_dim)
    heads_dim = 3 - sequence_dim
    batch, seq, dim = q.shape[0], q.shape[sequence_dim], q.shape[-1]
    half = _half(q, cos)
    strides = [t.stride(d) for t in (q, k, q_out, k_out) for d in (0, sequence_dim, heads_dim)]
    cos_strides = [cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2)]
    numbers = (seq, q.shape[heads_dim], k.shape[heads_dim], half, dim - 2 * half, *strides, *cos_strides)
    pointers = q.data_ptr() | k.data_ptr() | cos.data_ptr() | sin.data_ptr()
    vector = vector_of(q.element_size(), pointers, *strides, *cos_strides, half)
    heads, keys = q.shape[heads_dim], k.shape[heads_dim]
    whole = not interleaved and dim == 2 * half and is_widest(vector, q.element_size())
    default = config.default(heads, dim, keys, vector if whole else 1)
    chosen = tuning.choose("rope", {"heads": heads, "dim": dim}, default)
    if chosen.pieces and whole:
        run = _PIECES.bind(
            (q, k, cos, sin, q_out, k_out, *numbers),
            grid=(batch * seq,),
            constants={"BACKWARD": backward, "PIECES": power_of_two((heads + keys) * half // vector), "VECTOR": vector},
            num_warps=chosen.num_warps,
            device=q.get_device(),
            vector=vector,
        )
        return run, numbers
    run = _ROTATE.bind(
        (q, k, cos, sin, q_out, k_out, *numbers),
        grid=(batch * seq,),
        constants={
            "BACKWARD": backward, "INTERLEAVED": interleaved, "HAS_K": k.numel() > 0,
            "Q_HEADS": power_of_two(q.shape[heads_dim]), "K_HEADS": power_of_two(k.shape[heads_dim]),
            "HALF": power_of_two(half), "TAIL": power_of_two(dim - 2 * half) if dim > 2 * half else 0,
        },
        num_warps=chosen.num_warps,
        device=q.get_device(),
        vector=vector,
    )  # fmt: skip
    return run, numbers


def _half(q: Tensor, cos: Tensor) -> int:
    """Pairs that are rotated: a table as wide as the head holds both halves."""
    return min(cos.shape[-1], q.shape[-1] // 2)


def _support(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, sequence_dim: int = 2
) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or sequence_dim not in (1, 2):
        return "q and k are [B, H, S, D], or [B, S, H, D] with sequence_dim=1"
    same = (0, sequence_dim, 3)
    if any(q.shape[d] != k.shape[d] for d in same) or q.dtype != k.dtype:
        return f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch, length, head dim or type"
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-2] != q.shape[sequence_dim]:
        shapes = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        return f"{shapes} are not [S, W] or [B, S, W] with S {q.shape[sequence_dim]}"
    if cos.dim() == 3 and cos.shape[0] not in (1, q.shape[0]):
        return f"cos has {cos.shape[0]} batches, q has {q.shape[0]}"
    if cos.shape[-1] > q.shape[-1] // 2 and cos.shape[-1] != q.shape[-1]:
        return f"a table {cos.shape[-1]} wide fits no head dim of {q.shape[-1]}: it has half the rotated dims, or all"
    return float_reason(q=q, k=k, cos=cos, sin=sin)


def _fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.sequence_dim = inputs
    ctx.save_for_backward(cos, sin)


def _grads(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return *ROPE_BACKWARD(dq, dk, cos, sin, ctx.interleaved, ctx.sequence_dim), None, None, None, None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    batch, seq, heads, keys, dim = (of[name] for name in ("batch", "seq", "heads", "keys", "dim"))

    def drawn(num: int) -> Tensor:  # as a projection leaves them: positions before heads in memory
        x = torch.randn(batch, seq, num, dim, device=on, dtype=torch.float32, generator=generator)
        return x.to(dtype).transpose(1, 2)

    cos, sin = rope_tables(torch.arange(seq, device=on).unsqueeze(0), dim)
    tables = tuple(torch.cat((t, t), -1).to(dtype).detach() for t in (cos, sin))
    return drawn(heads), drawn(keys), *tables


def _problem(dtype: str, batch: int, seq: int, heads: int, keys: int, dim: int) -> Case:
    return case(dtype, batch=batch, seq=seq, heads=heads, keys=keys, dim=dim)


ROPE_BACKWARD = declare(
    name="rope_backward",
    repeats=True,
    keyed=True,
    summary="gradient of rope: the rotation back",
    schema="(Tensor dq, Tensor dk, Tensor cos, Tensor sin, bool interleaved, int sequence_dim) -> (Tensor, Tensor)",
    forward=_backward,
    fake=_fake,
    reference=reference.backward,
    support=_support,
    cost=elementwise_cost(3.0),
    num_results=2,
)
ROPE = declare(
    name="rope",
    repeats=True,
    keyed=True,
    summary="rotary position embedding of queries and keys",
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, int sequence_dim) -> (Tensor, Tensor)",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(3.0),
    num_results=2,
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=rope,
        eager=reference.eager,
        reference=lambda q, k, cos, sin: reference.forward(q, k, cos, sin, False, 2),
        mistakes={"interleaved pairs": reference.interleaved_pairs, "shifted": reference.shifted},
        checks=tuple(
            _problem(dtype, *sizes)
            for dtype in DTYPES
            for sizes in ((1, 2, 1, 1, 8), (2, 5, 3, 1, 64), (2, 33, 32, 8, 128), (1, 17, 7, 7, 80), (1, 9, 64, 8, 256))
        ),
        races=(
            _problem("bfloat16", 4, 4096, 32, 8, 128), _problem("bfloat16", 2, 8192, 64, 8, 128),
            _problem("bfloat16", 8, 2048, 32, 32, 64), _problem("float32", 2, 4096, 32, 8, 128),
        ),
        small=(_problem("bfloat16", 1, 1, 32, 8, 128), _problem("bfloat16", 16, 1, 32, 8, 128)),
        constants=(2, 3),
        backward_bytes=lambda args: 2 * (args[0].nbytes + args[1].nbytes) + 2 * args[2].nbytes,
    ),
)  # fmt: skip
