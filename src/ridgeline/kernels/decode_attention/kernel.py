"""One query row a sequence against keys and values that lie one after the other: each is read once, by many programs.

Shapes: B sequences, H query heads, K key heads, R = H / K heads that share keys, D head dim, S keys.
A program takes one key head of one sequence and a share of its keys; all R heads that share them are rows of one
product, padded to the 16 that a tensor core wants. Whoever is the last of a key head's programs joins its shares, or a
second kernel does where they are many.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels import arrival_counter
from ridgeline.kernels.function import jit


@jit
def decode_share(
    q_ptr,  # [B, H, D] by strides
    k_ptr,  # [B, K, S, D] by strides
    v_ptr,
    mask_ptr,  # [B, H, S] by strides: true where seen, or added to the scores
    lens_ptr,  # [B]
    out_ptr,  # [B, H, D], or [B, H, shares, D] fp32
    lse_ptr,  # [B, H, shares] fp32, base 2
    whole_ptr,  # [B, H, D], where shares are joined here
    count_ptr,  # [B, K] int64, never cleared
    scale,  # softmax scale · log2(e)
    key_heads,
    longest,
    q_b, q_h, k_b, k_head, k_slot, v_b, v_head, v_slot, mask_b, mask_h, lens_b, d,
    shares,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,  # 0 none, 1 true where seen, 2 added
    LENS: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
    STAGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    JOINS: tl.constexpr,
):  # fmt: skip
    """Online softmax over this program's keys; the whole answer where one program has them all.

    EARLY and STAGED are those of paged attention. A DEPENDENT one is there before the kernel ahead of it has ended, and
    waits before it reads anything. JOINS: how many shares the last program of a key head joins at once; 0 leaves them
    to a second kernel.
    """
    if DEPENDENT:
        gdc_wait()
    count = count_ptr + tl.program_id(0)
    if JOINS:
        known = tl.load(count)
    if EARLY == 1:
        gdc_launch_dependents()
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    kh = (tl.program_id(0) % key_heads).to(tl.int64)
    share = tl.program_id(1)
    length = longest
    if LENS:
        length = tl.minimum(tl.load(lens_ptr + b * lens_b).to(tl.int32), longest)
    mine = tl.cdiv(length, shares)
    start = share * mine
    end = tl.minimum(start + mine, length)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, D)
    inside = (row < R)[:, None] & (col < d)[None, :]
    head = kh * R + row
    q = tl.load(q_ptr + b * q_b + head[:, None] * q_h + col[None, :], mask=inside, other=0.0)
    k_at = k_ptr + b * k_b + kh * k_head + col[:, None]
    v_at = v_ptr + b * v_b + kh * v_head + col[None, :]
    mask_at = mask_ptr + b * mask_b + head[:, None] * mask_h
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    policy: tl.constexpr = "" if STAGED else "evict_first"
    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        seen = key < end
        at = key.to(tl.int64)
        k_seen, v_seen = seen[None, :] & (col < d)[:, None], seen[:, None] & (col < d)[None, :]
        k = tl.load(k_at + at[None, :] * k_slot, mask=k_seen, other=0.0, eviction_policy=policy)
        v = tl.load(v_at + at[:, None] * v_slot, mask=v_seen, other=0.0, eviction_policy=policy)
        s = tl.dot(q, k, input_precision="ieee") * scale
        shown = seen[None, :] & (row < R)[:, None]
        if MASK == 1:
            shown = shown & (tl.load(mask_at + at[None, :], mask=shown, other=0) != 0)
        elif MASK == 2:
            s += 1.4426950408889634 * tl.load(mask_at + at[None, :], mask=shown, other=0.0).to(tl.float32)
        s = tl.where(shown, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: every weight is 0, not NaN
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        total = total * alpha + tl.sum(p, 1)
        m = m_new
    if EARLY == 2:
        gdc_launch_dependents()
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    place = b * key_heads * R + head
    if not WHOLE:
        place = place * shares + share
        tl.store(lse_ptr + place, tl.where(nothing, float("-inf"), m + tl.log2(total)), mask=row < R)
    tl.store(out_ptr + place[:, None] * d + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if JOINS:
        arrival_counter.begin(count, known)
        if arrival_counter.comes_last(count, shares):
            _join_all(out_ptr, lse_ptr, whole_ptr, (b * key_heads + kh) * R, shares, d, R, D, JOINS)
            tl.store(count, 0)


@jit
def _join_all(
    part_ptr, lse_ptr, out_ptr, head, shares, d, R: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The shares of R heads, PARTS of them at a time, in order and weighted by what each saw; past the L1, since other
    programs wrote them."""
    row = tl.arange(0, triton.next_power_of_2(R))
    col = tl.arange(0, D)
    top = tl.full([row.shape[0]], float("-inf"), tl.float32)
    whole = tl.zeros([row.shape[0]], tl.float32)
    acc = tl.zeros([row.shape[0], D], tl.float32)
    for one in range(0, shares, PARTS):
        share = one + tl.arange(0, PARTS)
        there = (row < R)[:, None] & (share < shares)[None, :]
        at = (head + row)[:, None] * shares + share[None, :]
        lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(part_ptr + at[:, :, None] * d + col[None, None, :],
                       mask=there[:, :, None] & (col < d)[None, None, :], other=0.0, cache_modifier=".cg")  # fmt: skip
        raised = tl.maximum(top, tl.max(lse, 1))
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp2(lse - shift[:, None])
        alpha = tl.exp2(top - shift)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        whole = whole * alpha + tl.sum(weight, 1)
        top = raised
    out = acc / tl.where(whole == 0.0, 1.0, whole)[:, None]
    inside = (row < R)[:, None] & (col < d)[None, :]
    tl.store(out_ptr + (head + row)[:, None] * d + col[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def decode_join(
    part_ptr, lse_ptr, out_ptr, shares, d, SHARES: tl.constexpr, D: tl.constexpr, DEPENDENT: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """The shares of D columns of one head, weighted by what each saw; what is FOLLOWED lets its successor get ready."""
    if FOLLOWED:
        gdc_launch_dependents()
    if DEPENDENT:
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    col = tl.program_id(1) * D + tl.arange(0, D)
    inside = (share < shares)[:, None] & (col < d)[None, :]
    part = tl.load(part_ptr + (place * shares + share)[:, None] * d + col[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + place * shares + share, mask=share < shares, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    whole = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + place * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)
