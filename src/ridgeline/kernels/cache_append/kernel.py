"""New keys and values of a step go to their places in a cache, both in one launch."""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def cache_append(
    keys_ptr,  # [B, H, S, D] by strides
    values_ptr,
    index_ptr,  # [L] where each new position goes
    k_ptr,  # [B, H, L, D] by strides
    v_ptr,
    heads, longest, d,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, k_b, k_h, k_l, v_b, v_h, v_l,
    D: tl.constexpr,
):  # fmt: skip
    """One head of one new position; a place outside the cache is not written."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    new = tl.program_id(1).to(tl.int64)
    place = tl.load(index_ptr + new).to(tl.int64)
    col = tl.arange(0, D)
    k = tl.load(k_ptr + b * k_b + h * k_h + new * k_l + col, mask=col < d)
    v = tl.load(v_ptr + b * v_b + h * v_h + new * v_l + col, mask=col < d)
    inside = (col < d) & (place >= 0) & (place < longest)
    tl.store(keys_ptr + b * keys_b + h * keys_h + place * keys_s + col, k, mask=inside)
    tl.store(values_ptr + b * values_b + h * values_h + place * values_s + col, v, mask=inside)


@jit
def rope_append(
    keys_ptr,  # [B, K, S, D] by strides
    values_ptr,
    index_ptr,  # [L] where each new position goes
    q_ptr,  # [B, H, L, D] by strides
    k_ptr,  # [B, K, L, D]
    v_ptr,
    cos_ptr,  # [B or 1, L, W or more]
    sin_ptr,
    out_ptr,  # queries, turned
    q_heads, length, longest, half, d,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    out_b, out_h, out_l, cos_b, cos_l,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One head of one new position: a query head is turned; a key head is turned into the cache, its values with it."""
    b = (tl.program_id(0) // length).to(tl.int64)
    new = (tl.program_id(0) % length).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    col = tl.arange(0, D)
    cos = tl.load(cos_ptr + b * cos_b + new * cos_l + i, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * cos_b + new * cos_l + i, mask=i < half, other=0.0).to(tl.float32)
    if head < q_heads:
        source = q_ptr + b * q_b + head.to(tl.int64) * q_h + new * q_l
        target = out_ptr + b * out_b + head.to(tl.int64) * out_h + new * out_l
        inside = new >= 0
    else:
        h = (head - q_heads).to(tl.int64)
        place = tl.load(index_ptr + new).to(tl.int64)
        inside = (place >= 0) & (place < longest)
        source = k_ptr + b * k_b + h * k_h + new * k_l
        target = keys_ptr + b * keys_b + h * keys_h + place * keys_s
        v = tl.load(v_ptr + b * v_b + h * v_h + new * v_l + col, mask=col < d)
        tl.store(values_ptr + b * values_b + h * values_h + place * values_s + col, v, mask=(col < d) & inside)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else half + i
    x = tl.load(source + first, mask=i < half, other=0.0).to(tl.float32)
    y = tl.load(source + second, mask=i < half, other=0.0).to(tl.float32)
    kind = keys_ptr.dtype.element_ty
    tl.store(target + first, (x * cos - y * sin).to(kind), mask=(i < half) & inside)
    tl.store(target + second, (y * cos + x * sin).to(kind), mask=(i < half) & inside)
    if TAIL:
        rest = (col >= 2 * half) & (col < d)
        tl.store(target + col, tl.load(source + col, mask=rest), mask=rest & inside)
