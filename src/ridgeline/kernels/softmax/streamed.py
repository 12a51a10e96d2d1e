"""Softmax of long rows on Hopper, in Gluon: rows pass through shared memory, read once, the next ones on their way.

Shapes: R rows, C columns, S shares of a row. A program holds one share of a row at a time, CHUNKS pieces of BLOCK
columns, in one of SLOTS places of shared memory; while it works on one, copies fill the others. Where a row has several
shares, programs tell each other what they found in words of global memory and finish a row one turn later, when the
others' words have long arrived; all of them must be on the device at once. Where 16-bit rows are many, a program has
one row and no next one (``softmax_forward_packed``): that several of them share an SM overlaps more than any
row that is on its way. Longer rows are a cluster's, whose programs tell each other what they found through shared
memory.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.row_stream import (
    FLAT,
    PLAIN,
    columns,
    halves,
    higher_bf16,
    higher_fp16,
    join_cluster,
    paired,
    spread,
    told_by_cluster,
    widened,
    word_of,
    words_when_there,
)

LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32: rows that a mask fills with it share alike
LOG2_E = gl.constexpr(1.4426950408889634)
HUGE = gl.constexpr(1e38)  # 16-bit numbers as large as this are equal, or so far apart that a power is zero


@gluon_jit
def base_of(top, NARROW: gl.constexpr):
    """What powers of two are taken of, a·x − b: a, b, and what powers are multiplied by to be those of e, exp(x − top).

    One product and sum an element; b is rounded, and what that changes for all of a row alike is put right once.
    """
    scale = gl.where((top > HUGE) | (top < -HUGE), 1.0, LOG2_E)
    base = top * scale
    return scale, base, gl.exp2(gl.fma(-top, scale, base)) if NARROW else 1.0


@gluon_jit
def power(x, top, scale, base, NARROW: gl.constexpr):
    """exp(x − top), but for a factor; for 16-bit numbers the power of two, which is as right as they are."""
    return gl.exp2(x * scale - base) if NARROW else gl.exp2((x - top) * LOG2_E)


@gluon_jit
def quotient(e, total):
    """e / total as if divided: a product with the inverse rounds twice, what is left of it puts that right.

    Three instructions; a division has branches besides, for numbers that powers and their sums cannot be.
    """
    total = total + gl.zeros_like(e)
    inverse = 1.0 / total
    q = e * inverse
    return gl.fma(gl.fma(-q, total, e), inverse, q)


@gluon_jit
def inside(access, low, left, UNALIGNED: gl.constexpr):
    """Which accesses belong to the row as a whole."""
    return (access >= low) & (access < left) if UNALIGNED else access < left


@gluon_jit
def edge_positions(lead, end, first, length, VECTOR: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Columns of a row's first and last access where these belong to neighbors as well, and which are the row's own.

    Shared memory takes whole accesses; these few elements are read, added and written one by one, by the program that
    has the share they lie in.
    """
    k = gl.arange(0, 2 * VECTOR, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    last = end // VECTOR * VECTOR
    at = gl.where(k < VECTOR, k, last + k - VECTOR)
    own = (at >= lead) & (at < end) & (at >= first) & (at < first + length)
    return at - lead, own & ((k >= VECTOR) | (lead > 0))


@gluon_jit
def softmax_forward_streamed(
    x_ptr,  # [R, C], rows x_stride apart
    y_ptr,  # [R, C]
    word_ptr,  # [R, S] maximum and sum of each share, zero at first; unused where a row is one share
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    x_stride,
    EVEN: gl.constexpr,  # every share fills its place
    MEET: gl.constexpr,
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
    UNALIGNED: gl.constexpr,  # rows are unaligned; all rows of a program at the same place
    KEPT: gl.constexpr,  # powers wait for the row's sum in registers; else they are computed again
):
    """A share's maximum and sum of powers, then, one turn later where rows are shared, its results."""
    WAIT: gl.constexpr = 0 if KEPT else LAG  # turns that a place is needed for after its share has come
    NUM_WARPS: gl.constexpr = gl.num_warps()
    NARROW: gl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    lead = 0
    low = 0
    if UNALIGNED:
        lead = (group.to(gl.int64) * cols % VECTOR).to(gl.int32)
        low = gl.maximum(lead - first, 0)
    end = lead + cols
    left = gl.minimum(length, end - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    access = c
    x_row = group.to(gl.int64) * x_stride
    y_row = group.to(gl.int64) * cols
    if UNALIGNED:
        access = c // VECTOR * VECTOR
        first = first // VECTOR * VECTOR
        low = (low + VECTOR - 1) // VECTOR * VECTOR
        left = gl.maximum(left, 0) // VECTOR * VECTOR
        edge, own = edge_positions(lead, end, first, length, VECTOR, NUM_WARPS)
        x_edge = x_ptr + x_row + edge
        y_edge = y_ptr + y_row + edge
        x_row = x_row // VECTOR * VECTOR
        y_row = y_row // VECTOR * VECTOR
    x_at = x_ptr + x_row + first + c
    y_at = y_ptr + y_row + first + c
    word_row = word_ptr + group.to(gl.int64) * num_shares
    x_step = num_groups.to(gl.int64) * x_stride
    y_step = num_groups.to(gl.int64) * cols
    if UNALIGNED:
        x_step = x_step // VECTOR * VECTOR
        y_step = y_step // VECTOR * VECTOR
    word_step = num_groups.to(gl.int64) * num_shares
    for turn in gl.static_range(SLOTS - WAIT):
        there = inside(access, low, gl.where(turn < num_turns, left, 0), UNALIGNED)
        async_copy.async_copy_global_to_shared(smem.index(turn), x_at + turn * x_step, mask=there)
        async_copy.commit_group()
    if UNALIGNED:
        edge_now = gl.load(x_edge, mask=own, other=float("-inf")).to(gl.float32)
        edge_before = edge_now + 0.0  # not the same value: see row_stream.py
    if KEPT:
        e_before = gl.zeros([CHUNKS, BLOCK], gl.float32, L)
        mine_before = (share * 0).to(gl.float32)
        factor_before = (group * 0).to(gl.float32)
    for turn in range(num_turns + LAG):
        if UNALIGNED:
            edge_next = x_edge + (turn + 1) * x_step
            edge_next = gl.load(edge_next, mask=own & (turn + 1 < num_turns), other=float("-inf")).to(gl.float32)
        async_copy.wait_group(SLOTS - WAIT - 1)
        x = widened(smem.index(turn % SLOTS).load(L))
        if not EVEN:
            x = gl.where(inside(access, low, left, UNALIGNED), x, float("-inf"))
        top = gl.maximum(gl.max(gl.max(x, axis=0), axis=0), LOWEST)
        if UNALIGNED:
            top = gl.maximum(top, gl.max(edge_now, axis=0))
        scale, base, factor = base_of(top, NARROW)
        e = power(x, top, scale, base, NARROW)
        total = gl.sum(gl.sum(e, axis=0), axis=0)
        if UNALIGNED:
            total += gl.sum(power(edge_now, top, scale, base, NARROW), axis=0)
        total *= factor
        done = turn - LAG
        mine = top
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(top, total), sem="relaxed")
            if done >= 0:
                k, tops, totals = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                top = gl.max(gl.where(k < num_shares, tops, LOWEST), axis=0)
                total = gl.sum(gl.where(k < num_shares, totals * gl.exp(tops - top), 0.0), axis=0)
                total = gl.where(total < 0.5, 0.0, total)  # nothing but −inf: what is left is the words' lowest bits
            if KEPT:
                e_now = e
                mine_now = mine
                factor_now = factor
                e = e_before
                mine = mine_before
                factor = factor_before
            elif LAG or not NARROW:
                scale, base, factor = base_of(top, NARROW)
                before = widened(smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
                e = power(before, top, scale, base, NARROW)
                mine = top
        if NARROW:
            factor *= gl.exp(mine - top) / total
            y = e * factor
        else:
            y = quotient(e, total)
        there = inside(access, low, gl.where(done >= 0, left, 0), UNALIGNED)
        if UNALIGNED:
            if KEPT:
                scale, base, factor = base_of(top, NARROW)
                factor = factor / total
            at_edge = power(edge_before if LAG else edge_now, top, scale, base, NARROW)
            at_edge = at_edge * factor if NARROW else quotient(at_edge, total)
            gl.store(y_edge + done * y_step, at_edge.to(y_ptr.dtype.element_ty), mask=own & (done >= 0))
            edge_before = edge_now
            edge_now = edge_next
        gl.store(y_at + done * y_step, y.to(y_ptr.dtype.element_ty), mask=there)
        if KEPT:
            e_before = e_now
            mine_before = mine_now
            factor_before = factor_now
        ahead = turn - WAIT + SLOTS
        there = inside(access, low, gl.where(ahead < num_turns, left, 0), UNALIGNED)
        async_copy.async_copy_global_to_shared(smem.index(ahead % SLOTS), x_at + ahead * x_step, mask=there)
        async_copy.commit_group()


@gluon_jit
def softmax_backward_streamed(
    dy_ptr,  # [R, C]
    y_ptr,  # [R, C]
    dx_ptr,  # [R, C]
    word_ptr,  # [R, S] each share's sum of y·dy, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    MEET: gl.constexpr,
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
    UNALIGNED: gl.constexpr,
):
    """dx = y·(dy − Σ y·dy). What is past the end was copied as zeros and adds nothing."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    y_smem = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    lead = 0
    low = 0
    if UNALIGNED:
        lead = (group.to(gl.int64) * cols % VECTOR).to(gl.int32)
        low = gl.maximum(lead - first, 0)
    end = lead + cols
    left = gl.minimum(length, end - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    access = c
    row = group.to(gl.int64) * cols
    if UNALIGNED:
        access = c // VECTOR * VECTOR
        first = first // VECTOR * VECTOR
        low = (low + VECTOR - 1) // VECTOR * VECTOR
        left = gl.maximum(left, 0) // VECTOR * VECTOR
        edge, own = edge_positions(lead, end, first, length, VECTOR, NUM_WARPS)
        edge = row + edge
        row = row // VECTOR * VECTOR
    at = row + first + c
    step = num_groups.to(gl.int64) * cols
    if UNALIGNED:
        step = step // VECTOR * VECTOR
    word_row = word_ptr + group.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    for turn in gl.static_range(SLOTS - LAG):
        there = inside(access, low, gl.where(turn < num_turns, left, 0), UNALIGNED)
        async_copy.async_copy_global_to_shared(y_smem.index(turn), y_ptr + at + turn * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(turn), dy_ptr + at + turn * step, mask=there)
        async_copy.commit_group()
    if UNALIGNED:
        y_now = gl.load(y_ptr + edge, mask=own, other=0.0).to(gl.float32)
        dy_now = gl.load(dy_ptr + edge, mask=own, other=0.0).to(gl.float32)
        y_before = y_now + 0.0
        dy_before = dy_now + 0.0
    for turn in range(num_turns + LAG):
        if UNALIGNED:
            more = own & (turn + 1 < num_turns)
            y_next = gl.load(y_ptr + edge + (turn + 1) * step, mask=more, other=0.0).to(gl.float32)
            dy_next = gl.load(dy_ptr + edge + (turn + 1) * step, mask=more, other=0.0).to(gl.float32)
        async_copy.wait_group(SLOTS - LAG - 1)
        y = widened(y_smem.index(turn % SLOTS).load(L))
        dy = widened(dy_smem.index(turn % SLOTS).load(L))
        level = gl.sum(gl.sum(y * dy, axis=0), axis=0)
        if UNALIGNED:
            level += gl.sum(y_now * dy_now, axis=0)
        done = turn - LAG
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(level, level), sem="relaxed")
            if done >= 0:
                k, parts, _ = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                level = gl.sum(gl.where(k < num_shares, parts, 0.0), axis=0)
        if LAG:
            y = widened(y_smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
            dy = widened(dy_smem.index((turn + SLOTS - LAG) % SLOTS).load(L))
        there = inside(access, low, gl.where(done >= 0, left, 0), UNALIGNED)
        if UNALIGNED:
            dx_edge = (y_before if LAG else y_now) * ((dy_before if LAG else dy_now) - level)
            gl.store(dx_ptr + edge + done * step, dx_edge.to(dx_ptr.dtype.element_ty), mask=own & (done >= 0))
            y_before = y_now
            dy_before = dy_now
            y_now = y_next
            dy_now = dy_next
        gl.store(dx_ptr + at + done * step, (y * (dy - level)).to(dx_ptr.dtype.element_ty), mask=there)
        ahead = done + SLOTS
        there = inside(access, low, gl.where(ahead < num_turns, left, 0), UNALIGNED)
        async_copy.async_copy_global_to_shared(y_smem.index(ahead % SLOTS), y_ptr + at + ahead * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(ahead % SLOTS), dy_ptr + at + ahead * step, mask=there)
        async_copy.commit_group()


@gluon_jit
def softmax_forward_packed(
    x_ptr,  # [R, C] of 16 bits, rows x_stride apart
    y_ptr,  # [R, C]
    cols,
    x_stride,
    length,
    SHARES: gl.constexpr,  # programs of a row, which are a cluster
    CHUNKS: gl.constexpr,
    FULL: gl.constexpr,  # pieces that every share has whole, but for the last: 16384 columns spill without its mask
    SHARED: gl.constexpr,  # the first pieces wait in shared memory, the others in registers
    BLOCK: gl.constexpr,
    UNALIGNED: gl.constexpr,  # rows are unaligned, those read and those written at the same place
    READS: gl.constexpr,  # what the L2 is told of what is read and written
    WRITES: gl.constexpr,
):
    """A row or a share of it a program, asked for at once and held as it came, two numbers a word; none has a next row.

    Several CTAs per SM overlap: one's row comes while another's powers are computed and written. Where
    rows are unaligned, whole accesses are the row and the few elements outside them are handled apart. Programs
    that share a row start together and tell each other what they found through shared memory.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    LOWEST_TWO: gl.constexpr = -8323200 if BF16 else -67044352  # two of −inf
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    PIECE: gl.constexpr = BLOCK // 2  # in words of two numbers
    places = ()
    for _ in gl.static_range(SHARED):
        places = places + (gl.allocate_shared_memory(gl.int32, [PIECE], FLAT),)  # type: ignore[assignment]
    row = gl.program_id(0).to(gl.int64)
    share = 0
    lead = 0
    first = 0
    width = cols // 2
    if SHARES > 1:
        room = join_cluster(SHARES)
        row = (gl.program_id(0) // SHARES).to(gl.int64)
        share = gl.program_id(0) % SHARES
        first = share * length
    if UNALIGNED:
        lead = ((8 - row * cols % 8) % 8).to(gl.int32)
        width = gl.maximum(cols - lead, 0) // 8 * 4
        last = lead + width * 2
    if SHARES > 1:
        width = gl.minimum(length // 2, width - first // 2)
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (row * x_stride + first + lead) // 8 * 4 + c
    y_at = y_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (row * cols + first + lead) // 8 * 4 + c
    for i in gl.static_range(SHARED):
        if i < FULL:
            async_copy.async_copy_global_to_shared(places[i], x_at + i * PIECE)
        else:
            async_copy.async_copy_global_to_shared(places[i], x_at + i * PIECE, mask=access < width - i * PIECE)
    async_copy.commit_group()
    if UNALIGNED:
        k = gl.arange(0, 16, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
        edge = gl.where(k < 8, k, last + k - 8)
        own = gl.where(k < 8, k < lead, True) & (edge < cols) & (share == 0)
        ends = gl.load(x_ptr + row * x_stride + edge, mask=own, other=float("-inf")).to(gl.float32)
    held = ()
    for i in gl.static_range(SHARED, CHUNKS):
        if i < FULL:
            words = gl.load(x_at + i * PIECE, eviction_policy=READS)
        else:
            there = access < width - i * PIECE
            words = gl.load(x_at + i * PIECE, mask=there, other=LOWEST_TWO, eviction_policy=READS)
        held = held + (words,)  # type: ignore[assignment]
    highest = gl.full([PIECE], LOWEST_TWO, gl.int32, L)
    for i in gl.static_range(CHUNKS - SHARED):
        highest = higher_bf16(highest, held[i]) if BF16 else higher_fp16(highest, held[i])
    async_copy.wait_group(0)
    for i in gl.static_range(SHARED):
        words = places[i].load(L)
        if i >= FULL:
            words = gl.where(access < width - i * PIECE, words, LOWEST_TWO)
        highest = higher_bf16(highest, words) if BF16 else higher_fp16(highest, words)
    a, b = halves(highest, BF16)
    top = gl.maximum(gl.max(gl.maximum(a, b), axis=0), LOWEST)
    if UNALIGNED:
        top = gl.maximum(top, gl.max(ends, axis=0))
    scale, base, rounding = base_of(top, True)
    gl.thread_barrier()  # what is read before it is read again behind it: kept, it would take registers
    sums = gl.zeros([PIECE], gl.float32, L)
    for i in gl.static_range(CHUNKS):
        if i < SHARED:
            words = places[i].load(L)
            if i >= FULL:
                words = gl.where(access < width - i * PIECE, words, LOWEST_TWO)
        else:
            words = held[i - SHARED]
        a, b = halves(words, BF16)
        sums += power(a, top, scale, base, True) + power(b, top, scale, base, True)
    total = gl.sum(sums, axis=0)
    if UNALIGNED:
        end_powers = power(ends, top, scale, base, True)
        total += gl.sum(end_powers, axis=0)
        to = y_ptr + row * cols + edge
        if SHARES == 1:
            gl.store(to, (end_powers * (1.0 / total)).to(y_ptr.dtype.element_ty), mask=own)
    gl.thread_barrier()
    again = base - 1.0  # other powers than those above: kept from there they would take two registers a word
    factor = gl.exp2(again - base)
    if SHARES > 1:
        k, tops, totals = told_by_cluster(room, top, total * rounding, SHARES, NUM_WARPS)
        best = gl.max(gl.where(k < SHARES, tops, LOWEST), axis=0)
        total = gl.sum(gl.where(k < SHARES, totals * gl.exp(tops - best), 0.0), axis=0)
        factor *= rounding * gl.exp(top - best)
        if UNALIGNED:
            at_ends = end_powers * (rounding * gl.exp(top - best) / total)
            gl.store(to, at_ends.to(y_ptr.dtype.element_ty), mask=own)
    factor = factor / total  # alone, the rounding is that of powers and of their sum
    for i in gl.static_range(CHUNKS):
        if i < SHARED:
            a, b = halves(places[i].load(L), BF16)
        else:
            a, b = halves(held[i - SHARED], BF16)
        a = power(a, top, scale, again, True) * factor
        b = power(b, top, scale, again, True) * factor
        if i < FULL:
            gl.store(y_at + i * PIECE, paired(a, b, BF16), eviction_policy=WRITES)
        else:
            there = access < width - i * PIECE
            gl.store(y_at + i * PIECE, paired(a, b, BF16), mask=there, eviction_policy=WRITES)
