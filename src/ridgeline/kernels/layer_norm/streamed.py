"""LayerNorm's backward pass of 16-bit rows that start inside accesses on Hopper, in Gluon.

Shapes as in kernel.py. What waits, in shared memory and in registers, are two numbers a word; sums of columns are all
that is kept in float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.stream import FLAT, both_added, halves, halves_here, let_next_start, paired, words_of


@gluon.jit
def ask(at, place, access, left, I: gl.constexpr, CHUNKS: gl.constexpr, PIECE: gl.constexpr):
    """Asks for piece I of a row; where nothing is left, zeros come."""
    async_copy.async_copy_global_to_shared(place, at + I * PIECE, mask=access < left - I * PIECE)


@gluon.jit
def layer_norm_backward_words(
    dy_ptr,  # [R, C] of 16 bits, as x
    x_ptr,  # [R, C], rows x_stride apart
    weight_ptr,  # [C] of x's type
    mean_ptr,  # [R] fp32
    rstd_ptr,
    dx_ptr,
    shares_ptr,  # [2, P, C] fp32
    rows,
    cols,
    x_stride,
    HAS_WEIGHT: gl.constexpr,
    WANT_DW: gl.constexpr,
    WANT_DB: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A program takes every P-th row, P a multiple of eight: all of them start at the same place of an access, and
    weights and sums of columns stay in registers. The next SLOTS rows are on their way; ends of rows are apart."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    PIECE: gl.constexpr = BLOCK // 2
    x_places = ()
    dy_places = ()
    for _ in gl.static_range(CHUNKS):
        x_places = x_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
        dy_places = dy_places + (gl.allocate_shared_memory(gl.int32, [SLOTS, PIECE], FLAT),)  # type: ignore[assignment]
    first = gl.program_id(0)
    step = gl.num_programs(0)
    num_turns = (rows - first + step - 1) // step
    lead = ((8 - first.to(gl.int64) * cols % 8) % 8).to(gl.int32)
    whole = (cols - lead) // 8 * 8
    width = whole // 2
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * x_stride + lead) // 8 * 4 + c
    dy_at = dy_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // 8 * 4 + c
    dx_at = dx_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * cols + lead) // 8 * 4 + c
    x_step = step.to(gl.int64) * x_stride // 8 * 4
    dy_step = step.to(gl.int64) * cols // 8 * 4
    for turn in gl.static_range(SLOTS):
        left = gl.where(turn < num_turns, width, 0)
        for i in gl.static_range(CHUNKS):
            ask(x_at + turn * x_step, x_places[i].index(turn), access, left, i, CHUNKS, PIECE)
            ask(dy_at + turn * dy_step, dy_places[i].index(turn), access, left, i, CHUNKS, PIECE)
        async_copy.commit_group()
    E: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    k = gl.arange(0, 16, E)
    edge = gl.where(k < 8, k, lead + whole + k - 8)
    own = gl.where(k < 8, k < lead, edge < cols)
    x_edge = x_ptr + first.to(gl.int64) * x_stride + edge
    dy_edge = dy_ptr + first.to(gl.int64) * cols + edge
    dx_edge = dx_ptr + first.to(gl.int64) * cols + edge
    x_now = gl.load(x_edge, mask=own, other=0.0).to(gl.float32)
    dy_now = gl.load(dy_edge, mask=own, other=0.0).to(gl.float32)
    mean = gl.load(mean_ptr + first)
    rstd = gl.load(rstd_ptr + first)
    w_edge = gl.full([16], 1.0, gl.float32, E)
    if HAS_WEIGHT:
        w_edge = gl.load(weight_ptr + edge, mask=own, other=0.0).to(gl.float32)
    dw_edge = gl.zeros([16], gl.float32, E)
    db_edge = gl.zeros([16], gl.float32, E)
    weights = ()
    dw_low = ()
    dw_high = ()
    db_low = ()
    db_high = ()
    for i in gl.static_range(CHUNKS):
        if HAS_WEIGHT:
            weights = weights + (words_of(weight_ptr + lead + i * BLOCK, c, whole - i * BLOCK),)  # type: ignore[assignment]
        dw_low = dw_low + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        dw_high = dw_high + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        db_low = db_low + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
        db_high = db_high + (gl.zeros([PIECE], gl.float32, L),)  # type: ignore[assignment]
    inverse = 1.0 / cols
    slot = first * 0
    for turn in range(num_turns):
        following = gl.minimum(turn + 1, num_turns - 1)
        x_next = gl.load(x_edge + following * 2 * x_step, mask=own, other=0.0).to(gl.float32)
        dy_next = gl.load(dy_edge + following * 2 * dy_step, mask=own, other=0.0).to(gl.float32)
        mean_next = gl.load(mean_ptr + first + following * step)
        rstd_next = gl.load(rstd_ptr + first + following * step)
        async_copy.wait_group(SLOTS - 1)
        xs = ()
        dys = ()
        for i in gl.static_range(CHUNKS):
            xs = xs + (x_places[i].index(slot).load(L),)  # type: ignore[assignment]
            dys = dys + (dy_places[i].index(slot).load(L),)  # type: ignore[assignment]
        left = gl.where(turn + SLOTS < num_turns, width, 0)
        for i in gl.static_range(CHUNKS):
            ask(x_at + (turn + SLOTS) * x_step, x_places[i].index(slot), access, left, i, CHUNKS, PIECE)
            ask(dy_at + (turn + SLOTS) * dy_step, dy_places[i].index(slot), access, left, i, CHUNKS, PIECE)
        async_copy.commit_group()
        base = -mean * rstd
        along = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            n, m = halves(xs[i], BF16)
            g, h = halves(dys[i], BF16)  # zeros past the end: sums need no mask
            n = n * rstd + base
            m = m * rstd + base
            if WANT_DW:
                dw_low = dw_low[:i] + (dw_low[i] + g * n,) + dw_low[i + 1 :]  # type: ignore[assignment]
                dw_high = dw_high[:i] + (dw_high[i] + h * m,) + dw_high[i + 1 :]  # type: ignore[assignment]
            if WANT_DB:
                db_low = db_low[:i] + (db_low[i] + g,) + db_low[i + 1 :]  # type: ignore[assignment]
                db_high = db_high[:i] + (db_high[i] + h,) + db_high[i + 1 :]  # type: ignore[assignment]
            if HAS_WEIGHT:
                u, v = halves_here(weights[i], BF16)
                g *= u
                h *= v
            along += g * n + h * m
            level += g + h
        n_edge = gl.where(own, (x_now - mean) * rstd, 0.0)
        dw_edge += dy_now * n_edge
        db_edge += dy_now
        g_edge = dy_now * w_edge
        slope, shift = gl.reduce((along, level), 0, both_added)
        more_slope, more_shift = gl.reduce((g_edge * n_edge, g_edge), 0, both_added)
        slope = (slope + more_slope) * inverse
        shift = (shift + more_shift) * inverse
        by_x = slope * rstd * rstd
        offset = mean * by_x - shift * rstd
        for i in gl.static_range(CHUNKS):
            n, m = halves_here(xs[i], BF16)
            g, h = halves_here(dys[i], BF16)
            if HAS_WEIGHT:
                u, v = halves_here(weights[i], BF16)
                g *= u
                h *= v
            low = g * rstd + (offset - n * by_x)
            high = h * rstd + (offset - m * by_x)
            gl.store(dx_at + turn * dy_step + i * PIECE, paired(low, high, BF16), mask=access < width - i * PIECE)
        at_edge = (g_edge - n_edge * slope - shift) * rstd
        gl.store(dx_edge + turn * 2 * dy_step, at_edge.to(dx_ptr.dtype.element_ty), mask=own)
        x_now = x_next
        dy_now = dy_next
        mean = mean_next
        rstd = rstd_next
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)
    let_next_start(EARLY)
    to = shares_ptr + first.to(gl.int64) * cols
    second = step.to(gl.int64) * cols
    for i in gl.static_range(CHUNKS):
        at = to + lead + i * BLOCK + 2 * c
        there = 2 * c < whole - i * BLOCK
        if WANT_DW:
            gl.store(at, dw_low[i], mask=there)
            gl.store(at + 1, dw_high[i], mask=there)
        if WANT_DB:
            gl.store(at + second, db_low[i], mask=there)
            gl.store(at + second + 1, db_high[i], mask=there)
    if WANT_DW:
        gl.store(to + edge, dw_edge, mask=own)
    if WANT_DB:
        gl.store(to + second + edge, db_edge, mask=own)
