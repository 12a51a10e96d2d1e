"""New keys and values of a step go to their places in a cache, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


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
