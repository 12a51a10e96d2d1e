"""Scaled dot-product attention with its gradient: causal or full, grouped heads, head dims to 128, deterministic."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.attention import config, reference
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import INTERPRETING, num_sms
from ridgeline.kernels.rows import cdiv

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 128
ALIGNMENT_BYTES = 16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    lower_right: bool = False,
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value over [batch, heads, rows, head dim], as PyTorch's function of that name.

    Key heads may be fewer than query heads (grouped or multi-query attention). ``is_causal`` hides keys behind a row's
    own position, counted from the first key as PyTorch does, or, with ``lower_right``, so that the last row sees the
    last key, which is what decoding with a cache wants.
    """
    shift = key.shape[-2] - query.shape[-2] if lower_right else 0
    return ATTENTION(query, key, value, is_causal, query.shape[-1] ** -0.5 if scale is None else scale, shift)


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int) -> tuple[Tensor, Tensor]:
    if not _on_device(q):
        return ATTENTION.on_host(q, k, v, is_causal, scale, shift)  # type: ignore[return-value]
    ATTENTION.check(q, k, v, is_causal, scale, shift)
    q, k, v = _reachable(q), _reachable(k), _reachable(v)
    batch, heads, rows, dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if k.shape[2] == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    from ridgeline.kernels.attention import kernel

    chosen, wide = config.FORWARD, config.padded(dim)
    tiles = config.num_tiles(rows, batch * heads, chosen.rows)
    kernel.forward[(config.programs(tiles, num_sms(q.get_device())),)](
        _blocks(q, chosen.rows // 2), _blocks(k, chosen.keys), _blocks(v, chosen.keys), o, lse,
        batch, heads, k.shape[1], rows, k.shape[2], shift, dim, _together(q, k), scale * LOG2_E,
        BM=chosen.rows, BN=chosen.keys, D=wide, STAGES=chosen.stages, CAUSAL=is_causal, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not _on_device(q):
        return ATTENTION_BACKWARD.on_host(do, q, k, v, o, lse, is_causal, scale, shift)  # type: ignore[return-value]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), torch.zeros_like(k), torch.zeros_like(v)
    do, q, k, v = (_reachable(x) for x in (do, q, k, v))
    delta, lse2, padded = _prepared(do, o, lse)
    rest = (is_causal, scale, shift)
    _query_gradients(dq, do, q, k, v, delta, lse2, padded, *rest)
    dk, dv = _key_gradients(do, q, k, v, delta, lse2, padded, *rest)
    return dq, dk, dv


def _prepared(do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, int]:
    """Row sums of o · do and the log-sum-exp in base 2, rows padded to whole blocks."""
    from ridgeline.kernels.attention import kernel

    batch, heads, rows, dim = o.shape
    block = config.KEYS.rows
    padded = cdiv(rows, block) * block
    delta, lse2 = (torch.empty(batch * heads * padded, dtype=torch.float32, device=o.device) for _ in range(2))
    kernel.prepare[(padded // block, batch * heads)](
        o, do, lse, delta, lse2, *do.stride()[:3], heads, rows, padded, dim, D=config.padded(dim), ROWS=block
    )
    return delta, lse2, padded


def _query_gradients(
    dq: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse2: Tensor, padded: int,
    is_causal: bool, scale: float, shift: int,
) -> None:  # fmt: skip
    from ridgeline.kernels.attention import kernel

    batch, heads, rows, dim = q.shape
    chosen = config.QUERIES
    tiles = config.num_tiles(rows, batch * heads, chosen.rows)
    kernel.backward_queries[(config.programs(tiles, num_sms(q.get_device())),)](
        _blocks(q, chosen.rows // 2), _blocks(do, chosen.rows // 2), _blocks(k, chosen.keys), _blocks(v, chosen.keys),
        dq, lse2, delta, padded, batch, heads, k.shape[1], rows, k.shape[2], shift, dim, _together(q, k),
        scale * LOG2_E, scale, BM=chosen.rows, BN=chosen.keys, D=config.padded(dim), STAGES=chosen.stages,
        CAUSAL=is_causal, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _key_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse2: Tensor, padded: int,
    is_causal: bool, scale: float, shift: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from ridgeline.kernels.attention import kernel

    batch, heads, rows, dim = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    chosen, sms = config.KEYS, num_sms(q.get_device())
    blocks = config.num_tiles(keys, batch * key_heads, chosen.keys)
    split = config.key_split(blocks, heads // key_heads, sms, is_causal)
    shape, kind = (batch, key_heads * split, keys, dim), torch.float32 if split > 1 else k.dtype
    dk, dv = (torch.empty(shape, dtype=kind, device=k.device) for _ in range(2))
    kernel.backward_keys[(config.programs(blocks * split, sms),)](
        _blocks(q, chosen.rows), _blocks(k, chosen.keys), _blocks(v, chosen.keys), _blocks(do, chosen.rows),
        _numbers(lse2, chosen.rows), _numbers(delta, chosen.rows), dk, dv, padded, batch, heads, key_heads, split, rows,
        keys, shift, dim, scale * LOG2_E, scale, BM=chosen.rows, BN=chosen.keys, D=config.padded(dim),
        STAGES=chosen.stages, CAUSAL=is_causal, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return (dk, dv) if split == 1 else (_summed(dk, k, split), _summed(dv, v, split))


def _summed(parts: Tensor, like: Tensor, split: int) -> Tensor:
    from ridgeline.kernels.attention import kernel

    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    size = like.shape[2] * like.shape[3]
    kernel.sum_parts[(cdiv(out.numel(), 4096),)](parts, out, out.numel(), size, SPLIT=split, BLOCK=4096)
    return out


def _together(q: Tensor, k: Tensor) -> int:
    return config.heads_together(q.shape[0] * q.shape[1], q.shape[1] // k.shape[1], k.shape[2], q.shape[3])


def _blocks(x: Tensor, rows: int) -> Any:
    """A descriptor of [1, 1, rows, head dim] blocks of a [batch, heads, rows, head dim] tensor in any layout."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, config.padded(x.shape[3])]
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _numbers(x: Tensor, num: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [num], flat)


def _on_device(q: Tensor) -> bool:
    """These kernels run on a GPU only: Triton's interpreter does not know the instructions they are made of."""
    return q.is_cuda and not INTERPRETING


def _support(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        return "query, key and value are [batch, heads, rows, head dim], key and value of one shape"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"query {tuple(q.shape)} and key {tuple(k.shape)} differ in batch or head dim"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads"
    if q.shape[3] > MAX_HEAD_DIM or q.shape[3] % 8:
        return f"head dim is {q.shape[3]}; kernels take multiples of 8 to {MAX_HEAD_DIM}"
    if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
        return f"query, key and value are {q.dtype}, {k.dtype}, {v.dtype}; kernels take bfloat16 or float16, all alike"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        return "these kernels are made of Hopper's instructions: compute capability 9.0"
    return None


def _reachable(x: Tensor) -> Tensor:
    """The tensor as the copy engine can read it: dense rows that start on 16 bytes; a copy where they do not."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) != 1 or any(step % ALIGNMENT_BYTES or step == 0 for step in steps):
        return x.clone(memory_format=torch.contiguous_format)
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNMENT_BYTES else x


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.rest = tuple(rest)


def _grads(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if do is None:
        return None, None, None, None, None, None
    return (*ATTENTION_BACKWARD(do, *ctx.saved_tensors, *ctx.rest), None, None, None)


def _fake(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _pairs(q: Any, k: Any, is_causal: bool) -> float:
    """Products of a query row with a key, over all heads."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    return batch * heads * rows * keys * (0.5 if is_causal and rows == keys else 1.0)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    q, k = inputs[0], inputs[1]
    return {"flops": 4.0 * q.shape[3] * _pairs(q, k, bool(kwargs.get("is_causal", False)))}


def _cost_backward(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Seven products: the scores and dO · Vᵀ are computed by both kernels."""
    q, k = inputs[1], inputs[2]
    return {"flops": 14.0 * q.shape[3] * _pairs(q, k, bool(kwargs.get("is_causal", False)))}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    """Drawn as [batch, rows, heads, dim] and turned: what a projection leaves."""

    def draw(heads: int, rows: int) -> Tensor:
        x = torch.randn(of["b"], rows, heads, of["d"], device=on, dtype=torch.float32, generator=generator)
        return x.to(getattr(torch, of.dtype)).transpose(1, 2)

    q = draw(of["h"], of["l"])
    return q, draw(of["k"], of["s"]), draw(of["k"], of["s"]), of["causal"]


CHECKS = tuple(
    case(dtype, b=b, h=h, k=k, l=rows, s=keys, d=d, causal=causal)
    for dtype in ("bfloat16", "float16")
    for causal in (False, True)
    for b, h, k, rows, keys, d in (
        (1, 4, 2, 512, 512, 128), (2, 3, 3, 777, 777, 128), (1, 8, 1, 100, 1000, 128), (2, 4, 4, 640, 640, 64),
        (1, 2, 2, 1000, 100, 128), (1, 4, 2, 300, 300, 96), (1, 2, 1, 257, 129, 40), (1, 2, 2, 128, 128, 8),
        (1, 16, 2, 1, 515, 128), (1, 1, 1, 1, 1, 64),
    )
)  # fmt: skip
RACES = tuple(
    case("bfloat16", b=b, h=h, k=k, l=rows, s=rows, d=d, causal=causal)
    for causal in (True, False)
    for b, h, k, rows, d in (
        (1, 64, 8, 2048, 128), (1, 64, 8, 4096, 128), (1, 64, 8, 8192, 128), (1, 64, 8, 16384, 128), (4, 32, 32, 2048,
        128),
        (4, 32, 8, 4096, 128), (8, 16, 16, 2048, 64), (2, 16, 16, 8192, 64),
    )
)  # fmt: skip

ATTENTION_BACKWARD = declare(
    name="attention_backward",
    summary="gradients of attention, the same bits every time",
    schema="(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool is_causal, float scale, int shift)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_fake_backward,
    reference=reference.backward,
    support=lambda do, q, k, v, *rest: _support(q, k, v),
    cost=_cost_backward,
    num_results=3,
)
ATTENTION = declare(
    name="attention",
    summary="softmax(q · kᵀ · scale) · v: causal or full, grouped heads, head dims to 128",
    schema="(Tensor q, Tensor k, Tensor v, bool is_causal, float scale, int shift) -> (Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=attention,
        eager=reference.eager,
        reference=reference.public,
        mistakes={"diagonal hidden": reference.diagonal_hidden, "scale lost": reference.scale_lost},
        checks=CHECKS,
        races=RACES,
    ),
)

