"""Dot interaction on the device: a sample's features are read once, multiplied by themselves, and half is kept.

Shapes: B samples, T sparse features and the dense one (F = T + 1), D columns. Pair (i, j), j < i, stands at
i(i-1)/2 + j after the dense vector.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def features(dense_ptr, sparse_ptr, sample, num, dim, left, FEATURES: tl.constexpr, DIM: tl.constexpr):
    """[FEATURES, DIM] of one sample, ``left`` columns of it: the dense vector, then the sparse ones."""
    f = tl.arange(0, FEATURES)[:, None]
    col = tl.arange(0, DIM)[None, :]
    at = tl.where(f == 0, dense_ptr + sample * dim, sparse_ptr + (sample * (num - 1) + f - 1) * dim)
    return at + col, (f < num) & (col < left)


@jit
def dot_interaction_forward(
    dense_ptr,  # [B, D]
    sparse_ptr,  # [B, T, D]
    out_ptr,  # [B, D + F(F-1)/2]
    num,
    dim,
    width,
    PRECISION: tl.constexpr,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Columns in pieces: float32 operands are split into parts that would not fit in registers whole."""
    sample = tl.program_id(0).to(tl.int64)
    z = tl.zeros([FEATURES, FEATURES], tl.float32)
    for start in tl.static_range(0, DIM, PIECE):
        at, inside = features(dense_ptr + start, sparse_ptr + start, sample, num, dim, dim - start, FEATURES, PIECE)
        x = tl.load(at, mask=inside, other=0.0)
        z = tl.dot(x, tl.trans(x), z, input_precision=PRECISION)
    i = tl.arange(0, FEATURES)[:, None]
    j = tl.arange(0, FEATURES)[None, :]
    to = out_ptr + sample * width
    tl.store(to + dim + i * (i - 1) // 2 + j, z.to(out_ptr.dtype.element_ty), mask=(j < i) & (i < num))
    col = tl.arange(0, DIM)
    tl.store(to + col, tl.load(dense_ptr + sample * dim + col, mask=col < dim, other=0.0), mask=col < dim)


@jit
def dot_interaction_backward(
    grad_ptr,  # [B, D + F(F-1)/2]
    dense_ptr,
    sparse_ptr,
    d_dense_ptr,
    d_sparse_ptr,
    num,
    dim,
    width,
    PRECISION: tl.constexpr,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
):
    """The gradient of the products as a symmetric matrix, times the features."""
    sample = tl.program_id(0).to(tl.int64)
    at, inside = features(dense_ptr, sparse_ptr, sample, num, dim, dim, FEATURES, DIM)
    x = tl.load(at, mask=inside, other=0.0)
    i = tl.arange(0, FEATURES)[:, None]
    j = tl.arange(0, FEATURES)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    row = grad_ptr + sample * width
    pairs = tl.load(row + dim + high * (high - 1) // 2 + low, mask=(high < num) & (i != j), other=0.0)
    dx = tl.dot(pairs.to(x.dtype), x, input_precision=PRECISION)
    col = tl.arange(0, DIM)[None, :]
    passed = tl.load(row + col, mask=col < dim, other=0.0).to(tl.float32)
    dx += tl.where(i == 0, passed, 0.0)
    to, _ = features(d_dense_ptr, d_sparse_ptr, sample, num, dim, dim, FEATURES, DIM)
    tl.store(to, dx.to(d_dense_ptr.dtype.element_ty), mask=inside)
