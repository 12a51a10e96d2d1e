"""Backward passes of RMSNorm and LayerNorm of 16-bit rows on Hopper, in Gluon: rows pass through shared memory.

Shapes: R rows, C columns (the normalized dim), P programs. A program takes every P-th row. What waits for a row's sums
stays in shared memory, two numbers a word, and is read there twice: registers hold sums of columns and little else, so
that as many programs share an SM as their rows have room.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.rms_norm.gradient import (
    ask_for_row,
    ask_for_statistics,
    edge_sums,
    edge_weights,
    edges_of,
    ends_at,
    finish_edges,
    finished,
    heard,
    numbers_at,
    places_of,
    slope_of,
    statistics,
    store_shares,
    summed,
    sums_by_lane,
    tell,
    weight_numbers,
    weight_words,
    words_from,
)
from ridgeline.kernels.row_stream import FLAT, let_next_start, share_pitch


@gluon_jit
def norm_backward_words(
    dy_ptr,  # [R, C] of 16 bits, as x
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C] of x's type
    mean_ptr,  # [R] fp32; RMSNorm has none
    rstd_ptr,  # [R] fp32
    dh_ptr,  # [R, C]: a gradient past the norm, which is added
    dx_ptr,  # [R, C]
    shares_ptr,  # [2, P, C] fp32, RMSNorm [P, C]; rows share_pitch(C) apart
    rows,
    cols,
    x_stride,
    offset,
    CENTERED: gl.constexpr,  # LayerNorm
    HAS_WEIGHT: gl.constexpr,
    OFFSET: gl.constexpr,  # a number is added to weights
    WANT_DW: gl.constexpr,
    WANT_DB: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
    UNALIGNED: gl.constexpr,  # rows are unaligned; P rows fill accesses, a program's rows start alike
    SHARED: gl.constexpr,  # weights wait in shared memory as well
    HAS_DH: gl.constexpr,  # not where rows are unaligned
):
    """The next SLOTS − 1 rows are on their way while a row is worked on; the last of them is asked for between the
    row's sums and its results, where a barrier has just been. Ends of unaligned rows are apart, a
    number a lane of the first warp. What is added to results is asked for when a turn begins, and waits in registers.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = x_ptr.dtype.element_ty
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    LANES: gl.constexpr = 32 * NUM_WARPS
    PIECE: gl.constexpr = BLOCK // 2
    FULL: gl.constexpr = CHUNKS - 1  # pieces before this one are full
    AHEAD: gl.constexpr = SLOTS - 1
    x_places = places_of(CHUNKS, SLOTS, PIECE)
    dy_places = places_of(CHUNKS, SLOTS, PIECE)
    rstd_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    mean_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    told_along = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
    told_level = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    num_turns = (rows - first + step - 1) // step
    lead = 0
    if UNALIGNED:
        lead = ((8 - first.to(gl.int64) * cols % 8) % 8).to(gl.int32)
    whole = (cols - lead) // 8 * 8
    width = whole // 2
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_at = words_from(x_ptr, first, x_stride, lead, 8)
    dy_at = words_from(dy_ptr, first, cols, lead, 8)
    x_step = step.to(gl.int64) * x_stride // 8 * 4
    dy_step = step.to(gl.int64) * cols // 8 * 4
    dx_at = words_from(dx_ptr, first, cols, lead, 8) - AHEAD * dy_step  # counted from the row asked for
    dh_at = words_from(dh_ptr, first, cols, lead, 8) - AHEAD * dy_step
    x_off = first.to(gl.int64) * 0
    dy_off = first.to(gl.int64) * 0
    row = first + 0
    for turn in gl.static_range(AHEAD):
        left = gl.where(turn < num_turns, width, 0)
        ask_for_row(x_places, dy_places, turn, x_at + x_off, dy_at + dy_off, c, left, CHUNKS, FULL, PIECE)
        ask_for_statistics(rstd_places, mean_places, turn, rstd_ptr + row, mean_ptr + row, left, CENTERED)
        x_off += x_step
        dy_off += dy_step
        row += step
    if UNALIGNED:
        _, edge, own = edges_of(lead, lead + whole, cols, 8, ONE)
        off = edge - lead
        ends = ends_at(numbers_at(x_at, KIND) + off, numbers_at(dy_at, KIND) + off, own)
        w_edge = edge_weights(weight_ptr, edge, own, offset, HAS_WEIGHT, OFFSET, ONE)
        dw_edge = gl.zeros([LANES], gl.float32, ONE)
        db_edge = gl.zeros([LANES], gl.float32, ONE)
    weights = ()
    dw = ()
    db = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT:
            words = weight_words(weight_ptr + i * BLOCK, c, lead, whole - i * BLOCK, False, UNALIGNED)
            if SHARED:
                weights = weights + (gl.allocate_shared_memory(gl.int32, [PIECE], FLAT, words),)  # type: ignore[assignment]
            else:
                weights = weights + (words,)  # type: ignore[assignment]
        for _ in gl.static_range(2):
            dw = dw + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
            db = db + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
    inverse = 1.0 / cols
    slot = first * 0
    free = first * 0 + AHEAD
    for turn in range(num_turns):
        if UNALIGNED:
            there = own & (turn + 1 < num_turns)
            x_next = numbers_at(x_at + x_off - (AHEAD - 1) * x_step, KIND) + off
            dy_next = numbers_at(dy_at + dy_off - (AHEAD - 1) * dy_step, KIND) + off
            next_ends = ends_at(x_next, dy_next, there)
        past = ()
        for i in gl.static_range(CHUNKS if HAS_DH else 0):
            if i >= FULL:
                more = gl.load(dh_at + dy_off + (i * PIECE + c), mask=access < width - i * PIECE, other=0)
            else:
                more = gl.load(dh_at + dy_off + (i * PIECE + c))
            past = past + (more,)  # type: ignore[assignment]
        async_copy.wait_group(AHEAD - 1)
        rstd, mean = statistics(rstd_places, mean_places, slot, CENTERED, ONE)
        along = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            ws = (1.0, 1.0)
            if HAS_WEIGHT:
                ws = weight_numbers(weights[i].load(L) if SHARED else weights[i], offset, OFFSET, True, False, BF16)
            x = x_places[i].index(slot).load(L)
            dy = dy_places[i].index(slot).load(L)
            along, level = summed(x, dy, ws, mean, along, level, HAS_WEIGHT, CENTERED, False, BF16)
        by_lane = sums_by_lane(along, LANES, ONE)
        level_by_lane = sums_by_lane(level, LANES, ONE)
        if UNALIGNED:
            more, more_level = edge_sums(ends, w_edge, own, mean, CENTERED, False)
            by_lane += more
            level_by_lane += more_level
        tell(0, turn, by_lane, level_by_lane, told_along, told_level, CENTERED, 1, ONE)
        slope, shift = heard(0, turn, told_along, told_level, CENTERED, 1)
        slope = slope_of(slope, shift, mean, CENTERED, False)
        left = gl.where(turn + AHEAD < num_turns, width, 0)
        ask_for_row(x_places, dy_places, free, x_at + x_off, dy_at + dy_off, c, left, CHUNKS, FULL, PIECE)
        ask_for_statistics(rstd_places, mean_places, free, rstd_ptr + row, mean_ptr + row, left, CENTERED)
        row += step
        by_x = slope * inverse * rstd * rstd * rstd
        shift = shift * inverse * rstd
        for i in gl.static_range(CHUNKS):
            ws = (1.0, 1.0)
            if HAS_WEIGHT:
                ws = weight_numbers(weights[i].load(L) if SHARED else weights[i], offset, OFFSET, True, False, BF16)
            x = x_places[i].index(slot).load(L)
            dy = dy_places[i].index(slot).load(L)
            result, more_dw, more_db = finished(
                x, dy, ws, mean, rstd, by_x, shift, dw[2 * i : 2 * i + 2], db[2 * i : 2 * i + 2],
                past[i] if HAS_DH else x, HAS_WEIGHT, CENTERED, WANT_DW, WANT_DB, False, BF16, HAS_DH,
            )  # fmt: skip
            dw = dw[: 2 * i] + more_dw + dw[2 * i + 2 :]
            db = db[: 2 * i] + more_db + db[2 * i + 2 :]
            if i >= FULL:
                gl.store(dx_at + dy_off + (i * PIECE + c), result, mask=access < width - i * PIECE)
            else:
                gl.store(dx_at + dy_off + (i * PIECE + c), result)
        if UNALIGNED:
            to = numbers_at(dx_at + dy_off, KIND) + off
            dw_edge, db_edge = finish_edges(to, ends, w_edge, own, mean, rstd, by_x, shift, dw_edge, db_edge, CENTERED)
            ends = next_ends
        x_off += x_step
        dy_off += dy_step
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)
        free = gl.where(free + 1 == SLOTS, 0, free + 1)
    let_next_start(EARLY)
    to = shares_ptr + first.to(gl.int64) * share_pitch(cols)
    second = step.to(gl.int64) * share_pitch(cols)
    store_shares(to + lead, second, dw, db, whole, CHUNKS, BLOCK, WANT_DW, WANT_DB, False, UNALIGNED)
    if UNALIGNED:
        if WANT_DW:
            gl.store(to + edge, dw_edge, mask=own)
        if WANT_DB:
            gl.store(to + second + edge, db_edge, mask=own)
