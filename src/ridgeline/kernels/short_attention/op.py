"""``short_attention``: attention of up to 128 keys with a bias on its scores that repeats through the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv, power_of_two
from ridgeline.kernels.short_attention import config, kernel, reference

_STEPS = ("q_b", "q_h", "q_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n")
_FORWARD = Kernel(kernel.short_attention_forward, vectors=("d", *_STEPS), loose=("bias_ptr",))
_plans = Plans()
NARROW = (torch.bfloat16, torch.float16)
VECTOR, MOST_KEYS, MOST_DIM = 8, 128, 128
MOST_GROUPS = 65535 * config.MOST_CHUNK
"""Batch elements of one bias: a grid has no more programs along its second side."""


def short_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``softmax(q @ kᵀ · scale + bias) @ v`` of 16-bit numbers, without gradients, for at most 128 keys.

    q, k and v are [batch, heads, rows, dim]; bias is [period, heads, rows, keys], and batch element b has that of b mod
    period. The result lies as [batch, rows, heads, dim].
    """
    return SHORT_ATTENTION(q, k, v, bias, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    if not launchable(q):
        return SHORT_ATTENTION.on_host(q, k, v, bias, scale)
    batch, heads, n, d = q.shape
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    numbers = (batch, bias.shape[0], heads, n, k.shape[2], d, scale, *steps)
    kinds = tuple((each.dtype, each.shape) for each in (q, k, v, bias))
    steps_of_one = (q.stride(3), k.stride(3), v.stride(3), bias.stride())
    key = (*numbers, kinds, *steps_of_one, q.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15)
    run = _plans.get(key)
    if run is None:
        SHORT_ATTENTION.check(q, k, v, bias, scale)
        run = _plans[key] = _plan(q, k, v, bias, numbers)
    out = q.new_empty((batch, n, heads, d))
    run(q, k, v, bias, out, *numbers)
    return out.transpose(1, 2)


def _plan(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, numbers: tuple[Any, ...]) -> Any:
    batch, period, heads, n, m, d = numbers[:6]
    groups = batch // period
    chosen = tuning.choose(
        "short_attention", {"rows": n, "keys": m}, config.default(n, m, period * heads, groups)
    )  # fmt: skip
    return _FORWARD.bind(
        (q, k, v, bias, q, *numbers),
        grid=(period * heads * cdiv(n, chosen.rows), cdiv(groups, chosen.chunk)),
        constants={
            "BM": chosen.rows, "BN": max(16, power_of_two(m)), "BD": max(16, power_of_two(d)), "CHUNK": chosen.chunk,
        },
        num_warps=chosen.num_warps,
        num_stages=2,
        device=q.get_device(),
        vector=VECTOR,
    )  # fmt: skip


def _support(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> str | None:
    if q.dtype not in NARROW or any(t.dtype != q.dtype for t in (k, v)) or not bias.is_floating_point():
        return "q, k and v are not of one 16-bit type, or the bias is no number"
    if any(t.dim() != 4 for t in (q, k, v, bias)) or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        return "q, k, v and bias are [batch, heads, rows, ...], k and v alike"
    batch, heads, n, d = q.shape
    if k.shape[3] != d or bias.shape[1:] != (heads, n, k.shape[2]) or batch % max(1, bias.shape[0]):
        return f"a bias of {tuple(bias.shape)} for queries {tuple(q.shape)} and keys {tuple(k.shape)}"
    if k.shape[2] > MOST_KEYS or d > MOST_DIM or d % VECTOR or min(q.numel(), k.numel(), bias.numel()) == 0:
        return f"more than {MOST_KEYS} keys or {MOST_DIM} dims, dims no multiple of {VECTOR}, or nothing at all"
    if batch // bias.shape[0] > MOST_GROUPS:
        return f"more than {MOST_GROUPS} batch elements with one bias"
    return _layout_reason(q, k, v, bias)


def _layout_reason(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> str | None:
    if not bias.is_contiguous():
        return "the bias does not lie dense"
    for tensor in (q, k, v):
        steps = tensor.stride()
        if steps[3] != 1 or any(step % VECTOR for step in steps[:3]) or min(steps) < 0:
            return "rows do not lie dense from multiples of 16 bytes"
        if not tensor.is_meta and tensor.data_ptr() % 16:
            return "rows do not begin at 16 bytes"
        if sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True)) >= 2**31:
            return "2³¹ elements or more"
    return None


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Two products for every key and row; every tensor moved once."""
    flops = 4.0 * inputs[0].numel * inputs[1].shape[2]
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    batch, heads, n, d = of["b"], of["h"], of["n"], of["d"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator).to(dtype)

    q, k, v = draw(batch, n, 3, heads, d).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v, draw(of.get("period", 1), heads, n, n), d**-0.5


SMALL = (
    case("float16", b=6, h=2, n=21, d=16, period=3),
    case("float16", b=3, h=1, n=33, d=8),
)
CHECKS = (
    *SMALL,
    case("bfloat16", b=128, h=4, n=49, d=32, period=64),
    case("bfloat16", b=20, h=3, n=49, d=32),
    case("bfloat16", b=4, h=12, n=100, d=64),
    case("float16", b=6, h=2, n=121, d=40, period=6),
    case("bfloat16", b=5, h=2, n=128, d=128, period=5),
)
RACES = (
    case("bfloat16", b=2048, h=4, n=49, d=32, period=64),
    case("bfloat16", b=512, h=8, n=49, d=32),
    case("bfloat16", b=128, h=16, n=49, d=32, period=4),
    case("bfloat16", b=64, h=12, n=128, d=64),
)

SHORT_ATTENTION = declare(
    name="short_attention",
    summary="attention of at most 128 keys with a bias that repeats through the batch",
    schema="(Tensor q, Tensor k, Tensor v, Tensor bias, float scale) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda q, k, v, bias, scale: q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=short_attention,
        eager=reference.forward,
        reference=reference.forward,
        raced=reference.library,
        mistakes={"bias lost": reference.unbiased},
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=tuple(range(4)),
        layouts=False,
    ),
)
