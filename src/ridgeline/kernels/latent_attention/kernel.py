"""One query row a sequence against a paged cache of latent vectors: keys and values at once, shared by all heads.

Shapes: B sequences, H heads, D latent dim (the values), E further dims that only keys have (the rotary ones), P keys a
page. A program takes ROWS heads of one sequence and a share of its keys: a block of the cache is read once and used by
both products. The shares are joined by paged attention's kernel.

``latent_share`` is for any sizes; its compiler makes both groups of warps compute all scores. ``latent_blocks`` is for
512 + 64 dims and pages of whole blocks: one warp feeds two groups through the copy engine, each group makes half of
the scores (32 of 64 keys) and half of the sums (256 of 512 columns), and they exchange maxima and probabilities through
shared memory.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.kernels.attention.kernel import _barriers, _store
from ridgeline.kernels.function import gluon_jit, jit
from ridgeline.kernels.paged_attention.kernel import (
    _fetch_table,
    _first_of,
    _lengths,
    _let_join_start,
    _line,
    _pages,
    _pages_of,
    _place_of,
    _prefetch_table,
    _stretch_of,
    _without_the_rest,
)


@jit
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
    mine = tl.cdiv(length, shares)
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


@jit
def latent_few(
    q_ptr,  # [B, H, D + E]
    cache_ptr,  # [pages, P, D + E] by strides
    table_ptr,  # [B, pages of the longest] int32
    lens_ptr,  # [B] int32
    out_ptr,  # [B, H, D]
    part_ptr,  # [programs, 2, H, D] fp32
    seen_ptr,  # [programs, 2, 2, H] fp32
    scale,  # softmax scale · log2(e)
    batch, heads, q_b, q_h, c_page, c_slot, table_b, pages, d, e,
    COLS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    BATCH: tl.constexpr,
    LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """All heads of a stretch of the line that paged attention cuts; keys are rows of the products and heads columns, of
    which the matrix units take as few as there are."""
    pid = tl.program_id(0)
    head = tl.arange(0, COLS)
    col = tl.arange(0, D)
    more = tl.arange(0, E)
    if EARLY == 1:
        gdc_launch_dependents()
    if EARLY:
        _prefetch_table(table_ptr, table_b, pages, batch)
    i, blocks, ends = _line(lens_ptr, batch, 1, KEYS, BATCH)
    b, first, left = _stretch_of(blocks, ends, batch, LEAST)
    while left > 0:
        length = tl.load(lens_ptr + b)
        last = tl.minimum(first + left, tl.cdiv(length, KEYS))
        q_at = q_ptr + b.to(tl.int64) * q_b + head[None, :] * q_h
        q = tl.load(q_at + col[:, None], mask=(head < heads)[None, :] & (col < d)[:, None], other=0.0)
        q_more = tl.load(q_at + d + more[:, None], mask=(head < heads)[None, :] & (more < e)[:, None], other=0.0)
        table = table_ptr + b.to(tl.int64) * table_b
        m = tl.full([COLS], float("-inf"), tl.float32)
        total = tl.zeros([COLS], tl.float32)
        acc = tl.zeros([D, COLS], tl.float32)
        now = _pages(table, first, length, KEYS, P)
        for block in range(first, last):
            after = _pages(table, block + 1, length, KEYS, P)
            key = block * KEYS + tl.arange(0, KEYS)
            seen = key < length
            from_c = cache_ptr + (now.to(tl.int64) * c_page + (key % P) * c_slot)[:, None]
            c = tl.load(from_c + col[None, :], mask=seen[:, None] & (col < d)[None, :], other=0.0)
            c_more = tl.load(from_c + d + more[None, :], mask=seen[:, None] & (more < e)[None, :], other=0.0)
            now = after
            s = tl.dot(c, q)
            s = tl.dot(c_more, q_more, s)
            s = tl.where(seen[:, None], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 0))
            p = tl.exp2(s * scale - (m_new * scale)[None, :])
            alpha = tl.exp2((m - m_new) * scale)
            acc = tl.dot(tl.trans(c), p.to(c.dtype), acc * alpha[None, :])
            total = total * alpha + tl.sum(p, 0)
            m = m_new
        inside = (head < heads)[None, :] & (col < d)[:, None]
        if (first == 0) & (last == tl.cdiv(length, KEYS)):
            place = b.to(tl.int64) * heads + head
            whole = acc / tl.where(total == 0.0, 1.0, total)[None, :]
            tl.store(out_ptr + place[None, :] * d + col[:, None], whole.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            half = pid * 2 + (first == 0).to(tl.int32)
            tl.store(seen_ptr + half * 2 * heads + head, m * scale, mask=head < heads)
            tl.store(seen_ptr + (half * 2 + 1) * heads + head, total, mask=head < heads)
            tl.store(part_ptr + (half * heads + head)[None, :] * d + col[:, None], acc, mask=inside)
        left -= last - first
        first = first * 0
        b += 1
    if EARLY == 2:
        gdc_launch_dependents()


@gluon_jit
def _blocks_of(lens_ptr, b, shares, KEYS: gl.constexpr):
    """This program's first key, one past its last, and how many blocks they are."""
    length = gl.load(lens_ptr + b)
    mine = ((length + KEYS - 1) // KEYS + shares - 1) // shares * KEYS
    start = gl.program_id(1) * mine
    end = min(start + mine, length)
    return start, end, (max(end - start, 0) + KEYS - 1) // KEYS


@gluon_jit
def _feed_latent(
    q_desc, q2_desc, c_desc, c2_desc, q_smem, q2_smem, c_smem, c2_smem, bars, table_ptr, lens_ptr, table_b, groups,
    shares,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):
    q_full, c_full, c_empty, top_there, p_there = bars
    b, first = gl.program_id(0) // groups, gl.program_id(0) % groups * 64
    mbarrier.expect(q_full.index(0), 64 * (D + E) * 2)
    tma.async_copy_global_to_shared(q_desc, [b, first, 0], q_full.index(0), q_smem)
    tma.async_copy_global_to_shared(q2_desc, [b, first, D], q_full.index(0), q2_smem)
    start, end, num = _blocks_of(lens_ptr, b, shares, KEYS)
    table = table_ptr + b.to(gl.int64) * table_b
    page = gl.load(table + start // P, mask=num > 0, other=0)
    for i in range(num):
        key = start + i * KEYS
        slot = i % STAGES
        at = page
        page = gl.load(table + (key + KEYS) // P, mask=i + 1 < num, other=0)  # where the next block lies
        mbarrier.wait(c_empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(c_full.index(slot), KEYS * (D + E) * 2)
        tma.async_copy_global_to_shared(c_desc, [at, key % P, 0], c_full.index(slot), c_smem.index(slot))
        tma.async_copy_global_to_shared(c2_desc, [at, key % P, D], c_full.index(slot), c2_smem.index(slot))


@gluon_jit
def _latent_rows(
    c: gl.constexpr, q_smem, q2_smem, c_smem, c2_smem, top_smem, bars, lens_ptr, out_ptr, lse_ptr, scale, heads, groups,
    d, shares,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """One group of four warps: half of every block's scores, half of the columns of the sums."""
    q_full, c_full, c_empty, top_there, p_there = bars
    HALF: gl.constexpr = KEYS // 2
    WIDTH: gl.constexpr = D // 2
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], DTYPE)
    gl.static_assert(E == KEYS)
    b, head0 = gl.program_id(0) // groups, gl.program_id(0) % groups * 64
    start, end, num = _blocks_of(lens_ptr, b, shares, KEYS)
    q = q_smem.reshape([64, D])
    q2 = q2_smem.reshape([64, E])
    top = gl.full([64], float("-inf"), gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)
    o = gl.zeros([64, WIDTH], gl.float32, O_L)
    none = gl.zeros([64, HALF], gl.float32, S_L)
    mbarrier.wait(q_full.index(0), 0)
    for i in range(num):
        slot = i % STAGES
        block = c_smem.index(slot).reshape([KEYS, D])
        mbarrier.wait(c_full.index(slot), (i // STAGES) & 1)
        mine = block.slice(c * HALF, HALF, dim=0)
        mine2 = c2_smem.index(slot).reshape([KEYS, E]).slice(c * HALF, HALF, dim=0)
        s = warpgroup_mma(q, mine.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(q2, mine2.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        left = end - start - i * KEYS
        col = gl.expand_dims(c * HALF + gl.arange(0, HALF, gl.SliceLayout(0, S_L)), 0)
        s = gl.where(col < left, s, float("-inf"))
        highest = gl.max(s, 1)
        top_smem.index(c).store(highest)
        mbarrier.arrive(top_there.index(0), count=1)
        mbarrier.wait(top_there.index(0), i & 1)
        raised = gl.maximum(top, gl.maximum(highest, top_smem.index(1 - c).load(ROW)))
        alpha = gl.exp2((top - raised) * scale)  # a block has a key that counts, so that raised is a number
        p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 1))
        total = total * alpha + gl.sum(p, 1)
        top = raised
        # Both groups have their scores, so that nobody needs the block's rotary part any more: P takes its place.
        shared = c2_smem.index(slot)._reinterpret(DTYPE, [2, 64, HALF], P_L)
        shared.index(c).store(p.to(DTYPE))
        values = block.slice(c * WIDTH, WIDTH, dim=1)
        if left < KEYS:
            _without_the_rest(values, left, KEYS, WIDTH)
        fence_async_shared()
        mbarrier.arrive(p_there.index(0), count=1)
        o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_L)), 1)
        mbarrier.wait(p_there.index(0), i & 1)
        o = warpgroup_mma(shared.index(0), values.slice(0, HALF, dim=0), o, is_async=True)
        o = warpgroup_mma(shared.index(1), values.slice(HALF, HALF, dim=0), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(c_empty.index(slot), count=1)
    # The other half of the sum, through the place of the maxima: nobody reads those any more.
    top_smem.index(c).store(total)
    mbarrier.arrive(top_there.index(0), count=1)
    mbarrier.wait(top_there.index(0), num & 1)
    total = total + top_smem.index(1 - c).load(ROW)
    nothing = total == 0.0
    inverse = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / total), gl.SliceLayout(1, O_L))
    place = b.to(gl.int64) * heads + head0
    step = d
    if not WHOLE:
        if c == 0:
            row = gl.arange(0, 64, ROW)
            lse = gl.where(nothing, float("-inf"), top * scale + gl.log2(total))
            at = (place + row) * shares + gl.program_id(1)
            gl.store(lse_ptr + at, lse, mask=head0 + row < heads)
        place = place * shares + gl.program_id(1)
        step = d * shares
    _store(out_ptr + place * d + c * WIDTH, o * gl.expand_dims(inverse, 1), 0, heads - head0, step, WIDTH, WIDTH)


@gluon_jit
def latent_blocks(
    q_desc, q2_desc, c_desc, c2_desc, table_ptr, lens_ptr, out_ptr, lse_ptr, scale, heads, groups, table_b, d, shares,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
):
    """64 heads of one sequence over a share of its keys."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % KEYS == 0)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, 64, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [1, 64, E], q2_desc.layout)
    c_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, KEYS, D], c_desc.layout)
    c2_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, KEYS, E], c2_desc.layout)
    top_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    bars = (_barriers(1, 1), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(1, 2), _barriers(1, 2))
    gl.warp_specialize([
        (_latent_rows, (0, q_smem, q2_smem, c_smem, c2_smem, top_smem, bars, lens_ptr, out_ptr, lse_ptr, scale,
                        heads, groups, d, shares, D, E, KEYS, STAGES, WHOLE, DTYPE)),
        (_latent_rows, (1, q_smem, q2_smem, c_smem, c2_smem, top_smem, bars, lens_ptr, out_ptr, lse_ptr, scale,
                        heads, groups, d, shares, D, E, KEYS, STAGES, WHOLE, DTYPE)),
        (_feed_latent, (q_desc, q2_desc, c_desc, c2_desc, q_smem, q2_smem, c_smem, c2_smem, bars, table_ptr, lens_ptr,
                        table_b, groups, shares, D, E, P, KEYS, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon_jit
def _feed_columns(
    q_desc, q2_desc, c_desc, c2_desc, q_smem, q2_smem, c_smem, c2_smem, bars, table_ptr, lens_ptr, table_b, b, first,
    left,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
):
    """Queries of the next sequence and blocks of the cache, as soon as there is room."""
    q_full, q_empty, c_full, c_empty = bars
    turn, num = left * 0, left * 0
    while left > 0:
        length = gl.load(lens_ptr + b)
        last = min(first + left, (length + KEYS - 1) // KEYS)
        if last > first:
            table = table_ptr + b.to(gl.int64) * table_b
            page = gl.load(table + first * KEYS // P)
            half = turn % 2
            mbarrier.wait(q_empty.index(half), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(half), COLS * (D + E) * 2)
            tma.async_copy_global_to_shared(q_desc, [b, 0, 0], q_full.index(half), q_smem.index(half))
            tma.async_copy_global_to_shared(q2_desc, [b, 0, D], q_full.index(half), q2_smem.index(half))
            for block in range(first, last):
                at = page
                page = gl.load(table + (block + 1) * KEYS // P, mask=block + 1 < last, other=0)
                slot, key = num % STAGES, block * KEYS
                mbarrier.wait(c_empty.index(slot), ((num // STAGES) & 1) ^ 1)
                mbarrier.expect(c_full.index(slot), KEYS * (D + E) * 2)
                tma.async_copy_global_to_shared(c_desc, [at, key % P, 0], c_full.index(slot), c_smem.index(slot))
                tma.async_copy_global_to_shared(c2_desc, [at, key % P, D], c_full.index(slot), c2_smem.index(slot))
                num += 1
            turn += 1
        left -= last - first
        first = first * 0
        b += 1


@gluon_jit
def _latent_columns(
    c: gl.constexpr, q_smem, q2_smem, c_smem, c2_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale,
    heads, d, b, first, left,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, DTYPE: gl.constexpr,
):
    """One group of four warps: all scores of every block, keys as rows, and half of the columns of the sums, turned."""
    q_full, q_empty, c_full, c_empty = bars
    WIDTH: gl.constexpr = D // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    head = gl.arange(0, COLS, HEAD)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    none = gl.zeros([KEYS, COLS], gl.float32, L)
    turn, num = left * 0, left * 0
    while left > 0:
        length = gl.load(lens_ptr + b)
        blocks = (length + KEYS - 1) // KEYS
        last = min(first + left, blocks)
        if last > first:
            half = turn % 2
            q = q_smem.index(half).reshape([COLS, D]).permute((1, 0))
            q2 = q2_smem.index(half).reshape([COLS, E]).permute((1, 0))
            top = gl.full([COLS], float("-inf"), gl.float32, HEAD)
            sums = gl.zeros([KEYS, COLS], gl.float32, L)
            o = gl.zeros([WIDTH, COLS], gl.float32, L)
            mbarrier.wait(q_full.index(half), (turn // 2) & 1)
            for block in range(first, last):
                slot = num % STAGES
                there = c_smem.index(slot).reshape([KEYS, D])
                mbarrier.wait(c_full.index(slot), (num // STAGES) & 1)
                s = warpgroup_mma(there, q, none, use_acc=False, is_async=True)
                s = warpgroup_mma(c2_smem.index(slot).reshape([KEYS, E]), q2, s, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                rest = length - block * KEYS
                s = gl.where(gl.expand_dims(row < rest, 1), s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 0))
                alpha = gl.exp2((top - raised) * scale)
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
                sums = sums * gl.expand_dims(alpha, 0) + p
                top = raised
                p_smem.index(c).store(p.to(DTYPE))
                values = there.slice(c * WIDTH, WIDTH, dim=1)
                if rest < KEYS:
                    _without_the_rest(values, rest, KEYS, WIDTH)
                fence_async_shared()
                o = o * gl.expand_dims(alpha, 0)
                o = warpgroup_mma(values.permute((1, 0)), p_smem.index(c), o, is_async=True)
                o = warpgroup_mma_wait(0, [o])
                mbarrier.arrive(c_empty.index(slot), count=1)
                num += 1
            mbarrier.arrive(q_empty.index(half), count=1)
            turn += 1
            total = gl.sum(sums, 0)
            col = c * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, L))
            inside = gl.expand_dims(head < heads, 0) & gl.expand_dims(col < d, 1)
            if (first == 0) & (last == blocks):
                whole = o / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0)
                at = gl.expand_dims((b.to(gl.int64) * heads + head) * d, 0) + gl.expand_dims(col, 1)
                gl.store(out_ptr + at, whole.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                place = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
                at = gl.expand_dims((place.to(gl.int64) * heads + head) * d, 0) + gl.expand_dims(col, 1)
                gl.store(part_ptr + at, o, mask=inside)
                if c == 0:
                    gl.store(seen_ptr + place * 2 * heads + head, top * scale, mask=head < heads)
                    gl.store(seen_ptr + (place * 2 + 1) * heads + head, total, mask=head < heads)
        left -= last - first
        first = first * 0
        b += 1
    _let_join_start(EARLY == 2)


@gluon_jit
def latent_columns(
    q_desc, q2_desc, c_desc, c2_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b,
    pages, d,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
):
    """``latent_few`` for 512 + 64 dims and pages of whole blocks: one warp feeds two groups through the copy engine."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % KEYS == 0)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, COLS, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [2, 1, COLS, E], q2_desc.layout)
    c_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, KEYS, D], c_desc.layout)
    c2_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, KEYS, E], c2_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, COLS], P_L)
    bars = (_barriers(2, 1), _barriers(2, 2), _barriers(STAGES, 1), _barriers(STAGES, 2))
    b, first, left = _first_of(lens, batch, 1, KEYS, LEAST)
    gl.warp_specialize([
        (_latent_columns, (0, q_smem, q2_smem, c_smem, c2_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr,
                           scale, heads, d, b, first, left, D, E, KEYS, COLS, STAGES, EARLY, DTYPE)),
        (_latent_columns, (1, q_smem, q2_smem, c_smem, c2_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr,
                           scale, heads, d, b, first, left, D, E, KEYS, COLS, STAGES, EARLY, DTYPE)),
        (_feed_columns, (q_desc, q2_desc, c_desc, c2_desc, q_smem, q2_smem, c_smem, c2_smem, bars, table_ptr, lens_ptr,
                         table_b, b, first, left, D, E, P, KEYS, COLS, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon_jit
def _page_from(table, key, end, nowhere, P: gl.constexpr, WANTED: gl.constexpr):
    """The page of a key; past the end one that is not there, of which the copy engine makes zeros."""
    page = nowhere
    if WANTED:
        page = gl.load(table + key // P, mask=key < end, other=0)
        page = gl.where(key < end, page, nowhere)
    return page


@gluon_jit
def _pages_from(table, key, end, nowhere, P: gl.constexpr, ROWS: gl.constexpr, NUM: gl.constexpr):
    """Pages of up to four keys that are ROWS apart."""
    return (
        _page_from(table, key, end, nowhere, P, True), _page_from(table, key + ROWS, end, nowhere, P, NUM > 1),
        _page_from(table, key + 2 * ROWS, end, nowhere, P, NUM > 2),
        _page_from(table, key + 3 * ROWS, end, nowhere, P, NUM > 3),
    )  # fmt: skip


@gluon_jit
def _feed_ring(
    q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, bars, table_ptr, lens_ptr, table_b, b, first, left, length,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    RING: gl.constexpr,
):
    """Queries of the next sequence and thirds of blocks, as soon as there is room; pages are known a block ahead."""
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = KEYS // ROWS
    turn, num, nowhere = left * 0, left * 0, c_desc.shape[0]
    while left > 0:
        last = min(first + left, (length + KEYS - 1) // KEYS)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * KEYS, length)
            after = _pages_from(table, first * KEYS, end, nowhere, P, ROWS, TILES)
            half = turn % 2
            mbarrier.wait(q_empty.index(half), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(half), COLS * (D + E) * 2)
            tma.async_copy_global_to_shared(q_desc, [b, 0, 0], q_full.index(half), q_smem.index(half))
            tma.async_copy_global_to_shared(q2_desc, [b, 0, D], q_full.index(half), q2_smem.index(half))
            for key in range(first * KEYS, end, KEYS):
                here = after
                after = _pages_from(table, key + KEYS, end, nowhere, P, ROWS, TILES)
                for third in gl.static_range(3):
                    slot = num % RING
                    mbarrier.wait(empty.index(slot), ((num // RING) & 1) ^ 1)
                    mbarrier.expect(full.index(slot), 3 * KEYS * 64 * 2)
                    for c in gl.static_range(3):
                        for j in gl.static_range(TILES):
                            at = [here[j], (key + j * ROWS) % P, (third * 3 + c) * 64]
                            to = ring.index((slot * 3 + c) * TILES + j)
                            tma.async_copy_global_to_shared(c_desc, at, full.index(slot), to)
                    num += 1
            turn += 1
        left -= last - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)


@gluon_jit
def _stripe(ring, num, which, KEYS: gl.constexpr, ROWS: gl.constexpr, RING: gl.constexpr):
    """64 columns of a block whose thirds begin with this one."""
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], DTYPE)
    slot = (num + which // 3) % RING
    return ring.index((slot * 3 + which % 3) * (KEYS // ROWS))._reinterpret(DTYPE, [KEYS, 64], L)


@gluon_jit
def _summed(ring, num, which: gl.constexpr, p_smem, o, alpha, KEYS: gl.constexpr, ROWS: gl.constexpr,
            RING: gl.constexpr):  # fmt: skip
    """The sums of 64 columns with this block's."""
    values = _stripe(ring, num, which, KEYS, ROWS, RING).permute((1, 0))
    return warpgroup_mma(values, p_smem, o * gl.expand_dims(alpha, 0), is_async=True)


@gluon_jit
def _anew(number):
    """The number, as if nobody had known it before: what is worked out from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _leave(found, factor, to_ptr, heads, d, COLS: gl.constexpr):
    """Sums of 8 × 64 columns of all heads, times a factor of each head, in accesses of four elements."""
    FROM: gl.constexpr = found[0].type.layout
    L: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    head = gl.arange(0, COLS, gl.SliceLayout(0, L))
    col = gl.arange(0, 64, gl.SliceLayout(1, L))
    to = to_ptr + gl.expand_dims(head * _anew(d), 0) + gl.expand_dims(col, 1)
    there = gl.expand_dims(head < heads, 0)
    by = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, FROM)), 0)
    for i in gl.static_range(8):
        gl.store(to + i * 64, gl.convert_layout(found[i] * by, L).to(to_ptr.dtype.element_ty), mask=there)


@gluon_jit
def _latent_ring(
    q_smem, q2_smem, ring, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d, b, first, left, length,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, RING: gl.constexpr,
    EARLY: gl.constexpr, DTYPE: gl.constexpr,
):
    """One group of four warps: scores of a block as its thirds arrive, keys as rows; then the sums of 8 × 64 columns,
    turned."""
    q_full, q_empty, full, empty = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    head = gl.arange(0, COLS, HEAD)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    zeros = gl.zeros([64, COLS], gl.float32, L)
    turn, num = left * 0, left * 0
    while left > 0:
        units = (length + KEYS - 1) // KEYS
        last = min(first + left, units)
        if last > first:
            end, half = min(last * KEYS, length), turn % 2
            q = q_smem.index(half).reshape([COLS, D])
            q2 = q2_smem.index(half).reshape([COLS, E]).permute((1, 0))
            top = gl.full([COLS], float("-inf"), gl.float32, HEAD)
            sums = gl.zeros([KEYS, COLS], gl.float32, L)
            o0, o1, o2, o3, o4, o5, o6, o7 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
            mbarrier.wait(q_full.index(half), (turn // 2) & 1)
            for key in range(first * KEYS, end, KEYS):
                s = zeros
                for third in gl.static_range(3):
                    mbarrier.wait(full.index((num + third) % RING), ((num + third) // RING) & 1)
                    for c in gl.static_range(3):
                        stripe = _stripe(ring, num, third * 3 + c, KEYS, ROWS, RING)
                        if third * 3 + c < D // 64:
                            mine = q.slice((third * 3 + c) * 64, 64, dim=1).permute((1, 0))
                            s = warpgroup_mma(stripe, mine, s, use_acc=third * 3 + c > 0, is_async=True)
                        else:
                            s = warpgroup_mma(stripe, q2, s, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                rest = end - key
                s = gl.where(gl.expand_dims(row < rest, 1), s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 0))
                alpha = gl.exp2((top - raised) * scale)
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
                sums = sums * gl.expand_dims(alpha, 0) + p
                top = raised
                p_smem.store(p.to(DTYPE))
                if (rest < KEYS) & (rest % ROWS != 0):  # whole tiles past the end are zeros already
                    for i in range(D // 64):
                        _without_the_rest(_stripe(ring, num, i, KEYS, ROWS, RING), rest, KEYS, 64)
                fence_async_shared()
                o0 = _summed(ring, num, 0, p_smem, o0, alpha, KEYS, ROWS, RING)
                o1 = _summed(ring, num, 1, p_smem, o1, alpha, KEYS, ROWS, RING)
                o2 = _summed(ring, num, 2, p_smem, o2, alpha, KEYS, ROWS, RING)
                o3 = _summed(ring, num, 3, p_smem, o3, alpha, KEYS, ROWS, RING)
                o4 = _summed(ring, num, 4, p_smem, o4, alpha, KEYS, ROWS, RING)
                o5 = _summed(ring, num, 5, p_smem, o5, alpha, KEYS, ROWS, RING)
                o6 = _summed(ring, num, 6, p_smem, o6, alpha, KEYS, ROWS, RING)
                o7 = _summed(ring, num, 7, p_smem, o7, alpha, KEYS, ROWS, RING)
                o0, o1, o2, o3, o4, o5, o6, o7 = warpgroup_mma_wait(0, [o0, o1, o2, o3, o4, o5, o6, o7])
                for third in gl.static_range(3):
                    mbarrier.arrive(empty.index((num + third) % RING), count=1)
                num += 3
            mbarrier.arrive(q_empty.index(half), count=1)
            turn += 1
            total = gl.sum(sums, 0)
            found = (o0, o1, o2, o3, o4, o5, o6, o7)
            if (first == 0) & (last == units):
                inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
                _leave(found, inverse, out_ptr + (b.to(gl.int64) * heads) * d, heads, d, COLS)
            else:
                place = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
                gl.store(seen_ptr + place * 2 * heads + head, top * scale, mask=head < heads)
                gl.store(seen_ptr + (place * 2 + 1) * heads + head, total, mask=head < heads)
                one = gl.full([COLS], 1.0, gl.float32, HEAD)
                _leave(found, one, part_ptr + (place.to(gl.int64) * heads) * d, heads, d, COLS)
        left -= last - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    _let_join_start(EARLY == 2)


@gluon_jit
def latent_ring(
    q_desc, q2_desc, c_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b, pages, d,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    RING: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
):
    """``latent_few`` for 512 + 64 dims and pages of whole 16 keys: one warp feeds one group through the copy engine, by
    thirds of a block (three stripes of 64 columns), so that there is always something to ask for."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    gl.static_assert(D == 512)
    gl.static_assert(E == 64)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, COLS, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [2, 1, COLS, E], q2_desc.layout)
    ring = gl.allocate_shared_memory(DTYPE, [RING * 3 * (KEYS // ROWS), 1, ROWS, 64], c_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLS], P_L)
    bars = (_barriers(2, 1), _barriers(2, 1), _barriers(RING, 1), _barriers(RING, 1))
    b, first, left = _first_of(lens, batch, 1, KEYS, LEAST)
    length = gl.load(lens_ptr + b)
    gl.warp_specialize([
        (_latent_ring, (q_smem, q2_smem, ring, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d, b,
                        first, left, length, D, E, KEYS, ROWS, COLS, RING, EARLY, DTYPE)),
        (_feed_ring, (q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, bars, table_ptr, lens_ptr, table_b, b, first,
                      left, length, D, E, P, KEYS, ROWS, COLS, RING)),
    ], [1], [56])  # fmt: skip


@gluon_jit
def _feed_line(
    q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, bars, table_ptr, lens_ptr, table_b, d, head0, b, first, left,
    length,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    COLS: gl.constexpr, QUERIES: gl.constexpr,
):
    """Blocks of the cache as soon as there is room; queries of the next sequence after its first block, where one's fit
    when the scores of the one before are there. Of a last block only pages that have keys are copied."""
    q_full, q_empty, c_full, c_empty = bars
    TILES: gl.constexpr = KEYS // ROWS
    STRIPES: gl.constexpr = (D + E) // 64
    turn, num, stripes = left * 0, left * 0, (d + E) // 64  # as the compiler does not know: unrolled it would spill
    while left > 0:
        last = min(first + left, (length + KEYS - 1) // KEYS)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * KEYS, length)
            after = _pages_of(table, first * KEYS, end, P, ROWS, TILES)
            for block in range(first, last):
                slot, key = num % STAGES, block * KEYS
                here = after
                after = _pages_of(table, key + KEYS, end, P, ROWS, TILES)
                mbarrier.wait(c_empty.index(slot), ((num // STAGES) & 1) ^ 1)
                tiles = min((end - key + ROWS - 1) // ROWS, TILES)
                for i in gl.static_range(1, TILES + 1):
                    mbarrier.expect(c_full.index(slot), i * ROWS * (D + E) * 2, pred=tiles == i)
                for s in range(stripes):
                    for j in gl.static_range(TILES):
                        to = ring.index((slot * STRIPES + s) * TILES + j)
                        at = [here[j], (key + j * ROWS) % P, s * 64]
                        tma.async_copy_global_to_shared(c_desc, at, c_full.index(slot), to, pred=j < tiles)
                if block == first:
                    half = turn % QUERIES
                    mbarrier.wait(q_empty.index(half), ((turn // QUERIES) & 1) ^ 1)
                    mbarrier.expect(q_full.index(half), 2 * COLS * (D + E) * 2)
                    tma.async_copy_global_to_shared(q_desc, [b, head0, 0], q_full.index(half), q_smem.index(half))
                    tma.async_copy_global_to_shared(q2_desc, [b, head0, D], q_full.index(half), q2_smem.index(half))
                num += 1
            turn += 1
        left -= last - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)


@gluon_jit
def _latent_line(
    c: gl.constexpr, q_smem, q2_smem, ring, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d,
    stretch, head0, b, first, left, length,
    R: gl.constexpr, D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    COLS: gl.constexpr, QUERIES: gl.constexpr, EARLY: gl.constexpr, DTYPE: gl.constexpr,
):
    """One group of four warps: half of the heads, keys and then dims as rows of the products and heads as columns, so
    that neither group waits for the other, and one's products hide the other's softmax."""
    q_full, q_empty, c_full, c_empty = bars
    TILES: gl.constexpr = KEYS // ROWS
    STRIPES: gl.constexpr = (D + E) // 64
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    BLOCK_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    MORE_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, E], DTYPE)
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    head = c * COLS + gl.arange(0, COLS, HEAD)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    none = gl.zeros([KEYS, COLS], gl.float32, L)
    turn, num = left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        last = min(first + left, blocks)
        if last > first:
            half = turn % QUERIES
            top = gl.full([COLS], float("-inf"), gl.float32, HEAD)
            sums = gl.zeros([KEYS, COLS], gl.float32, L)
            o = gl.zeros([D, COLS], gl.float32, L)
            mbarrier.wait(q_full.index(half), (turn // QUERIES) & 1)
            for i in range(first, last):
                slot = num % STAGES
                block = ring.index(slot * STRIPES * TILES)._reinterpret(DTYPE, [KEYS, D], BLOCK_L)
                more = ring.index((slot * STRIPES + D // 64) * TILES)._reinterpret(DTYPE, [KEYS, E], MORE_L)
                here = half
                if QUERIES == 1:
                    here = _anew(half)  # places are worked out here, and not kept through the loop
                q = q_smem.index(here).reshape([2 * COLS, D]).slice(c * COLS, COLS, dim=0).permute((1, 0))
                q2 = q2_smem.index(here).reshape([2 * COLS, E]).slice(c * COLS, COLS, dim=0).permute((1, 0))
                mbarrier.wait(c_full.index(slot), (num // STAGES) & 1)
                s = warpgroup_mma(block, q, none, use_acc=False, is_async=True)
                s = warpgroup_mma(more, q2, s, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                if i + 1 == last:
                    mbarrier.arrive(q_empty.index(half), count=1)
                rest = length - i * KEYS
                s = gl.where(gl.expand_dims(row < rest, 1), s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 0))
                alpha = gl.exp2((top - raised) * scale)  # a block has a key that counts, so that raised is a number
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
                sums = sums * gl.expand_dims(alpha, 0) + p
                top = raised
                p_smem.index(c).store(p.to(DTYPE))
                if rest < KEYS:
                    _without_the_rest(block, rest, KEYS, D)  # the other group writes the same
                fence_async_shared()
                o = o * gl.expand_dims(alpha, 0)
                o = warpgroup_mma(block.permute((1, 0)), p_smem.index(c), o, is_async=True)
                o = warpgroup_mma_wait(0, [o])
                mbarrier.arrive(c_empty.index(slot), count=1)
                num += 1
            turn += 1
            total = gl.sum(sums, 0)
            col = gl.arange(0, D, gl.SliceLayout(1, L))
            mine = head < min(heads - head0, R)
            inside = gl.expand_dims(mine, 0)
            if (first == 0) & (last == blocks):
                whole = o / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0)
                to = out_ptr + (b.to(gl.int64) * heads + head0) * d
                at = gl.expand_dims(head * _anew(d), 0) + gl.expand_dims(col, 1)  # not kept all the way
                gl.store(to + at, whole.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                place = stretch * 2 + (first == 0).to(gl.int32)
                at = gl.expand_dims(head * _anew(d), 0) + gl.expand_dims(col, 1)
                gl.store(part_ptr + (place.to(gl.int64) * heads + head0) * d + at, o, mask=inside)
                at_seen = seen_ptr + place * 2 * heads + head0 + head
                gl.store(at_seen, top * scale, mask=mine)
                gl.store(at_seen + heads, total, mask=mine)
        left -= last - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    _let_join_start(EARLY == 2)


@gluon_jit
def latent_line(
    q_desc, q2_desc, c_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b, pages, d,
    R: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, COLS: gl.constexpr, QUERIES: gl.constexpr, BATCH: gl.constexpr,
    LEAST: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
):
    """``latent_blocks`` over the line that paged attention cuts, whatever lengths are, and for pages of whole 16 keys.
    GROUPS programs beside each other take the same stretch, R heads each, so that one of them finds what it reads in
    the L2."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES, 1, 2 * COLS, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [QUERIES, 1, 2 * COLS, E], q2_desc.layout)
    ring = gl.allocate_shared_memory(DTYPE, [STAGES * (D + E) // 64 * (KEYS // ROWS), 1, ROWS, 64], c_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, COLS], P_L)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, 2), _barriers(STAGES, 1), _barriers(STAGES, 2))
    stretch, head0 = gl.program_id(0) // GROUPS, gl.program_id(0) % GROUPS * R
    b, first, left, line = _place_of(lens, batch, 1, stretch, gl.num_programs(0) // GROUPS, KEYS, LEAST)
    length = gl.load(lens_ptr + b)
    gl.warp_specialize([
        (_latent_line, (0, q_smem, q2_smem, ring, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d,
                        stretch, head0, b, first, left, length, R, D, E, KEYS, ROWS, STAGES, COLS, QUERIES, EARLY,
                        DTYPE)),
        (_latent_line, (1, q_smem, q2_smem, ring, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d,
                        stretch, head0, b, first, left, length, R, D, E, KEYS, ROWS, STAGES, COLS, QUERIES, EARLY,
                        DTYPE)),
        (_feed_line, (q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, bars, table_ptr, lens_ptr, table_b, d, head0,
                      b, first, left, length, D, E, P, KEYS, ROWS, STAGES, COLS, QUERIES)),
    ], [4, 1], [232, 40])  # fmt: skip
