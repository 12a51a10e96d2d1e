"""Latent decoding of many heads: two groups of warps whose blocks alternate, so that one multiplies while the other
takes exponentials.

Shapes as in ``kernel.py``; 64 rows are heads. Scores of even blocks of a stretch are the first group's, of odd ones the
second's, 64 keys at a time: the queries are read from shared memory once a block and not twice. Sums belong to both,
256 of 512 columns each, over every block in turn. What one tells the other is its new maximum, the factor for what came
before, and its probabilities, which take the place of the block's rotary part: nobody needs that any more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention.kernel import _barriers, _store
from ridgeline.kernels.latent_attention.kernel import _feed_line
from ridgeline.kernels.paged_attention.kernel import (
    _fetch_table,
    _lengths,
    _let_join_start,
    _place_of,
    _without_the_rest,
)


@gluon.jit
def _values_of(
    c: gl.constexpr, ring, slot, D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """This group's half of a block's values."""
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    block = ring.index(slot * ((D + E) // 64 * (KEYS // ROWS)))._reinterpret(DTYPE, [KEYS, D], L)
    return block.slice(c * (D // 2), D // 2, dim=1)


@gluon.jit
def _rotary_of(ring, slot, D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr):
    """A block's rotary part, [keys, dims]; later its probabilities, [heads, keys]: 64 × 64 both."""
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, E], DTYPE)
    at = (slot * ((D + E) // 64) + D // 64) * (KEYS // ROWS)
    return ring.index(at)._reinterpret(DTYPE, [KEYS, E], L)


@gluon.jit
def _scores_of(
    q_smem, q2_smem, ring, c_full, num, rest,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of a block when it is there; minus infinity past the sequence's end."""
    DTYPE: gl.constexpr = ring.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    BLOCK_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    slot = num % STAGES
    block = ring.index(slot * ((D + E) // 64 * (KEYS // ROWS)))._reinterpret(DTYPE, [KEYS, D], BLOCK_L)
    more = _rotary_of(ring, slot, D, E, KEYS, ROWS)
    none = gl.zeros([64, KEYS], gl.float32, L)
    mbarrier.wait(c_full.index(slot), (num // STAGES) & 1)
    s = warpgroup_mma(q_smem.index(0).reshape([64, D]), block.permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma(q2_smem.index(0).reshape([64, E]), more.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    col = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, L)), 0)
    return gl.where(col < rest, s, float("-inf"))


@gluon.jit
def _cleared(values, rest, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros for values past the sequence's end, where the next product sees them."""
    if rest < KEYS:
        _without_the_rest(values, rest, KEYS, WIDTH)
        fence_async_shared()


@gluon.jit
def _scaled(o, factor):
    """Sums times a factor of each head."""
    return o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def _even_turn(
    q_smem, q2_smem, ring, told_smem, bars, scale, num, pair, rest, both, done, top, total, o,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first group's part of two blocks: scores of the first, sums of the first and, when it is told, of the
    second."""
    q_empty, c_full, c_empty, told = bars
    DTYPE: gl.constexpr = ring.dtype
    s = _scores_of(q_smem, q2_smem, ring, c_full, num, rest, D, E, KEYS, ROWS, STAGES)
    if done:
        mbarrier.arrive(q_empty.index(0), count=1)
    raised = gl.maximum(top, gl.max(s, 1))  # a block has a key that counts, so that this is a number
    alpha = gl.exp2((top - raised) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 1))
    total = total * alpha + gl.sum(p, 1)
    half, slot = p.to(DTYPE), num % STAGES
    values = _values_of(0, ring, slot, D, E, KEYS, ROWS)
    told_smem.index(0).store(raised)
    told_smem.index(1).store(alpha)
    _rotary_of(ring, slot, D, E, KEYS, ROWS).store(half)
    fence_async_shared()
    mbarrier.arrive(told.index(0), count=1)
    _cleared(values, rest, KEYS, D // 2)
    o = _scaled(o, alpha)
    o = warpgroup_mma(gl.convert_layout(half, gl.DotOperandLayout(0, o.type.layout, 2)), values, o, is_async=True)
    o = warpgroup_mma_wait(0, [o])
    mbarrier.arrive(c_empty.index(slot), count=1)
    mbarrier.wait(told.index(1), pair & 1)
    top = told_smem.index(2).load(top.type.layout)
    if both:
        beta = told_smem.index(3).load(top.type.layout)
        slot = (num + 1) % STAGES
        values = _values_of(0, ring, slot, D, E, KEYS, ROWS)
        _cleared(values, rest - KEYS, KEYS, D // 2)
        total = total * beta
        o = _scaled(o, beta)
        o = warpgroup_mma(_rotary_of(ring, slot, D, E, KEYS, ROWS), values, o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(c_empty.index(slot), count=1)
    return top, total, o


@gluon.jit
def _odd_turn(
    q_smem, q2_smem, ring, told_smem, bars, scale, num, pair, rest, both, done, top, total, o,
    D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The second group's part: scores of the second block, whose probabilities it finds while the first one's sums are
    on their way."""
    q_empty, c_full, c_empty, told = bars
    DTYPE: gl.constexpr = ring.dtype
    ROW: gl.constexpr = top.type.layout
    slot, later = num % STAGES, (num + 1) % STAGES
    values = _values_of(1, ring, slot, D, E, KEYS, ROWS)
    before = _rotary_of(ring, slot, D, E, KEYS, ROWS)
    if both:
        s = _scores_of(q_smem, q2_smem, ring, c_full, num + 1, rest - KEYS, D, E, KEYS, ROWS, STAGES)
        if done:
            mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(told.index(0), pair & 1)
        top = told_smem.index(0).load(ROW)
        alpha = told_smem.index(1).load(ROW)
        o = _scaled(o, alpha)
        o = warpgroup_mma(before, values, o, is_async=True)
        raised = gl.maximum(top, gl.max(s, 1))
        beta = gl.exp2((top - raised) * scale)
        p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 1))
        total = total * (alpha * beta) + gl.sum(p, 1)
        half, top = p.to(DTYPE), raised
        told_smem.index(2).store(raised)
        told_smem.index(3).store(beta)
        _rotary_of(ring, later, D, E, KEYS, ROWS).store(half)
        fence_async_shared()
        mbarrier.arrive(told.index(1), count=1)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(c_empty.index(slot), count=1)
        values = _values_of(1, ring, later, D, E, KEYS, ROWS)
        _cleared(values, rest - KEYS, KEYS, D // 2)
        o = _scaled(o, beta)
        o = warpgroup_mma(gl.convert_layout(half, gl.DotOperandLayout(0, o.type.layout, 2)), values, o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(c_empty.index(later), count=1)
    else:
        if done:
            mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(told.index(0), pair & 1)
        top = told_smem.index(0).load(ROW)
        alpha = told_smem.index(1).load(ROW)
        told_smem.index(2).store(top)
        mbarrier.arrive(told.index(1), count=1)
        _cleared(values, rest, KEYS, D // 2)
        total = total * alpha
        o = _scaled(o, alpha)
        o = warpgroup_mma(before, values, o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(c_empty.index(slot), count=1)
    return top, total, o


@gluon.jit
def _latent_turns(
    c: gl.constexpr, q_smem, q2_smem, ring, told_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads, d,
    stretch, head0, b, first, left, length,
    R: gl.constexpr, D: gl.constexpr, E: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """One group of four warps over a stretch of the line, two blocks at a time."""
    q_full, q_empty, c_full, c_empty, told, over = bars
    WIDTH: gl.constexpr = D // 2
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    turn, num, pair = left * 0, left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        last = min(first + left, blocks)
        if last > first:
            top = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            o = gl.zeros([64, WIDTH], gl.float32, O_L)
            mbarrier.wait(q_full.index(0), turn & 1)
            mine = (q_empty, c_full, c_empty, told)
            for i in range(first, last, 2):
                rest, both, done = length - i * KEYS, i + 1 < last, i + 2 >= last
                if c == 0:
                    top, total, o = _even_turn(q_smem, q2_smem, ring, told_smem, mine, scale, num, pair, rest, both,
                                               done, top, total, o, D, E, KEYS, ROWS, STAGES)  # fmt: skip
                else:
                    top, total, o = _odd_turn(q_smem, q2_smem, ring, told_smem, mine, scale, num, pair, rest, both,
                                              done, top, total, o, D, E, KEYS, ROWS, STAGES)  # fmt: skip
                num += 1 + both.to(gl.int32)
                pair += 1
            told_smem.index(4 + c).store(total)
            mbarrier.arrive(over.index(0), count=1)
            mbarrier.wait(over.index(0), turn & 1)
            total = total + told_smem.index(5 - c).load(ROW)
            turn += 1
            own = min(heads - head0, R)
            if (first == 0) & (last == blocks):
                to = out_ptr + (b.to(gl.int64) * heads + head0) * d + c * WIDTH
                _store(to, _scaled(o, 1.0 / gl.where(total == 0.0, 1.0, total)), 0, own, d, WIDTH, WIDTH)
            else:
                place = stretch * 2 + (first == 0).to(gl.int32)
                _store(part_ptr + (place.to(gl.int64) * heads + head0) * d + c * WIDTH, o, 0, own, d, WIDTH, WIDTH)
                if c == 0:
                    head = gl.arange(0, 64, ROW)
                    at = seen_ptr + place * 2 * heads + head0 + head
                    gl.store(at, top * scale, mask=head < own)
                    gl.store(at + heads, total, mask=head < own)
        left -= last - first
        first = first * 0
        b += 1
        length = gl.load(lens_ptr + b, mask=left > 0, other=0)
    _let_join_start(EARLY == 2)


@gluon.jit
def latent_turns(
    q_desc, q2_desc, c_desc, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, heads, table_b, pages, d,
    R: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, E: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr,
    LEAVES: gl.constexpr,
):  # fmt: skip
    """64 heads over a stretch of the line that paged attention cuts, in pages of whole 16 keys. GROUPS programs beside
    each other take the same stretch, R heads each, so that one of them finds what it reads in the L2."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(P % ROWS == 0)
    gl.static_assert(E == KEYS)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 64, D], q_desc.layout)
    q2_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 64, E], q2_desc.layout)
    ring = gl.allocate_shared_memory(DTYPE, [STAGES * (D + E) // 64 * (KEYS // ROWS), 1, ROWS, 64], c_desc.layout)
    told_smem = gl.allocate_shared_memory(gl.float32, [6, 64], FLAT)  # of each group: maximum, factor; then sums
    q_full, q_empty, c_full, c_empty = _barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2)
    bars = (q_full, q_empty, c_full, c_empty, _barriers(2, 1), _barriers(1, 2))
    stretch, head0 = gl.program_id(0) // GROUPS, gl.program_id(0) % GROUPS * R
    b, first, left, _ = _place_of(lens, batch, 1, stretch, gl.num_programs(0) // GROUPS, KEYS, LEAST)
    length = gl.load(lens_ptr + b)
    gl.warp_specialize([
        (_latent_turns, (0, q_smem, q2_smem, ring, told_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads,
                         d, stretch, head0, b, first, left, length, R, D, E, KEYS, ROWS, STAGES, EARLY)),
        (_latent_turns, (1, q_smem, q2_smem, ring, told_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, heads,
                         d, stretch, head0, b, first, left, length, R, D, E, KEYS, ROWS, STAGES, EARLY)),
        (_feed_line, (q_desc, q2_desc, c_desc, q_smem, q2_smem, ring, (q_full, q_empty, c_full, c_empty), table_ptr,
                      lens_ptr, table_b, d, head0, b, first, left, length, D, E, P, KEYS, ROWS, STAGES, 32, 1)),
    ], [4, 1], [232, 40])  # fmt: skip
