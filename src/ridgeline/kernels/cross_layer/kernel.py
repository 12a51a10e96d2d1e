"""The cross layer on the device: y = x0 · (a Wᵀ + b) + x as the epilogue of a product, or as one pass after it.

Shapes: M rows, N columns of the result, in rows of P where accesses need it, K the inner dim, R a low rank, G groups
of rows. A product of a few terms is a tile's own: what it reads is asked for at once, with all that its end reads.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def cross_product(
    a_ptr,  # [M, K]
    w_ptr,  # [N, K], or [K, N] where TURNED
    x0_ptr,  # [M, N]
    x_ptr,  # [M, N]
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    u_ptr,  # [M, N] the product itself, which the backward pass needs
    m,
    n,
    k,
    TURNED: tl.constexpr,
    CROSS: tl.constexpr,  # x0 · (product + bias) + x; else product + x
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,  # x0 and x are asked for before the product begins
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of eight rows of tiles at a time, so that what they read stays in the L2."""
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    group = tl.program_id(0) // (8 * tiles_n)
    size = tl.minimum(tiles_m - group * 8, 8)
    tile_m = group * 8 + (tl.program_id(0) % (8 * tiles_n)) % size
    tile_n = (tl.program_id(0) % (8 * tiles_n)) // size
    row = tile_m * BM + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a_ptr + (row % m).to(tl.int64)[:, None] * k + inner[None, :]
    if TURNED:
        w_at = w_ptr + inner.to(tl.int64)[:, None] * n + (col % n)[None, :]
    else:
        w_at = w_ptr + (col % n).to(tl.int64)[None, :] * k + inner[:, None]
    if EARLY:
        at = row.to(tl.int64)[:, None] * n + col[None, :]
        inside = (row < m)[:, None] & (col < n)[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        if CROSS:
            x0 = tl.load(x0_ptr + at, mask=inside, other=0.0)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, k, BK, num_stages=STAGES):
        if EVEN:
            a = tl.load(a_at)
            w = tl.load(w_at)
        else:
            a = tl.load(a_at, mask=(start + inner < k)[None, :], other=0.0)
            w = tl.load(w_at, mask=(start + inner < k)[:, None], other=0.0)
        acc = tl.dot(a, w, acc)
        a_at += BK
        if TURNED:
            w_at += BK * n
        else:
            w_at += BK
    at = row.to(tl.int64)[:, None] * n + col[None, :]
    inside = (row < m)[:, None] & (col < n)[None, :]
    if CROSS:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
        u = acc.to(u_ptr.dtype.element_ty)
        if SAVE:
            tl.store(u_ptr + at, u, mask=inside)
        if EARLY:
            acc = u.to(tl.float32) * x0.to(tl.float32)
        else:
            acc = u.to(tl.float32) * tl.load(x0_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        acc += x.to(tl.float32)
    else:
        acc += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def cross_pointwise(u_ptr, x0_ptr, x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """y = x0 · u + x, where the product came from elsewhere."""
    block = tl.program_id(0).to(tl.int64)
    at = tl.multiple_of(block * BLOCK, 16) + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= size:
        y = tl.load(x0_ptr + at).to(tl.float32) * tl.load(u_ptr + at).to(tl.float32) + tl.load(x_ptr + at).to(
            tl.float32
        )
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))
    else:
        inside = at < size
        y = tl.load(x0_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y *= tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def tile_of(across, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of a program's tile."""
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]


@jit
def cross_widen(
    x_ptr,  # [M, N]
    more_ptr,  # [M] what column N has, where END is 2
    out_ptr,  # [rows, P]
    m,
    n,
    rows,
    p,
    across,
    END: tl.constexpr,  # 0: zeros behind each row, 1: a one first, 2: more
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows that start in whole accesses: zeros behind each, and in further rows; or rows that are cut."""
    row, col = tile_of(across, ROWS, BLOCK)
    x = tl.load(x_ptr + row * n + col, mask=(row < m) & (col < n), other=0.0)
    if END == 1:
        x = tl.where((row < m) & (col == n), 1.0, x)
    if END == 2:
        x = tl.where(col == n, tl.load(more_ptr + row, mask=row < m, other=0.0), x)
    tl.store(out_ptr + row * p + col, x, mask=(row < rows) & (col < p))


@jit
def cross_narrow(
    t_ptr,  # [M, P]
    x0_ptr,  # [M, N]
    x_ptr,  # [M, N]
    y_ptr,  # [M, N]
    u_ptr,  # [M, N] the product itself, in rows of its own length
    m,
    n,
    p,
    across,
    CROSS: tl.constexpr,  # x0 · t + x; else t + x
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What follows a product whose rows are longer than those of everything else."""
    row, col = tile_of(across, ROWS, BLOCK)
    at = row * n + col
    inside = (row < m) & (col < n)
    t = tl.load(t_ptr + row * p + col, mask=inside, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = t.to(tl.float32)
    if CROSS:
        y *= tl.load(x0_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (y + x).to(y_ptr.dtype.element_ty), mask=inside)
    if SAVE:
        tl.store(u_ptr + at, t, mask=inside)


@jit
def cross_backward(
    dy_ptr,  # [M, N]
    u_ptr,  # [M, N]
    x0_ptr,  # [M, N]
    du_ptr,  # [M, P] dy · x0, and zeros behind it
    dx0_ptr,  # [M, N] dy · u
    share_ptr,  # [G, N] fp32: each group's share of the bias's gradient
    m,
    n,
    p,
    WANT_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes some columns of every G-th tile of rows, and keeps their sum."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(m, ROWS), tl.num_programs(1), num_stages=1):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * n + col
        inside = (row < m) & (col < n)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x0 = tl.load(x0_ptr + at, mask=inside, other=0.0).to(tl.float32)
        du = dy * x0
        if WANT_BIAS:
            acc += du
        tl.store(du_ptr + row.to(tl.int64) * p + col, du.to(du_ptr.dtype.element_ty), mask=(row < m) & (col < p))
        tl.store(dx0_ptr + at, (dy * u).to(dx0_ptr.dtype.element_ty), mask=inside)
    if WANT_BIAS:
        out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(share_ptr + tl.program_id(1).to(tl.int64) * n + out, tl.sum(acc, axis=0), mask=out < n)


@jit
def cross_again(
    dy_ptr,  # [M, N]
    x0_ptr,  # [M, N]
    inner_ptr,  # [M, R]
    weight_ptr,  # [N, R]
    bias_ptr,  # [N]
    du_ptr,  # [M, N] dy · x0
    dx0_ptr,  # [M, N] dy · (inner weightᵀ + bias), whose factor is computed again
    share_ptr,  # [G, N] fp32: each tile's share of the bias's gradient
    m,
    n,
    across,  # tiles side by side
    HAS_BIAS: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The pointwise part of the low-rank layer's gradients, a tile a program: a short product instead of a read."""
    group = (tl.program_id(0) // across).to(tl.int64)
    first = group * BM
    col = tl.program_id(0) % across * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    there = first + row < m
    rank = tl.arange(0, RANK)
    at = row[:, None] * n + col[None, :]
    inside = there[:, None] & (col < n)[None, :]
    inner_at = inner_ptr + first * RANK + (row[:, None] * RANK + rank[None, :])
    inner = tl.load(inner_at, mask=there[:, None], other=0.0)
    weight = tl.load(weight_ptr + col[None, :] * RANK + rank[:, None], mask=(col < n)[None, :], other=0.0)
    dy = tl.load(dy_ptr + first * n + at, mask=inside, other=0.0).to(tl.float32)
    x0 = tl.load(x0_ptr + first * n + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.dot(inner, weight)
    if HAS_BIAS:
        u += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    du = dy * x0
    tl.store(du_ptr + first * n + at, du.to(du_ptr.dtype.element_ty), mask=inside)
    dx0 = dy * u.to(dy_ptr.dtype.element_ty).to(tl.float32)
    tl.store(dx0_ptr + first * n + at, dx0.to(dx0_ptr.dtype.element_ty), mask=inside)
    if WANT_BIAS:
        tl.store(share_ptr + group * n + col, tl.sum(du, axis=0), mask=col < n)


@jit
def cross_end(
    a_ptr,  # [M, K]
    w_ptr,  # [N, K], or [K, N] where TURNED
    x0_ptr,  # [M, N]
    x_ptr,  # [M, N]
    bias_ptr,  # [N]
    y_ptr,  # [M, N]
    u_ptr,  # [M, N] the product itself, where the backward pass reads it
    m,
    n,
    k,
    across,  # tiles side by side
    TURNED: tl.constexpr,
    CROSS: tl.constexpr,  # x0 · (product + bias) + x; else product + x
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,  # there are TERMS terms
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """A product of a few terms, a tile a program: everything that it reads is asked for at once."""
    first = (tl.program_id(0) // across).to(tl.int64) * BM
    col = tl.program_id(0) % across * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    there = first + row < m
    term = tl.arange(0, TERMS)
    known = term < (TERMS if EXACT else k)
    at = row[:, None] * n + col[None, :]
    inside = there[:, None] & (col < n)[None, :]
    a_at = a_ptr + first * k + (row[:, None] * k + term[None, :])
    a = tl.load(a_at, mask=there[:, None] & known[None, :], other=0.0)
    if TURNED:
        w_at = w_ptr + term[:, None] * n + col[None, :]
    else:
        w_at = w_ptr + col[None, :] * k + term[:, None]
    w = tl.load(w_at, mask=known[:, None] & (col < n)[None, :], other=0.0)
    x = tl.load(x_ptr + first * n + at, mask=inside, other=0.0).to(tl.float32)
    if CROSS:
        x0 = tl.load(x0_ptr + first * n + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.dot(a, w)
        if HAS_BIAS:
            u += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
        u = u.to(y_ptr.dtype.element_ty)
        if SAVE:
            tl.store(u_ptr + first * n + at, u, mask=inside)
        y = u.to(tl.float32) * x0 + x
    else:
        y = tl.dot(a, w) + x
    tl.store(y_ptr + first * n + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def cross_low_rank_weights(
    du_ptr,  # [M, N]
    x_ptr,  # [M, N]
    inner_ptr,  # [M, R]
    d_inner_ptr,  # [M, R]
    part_ptr,  # [2, G, N·R] fp32: each group of rows' share of duᵀ inner [N, R] and of d_innerᵀ x [R, N]
    m,
    n,
    stretch,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of both weights of the low-rank layer: some columns of a group of rows, each read once."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    rank = tl.arange(0, RANK)
    first = tl.program_id(1) * stretch
    last = tl.minimum(first + stretch, m)
    known = (col < n)[None, :]
    by_weight = tl.zeros([BN, RANK], tl.float32)
    by_down = tl.zeros([BN, RANK], tl.float32)
    for start in tl.range(first, last, BK, num_stages=STAGES):
        row = start + tl.arange(0, BK)
        there = (row < last)[:, None]
        at = row.to(tl.int64)[:, None] * n + col[None, :]
        short = row.to(tl.int64)[:, None] * RANK + rank[None, :]
        du = tl.load(du_ptr + at, mask=there & known, other=0.0)
        inner = tl.load(inner_ptr + short, mask=there, other=0.0)
        by_weight = tl.dot(tl.trans(du), inner, by_weight)
        x = tl.load(x_ptr + at, mask=there & known, other=0.0)
        d_inner = tl.load(d_inner_ptr + short, mask=there, other=0.0)
        by_down = tl.dot(tl.trans(x), d_inner, by_down)
    size = (n * RANK).to(tl.int64)
    to = part_ptr + tl.program_id(1) * size
    inside = (col < n)[:, None]
    tl.store(to + col[:, None] * RANK + rank[None, :], by_weight, mask=inside)
    to += tl.num_programs(1) * size
    tl.store(to + rank[:, None] * n + col[None, :], tl.trans(by_down), mask=known)
