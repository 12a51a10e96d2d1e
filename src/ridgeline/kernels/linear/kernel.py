"""A few rows times a large matrix: the weight is read once, as fast as memory gives it.

Shapes: M rows (at most 16), K their length, N outputs. y_MN = epilogue(x_MK @ w_NK.T). A gated weight is [2N, K], gate
rows first. RMSNorm of the rows costs no pass of its own: the products are of x · norm weight, the squares of x are
summed beside them, and the sum is scaled at the end, since the row's scale is the same for all of K.

``linear_row`` multiplies in float32 on the ordinary units; each thread holds 16 bytes of several rows of the weight,
the next while it multiplies these. ``linear_tile`` gives the weight to the tensor cores as their tall side, the rows
of x being the short one. Where outputs are too few to fill the device, K is shared out and ``linear_join`` adds the
shares in a fixed order.

A ``DEPENDENT`` row kernel starts while the one before it is still running (programmatic dependent launch): it fetches
weights at once, and waits before it touches anything else. Tiles only get
ready to run; gated ones that did so stood in each other's way (60 → 79 µs).
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.function import jit


@jit
def activated(x, ACT: tl.constexpr):
    """silu, gelu (tanh form), gelu, relu by number; 0 leaves it."""
    if ACT == 1:
        x = x / (1.0 + tl.exp(-x))
    elif ACT == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACT == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 4:
        x = tl.where(x < 0.0, 0.0, x)
    return x


@jit
def _folded(product, BN: tl.constexpr, BK: tl.constexpr, V: tl.constexpr):
    """Sums of V neighbors, all in one thread."""
    return tl.sum(tl.reshape(product, [BN, BK // V, V]), 2)


@jit
def row_sums(
    x_ptr, at, above, norm_ptr, col, k, x_stride, offset,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Partial sums of M rows with the weights ``at`` (and with the up weights ``above``), and squares of the rows.

    Software-pipelined: the weights of the next BK columns are loaded before these are multiplied.
    """
    w = _weights(at, (col < k)[None, :], EVEN)
    u = w
    if GATED:
        u = _weights(above, (col < k)[None, :], EVEN)
    if DEPENDENT:
        gdc_wait()
    sums = ()
    ups = ()
    squares = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BN, BK // V], tl.float32),)
        ups = ups + (tl.zeros([BN, BK // V], tl.float32),)
        squares = squares + (tl.zeros([BK // V], tl.float32),)
    for first in range(0, k, BK):
        inside = first + col < k
        g = tl.zeros([BK], tl.float32)
        if NORM:
            g = _vector(norm_ptr + first + col, inside, EVEN) + offset
        rows = ()  # asked for before the next weights: answers come in order
        for m in tl.static_range(M):
            rows = rows + (_vector(x_ptr + m * x_stride + first + col, inside, EVEN),)
        after = (first + BK + col < k)[None, :]
        w_next = _weights(at + first + BK, after, False)
        u_next = w_next
        if GATED:
            u_next = _weights(above + first + BK, after, False)
        new_sums = ()
        new_ups = ()
        new_squares = ()
        for m in tl.static_range(M):
            x: tl.tensor = rows[m]
            if NORM:
                new_squares = new_squares + (squares[m] + tl.sum(tl.reshape(x * x, [BK // V, V]), 1),)
                x *= g
            else:
                new_squares = new_squares + (squares[m],)
            new_sums = new_sums + (sums[m] + _folded(w.to(tl.float32) * x[None, :], BN, BK, V),)
            if GATED:
                new_ups = new_ups + (ups[m] + _folded(u.to(tl.float32) * x[None, :], BN, BK, V),)
            else:
                new_ups = new_ups + (ups[m],)
        sums = new_sums
        ups = new_ups
        squares = new_squares
        w = w_next
        u = u_next
    return sums, ups, squares


@jit
def linear_row(
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    bias_ptr,  # [N or 2N]
    norm_ptr,  # [K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    k,
    n,
    x_stride,
    w_stride,
    residual_stride,
    eps,
    offset,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    DEPENDENT: tl.constexpr,  # 0 no, 1 lets its successor start at once, 2 when its weights are in
):
    """BN outputs of M rows; K in steps of BK, the next step's weights on their way while this one is multiplied."""
    if DEPENDENT == 1:
        gdc_launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    col = tl.arange(0, BK)
    at = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * w_stride + col[None, :]
    above = at + n.to(tl.int64) * w_stride
    sums, ups, squares = row_sums(x_ptr, at, above, norm_ptr, col, k, x_stride, offset,
                                  M, BN, BK, V, EVEN, NORM, GATED, DEPENDENT)  # fmt: skip
    if DEPENDENT == 2:
        gdc_launch_dependents()
    for m in tl.static_range(M):
        y = tl.sum(sums[m], 1)
        z = tl.sum(ups[m], 1)
        if NORM:
            scale = tl.rsqrt(tl.sum(squares[m], 0) / k + eps)
            y *= scale
            z *= scale
        _finish(y, z, bias_ptr, residual_ptr + m * residual_stride + row, out_ptr + m * n + row, row, n,
                BIAS, RESIDUAL, GATED, ACT)  # fmt: skip


@jit
def _weights(at, inside, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return w


@jit
def _vector(at, inside, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside, other=0.0)
    return x.to(tl.float32)


@jit
def _finish(
    y, z, bias_ptr, residual_at, out_at, row, n,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Bias, activation, gate and residual of outputs ``row``, and out with them."""
    real = row < n
    if BIAS:
        y += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
        if GATED:
            z += tl.load(bias_ptr + n + row, mask=real, other=0.0).to(tl.float32)
    y = activated(y, ACT)
    if GATED:
        y *= z
    if RESIDUAL:
        y += tl.load(residual_at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_at, y.to(out_at.dtype.element_ty), mask=real)


@jit
def normed_columns(
    x, norm_at, inside, offset, squares, scale,
    EVEN: tl.constexpr, NORM: tl.constexpr, FIRST_SCALED: tl.constexpr,
):  # fmt: skip
    """Columns of x times the norm's weight; adds their squares, unless the rows are scaled already."""
    if NORM:
        wide = x.to(tl.float32)
        if FIRST_SCALED:
            wide *= scale[None, :]
        else:
            squares += tl.sum(wide * wide, 0)
        g = _vector(norm_at, inside, EVEN) + offset
        x = (wide * g[:, None]).to(x.dtype)
    return x, squares


@jit
def store_tile(
    acc, up, squares, scale, bias_ptr, residual_ptr, out_ptr, squares_ptr, row, mine, real, m, k, n,
    residual_stride, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    WHOLE: tl.constexpr, FIRST_SCALED: tl.constexpr,
):  # fmt: skip
    """The epilogue and the result of a tile over all of K; otherwise its partial sums."""
    if WHOLE:
        if NORM and not FIRST_SCALED:
            scale = tl.rsqrt(squares / k + eps)
            acc *= scale[None, :]
            up *= scale[None, :]
        place = mine[None, :].to(tl.int64) * n + row[:, None]
        near = residual_ptr + mine[None, :] * residual_stride + row[:, None]
        _finish_tile(acc, up, bias_ptr, near, out_ptr + place, row, n, real, BIAS, RESIDUAL, GATED, ACT)
    else:
        wide_n = n
        if GATED:
            wide_n = 2 * n
        place = (tl.program_id(1) * m + mine)[None, :].to(tl.int64) * wide_n + row[:, None]
        tl.store(out_ptr + place, acc, mask=real)
        if GATED:
            tl.store(out_ptr + n + place, up, mask=real)
        if NORM and not FIRST_SCALED:
            if tl.program_id(0) == 0:
                tl.store(squares_ptr + tl.program_id(1) * m + mine, squares, mask=mine < m)


@jit
def linear_tile(
    x_ptr,  # [M, K]
    w_ptr,  # [N or 2N, K]
    bias_ptr,  # [N or 2N]
    norm_ptr,  # [K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N], or fp32 [shares, M, N or 2N]
    squares_ptr,  # fp32 [shares, M]
    m,
    k,
    n,
    x_stride,
    w_stride,
    residual_stride,
    share,  # of K, a multiple of BK
    eps,
    offset,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    WHOLE: tl.constexpr,
    FIRST_SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BN outputs of up to MP rows over one share of K; the answer where the share is all of K, else a partial sum."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.arange(0, MP)
    col = tl.arange(0, BK)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, k)
    at = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * w_stride + col[None, :]
    above = at + n.to(tl.int64) * w_stride
    x_at = x_ptr + mine[None, :] * x_stride + col[:, None]
    scale = tl.full([MP], 1.0, tl.float32)
    if FIRST_SCALED:
        scale = _scales(x_ptr, x_stride, m, k, eps, MP, BK)
    acc = tl.zeros([BN, MP], tl.float32)
    up = tl.zeros([BN, MP], tl.float32)
    squares = tl.zeros([MP], tl.float32)
    for first in range(start, end, BK):
        inside = first + col < end
        w = _weights(at + first, inside[None, :], EVEN)
        if EVEN:
            x = tl.load(x_at + first, mask=(mine < m)[None, :], other=0.0)
        else:
            x = tl.load(x_at + first, mask=inside[:, None] & (mine < m)[None, :], other=0.0)
        x, squares = normed_columns(x, norm_ptr + first + col, inside, offset, squares, scale, EVEN, NORM, FIRST_SCALED)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            u = _weights(above + first, inside[None, :], EVEN)
            up = tl.dot(u, x, up, input_precision="ieee")
    real = (row < n)[:, None] & (mine < m)[None, :]
    store_tile(acc, up, squares, scale, bias_ptr, residual_ptr, out_ptr, squares_ptr, row, mine, real, m, k, n,
               residual_stride, eps, NORM, BIAS, RESIDUAL, GATED, ACT, WHOLE, FIRST_SCALED)  # fmt: skip


@jit
def _scales(x_ptr, x_stride, m, k, eps, MP: tl.constexpr, BK: tl.constexpr):
    """1 / root mean square of every row, before the products: float16 would not hold products that are not scaled."""
    mine = tl.arange(0, MP)
    col = tl.arange(0, BK)
    x_at = x_ptr + mine[:, None] * x_stride + col[None, :]
    squares = tl.zeros([MP], tl.float32)
    for first in tl.range(0, k, BK, num_stages=1):
        x = tl.load(x_at + first, mask=(mine < m)[:, None] & (first + col < k)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return tl.rsqrt(squares / k + eps)


@jit
def _finish_tile(
    y, z, bias_ptr, residual_at, out_at, row, n, real,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Bias, activation, gate and residual of a tile whose first dim is outputs, and out with them."""
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            z += tl.load(bias_ptr + n + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    y = activated(y, ACT)
    if GATED:
        y *= z
    if RESIDUAL:
        y += tl.load(residual_at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_at, y.to(out_at.dtype.element_ty), mask=real)


@jit
def linear_join(
    part_ptr,  # [shares, M, N or 2N] fp32
    squares_ptr,  # [shares, M] fp32
    bias_ptr,
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    shares,
    m,
    k,
    n,
    residual_stride,
    eps,
    BN: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The shares of one row's outputs, added in order."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.program_id(1)
    wide_n = n
    if GATED:
        wide_n = 2 * n
    y = tl.zeros([BN], tl.float32)
    z = tl.zeros([BN], tl.float32)
    squares = 0.0
    for share in range(shares):
        at = part_ptr + (share * m + mine).to(tl.int64) * wide_n + row
        y += tl.load(at, mask=row < n, other=0.0)
        if GATED:
            z += tl.load(at + n, mask=row < n, other=0.0)
        if SCALED:
            squares += tl.load(squares_ptr + share * m + mine)
    if SCALED:
        scale = tl.rsqrt(squares / k + eps)
        y *= scale
        z *= scale
    out_at = out_ptr + mine.to(tl.int64) * n + row
    _finish(y, z, bias_ptr, residual_ptr + mine * residual_stride + row, out_at, row, n, BIAS, RESIDUAL, GATED, ACT)
