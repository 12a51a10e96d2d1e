"""Paged decoding where many heads share a key: heads are rows of the products, 64 for each group of four warps.

Shapes as in ``kernel.py``. With heads as columns every group of warps holds a sum for each key of a block, asks the
others for the maximum and hands its probabilities over in shared memory. As rows a thread has all of it: what a block
leaves are two numbers a row, and probabilities go from registers into the next product. Up to 16 heads that is mostly
padding; beyond 64 a second group takes the other heads, and both read the same block.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention.kernel import _barriers, _without_the_rest
from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.paged_attention.kernel import (
    _feed_columns,
    _feed_gathered,
    _fetch_table,
    _lengths,
    _let_join_start,
    _next_of,
    _part_of,
    _start_of,
    _weighed,
)


@gluon_jit
def _leave(to_ptr, o, rows, d, D: gl.constexpr):
    """The first of 64 rows as they lie in registers: stores of 16 bytes would take room that a block needs."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, o.type.layout)), 1)
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, o.type.layout)), 0)
    gl.store(to_ptr + row * d + col, o.to(to_ptr.dtype.element_ty), mask=(row < rows) & (col < d))


@gluon_jit
def _rows(
    c: gl.constexpr, q_smem, k_smem, v_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, key_heads, d, b, kh,
    first, left, length,
    R: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, ENDS: gl.constexpr, EARLY: gl.constexpr, GATHERED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 of the heads that share keys over a stretch of the line."""
    q_full, q_empty, full, empty = bars
    TILES: gl.constexpr = D // 64 * (KEYS // ROWS)
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    col = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, S_L)), 0)
    none = gl.zeros([64, KEYS], gl.float32, S_L)
    turn, num = left * 0, left * 0
    while left > 0:
        blocks = (length + KEYS - 1) // KEYS
        goes = min(first + left, _weighed(length, KEYS, ENDS))
        last = min(goes, blocks)
        if last > first:
            half = turn % QUERIES
            q = _part_of(q_smem, half * (D // 64), DTYPE, HEADS, D).slice(c * 64, 64, dim=0)
            top = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            o = gl.zeros([64, D], gl.float32, O_L)
            mbarrier.wait(q_full.index(half), (turn // QUERIES) & 1)
            for block in range(first, last):
                slot, rest = num % STAGES, length - block * KEYS
                keys = _part_of(k_smem, slot * TILES, DTYPE, KEYS, D)
                values = _part_of(v_smem, slot * TILES, DTYPE, KEYS, D)
                mbarrier.wait(full.index(slot), (num // STAGES) & 1)
                if GATHERED:
                    fence_async_shared()
                s = warpgroup_mma(q, keys.permute((1, 0)), none, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                s = gl.where(col < rest, s, float("-inf"))
                raised = gl.maximum(top, gl.max(s, 1))  # a block has a key that counts, so that this is a number
                alpha = gl.exp2((top - raised) * scale)
                p = gl.exp2(s * scale - gl.expand_dims(raised * scale, 1))
                total = total * alpha + gl.sum(p, 1)
                top = raised
                if rest < KEYS:
                    _without_the_rest(values, rest, KEYS, D)  # another group writes the same
                    fence_async_shared()
                o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_L)), 1)
                o = warpgroup_mma(gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, O_L, 2)), values, o,
                                  is_async=True)  # fmt: skip
                o = warpgroup_mma_wait(0, [o])
                mbarrier.arrive(empty.index(slot), count=1)
                num += 1
            mbarrier.arrive(q_empty.index(half), count=1)
            turn += 1
            if (first == 0) & (last == blocks):
                inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O_L))
                to = out_ptr + ((b.to(gl.int64) * key_heads + kh) * R + c * 64) * d
                _leave(to, o * gl.expand_dims(inverse, 1), R - c * 64, d, D)
            else:
                place = gl.program_id(0) * 2 + (first == 0).to(gl.int32)
                _leave(part_ptr + (place.to(gl.int64) * R + c * 64) * d, o, R - c * 64, d, D)
                head = c * 64 + gl.arange(0, 64, ROW)
                gl.store(seen_ptr + place * 2 * R + head, top * scale, mask=head < R)
                gl.store(seen_ptr + (place * 2 + 1) * R + head, total, mask=head < R)
        left -= goes - first
        first = first * 0
        b, kh, length = _next_of(b, kh, left, length, lens_ptr, key_heads, False)
    _let_join_start(EARLY == 2)


@gluon_jit
def _feed_tall(
    q_desc, keys, values, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, d, steps, b, kh, first,
    left, length,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr, GATHERED: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """By threads that know the page of every key, or by the copy engine."""
    if GATHERED:
        _feed_gathered(q_desc, keys, values, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, d,
                       steps, b, kh, first, left, length, R, D, P, KEYS, HEADS, STAGES, QUERIES, ENDS, DTYPE,
                       False)  # fmt: skip
    else:
        _feed_columns(q_desc, keys, values, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b, b,
                      kh, first, left, length, R, D, P, KEYS, ROWS, HEADS, STAGES, QUERIES, SKIPS, ENDS)  # fmt: skip


@gluon_jit
def paged_tall(
    q_desc, keys, values, table_ptr, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, batch, key_heads, table_b, pages, d,
    k_page, k_slot, k_head, v_page, v_slot, v_head,
    R: gl.constexpr, D: gl.constexpr, P: gl.constexpr, KEYS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, BATCH: gl.constexpr, LEAST: gl.constexpr, EARLY: gl.constexpr,
    LEAVES: gl.constexpr, SKIPS: gl.constexpr, ENDS: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """``paged_columns`` and, where GATHERED (``keys`` and ``values`` are addresses then, else descriptions for the copy
    engine), ``paged_gathered`` for HEADS heads of a key, 64 or 128, of which R are there."""
    DTYPE: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = HEADS // 64
    _let_join_start(EARLY == 1)
    lens = _lengths(lens_ptr, batch, BATCH)
    _fetch_table(table_ptr, table_b, pages, batch)
    q_smem = gl.allocate_shared_memory(DTYPE, [QUERIES * (D // 64), 1, HEADS, 64], q_desc.layout)
    if GATHERED:
        L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], DTYPE)
        k_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64), KEYS, 64], L)
        v_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64), KEYS, 64], L)
    else:
        gl.static_assert(P % ROWS == 0)
        k_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64) * (KEYS // ROWS), 1, ROWS, 1, 64], keys.layout)
        v_smem = gl.allocate_shared_memory(DTYPE, [STAGES * (D // 64) * (KEYS // ROWS), 1, ROWS, 1, 64], values.layout)
    bars = (_barriers(QUERIES, 1), _barriers(QUERIES, GROUPS), _barriers(STAGES, 128 if GATHERED else 1),
            _barriers(STAGES, GROUPS))  # fmt: skip
    b, kh, first, left, length, _ = _start_of(lens, lens_ptr, batch, key_heads, KEYS, LEAST, ENDS, False)
    steps = (k_page, k_slot, k_head, v_page, v_slot, v_head)
    if GROUPS == 1:
        gl.warp_specialize([
            (_rows, (0, q_smem, k_smem, v_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, key_heads, d, b, kh,
                     first, left, length, R, D, KEYS, ROWS, HEADS, STAGES, QUERIES, ENDS, EARLY, GATHERED, DTYPE)),
            (_feed_tall, (q_desc, keys, values, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b,
                          d, steps, b, kh, first, left, length, R, D, P, KEYS, ROWS, HEADS, STAGES, QUERIES, SKIPS,
                          ENDS, GATHERED, DTYPE)),
        ], [4 if GATHERED else 1], [64 if GATHERED else 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_rows, (0, q_smem, k_smem, v_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, key_heads, d, b, kh,
                     first, left, length, R, D, KEYS, ROWS, HEADS, STAGES, QUERIES, ENDS, EARLY, GATHERED, DTYPE)),
            (_rows, (1, q_smem, k_smem, v_smem, bars, lens_ptr, out_ptr, part_ptr, seen_ptr, scale, key_heads, d, b, kh,
                     first, left, length, R, D, KEYS, ROWS, HEADS, STAGES, QUERIES, ENDS, EARLY, GATHERED, DTYPE)),
            (_feed_tall, (q_desc, keys, values, q_smem, k_smem, v_smem, bars, table_ptr, lens_ptr, key_heads, table_b,
                          d, steps, b, kh, first, left, length, R, D, P, KEYS, ROWS, HEADS, STAGES, QUERIES, SKIPS,
                          ENDS, GATHERED, DTYPE)),
        ], [4, 4 if GATHERED else 1], [216 if GATHERED else 232, 64 if GATHERED else 40])  # fmt: skip
