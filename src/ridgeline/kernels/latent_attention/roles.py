"""Latent decoding of many heads: one group of warps makes scores, two make sums, and a warp feeds them.

Shapes as in ``kernel.py``; 64 rows are heads. A block of 64 keys is two halves of 256 columns and its rotary part.
Scores are made by one group for all keys of a block, so that queries are read once and maxima need no exchange; what it
tells the others are probabilities, which take the place of the rotary part, and a factor for what came before. Sums are
256 columns a group. While one block's sums are made, the next one's scores are, and neither waits for an answer.

Half of the queries stays in registers of the group that makes scores: the 32 kB that it leaves are room for a fifth
half of a block, and a product with one operand in registers asks half as much of shared memory.
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
from ridgeline.kernels.latent_attention.kernel import _anew
from ridgeline.kernels.paged_attention.kernel import (
    _fetch_table,
    _lengths,
    _let_join_start,
    _pages_of,
    _place_of,
    _weighed,
)


@gluon_jit
def _wait_turn(bars, num, NUM: gl.constexpr):
    """Until the ``num``-th thing that goes through a ring of so many places is there."""
    mbarrier.wait(bars.index(num % NUM), (num // NUM) & 1)


@gluon_jit
def _wait_room(bars, num, NUM: gl.constexpr):
    """Until the ``num``-th thing may take its place."""
    mbarrier.wait(bars.index(num % NUM), ((num // NUM) & 1) ^ 1)


@gluon_jit
def _piece_of(first, left, length, UNIT: gl.constexpr, ENDS: gl.constexpr):
    """Of a sequence that a stretch has from its unit ``first`` on: the unit where the stretch goes on, and one past the
    last that has keys."""
    goes = min(first + left, _weighed(length, UNIT, ENDS))
    return goes, min(goes, (length + UNIT - 1) // UNIT)


@gluon_jit
def _piece(ring, num, WIDTH: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, NUM: gl.constexpr):
    """The ``num``-th piece of a ring, 64 rows of WIDTH columns."""
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], DTYPE)
    return ring.index(num % NUM * (WIDTH // 64 * (KEYS // ROWS)))._reinterpret(DTYPE, [KEYS, WIDTH], L)


@gluon_jit
def _copy_piece(
    c_desc, ring, full, num, pages, key, col, stripes, tiles,
    P: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, NUM: gl.constexpr,
):  # fmt: skip
    """Keys of a block that are there, ``stripes`` times 64 columns from ``col``."""
    TILES: gl.constexpr = KEYS // ROWS
    slot = num % NUM
    for i in gl.static_range(1, TILES + 1):
        mbarrier.expect(full.index(slot), i * ROWS * WIDTH * 2, pred=tiles == i)
    for s in range(stripes):
        for j in gl.static_range(TILES):
            to = ring.index((slot * (WIDTH // 64) + s) * TILES + j)
            at = [pages[j], (key + j * ROWS) % P, col + s * 64]
            tma.async_copy_global_to_shared(c_desc, at, full.index(slot), to, pred=j < tiles)


@gluon_jit
def _feed(
    q_desc, q2_desc, c_desc, q_smem, q2_smem, halves, mores, bars, table_ptr, lens_ptr, table_b, d, head0, b, first,
    left, length,
    D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    MORES: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Blocks of the cache as soon as there is room; queries of a sequence before its first block, as a piece among the
    others, and the other half of them after it."""
    half_full, half_empty, more_full, q_full, q_empty = bars
    DTYPE: gl.constexpr = halves.dtype
    TILES: gl.constexpr = KEYS // ROWS
    WIDTH: gl.constexpr = D // 2
    turn, num, block, stripes = left * 0, left * 0, left * 0, d // 128  # unrolled it would spill
    while left > 0:
        goes, last = _piece_of(first, left, length, KEYS, ENDS)
        if last > first:
            table, end = table_ptr + b.to(gl.int64) * table_b, min(last * KEYS, length)
            after = _pages_of(table, first * KEYS, end, P, ROWS, TILES)
            _wait_room(half_empty, num, HALVES)
            full, to = half_full.index(num % HALVES), halves.index(num % HALVES * (WIDTH // 64 * TILES))
            mbarrier.expect(full, 64 * WIDTH * 2)
            to = to._reinterpret(DTYPE, [1, 64, WIDTH], q_desc.layout)
            tma.async_copy_global_to_shared(q_desc, [b, head0, 0], full, to)
            num += 1
            for i in range(first, last):
                key, here = i * KEYS, after
                after = _pages_of(table, key + KEYS, end, P, ROWS, TILES)
                tiles = min((end - key + ROWS - 1) // ROWS, TILES)
                for c in range(2):
                    _wait_room(half_empty, num, HALVES)
                    _copy_piece(c_desc, halves, half_full, num, here, key, c * WIDTH, stripes, tiles, P, WIDTH, KEYS,
                                ROWS, HALVES)  # fmt: skip
                    num += 1
                # Whoever left a half has read its block's probabilities: of the rotary parts this one is free as well.
                _copy_piece(c_desc, mores, more_full, block, here, key, D, 1, tiles, P, 64, KEYS, ROWS, MORES)
                block += 1
                if i == first:
                    _wait_room(q_empty, turn, 1)
                    mbarrier.expect(q_full.index(0), 64 * (WIDTH + 64) * 2)
                    tma.async_copy_global_to_shared(q_desc, [b, head0, WIDTH], q_full.index(0), q_smem)
                    tma.async_copy_global_to_shared(q2_desc, [b, head0, D], q_full.index(0), q2_smem)
            turn += 1
        left -= goes - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)


@gluon_jit
def _leave_lse(to_ptr, lse, b, heads, head0, own):
    """What a share knows of its heads, for the kernel that joins shares."""
    head = gl.arange(0, 64, lse.type.layout)
    at = (b.to(gl.int64) * heads + head0 + head) * gl.num_programs(1) + gl.program_id(1)
    gl.store(to_ptr + at, lse, mask=head < own)


@gluon_jit
def _ask(
    held, q, q2, none, halves, mores, half_full, more_full, num, block,
    WIDTH: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr, MORES: gl.constexpr,
):  # fmt: skip
    """The products of a block's scores, on their way."""
    low, high = _piece(halves, num, WIDTH, KEYS, ROWS, HALVES), _piece(halves, num + 1, WIDTH, KEYS, ROWS, HALVES)
    _wait_turn(half_full, num, HALVES)
    s = warpgroup_mma(held, low.permute((1, 0)), none, use_acc=False, is_async=True)
    _wait_turn(half_full, num + 1, HALVES)
    s = warpgroup_mma(q, high.permute((1, 0)), s, is_async=True)
    _wait_turn(more_full, block, MORES)
    more = _piece(mores, block, 64, KEYS, ROWS, MORES)
    return warpgroup_mma(q2, more.permute((1, 0)), s, is_async=True)


@gluon_jit
def _tell(
    s, top, total, scale, alphas, mores, told, block, KEYS: gl.constexpr, ROWS: gl.constexpr, MORES: gl.constexpr
):  # fmt: skip
    """Probabilities of a block in the place of its rotary part, and a factor for what came before."""
    slot = block % MORES
    raised = gl.maximum(top, gl.max(s, 1))  # a block has a key that counts, so that this is a number
    alpha = gl.exp2((top - raised) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 1))
    alphas.index(slot).store(alpha)
    _piece(mores, block, 64, KEYS, ROWS, MORES).store(p.to(mores.dtype))
    fence_async_shared()
    mbarrier.arrive(told.index(slot), count=1)
    return raised, total * alpha + gl.sum(p, 1)


@gluon_jit
def _scores(
    q_smem, q2_smem, halves, mores, alphas, totals, bars, lens_ptr, seen_ptr, scale, heads, stretch, head0, b, first,
    left, length,
    R: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    MORES: gl.constexpr, SHARED: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Four warps: scores and probabilities of every block, and what is known of a sequence at its end."""
    half_full, half_empty, more_full, told, over, over_empty, q_full, q_empty = bars
    WIDTH: gl.constexpr = D // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    col = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, L)), 0)
    none = gl.zeros([64, KEYS], gl.float32, L)
    q, q2 = q_smem.reshape([64, WIDTH]), q2_smem.reshape([64, 64])
    if SHARED == 1:
        if left <= 0:
            nothing = gl.full([64], float("-inf"), gl.float32, ROW)
            _leave_lse(seen_ptr, nothing, b, heads, head0, min(heads - head0, R))
    turn, num, block = left * 0, left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        goes, last = _piece_of(first, left, length, KEYS, ENDS)
        if last > first:
            top = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            _wait_turn(half_full, num, HALVES)
            held = _piece(halves, num, WIDTH, KEYS, ROWS, HALVES).load(gl.DotOperandLayout(0, L, 2))
            mbarrier.arrive(half_empty.index(num % HALVES), count=1)
            num += 1
            mbarrier.wait(q_full.index(0), turn & 1)
            for i in range(first, last):
                s = _ask(held, q, q2, none, halves, mores, half_full, more_full, num, block, WIDTH, KEYS, ROWS,
                         HALVES, MORES)  # fmt: skip
                num += 2
                s = warpgroup_mma_wait(0, [s])
                if i + 1 == last:
                    mbarrier.arrive(q_empty.index(0), count=1)
                rest = length - i * KEYS
                if rest < KEYS:
                    s = gl.where(col < rest, s, float("-inf"))
                top, total = _tell(s, top, total, scale, alphas, mores, told, block, KEYS, ROWS, MORES)
                block += 1
            _wait_room(over_empty, turn, 1)
            totals.index(0).store(total)
            mbarrier.arrive(over.index(0), count=1)
            turn += 1
            own = min(heads - head0, R)
            if SHARED == 1:
                _leave_lse(seen_ptr, top * scale + gl.log2(total), b, heads, head0, own)
            elif SHARED == 0:
                if (first > 0) | (last < blocks):
                    head = gl.arange(0, 64, ROW)
                    place = stretch * 2 + (first == 0).to(gl.int32)
                    at = seen_ptr + place * 2 * heads + head0 + head
                    gl.store(at, top * scale, mask=head < own)
                    gl.store(at + heads, total, mask=head < own)
        left -= goes - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)


@gluon_jit
def _leave(to_ptr, o, rows, step):
    """The first of 64 rows as they lie in registers, ``step`` elements apart."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, o.type.layout)), 1)
    col = gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout)), 0)
    gl.store(to_ptr + row * _anew(step) + col, o.to(to_ptr.dtype.element_ty), mask=row < rows)


@gluon_jit
def _leave_share(to_ptr, o, o2, b, heads, head0, own, d):
    """This share's columns, 2 × 128 of them."""
    shares = gl.num_programs(1)
    to = to_ptr + ((b.to(gl.int64) * heads + head0) * shares + gl.program_id(1)) * d
    _leave(to, o, own, d * shares)
    _leave(to + o.shape[1], o2, own, d * shares)


@gluon_jit
def _sums(
    c: gl.constexpr, halves, mores, alphas, totals, bars, lens_ptr, out_ptr, part_ptr, heads, d, stretch, head0, b,
    first, left, length,
    R: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    MORES: gl.constexpr, SHARED: gl.constexpr, EARLY: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Four warps: half of the columns of the sums."""
    half_full, half_empty, told, over, over_empty = bars
    WIDTH: gl.constexpr = D // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    if SHARED:
        if left <= 0:
            none = gl.zeros([64, WIDTH // 2], gl.float32, L)
            _leave_share(part_ptr + c * WIDTH, none, none, b, heads, head0, min(heads - head0, R), d)
    turn, num, block = left * 0, left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        goes, last = _piece_of(first, left, length, KEYS, ENDS)
        if last > first:
            o = gl.zeros([64, WIDTH // 2], gl.float32, L)
            o2 = gl.zeros([64, WIDTH // 2], gl.float32, L)
            num += 1  # a piece of queries
            for i in range(first, last):
                slot, mine, rest = block % MORES, num + c, length - i * KEYS
                values = _piece(halves, mine, WIDTH, KEYS, ROWS, HALVES)
                _wait_turn(told, block, MORES)
                _wait_turn(half_full, mine, HALVES)
                alpha = alphas.index(slot).load(ROW)
                if rest < KEYS:
                    _without_the_rest(values, rest, KEYS, WIDTH)
                    fence_async_shared()
                o = o * gl.expand_dims(alpha, 1)
                o2 = o2 * gl.expand_dims(alpha, 1)
                p = _piece(mores, block, 64, KEYS, ROWS, MORES)
                o = warpgroup_mma(p, values.slice(0, WIDTH // 2, dim=1), o, is_async=True)
                o2 = warpgroup_mma(p, values.slice(WIDTH // 2, WIDTH // 2, dim=1), o2, is_async=True)
                o, o2 = warpgroup_mma_wait(0, [o, o2])
                mbarrier.arrive(half_empty.index(mine % HALVES), count=1)
                num += 2
                block += 1
            mbarrier.wait(over.index(0), turn & 1)
            total = totals.index(0).load(ROW)
            mbarrier.arrive(over_empty.index(0), count=1)
            turn += 1
            own = min(heads - head0, R)
            factor = gl.expand_dims(1.0 / total, 1)
            if SHARED:
                _leave_share(part_ptr + c * WIDTH, o * factor, o2 * factor, b, heads, head0, own, d)
            elif (first == 0) & (last == blocks):
                to = out_ptr + (b.to(gl.int64) * heads + head0) * d + c * WIDTH
                _leave(to, o * factor, own, d)
                _leave(to + WIDTH // 2, o2 * factor, own, d)
            else:
                place = stretch * 2 + (first == 0).to(gl.int32)
                part = part_ptr + (place.to(gl.int64) * heads + head0) * d + c * WIDTH
                _leave(part, o, own, d)
                _leave(part + WIDTH // 2, o2, own, d)
        left -= goes - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    _let_join_start(EARLY == 2)


@gluon_jit
def latent_roles(
    q_desc, q2_desc, c_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b, pages, d,
    R: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr, HALVES: gl.constexpr, MORES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr,
    EARLY: gl.constexpr, LEAVES: gl.constexpr, SHARED: gl.constexpr, ENDS: gl.constexpr,
):
    """64 heads over a stretch of the line that paged attention cuts, in pages of whole 16 keys; where SHARED, over a
    share of one sequence (1), or all of it (2: then parts are results). GROUPS programs beside each other take the same
    keys, R heads each, so that one of them finds what it reads in the L2."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    gl.static_assert(E == 64)
    gl.static_assert(KEYS == 64)
    gl.static_assert(2 * MORES >= HALVES)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    TILES: gl.constexpr = KEYS // ROWS
    stretch, head0 = gl.program_id(0) // GROUPS, gl.program_id(0) % GROUPS * R
    if SHARED:
        b = stretch
        length = gl.load(lens_ptr + b)
        blocks = (length + KEYS - 1) // KEYS
        mine = (blocks + gl.num_programs(1) - 1) // gl.num_programs(1)
        first = gl.program_id(1) * mine
        left = max(min(first + mine, blocks) - first, 0)
    else:
        _let_join_start(EARLY == 1)
        lens = _lengths(lens_ptr, batch, BATCH)
        _fetch_table(table_ptr, table_b, pages, batch)
        b, first, left, _ = _place_of(lens, batch, 1, stretch, gl.num_programs(0) // GROUPS, KEYS, LEAST, ENDS)
        length = gl.load(lens_ptr + b)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, 64, D // 2], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [1, 64, E], q2_desc.layout)
    halves = gl.allocate_shared_memory(DTYPE, [HALVES * (D // 128) * TILES, 1, ROWS, 64], c_desc.layout)
    mores = gl.allocate_shared_memory(DTYPE, [MORES * TILES, 1, ROWS, 64], c_desc.layout)
    alphas = gl.allocate_shared_memory(gl.float32, [MORES, 64], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [1, 64], FLAT)
    half_full, half_empty, more_full = _barriers(HALVES, 1), _barriers(HALVES, 1), _barriers(MORES, 1)
    told, over, over_empty = _barriers(MORES, 1), _barriers(1, 1), _barriers(1, 2)
    q_full, q_empty = _barriers(1, 1), _barriers(1, 1)
    fed, summed = (half_full, half_empty, more_full, q_full, q_empty), (half_full, half_empty, told, over, over_empty)
    bars = (half_full, half_empty, more_full, told, over, over_empty, q_full, q_empty)
    gl.warp_specialize([
        (_sums, (0, halves, mores, alphas, totals, summed, lens_ptr, out_ptr, part_ptr, heads, d, stretch, head0, b,
                 first, left, length, R, D, KEYS, ROWS, HALVES, MORES, SHARED, EARLY, ENDS)),
        (_sums, (1, halves, mores, alphas, totals, summed, lens_ptr, out_ptr, part_ptr, heads, d, stretch, head0, b,
                 first, left, length, R, D, KEYS, ROWS, HALVES, MORES, SHARED, EARLY, ENDS)),
        (_scores, (q_smem, q2_smem, halves, mores, alphas, totals, bars, lens_ptr, seen_ptr, scale, heads, stretch,
                   head0, b, first, left, length, R, D, KEYS, ROWS, HALVES, MORES, SHARED, ENDS)),
        (_feed, (q_desc, q2_desc, c_desc, q_smem, q2_smem, halves, mores, fed, table_ptr, lens_ptr, table_b, d, head0,
                 b, first, left, length, D, P, KEYS, ROWS, HALVES, MORES, ENDS)),
    ], [4, 4, 1], [160, 160, 32])  # fmt: skip
