"""Backward passes of RMSNorm and LayerNorm of 16-bit rows on Hopper, in Gluon: rows pass through shared memory.

Shapes: R rows, C columns (the normalized dim), P programs. A program takes every P-th row. What waits for a row's sums
stays in shared memory, two numbers a word, and is read there twice: registers hold sums of columns and little else, so
that as many programs share a multiprocessor as their rows have room.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.rms_norm.gradient import in_order, one_of, weight_words
from ridgeline.kernels.stream import FLAT, both_added, halves, halves_here, let_next_start, paired, share_pitch


@gluon.jit
def weighted(g, h, words, offset, CENTERED: gl.constexpr, BF16: gl.constexpr):
    """Two gradients by the weights of their columns, which are words; RMSNorm's have a number added to them."""
    u, v = halves_here(words, BF16)
    if not CENTERED:
        u += offset
        v += offset
    return g * u, h * v


@gluon.jit
def norm_backward_words(
    dy_ptr,  # [R, C] of 16 bits, as x
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C] of x's type
    mean_ptr,  # [R] fp32; RMSNorm has none
    rstd_ptr,  # [R] fp32
    dx_ptr,  # [R, C]
    shares_ptr,  # [2, P, C] fp32, RMSNorm [P, C]; rows share_pitch(C) apart
    rows,
    cols,
    x_stride,
    offset,
    CENTERED: gl.constexpr,  # LayerNorm
    HAS_WEIGHT: gl.constexpr,
    WANT_DW: gl.constexpr,
    WANT_DB: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
    SHIFTED: gl.constexpr,  # rows start inside accesses; P is a multiple of eight, a program's rows start alike
    SHARED: gl.constexpr,  # weights wait in shared memory as well
):
    """The next SLOTS − 1 rows are on their way while a row is worked on; the last of them is asked for between the
    row's sums and its results, where a barrier has just been. Ends of rows that start inside accesses are apart."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    PIECE: gl.constexpr = BLOCK // 2
    AHEAD: gl.constexpr = SLOTS - 1
    x_places = ()
    dy_places = ()
    for _ in gl.static_range(CHUNKS):
        x_places = x_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
        dy_places = dy_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
    rstd_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    mean_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    none = gl.arange(0, 1, ONE)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    num_turns = (rows - first + step - 1) // step
    lead = 0
    if SHIFTED:
        lead = ((8 - first.to(gl.int64) * cols % 8) % 8).to(gl.int32)
    whole = (cols - lead) // 8 * 8
    width = whole // 2
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * x_stride + lead) // 8 * 4
    dy_at = dy_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // 8 * 4
    dx_at = dx_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // 8 * 4
    x_step = step.to(gl.int64) * x_stride // 8 * 4
    dy_step = step.to(gl.int64) * cols // 8 * 4
    for turn in gl.static_range(AHEAD):
        left = gl.where(turn < num_turns, width, 0)
        for i in gl.static_range(CHUNKS):
            there = access < left - i * PIECE
            x_from, dy_from = x_at + turn * x_step, dy_at + turn * dy_step
            async_copy.async_copy_global_to_shared(x_places[i].index(turn), x_from + (i * PIECE + c), mask=there)
            async_copy.async_copy_global_to_shared(dy_places[i].index(turn), dy_from + (i * PIECE + c), mask=there)
        row = first + gl.minimum(turn, num_turns - 1) * step
        async_copy.async_copy_global_to_shared(rstd_places.index(turn), rstd_ptr + row + none)
        if CENTERED:
            async_copy.async_copy_global_to_shared(mean_places.index(turn), mean_ptr + row + none)
        async_copy.commit_group()
    if SHIFTED:
        E: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        k = gl.arange(0, 16, E)
        edge = gl.where(k < 8, k, lead + whole + k - 8)
        own = gl.where(k < 8, k < lead, edge < cols)
        x_edge = x_ptr + first.to(gl.int64) * x_stride
        dy_edge = dy_ptr + first.to(gl.int64) * cols
        dx_edge = dx_ptr + first.to(gl.int64) * cols
        x_now = gl.load(x_edge + edge, mask=own, other=0.0)
        dy_now = gl.load(dy_edge + edge, mask=own, other=0.0)
        w_edge = gl.full([16], 1.0, gl.float32, E)
        if HAS_WEIGHT:
            w_edge = gl.load(weight_ptr + edge, mask=own, other=0.0).to(gl.float32)
            if not CENTERED:
                w_edge += offset
        dw_edge = gl.zeros([16], gl.float32, E)
        db_edge = gl.zeros([16], gl.float32, E)
    weights = ()
    dw_low = ()
    dw_high = ()
    db_low = ()
    db_high = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT:
            words = weight_words(weight_ptr + i * BLOCK, c, lead, whole - i * BLOCK, False, SHIFTED)
            if SHARED:
                weights = weights + (gl.allocate_shared_memory(gl.int32, [PIECE], FLAT, words),)  # type: ignore[assignment]
            else:
                weights = weights + (words,)  # type: ignore[assignment]
        dw_low = dw_low + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        dw_high = dw_high + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        db_low = db_low + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        db_high = db_high + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
    inverse = 1.0 / cols
    slot = first * 0
    free = first * 0 + AHEAD
    for turn in range(num_turns):
        if SHIFTED:
            following = gl.minimum(turn + 1, num_turns - 1)
            x_next = gl.load(x_edge + following * 2 * x_step + edge, mask=own, other=0.0)
            dy_next = gl.load(dy_edge + following * 2 * dy_step + edge, mask=own, other=0.0)
        async_copy.wait_group(AHEAD - 1)
        rstd = one_of(rstd_places.index(slot), ONE)
        if CENTERED:
            mean = one_of(mean_places.index(slot), ONE)
        along = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            n, m = halves(x_places[i].index(slot).load(L), BF16)
            g, h = halves(dy_places[i].index(slot).load(L), BF16)  # zeros past the end: sums need no mask
            if CENTERED:
                n -= mean
                m -= mean
            if HAS_WEIGHT:
                g, h = weighted(g, h, weights[i].load(L) if SHARED else weights[i], offset, CENTERED, BF16)
            along += g * n + h * m
            if CENTERED:
                level += g + h
        if CENTERED:
            slope, shift = gl.reduce((along, level), 0, both_added)
        else:
            slope = gl.sum(along, axis=0)
        if SHIFTED:
            n_edge = x_now.to(gl.float32)
            g_edge = dy_now.to(gl.float32)
            if CENTERED:
                n_edge = gl.where(own, n_edge - mean, 0.0)
            dw_edge += g_edge * rstd * n_edge
            db_edge += g_edge
            g_edge *= w_edge
            more_slope, more_shift = gl.reduce((g_edge * n_edge, g_edge), 0, both_added)
            slope += more_slope
            if CENTERED:
                shift += more_shift
        left = gl.where(turn + AHEAD < num_turns, width, 0)
        for i in gl.static_range(CHUNKS):
            there = access < left - i * PIECE
            x_from, dy_from = x_at + (turn + AHEAD) * x_step, dy_at + (turn + AHEAD) * dy_step
            async_copy.async_copy_global_to_shared(x_places[i].index(free), x_from + (i * PIECE + c), mask=there)
            async_copy.async_copy_global_to_shared(dy_places[i].index(free), dy_from + (i * PIECE + c), mask=there)
        later = first + gl.minimum(turn + AHEAD, num_turns - 1) * step
        async_copy.async_copy_global_to_shared(rstd_places.index(free), rstd_ptr + later + none)
        if CENTERED:
            async_copy.async_copy_global_to_shared(mean_places.index(free), mean_ptr + later + none)
        async_copy.commit_group()
        by_x = slope * inverse * rstd * rstd * rstd
        if CENTERED:
            shift = shift * inverse * rstd
        for i in gl.static_range(CHUNKS):
            n, m = halves(x_places[i].index(slot).load(L), BF16)
            g, h = halves(dy_places[i].index(slot).load(L), BF16)
            if CENTERED:
                n -= mean
                m -= mean
            if WANT_DB:
                db_low = db_low[:i] + (db_low[i] + g,) + db_low[i + 1 :]  # type: ignore[assignment]
                db_high = db_high[:i] + (db_high[i] + h,) + db_high[i + 1 :]  # type: ignore[assignment]
            g *= rstd
            h *= rstd
            if WANT_DW:
                dw_low = dw_low[:i] + (dw_low[i] + g * n,) + dw_low[i + 1 :]  # type: ignore[assignment]
                dw_high = dw_high[:i] + (dw_high[i] + h * m,) + dw_high[i + 1 :]  # type: ignore[assignment]
            if HAS_WEIGHT:
                g, h = weighted(g, h, weights[i].load(L) if SHARED else weights[i], offset, CENTERED, BF16)
            n *= by_x
            m *= by_x
            if CENTERED:
                n += shift
                m += shift
            low = g - n
            high = h - m
            to = dx_at + turn * dy_step + (i * PIECE + c)
            gl.store(to, paired(low, high, BF16), mask=access < width - i * PIECE)
        if SHIFTED:
            at_edge = g_edge * rstd - n_edge * by_x
            if CENTERED:
                at_edge -= shift
            gl.store(dx_edge + turn * 2 * dy_step + edge, at_edge.to(dx_ptr.dtype.element_ty), mask=own)
            x_now = x_next
            dy_now = dy_next
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)
        free = gl.where(free + 1 == SLOTS, 0, free + 1)
    let_next_start(EARLY)
    to = shares_ptr + first.to(gl.int64) * share_pitch(cols)
    second = step.to(gl.int64) * share_pitch(cols)
    S: gl.constexpr = gl.BlockedLayout([1 if SHIFTED else 4], [32], [NUM_WARPS], [0])
    col = gl.arange(0, BLOCK, S)
    for i in gl.static_range(CHUNKS):
        at = to + lead + i * BLOCK + col
        there = col < whole - i * BLOCK
        if WANT_DW:
            gl.store(at, in_order((dw_low[i], dw_high[i]), False, S), mask=there)
        if WANT_DB:
            gl.store(at + second, in_order((db_low[i], db_high[i]), False, S), mask=there)
    if SHIFTED:
        if WANT_DW:
            gl.store(to + edge, dw_edge, mask=own)
        if WANT_DB:
            gl.store(to + second + edge, db_edge, mask=own)
