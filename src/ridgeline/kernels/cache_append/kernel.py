"""New keys and values of a step go to their places in a cache, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _fetch(start, num_bytes, share, shares):
    """One program's share of a stretch of memory is brought into the L2; nobody waits for it.

    One instruction a warp, of at most a megabyte: addresses that differ from lane to lane would be taken one by one.
    """
    each = tl.cdiv(num_bytes, shares * 16) * 16
    offset = share * each
    left = tl.minimum(num_bytes - offset, tl.minimum(each, 1048560)) // 16 * 16
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [start + offset, left],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
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


@triton.jit
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
    ahead_ptr,  # a weight that is read soon
    q_heads, length, longest, half, d,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    out_b, out_h, out_l, cos_b, cos_l,
    heads, key_heads, near, ahead_bytes,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TAIL: tl.constexpr,
    AHEAD: tl.constexpr, SHARES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One head of one new position: a query head is turned; a key head is turned into the cache, its values with it.

    With AHEAD, as many programs more a position bring into the L2 what is read next: older keys and values, of each
    head in SHARES (if no more than ``near`` positions are filled), and then the weight of the product behind attention.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if AHEAD:
        if tl.program_id(1) >= heads:
            mine = (tl.program_id(1) - heads) * tl.num_programs(0) + tl.program_id(0)
            filled = tl.load(index_ptr).to(tl.int32)
            if (filled >= 0) & (filled <= near):
                if SHARES:
                    row_bytes = d * (keys_ptr.dtype.element_ty.primitive_bitwidth // 8)
                    pair = mine // SHARES
                    if pair < tl.num_programs(0) // length * key_heads:
                        keys_at = keys_ptr + (pair // key_heads).to(tl.int64) * keys_b + (pair % key_heads) * keys_h
                        values_at = values_ptr + (pair // key_heads).to(tl.int64) * values_b
                        values_at += (pair % key_heads) * values_h
                        _fetch(keys_at.to(tl.int64), filled * row_bytes, mine % SHARES, SHARES)
                        _fetch(values_at.to(tl.int64), filled * row_bytes, mine % SHARES, SHARES)
                _fetch(ahead_ptr.to(tl.int64), ahead_bytes, mine, AHEAD * tl.num_programs(0))
            return
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
