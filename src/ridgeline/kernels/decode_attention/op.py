"""Attention of one new token a sequence over a contiguous cache, keys split over the device, grouped heads together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import narrowed
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.decode_attention import config, kernel, reference
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, carved, launchable, num_sms, overlapping, vector_of
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM, MAX_FLOAT32_HEAD_DIM = 256, 128
_SHARE = Kernel(
    kernel.decode_share,
    vectors=("q_b", "q_h", "k_b", "k_head", "k_slot", "v_b", "v_head", "v_slot", "d"),
    loose=("mask_ptr", "lens_ptr"),
)
_JOIN = Kernel(kernel.decode_join, vectors=("d",))
_plans = Plans()


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of one query position, [batch, heads, 1, D] over [batch, key heads, S, D].

    Fewer key heads than heads are shared, not repeated. ``attn_mask`` is boolean (true where seen) or added to the
    scores, and broadcasts to [batch, heads, 1, S]; ``lengths`` [batch] says on the device how many keys there are, and
    later ones are not even read. Safe in CUDA graphs; a sequence that sees no key gets zeros. ``out`` takes the result.
    """
    if out is None:
        again = not is_dynamo_compiling() and not overlapping()  # repeated calls are as they first were
        call = (DECODE_ATTENTION.quick or _decode) if again else _decode
        found: Tensor = call(query, key, value, attn_mask, lengths, scale)
        return found
    if not launchable(query):
        return out.copy_(_decode(query, key, value, attn_mask, lengths, scale))
    query, key, value = narrowed(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    DECODE_ATTENTION.check_out(out, query, key, value, attn_mask, lengths, scale)
    return _forward(query, key, value, attn_mask, lengths, scale, out)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, lengths: Tensor | None, scale: float | None
) -> Tensor:
    query, key, value = narrowed(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = DECODE_ATTENTION.slow if overlapping() else DECODE_ATTENTION
    found: Tensor = call(query, key, value, attn_mask, lengths, scale)
    return found


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, scale: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    query, key, value = (_dense(x) for x in (query, key, value))
    args = (query, key, value, mask, lengths)
    if not launchable(query):
        return DECODE_ATTENTION.on_host(*args, scale)  # type: ignore[return-value]
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    known = (
        query.dtype, key.dtype, value.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape,
        value.stride(), query.get_device(),
        None if mask is None else (mask.dtype, mask.shape, mask.stride()),
        None if lengths is None else (lengths.dtype, lengths.shape, lengths.stride()),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15, overlapping(),
    )  # fmt: skip
    plan = _plans.get(known)
    if plan is None:
        plan = _plans[known] = _Plan(args, out, scale)
    plan.run(args, out, scale)
    return out


def _dense(x: Tensor) -> Tensor:
    """Rows of head dim one element after the other; a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


class _Plan:
    """Launches for one set of shapes; partial results are allocated anew each time, from PyTorch's own pool."""

    def __init__(self, args: tuple[Any, ...], out: Tensor, scale: float) -> None:
        query, keys, values, mask, lengths = args
        DECODE_ATTENTION.check(*args, scale)
        batch, heads, _, dim = query.shape
        key_heads, longest = keys.shape[1], keys.shape[2]
        sizes = {"batch": batch, "key_heads": key_heads, "longest": longest, "head_dim": dim}
        device = query.get_device()
        chosen = tuning.choose("decode_attention", sizes, config.choose(**sizes, num_sms=num_sms(device)))
        self.shares, self.shape = chosen.shares, (batch, heads, chosen.shares, dim)
        strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
        self.rest = (
            key_heads, longest, *strides, *_mask_strides(mask, batch, heads), *_lens_stride(lengths), dim, chosen.shares
        )  # fmt: skip
        self.inside = chosen.inside and chosen.shares > 1
        part, lse, count = self._partial(out)
        wide, ratio = max(16, power_of_two(dim)), heads // key_heads
        overlaps = overlapping() and chosen.shares > 1
        early = chosen.early if chosen.shares > 1 and not INTERPRETING and (overlaps or not self.inside) else 0
        self.share = _SHARE.bind(
            (query, keys, values, *_present(query, mask, lengths), part, lse, out, count, scale * LOG2_E,
             *self.rest),
            grid=(batch * key_heads, chosen.shares),
            constants={
                "R": ratio, "ROWS": max(16, power_of_two(ratio)), "D": wide, "KEYS": chosen.keys,
                "MASK": 0 if mask is None else 1 if mask.dtype == torch.bool else 2, "LENS": lengths is not None,
                "WHOLE": chosen.shares == 1, "EARLY": early, "STAGED": chosen.num_stages > 1,
                "DEPENDENT": overlaps,
                "JOINS": config.joined_at_once(ratio, wide, chosen.shares) if self.inside else 0,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            device=device,
            vector=vector_of(
                query.element_size(), query.data_ptr() | keys.data_ptr() | values.data_ptr(), *strides, dim
            ),
        )  # fmt: skip
        self.join = None
        if chosen.shares > 1 and not self.inside:
            columns = config.joined_columns(batch * heads, wide)
            self.join = _JOIN.bind(
                (part, lse, out, chosen.shares, dim),
                grid=(batch * heads, cdiv(dim, columns)),
                constants={
                    "SHARES": power_of_two(chosen.shares), "D": columns, "DEPENDENT": early > 0, "FOLLOWED": overlaps,
                },
                num_warps=4,
                device=device,
                vector=vector_of(query.element_size(), 0, dim),
            )  # fmt: skip

    def _partial(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stand-ins for what ``run`` allocates, by their types."""
        if self.shares == 1:
            return out, out, out
        part, lse = (torch.empty(4, dtype=torch.float32, device=out.device) for _ in range(2))
        return part, lse, torch.empty(2, dtype=torch.int64, device=out.device)

    def run(self, args: tuple[Any, ...], out: Tensor, scale: float) -> None:
        query, keys, values, mask, lengths = args
        given = _present(query, mask, lengths)
        if self.shares == 1:
            self.share(query, keys, values, *given, out, out, out, out, scale * LOG2_E, *self.rest)
            return
        sums = math.prod(self.shape[:3])
        lengths_of = (cdiv(sums * self.shape[3], 4) * 4, cdiv(sums, 4) * 4, 2 * self.shape[0] * self.rest[0])
        held = torch.empty(sum(lengths_of), dtype=torch.float32, device=out.device)  # all in one allocation
        part, lse, count = carved(held, *lengths_of)
        if INTERPRETING:
            count = count.view(torch.int64)
        self.share(query, keys, values, *given, part, lse, out, count, scale * LOG2_E, *self.rest)
        if self.join is not None:
            self.join(part, lse, out, self.shares, self.shape[3])


def _present(stand_in: Tensor, *optional: Tensor | None) -> tuple[Tensor, ...]:
    """Optional tensors, with another in the place of those that are not there: no kernel looks at it."""
    return tuple(stand_in if value is None else value for value in optional)


def _mask_strides(mask: Tensor | None, batch: int, heads: int) -> tuple[int, int]:
    """How far apart sequences and heads are in a mask; 0 where it is the same for all."""
    if mask is None:
        return 0, 0
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    strides = (0,) * (4 - mask.dim()) + tuple(mask.stride())
    return tuple(0 if shape[i] == 1 else strides[i] for i in (0, 1))  # type: ignore[return-value]


def _lens_stride(lengths: Tensor | None) -> tuple[int]:
    return (0 if lengths is None or lengths.shape[0] == 1 else lengths.stride(0),)


def _support(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, *_: Any
) -> str | None:
    if query.dim() != 4 or query.shape[2] != 1 or key.dim() != 4 or value.shape != key.shape:
        return "query is [batch, heads, 1, head dim], keys and values are [batch, key heads, keys, head dim]"
    if query.shape[0] != key.shape[0]:
        return f"query has {query.shape[0]} sequences, the keys {key.shape[0]}"
    if query.shape[3] != key.shape[3] or query.shape[3] > MAX_HEAD_DIM:
        return f"head dims are {query.shape[3]} and {key.shape[3]}; kernels take one, to {MAX_HEAD_DIM}"
    if query.dtype == torch.float32 and query.shape[3] > MAX_FLOAT32_HEAD_DIM:
        return f"float32 kernels take head dims to {MAX_FLOAT32_HEAD_DIM}: beyond, they round worse than PyTorch's"
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads"
    if {key.dtype, value.dtype} != {query.dtype}:
        return "query, keys and values are of different types"
    return float_reason(query=query) or _mask_reason(query, key, mask) or _lengths_reason(query, lengths)


def _mask_reason(query: Tensor, key: Tensor, mask: Tensor | None) -> str | None:
    if mask is None:
        return None
    meant = (query.shape[0], query.shape[1], 1, key.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or shape[3] != meant[3] or any(a not in (1, b) for a, b in zip(shape, meant, strict=True)):
        return f"mask {tuple(mask.shape)} does not broadcast to {meant} with its last dim whole"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"mask is {mask.dtype}; it is boolean, or floating point and added"
    if mask.stride(-1) != 1 and mask.shape[-1] > 1:
        return "mask's last dim must be dense: call .contiguous()"
    return float_reason(mask=None if mask.dtype == torch.bool else mask)


def _lengths_reason(query: Tensor, lengths: Tensor | None) -> str | None:
    if lengths is None or (lengths.dim() == 1 and lengths.shape[0] in (1, query.shape[0])):
        if lengths is None or lengths.dtype in (torch.int32, torch.int64):
            return None
        return f"lengths are {lengths.dtype}; int32 or int64"
    return "lengths is one number a sequence, or one for all"


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Every key of every sequence; keys and values are read once."""
    query, keys = inputs[:2]
    flops = 4.0 * query.numel * keys.shape[2]
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)
    b, h, k, s, d = (of[name] for name in "bhksd")

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator).to(kind)

    mask = lengths = None
    if of.get("hide") == "mask":
        mask = torch.rand(b, 1, 1, s, device=on, generator=generator) < 0.7
        mask[..., 0] = True
    elif of.get("hide") == "added":
        mask = draw(1, h, 1, s)
    elif of.get("hide") == "lengths":
        lengths = torch.randint(1, s + 1, (b,), device=on, generator=generator)
    return draw(b, h, 1, d), draw(b, k, s, d), draw(b, k, s, d), mask, lengths


CHECKS = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, hide=hide)
    for dtype in ("float32", "bfloat16", "float16")
    for b, h, k, s, d, hide in (
        (1, 1, 1, 1, 16, ""), (3, 8, 2, 77, 64, "mask"), (2, 32, 8, 1000, 128, "lengths"), (1, 8, 8, 4097, 128, ""),
        (2, 6, 2, 300, 80, "added"), (1, 16, 1, 700, 256, "mask"), (1, 32, 8, 2048, 128, ""),
    )
    if dtype != "float32" or d <= MAX_FLOAT32_HEAD_DIM
)  # fmt: skip
RACES = tuple(
    case("bfloat16", b=b, h=h, k=k, s=s, d=128, hide=hide)
    for b, h, k, s, hide in (
        (1, 32, 8, 2048, ""), (1, 32, 8, 2048, "mask"), (1, 32, 8, 32768, ""), (8, 32, 8, 4096, ""),
        (16, 32, 8, 2048, "mask"), (1, 32, 32, 2048, ""), (64, 64, 8, 2048, ""),
    )
)  # fmt: skip

DECODE_ATTENTION = declare(
    name="decode_attention",
    summary="decoding attention over a contiguous cache, keys split over the device",
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? lengths, float scale) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda query, *rest: query.new_empty(query.shape),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=decode_attention,
        eager=reference.eager,
        reference=reference.public,
        mistakes={"last key lost": reference.last_key_lost, "next values": reference.next_values},
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=(0, 1, 2, 3),
    ),
    repeats=True,
    keyed=True,
    front=_decode,
)
