"""One query row a sequence against its paged keys and values: the cache is read once, by many programs at a time.

Shapes: B sequences, H query heads, K key heads, R = H / K heads that share keys, D head dim, P keys a page.
A program takes one key head of one sequence and a share of its keys; all R heads that share them are rows of one
product, padded to the 16 that a tensor core wants. A second kernel joins the shares.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(ptr):
    """Bring what lies there into the L2; nobody waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def _keys(k_ptr, page, key, end, col, d, k_page, k_slot, P: tl.constexpr, POLICY: tl.constexpr):
    """A block of keys, one a column."""
    at = page.to(tl.int64) * k_page + (key % P) * k_slot
    inside = (key < end)[None, :] & (col < d)[:, None]
    return tl.load(k_ptr + at[None, :] + col[:, None], mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def _values(v_ptr, page, key, end, col, d, v_page, v_slot, P: tl.constexpr, POLICY: tl.constexpr):
    """A block of values, one a row."""
    at = page.to(tl.int64) * v_page + (key % P) * v_slot
    inside = (key < end)[:, None] & (col < d)[None, :]
    return tl.load(v_ptr + at[:, None] + col[None, :], mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def paged_share(
    q_ptr,  # [B, H, D]
    k_ptr,  # [pages, P, K, D] by strides
    v_ptr,
    table_ptr,  # [B, pages of the longest] int32
    lens_ptr,  # [B] int32
    out_ptr,  # [B, H, D], or [B, H, shares, D] fp32
    lse_ptr,  # [B, H, shares] fp32, base 2; APART: [2, B, H, shares], maxima in base 2 and sums
    scale,  # softmax scale · log2(e)
    key_heads,
    q_b, q_h, k_page, k_slot, k_head, v_page, v_slot, v_head, table_b, pages, d,
    shares,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
    STAGED: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Online softmax over this program's keys; the whole answer where one program has them all.

    EARLY lets the joining kernel, which waits for the results itself, start with this one (1) or when programs have
    read their last key (2). STAGED leaves it to the compiler to copy blocks ahead into shared memory; otherwise the
    next block is read into registers while this one is worked on, and what is read leaves the L2 first, so that
    nothing else has to. APART, for float32, keeps sums over blocks apart until they are whole (half the rounding of
    one long sum), and maxima and sums of shares as two numbers (a logarithm of both is off by 3e-7 of what it says).
    """
    if EARLY == 1:
        gdc_launch_dependents()
    b = tl.program_id(0) // key_heads
    kh = tl.program_id(0) % key_heads
    share = tl.program_id(1)
    table = table_ptr + b * table_b
    if EARLY:  # where a full sequence's share would begin: looked up while the length is on its way
        _prefetch(table + tl.minimum(share * tl.cdiv(pages, shares), pages - 1))
    length = tl.load(lens_ptr + b)
    mine = tl.cdiv(length, shares)
    start = share * mine
    end = tl.minimum(start + mine, length)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, D)
    inside = (row < R)[:, None] & (col < d)[None, :]
    head = kh * R + row
    q = tl.load(q_ptr + b.to(tl.int64) * q_b + head[:, None] * q_h + col[None, :], mask=inside, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    k_ptr += kh.to(tl.int64) * k_head
    v_ptr += kh.to(tl.int64) * v_head
    if not STAGED:
        key = start + tl.arange(0, KEYS)
        page = tl.load(table + key // P, mask=key < end, other=0)
        next_k = _keys(k_ptr, page, key, end, col, d, k_page, k_slot, P, "evict_first")
        next_v = _values(v_ptr, page, key, end, col, d, v_page, v_slot, P, "evict_first")
        page = tl.load(table + (key + KEYS) // P, mask=key + KEYS < end, other=0)
    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        if STAGED:
            page = tl.load(table + key // P, mask=key < end, other=0)
            k = _keys(k_ptr, page, key, end, col, d, k_page, k_slot, P, "")
            v = _values(v_ptr, page, key, end, col, d, v_page, v_slot, P, "")
        else:
            k, v = next_k, next_v
            next_k = _keys(k_ptr, page, key + KEYS, end, col, d, k_page, k_slot, P, "evict_first")
            next_v = _values(v_ptr, page, key + KEYS, end, col, d, v_page, v_slot, P, "evict_first")
            page = tl.load(table + (key + 2 * KEYS) // P, mask=key + 2 * KEYS < end, other=0)
        s = tl.where((key < end)[None, :], tl.dot(q, k, input_precision="ieee"), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s * scale - (m_new * scale)[:, None])  # one rounding: the product and the difference are fused
        alpha = tl.exp2((m - m_new) * scale)
        if APART:  # the condition holds; without it the compiler would add every product to the sum, one by one
            block = tl.dot(p, v, input_precision="ieee")
            acc = acc * alpha[:, None] + tl.where((m_new != float("-inf"))[:, None], block, 0.0)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        total = total * alpha + tl.sum(p, 1)
        m = m_new
    if EARLY == 2:
        gdc_launch_dependents()
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    place = b.to(tl.int64) * key_heads * R + head
    if not WHOLE:
        place = place * shares + share
        if APART:
            tl.store(lse_ptr + place, m * scale, mask=row < R)
            tl.store(lse_ptr + tl.num_programs(0).to(tl.int64) * R * shares + place, total, mask=row < R)
        else:
            tl.store(lse_ptr + place, tl.where(nothing, float("-inf"), m * scale + tl.log2(total)), mask=row < R)
    tl.store(out_ptr + place[:, None] * d + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def paged_join(
    part_ptr, lse_ptr, out_ptr, shares, d, SHARES: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """The shares of one head, weighted by what each saw."""
    if EARLY:
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    col = tl.program_id(1) * D + tl.arange(0, D)
    inside = (share < shares)[:, None] & (col < d)[None, :]
    part = tl.load(part_ptr + (place * shares + share)[:, None] * d + col[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + place * shares + share, mask=share < shares, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    if APART:
        totals = lse_ptr + tl.num_programs(0).to(tl.int64) * shares
        weight *= tl.load(totals + place * shares + share, mask=share < shares, other=0.0)
    whole = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + place * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)
