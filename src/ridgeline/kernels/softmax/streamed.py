"""Softmax of long rows on Hopper, in Gluon: rows pass through shared memory, read once, the next ones on their way.

Shapes: R rows, C columns, S shares of a row. A program holds one share of a row at a time, CHUNKS pieces of BLOCK
columns, in one of SLOTS places of shared memory; while it works on one, copies fill the others. Where a row has several
shares, programs tell each other what they found in words of global memory and finish a row one turn later, when the
others' words have long arrived; all of them must be on the device at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.stream import PLAIN, columns, spread, word_of, words_when_there

LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32: rows that a mask fills with it share alike
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def power(x, top, NARROW: gl.constexpr):
    """exp(x − top); for 16-bit numbers the power of two, which is as right as they are."""
    return gl.exp2((x - top) * LOG2_E) if NARROW else gl.exp(x - top)


@gluon.jit
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
):
    """A share's maximum and sum of powers, then, one turn later where rows are shared, its results."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    NARROW: gl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    x_at = x_ptr + group.to(gl.int64) * x_stride + first + c
    y_at = y_ptr + group.to(gl.int64) * cols + first + c
    word_row = word_ptr + group.to(gl.int64) * num_shares
    x_step = num_groups.to(gl.int64) * x_stride
    y_step = num_groups.to(gl.int64) * cols
    word_step = num_groups.to(gl.int64) * num_shares
    for turn in gl.static_range(SLOTS - LAG):
        there = c < gl.where(turn < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(turn), x_at + turn * x_step, mask=there)
        async_copy.commit_group()
    for turn in range(num_turns + LAG):
        async_copy.wait_group(SLOTS - LAG - 1)
        x = smem.index(turn % SLOTS).load(L).to(gl.float32)
        if not EVEN:
            x = gl.where(c < left, x, float("-inf"))
        top = gl.maximum(gl.max(gl.max(x, axis=0), axis=0), LOWEST)
        e = power(x, top, NARROW)
        total = gl.sum(gl.sum(e, axis=0), axis=0)
        done = turn - LAG
        own = top
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(top, total), sem="relaxed")
            if done >= 0:
                k, tops, totals = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                top = gl.max(gl.where(k < num_shares, tops, LOWEST), axis=0)
                total = gl.sum(gl.where(k < num_shares, totals * gl.exp(tops - top), 0.0), axis=0)
            if LAG or not NARROW:
                e = power(smem.index((turn + SLOTS - LAG) % SLOTS).load(L).to(gl.float32), top, NARROW)
                own = top
        if NARROW:
            y = e * (gl.exp(own - top) / total)
        else:
            y = e / total  # a product with the inverse would round twice
        gl.store(y_at + done * y_step, y.to(y_ptr.dtype.element_ty), mask=c < gl.where(done >= 0, left, 0))
        ahead = done + SLOTS
        there = c < gl.where(ahead < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(smem.index(ahead % SLOTS), x_at + ahead * x_step, mask=there)
        async_copy.commit_group()


@gluon.jit
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
):
    """dx = y·(dy − Σ y·dy). What is past the end was copied as zeros and adds nothing."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    y_smem = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    at = group.to(gl.int64) * cols + first + c
    step = num_groups.to(gl.int64) * cols
    word_row = word_ptr + group.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    for turn in gl.static_range(SLOTS - LAG):
        there = c < gl.where(turn < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(y_smem.index(turn), y_ptr + at + turn * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(turn), dy_ptr + at + turn * step, mask=there)
        async_copy.commit_group()
    for turn in range(num_turns + LAG):
        async_copy.wait_group(SLOTS - LAG - 1)
        y = y_smem.index(turn % SLOTS).load(L).to(gl.float32)
        dy = dy_smem.index(turn % SLOTS).load(L).to(gl.float32)
        level = gl.sum(gl.sum(y * dy, axis=0), axis=0)
        done = turn - LAG
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(level, level), sem="relaxed")
            if done >= 0:
                k, parts, _ = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                level = gl.sum(gl.where(k < num_shares, parts, 0.0), axis=0)
        if LAG:
            y = y_smem.index((turn + SLOTS - LAG) % SLOTS).load(L).to(gl.float32)
            dy = dy_smem.index((turn + SLOTS - LAG) % SLOTS).load(L).to(gl.float32)
        there = c < gl.where(done >= 0, left, 0)
        gl.store(dx_ptr + at + done * step, (y * (dy - level)).to(dx_ptr.dtype.element_ty), mask=there)
        ahead = done + SLOTS
        there = c < gl.where(ahead < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(y_smem.index(ahead % SLOTS), y_ptr + at + ahead * step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(ahead % SLOTS), dy_ptr + at + ahead * step, mask=there)
        async_copy.commit_group()
