"""Backward passes of RMSNorm and LayerNorm on Hopper, in Gluon: a row is finished while the next one's sums are taken.

Shapes: R rows, C columns (the normalized dim), P programs. A program takes every P-th row. What waits are words of 32
bits, one float32 or two 16-bit numbers, in shared memory until a row's sums are taken and in registers until it is
finished, one turn later. So a turn has two barriers next to each other instead of a chain of sums between its halves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.stream import (
    FLAT,
    halves,
    halves_here,
    heard_from_cluster,
    let_next_start,
    open_exchange,
    paired,
    share_pitch,
    tell_cluster,
    words_of,
)


@gluon.jit
def numbers(words, WIDE: gl.constexpr, BF16: gl.constexpr):
    """The numbers of each word, as float32."""
    if WIDE:
        return (words.to(gl.float32, bitcast=True),)
    else:
        return halves(words, BF16)


@gluon.jit
def numbers_here(words, WIDE: gl.constexpr, BF16: gl.constexpr):
    """The same, now and not before: the compiler would keep what it has computed once."""
    if WIDE:
        return (words.to(gl.float32, bitcast=True),)
    else:
        return halves_here(words, BF16)


@gluon.jit
def word(values, WIDE: gl.constexpr, BF16: gl.constexpr):
    """Numbers rounded to their type, as one word."""
    if WIDE:
        return values[0].to(gl.int32, bitcast=True)
    else:
        return paired(values[0], values[1], BF16)


@gluon.jit
def weight_words(weight_ptr, c, lead, left, WIDE: gl.constexpr, SHIFTED: gl.constexpr):
    """Weights as words; where rows start inside accesses, so do these, and they are read one by one."""
    if not SHIFTED:
        at = weight_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        return gl.load(at + c, mask=c < (left if WIDE else left // 2), other=0)
    elif WIDE:
        return gl.load(weight_ptr + lead + c, mask=c < left, other=0.0).to(gl.int32, bitcast=True)
    else:
        return words_of(weight_ptr + lead, c, left)


@gluon.jit
def in_order(values, WIDE: gl.constexpr, TO: gl.constexpr):
    """Column sums of a piece by column, lanes next to each other: whole sectors are written at once."""
    if WIDE:
        return gl.convert_layout(values[0], TO)
    else:
        both = gl.join(values[0], values[1])
        return gl.convert_layout(both.reshape([2 * values[0].shape[0]]), TO)


@gluon.jit
def one_of(place, ONE: gl.constexpr):
    """A number from shared memory."""
    return gl.sum(place.load(ONE), axis=0)


@gluon.jit
def by_warp(by_lane, NUM_WARPS: gl.constexpr):
    """The sum of a number of every lane over its warp."""
    return gl.sum(by_lane.reshape([NUM_WARPS, 32]), axis=1)


@gluon.jit
def by_warp_everywhere(by_lane, NUM_WARPS: gl.constexpr, ONE: gl.constexpr):
    """The same, in every lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    total = gl.sum(gl.convert_layout(by_lane.reshape([NUM_WARPS, 32]), LANES), axis=1)
    total = gl.expand_dims(total, 1) + gl.zeros([NUM_WARPS, 32], gl.float32, LANES)
    return gl.convert_layout(total.reshape([32 * NUM_WARPS]), ONE)


@gluon.jit
def norm_backward_ahead(
    dy_ptr,  # [R, C]
    x_ptr,  # [R, C] of the same type, rows x_stride apart
    weight_ptr,  # [C] of the same type
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
    BLOCK: gl.constexpr,  # columns of a piece: one access of every lane
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
    SHIFTED: gl.constexpr,  # rows start inside accesses; P is a multiple of VECTOR, a program's rows start alike
    SHARED: gl.constexpr,  # where weights wait: 0 in registers, 1 in shared memory, 2 where they are
    SPLIT: gl.constexpr,  # programs of a cluster share a row; P counts clusters
):
    """Rows turn + 2 to turn + SLOTS are on their way while row turn is finished and the sums of row turn + 1 are taken.

    Ends of rows that start inside accesses are apart, a number a lane of the first warp. Programs that share a row have
    a stretch of its columns each, and tell each other what their warps have summed.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    WIDE: gl.constexpr = x_ptr.dtype.element_ty == gl.float32
    NUM: gl.constexpr = 1 if WIDE else 2
    VECTOR: gl.constexpr = 4 * NUM
    PIECE: gl.constexpr = 128 * NUM_WARPS
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    ALL: gl.constexpr = gl.BlockedLayout([NUM_WARPS], [32], [NUM_WARPS], [0])
    x_places = ()
    dy_places = ()
    for _ in gl.static_range(CHUNKS):
        x_places = x_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
        dy_places = dy_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
    rstd_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    mean_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    if SPLIT == 1:
        told_along = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
        told_level = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
    FULL: gl.constexpr = CHUNKS - (1 if SPLIT == 1 else 2)  # pieces before this one are full
    first = gl.program_id(0) // SPLIT
    step = gl.num_programs(0) // SPLIT
    num_turns = (rows - first + step - 1) // step
    lead = 0
    if SHIFTED:
        lead = ((VECTOR - first.to(gl.int64) * cols % VECTOR) % VECTOR).to(gl.int32)
    whole = (cols - lead) // VECTOR * VECTOR
    tail = lead + whole
    width = whole // NUM
    start = 0
    if SPLIT > 1:
        rank = gl.program_id(0) % SPLIT
        span = (width + (32 * SPLIT - 1)) // (32 * SPLIT) * 32
        start = rank * span
        width = gl.minimum(width - start, span)
        whole = width * NUM
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * x_stride + lead) // VECTOR * 4
    dy_at = dy_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // VECTOR * 4
    dx_at = dx_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // VECTOR * 4
    if SPLIT > 1:
        x_at += start
        dy_at += start
        dx_at += start
    x_step = step.to(gl.int64) * x_stride // VECTOR * 4
    dy_step = step.to(gl.int64) * cols // VECTOR * 4
    none = gl.arange(0, 1, ONE)
    for turn in gl.static_range(SLOTS):
        left = gl.where(turn < num_turns, width, 0)
        row = first + gl.minimum(turn, num_turns - 1) * step
        for i in gl.static_range(CHUNKS):
            there = access < (left - i * PIECE if i >= FULL else left)
            x_from, dy_from = x_at + turn * x_step, dy_at + turn * dy_step
            async_copy.async_copy_global_to_shared(x_places[i].index(turn), x_from + (i * PIECE + c), mask=there)
            async_copy.async_copy_global_to_shared(dy_places[i].index(turn), dy_from + (i * PIECE + c), mask=there)
        async_copy.async_copy_global_to_shared(rstd_places.index(turn), rstd_ptr + row + none)
        if CENTERED:
            async_copy.async_copy_global_to_shared(mean_places.index(turn), mean_ptr + row + none)
        async_copy.commit_group()
    if SHIFTED:
        k = gl.arange(0, 32 * NUM_WARPS, ONE)
        edge = gl.where(k < VECTOR, k, tail + k - VECTOR)
        own = gl.where(k < VECTOR, k < lead, edge < cols) & (k < 2 * VECTOR)
        if SPLIT > 1:
            own = own & gl.where(k < VECTOR, rank == 0, rank == SPLIT - 1)
        x_edge = x_ptr + first.to(gl.int64) * x_stride
        dy_edge = dy_ptr + first.to(gl.int64) * cols
        dx_edge = dx_ptr + first.to(gl.int64) * cols
        second_turn = gl.minimum(1, num_turns - 1)
        x_end = gl.load(x_edge + edge, mask=own, other=0.0)
        dy_end = gl.load(dy_edge + edge, mask=own, other=0.0)
        x_ahead = gl.load(x_edge + second_turn * NUM * x_step + edge, mask=own, other=0.0)
        dy_ahead = gl.load(dy_edge + second_turn * NUM * dy_step + edge, mask=own, other=0.0)
        w_edge = gl.full([32 * NUM_WARPS], 1.0, gl.float32, ONE)
        if HAS_WEIGHT:
            w_edge = gl.load(weight_ptr + edge, mask=own, other=0.0).to(gl.float32)
            if not CENTERED:
                w_edge += offset
        dw_edge = gl.zeros([32 * NUM_WARPS], gl.float32, ONE)
        db_edge = gl.zeros([32 * NUM_WARPS], gl.float32, ONE)
    weight_at = weight_ptr + start * NUM
    weights = ()
    dw = ()
    db = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT and SHARED < 2:
            words = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, SHIFTED)
            if SHARED:
                weights = weights + (gl.allocate_shared_memory(gl.int32, [PIECE], FLAT, words),)  # type: ignore[assignment]
            else:
                weights = weights + (words,)  # type: ignore[assignment]
        for _ in gl.static_range(NUM):
            dw = dw + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
            db = db + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
    inverse = 1.0 / cols
    async_copy.wait_group(SLOTS - 1)
    rstd = one_of(rstd_places.index(0), ONE)
    mean = rstd * 0.0
    if CENTERED:
        mean = one_of(mean_places.index(0), ONE)
    xs = ()
    dys = ()
    along = gl.zeros([PIECE], gl.float32, L)
    level = gl.zeros([PIECE], gl.float32, L)
    for i in gl.static_range(CHUNKS):
        xs = xs + (x_places[i].index(0).load(L),)  # type: ignore[assignment]
        dys = dys + (dy_places[i].index(0).load(L),)  # type: ignore[assignment]
        ns = numbers(xs[i], WIDE, BF16)
        gs = numbers(dys[i], WIDE, BF16)
        if HAS_WEIGHT:
            if SHARED == 2:
                ww = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, SHIFTED)
            else:
                ww = weights[i].load(L) if SHARED else weights[i]
            ws = numbers_here(ww, WIDE, BF16)
        for j in gl.static_range(NUM):
            n = ns[j]
            g = gs[j]
            if CENTERED:
                n -= mean
            if HAS_WEIGHT:
                g *= ws[j] if CENTERED else ws[j] + offset
            along += g * n
            level += g
    by_lane = gl.convert_layout(gl.sum(along.reshape([32 * NUM_WARPS, 4]), axis=1), ONE)
    level_by_lane = gl.convert_layout(gl.sum(level.reshape([32 * NUM_WARPS, 4]), axis=1), ONE)
    if SHIFTED:
        g_end = dy_end.to(gl.float32) * w_edge
        by_lane += gl.where(own, g_end * (x_end.to(gl.float32) - mean), 0.0)
        level_by_lane += g_end
    if SPLIT == 1:
        told_along.store(by_warp(by_lane, NUM_WARPS))
        if CENTERED:
            told_level.store(by_warp(level_by_lane, NUM_WARPS))
    else:
        room = open_exchange(SPLIT * NUM_WARPS)
        level_told = by_warp_everywhere(level_by_lane, NUM_WARPS, ONE)
        tell_cluster(room, 0, by_warp_everywhere(by_lane, NUM_WARPS, ONE), level_told, SPLIT, NUM_WARPS)
    slot = first * 0
    near = first * 0 + 1
    for turn in range(num_turns):
        async_copy.wait_group(SLOTS - 2)
        if SPLIT == 1:
            slope = gl.sum(told_along.load(ALL), axis=0)
            if CENTERED:
                shift = gl.sum(told_level.load(ALL), axis=0) * inverse * rstd
        else:
            slope, shift = heard_from_cluster(room, turn, SPLIT, NUM_WARPS)
            shift = shift * inverse * rstd
        left = gl.where(turn + SLOTS < num_turns, width, 0)
        for i in gl.static_range(CHUNKS):
            there = access < (left - i * PIECE if i >= FULL else left)
            x_from, dy_from = x_at + (turn + SLOTS) * x_step, dy_at + (turn + SLOTS) * dy_step
            async_copy.async_copy_global_to_shared(x_places[i].index(slot), x_from + (i * PIECE + c), mask=there)
            async_copy.async_copy_global_to_shared(dy_places[i].index(slot), dy_from + (i * PIECE + c), mask=there)
        later = first + gl.minimum(turn + SLOTS, num_turns - 1) * step
        async_copy.async_copy_global_to_shared(rstd_places.index(slot), rstd_ptr + later + none)
        if CENTERED:
            async_copy.async_copy_global_to_shared(mean_places.index(slot), mean_ptr + later + none)
        async_copy.commit_group()
        if SHIFTED:
            following = gl.minimum(turn + 2, num_turns - 1)
            x_new = gl.load(x_edge + following * NUM * x_step + edge, mask=own, other=0.0)
            dy_new = gl.load(dy_edge + following * NUM * dy_step + edge, mask=own, other=0.0)
        by_x = slope * inverse * rstd * rstd * rstd
        rstd_next = one_of(rstd_places.index(near), ONE)
        mean_next = rstd * 0.0
        if CENTERED:
            mean_next = one_of(mean_places.index(near), ONE)
        along = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            ns = numbers_here(xs[i], WIDE, BF16)
            gs = numbers_here(dys[i], WIDE, BF16)
            if HAS_WEIGHT:
                if SHARED == 2:
                    ww = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, SHIFTED)
                else:
                    ww = weights[i].load(L) if SHARED else weights[i]
                ws = numbers_here(ww, WIDE, BF16)
            values = ()
            for j in gl.static_range(NUM):
                n = ns[j]
                g = gs[j]
                if CENTERED:
                    n -= mean
                if WANT_DB:
                    db = db[: NUM * i + j] + (db[NUM * i + j] + g,) + db[NUM * i + j + 1 :]  # type: ignore[assignment]
                g *= rstd
                if WANT_DW:
                    dw = dw[: NUM * i + j] + (dw[NUM * i + j] + g * n,) + dw[NUM * i + j + 1 :]  # type: ignore[assignment]
                if HAS_WEIGHT:
                    g *= ws[j] if CENTERED else ws[j] + offset
                g -= n * by_x
                if CENTERED:
                    g -= shift
                values = values + (g,)  # type: ignore[assignment]
            to = dx_at + turn * dy_step + (i * PIECE + c)
            if i >= FULL:
                gl.store(to, word(values, WIDE, BF16), mask=access < width - i * PIECE)
            else:
                gl.store(to, word(values, WIDE, BF16))
            xs = xs[:i] + (x_places[i].index(near).load(L),) + xs[i + 1 :]  # type: ignore[assignment]
            dys = dys[:i] + (dy_places[i].index(near).load(L),) + dys[i + 1 :]  # type: ignore[assignment]
            ns = numbers(xs[i], WIDE, BF16)
            gs = numbers(dys[i], WIDE, BF16)  # zeros past the end: sums need no mask
            for j in gl.static_range(NUM):
                n = ns[j]
                g = gs[j]
                if CENTERED:
                    n -= mean_next
                if HAS_WEIGHT:
                    g *= ws[j] if CENTERED else ws[j] + offset
                along += g * n
                level += g
        by_lane = gl.convert_layout(gl.sum(along.reshape([32 * NUM_WARPS, 4]), axis=1), ONE)
        level_by_lane = gl.convert_layout(gl.sum(level.reshape([32 * NUM_WARPS, 4]), axis=1), ONE)
        if SHIFTED:
            n_end = gl.where(own, x_end.to(gl.float32) - mean, 0.0)
            g_end = dy_end.to(gl.float32)
            db_edge += g_end
            g_end *= rstd
            dw_edge += g_end * n_end
            at_end = g_end * w_edge - n_end * by_x
            if CENTERED:
                at_end -= shift
            gl.store(dx_edge + turn * NUM * dy_step + edge, at_end.to(dx_ptr.dtype.element_ty), mask=own)
            g_ahead = dy_ahead.to(gl.float32) * w_edge
            by_lane += gl.where(own, g_ahead * (x_ahead.to(gl.float32) - mean_next), 0.0)
            level_by_lane += g_ahead
            x_end = x_ahead
            dy_end = dy_ahead
            x_ahead = x_new
            dy_ahead = dy_new
        if SPLIT == 1:
            told_along.store(by_warp(by_lane, NUM_WARPS))
            if CENTERED:
                told_level.store(by_warp(level_by_lane, NUM_WARPS))
        else:
            level_told = by_warp_everywhere(level_by_lane, NUM_WARPS, ONE)
            tell_cluster(room, turn + 1, by_warp_everywhere(by_lane, NUM_WARPS, ONE), level_told, SPLIT, NUM_WARPS)
        mean = mean_next
        rstd = rstd_next
        slot = near
        near = gl.where(near + 1 == SLOTS, 0, near + 1)
    async_copy.wait_group(0)
    if SPLIT > 1:
        heard_from_cluster(room, num_turns, SPLIT, NUM_WARPS)  # nobody writes into the room of one that has ended
    let_next_start(EARLY)
    to = shares_ptr + first.to(gl.int64) * share_pitch(cols)
    second = step.to(gl.int64) * share_pitch(cols)
    S: gl.constexpr = gl.BlockedLayout([1 if SHIFTED else 4], [32], [NUM_WARPS], [0])
    col = gl.arange(0, BLOCK, S)
    for i in gl.static_range(CHUNKS):
        at_col = to + lead + start * NUM + i * BLOCK + col
        inside = col < whole - i * BLOCK
        if WANT_DW:
            gl.store(at_col, in_order(dw[NUM * i : NUM * i + NUM], WIDE, S), mask=inside)
        if WANT_DB:
            gl.store(at_col + second, in_order(db[NUM * i : NUM * i + NUM], WIDE, S), mask=inside)
    if SHIFTED:
        if WANT_DW:
            gl.store(to + edge, dw_edge, mask=own)
        if WANT_DB:
            gl.store(to + second + edge, db_edge, mask=own)
