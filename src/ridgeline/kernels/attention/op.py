"""Scaled dot-product attention with its gradient: bands, masks, caps and sinks, grouped heads, head dims to 256."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels.attention import reference
from ridgeline.kernels.attention.launch import Backward, Forward, arranged, on_device
from ridgeline.kernels.autocast import narrowed
from ridgeline.kernels.contract import Case, Trial, case, declare

MAX_HEAD_DIM = 256
DEFAULTS = (None, None, -1, -1, 0.0, True)
"""Of the schema's last arguments: key_mask, sinks, left, right, softcap, deterministic."""

Window = tuple[int, int]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    lower_right: bool = False,
    key_mask: Tensor | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value over [batch, heads, rows, head dim], as PyTorch's function of that name.

    Key heads may be fewer than query heads (grouped or multi-query attention), and the head dim of values another one.
    ``is_causal`` hides keys behind a row's own position, counted from the first key as PyTorch does, or, with
    ``lower_right``, so that the last row sees the last key, which is what decoding with a cache wants. ``window`` =
    (left, right) shows only so many keys before and behind that position, -1 for no limit. ``key_mask`` [batch, keys]
    is True where a key may be attended. ``softcap`` bends scores to stay between plus and minus itself; ``sinks``
    [heads] are logits that take a share of every row's probability. A row that sees no key gets zeros. Gradients are
    the same bits every time unless ``deterministic`` is given up for speed.
    """
    call = _attention if is_dynamo_compiling() else ATTENTION.quick or _attention
    found: Tensor = call(
        query, key, value, is_causal, scale, lower_right, key_mask, window, softcap, sinks, deterministic
    )  # fmt: skip
    return found


def _attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, lower_right: bool,
    key_mask: Tensor | None, window: Window | None, softcap: float, sinks: Tensor | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    query, key, value = narrowed(query, key, value)
    shift = key.shape[-2] - query.shape[-2] if lower_right else 0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window or (-1, -1)
    rest = (is_causal, scale, shift, key_mask, sinks, left, right, softcap, deterministic)
    width = value.shape[-1]
    if max(query.shape[-1], width) > MAX_HEAD_DIM:  # no kernel holds such rows: PyTorch's own ops
        return ATTENTION.composed(query, key, value, *rest)  # type: ignore[no-any-return]
    found: Tensor = ATTENTION(*_padded(query, key, value), *rest)
    return found[..., :width] if width % 8 else found


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:
    """Attention of sequences of different length that lie one after the other in [tokens, heads, head dim].

    ``cu_seqlens_q`` and ``cu_seqlens_k`` (int32, one more than there are sequences) say where each starts, the last
    where all end. Bands are aligned to the last row and key of a sequence, as flash_attn's function of this kind does.
    """
    query, key, value = narrowed(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window or (-1, -1)
    rest = (max_seqlen_q, max_seqlen_k, is_causal, scale, sinks, left, right, softcap, deterministic)
    width = value.shape[-1]
    found: Tensor = VARLEN_ATTENTION(*_padded(query, key, value), cu_seqlens_q, cu_seqlens_k, *rest)
    return found[..., :width] if width % 8 else found


def _padded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """With zeros up to the next multiple of eight columns, which is what the kernels load; they change no score."""
    if query.shape[-1] != key.shape[-1]:  # an error that the primitive tells of
        return query, key, value
    pad = torch.nn.functional.pad
    return tuple(pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (query, key, value))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int, key_mask: Tensor | None = None,
    sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attended((q, k, v, is_causal, scale, shift, key_mask, sinks, left, right, softcap, deterministic), True)


def _infer(*args: Any) -> Tensor:
    """The output alone: where no gradient is wanted, nobody reads the sums."""
    return _attended((*args, *DEFAULTS[len(args) - 6 :]), False)[0]


def _attended(args: tuple[Any, ...], sums: bool) -> tuple[Tensor, Tensor]:
    q, k, v, is_causal, scale, shift, key_mask, sinks, left, right, softcap, _ = args
    if not on_device(q):
        return ATTENTION.on_host(*args)  # type: ignore[return-value]
    of = (is_causal, left, right, scale, softcap, shift)
    return Forward.of(of, q, k, v, key_mask, sinks, None, None, lambda: ATTENTION.check(*args), sums)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float, shift: int,
    key_mask: Tensor | None = None, sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not on_device(q):
        args = (q, k, v, o, lse, is_causal, scale, shift, key_mask, sinks, left, right, softcap, deterministic)
        return ATTENTION_BACKWARD.on_host(do, *args)  # type: ignore[return-value]
    of = (is_causal, left, right, scale, softcap, shift, 0, 0, deterministic)
    return Backward.of(of, do, q, k, v, o, lse, key_mask, sinks, None, None)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int, longest_k: int,
    is_causal: bool, scale: float, sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rest = (q_starts, k_starts, longest_q, longest_k, is_causal, scale, sinks, left, right, softcap, deterministic)
    if not on_device(q):
        return VARLEN_ATTENTION.on_host(q, k, v, *rest)  # type: ignore[return-value]
    of = (is_causal, left, right, scale, softcap, 0, longest_q, longest_k)
    o, lse = Forward.of(
        of, _batched(q), _batched(k), _batched(v), None, sinks, q_starts, k_starts,
        lambda: VARLEN_ATTENTION.check(q, k, v, *rest),
    )  # fmt: skip
    return o[0].transpose(0, 1), lse[0]


def _varlen_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_starts: Tensor, k_starts: Tensor,
    longest_q: int, longest_k: int, is_causal: bool, scale: float, sinks: Tensor | None = None, left: int = -1,
    right: int = -1, softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not on_device(q):
        rest = (q_starts, k_starts, longest_q, longest_k, is_causal, scale, sinks, left, right, softcap, deterministic)
        return VARLEN_ATTENTION_BACKWARD.on_host(do, q, k, v, o, lse, *rest)  # type: ignore[return-value]
    of = (is_causal, left, right, scale, softcap, 0, longest_q, longest_k, deterministic)
    tensors = _batched(do), _batched(q), _batched(k), _batched(v), _batched(o)
    dq, dk, dv, dsinks = Backward.of(of, *tensors, lse[None], None, sinks, q_starts, k_starts)
    return (*(x[0].transpose(0, 1) for x in (dq, dk, dv)), dsinks)  # type: ignore[return-value]


def _batched(x: Tensor) -> Tensor:
    """[tokens, heads, dim] as one sequence [1, heads, tokens, dim]."""
    return x.transpose(0, 1)[None]


def _support(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float = 1.0, shift: int = 0,
    key_mask: Tensor | None = None, sinks: Tensor | None = None, left: int = -1, right: int = -1, softcap: float = 0.0,
    deterministic: bool = True,
) -> str | None:  # fmt: skip
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        return "query, key and value are [batch, heads, rows, head dim], key and value alike but for the head dim"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"query {tuple(q.shape)} and key {tuple(k.shape)} differ in batch or head dim"
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (k.shape[0], k.shape[2])):
        return (
            f"key_mask is {key_mask.dtype} {tuple(key_mask.shape)}; kernels take bool [batch, keys], "
            "one mask for all rows and heads"
        )
    return _common_reason(q, k, v, scale, sinks, softcap)


def _varlen_support(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest_q: int = 0, longest_k: int = 0,
    is_causal: bool = False, scale: float = 1.0, sinks: Tensor | None = None, left: int = -1, right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
) -> str | None:  # fmt: skip
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or v.shape[:2] != k.shape[:2] or q.shape[2] != k.shape[2]:
        return (
            "query, key and value are [tokens, heads, head dim]; query and key have one head dim, "
            "key and value one number of tokens and heads"
        )
    if {q_starts.dtype, k_starts.dtype} != {torch.int32} or q_starts.shape != k_starts.shape or q_starts.dim() != 1:
        return "cu_seqlens_q and cu_seqlens_k are int32, one more than there are sequences"
    if not q_starts.is_contiguous() or not k_starts.is_contiguous():
        return "cu_seqlens_q and cu_seqlens_k must be dense: call .contiguous()"
    return _common_reason(_batched(q), _batched(k), _batched(v), scale, sinks, softcap)


def _common_reason(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None, softcap: float) -> str | None:
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads"
    for dim in (q.shape[3], v.shape[3]):
        if dim > MAX_HEAD_DIM or dim % 8:
            return f"head dim is {dim}; kernels take multiples of 8 to {MAX_HEAD_DIM}"
    if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
        return f"query, key and value are {q.dtype}, {k.dtype}, {v.dtype}; kernels take bfloat16 or float16, all alike"
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.is_floating_point()):
        return f"sinks are {sinks.dtype} {tuple(sinks.shape)}; kernels take one floating-point logit a query head"
    if not (scale is None or scale > 0) or softcap < 0 or not math.isfinite(softcap):
        return f"scale is {scale} and softcap {softcap}; scale is positive, softcap positive or 0 for none"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        return "these kernels are made of Hopper's instructions: compute capability 9.0"
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = (*inputs, *DEFAULTS[len(inputs) - 6 :])
    q, k, v, is_causal, scale, shift, key_mask, sinks, *rest = given
    ctx.save_for_backward(q, k, v, *output, key_mask, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.rest = (is_causal, scale, shift), tuple(rest)


def _grads(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 12
    q, k, v, o, lse, key_mask, sinks = ctx.saved_tensors
    before, after = ctx.rest
    dq, dk, dv, dsinks = ATTENTION_BACKWARD(do, q, k, v, o, lse, *before, key_mask, sinks, *after)
    return dq, dk, dv, None, None, None, None, None if sinks is None else dsinks, None, None, None, None


def _varlen_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = (*inputs, *DEFAULTS[len(inputs) - 8 :])
    q, k, v, q_starts, k_starts, longest_q, longest_k, is_causal, scale, sinks, *rest = given
    ctx.save_for_backward(q, k, v, *output, q_starts, k_starts, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.rest = (longest_q, longest_k, is_causal, scale), tuple(rest)


def _varlen_grads(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 14
    *tensors, q_starts, k_starts, sinks = ctx.saved_tensors
    before, after = ctx.rest
    dq, dk, dv, dsinks = VARLEN_ATTENTION_BACKWARD(do, *tensors, q_starts, k_starts, *before, sinks, *after)
    return dq, dk, dv, *(None,) * 6, None if sinks is None else dsinks, *(None,) * 4


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return arranged(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float, shift: int,
    key_mask: Tensor | None = None, sinks: Tensor | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return arranged(q, q.shape[3]), arranged(k, k.shape[3]), arranged(v, v.shape[3]), _fake_sinks(q, sinks)


def _fake_sinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _varlen_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    o, lse = _fake(_batched(q), _batched(k), _batched(v))
    return o[0].transpose(0, 1), lse[0]


def _varlen_fake_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_starts: Tensor, k_starts: Tensor,
    longest_q: int, longest_k: int, is_causal: bool, scale: float, sinks: Tensor | None = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = (arranged(_batched(x), x.shape[2])[0].transpose(0, 1) for x in (q, k, v))
    return (*grads, _fake_sinks(q, sinks))  # type: ignore[return-value]


def _pairs(rows: float, keys: float, is_causal: bool, left: int) -> float:
    """Products of a query row with a key, of one head."""
    pairs = rows * keys * (0.5 if is_causal and rows == keys else 1.0)
    return min(pairs, rows * (left + 1)) if is_causal and left >= 0 else pairs


def _dense_flops(
    tensors: tuple[Any, ...], products: tuple[float, float], kwargs: dict[str, Any]
) -> dict[str, float]:  # fmt: skip
    q, k, v = tensors
    pairs = _pairs(q.shape[2], k.shape[2], bool(kwargs.get("is_causal", False)), int(kwargs.get("left", -1)))
    width = products[0] * q.shape[3] + products[1] * v.shape[3]
    flops = 2.0 * q.shape[0] * q.shape[1] * pairs * width
    return {"flops": flops, "matrix_flops": flops}


def _varlen_flops(
    tensors: tuple[Any, ...], products: tuple[float, float], kwargs: dict[str, Any]
) -> dict[str, float]:  # fmt: skip
    """Every sequence as long as the longest: the lengths themselves are on the device."""
    q, k, v = tensors
    longest_q, longest_k = kwargs.get("longest_q", q.shape[0]), kwargs.get("longest_k", k.shape[0])
    pairs = _pairs(longest_q, longest_k, bool(kwargs.get("is_causal", False)), int(kwargs.get("left", -1)))
    width = products[0] * q.shape[2] + products[1] * v.shape[2]
    flops = 2.0 * q.shape[0] / max(1, longest_q) * q.shape[1] * pairs * width
    return {"flops": flops, "matrix_flops": flops}


FORWARD_PRODUCTS = (1.0, 1.0)
BACKWARD_PRODUCTS = (4.0, 3.0)
"""Of queries' width and of values': the scores and dO · Vᵀ are computed by both kernels of the backward pass."""


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    """Drawn as [batch, rows, heads, dim] and turned: what a projection leaves."""

    def draw(heads: int, rows: int, dim: int) -> Tensor:
        x = torch.randn(of["b"], rows, heads, dim, device=on, dtype=torch.float32, generator=generator)
        return x.to(getattr(torch, of.dtype)).transpose(1, 2)

    q, k = draw(of["h"], of["l"], of["d"]), draw(of["k"], of["s"], of["d"])
    v = draw(of["k"], of["s"], of.get("dv", of["d"]))
    mask, sinks = None, None
    if of.get("mask"):
        mask = torch.rand(of["b"], of["s"], device=on, generator=generator) < of["mask"]
    if of.get("sinks"):
        sinks = torch.randn(of["h"], device=on, dtype=torch.float32, generator=generator) + 2.0
    rest = (None, of.get("lower_right", False), mask, of.get("window"), of.get("cap", 0.0), sinks)
    return q, k, v, of["causal"], *rest, of.get("deterministic", True)


def _varlen_make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    def draw(heads: int, rows: int) -> Tensor:
        x = torch.randn(rows, heads, of["d"], device=on, dtype=torch.float32, generator=generator)
        return x.to(getattr(torch, of.dtype))

    starts = [torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).to(torch.int32) for lens in (of["q"], of["kv"])]
    on_it = [s.to(on) if on.type != "meta" else torch.empty(s.shape, dtype=s.dtype, device=on) for s in starts]
    q, k, v = draw(of["h"], sum(of["q"])), draw(of["k"], sum(of["kv"])), draw(of["k"], sum(of["kv"]))
    rest = (max(of["q"]), max(of["kv"]), of["causal"], None, of.get("window"), of.get("cap", 0.0))
    return q, k, v, *on_it, *rest


CHECKS = tuple(
    case(dtype, b=b, h=h, k=k, l=rows, s=keys, d=d, causal=causal)
    for dtype in ("bfloat16", "float16")
    for causal in (False, True)
    for b, h, k, rows, keys, d in (
        (1, 4, 2, 512, 512, 128), (2, 3, 3, 777, 777, 128), (1, 8, 1, 100, 1000, 128), (2, 4, 4, 640, 640, 64),
        (1, 2, 2, 1000, 100, 128), (1, 4, 2, 300, 300, 96), (1, 2, 1, 257, 129, 40), (1, 2, 2, 128, 128, 8),
        (1, 16, 2, 1, 515, 128), (1, 1, 1, 1, 1, 64),
    )
    if dtype == "bfloat16" or (rows, d) in ((777, 128), (640, 64), (100, 128), (300, 96))
)  # fmt: skip
MASKED = tuple(
    case("bfloat16", b=b, h=h, k=k, l=rows, s=keys, d=d, causal=causal, mask=kept)
    for causal in (False, True)
    for b, h, k, rows, keys, d, kept in (
        (3, 4, 2, 512, 512, 64, 0.6), (2, 3, 3, 197, 197, 128, 0.02), (1, 4, 4, 577, 300, 64, 0.9),
        (4, 2, 1, 64, 130, 80, 0.05),
    )
)  # fmt: skip
VARIANTS = (
    *(case("bfloat16", b=2, h=4, k=2, l=rows, s=keys, d=d, causal=causal, window=window, lower_right=True)
      for rows, keys, d, causal, window in (
          (700, 700, 128, True, (100, 0)), (300, 900, 64, False, (64, 33)), (513, 513, 128, False, (-1, 10)),
          (900, 300, 128, False, (200, -1)), (256, 256, 64, True, (1, 0)))),
    *(case("bfloat16", b=1, h=4, k=2, l=rows, s=rows, d=d, causal=causal, cap=cap, window=window)
      for rows, d, causal, cap, window in (
          (400, 128, True, 5.0, None), (333, 64, False, 30.0, None), (300, 256, True, 5.0, (99, 0)))),
    *(case("bfloat16", b=2, h=24, k=8, l=rows, s=rows, d=d, causal=causal, sinks=True, window=window)
      for rows, d, causal, window in ((300, 64, True, (127, 0)), (500, 128, False, None))),
    *(case("bfloat16", b=1, h=4, k=4, l=rows, s=keys, d=d, dv=dv, causal=causal)
      for rows, keys, d, dv, causal in (
          (400, 400, 192, 128, True), (300, 500, 256, 256, False), (257, 257, 160, 160, True),
          (200, 200, 64, 128, False), (200, 333, 128, 64, True))),
    case("bfloat16", b=2, h=4, k=2, l=300, s=300, d=192, dv=128, causal=True, mask=0.7, window=(150, 0)),
    case("bfloat16", b=2, h=24, k=8, l=300, s=300, d=192, causal=True, mask=0.7, window=(150, 0), sinks=True),
    case("float16", b=1, h=4, k=2, l=333, s=200, d=136, dv=192, causal=False),
)  # fmt: skip
RACES = tuple(
    case("bfloat16", b=b, h=h, k=k, l=rows, s=rows, d=d, causal=causal)
    for causal in (True, False)
    for b, h, k, rows, d in (
        (1, 64, 8, 2048, 128), (1, 64, 8, 4096, 128), (1, 64, 8, 8192, 128), (1, 64, 8, 16384, 128),
        (4, 32, 32, 2048, 128), (4, 32, 8, 4096, 128), (8, 16, 16, 2048, 64), (2, 16, 16, 8192, 64),
    )
)  # fmt: skip
FUSED = tuple(
    case("bfloat16", b=b, h=h, k=k, l=rows, s=keys, d=d, causal=causal, mask=mask, deterministic=False)
    for b, h, k, rows, keys, d, causal, mask in (
        (1, 4, 2, 512, 512, 128, False, 0.0), (2, 3, 3, 777, 777, 128, True, 0.0), (1, 8, 1, 100, 1000, 128, True, 0.0),
        (1, 2, 2, 1000, 100, 96, True, 0.0), (2, 4, 2, 300, 300, 128, False, 0.6), (2, 4, 2, 300, 300, 128, True, 0.6),
    )
)
"""Gradients that may differ in their last bits from run to run."""

ENCODERS = tuple(
    case("bfloat16", b=b, h=h, k=h, l=rows, s=rows, d=d, causal=False, mask=mask)
    for b, h, rows, d, mask in (
        (32, 16, 512, 64, 0.0), (32, 16, 512, 64, 0.8), (64, 12, 128, 64, 0.0), (64, 12, 197, 64, 0.0),
        (32, 16, 577, 64, 0.0), (16, 16, 256, 128, 0.0), (8, 16, 64, 64, 0.0),
    )
)  # fmt: skip
VARLEN_CHECKS = tuple(
    case("bfloat16", h=h, k=k, d=d, q=q, kv=kv, causal=causal, window=window, cap=cap)
    for h, k, d, q, kv, causal, window, cap in (
        (4, 2, 128, (1, 130, 77, 513), (1, 130, 77, 513), True, None, 0.0),
        (4, 4, 64, (200, 64, 1, 300), (64, 333, 515, 1), False, None, 0.0),
        (6, 2, 128, (10, 128, 256), (400, 128, 300), True, (100, 0), 0.0),
        (2, 1, 64, (300, 0, 5), (300, 20, 5), True, None, 20.0),
        (4, 2, 192, (100, 1, 70), (100, 1, 70), True, None, 0.0),
    )
) + (
    case("float16", h=4, k=2, d=128, q=(130, 77), kv=(200, 1), causal=True, window=None, cap=0.0),
)  # fmt: skip
_OPTIONS = "Tensor? sinks=None, int left=-1, int right=-1, float softcap=0.0, bool deterministic=True"
_SETTINGS = f"bool is_causal, float scale, int shift, Tensor? key_mask=None, {_OPTIONS}"
_SEQUENCES = (
    f"Tensor q_starts, Tensor k_starts, int longest_q, int longest_k, bool is_causal, float scale, {_OPTIONS}"
)

ATTENTION_BACKWARD = declare(
    name="attention_backward",
    summary="gradients of attention, the same bits every time",
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_fake_backward,
    reference=reference.backward,
    support=lambda do, q, k, v, o, lse, *rest: _support(q, k, v, *rest),
    cost=lambda inputs, outputs, **kwargs: _dense_flops(inputs[1:4], BACKWARD_PRODUCTS, kwargs),
    num_results=4,
)
ATTENTION = declare(
    name="attention",
    summary="softmax(q · kᵀ · scale) · v: causal, windows, masks over keys, caps, sinks, grouped heads, dims to 256",
    schema=f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=lambda inputs, outputs, **kwargs: _dense_flops(inputs[:3], FORWARD_PRODUCTS, kwargs),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=attention,
        eager=reference.eager,
        reference=reference.public,
        mistakes={"diagonal hidden": reference.diagonal_hidden, "scale lost": reference.scale_lost},
        checks=(*CHECKS, *MASKED, *VARIANTS),
        races=RACES,
        small=ENCODERS,
        packs=FUSED,
    ),
    repeats=True,
    keyed=True,
    front=_attention,
)
VARLEN_ATTENTION_BACKWARD = declare(
    name="varlen_attention_backward",
    summary="gradients of attention over sequences of different length, the same bits every time",
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SEQUENCES})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_varlen_backward,
    fake=_varlen_fake_backward,
    reference=reference.varlen_backward,
    support=lambda do, q, k, v, o, lse, *rest: _varlen_support(q, k, v, *rest),
    cost=lambda inputs, outputs, **kwargs: _varlen_flops(inputs[1:4], BACKWARD_PRODUCTS, kwargs),
    num_results=4,
)
VARLEN_ATTENTION = declare(
    name="varlen_attention",
    summary="attention over sequences of different length that lie one after the other",
    schema=f"(Tensor q, Tensor k, Tensor v, {_SEQUENCES}) -> (Tensor, Tensor)",
    forward=_varlen_forward,
    fake=_varlen_fake,
    reference=reference.varlen,
    support=_varlen_support,
    cost=lambda inputs, outputs, **kwargs: _varlen_flops(inputs[:3], FORWARD_PRODUCTS, kwargs),
    setup=_varlen_setup,
    backward=_varlen_grads,
    trial=Trial(
        make=_varlen_make,
        call=varlen_attention,
        eager=reference.varlen_eager,
        reference=reference.varlen_public,
        mistakes={"a neighbor's key": reference.neighbors_seen},
        checks=VARLEN_CHECKS,
        races=(),
        layouts=False,
    ),
)
