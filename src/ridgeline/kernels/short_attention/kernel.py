"""softmax(q kᵀ · scale + bias) v where all keys of a row fit into one tile.

Windows of images (Swin: 49 pixels, heads of 32) have thousands of small problems with a bias that repeats: by batched
products and a softmax in between they read and write their scores five times over. Here a program has one bias in
registers and goes through the batch elements that share it, all else is read and written once.

Shapes: q [B, H, N, D], k and v [B, H, M, D], rows dense and anywhere; bias [P, H, N, M], dense, that of batch element b
being b mod P; out [B, N, H, D], dense.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit

LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def short_attention_forward(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, num_batch, period, heads, n, m, d, scale, q_b, q_h, q_n, k_b, k_h, k_n,
    v_b, v_h, v_n,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tall = tl.cdiv(n, BM)
    row = tl.program_id(0) % tall * BM + tl.arange(0, BM)
    head = tl.program_id(0) // tall % heads
    phase = tl.program_id(0) // (tall * heads)
    key = tl.arange(0, BN)
    dim = tl.arange(0, BD)
    in_rows = (row < n)[:, None]
    in_keys = (key < m)[None, :]
    in_dims = dim < d
    bias_at = bias_ptr + (phase * heads + head) * n * m + row[:, None] * m + key[None, :]
    bias = tl.load(bias_at, mask=in_rows & in_keys, other=0.0).to(tl.float32) * LOG2_E
    bias = tl.where(in_keys, bias, float("-inf"))
    step = scale * LOG2_E
    for i in range(CHUNK):
        batch = (tl.program_id(1) * CHUNK + i) * period + phase
        live = batch < num_batch
        q_at = q_ptr + batch * q_b + head * q_h + row[:, None] * q_n + dim[None, :]
        k_at = k_ptr + batch * k_b + head * k_h + key[None, :] * k_n + dim[:, None]
        v_at = v_ptr + batch * v_b + head * v_h + key[:, None] * v_n + dim[None, :]
        q = tl.load(q_at, mask=in_rows & in_dims[None, :] & live, other=0.0)
        k = tl.load(k_at, mask=in_keys & in_dims[:, None] & live, other=0.0)
        v = tl.load(v_at, mask=(key < m)[:, None] & in_dims[None, :] & live, other=0.0)
        scores = tl.dot(q, k) * step + bias
        top = tl.max(scores, 1)
        weights = tl.exp2(scores - top[:, None])
        total = tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v) / total[:, None]
        out_at = out_ptr + ((batch * n + row[:, None]) * heads + head) * d + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=in_rows & in_dims[None, :] & live)
