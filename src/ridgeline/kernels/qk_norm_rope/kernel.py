"""Head-wise RMSNorm and rotary embedding in one pass over queries and keys, forward and backward.

Shapes: B batches, S positions, H query heads, K key heads, D head dim (a power of two), W = D / 2, P programs.
y = rotate(x · rstd · weight): the gradient is rotated back first, then it is that of the norm. Heads lie one after the
other, token by token, and a tile is ROWS of them, whatever tokens they belong to: eight key heads fill it as thirty-two
query heads do.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def places(tile, tokens, seq, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Heads of a tile one after the other, token by token: which there are, and their tokens, batches and positions."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // HEADS
    b = token // seq
    head, s = (row - token * HEADS).to(tl.int64), (token - b * seq).to(tl.int64)
    return row, row < tokens * HEADS, token, head, b.to(tl.int64), s


@jit
def halves(pointer, i, inside, HALF: tl.constexpr):
    """Both halves of heads."""
    low = tl.load(pointer + i, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(pointer + HALF + i, mask=inside, other=0.0).to(tl.float32)


@jit
def norm_rotate_rows(
    x_ptr, y_ptr, rstd_ptr, w_ptr, cos_ptr, sin_ptr, tile, tokens, seq, all_heads, x_batch, x_seq, x_head, cos_batch,
    cos_seq, eps, offset, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One tile of heads, each with the angles of its own position."""
    i = tl.arange(0, HALF)[None, :] + tl.zeros([ROWS, HALF], tl.int32)
    row, inside, token, head, batch, s = places(tile, tokens, seq, HEADS, ROWS)
    a, b = halves(x_ptr + batch * x_batch + s * x_seq + head * x_head, i, inside, HALF)
    angle = batch * cos_batch + s * cos_seq + i
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    w_low, w_high = halves(w_ptr, i, True, HALF)
    rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1, keep_dims=True) / (2 * HALF) + eps)
    if SAVE:
        tl.store(rstd_ptr + token.to(tl.int64) * all_heads + head, rstd, mask=inside)
    a = a * rstd * (w_low + offset)
    b = b * rstd * (w_high + offset)
    to = y_ptr + row.to(tl.int64) * (2 * HALF) + i
    tl.store(to, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def qk_norm_rope_forward(
    q_ptr,  # [B, S, H, D] in any order of its first three dims
    k_ptr,  # [B, S, K, D]
    qw_ptr,  # [D]
    kw_ptr,  # [D]
    cos_ptr,  # [B or 1, S, W or more]
    sin_ptr,
    q_out_ptr,  # [B, S, H, D]
    k_out_ptr,  # [B, S, K, D]
    rstd_ptr,  # [B, S, H + K] fp32
    tokens,
    seq,
    q_heads,
    k_heads,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    cos_batch,
    cos_seq,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    SAVE: tl.constexpr,
):
    """A program takes ROWS heads, of queries or of keys, whatever tokens they belong to."""
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(tokens * Q_HEADS, ROWS)
    if tile < q_tiles:
        norm_rotate_rows(
            q_ptr, q_out_ptr, rstd_ptr, qw_ptr, cos_ptr, sin_ptr, tile, tokens, seq, q_heads + k_heads, q_batch, q_seq,
            q_head, cos_batch, cos_seq, eps, offset, Q_HEADS, HALF, ROWS, SAVE,
        )  # fmt: skip
    else:
        norm_rotate_rows(
            k_ptr, k_out_ptr, rstd_ptr + q_heads, kw_ptr, cos_ptr, sin_ptr, tile - q_tiles, tokens, seq,
            q_heads + k_heads, k_batch, k_seq, k_head, cos_batch, cos_seq, eps, offset, K_HEADS, HALF, ROWS, SAVE,
        )  # fmt: skip


@jit
def rows_gradient(
    dy_ptr, x_ptr, dx_ptr, rstd_ptr, w_ptr, cos_ptr, sin_ptr, share_ptr, tokens, seq, all_heads, dy_batch, dy_seq,
    dy_head, x_batch, x_seq, x_head, cos_batch, cos_seq, offset, HEADS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dx of every P-th tile of heads, and what they add to the weight's gradient."""
    i = tl.arange(0, HALF)[None, :] + tl.zeros([ROWS, HALF], tl.int32)
    w_low, w_high = halves(w_ptr, i, True, HALF)
    w_low += offset
    w_high += offset
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens * HEADS, ROWS), tl.num_programs(0)):
        row, inside, token, head, batch, s = places(tile, tokens, seq, HEADS, ROWS)
        a, b = halves(x_ptr + batch * x_batch + s * x_seq + head * x_head, i, inside, HALF)
        da, db = halves(dy_ptr + batch * dy_batch + s * dy_seq + head * dy_head, i, inside, HALF)
        angle = batch * cos_batch + s * cos_seq + i
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + token.to(tl.int64) * all_heads + head, mask=inside, other=0.0)
        a *= rstd
        b *= rstd
        ga = da * cos + db * sin
        gb = db * cos - da * sin
        low += ga * a
        high += gb * b
        ga *= w_low
        gb *= w_high
        mean = tl.sum(ga * a + gb * b, axis=1, keep_dims=True) / (2 * HALF)
        to = dx_ptr + row.to(tl.int64) * (2 * HALF) + i
        tl.store(to, ((ga - a * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(to + HALF, ((gb - b * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    to = share_ptr + tl.program_id(0).to(tl.int64) * 2 * HALF + tl.arange(0, HALF)
    tl.store(to, tl.sum(low, axis=0))
    tl.store(to + HALF, tl.sum(high, axis=0))


@jit
def qk_norm_rope_backward(
    dq_ptr,  # gradients of the outputs, in any order of their first three dims
    dk_ptr,
    q_ptr,
    k_ptr,
    qw_ptr,
    kw_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    q_out_ptr,  # [B, S, H, D] gradient of q
    k_out_ptr,  # [B, S, K, D] gradient of k
    share_ptr,  # [2, P, D] fp32: each program's share of the weights' gradients
    tokens,
    seq,
    q_heads,
    k_heads,
    dq_batch,
    dq_seq,
    dq_head,
    dk_batch,
    dk_seq,
    dk_head,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    cos_batch,
    cos_seq,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program takes every P-th tile of ROWS heads of queries, then of keys."""
    rows_gradient(
        dq_ptr, q_ptr, q_out_ptr, rstd_ptr, qw_ptr, cos_ptr, sin_ptr, share_ptr, tokens, seq, q_heads + k_heads,
        dq_batch, dq_seq, dq_head, q_batch, q_seq, q_head, cos_batch, cos_seq, offset, Q_HEADS, HALF, ROWS,
    )  # fmt: skip
    rows_gradient(
        dk_ptr, k_ptr, k_out_ptr, rstd_ptr + q_heads, kw_ptr, cos_ptr, sin_ptr,
        share_ptr + tl.num_programs(0).to(tl.int64) * 2 * HALF, tokens, seq, q_heads + k_heads, dk_batch, dk_seq,
        dk_head, k_batch, k_seq, k_head, cos_batch, cos_seq, offset, K_HEADS, HALF, ROWS,
    )  # fmt: skip
