"""Backward pass of RMSNorm and LayerNorm over long rows on Hopper, in Gluon: rows pass through shared memory once.

Shapes: R rows, C columns, S shares of a row, P groups of programs; rows are cut into shares as softmax cuts them (see
there). A program has the same columns of all its rows, so it keeps their sums: the weights' gradients are made of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.stream import PLAIN, columns, spread, word_of, words_when_there


@gluon.jit
def normed_and_gradient(
    x_smem, dy_smem, slot, mean, rstd, w_at, inside, offset, HAS_WEIGHT: gl.constexpr, CENTERED: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """What was normalized, its gradient as it came, and that times the weight; zeros past the end of a row."""
    n = x_smem.index(slot).load(L).to(gl.float32)
    if CENTERED:
        n -= mean
    n *= rstd
    dy = dy_smem.index(slot).load(L).to(gl.float32)
    g = dy
    if HAS_WEIGHT:
        g = dy * (gl.load(w_at, mask=inside, other=0.0).to(gl.float32) + offset)
    return n, dy, g


@gluon.jit
def norm_backward_streamed(
    dy_ptr,  # [R, C]
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C]
    mean_ptr,  # [R] fp32, where rows are centered
    rstd_ptr,  # [R] fp32
    dx_ptr,  # [R, C]
    sums_ptr,  # [1 or 2, P, C] fp32: each group's share of the weight's and the bias's gradient
    word_ptr,  # [R, S] two sums of each share, zero at first
    rows,
    cols,
    length,
    num_shares,
    num_groups,
    x_stride,
    offset,
    HAS_WEIGHT: gl.constexpr,
    CENTERED: gl.constexpr,
    WANT_DW: gl.constexpr,
    WANT_DB: gl.constexpr,
    MEET: gl.constexpr,
    LAG: gl.constexpr,
    SHARES: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """dx = (g − n·mean(g·n) − mean(g)) · rstd, the last mean where rows are centered."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = spread(VECTOR, NUM_WARPS)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, CHUNKS, BLOCK], PLAIN)
    share = gl.program_id(0) % num_shares
    group = gl.program_id(0) // num_shares
    first = share * length
    left = gl.minimum(length, cols - first)
    num_turns = (rows - group + num_groups - 1) // num_groups
    c = columns(CHUNKS, BLOCK, L)
    at = group.to(gl.int64) * cols + first + c
    x_at = x_ptr + group.to(gl.int64) * x_stride + first + c
    step = num_groups.to(gl.int64) * cols
    x_step = num_groups.to(gl.int64) * x_stride
    w_at = weight_ptr + first + c
    word_row = word_ptr + group.to(gl.int64) * num_shares
    word_step = num_groups.to(gl.int64) * num_shares
    dw = gl.zeros([CHUNKS, BLOCK], gl.float32, L)
    db = gl.zeros([CHUNKS, BLOCK], gl.float32, L)
    for turn in gl.static_range(SLOTS - LAG):
        there = c < gl.where(turn < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(x_smem.index(turn), x_at + turn * x_step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(turn), dy_ptr + at + turn * step, mask=there)
        async_copy.commit_group()
    rstd = gl.load(rstd_ptr + group)
    mean = gl.load(mean_ptr + group) if CENTERED else rstd
    rstd_before = rstd
    mean_before = mean
    for turn in range(num_turns + LAG):
        following = group + gl.minimum(turn + 1, num_turns - 1) * num_groups
        next_rstd = gl.load(rstd_ptr + following)
        next_mean = gl.load(mean_ptr + following) if CENTERED else next_rstd
        async_copy.wait_group(SLOTS - LAG - 1)
        n, dy, g = normed_and_gradient(
            x_smem, dy_smem, turn % SLOTS, mean, rstd, w_at, c < left, offset, HAS_WEIGHT, CENTERED, L
        )
        if WANT_DW:
            dw += dy * n
        if WANT_DB:
            db += dy
        slope = gl.sum(gl.sum(g * n, axis=0), axis=0)
        shift = slope
        if CENTERED:
            shift = gl.sum(gl.sum(g, axis=0), axis=0)
        done = turn - LAG
        if MEET:
            if turn < num_turns:
                gl.atomic_xchg(word_row + turn * word_step + share, word_of(shift, slope), sem="relaxed")
            if done >= 0:
                k, shifts, slopes = words_when_there(word_row + done * word_step, num_shares, SHARES, NUM_WARPS)
                slope = gl.sum(gl.where(k < num_shares, slopes, 0.0), axis=0)
                shift = gl.sum(gl.where(k < num_shares, shifts, 0.0), axis=0)
        if LAG:
            n, dy, g = normed_and_gradient(
                x_smem, dy_smem, (turn + SLOTS - LAG) % SLOTS, mean_before, rstd_before, w_at, c < left, offset,
                HAS_WEIGHT, CENTERED, L,
            )  # fmt: skip
            mean_before = mean
        dx = g - n * (slope / cols)
        if CENTERED:
            dx -= shift / cols
        dx *= rstd_before if LAG else rstd
        gl.store(dx_ptr + at + done * step, dx.to(dx_ptr.dtype.element_ty), mask=c < gl.where(done >= 0, left, 0))
        rstd_before = rstd
        rstd = next_rstd
        mean = next_mean
        ahead = done + SLOTS
        there = c < gl.where(ahead < num_turns, left, 0)
        async_copy.async_copy_global_to_shared(x_smem.index(ahead % SLOTS), x_at + ahead * x_step, mask=there)
        async_copy.async_copy_global_to_shared(dy_smem.index(ahead % SLOTS), dy_ptr + at + ahead * step, mask=there)
        async_copy.commit_group()
    to = sums_ptr + at
    if WANT_DW:
        gl.store(to, dw, mask=c < left)
    if WANT_DB:
        gl.store(to + num_groups.to(gl.int64) * cols, db, mask=c < left)
