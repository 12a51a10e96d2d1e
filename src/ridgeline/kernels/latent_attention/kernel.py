"""One query row a sequence against a paged cache of latent vectors: keys and values at once, shared by all heads.

Shapes: B sequences, H heads, D latent dim (the values), E further dims that only keys have (the rotary ones), P keys a
page. A program takes ROWS heads of one sequence and a share of its keys: a block of the cache is read once and used by
both products. The shares are joined by paged attention's kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def latent_share(
    q_ptr,  # [B, H, D + E]
    cache_ptr,  # [pages, P, D + E] by strides
    table_ptr,  # [B, pages of the longest] int32
    lens_ptr,  # [B] int32
    out_ptr,  # [B, H, D], or [B, H, shares, D] fp32
    lse_ptr,  # [B, H, shares] fp32, base 2
    scale,  # softmax scale · log2(e)
    heads, groups, q_b, q_h, c_page, c_slot, table_b, d, e, shares,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Online softmax over this program's keys; the whole answer where one program has them all."""
    if EARLY == 1:
        gdc_launch_dependents()
    b = tl.program_id(0) // groups
    share = tl.program_id(1)
    length = tl.load(lens_ptr + b)
    mine = tl.cdiv(tl.cdiv(length, 16), shares) * 16
    start = share * mine
    end = tl.minimum(start + mine, length)
    head = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, D)
    more = tl.arange(0, E)
    at = q_ptr + b.to(tl.int64) * q_b + head[:, None] * q_h
    q = tl.load(at + col[None, :], mask=(head < heads)[:, None] & (col < d)[None, :], other=0.0)
    q_more = tl.load(at + d + more[None, :], mask=(head < heads)[:, None] & (more < e)[None, :], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        seen = key < end
        page = tl.load(table_ptr + b * table_b + key // P, mask=seen, other=0).to(tl.int64)
        from_c = cache_ptr + (page * c_page + (key % P) * c_slot)[:, None]
        c = tl.load(from_c + col[None, :], mask=seen[:, None] & (col < d)[None, :], other=0.0)
        c_more = tl.load(from_c + d + more[None, :], mask=seen[:, None] & (more < e)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        s = tl.dot(q_more, tl.trans(c_more), s, input_precision="ieee")
        s = tl.where(seen[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s * scale - (m_new * scale)[:, None])
        alpha = tl.exp2((m - m_new) * scale)
        acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee")
        total = total * alpha + tl.sum(p, 1)
        m = m_new
    if EARLY == 2:
        gdc_launch_dependents()
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    place = b.to(tl.int64) * heads + head
    if not WHOLE:
        place = place * shares + share
        tl.store(lse_ptr + place, tl.where(nothing, float("-inf"), m * scale + tl.log2(total)), mask=head < heads)
    inside = (head < heads)[:, None] & (col < d)[None, :]
    tl.store(out_ptr + place[:, None] * d + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
