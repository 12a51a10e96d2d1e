"""y = a @ b in float32 from three products of halves.

Every row of a and every column of b is scaled by a power of two, so that its largest element lies just below what
float16 holds, and written as high + low, two float16 numbers of 22 bits together. high·high + high·low + low·high
misses less than float32 sums of hundreds of terms do. Tensor cores cut off where float32 rounds, and cutting off a
thousand times in one direction shows: so a sum is carried there over one block of terms only, and the blocks are added
by the ordinary units, some of them together before they go into the whole.

An infinity meets the other factor's lower half as well, which may be zero or of the other sign: NaN. No product of
finite numbers is NaN here: a tile that has one says so (or that a row or column is scaled by infinity), and ``mend``
multiplies it once more, higher digits alone, which tell which infinity it is, or that it is none, as float32 does.

Where a has few rows, taking b apart beforehand would take longer than the product: there b is read once, as it is, and
taken apart in registers into two TensorFloat-32 numbers, which need no scaling.

Shapes: [M, K] @ [K, N], or Z of them. ``split`` reads a matrix along K, twice, and writes both halves in its layout.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def matmul_split(
    x_ptr,  # Z matrices of [outer, K] by strides
    high_ptr,  # float16, the same order of dims, sizes filled up with zeros to whole vectors
    low_ptr,
    scale_ptr,  # [Z, outer] fp32: what the halves are to be multiplied by
    outer,
    k,
    filled_outer,
    filled_k,
    x_z,
    x_step,  # how far apart the dim that is not dense goes
    half_z,
    half_step,
    BO: tl.constexpr,
    BK: tl.constexpr,
    TURNED: tl.constexpr,  # whether the outer dim is the dense one
):
    """Halves of BO rows, and the power of two that undoes their scaling."""
    z = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BO + tl.arange(0, BO)
    col = tl.arange(0, BK)
    if TURNED:
        at = z * x_z + row[:, None] + col.to(tl.int64)[None, :] * x_step
        half_at = z * half_z + row[:, None] + col.to(tl.int64)[None, :] * half_step
        ahead = x_step.to(tl.int64)
        half_ahead = half_step.to(tl.int64)
    else:
        at = z * x_z + row.to(tl.int64)[:, None] * x_step + col[None, :]
        half_at = z * half_z + row.to(tl.int64)[:, None] * half_step + col[None, :]
        ahead = tl.full([], 1, tl.int64)
        half_ahead = ahead
    top = tl.zeros([BO, BK], tl.float32)
    for first in range(0, k, BK):
        inside = (row < outer)[:, None] & (first + col < k)[None, :]
        x = tl.load(x_ptr + at + first * ahead, mask=inside, other=0.0)
        top = tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(top, 1)
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) - 127, -110), 127)  # of the largest; zeros count as tiny
    up = ((14 - exponent + 127) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14 + 127) << 23).to(tl.float32, bitcast=True)
    for first in range(0, filled_k, BK):
        inside = (row < outer)[:, None] & (first + col < k)[None, :]
        x = tl.load(x_ptr + at + first * ahead, mask=inside, other=0.0) * up[:, None]
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
        there = (row < filled_outer)[:, None] & (first + col < filled_k)[None, :]
        tl.store(high_ptr + half_at + first * half_ahead, high, mask=there)
        tl.store(low_ptr + half_at + first * half_ahead, low, mask=there)
    down = tl.where(largest < float("inf"), down, float("inf"))
    tl.store(scale_ptr + z * outer + row, down, mask=row < outer)


@jit
def has_nan(x):
    """1 if a tile has a NaN, else 0; 1, too, if its infinities cancel. A sum takes fewer registers than to ask each."""
    total = tl.sum(tl.sum(x, 1), 0)
    return (total != total).to(tl.int32)


@jit
def _blocks(ah_ptr, al_ptr, bh_ptr, bl_ptr, a_at, b_at, row, col, term, filled_m, filled_n, k, EVEN: tl.constexpr):
    """Both halves of both factors' blocks."""
    a_inside = (row < filled_m)[:, None]
    b_inside = (col < filled_n)[None, :]
    if not EVEN:
        a_inside = a_inside & (term < k)[None, :]
        b_inside = b_inside & (term < k)[:, None]
    ah = tl.load(ah_ptr + a_at, mask=a_inside, other=0.0)
    al = tl.load(al_ptr + a_at, mask=a_inside, other=0.0)
    bh = tl.load(bh_ptr + b_at, mask=b_inside, other=0.0)
    bl = tl.load(bl_ptr + b_at, mask=b_inside, other=0.0)
    return ah, al, bh, bl


@jit
def matmul_halves(
    ah_ptr,  # Z of [M, K] by strides, float16
    al_ptr,
    bh_ptr,  # Z of [K, N] by strides, float16
    bl_ptr,
    a_scale_ptr,  # [Z, M]
    b_scale_ptr,  # [Z, N]
    bias_ptr,  # [N]
    out_ptr,  # [Z, M, N]
    nan_ptr,  # [Z, tiles] whether a tile has NaN
    by_ptr,  # [M, N] what the product is multiplied with, and what is then added to it
    more_ptr,
    u_ptr,  # [M, N] the product before that
    m,
    n,
    filled_m,  # sizes filled up with zeros to whole vectors
    filled_n,
    k,
    a_z,
    a_step,
    b_z,
    b_step,
    scale_z,  # how far apart the scales of b are: 0 where one b serves all
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,  # blocks whose sums are added up before they go into the whole
    GROUP: tl.constexpr,
    A_TURNED: tl.constexpr,  # whether M is the dense dim of a
    B_TURNED: tl.constexpr,  # whether K is the dense dim of b
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,  # whether rows of the result are whole vectors
    BIAS: tl.constexpr,
    SHORT: tl.constexpr,  # whether all terms are one block
    BY: tl.constexpr,
    MORE: tl.constexpr,
    SAVE: tl.constexpr,
):
    """One tile: a block of terms on the tensor cores, blocks added in float32."""
    z = tl.program_id(1).to(tl.int64)
    wide = tl.cdiv(n, BN)
    tall = tl.cdiv(m, BM)
    group = tl.program_id(0) // (GROUP * wide)
    first_m = group * GROUP
    size = tl.minimum(tall - first_m, GROUP)
    tile_m = first_m + (tl.program_id(0) % (GROUP * wide)) % size
    tile_n = (tl.program_id(0) % (GROUP * wide)) // size
    row = tile_m * BM + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    term = tl.arange(0, BK)
    if A_TURNED:
        a_at = z * a_z + row[:, None] + term.to(tl.int64)[None, :] * a_step
        a_ahead = BK * a_step.to(tl.int64)
    else:
        a_at = z * a_z + row.to(tl.int64)[:, None] * a_step + term[None, :]
        a_ahead = tl.full([], BK, tl.int64)
    if B_TURNED:
        b_at = z * b_z + term[:, None] + col.to(tl.int64)[None, :] * b_step
        b_ahead = tl.full([], BK, tl.int64)
    else:
        b_at = z * b_z + term.to(tl.int64)[:, None] * b_step + col[None, :]
        b_ahead = BK * b_step.to(tl.int64)
    if SHORT:
        ah, al, bh, bl = _blocks(ah_ptr, al_ptr, bh_ptr, bl_ptr, a_at, b_at, row, col, term, filled_m,
                                 filled_n, k, EVEN)  # fmt: skip
        acc = tl.dot(ah, bh, tl.dot(ah, bl, tl.dot(al, bh)))
    else:
        acc = tl.zeros([BM, BN], tl.float32)
        sums = tl.zeros([BM, BN], tl.float32)
        for first in range(0, k, BK):
            ah, al, bh, bl = _blocks(ah_ptr, al_ptr, bh_ptr, bl_ptr, a_at, b_at, row, col, first + term, filled_m,
                                     filled_n, k, EVEN)  # fmt: skip
            part = tl.dot(al, bh)
            part = tl.dot(ah, bl, part)
            part = tl.dot(ah, bh, part)
            sums += part
            if first // BK % TOGETHER == TOGETHER - 1:
                acc += sums
                sums = tl.zeros([BM, BN], tl.float32)
            a_at += a_ahead
            b_at += b_ahead
        acc += sums
    rows_endless = tl.load(a_scale_ptr + z * m + row, mask=row < m, other=0.0) == float("inf")
    cols_endless = tl.load(b_scale_ptr + z * scale_z + col, mask=col < n, other=0.0) == float("inf")
    endless = tl.maximum(tl.max(rows_endless.to(tl.int32), 0), tl.max(cols_endless.to(tl.int32), 0))
    if WIDE:
        n = n // 8 * 8  # the same number, known to the compiler as a multiple
    acc *= tl.load(a_scale_ptr + z * m + row, mask=row < m, other=0.0)[:, None]
    acc *= tl.load(b_scale_ptr + z * scale_z + col, mask=col < n, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < n, other=0.0)[None, :]
    real = (row < m)[:, None] & (col < n)[None, :]
    at = (z * m + row.to(tl.int64))[:, None] * n + col[None, :]
    if SAVE:
        tl.store(u_ptr + at, acc, mask=real)
    if BY:
        acc *= tl.load(by_ptr + at, mask=real, other=0.0)
    if MORE:
        acc += tl.load(more_ptr + at, mask=real, other=0.0)
    tl.store(out_ptr + at, acc, mask=real)
    tl.store(nan_ptr + z * tall * wide + tile_m * wide + tile_n, endless)


@jit
def nearest(x):
    """The nearest number of TensorFloat-32's ten bits. A NaN of nothing but ones, which is what a GPU makes, becomes
    zero: what is left of x beside it is still NaN."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@jit
def nearest_or_nan(x):
    """The same, and NaN where x is."""
    return tl.where(x == x, nearest(x), x)


@jit
def matmul_mend(
    a_ptr,  # Z of [M, K] by strides
    b_ptr,  # Z of [K, N] by strides
    bias_ptr,  # [N]
    out_ptr,  # [Z, M, N]
    nan_ptr,  # [Z, tiles] whether a tile has NaN
    by_ptr,  # as the product has them
    more_ptr,
    u_ptr,
    m,
    n,
    k,
    a_z,
    a_m,
    a_k,
    b_z,
    b_k,
    b_n,
    TOLD: tl.constexpr,  # whether tiles say so; else they are looked at
    BIAS: tl.constexpr,
    BY: tl.constexpr,
    MORE: tl.constexpr,
    SAVE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Every NaN is written over by what higher digits alone give. There are none but in a tile that met an infinity or
    a NaN: what is done for the others is to look."""
    z = tl.program_id(1).to(tl.int64)
    wide = tl.cdiv(n, BN)
    tiles = tl.cdiv(m, BM) * wide
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // wide * BM + tl.arange(0, BM)).to(tl.int64)
        col = (tile % wide * BN + tl.arange(0, BN)).to(tl.int64)
        real = (row < m)[:, None] & (col < n)[None, :]
        at = (z * m + row)[:, None] * n + col[None, :]
        if TOLD:
            bad = tl.load(nan_ptr + z * tiles + tile)
        else:
            bad = has_nan(tl.load(out_ptr + at, mask=real, other=0.0))
        if bad:
            again = tl.zeros([BM, BN], tl.float32)
            for first in tl.range(0, k, BK, num_stages=1):
                term = (first + tl.arange(0, BK)).to(tl.int64)
                a_at = a_ptr + z * a_z + row[:, None] * a_m + term[None, :] * a_k
                b_at = b_ptr + z * b_z + term[:, None] * b_k + col[None, :] * b_n
                a = tl.load(a_at, mask=(row < m)[:, None] & (term < k)[None, :], other=0.0)
                b = tl.load(b_at, mask=(col < n)[None, :] & (term < k)[:, None], other=0.0)
                again = tl.dot(nearest_or_nan(a), nearest_or_nan(b), again, input_precision="tf32")
            if BIAS:
                again += tl.load(bias_ptr + col, mask=col < n, other=0.0)[None, :]
            if SAVE:
                found = tl.load(u_ptr + at, mask=real, other=0.0)
                tl.store(u_ptr + at, again, mask=real & (found != found))
            if BY:
                again *= tl.load(by_ptr + at, mask=real, other=0.0)
            if MORE:
                again += tl.load(more_ptr + at, mask=real, other=0.0)
            found = tl.load(out_ptr + at, mask=real, other=0.0)
            tl.store(out_ptr + at, again, mask=real & (found != found))


@jit
def matmul_digits(x_ptr, high_ptr, low_ptr, total, BLOCK: tl.constexpr):
    """x as high + low, two TensorFloat-32 numbers of 22 bits together; where high is no number, low is zero."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    high = nearest_or_nan(x)
    low = tl.where(tl.abs(high) < float("inf"), x - high, 0.0)
    tl.store(high_ptr + at, high, mask=at < total)
    tl.store(low_ptr + at, nearest(low), mask=at < total)


@jit
def matmul_thin(
    w_ptr,  # [N, K]: b as a linear layer has it
    high_ptr,  # [M, K], both digits of a
    low_ptr,
    bias_ptr,  # [N]
    out_ptr,  # [M, N]
    nan_ptr,  # [tiles] whether a tile has NaN, by rows of the result, where TURNED: else there are few to look at
    n,
    k,
    m,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    TURNED: tl.constexpr,  # whether the result is [N, M] and bias has M numbers: many rows times a narrow matrix
):
    """BN columns of the result for BM rows: the tensor cores carry a sum over one block of terms, as in the other."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    term = tl.arange(0, BK)
    w_at = w_ptr + col.to(tl.int64)[:, None] * k + term[None, :]
    x_at = row.to(tl.int64)[None, :] * k + term[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    sums = tl.zeros([BN, BM], tl.float32)
    for first in range(0, k, BK):
        w_inside = (col < n)[:, None]
        x_inside = (row < m)[None, :]
        if not EVEN:
            w_inside = w_inside & (first + term < k)[None, :]
            x_inside = x_inside & (first + term < k)[:, None]
        w = tl.load(w_at, mask=w_inside, other=0.0)
        high = nearest(w)
        low = w - high
        xh = tl.load(high_ptr + x_at, mask=x_inside, other=0.0)
        xl = tl.load(low_ptr + x_at, mask=x_inside, other=0.0)
        part = tl.dot(low, xh, input_precision="tf32")
        part = tl.dot(high, xl, part, input_precision="tf32")
        part = tl.dot(high, xh, part, input_precision="tf32")
        sums += part
        if first // BK % TOGETHER == TOGETHER - 1:
            acc += sums
            sums = tl.zeros([BN, BM], tl.float32)
        w_at += BK
        x_at += BK
    acc += sums
    real = (col < n)[:, None] & (row < m)[None, :]
    if TURNED:
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=row < m, other=0.0)[None, :]
        tl.store(out_ptr + col.to(tl.int64)[:, None] * m + row[None, :], acc, mask=real)
        tl.store(nan_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), has_nan(acc))
    else:
        if BIAS:
            acc += tl.load(bias_ptr + col, mask=col < n, other=0.0)[:, None]
        tl.store(out_ptr + row.to(tl.int64)[None, :] * n + col[:, None], acc, mask=real)


@jit
def three_products(a_high, a_low, b_high, b_low):
    """A product of two factors in two digits each: the tensor cores carry its sums over one block only."""
    part = tl.dot(a_low, b_high, input_precision="tf32")
    part = tl.dot(a_high, b_low, part, input_precision="tf32")
    return tl.dot(a_high, b_high, part, input_precision="tf32")


@jit
def matmul_pieces(
    a_ptr,  # [M, K] or, turned, [K, M]
    b_ptr,  # [K, N] or, turned, [N, K]
    out_ptr,  # [S, M, N]: S stretches of the terms, each with a product of its own
    m,
    n,
    k,
    length,  # of a stretch
    a_step,  # how far apart the dim that is not dense goes
    b_step,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    EVEN: tl.constexpr,  # all tiles and stretches are whole
):
    """Few results of long sums: both factors are read as they are, and taken apart on their way."""
    tiles = tl.cdiv(n, BN)
    row = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    col = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    piece = tl.program_id(1).to(tl.int64)
    start = piece * length
    last = tl.minimum(start + length, k)
    term = tl.arange(0, BK)
    terms = start + term
    if A_TURNED:
        a_at = a_ptr + terms[None, :] * a_step + row[:, None]
    else:
        a_at = a_ptr + row.to(tl.int64)[:, None] * a_step + terms[None, :]
    if B_TURNED:
        b_at = b_ptr + col.to(tl.int64)[None, :] * b_step + terms[:, None]
    else:
        b_at = b_ptr + terms[:, None] * b_step + col[None, :]
    a_ahead = BK * a_step.to(tl.int64) if A_TURNED else BK
    b_ahead = BK if B_TURNED else BK * b_step.to(tl.int64)
    acc = tl.zeros([BM, BN], tl.float32)
    sums = tl.zeros([BM, BN], tl.float32)
    for turn in range(tl.cdiv(last - start, BK)):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            inside = start + turn * BK + term < last
            a = tl.load(a_at, mask=(row < m)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at, mask=inside[:, None] & (col < n)[None, :], other=0.0)
        a_high = nearest(a)
        b_high = nearest(b)
        sums += three_products(a_high, a - a_high, b_high, b - b_high)
        if turn % TOGETHER == TOGETHER - 1:
            acc += sums
            sums = tl.zeros([BM, BN], tl.float32)
        a_at += a_ahead
        b_at += b_ahead
    acc += sums
    at = (piece * m + row.to(tl.int64))[:, None] * n + col[None, :]
    tl.store(out_ptr + at, acc, mask=(row < m)[:, None] & (col < n)[None, :])


@jit
def attention_digits(
    q_ptr,  # [B, H, L, D] by strides, as are k, v [B, H, S, D] and out
    k_ptr,
    v_ptr,
    out_ptr,
    q_b,
    q_h,
    q_l,
    k_b,
    k_h,
    k_l,
    v_b,
    v_h,
    v_l,
    out_b,
    out_h,
    out_l,
    heads,
    length,
    keys,
    scale,  # times log2(e)
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """softmax(q kᵀ · scale) v in float32's own accuracy: BM queries of one head over all keys, BN at a time."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    q_at = q_ptr + batch * q_b + head * q_h + row.to(tl.int64)[:, None] * q_l + d[None, :]
    q = tl.load(q_at, mask=(row < length)[:, None] & (d < D)[None, :], other=0.0) * scale
    q_high = nearest(q)
    q_low = nearest_or_nan(q - q_high)
    k_at = k_ptr + batch * k_b + head * k_h + n.to(tl.int64)[None, :] * k_l + d[:, None]
    v_at = v_ptr + batch * v_b + head * v_h + n.to(tl.int64)[:, None] * v_l + d[None, :]
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    last = tl.minimum((tl.program_id(0) + 1) * BM, keys) if CAUSAL else keys
    for first in range(0, last, BN):
        k = tl.load(k_at, mask=(first + n < keys)[None, :] & (d < D)[:, None], other=0.0)
        k_high = nearest(k)
        score = three_products(q_high, q_low, k_high, nearest_or_nan(k - k_high))
        seen = (first + n < keys)[None, :]
        if CAUSAL:
            seen = seen & (first + n[None, :] <= row[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1), propagate_nan=tl.PropagateNan.ALL)
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(v_at, mask=(first + n < keys)[:, None] & (d < D)[None, :], other=0.0)
        v_high = nearest(v)
        w_high = nearest(weight)
        acc = acc * fade[:, None] + three_products(w_high, nearest(weight - w_high), v_high, nearest_or_nan(v - v_high))
        top = higher
        k_at += BN * k_l.to(tl.int64)
        v_at += BN * v_l.to(tl.int64)
    out_at = out_ptr + batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_l + d[None, :]
    tl.store(out_at, acc / total[:, None], mask=(row < length)[:, None] & (d < D)[None, :])
