"""Latent decoding of at most 32 heads: one group of warps makes scores, two make sums, and a warp feeds them.

Shapes as in ``kernel.py``. Keys, then dims, are rows of the products and heads are columns: a product of 64 rows takes
about as long with 32 columns as with 16, so that scores that two groups make twice, or heads that they halve, cost as
much again, which is more time than memory takes to bring a block. Here nothing is made twice. The group that makes
scores tells probabilities and a factor for what came before; while one block's sums are made, or a sequence's results
are written, the next one's scores are. A block of 64 keys comes in thirds of three stripes of 64 columns, the last of
which is the rotary part, and a third is free again once both groups that make sums have left it.

The line of all keys is cut by UNIT keys, which may be fewer than a block has: then every program reads as much as its
neighbors to within so many keys. Where a sequence begins is looked up while the one before is asked for.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention.kernel import _barriers, _without_the_rest
from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.latent_attention.kernel import _anew, _stripe
from ridgeline.kernels.latent_attention.roles import _piece_of, _wait_room, _wait_turn
from ridgeline.kernels.paged_attention.kernel import _lengths, _let_join_start, _pages_of, _place_of


@gluon_jit
def fetch_tables(table_ptr, table_b, pages, batch):
    """Lines of all tables into the L2, one a thread, while the lengths are on their way."""
    lines = (pages + 31) // 32
    line = gl.program_id(0) + gl.num_programs(0) * gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    line = gl.where(line < batch * lines, line, 0)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
        [table_ptr + (line // lines).to(gl.int64) * table_b + line % lines * 32],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon_jit
def _feed(
    q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, bars, table_ptr, lens_ptr, table_b, pages, d, b, first, left,
    length,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, UNIT: gl.constexpr, ROWS: gl.constexpr,
    COLS: gl.constexpr, RING: gl.constexpr, QUERIES: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Thirds of blocks as soon as there is room, and queries of a sequence after its first block. Of a last block only
    tiles that have keys are copied."""
    full, empty, q_full, q_empty = bars
    TILES: gl.constexpr = KEYS // ROWS
    turn, num, thirds = left * 0, left * 0, (d + E) // 192  # unrolled it would spill
    start = _pages_of(table_ptr + b.to(gl.int64) * table_b, first * UNIT, length, P, ROWS, TILES)
    while left > 0:
        goes, last = _piece_of(first, left, length, UNIT, ENDS)
        left -= goes - first
        after = start
        length_after = gl.load(lens_ptr + b + 1, mask=left > 0, other=0)
        table_end = gl.where(left > 0, pages * P, 0)
        start = _pages_of(table_ptr + (b + 1).to(gl.int64) * table_b, left * 0, table_end, P, ROWS, TILES)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * UNIT, length)
            for key in range(first * UNIT, end, KEYS):
                here = after
                after = _pages_of(table, key + KEYS, end, P, ROWS, TILES)
                tiles = min((end - key + ROWS - 1) // ROWS, TILES)
                for third in range(thirds):
                    slot = num % RING
                    _wait_room(empty, num, RING)
                    for i in gl.static_range(1, TILES + 1):
                        mbarrier.expect(full.index(slot), i * ROWS * 192 * 2, pred=tiles == i)
                    for c in gl.static_range(3):
                        for j in gl.static_range(TILES):
                            at = [here[j], (key + j * ROWS) % P, (third * 3 + c) * 64]
                            to = ring.index((slot * 3 + c) * TILES + j)
                            tma.async_copy_global_to_shared(c_desc, at, full.index(slot), to, pred=j < tiles)
                    num += 1
                if key == first * UNIT:
                    half = turn % QUERIES
                    _wait_room(q_empty, turn, QUERIES)
                    mbarrier.expect(q_full.index(half), COLS * (D + E) * 2)
                    tma.async_copy_global_to_shared(q_desc, [b, 0, 0], q_full.index(half), q_smem.index(half))
                    tma.async_copy_global_to_shared(q2_desc, [b, 0, D], q_full.index(half), q2_smem.index(half))
            turn += 1
        first = first * 0
        b += 1
        length = length_after


@gluon_jit
def _scores(
    q_smem, q2_smem, ring, p_smem, alphas, totals, bars, lens_ptr, seen_ptr, scale, heads, b, first, left, length,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, UNIT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    RING: gl.constexpr, QUERIES: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Four warps: scores and probabilities of every block, and what is known of a sequence at its end."""
    full, told, over, over_empty, q_full, q_empty = bars
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    head = gl.arange(0, COLS, HEAD)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    none = gl.zeros([KEYS, COLS], gl.float32, L)
    turn, num, block = left * 0, left * 0, left * 0
    while left > 0:
        goes, last = _piece_of(first, left, length, UNIT, ENDS)
        if last > first:
            end, half = min(last * UNIT, length), turn % QUERIES
            q = q_smem.index(half).reshape([COLS, D])
            q2 = q2_smem.index(half).reshape([COLS, E]).permute((1, 0))
            top = gl.full([COLS], float("-inf"), gl.float32, HEAD)
            sums = gl.zeros([KEYS, COLS], gl.float32, L)
            mbarrier.wait(q_full.index(half), (turn // QUERIES) & 1)
            for key in range(first * UNIT, end, KEYS):
                s = none
                for third in gl.static_range(3):
                    _wait_turn(full, num + third, RING)
                    for c in gl.static_range(3):
                        stripe = _stripe(ring, num, third * 3 + c, KEYS, ROWS, RING)
                        if third * 3 + c < D // 64:
                            mine = q.slice((third * 3 + c) * 64, 64, dim=1).permute((1, 0))
                            s = warpgroup_mma(stripe, mine, s, use_acc=third * 3 + c > 0, is_async=True)
                        else:
                            s = warpgroup_mma(stripe, q2, s, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                num += 3
                if key + KEYS >= end:
                    mbarrier.arrive(q_empty.index(half), count=1)
                    s = gl.where(gl.expand_dims(row < end - key, 1), s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 0))  # a block has a key that counts, so that this is a number
                alpha = gl.exp2((top - raised) * scale)
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 0))
                slot = block % 2  # who has all thirds of this block knows that the one before last has been left
                alphas.index(slot).store(alpha)
                p_smem.index(slot).store(p.to(DTYPE))
                fence_async_shared()
                mbarrier.arrive(told.index(slot), count=1)
                sums = sums * gl.expand_dims(alpha, 0) + p
                top = raised
                block += 1
            total = gl.sum(sums, 0)
            _wait_room(over_empty, turn, 1)
            totals.index(0).store(total)
            mbarrier.arrive(over.index(0), count=1)
            turn += 1
            if (first > 0) | (last * UNIT < length):
                place = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
                gl.store(seen_ptr + place * 2 * heads + head, top * scale, mask=head < heads)
                gl.store(seen_ptr + (place * 2 + 1) * heads + head, total, mask=head < heads)
        left -= goes - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)


@gluon_jit
def _summed(ring, num, which, p, o, KEYS: gl.constexpr, ROWS: gl.constexpr, RING: gl.constexpr):
    """The sums of 64 columns with this block's."""
    values = _stripe(ring, num, which, KEYS, ROWS, RING).permute((1, 0))
    return warpgroup_mma(values, p, o, is_async=True)


@gluon_jit
def _leave(to_ptr, found, factor, heads, d, COLS: gl.constexpr):
    """Sums of 4 × 64 columns of all heads, times a factor of each head, as they lie in registers."""
    L: gl.constexpr = found[0].type.layout
    head = gl.arange(0, COLS, gl.SliceLayout(0, L))
    col = gl.arange(0, 64, gl.SliceLayout(1, L))
    to = to_ptr + gl.expand_dims(head * _anew(d), 0) + gl.expand_dims(col, 1)
    there = gl.expand_dims(head < heads, 0)
    by = gl.expand_dims(factor, 0)
    for i in gl.static_range(4):
        gl.store(to + i * 64, (found[i] * by).to(to_ptr.dtype.element_ty), mask=there)


@gluon_jit
def _sums(
    c: gl.constexpr, ring, p_smem, alphas, totals, bars, lens_ptr, out_ptr, part_ptr, heads, d, b, first, left, length,
    D: gl.constexpr, KEYS: gl.constexpr, UNIT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    RING: gl.constexpr, ENDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Four warps: half of the columns of the sums, turned."""
    full, empty, told, over, over_empty = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    zeros = gl.zeros([64, COLS], gl.float32, L)
    turn, num, block = left * 0, left * 0, left * 0
    while left > 0:
        goes, last = _piece_of(first, left, length, UNIT, ENDS)
        if last > first:
            end = min(last * UNIT, length)
            o0, o1, o2, o3 = zeros, zeros, zeros, zeros
            for key in range(first * UNIT, end, KEYS):
                slot, rest = block % 2, end - key
                _wait_turn(told, block, 2)
                _wait_turn(full, num + c, RING)
                _wait_turn(full, num + c + 1, RING)
                mbarrier.arrive(empty.index((num + 2 * (1 - c)) % RING), count=1)  # the third that only the other has
                alpha = alphas.index(slot).load(HEAD)
                if rest < KEYS:
                    for i in gl.static_range(4):
                        _without_the_rest(_stripe(ring, num, c * 4 + i, KEYS, ROWS, RING), rest, KEYS, 64)
                    fence_async_shared()
                by, p = gl.expand_dims(alpha, 0), p_smem.index(slot)
                o0, o1, o2, o3 = o0 * by, o1 * by, o2 * by, o3 * by  # all of them before any product is on its way
                o0 = _summed(ring, num, c * 4, p, o0, KEYS, ROWS, RING)
                o1 = _summed(ring, num, c * 4 + 1, p, o1, KEYS, ROWS, RING)
                o2 = _summed(ring, num, c * 4 + 2, p, o2, KEYS, ROWS, RING)
                o3 = _summed(ring, num, c * 4 + 3, p, o3, KEYS, ROWS, RING)
                o0, o1, o2, o3 = warpgroup_mma_wait(0, [o0, o1, o2, o3])
                mbarrier.arrive(empty.index((num + c) % RING), count=1)
                mbarrier.arrive(empty.index((num + c + 1) % RING), count=1)
                num += 3
                block += 1
            mbarrier.wait(over.index(0), turn & 1)
            total = totals.index(0).load(HEAD)
            mbarrier.arrive(over_empty.index(0), count=1)
            turn += 1
            found = (o0, o1, o2, o3)
            if (first == 0) & (last * UNIT >= length):
                _leave(out_ptr + b.to(gl.int64) * heads * d + c * (D // 2), found, 1.0 / total, heads, d, COLS)
            else:
                place = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
                one = gl.full([COLS], 1.0, gl.float32, HEAD)
                _leave(part_ptr + place.to(gl.int64) * heads * d + c * (D // 2), found, one, heads, d, COLS)
        left -= goes - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    _let_join_start(EARLY == 2)


@gluon_jit
def latent_narrow(
    q_desc, q2_desc, c_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b, pages, d,
    D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, UNIT: gl.constexpr, ROWS: gl.constexpr,
    COLS: gl.constexpr, RING: gl.constexpr, QUERIES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr,
    ENDS: gl.constexpr, EARLY: gl.constexpr, LEAVES: gl.constexpr,
):
    """All heads over a stretch of the line that paged attention cuts, by UNIT keys, in pages of whole ROWS."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert((P % ROWS == 0) & (UNIT % ROWS == 0) & (KEYS % UNIT == 0))
    gl.static_assert((D == 512) & (E == 64) & (KEYS == 64))
    gl.static_assert(RING <= 7)  # two blocks' probabilities: with more room a third one's would come before one is read
    P_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLS], DTYPE)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    fetch_tables(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES, 1, COLS, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [QUERIES, 1, COLS, E], q2_desc.layout)
    ring = gl.allocate_shared_memory(DTYPE, [RING * 3 * (KEYS // ROWS), 1, ROWS, 64], c_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, COLS], P_L)
    alphas = gl.allocate_shared_memory(gl.float32, [2, COLS], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [1, COLS], FLAT)
    full, empty, told = _barriers(RING, 1), _barriers(RING, 2), _barriers(2, 1)
    over, over_empty, q_full, q_empty = _barriers(1, 1), _barriers(1, 2), _barriers(QUERIES, 1), _barriers(QUERIES, 1)
    b, first, left, _ = _place_of(lens, batch, 1, gl.program_id(0), gl.num_programs(0), UNIT, LEAST, ENDS)
    length = gl.load(lens_ptr + b)
    summed, fed = (full, empty, told, over, over_empty), (full, empty, q_full, q_empty)
    scored = (full, told, over, over_empty, q_full, q_empty)
    gl.warp_specialize([
        (_sums, (0, ring, p_smem, alphas, totals, summed, lens_ptr, out_ptr, part_ptr, heads, d, b, first, left,
                 length, D, KEYS, UNIT, ROWS, COLS, RING, ENDS, EARLY)),
        (_sums, (1, ring, p_smem, alphas, totals, summed, lens_ptr, out_ptr, part_ptr, heads, d, b, first, left,
                 length, D, KEYS, UNIT, ROWS, COLS, RING, ENDS, EARLY)),
        (_scores, (q_smem, q2_smem, ring, p_smem, alphas, totals, scored, lens_ptr, seen_ptr, scale, heads, b, first,
                   left, length, D, E, KEYS, UNIT, ROWS, COLS, RING, QUERIES, ENDS)),
        (_feed, (q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, fed, table_ptr, lens_ptr, table_b, pages, d, b, first,
                 left, length, D, E, P, KEYS, UNIT, ROWS, COLS, RING, QUERIES, ENDS)),
    ], [4, 4, 1], [152, 152, 40])  # fmt: skip
