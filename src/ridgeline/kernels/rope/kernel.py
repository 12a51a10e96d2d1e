"""Rotary position embedding on the device: queries and keys of one token rotated by one program.

Shapes: B batches, S positions, H query heads, K key heads, D head dim, W = rotated dim / 2.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def rotate_heads(
    x_ptr,
    y_ptr,
    heads,
    x_head,
    y_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    half,
    TAIL: tl.constexpr,
    tail,
    INTERLEAVED: tl.constexpr,
):
    """All heads of one token: pairs rotated, what lies past the rotated dims copied."""
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    in_heads = head < heads
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        inside = in_heads & (d < 2 * half)
        both = tl.load(x_ptr + head * x_head + d, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [HEADS, HALF, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [HEADS, 2 * HALF])
        tl.store(y_ptr + head * y_head + d, turned.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        inside = in_heads & (i < half)
        a = tl.load(x_ptr + head * x_head + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + head * x_head + half + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + head * y_head + i, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + head * y_head + half + i, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)
    if TAIL > 0:
        t = tl.arange(0, TAIL)[None, :]
        inside = in_heads & (t < tail)
        rest = tl.load(x_ptr + head * x_head + 2 * half + t, mask=inside, other=0.0)
        tl.store(y_ptr + head * y_head + 2 * half + t, rest, mask=inside)


@jit
def rope_rotate(
    q_ptr,  # [B, S, H, D] in any order of its first three dims
    k_ptr,  # [B, S, K, D]
    cos_ptr,  # [B or 1, S, W or more]
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    seq,
    q_heads,
    k_heads,
    half,
    tail,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    qo_batch,
    qo_seq,
    qo_head,
    ko_batch,
    ko_seq,
    ko_head,
    cos_batch,
    cos_seq,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_K: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The gradient is the rotation by the opposite angle."""
    token = tl.program_id(0)
    b = (token // seq).to(tl.int64)
    s = (token % seq).to(tl.int64)
    i = tl.arange(0, HALF)[None, :]
    at = b * cos_batch + s * cos_seq + i
    cos = tl.load(cos_ptr + at, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=i < half, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    rotate_heads(
        q_ptr + b * q_batch + s * q_seq, q_out_ptr + b * qo_batch + s * qo_seq, q_heads, q_head, qo_head, cos, sin,
        Q_HEADS, HALF, half, TAIL, tail, INTERLEAVED,
    )  # fmt: skip
    if HAS_K:
        rotate_heads(
            k_ptr + b * k_batch + s * k_seq, k_out_ptr + b * ko_batch + s * ko_seq, k_heads, k_head, ko_head, cos, sin,
            K_HEADS, HALF, half, TAIL, tail, INTERLEAVED,
        )  # fmt: skip


@jit
def rope_pieces(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    seq,
    q_heads,
    k_heads,
    half,
    tail,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    qo_batch,
    qo_seq,
    qo_head,
    ko_batch,
    ko_seq,
    ko_head,
    cos_batch,
    cos_seq,
    BACKWARD: tl.constexpr,
    PIECES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The same by accesses: query and key heads one after the other in pieces of VECTOR, whatever their number and
    length, where a tile of powers of two would be more than half empty."""
    token = tl.program_id(0)
    b = (token // seq).to(tl.int64)
    s = (token % seq).to(tl.int64)
    piece = tl.arange(0, PIECES)[:, None]
    per_head = half // VECTOR
    head = piece // per_head
    i = (piece - head * per_head) * VECTOR + tl.arange(0, VECTOR)[None, :]
    key = head - q_heads
    there = head < q_heads + k_heads
    at = b * cos_batch + s * cos_seq + i
    cos = tl.load(cos_ptr + at, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=there, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    x = tl.where(
        key < 0, q_ptr + b * q_batch + s * q_seq + head * q_head, k_ptr + b * k_batch + s * k_seq + key * k_head
    )
    y = tl.where(
        key < 0, q_out_ptr + b * qo_batch + s * qo_seq + head * qo_head,
        k_out_ptr + b * ko_batch + s * ko_seq + key * ko_head,
    )  # fmt: skip
    first = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + half + i, mask=there, other=0.0).to(tl.float32)
    tl.store(y + i, (first * cos - second * sin).to(q_out_ptr.dtype.element_ty), mask=there)
    tl.store(y + half + i, (second * cos + first * sin).to(q_out_ptr.dtype.element_ty), mask=there)
