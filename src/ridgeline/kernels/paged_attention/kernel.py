"""One query row a sequence against its paged keys and values: the cache is read once, by many programs at a time.

Shapes: B sequences, H query heads, K key heads, R = H / K heads that share keys, D head dim, P keys a page.
All R heads that share keys are rows of one product, padded to the 16 that a tensor core wants.

The work is cut evenly whatever the lengths are: blocks of keys of all sequences and key heads stand in one line, and
every program takes an equal stretch of it, which begins and ends anywhere. A sequence that lies inside one stretch is
finished there; of one that crosses a border every program leaves its part, and the last of them or a second kernel
joins the parts.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels import arrival_counter
from ridgeline.kernels.attention.kernel import _barriers, _without_the_rest
from ridgeline.kernels.function import gluon_jit, jit
from ridgeline.kernels.paged_attention.links import (
    arrive_in_cluster,
    attend_cluster,
    join_told,
    power,
    room_for_parts,
    tell_part,
    wait_for_cluster,
)
from ridgeline.kernels.paged_attention.tickets import (
    draw_ticket,
    heard,
    mark_tickets,
    room_for_words,
    say,
    ticket_drawn,
)


@jit
def _prefetch(ptr):
    """Bring what lies there into the L2; nobody waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit
def _line(lens_ptr, batch, key_heads, keys, BATCH: tl.constexpr, ENDS: tl.constexpr = 0):
    """Of every sequence: its number, the blocks of its key heads, and where they end in the line. Its end takes as long
    as ENDS blocks, which stand behind its own."""
    i = tl.arange(0, BATCH)
    blocks = _weight(tl.load(lens_ptr + i, mask=i < batch, other=0), keys, ENDS) * key_heads
    return i, blocks, tl.cumsum(blocks, 0)


@jit
def _weight(length, keys, ENDS: tl.constexpr):
    """Blocks of one key head of a sequence, and those that its end takes as long as."""
    blocks = tl.cdiv(length, keys)
    if ENDS:
        blocks += (length > 0).to(tl.int32) * ENDS
    return blocks


@jit
def _stretches(blocks, programs, LEAST: tl.constexpr):
    """How many programs share the line, the fewest blocks of one, and how many of them, the first, have one more."""
    total = tl.sum(blocks, 0)
    num = tl.maximum(tl.minimum(programs, total // LEAST), 1)
    return num, total // num, total % num


@jit
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


@jit
def _prefetch_table(table_ptr, table_b, pages, batch):
    """A line of the table each, while the lengths are on their way."""
    lines = tl.cdiv(pages, 32)
    line = tl.program_id(0)
    if line < batch * lines:
        _prefetch(table_ptr + (line // lines).to(tl.int64) * table_b + line % lines * 32)


@jit
def _program_of(block, each, longer):
    """Whose stretch a block belongs to."""
    border = longer * (each + 1)
    return tl.where(block < border, block // (each + 1), longer + (block - border) // tl.maximum(each, 1))


@jit
def _pages(table, block, length, KEYS: tl.constexpr, P: tl.constexpr):
    """Where the keys of a block lie, one page for all of them or one each; page 0 past the end."""
    if P % KEYS == 0:
        key = block * KEYS
    else:
        key = block * KEYS + tl.arange(0, KEYS)
    return tl.load(table + key // P, mask=key < length, other=0)


@jit
def _product(a, b):
    """A product in float32 by sums of 16 terms, which are then added up: one chain of all terms rounds more."""
    num: tl.constexpr = a.shape[1] // 16
    left = tl.permute(tl.reshape(a, (a.shape[0], num, 16)), (1, 0, 2))
    return tl.sum(tl.dot(left, tl.reshape(b, (num, 16, b.shape[1])), input_precision="ieee"), 0)


@jit
def _block(k_ptr, v_ptr, page, key, end, col, d, k_page, k_slot, v_page, v_slot, P: tl.constexpr):
    """A block of keys, one a column, and of values, one a row."""
    slot = key % P
    k_at = page.to(tl.int64) * k_page + slot * k_slot
    v_at = page.to(tl.int64) * v_page + slot * v_slot
    there, used = key < end, col < d
    k = tl.load(k_ptr + k_at[None, :] + col[:, None], mask=there[None, :] & used[:, None], other=0.0)
    v = tl.load(v_ptr + v_at[:, None] + col[None, :], mask=there[:, None] & used[None, :], other=0.0)
    return k, v


@jit
def _attend(
    q, k_ptr, v_ptr, table, first, last, length, scale, col, d, k_page, k_slot, v_page, v_slot,
    P: tl.constexpr, KEYS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Online softmax over some blocks of a sequence: (maxima, sums, weighted values), none of them divided.

    Pages are looked up a block before, ahead of the block itself: only then does the compiler copy more than one block
    ahead. APART, for float32, sums few terms at a time.
    """
    m = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    end = tl.minimum(last * KEYS, length)
    now = _pages(table, first, end, KEYS, P)
    for block in range(first, last):
        after = _pages(table, block + 1, end, KEYS, P)
        key = block * KEYS + tl.arange(0, KEYS)
        k, v = _block(k_ptr, v_ptr, now, key, end, col, d, k_page, k_slot, v_page, v_slot, P)
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


@jit
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
    APART: tl.constexpr,
):  # fmt: skip
    """A stretch of the line, sequence by sequence; lens and tables are looked up by everybody at once.

    EARLY lets the joining kernel, which waits for the results itself, start with this one (1) or when programs have
    read their last key (2).
    """
    pid = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, D)
    inside = (row < R)[:, None] & (col < d)[None, :]
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
            P, KEYS, APART,
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


@jit
def paged_join(
    part_ptr, seen_ptr, lens_ptr, out_ptr, batch, key_heads, d, keys, programs,
    R: tl.constexpr, HEADS: tl.constexpr, BATCH: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, EARLY: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The parts of HEADS heads that share keys, one or all R, in the order of their keys and weighted by what each saw;
    zeros where there is no key, and nothing where a sequence lies in one stretch."""
    col = tl.program_id(1) * D + tl.arange(0, D)
    b = tl.program_id(0) * HEADS // (key_heads * R)
    head = tl.program_id(0) * HEADS % (key_heads * R)
    i, blocks, ends = _line(lens_ptr, batch, key_heads, keys, BATCH, ENDS)
    num, each, longer = _stretches(blocks, programs, LEAST)
    length = tl.load(lens_ptr + b)
    of_head = tl.cdiv(length, keys)
    start = tl.sum(tl.where(i < b, blocks, 0), 0) + head // R * _weight(length, keys, ENDS)
    first = _program_of(start, each, longer)
    last = _program_of(start + of_head - 1, each, longer)
    if EARLY:
        gdc_wait()
    if (of_head == 0) | (first < last):
        for h in range(head, head + HEADS):
            row = h % R
            top = tl.full([], float("-inf"), tl.float32)
            whole = tl.zeros([], tl.float32)
            acc = tl.zeros([D], tl.float32)
            for one in range(first, tl.where(of_head == 0, first, last + 1), PARTS):
                part = one + tl.arange(0, PARTS)
                there = part <= last
                at = part * 2 + (part == first).to(tl.int32)
                m = tl.load(seen_ptr + at * 2 * R + row, mask=there, other=float("-inf"))
                total = tl.load(seen_ptr + (at * 2 + 1) * R + row, mask=there, other=0.0)
                sums = tl.load(part_ptr + (at * R + row)[:, None] * d + col[None, :],
                               mask=there[:, None] & (col < d)[None, :], other=0.0)  # fmt: skip
                raised = tl.maximum(top, tl.max(m, 0))
                weight = tl.exp2(m - raised)
                alpha = tl.exp2(top - raised)
                acc = acc * alpha + tl.sum(sums * weight[:, None], 0)
                whole = whole * alpha + tl.sum(total * weight, 0)
                top = raised
            out = acc / tl.where(whole == 0.0, 1.0, whole)
            place = b.to(tl.int64) * key_heads * R + h
            tl.store(out_ptr + place * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)


@jit
def paged_border(
    part_ptr, seen_ptr, lens_ptr, out_ptr, batch, key_heads, d, keys, programs,
    R: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, EARLY: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """``paged_join`` by borders between stretches instead of by heads: where there are more heads than borders, most
    would find nothing to join. Joins the sequence that begins in a program's stretch and goes on past its end, all R
    heads that share its keys at once; and writes zeros for every sequence without a key.
    """
    pid = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.program_id(1) * D + tl.arange(0, D)
    inside = (row < R)[:, None] & (col < d)[None, :]
    i, blocks, ends = _line(lens_ptr, batch, key_heads, keys, BATCH, ENDS)
    num, each, longer = _stretches(blocks, programs, LEAST)
    border = (pid + 1) * each + tl.minimum(pid + 1, longer)
    b = tl.minimum(tl.sum((ends <= border).to(tl.int32), 0), batch - 1)
    within = border - tl.sum(tl.where(ends <= border, blocks, 0), 0)
    length = tl.load(lens_ptr + b)
    of_head = tl.maximum(tl.cdiv(length, keys), 1)
    weight_of = tl.maximum(_weight(length, keys, ENDS), 1)
    kh = within // weight_of
    start = border - within % weight_of
    last = _program_of(start + of_head - 1, each, longer)
    crosses = (start < border) & (border < start + of_head)
    if EARLY:
        gdc_wait()
    if (pid + 1 < num) & crosses & (_program_of(start, each, longer) == pid):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        whole = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for one in range(pid, last + 1, PARTS):
            part = one + tl.arange(0, PARTS)
            at = part * 2 + (part == pid).to(tl.int32)
            there = (row < R)[:, None] & (part <= last)[None, :]
            m = tl.load(seen_ptr + (at * 2 * R)[None, :] + row[:, None], mask=there, other=float("-inf"))
            total = tl.load(seen_ptr + ((at * 2 + 1) * R)[None, :] + row[:, None], mask=there, other=0.0)
            place = (at * R)[None, :] + row[:, None]
            sums = tl.load(part_ptr + place[:, :, None] * d + col[None, None, :],
                           mask=there[:, :, None] & (col < d)[None, None, :], other=0.0)  # fmt: skip
            raised = tl.maximum(top, tl.max(m, 1))
            shift = tl.where(raised == float("-inf"), 0.0, raised)
            weight = tl.exp2(m - shift[:, None])
            alpha = tl.exp2(top - shift)
            acc = acc * alpha[:, None] + tl.sum(sums * weight[:, :, None], 1)
            whole = whole * alpha + tl.sum(total * weight, 1)
            top = raised
        out = acc / tl.where(whole == 0.0, 1.0, whole)[:, None]
        head = (b.to(tl.int64) * key_heads + kh) * R + row
        tl.store(out_ptr + head[:, None] * d + col[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    for empty in range(pid, batch, programs):
        if tl.load(lens_ptr + empty) == 0:
            for one in range(key_heads):
                head = ((empty * key_heads + one) * R + row).to(tl.int64)
                zeros = tl.zeros([ROWS, D], out_ptr.dtype.element_ty)
                tl.store(out_ptr + head[:, None] * d + col[None, :], zeros, mask=inside)


@jit
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


@gluon_jit
def _let_join_start(NOW: gl.constexpr):
    """Lets the joining kernel start, which waits for results itself."""
    if NOW:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_jit
def _fetch_table(table_ptr, table_b, pages, batch):
    """A line of the table each, into the L2, while the lengths are on their way."""
    lines = (pages + 31) // 32
    line = gl.program_id(0)
    if line < batch * lines:
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
            [table_ptr + (line // lines).to(gl.int64) * table_b + line % lines * 32],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon_jit
def _add(a, b):
    return a + b


@gluon_jit
def _lengths(lens_ptr, batch, BATCH: gl.constexpr):
    """All lengths; asked for first of all, since everything waits for them."""
    i = gl.arange(0, BATCH, gl.BlockedLayout([max(1, BATCH // 128)], [32], [4], [0]))
    return gl.load(lens_ptr + i, mask=i < batch, other=0)


@gluon_jit
def _first_of(lens, batch, key_heads, KEYS: gl.constexpr, LEAST: gl.constexpr):
    """This program's stretch: its first sequence, the block of that sequence it begins with, and how many it has."""
    b, within, left, line = _placed(lens, batch, key_heads, KEYS, LEAST)
    return b, within, left


@gluon_jit
def _placed(lens, batch, key_heads, KEYS: gl.constexpr, LEAST: gl.constexpr, ENDS: gl.constexpr = 0):
    """``_first_of``; and where in the line that is, the fewest blocks of a program, how many programs have one more."""
    return _place_of(lens, batch, key_heads, gl.program_id(0), gl.num_programs(0), KEYS, LEAST, ENDS)


@gluon_jit
def _weighed(length, KEYS: gl.constexpr, ENDS: gl.constexpr):
    """``_weight``."""
    blocks = (length + KEYS - 1) // KEYS
    if ENDS:
        blocks += (length > 0).to(gl.int32) * ENDS
    return blocks


@gluon_jit
def _place_of(
    lens, batch, key_heads, pid, programs, KEYS: gl.constexpr, LEAST: gl.constexpr, ENDS: gl.constexpr = 0
):  # fmt: skip
    """``_placed`` of one program."""
    blocks = _weighed(lens, KEYS, ENDS) * key_heads
    ends = gl.associative_scan(blocks, 0, _add)
    total = gl.sum(blocks, 0)
    num = max(min(programs, total // LEAST), 1)
    each, longer = total // num, total % num
    start = pid * each + min(pid, longer)
    b = min(gl.sum((ends <= start).to(gl.int32), 0), batch - 1)
    within = start - gl.sum(gl.where(ends <= start, blocks, 0), 0)
    left = each
    if pid < longer:
        left = each + 1
    if pid >= num:
        left = each * 0
    return b, within, left, (start, each, longer)


@gluon_jit
def _start_of(
    lens, lens_ptr, batch, key_heads, KEYS: gl.constexpr, LEAST: gl.constexpr, ENDS: gl.constexpr, BESIDE: gl.constexpr
):  # fmt: skip
    """This program's first sequence, key head and block, how many blocks it has, that sequence's length, and where in
    the line that is. BESIDE: a head each of as many neighbors as there are key heads, which have the same blocks."""
    if BESIDE:
        kh, stretches = gl.program_id(0) % key_heads, gl.num_programs(0) // key_heads
        b, first, left, line = _place_of(lens, batch, 1, gl.program_id(0) // key_heads, stretches, KEYS, LEAST, ENDS)
        length = gl.load(lens_ptr + b)
    else:
        b, within, left, line = _placed(lens, batch, key_heads, KEYS, LEAST, ENDS)
        length = gl.load(lens_ptr + b)
        of_head = max(_weighed(length, KEYS, ENDS), 1)
        kh, first = within // of_head, within % of_head
    return b, kh, first, left, length, line


@gluon_jit
def _whose(block, each, longer):
    """Whose stretch a block of the line belongs to."""
    border = longer * (each + 1)
    one = block // (each + 1)
    if block >= border:
        one = longer + (block - border) // max(each, 1)
    return one


@gluon_jit
def _anew(number):
    """The number, as if nobody had known it before: what is worked out from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _span(start, blocks, each, longer):
    """The first and the last program of a sequence that starts there in the line."""
    return _whose(start, each, longer), _whose(start + blocks - 1, each, longer)


@gluon_jit
def _zeros_for_nobody(lens_ptr, out_ptr, batch, heads, d, D: gl.constexpr):
    """Zeros for sequences without a key: nobody's stretch has them."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDE: gl.constexpr = power(D)
    col = gl.arange(0, WIDE, L)
    zeros = gl.zeros([WIDE], gl.float32, L).to(out_ptr.dtype.element_ty)
    for b in range(gl.program_id(0), batch, gl.num_programs(0)):
        if gl.load(lens_ptr + b) == 0:
            for head in range(heads):
                gl.store(out_ptr + (heads.to(gl.int64) * b + head) * d + col, zeros, mask=col < d)


@gluon_jit
def _join_parts(
    part_ptr, seen_ptr, out_ptr, head0, begins, ends, d, R: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr,
    PARTS: gl.constexpr, PADDED: gl.constexpr,
):
    """``paged_join`` of the R heads of one key head, by a group of four warps: parts of programs from ``begins`` to
    ``ends``, PARTS at a time and past the L1, since other programs wrote them. PADDED: heads of d columns are fewer
    than WIDTH."""
    D: gl.constexpr = power(WIDTH)
    WIDE: gl.constexpr = min(4, HEADS)
    J: gl.constexpr = gl.BlockedLayout([1, 1, min(4, D // 32)], [1, 1, 32], [4 // WIDE, WIDE, 1], [2, 1, 0])
    step = d
    if not PADDED:
        step = WIDTH
    SEEN: gl.constexpr = gl.SliceLayout(2, J)
    ROW: gl.constexpr = gl.SliceLayout(0, SEEN)
    SUMS: gl.constexpr = gl.SliceLayout(0, J)
    row = gl.arange(0, HEADS, ROW)
    across = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, SUMS)), 0)
    col = gl.expand_dims(across, 0)
    top = gl.full([HEADS], float("-inf"), gl.float32, ROW)
    whole = gl.zeros([HEADS], gl.float32, ROW)
    acc = gl.zeros([HEADS, D], gl.float32, SUMS)
    for one in range(begins, ends + 1, PARTS):
        part = one + gl.arange(0, PARTS, gl.SliceLayout(1, SEEN))
        at = gl.expand_dims(part * 2 + (part == begins).to(gl.int32), 1)
        there = gl.expand_dims(part <= ends, 1) & gl.expand_dims(row < R, 0)
        m = gl.load(seen_ptr + at * 2 * R + gl.expand_dims(row, 0), mask=there, other=float("-inf"),
                    cache_modifier=".cg")  # fmt: skip
        total = gl.load(seen_ptr + (at * 2 + 1) * R + gl.expand_dims(row, 0), mask=there, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        place = gl.expand_dims((at * R + gl.expand_dims(row, 0)) * step, 2)
        inside = gl.expand_dims(there, 2)
        if PADDED:
            inside = inside & (col < d)
        sums = gl.load(part_ptr + place + col, mask=inside, other=0.0, cache_modifier=".cg")
        raised = gl.maximum(top, gl.max(m, 0))
        shift = gl.where(raised == float("-inf"), 0.0, raised)
        weight = gl.exp2(m - gl.expand_dims(shift, 0))
        alpha = gl.exp2(top - shift)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, SUMS)), 1)
        acc += gl.sum(sums * gl.expand_dims(weight, 2), 0)
        whole = whole * alpha + gl.sum(total * weight, 0)
        top = raised
    divided = gl.convert_layout(gl.where(whole == 0.0, 1.0, whole), gl.SliceLayout(1, SUMS))
    head = gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(1, SUMS)), 1)
    out = (acc / gl.expand_dims(divided, 1)).to(out_ptr.dtype.element_ty)
    inside = head < R
    if PADDED:
        inside = inside & (across < d)
    gl.store(out_ptr + (head0 + head) * step + across, out, mask=inside)


@gluon_jit
def _page_of(table, key, end, P: gl.constexpr, WANTED: gl.constexpr):
    """The page of a key; page 0 past the end."""
    page = key * 0
    if WANTED:
        page = gl.load(table + key // P, mask=key < end, other=0)
    return page


@gluon_jit
def _pages_of(table, key, end, P: gl.constexpr, ROWS: gl.constexpr, NUM: gl.constexpr):
    """Pages of up to eight keys that are ROWS apart."""
    return (
        _page_of(table, key, end, P, True), _page_of(table, key + ROWS, end, P, NUM > 1),
        _page_of(table, key + 2 * ROWS, end, P, NUM > 2), _page_of(table, key + 3 * ROWS, end, P, NUM > 3),
        _page_of(table, key + 4 * ROWS, end, P, NUM > 4), _page_of(table, key + 5 * ROWS, end, P, NUM > 5),
        _page_of(table, key + 6 * ROWS, end, P, NUM > 6), _page_of(table, key + 7 * ROWS, end, P, NUM > 7),
    )  # fmt: skip


@gluon_jit
def _fill(
    desc, smem, full, pages, key, kh, slot, tiles, P: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Copies of a block, ROWS keys of a page and 64 columns each: one after the other they are as the products want.
    The first ``tiles`` have keys."""
    for j in gl.static_range(KEYS // ROWS):
        for h in gl.static_range(D // 64):
            at = [pages[j], (key + j * ROWS) % P, kh, h * 64]
            tile = smem.index((slot * (D // 64) + h) * (KEYS // ROWS) + j)
            tma.async_copy_global_to_shared(desc, at, full.index(slot), tile, pred=j < tiles)


@gluon_jit
def _fill_queries(desc, smem, full, b, head, half, D: gl.constexpr):
    """Copies of a sequence's queries, 64 columns each."""
    for h in gl.static_range(D // 64):
        tma.async_copy_global_to_shared(desc, [b, head, h * 64], full.index(half), smem.index(half * (D // 64) + h))


@gluon.constexpr_function
def main_columns(D):
    """Columns of a head that are one product: all, or of 192 the first 128."""
    return 128 if D == 192 else D


@gluon_jit
def _part_of(smem, tile, DTYPE: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Tiles one after the other, as the products want them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    return smem.index(tile)._reinterpret(DTYPE, [ROWS, WIDTH], layout)


@gluon_jit
def _store_later(to_ptr, head0, o, head, d, R: gl.constexpr, MAIN: gl.constexpr, L: gl.constexpr):
    """The columns of R heads behind the first MAIN."""
    col = MAIN + gl.arange(0, 64, gl.SliceLayout(1, L))
    at = gl.expand_dims((head0 + head) * d, 0) + gl.expand_dims(col, 1)
    inside = gl.expand_dims(head < R, 0) & gl.expand_dims(col < d, 1)
    gl.store(to_ptr + at, o.to(to_ptr.dtype.element_ty), mask=inside)


@gluon_jit
def _feed_columns(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, b, kh, first, left,
    length,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr,
):
    """Queries of the next sequence and blocks of the cache, as soon as there is room; pages are known a block ahead."""
    q_full, q_empty, full, empty = bars
    turn, num = left * 0, left * 0
    while left > 0:
        goes = min(first + left, _weighed(length, KEYS, ENDS))
        last = min(goes, (length + KEYS - 1) // KEYS)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * KEYS, length)
            after = _pages_of(table, first * KEYS, end, P, ROWS, KEYS // ROWS)
            half = turn % QUERIES
            mbarrier.wait(q_empty.index(half), ((turn // QUERIES) & 1) ^ 1)
            mbarrier.expect(q_full.index(half), COLS * D * 2)
            _fill_queries(q_desc, q_smem, q_full, b, kh * R, half, D)
            for block in range(first, last):
                slot, parity, key = num % STAGES, ((num // STAGES) & 1) ^ 1, block * KEYS
                here = after
                after = _pages_of(table, key + KEYS, end, P, ROWS, KEYS // ROWS)
                mbarrier.wait(empty.index(slot), parity)
                tiles = key * 0 + KEYS // ROWS
                if SKIPS:
                    tiles = min((end - key + ROWS - 1) // ROWS, tiles)
                for i in gl.static_range(1 if SKIPS else KEYS // ROWS, KEYS // ROWS + 1):
                    mbarrier.expect(full.index(slot), 2 * i * ROWS * D * 2, pred=tiles == i)
                _fill(k_desc, k_smem, full, here, key, kh, slot, tiles, P, D, KEYS, ROWS)
                _fill(v_desc, v_smem, full, here, key, kh, slot, tiles, P, D, KEYS, ROWS)
                num += 1
            turn += 1
        left -= goes - first
        first = first * 0
        b, kh, length = _next_of(b, kh, left, length, lens_ptr, key_heads, False)


@gluon_jit
def _left_at(first, kh, key_heads, R: gl.constexpr, BESIDE: gl.constexpr):
    """Where a program leaves its part, in rows, what it saw, and how far apart maxima and sums are: the part of a
    sequence that began before or of one that goes on, of R heads; BESIDE: of all heads, of which R are this one's."""
    if BESIDE:
        half, step = gl.program_id(0) // key_heads * 2 + (first == 0).to(gl.int32), key_heads * R
        return (half * step + kh * R).to(gl.int64), half * 2 * step + kh * R, step
    else:
        half = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
        return half.to(gl.int64) * R, half * 2 * R, R


@gluon_jit
def _next_of(b, kh, left, length, lens_ptr, key_heads, BESIDE: gl.constexpr):
    """The next sequence of a program, or the next key head of this one; and its length."""
    if BESIDE:
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    else:
        kh += 1
        if kh == key_heads:
            kh = kh * 0
            b += 1
            length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    return b, kh, length


@gluon_jit
def _columns(
    q_smem, k_smem, v_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale, batch, key_heads, d,
    b, kh, first, left, length, line, told,
    R: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, DTYPE: gl.constexpr, JOINS: gl.constexpr, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, TOGETHER: gl.constexpr, ENDS: gl.constexpr, PADDED: gl.constexpr, GATHERED: gl.constexpr,
    BESIDE: gl.constexpr,
):
    """Scores and sums with keys, then dims, as rows of the products, and heads as columns."""
    gl.static_assert(not (BESIDE and JOINS))
    at_block, each, longer = line
    if TOGETHER > 1:
        room, even, rank = told
        head0 = ((b * key_heads + kh) * R).to(gl.int64)
        nothing = left == 0
        if even == 0:
            _zeros_for_nobody(lens_ptr, out_ptr, batch, key_heads * R, d, D)
    elif JOINS:
        _zeros_for_nobody(lens_ptr, out_ptr, batch, key_heads * R, d, D)
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = D // 64 * (KEYS // ROWS)
    MAIN: gl.constexpr = main_columns(D)
    LATER: gl.constexpr = MAIN // 64 * (KEYS // ROWS)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    head = gl.arange(0, COLS, gl.SliceLayout(0, L))
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    col = gl.arange(0, MAIN, gl.SliceLayout(1, L))
    none = gl.zeros([KEYS, COLS], gl.float32, L)
    turn, num = left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        goes = min(first + left, _weighed(length, KEYS, ENDS))
        last = min(goes, blocks)
        if last > first:
            if JOINS:
                known = gl.load(count_ptr + _whose(at_block - first, each, longer))
            half = turn % QUERIES
            q = _part_of(q_smem, half * (D // 64), DTYPE, COLS, MAIN).permute((1, 0))
            top = gl.full([COLS], float("-inf"), gl.float32, gl.SliceLayout(0, L))
            sums = gl.zeros([KEYS, COLS], gl.float32, L)
            o = gl.zeros([MAIN, COLS], gl.float32, L)
            o2 = gl.zeros([64, COLS], gl.float32, L)
            mbarrier.wait(q_full.index(half), (turn // QUERIES) & 1)
            for block in range(first, last):
                slot, parity = num % STAGES, (num // STAGES) & 1
                keys = _part_of(k_smem, slot * TILES, DTYPE, KEYS, MAIN)
                values = _part_of(v_smem, slot * TILES, DTYPE, KEYS, MAIN)
                mbarrier.wait(full.index(slot), parity)
                if GATHERED:
                    fence_async_shared()
                s = warpgroup_mma(keys, q, none, use_acc=False, is_async=True)
                if D > MAIN:
                    q2 = _part_of(q_smem, half * (D // 64) + MAIN // 64, DTYPE, COLS, 64).permute((1, 0))
                    s = warpgroup_mma(_part_of(k_smem, slot * TILES + LATER, DTYPE, KEYS, 64), q2, s, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                rest = length - block * KEYS
                s = gl.where(gl.expand_dims(row < rest, 1), s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 0))
                alpha = gl.exp2((top - raised) * scale)
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
                sums = sums * gl.expand_dims(alpha, 0) + p
                top = raised
                p_smem.store(p.to(DTYPE))
                if rest < KEYS:
                    _without_the_rest(values, rest, KEYS, MAIN)
                    if D > MAIN:
                        _without_the_rest(_part_of(v_smem, slot * TILES + LATER, DTYPE, KEYS, 64), rest, KEYS, 64)
                fence_async_shared()
                o = o * gl.expand_dims(alpha, 0)
                o = warpgroup_mma(values.permute((1, 0)), p_smem, o, is_async=True)
                if D > MAIN:
                    values2 = _part_of(v_smem, slot * TILES + LATER, DTYPE, KEYS, 64)
                    o2 = warpgroup_mma(values2.permute((1, 0)), p_smem, o2 * gl.expand_dims(alpha, 0), is_async=True)
                    o, o2 = warpgroup_mma_wait(0, [o, o2])
                else:
                    o = warpgroup_mma_wait(0, [o])
                mbarrier.arrive(empty.index(slot), count=1)
                num += 1
            mbarrier.arrive(q_empty.index(half), count=1)
            turn += 1
            total = gl.sum(sums, 0)
            inside = gl.expand_dims(head < R, 0) & gl.expand_dims(col < d, 1)
            alone = (first == 0) & (last == blocks)
            apart = True
            if TOGETHER > 1:
                apart = even == 0
                alone = alone & apart
                if even == 1:
                    tell_part(room, rank, o, top * scale, total, R, TOGETHER)
            if alone:
                whole = o / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0)
                at = gl.expand_dims(((b.to(gl.int64) * key_heads + kh) * R + head) * d, 0) + gl.expand_dims(col, 1)
                gl.store(out_ptr + at, whole.to(out_ptr.dtype.element_ty), mask=inside)
                if D > MAIN:
                    whole2 = o2 / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0)
                    _store_later(out_ptr, (b.to(gl.int64) * key_heads + kh) * R, whole2, head, d, R, MAIN, L)
            elif apart:
                place, saw, step = _left_at(first, kh, key_heads, R, BESIDE)
                at = gl.expand_dims((place + head) * d, 0) + gl.expand_dims(col, 1)
                gl.store(part_ptr + at, o, mask=inside)
                if D > MAIN:
                    _store_later(part_ptr, place, o2, head, d, R, MAIN, L)
                gl.store(seen_ptr + saw + head, top * scale, mask=head < R)
                gl.store(seen_ptr + saw + step + head, total, mask=head < R)
                if JOINS:
                    begins, ends = _span(_anew(at_block) - first, blocks, each, longer)  # not kept all the way
                    arrival_counter.begin_group(count_ptr + begins, known)
                    if arrival_counter.group_comes_last(count_ptr + begins, ends - begins + 1):
                        head0 = (b.to(gl.int64) * key_heads + kh) * R
                        _join_parts(part_ptr, seen_ptr, out_ptr, head0, begins, ends, d, R, HEADS, D, JOINS, PADDED)
                        gl.store(count_ptr + begins, 0)
        left -= goes - first
        at_block += goes - first
        first = first * 0
        b, kh, length = _next_of(b, kh, left, length, lens_ptr, key_heads, BESIDE)
    if TOGETHER > 1:
        if even == 1:
            if nothing:
                no_key = gl.full([COLS], float("-inf"), gl.float32, gl.SliceLayout(0, L))
                tell_part(room, rank, gl.zeros([D, COLS], gl.float32, L), no_key, gl.zeros_like(no_key), R, TOGETHER)
            join_told(room, rank, out_ptr + head0 * d, d, R, R, D, TOGETHER)
    _let_join_start(EARLY == 2)


@gluon_jit
def paged_columns(
    q_desc, k_desc, v_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale, batch, key_heads,
    table_b, pages, d,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
    JOINS: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr,
    PADDED: gl.constexpr,
):
    """``paged_share`` for heads of 64, 128, 192 or 256 and pages of whole 16 keys: one warp feeds a group of four
    through the copy engine, many blocks ahead and from one sequence into the next.

    LEAVES: what is read leaves the L2 first, so that nothing else has to. JOINS: how many parts the last program of a
    sequence joins at once, of HEADS heads (R of them there); 0 leaves them to a second kernel. ``count_ptr`` [programs]
    int64 counts, by the first program of a sequence, who has left a part; it is never cleared. QUERIES: sequences whose
    queries are there or on their way. SKIPS: of a sequence's last block only pages that have keys are copied. ENDS:
    blocks that a sequence's end takes as long as, which count where the line is cut.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    TILES: gl.constexpr = STAGES * (D // 64) * (KEYS // ROWS)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * (D // 64), 1, COLS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], v_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLS], P_L)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 1), _barriers(STAGES, 1))
    b, kh, first, left, length, line = _start_of(lens, lens_ptr, batch, key_heads, KEYS, LEAST, ENDS, False)
    gl.warp_specialize([
        (_columns, (q_smem, k_smem, v_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale,
                    batch, key_heads, d, b, kh, first, left, length, line, line, R, D, KEYS, ROWS, COLS, STAGES, EARLY,
                    DTYPE, JOINS, HEADS, QUERIES, 1, ENDS, PADDED, False, False)),
        (_feed_columns, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b,
                         b, kh, first, left, length, R, D, P, KEYS, ROWS, COLS, STAGES, QUERIES, SKIPS, ENDS)),
    ], [1], [40])  # fmt: skip


@gluon_jit
def _gather(
    from_ptr, at, there, d, smem, slot, D: gl.constexpr, DTYPE: gl.constexpr, KEYS: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Threads copy a block's keys, each from where it lies (``at``, in elements), 16 bytes at a time; zeros where there
    is none."""
    col = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    place, there = from_ptr + gl.expand_dims(at, 1) + col, gl.expand_dims(there, 1)
    for h in gl.static_range(D // 64):
        to = _part_of(smem, slot * (D // 64) + h, DTYPE, KEYS, 64)
        async_copy.async_copy_global_to_shared(to, place + h * 64, mask=there & (h * 64 + col < d))


@gluon_jit
def _feed_gathered(
    q_desc, k_ptr, v_ptr, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, d, steps, b, kh, first,
    left, length,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, ENDS: gl.constexpr, DTYPE: gl.constexpr, BESIDE: gl.constexpr,
):
    """``_feed_columns`` by four warps, whose threads know the page of every key."""
    q_full, q_empty, full, empty = bars
    k_page, k_slot, k_head, v_page, v_slot, v_head = steps
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    turn, num = left * 0, left * 0
    while left > 0:
        goes = min(first + left, _weighed(length, KEYS, ENDS))
        last = min(goes, (length + KEYS - 1) // KEYS)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * KEYS, length)
            keys_at, values_at = k_ptr + kh.to(gl.int64) * k_head, v_ptr + kh.to(gl.int64) * v_head
            key = first * KEYS + row
            after = gl.load(table + key // P, mask=key < end, other=0)
            half = turn % QUERIES
            mbarrier.wait(q_empty.index(half), ((turn // QUERIES) & 1) ^ 1)
            mbarrier.expect(q_full.index(half), COLS * D * 2)
            _fill_queries(q_desc, q_smem, q_full, b, kh * R, half, D)
            for _ in range(first, last):
                slot, parity = num % STAGES, ((num // STAGES) & 1) ^ 1
                page, within, there = after, key % P, key < end
                key += KEYS
                after = gl.load(table + key // P, mask=key < end, other=0)
                mbarrier.wait(empty.index(slot), parity)
                page = page.to(gl.int64)
                _gather(keys_at, page * k_page + within * k_slot, there, d, k_smem, slot, D, DTYPE, KEYS, L)
                _gather(values_at, page * v_page + within * v_slot, there, d, v_smem, slot, D, DTYPE, KEYS, L)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                num += 1
            turn += 1
        left -= goes - first
        first = first * 0
        b, kh, length = _next_of(b, kh, left, length, lens_ptr, key_heads, BESIDE)


@gluon_jit
def paged_gathered(
    q_desc, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale, batch, key_heads, table_b,
    pages, d, k_page, k_slot, k_head, v_page, v_slot, v_head,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr, JOINS: gl.constexpr, HEADS: gl.constexpr,
    QUERIES: gl.constexpr, ENDS: gl.constexpr, PADDED: gl.constexpr, BESIDE: gl.constexpr,
):
    """``paged_columns`` for pages of any number of keys and heads of whole 8 columns: four warps copy every key from
    where it lies, blocks ahead as the copy engine would, and pad heads to D, whole 64 columns, in shared memory alone.
    The copy engine can only be told of runs of keys, and is slow where a box ends beyond a row (d = 80 74.4 µs where
    threads that also compute took 51.5).

    BESIDE: as many neighbors as there are key heads take the same stretch, a head each: where a head is no whole 64
    bytes, memory answers with bytes of its neighbor, which finds them in the L2 if it reads the same keys now."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], DTYPE)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * (D // 64), 1, COLS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64), KEYS, 64], TILE_L)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64), KEYS, 64], TILE_L)
    p_smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLS], P_L)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 128), _barriers(STAGES, 1))
    b, kh, first, left, length, line = _start_of(lens, lens_ptr, batch, key_heads, KEYS, LEAST, ENDS, BESIDE)
    steps = (k_page, k_slot, k_head, v_page, v_slot, v_head)
    gl.warp_specialize([
        (_columns, (q_smem, k_smem, v_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale,
                    batch, key_heads, d, b, kh, first, left, length, line, line, R, D, KEYS, KEYS, COLS, STAGES, EARLY,
                    DTYPE, JOINS, HEADS, QUERIES, 1, ENDS, PADDED, True, BESIDE)),
        (_feed_gathered, (q_desc, k_ptr, v_ptr, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b,
                          d, steps, b, kh, first, left, length, R, D, P, KEYS, COLS, STAGES, QUERIES, ENDS, DTYPE,
                          BESIDE)),
    ], [4], [64])  # fmt: skip


@gluon_jit
def _feed_together(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, b, kh, first, left,
    length,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr,
):
    """``_feed_columns`` of a program that is one of a cluster."""
    arrive_in_cluster()
    _feed_columns(q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, b, kh,
                  first, left, length, R, D, P, KEYS, ROWS, COLS, STAGES, QUERIES, SKIPS, ENDS)  # fmt: skip
    wait_for_cluster()


@gluon_jit
def even_lengths(lens, batch, KEYS: gl.constexpr, EVEN: gl.constexpr):
    """Whether the longest sequence has at most EVEN quarters of the blocks that all have on average."""
    blocks = (lens + KEYS - 1) // KEYS
    return (4 * gl.max(blocks, 0) * batch <= EVEN * gl.sum(blocks, 0)).to(gl.int32)


@gluon_jit
def _unit_of(length, KEYS: gl.constexpr, TOGETHER: gl.constexpr):
    """Where every cluster takes one key head of one sequence: this program's first block, and how many it has."""
    blocks, rank = (length + KEYS - 1) // KEYS, gl.program_id(0) % TOGETHER
    each, longer = blocks // TOGETHER, blocks % TOGETHER
    left = each
    if rank < longer:
        left = each + 1
    return rank * each + min(rank, longer), left


@gluon_jit
def paged_together(
    q_desc, k_desc, v_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale, batch, key_heads,
    table_b, pages, d,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
    JOINS: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr,
    TOGETHER: gl.constexpr, EVEN: gl.constexpr,
):
    """``paged_columns`` where sequences are few and about as long as each other: a cluster of TOGETHER programs takes
    one key head of one, and tells its parts through shared memory; or a program takes it whole, where TOGETHER is 1.
    Programs beyond then have nothing to do.

    Where the longest sequence is more than EVEN quarters of what all are on average, the line is cut as ever.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    TILES: gl.constexpr = STAGES * (D // 64) * (KEYS // ROWS)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    mine = gl.program_id(0) // TOGETHER
    lens = _lengths(lens_ptr, batch, BATCH)
    length = gl.load(lens_ptr + mine // key_heads, mask=mine < batch * key_heads, other=0)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * (D // 64), 1, COLS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], v_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLS], P_L)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 1), _barriers(STAGES, 1))
    rank = gl.program_id(0) % TOGETHER
    room = rank
    if TOGETHER > 1:
        room = room_for_parts(rank, R, D, TOGETHER)
        arrive_in_cluster()
    even = even_lengths(lens, batch, KEYS, EVEN)
    if mine >= batch * key_heads:
        even = even * 2
    first, left = _unit_of(length, KEYS, TOGETHER)
    b, kh, line = mine // key_heads, mine % key_heads, (first, left, left)
    if even == 0:
        b, kh, first, left, length, line = _start_of(lens, lens_ptr, batch, key_heads, KEYS, LEAST, ENDS, False)
    told = (room, even, rank)
    if TOGETHER > 1:  # a cluster's barrier waits for all warps, those without work too
        gl.warp_specialize([
            (_columns, (q_smem, k_smem, v_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale,
                        batch, key_heads, d, b, kh, first, left, length, line, told, R, D, KEYS, ROWS, COLS, STAGES,
                        EARLY, DTYPE, JOINS, HEADS, QUERIES, TOGETHER, ENDS, False, False, False)),
            (_feed_together, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads,
                              table_b, b, kh, first, left, length, R, D, P, KEYS, ROWS, COLS, STAGES, QUERIES, SKIPS,
                              ENDS)),
            (attend_cluster, ()), (attend_cluster, ()), (attend_cluster, ()),
        ], [1, 1, 1, 1], [40, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_columns, (q_smem, k_smem, v_smem, p_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale,
                        batch, key_heads, d, b, kh, first, left, length, line, line, R, D, KEYS, ROWS, COLS, STAGES,
                        EARLY, DTYPE, JOINS, HEADS, QUERIES, 1, ENDS, False, False, False)),
            (_feed_columns, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads,
                             table_b, b, kh, first, left, length, R, D, P, KEYS, ROWS, COLS, STAGES, QUERIES, SKIPS,
                             ENDS)),
        ], [1], [40])  # fmt: skip


@gluon_jit
def _feed_units(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, room, table_ptr, lens_ptr, count_ptr, key_heads, table_b,
    pages, units,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr,
):
    """Queries and blocks of one sequence after the other (each key head of each): the first is this program's own, the
    next one is whichever nobody has taken yet. Of a last block only pages that have keys are copied."""
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = KEYS // ROWS
    unit, turn, num = gl.program_id(0), key_heads * 0, key_heads * 0
    known = gl.load(count_ptr)
    while unit < units:
        b, kh = unit // key_heads, unit % key_heads
        length, table, half = gl.load(lens_ptr + b), table_ptr + b.to(gl.int64) * table_b, turn % QUERIES
        after = _pages_of(table, kh * 0, pages * P, P, ROWS, TILES)  # looked up while the length is on its way
        mbarrier.wait(q_empty.index(half), ((turn // QUERIES) & 1) ^ 1)
        say(room, half, unit, length)
        mbarrier.expect(q_full.index(half), COLS * D * 2)
        _fill_queries(q_desc, q_smem, q_full, b, kh * R, half, D)
        if turn == 0:
            mark_tickets(count_ptr, known)
        ticket = draw_ticket(count_ptr, turn)
        for key in range(0, length, KEYS):
            slot, here = num % STAGES, after
            after = _pages_of(table, key + KEYS, length, P, ROWS, TILES)
            mbarrier.wait(empty.index(slot), ((num // STAGES) & 1) ^ 1)
            tiles = min((length - key + ROWS - 1) // ROWS, TILES)
            for i in gl.static_range(1, TILES + 1):
                mbarrier.expect(full.index(slot), 2 * i * ROWS * D * 2, pred=tiles == i)
            _fill(k_desc, k_smem, full, here, key, kh, slot, tiles, P, D, KEYS, ROWS)
            _fill(v_desc, v_smem, full, here, key, kh, slot, tiles, P, D, KEYS, ROWS)
            num += 1
        turn += 1
        mine = ticket_drawn(ticket)
        if mine == units - 1:
            gl.store(count_ptr, 0)  # everybody has drawn all of theirs
        unit = gl.num_programs(0) + mine
    half = turn % QUERIES
    mbarrier.wait(q_empty.index(half), ((turn // QUERIES) & 1) ^ 1)
    say(room, half, turn * 0 - 1, turn * 0)
    mbarrier.arrive(q_full.index(half), count=1)


@gluon_jit
def _columns_of_units(
    q_smem, k_smem, v_smem, p_smem, bars, room, out_ptr, scale, d,
    R: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    DTYPE: gl.constexpr, QUERIES: gl.constexpr,
):
    """``_columns`` of whole sequences, as they are told."""
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = D // 64 * (KEYS // ROWS)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    head = gl.arange(0, COLS, gl.SliceLayout(0, L))
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    col = gl.arange(0, D, gl.SliceLayout(1, L))
    inside = gl.expand_dims(head < R, 0) & gl.expand_dims(col < d, 1)
    none = gl.zeros([KEYS, COLS], gl.float32, L)
    turn, num = d * 0, d * 0
    mbarrier.wait(q_full.index(0), 0)
    unit, length = heard(room, turn)
    while unit >= 0:
        half = turn % QUERIES
        q = _part_of(q_smem, half * (D // 64), DTYPE, COLS, D).permute((1, 0))
        top = gl.full([COLS], float("-inf"), gl.float32, gl.SliceLayout(0, L))
        sums = gl.zeros([KEYS, COLS], gl.float32, L)
        o = gl.zeros([D, COLS], gl.float32, L)
        for key in range(0, length, KEYS):
            slot, parity, rest = num % STAGES, (num // STAGES) & 1, length - key
            keys = _part_of(k_smem, slot * TILES, DTYPE, KEYS, D)
            values = _part_of(v_smem, slot * TILES, DTYPE, KEYS, D)
            mbarrier.wait(full.index(slot), parity)
            s = warpgroup_mma(keys, q, none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            s = gl.where(gl.expand_dims(row < rest, 1), s, float("-inf"))
            raised = gl.maximum(top, gl.max(s, 0))
            alpha = gl.exp2((top - raised) * scale)
            p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
            sums = sums * gl.expand_dims(alpha, 0) + p
            top = raised
            p_smem.store(p.to(DTYPE))
            if rest < KEYS:
                _without_the_rest(values, rest, KEYS, D)
            fence_async_shared()
            o = o * gl.expand_dims(alpha, 0)
            o = warpgroup_mma(values.permute((1, 0)), p_smem, o, is_async=True)
            o = warpgroup_mma_wait(0, [o])
            mbarrier.arrive(empty.index(slot), count=1)
            num += 1
        mbarrier.arrive(q_empty.index(half), count=1)
        total = gl.sum(sums, 0)
        whole = o / gl.expand_dims(gl.where(total == 0.0, 1.0, total), 0)
        at = gl.expand_dims((unit.to(gl.int64) * R + head) * d, 0) + gl.expand_dims(col, 1)
        gl.store(out_ptr + at, whole.to(out_ptr.dtype.element_ty), mask=inside)
        turn += 1
        mbarrier.wait(q_full.index(turn % QUERIES), (turn // QUERIES) & 1)
        unit, length = heard(room, turn % QUERIES)


@gluon_jit
def paged_units(
    q_desc, k_desc, v_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, count_ptr, scale, batch, key_heads,
    table_b, pages, d,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, LEAVES: gl.constexpr, QUERIES: gl.constexpr,
):
    """``paged_columns`` where sequences (each key head of each) are many and short: a program takes one whole, then the
    next that nobody has taken, so that whoever is served faster takes more. Nothing is cut, joined or added up first;
    ``count_ptr`` says how many have been taken."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    TILES: gl.constexpr = STAGES * (D // 64) * (KEYS // ROWS)
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * (D // 64), 1, COLS, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [TILES, 1, ROWS, 1, 64], v_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [KEYS, COLS], P_L)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, 1), _barriers(STAGES, 1), _barriers(STAGES, 1))
    room = room_for_words(QUERIES)
    gl.warp_specialize([
        (_columns_of_units, (q_smem, k_smem, v_smem, p_smem, bars, room, out_ptr, scale, d, R, D, KEYS, ROWS, COLS,
                             STAGES, DTYPE, QUERIES)),
        (_feed_units, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, room, table_ptr, lens_ptr, count_ptr,
                       key_heads, table_b, pages, batch * key_heads, R, D, P, KEYS, ROWS, COLS, STAGES, QUERIES)),
    ], [1], [48])  # fmt: skip
