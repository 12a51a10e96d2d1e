"""Backward passes of RMSNorm and LayerNorm on Hopper, in Gluon: a row is finished while the next one's sums are taken.

Shapes: R rows, C columns (the normalized dim), P programs. A program takes every P-th row. What waits are words of 32
bits, one float32 or two 16-bit numbers, in shared memory until a row's sums are taken and in registers until it is
finished, one turn later. So a turn has two barriers next to each other instead of a chain of sums between its halves.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.row_stream import (
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


@gluon_jit
def numbers(words, WIDE: gl.constexpr, BF16: gl.constexpr):
    """The numbers of each word, as float32."""
    if WIDE:
        return (words.to(gl.float32, bitcast=True),)
    else:
        return halves(words, BF16)


@gluon_jit
def numbers_here(words, WIDE: gl.constexpr, BF16: gl.constexpr):
    """The same, now and not before: the compiler would keep what it has computed once."""
    if WIDE:
        return (words.to(gl.float32, bitcast=True),)
    else:
        return halves_here(words, BF16)


@gluon_jit
def word(values, WIDE: gl.constexpr, BF16: gl.constexpr):
    """Numbers rounded to their type, as one word."""
    if WIDE:
        return values[0].to(gl.int32, bitcast=True)
    else:
        return paired(values[0], values[1], BF16)


@gluon_jit
def weight_words(weight_ptr, c, lead, left, WIDE: gl.constexpr, UNALIGNED: gl.constexpr):
    """Weights as words; where rows are unaligned, so do these, and they are read one by one."""
    if not UNALIGNED:
        at = weight_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        return gl.load(at + c, mask=c < (left if WIDE else left // 2), other=0)
    elif WIDE:
        return gl.load(weight_ptr + lead + c, mask=c < left, other=0.0).to(gl.int32, bitcast=True)
    else:
        return words_of(weight_ptr + lead, c, left)


@gluon_jit
def in_order(values, WIDE: gl.constexpr, TO: gl.constexpr):
    """Column sums of a piece by column, lanes next to each other: whole sectors are written at once."""
    if WIDE:
        return gl.convert_layout(values[0], TO)
    else:
        both = gl.join(values[0], values[1])
        return gl.convert_layout(both.reshape([2 * values[0].shape[0]]), TO)


@gluon_jit
def one_of(place, ONE: gl.constexpr):
    """A number from shared memory."""
    return gl.sum(place.load(ONE), axis=0)


@gluon_jit
def by_warp(by_lane, NUM_WARPS: gl.constexpr):
    """The sum of a number of every lane over its warp."""
    return gl.sum(by_lane.reshape([NUM_WARPS, 32]), axis=1)


@gluon_jit
def by_warp_everywhere(by_lane, NUM_WARPS: gl.constexpr, ONE: gl.constexpr):
    """The same, in every lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    total = gl.sum(gl.convert_layout(by_lane.reshape([NUM_WARPS, 32]), LANES), axis=1)
    total = gl.expand_dims(total, 1) + gl.zeros([NUM_WARPS, 32], gl.float32, LANES)
    return gl.convert_layout(total.reshape([32 * NUM_WARPS]), ONE)


@gluon_jit
def places_of(CHUNKS: gl.constexpr, SLOTS: gl.constexpr, PIECE: gl.constexpr):
    """Room in shared memory for SLOTS rows of words, by piece."""
    places = ()
    for _ in gl.static_range(CHUNKS):
        places = places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
    return places


@gluon_jit
def ask_for_row(
    x_places, dy_places, slot, x_from, dy_from, c, left, CHUNKS: gl.constexpr, FULL: gl.constexpr, PIECE: gl.constexpr
):
    """Asks for the words of a row, of which there are ``left``: pieces before FULL are full, and what comes in the
    place of words past the end is zero."""
    access = c // 4 * 4
    for i in gl.static_range(CHUNKS):
        there = access < (left - i * PIECE if i >= FULL else left)
        async_copy.async_copy_global_to_shared(x_places[i].index(slot), x_from + (i * PIECE + c), mask=there)
        async_copy.async_copy_global_to_shared(dy_places[i].index(slot), dy_from + (i * PIECE + c), mask=there)


@gluon_jit
def ask_for_statistics(rstd_places, mean_places, slot, rstd_from, mean_from, there, CENTERED: gl.constexpr):
    """Asks for the two numbers of a row, which come with it into shared memory, and ends what is asked for together.

    As numbers of the loop the compiler would wait for them at once, where they are asked for."""
    none = gl.arange(0, 1, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    async_copy.async_copy_global_to_shared(rstd_places.index(slot), rstd_from + none, mask=none < there)
    if CENTERED:
        async_copy.async_copy_global_to_shared(mean_places.index(slot), mean_from + none, mask=none < there)
    async_copy.commit_group()


@gluon_jit
def statistics(rstd_places, mean_places, slot, CENTERED: gl.constexpr, ONE: gl.constexpr):
    """A row's 1 / deviation and its mean, which RMSNorm has not."""
    rstd = one_of(rstd_places.index(slot), ONE)
    mean = rstd * 0.0
    if CENTERED:
        mean = one_of(mean_places.index(slot), ONE)
    return rstd, mean


@gluon_jit
def weight_numbers(words, offset, OFFSET: gl.constexpr, HERE: gl.constexpr, WIDE: gl.constexpr, BF16: gl.constexpr):
    """The weights of a piece as float32, now and not before where they are HERE all the time; RMSNorm's may have a
    number added to them."""
    ws = numbers_here(words, WIDE, BF16) if HERE else numbers(words, WIDE, BF16)
    if not OFFSET:
        return ws
    elif WIDE:
        return (ws[0] + offset,)
    else:
        return ws[0] + offset, ws[1] + offset


@gluon_jit
def summed(
    x, dy, ws, mean, along, level, HAS_WEIGHT: gl.constexpr, CENTERED: gl.constexpr, WIDE: gl.constexpr,
    BF16: gl.constexpr,
):  # fmt: skip
    """A piece of a row added to its two sums, over weighted gradients and over their products with what was normalized.

    16-bit numbers are not centered before: what the mean adds is taken off the sum (``slope_of``). It is as large as
    the mean's own rounding makes it, which is thousands of times below that of the numbers.
    """
    ns = numbers(x, WIDE, BF16)
    gs = numbers(dy, WIDE, BF16)  # zeros past the end: sums need no mask
    for j in gl.static_range(1 if WIDE else 2):
        n = ns[j]
        g = gs[j]
        if CENTERED and WIDE:
            n -= mean
        if HAS_WEIGHT:
            g *= ws[j]
        along += g * n
        level += g
    return along, level


@gluon_jit
def slope_of(along, level, mean, CENTERED: gl.constexpr, WIDE: gl.constexpr):
    """A row's sum of products with what is centered, from that with what may not be."""
    if CENTERED and not WIDE:
        return along - mean * level
    else:
        return along


@gluon_jit
def finished(
    x, dy, ws, mean, rstd, by_x, shift, dw, db, past, HAS_WEIGHT: gl.constexpr, CENTERED: gl.constexpr,
    WANT_DW: gl.constexpr, WANT_DB: gl.constexpr, WIDE: gl.constexpr, BF16: gl.constexpr, HAS_DH: gl.constexpr,
):  # fmt: skip
    """A piece's results as words, those of ``past`` added to them, and its column sums with this row added."""
    ns = numbers_here(x, WIDE, BF16)
    gs = numbers_here(dy, WIDE, BF16)
    hs = numbers(past, WIDE, BF16)
    values = ()
    more_dw = ()
    more_db = ()
    for j in gl.static_range(1 if WIDE else 2):
        n = ns[j]
        g = gs[j]
        if CENTERED:
            n -= mean
        more_db = more_db + (db[j] + g if WANT_DB else db[j],)  # type: ignore[assignment]
        g *= rstd
        more_dw = more_dw + (dw[j] + g * n if WANT_DW else dw[j],)  # type: ignore[assignment]
        n = n * by_x + shift if CENTERED else n * by_x
        if HAS_DH:
            n -= hs[j]
        values = values + (g * ws[j] - n if HAS_WEIGHT else g - n,)  # type: ignore[assignment]
    return word(values, WIDE, BF16), more_dw, more_db


@gluon_jit
def sums_by_lane(sums, LANES: gl.constexpr, ONE: gl.constexpr):
    """Four numbers of every lane added, by lane."""
    return gl.convert_layout(gl.sum(sums.reshape([LANES, 4]), axis=1), ONE)


@gluon_jit
def edges_of(lead, tail, cols, VECTOR: gl.constexpr, ONE: gl.constexpr):
    """Columns outside of whole accesses, a lane of the first warp each, and which lanes have one."""
    k = gl.arange(0, 32 * gl.num_warps(), ONE)
    edge = gl.where(k < VECTOR, k, tail + k - VECTOR)
    return k, edge, gl.where(k < VECTOR, k < lead, edge < cols) & (k < 2 * VECTOR)


@gluon_jit
def edge_weights(
    weight_ptr, edge, own, offset, HAS_WEIGHT: gl.constexpr, OFFSET: gl.constexpr, ONE: gl.constexpr
):  # fmt: skip
    w = gl.full([32 * gl.num_warps()], 1.0, gl.float32, ONE)
    if HAS_WEIGHT:
        w = gl.load(weight_ptr + edge, mask=own, other=0.0).to(gl.float32)
        if OFFSET:
            w += offset
    return w


@gluon_jit
def ends_at(x_at, dy_at, there):
    """Numbers of a row's ends, as they are: whoever turns them into others waits for them."""
    return gl.load(x_at, mask=there, other=0.0), gl.load(dy_at, mask=there, other=0.0)


@gluon_jit
def ends_kept(ends, WIDE: gl.constexpr):
    """The same, of which 16-bit ones are one word."""
    if WIDE:
        return ends
    else:
        low = ends[0].to(gl.int16, bitcast=True).to(gl.int32) & 65535
        return (low | (ends[1].to(gl.int16, bitcast=True).to(gl.int32) << 16),)


@gluon_jit
def ends_again(kept, WIDE: gl.constexpr, BF16: gl.constexpr):
    """Ends that were kept, as float32."""
    if WIDE:
        return kept
    else:
        return halves(kept[0], BF16)


@gluon_jit
def edge_sums(ends, w, own, mean, CENTERED: gl.constexpr, WIDE: gl.constexpr):
    """What a row's ends add to its two sums, by lane."""
    n = ends[0].to(gl.float32)
    g = ends[1].to(gl.float32) * w
    if CENTERED and WIDE:
        n = gl.where(own, n - mean, 0.0)
    return g * n, g


@gluon_jit
def finish_edges(to, ends, w, own, mean, rstd, by_x, shift, dw, db, CENTERED: gl.constexpr):
    """Writes the results of a row's ends; their column sums with this row added."""
    n = ends[0].to(gl.float32)
    g = ends[1].to(gl.float32)
    if CENTERED:
        n = gl.where(own, n - mean, 0.0)
    db += g
    g *= rstd
    dw += g * n
    value = g * w - n * by_x
    if CENTERED:
        value -= shift
    gl.store(to, value.to(to.dtype.element_ty), mask=own)
    return dw, db


@gluon_jit
def store_shares(
    to, second, dw, db, whole, CHUNKS: gl.constexpr, BLOCK: gl.constexpr, WANT_DW: gl.constexpr, WANT_DB: gl.constexpr,
    WIDE: gl.constexpr, UNALIGNED: gl.constexpr,
):  # fmt: skip
    """A program's column sums of ``whole`` columns, those of the bias ``second`` numbers further."""
    NUM: gl.constexpr = 1 if WIDE else 2
    S: gl.constexpr = gl.BlockedLayout([1 if UNALIGNED else 4], [32], [gl.num_warps()], [0])
    col = gl.arange(0, BLOCK, S)
    for i in gl.static_range(CHUNKS):
        at = to + i * BLOCK + col
        inside = col < whole - i * BLOCK
        if WANT_DW:
            gl.store(at, in_order(dw[NUM * i : NUM * i + NUM], WIDE, S), mask=inside)
        if WANT_DB:
            gl.store(at + second, in_order(db[NUM * i : NUM * i + NUM], WIDE, S), mask=inside)


@gluon_jit
def words_from(pointer, row, stride, lead, VECTOR: gl.constexpr):
    """The first whole access of a row, as words."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True) + (row.to(gl.int64) * stride + lead) // VECTOR * 4


@gluon_jit
def numbers_at(words, KIND: gl.constexpr):
    """The same place in memory, counted in numbers."""
    return words.to(gl.pointer_type(KIND), bitcast=True)


@gluon_jit
def tell(
    room, turn, along, level, told_along, told_level, CENTERED: gl.constexpr, SPLIT: gl.constexpr, ONE: gl.constexpr
):
    """What every warp has summed of a row to all warps that work on it."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    if SPLIT > 1:
        level = by_warp_everywhere(level, NUM_WARPS, ONE)
        tell_cluster(room, turn, by_warp_everywhere(along, NUM_WARPS, ONE), level, SPLIT, NUM_WARPS)
    else:
        told_along.store(by_warp(along, NUM_WARPS))
        if CENTERED:
            told_level.store(by_warp(level, NUM_WARPS))


@gluon_jit
def heard(room, turn, told_along, told_level, CENTERED: gl.constexpr, SPLIT: gl.constexpr):
    """A row's two sums, the same bits for all."""
    ALL: gl.constexpr = gl.BlockedLayout([gl.num_warps()], [32], [gl.num_warps()], [0])
    if SPLIT > 1:
        return heard_from_cluster(room, turn, SPLIT, gl.num_warps())
    else:
        along = gl.sum(told_along.load(ALL), axis=0)
        level = along
        if CENTERED:
            level = gl.sum(told_level.load(ALL), axis=0)
        return along, level


@gluon_jit
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
    OFFSET: gl.constexpr,  # a number is added to weights
    WANT_DW: gl.constexpr,
    WANT_DB: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,  # columns of a piece: one access of every lane
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
    UNALIGNED: gl.constexpr,  # rows are unaligned; P rows fill accesses, a program's rows start alike
    SHARED: gl.constexpr,  # where weights wait: 0 in registers, 1 in shared memory, 2 where they are
    SPLIT: gl.constexpr,  # programs of a cluster share a row; P counts clusters
):
    """Rows turn + 2 to turn + SLOTS are on their way while row turn is finished and the sums of row turn + 1 are taken.

    Ends of unaligned rows are apart, a number a lane of the first warp. Programs that share a row have
    a stretch of its columns each, and tell each other what their warps have summed. Places in memory are counted along:
    computed from a turn's number they were a tenth of all instructions.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = x_ptr.dtype.element_ty
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    WIDE: gl.constexpr = x_ptr.dtype.element_ty == gl.float32
    NUM: gl.constexpr = 1 if WIDE else 2
    VECTOR: gl.constexpr = 4 * NUM
    LANES: gl.constexpr = 32 * NUM_WARPS
    PIECE: gl.constexpr = 4 * LANES
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    FULL: gl.constexpr = CHUNKS - (1 if SPLIT == 1 else 2)  # pieces before this one are full
    x_places = places_of(CHUNKS, SLOTS, PIECE)
    dy_places = places_of(CHUNKS, SLOTS, PIECE)
    rstd_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    mean_places = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], FLAT)
    told_along = rstd_places
    told_level = mean_places
    if SPLIT == 1:
        told_along = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
        told_level = gl.allocate_shared_memory(gl.float32, [NUM_WARPS], FLAT)
    first = gl.program_id(0) // SPLIT
    step = gl.num_programs(0) // SPLIT
    num_turns = (rows - first + step - 1) // step
    lead = 0
    if UNALIGNED:
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
    x_at = words_from(x_ptr, first, x_stride, lead, VECTOR) + start
    dy_at = words_from(dy_ptr, first, cols, lead, VECTOR) + start
    x_step = step.to(gl.int64) * x_stride // VECTOR * 4
    dy_step = step.to(gl.int64) * cols // VECTOR * 4
    dx_at = words_from(dx_ptr, first, cols, lead, VECTOR) + start - SLOTS * dy_step  # counted from the row asked for
    x_off = first.to(gl.int64) * 0
    dy_off = first.to(gl.int64) * 0
    row = first + 0
    for turn in gl.static_range(SLOTS):
        left = gl.where(turn < num_turns, width, 0)
        ask_for_row(x_places, dy_places, turn, x_at + x_off, dy_at + dy_off, c, left, CHUNKS, FULL, PIECE)
        ask_for_statistics(rstd_places, mean_places, turn, rstd_ptr + row, mean_ptr + row, left, CENTERED)
        x_off += x_step
        dy_off += dy_step
        row += step
    if UNALIGNED:
        k, edge, own = edges_of(lead, tail, cols, VECTOR, ONE)
        if SPLIT > 1:
            own = own & gl.where(k < VECTOR, rank == 0, rank == SPLIT - 1)
        off = edge - lead - start * NUM
        ends = ends_at(numbers_at(x_at, KIND) + off, numbers_at(dy_at, KIND) + off, own)
        second = own & (num_turns > 1)
        next_ends = ends_at(numbers_at(x_at + x_step, KIND) + off, numbers_at(dy_at + dy_step, KIND) + off, second)
        w_edge = edge_weights(weight_ptr, edge, own, offset, HAS_WEIGHT, OFFSET, ONE)
        dw_edge = gl.zeros([LANES], gl.float32, ONE)
        db_edge = gl.zeros([LANES], gl.float32, ONE)
    weight_at = weight_ptr + start * NUM
    weights = ()
    dw = ()
    db = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT and SHARED < 2:
            words = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, UNALIGNED)
            if SHARED:
                weights = weights + (gl.allocate_shared_memory(gl.int32, [PIECE], FLAT, words),)  # type: ignore[assignment]
            else:
                weights = weights + (words,)  # type: ignore[assignment]
        for _ in gl.static_range(NUM):
            dw = dw + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
            db = db + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
    inverse = 1.0 / cols
    async_copy.wait_group(SLOTS - 1)
    rstd, mean = statistics(rstd_places, mean_places, 0, CENTERED, ONE)
    xs = ()
    dys = ()
    along = gl.zeros([PIECE], gl.float32, L)
    level = gl.zeros([PIECE], gl.float32, L)
    for i in gl.static_range(CHUNKS):
        xs = xs + (x_places[i].index(0).load(L),)  # type: ignore[assignment]
        dys = dys + (dy_places[i].index(0).load(L),)  # type: ignore[assignment]
        ws = (1.0, 1.0)
        if HAS_WEIGHT:
            if SHARED == 2:
                ww = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, UNALIGNED)
            else:
                ww = weights[i].load(L) if SHARED else weights[i]
            ws = weight_numbers(ww, offset, OFFSET, SHARED == 0, WIDE, BF16)
        along, level = summed(xs[i], dys[i], ws, mean, along, level, HAS_WEIGHT, CENTERED, WIDE, BF16)
    by_lane = sums_by_lane(along, LANES, ONE)
    level_by_lane = sums_by_lane(level, LANES, ONE)
    if UNALIGNED:
        more, more_level = edge_sums(ends, w_edge, own, mean, CENTERED, WIDE)
        by_lane += more
        level_by_lane += more_level
        kept = ends_kept(ends, WIDE)
    room = 0
    if SPLIT > 1:
        room = open_exchange(SPLIT * NUM_WARPS)
    tell(room, 0, by_lane, level_by_lane, told_along, told_level, CENTERED, SPLIT, ONE)
    slot = first * 0
    near = first * 0 + 1
    for turn in range(num_turns):
        async_copy.wait_group(SLOTS - 2)
        if SPLIT > 1:  # a loop that waits lies in between: what is counted along would take registers of every thread
            x_off = (turn + SLOTS) * x_step
            dy_off = (turn + SLOTS) * dy_step
            row = first + (turn + SLOTS) * step
        slope, shift = heard(room, turn, told_along, told_level, CENTERED, SPLIT)
        slope = slope_of(slope, shift, mean, CENTERED, WIDE)
        left = gl.where(turn + SLOTS < num_turns, width, 0)
        ask_for_row(x_places, dy_places, slot, x_at + x_off, dy_at + dy_off, c, left, CHUNKS, FULL, PIECE)
        ask_for_statistics(rstd_places, mean_places, slot, rstd_ptr + row, mean_ptr + row, left, CENTERED)
        if UNALIGNED:
            there = own & (turn + 2 < num_turns)
            x_next = numbers_at(x_at + x_off - (SLOTS - 2) * x_step, KIND) + off
            dy_next = numbers_at(dy_at + dy_off - (SLOTS - 2) * dy_step, KIND) + off
            new_ends = ends_at(x_next, dy_next, there)
        by_x = slope * inverse * rstd * rstd * rstd
        shift = shift * inverse * rstd
        rstd_next, mean_next = statistics(rstd_places, mean_places, near, CENTERED, ONE)
        along = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            ws = (1.0, 1.0)
            if HAS_WEIGHT:
                if SHARED == 2:
                    ww = weight_words(weight_at + i * BLOCK, c, lead, whole - i * BLOCK, WIDE, UNALIGNED)
                else:
                    ww = weights[i].load(L) if SHARED else weights[i]
                ws = weight_numbers(ww, offset, OFFSET, SHARED == 0, WIDE, BF16)
            result, more_dw, more_db = finished(
                xs[i], dys[i], ws, mean, rstd, by_x, shift, dw[NUM * i : NUM * i + NUM], db[NUM * i : NUM * i + NUM],
                xs[i], HAS_WEIGHT, CENTERED, WANT_DW, WANT_DB, WIDE, BF16, False,
            )  # fmt: skip
            dw = dw[: NUM * i] + more_dw + dw[NUM * i + NUM :]
            db = db[: NUM * i] + more_db + db[NUM * i + NUM :]
            if i >= FULL:
                gl.store(dx_at + dy_off + (i * PIECE + c), result, mask=access < width - i * PIECE)
            else:
                gl.store(dx_at + dy_off + (i * PIECE + c), result)
            xs = xs[:i] + (x_places[i].index(near).load(L),) + xs[i + 1 :]  # type: ignore[assignment]
            dys = dys[:i] + (dy_places[i].index(near).load(L),) + dys[i + 1 :]  # type: ignore[assignment]
            along, level = summed(xs[i], dys[i], ws, mean_next, along, level, HAS_WEIGHT, CENTERED, WIDE, BF16)
        by_lane = sums_by_lane(along, LANES, ONE)
        level_by_lane = sums_by_lane(level, LANES, ONE)
        if UNALIGNED:
            to = numbers_at(dx_at + dy_off, KIND) + off
            now = ends_again(kept, WIDE, BF16)
            dw_edge, db_edge = finish_edges(to, now, w_edge, own, mean, rstd, by_x, shift, dw_edge, db_edge, CENTERED)
            more, more_level = edge_sums(next_ends, w_edge, own, mean_next, CENTERED, WIDE)
            by_lane += more
            level_by_lane += more_level
            kept = ends_kept(next_ends, WIDE)
            next_ends = new_ends
        tell(room, turn + 1, by_lane, level_by_lane, told_along, told_level, CENTERED, SPLIT, ONE)
        if SPLIT == 1:
            x_off += x_step
            dy_off += dy_step
            row += step
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
    store_shares(to + lead + start * NUM, second, dw, db, whole, CHUNKS, BLOCK, WANT_DW, WANT_DB, WIDE, UNALIGNED)
    if UNALIGNED:
        if WANT_DW:
            gl.store(to + edge, dw_edge, mask=own)
        if WANT_DB:
            gl.store(to + second + edge, db_edge, mask=own)
