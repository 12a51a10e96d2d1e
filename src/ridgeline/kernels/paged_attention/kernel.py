"""One query row a sequence against its paged keys and values: the cache is read once, by many programs at a time.

Shapes: B sequences, H query heads, K key heads, R = H / K heads that share keys, D head dim, P keys a page.
All R heads that share keys are rows of one product, padded to the 16 that a tensor core wants.

The work is cut evenly whatever the lengths are: blocks of keys of all sequences and key heads stand in one line, and
every program takes an equal stretch of it, which begins and ends anywhere. A sequence that lies inside one stretch is
finished there; of one that crosses a border every program leaves its part, and a second kernel joins the parts.
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
def _line(lens_ptr, batch, key_heads, keys, BATCH: tl.constexpr):
    """Of every sequence: its number, the blocks of its key heads, and where they end in the line."""
    i = tl.arange(0, BATCH)
    blocks = tl.cdiv(tl.load(lens_ptr + i, mask=i < batch, other=0), keys) * key_heads
    return i, blocks, tl.cumsum(blocks, 0)


@triton.jit
def _stretches(blocks, programs, LEAST: tl.constexpr):
    """How many programs share the line, the fewest blocks of one, and how many of them, the first, have one more."""
    total = tl.sum(blocks, 0)
    num = tl.maximum(tl.minimum(programs, total // LEAST), 1)
    return num, total // num, total % num


@triton.jit
def _stretch_of(blocks, ends, batch, LEAST: tl.constexpr):
    """This program's stretch: its first sequence, the block of that sequence it begins with, and how many it has.

    Blocks of a sequence are counted through its key heads.
    """
    pid = tl.program_id(0)
    num, each, longer = _stretches(blocks, tl.num_programs(0), LEAST)
    start = pid * each + tl.minimum(pid, longer)
    left = tl.where(pid < num, each + (pid < longer).to(tl.int32), 0)
    b = tl.sum((ends <= start).to(tl.int32), 0)
    return tl.minimum(b, batch - 1), start - tl.sum(tl.where(ends <= start, blocks, 0), 0), left


@triton.jit
def _prefetch_table(table_ptr, table_b, pages, batch):
    """A line of the table each, while the lengths are on their way."""
    lines = tl.cdiv(pages, 32)
    line = tl.program_id(0)
    if line < batch * lines:
        _prefetch(table_ptr + (line // lines).to(tl.int64) * table_b + line % lines * 32)


@triton.jit
def _program_of(block, each, longer):
    """Whose stretch a block belongs to."""
    border = longer * (each + 1)
    return tl.where(block < border, block // (each + 1), longer + (block - border) // tl.maximum(each, 1))


@triton.jit
def _pages(table, block, length, KEYS: tl.constexpr, P: tl.constexpr):
    """Where the keys of a block lie, one page for all of them or one each; page 0 past the end."""
    if P % KEYS == 0:
        key = block * KEYS
    else:
        key = block * KEYS + tl.arange(0, KEYS)
    return tl.load(table + key // P, mask=key < length, other=0)


@triton.jit
def _product(a, b):
    """A product in float32 by sums of 16 terms, which are then added up: one chain of all terms rounds twice as much."""
    num: tl.constexpr = a.shape[1] // 16
    left = tl.permute(tl.reshape(a, (a.shape[0], num, 16)), (1, 0, 2))
    return tl.sum(tl.dot(left, tl.reshape(b, (num, 16, b.shape[1])), input_precision="ieee"), 0)


@triton.jit
def _block(k_ptr, v_ptr, page, key, end, col, d, k_page, k_slot, v_page, v_slot, P: tl.constexpr, POLICY: tl.constexpr):
    """A block of keys, one a column, and of values, one a row."""
    slot = key % P
    k_at = page.to(tl.int64) * k_page + slot * k_slot
    v_at = page.to(tl.int64) * v_page + slot * v_slot
    there, used = key < end, col < d
    k = tl.load(k_ptr + k_at[None, :] + col[:, None], mask=there[None, :] & used[:, None], other=0.0,
                eviction_policy=POLICY)  # fmt: skip
    v = tl.load(v_ptr + v_at[:, None] + col[None, :], mask=there[:, None] & used[None, :], other=0.0,
                eviction_policy=POLICY)  # fmt: skip
    return k, v


@triton.jit
def _attend(
    q, k_ptr, v_ptr, table, first, last, length, scale, col, d, k_page, k_slot, v_page, v_slot,
    P: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, HELD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Online softmax over some blocks of a sequence: (maxima, sums, weighted values), none of them divided.

    Blocks are copied ahead into shared memory by the compiler, which takes pages looked up a block before, ahead of the
    block itself; or, HELD, the next block is read into registers while this one is worked on. APART, for float32, sums
    few terms at a time.
    """
    m = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    end = tl.minimum(last * KEYS, length)
    key = first * KEYS + tl.arange(0, KEYS)
    now = _pages(table, first, end, KEYS, P)
    if HELD:
        after = _pages(table, first + 1, end, KEYS, P)
        next_k, next_v = _block(k_ptr, v_ptr, now, key, end, col, d, k_page, k_slot, v_page, v_slot, P, POLICY)
    for block in range(first, last):
        key = block * KEYS + tl.arange(0, KEYS)
        if HELD:
            k, v = next_k, next_v
            next_k, next_v = _block(
                k_ptr, v_ptr, after, key + KEYS, end, col, d, k_page, k_slot, v_page, v_slot, P, POLICY
            )
            after = _pages(table, block + 2, end, KEYS, P)
        else:
            after = _pages(table, block + 1, end, KEYS, P)
            k, v = _block(k_ptr, v_ptr, now, key, end, col, d, k_page, k_slot, v_page, v_slot, P, POLICY)
            now = after
        s = _product(q, k) if APART else tl.dot(q, k)
        s = tl.where((key < end)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s * scale - (m_new * scale)[:, None])  # one rounding: the product and the difference are fused
        alpha = tl.exp2((m - m_new) * scale)
        if APART:
            acc = acc * alpha[:, None] + _product(p, v)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        total = total * alpha + tl.sum(p, 1)
        m = m_new
    return m, total, acc


@triton.jit
def paged_share(
    q_ptr,  # [B, H, D]
    k_ptr,  # [pages, P, K, D] by strides
    v_ptr,
    table_ptr,  # [B, pages of the longest] int32
    lens_ptr,  # [B] int32
    out_ptr,  # [B, H, D]
    part_ptr,  # [programs, 2, R, D] fp32: of a sequence that began before, and of one that goes on
    seen_ptr,  # [programs, 2, 2, R] fp32: maxima in base 2, and sums
    scale,  # softmax scale · log2(e)
    batch, key_heads, q_b, q_h, k_page, k_slot, k_head, v_page, v_slot, v_head, table_b, pages, d,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    BATCH: tl.constexpr,  # a power of two no less than the batch; 0: a program takes one key head of one sequence
    LEAST: tl.constexpr,  # blocks of a program, where there are as many
    EARLY: tl.constexpr,
    LEAVES: tl.constexpr,
    HELD: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """A stretch of the line, sequence by sequence; lens and tables are looked up by everybody at once.

    EARLY lets the joining kernel, which waits for the results itself, start with this one (1) or when programs have
    read their last key (2). LEAVES: what is read leaves the L2 first, so that nothing else has to.
    """
    pid = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, D)
    inside = (row < R)[:, None] & (col < d)[None, :]
    policy: tl.constexpr = "evict_first" if LEAVES else ""
    if EARLY == 1:
        gdc_launch_dependents()
    if BATCH == 0:
        b = pid // key_heads
        kh = pid % key_heads
        first = pid * 0
        left = tl.maximum(tl.cdiv(tl.load(lens_ptr + b), KEYS), 1)
    else:
        if EARLY:
            _prefetch_table(table_ptr, table_b, pages, batch)
        i, blocks, ends = _line(lens_ptr, batch, key_heads, KEYS, BATCH)
        b, within, left = _stretch_of(blocks, ends, batch, LEAST)
        of_head = tl.maximum(tl.cdiv(tl.load(lens_ptr + b), KEYS), 1)
        kh = within // of_head
        first = within % of_head
    while left > 0:
        length = tl.load(lens_ptr + b)
        of_head = tl.cdiv(length, KEYS)
        last = tl.minimum(first + left, of_head)
        head = kh * R + row
        q = tl.load(q_ptr + b.to(tl.int64) * q_b + head[:, None] * q_h + col[None, :], mask=inside, other=0.0)
        m, total, acc = _attend(
            q, k_ptr + kh.to(tl.int64) * k_head, v_ptr + kh.to(tl.int64) * v_head,
            table_ptr + b.to(tl.int64) * table_b, first, last, length, scale, col, d, k_page, k_slot, v_page, v_slot,
            P, KEYS, policy, HELD, APART,
        )  # fmt: skip
        if (first == 0) & (last == of_head):
            place = b.to(tl.int64) * key_heads * R + head
            whole = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + place[:, None] * d + col[None, :], whole.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            half = pid * 2 + (first == 0).to(tl.int32)
            tl.store(seen_ptr + half * 2 * R + row, m * scale, mask=row < R)
            tl.store(seen_ptr + (half * 2 + 1) * R + row, total, mask=row < R)
            tl.store(part_ptr + (half * R + row)[:, None] * d + col[None, :], acc, mask=inside)
        left -= tl.maximum(last - first, (BATCH == 0) * 1)
        first = first * 0
        kh += 1
        b += (kh == key_heads).to(tl.int32)
        kh = tl.where(kh == key_heads, 0, kh)
    if EARLY == 2:
        gdc_launch_dependents()


@triton.jit
def paged_join(
    part_ptr, seen_ptr, lens_ptr, out_ptr, batch, key_heads, d, keys, programs,
    R: tl.constexpr, BATCH: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one head, in the order of their keys, weighted by what each saw; zeros where there is no key."""
    place = tl.program_id(0)
    col = tl.program_id(1) * D + tl.arange(0, D)
    b = place // (key_heads * R)
    head = place % (key_heads * R)
    i, blocks, ends = _line(lens_ptr, batch, key_heads, keys, BATCH)
    num, each, longer = _stretches(blocks, programs, LEAST)
    of_head = tl.cdiv(tl.load(lens_ptr + b), keys)
    start = tl.sum(tl.where(i < b, blocks, 0), 0) + head // R * of_head
    first = _program_of(start, each, longer)
    last = _program_of(start + of_head - 1, each, longer)
    if EARLY:
        gdc_wait()
    if (of_head == 0) | (first < last):
        top = tl.full([], float("-inf"), tl.float32)
        whole = tl.zeros([], tl.float32)
        acc = tl.zeros([D], tl.float32)
        for one in range(first, tl.where(of_head == 0, first, last + 1), PARTS):
            part = one + tl.arange(0, PARTS)
            there = part <= last
            at = part * 2 + (part == first).to(tl.int32)
            m = tl.load(seen_ptr + at * 2 * R + head % R, mask=there, other=float("-inf"))
            total = tl.load(seen_ptr + (at * 2 + 1) * R + head % R, mask=there, other=0.0)
            sums = tl.load(part_ptr + (at * R + head % R)[:, None] * d + col[None, :],
                           mask=there[:, None] & (col < d)[None, :], other=0.0)  # fmt: skip
            raised = tl.maximum(top, tl.max(m, 0))
            weight = tl.exp2(m - raised)
            alpha = tl.exp2(top - raised)
            acc = acc * alpha + tl.sum(sums * weight[:, None], 0)
            whole = whole * alpha + tl.sum(total * weight, 0)
            top = raised
        out = acc / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out_ptr + place.to(tl.int64) * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)


@triton.jit
def shares_join(
    part_ptr, lse_ptr, out_ptr, shares, d, SHARES: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Where every sequence has the same number of shares: those of one head, weighted by what each saw."""
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
    whole = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + place * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)
