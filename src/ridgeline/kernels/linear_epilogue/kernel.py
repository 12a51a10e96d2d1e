"""y = act(norm(x @ wᵀ + bias) + added) for many rows, the result written once.

A pointwise convolution of a network with batch norm moves more bytes than the tensor cores have work for, and what
follows it element by element moves them again: here it happens in registers, and several tiles per SM hide
each other's waiting. All of it is float32 until the result is rounded.

Shapes: x [M, K], w [N, K], added and out [M, N], rows at any distance; a number a column for bias and norm.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit
from ridgeline.kernels.gelu.kernel import gelu_of, inverse, power_of_two

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
SILU = tl.constexpr(2)
GELU = tl.constexpr(3)
GELU_TANH = tl.constexpr(4)
RELU6 = tl.constexpr(5)
HARDSWISH = tl.constexpr(6)


@jit
def activated(y, ACT: tl.constexpr):
    """The activation; NaN stays one."""
    if ACT == RELU:
        y = tl.where(y < 0.0, 0.0, y)
    elif ACT == SILU:
        y = y * inverse(1.0 + power_of_two(-1.4426950408889634 * y))
    elif ACT == GELU:
        y, _ = gelu_of(y, 0)
    elif ACT == GELU_TANH:
        y, _ = gelu_of(y, 1)
    elif ACT == RELU6:
        y = tl.where(y < 0.0, 0.0, tl.where(y > 6.0, 6.0, y))
    elif ACT == HARDSWISH:
        share = (y + 3.0) * 0.16666666666666666
        y = y * tl.where(share < 0.0, 0.0, tl.where(share > 1.0, 1.0, share))
    return y


@jit
def columns(
    bias_ptr,
    mean_ptr,
    var_ptr,
    gamma_ptr,
    beta_ptr,
    col,
    inside,
    eps,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
):
    """What a column is multiplied with and what is added to it."""
    scale = tl.full(col.shape, 1.0, tl.float32)
    shift = tl.zeros(col.shape, tl.float32)
    if BIAS:
        shift += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.load(var_ptr + col, mask=inside, other=1.0).to(tl.float32) + eps)
        if GAMMA:
            scale *= tl.load(gamma_ptr + col, mask=inside, other=0.0).to(tl.float32)
        shift = (shift - tl.load(mean_ptr + col, mask=inside, other=0.0).to(tl.float32)) * scale
        if BETA:
            shift += tl.load(beta_ptr + col, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


@jit
def few_columns(
    bias_ptr,
    mean_ptr,
    var_ptr,
    gamma_ptr,
    beta_ptr,
    first,
    n,
    eps,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
):
    """The same for the columns of a tile, each worked out by one thread and handed to the others.

    Left to itself the compiler lets every thread read all it needs, and a hundred registers hold what is read: a sum
    over two rows, of which one is zero, keeps it from that.
    """
    col = first + tl.arange(0, BN)[None, :] + tl.zeros([2, BN], tl.int32)
    chosen = tl.arange(0, 2)[:, None] == tl.zeros([2, BN], tl.int32)
    scale, shift = columns(bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, col, col < n, eps, BIAS, NORM, GAMMA, BETA)
    return tl.sum(tl.where(chosen, scale, 0.0), 0), tl.sum(tl.where(chosen, shift, 0.0), 0)


@jit
def dense_forward(
    x_ptr, w_ptr, out_ptr, added_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, m, n, k, x_step, w_step,
    added_step, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, ADDED: tl.constexpr, LAST: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(n, BN)
    tall = tl.cdiv(m, BM)
    group = tl.program_id(0) // (GROUP * wide)
    first = group * GROUP
    size = tl.minimum(tall - first, GROUP)
    tile_m = first + (tl.program_id(0) % (GROUP * wide)) % size
    tile_n = (tl.program_id(0) % (GROUP * wide)) // size
    row = tile_m * BM + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    term = tl.arange(0, BK)
    in_rows = row < m
    in_cols = col < n
    real = in_rows[:, None] & in_cols[None, :]
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_step + term[None, :]
    w_at = w_ptr + col.to(tl.int64)[None, :] * w_step + term[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, k, BK):
        if EVEN:
            x = tl.load(x_at, mask=in_rows[:, None], other=0.0)
            w = tl.load(w_at, mask=in_cols[None, :], other=0.0)
        else:
            inside = begin + term < k
            x = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at, mask=in_cols[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
        x_at += BK
        w_at += BK
    scale, shift = few_columns(
        bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, tile_n * BN, n, eps, BN, BIAS, NORM, GAMMA, BETA
    )
    y = acc * scale[None, :] + shift[None, :]
    if ADDED:
        added = tl.load(added_ptr + row.to(tl.int64)[:, None] * added_step + col[None, :], mask=real, other=0.0)
    if ADDED and not LAST:
        y += added.to(tl.float32)
    y = activated(y, ACT)
    if ADDED and LAST:
        y += added.to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n + col[None, :], y.to(out_ptr.dtype.element_ty), mask=real)


@jit
def dense_finish(
    y_ptr, out_ptr, added_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, m, n, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GAMMA: tl.constexpr,
    BETA: tl.constexpr, ADDED: tl.constexpr, LAST: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The same for a product that was computed before: one pass over it, in place if ``out`` is ``y``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    real = (row < m)[:, None] & (col < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + col[None, :]
    y = tl.load(y_ptr + at, mask=real, other=0.0).to(tl.float32)
    if ADDED:
        added = tl.load(added_ptr + at, mask=real, other=0.0).to(tl.float32)
    scale, shift = columns(bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, col, col < n, eps, BIAS, NORM, GAMMA, BETA)
    y = y * scale[None, :] + shift[None, :]
    if ADDED and not LAST:
        y += added
    y = activated(y, ACT)
    if ADDED and LAST:
        y += added
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=real)
