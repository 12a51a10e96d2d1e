"""AdamW on the device: a small kernel that counts steps and works out factors, then one pass over all tensors.

Shapes: T tensors, C chunks, S shares of the norm. Eight-bit moments have a scale for every 256 elements; a code is a
root of the share of the block's largest: the square root for the first moment (signed), the fourth for the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.device import let_next_start, wait_for_last
from ridgeline.kernels.function import jit
from ridgeline.kernels.grad_norm.kernel import clip_factor, summed_root

WIDTH = tl.constexpr(7)  # columns of the table: parameter, moments, master, their scales, step counter
GROUP = tl.constexpr(256)


@triton.constexpr_function
def bytes_of(kind, num):
    """Bytes of so many elements: every stream is read as many a lane, so that one layout serves all of them."""
    return kind.element_ty.primitive_bitwidth * num // 8


@jit
def adamw_prepare(
    states_ptr,  # [T, WIDTH] i64
    factors_ptr,  # [T, 3] fp32: step size, root of the second bias correction, what decay leaves
    shared_ptr,  # [3] fp32: norm, factor of the gradients, whether the step is skipped
    share_ptr,  # [S] fp32
    lr_ptr,  # [] where the learning rate is a tensor
    inf_ptr,  # [] fp32: not zero where scaled gradients overflowed
    scale_ptr,  # [] fp32: what the loss was multiplied by
    num_tensors,
    num_shares,
    max_norm,
    lr,
    weight_decay,
    log2_beta1,
    log2_beta2,
    CLIP: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Powers in float64: 1 - 0.999ⁿ in float32 would lose four digits in the first steps."""
    let_next_start(EARLY)
    wait_for_last(DEPENDENT)
    skip = 0.0
    unscale = 1.0
    if SCALED:
        skip = tl.where(tl.load(inf_ptr) == 0.0, 0.0, 1.0)
        unscale = tl.div_rn(1.0, tl.load(scale_ptr).to(tl.float32))
    if LR_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_tensors
    to = tl.load(states_ptr + i * WIDTH + 6, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(to, mask=inside, other=0.0) + (1.0 - skip)
    tl.store(to, step, mask=inside)
    wide = step.to(tl.float64)
    first = 1.0 - tl.exp2(wide * log2_beta1)
    second = 1.0 - tl.exp2(wide * log2_beta2)
    tl.store(factors_ptr + 3 * i, (lr / first).to(tl.float32), mask=inside)
    tl.store(factors_ptr + 3 * i + 1, tl.sqrt(second).to(tl.float32), mask=inside)
    tl.store(factors_ptr + 3 * i + 2, 1.0 - lr * weight_decay + 0.0 * step, mask=inside)
    if tl.program_id(0) == 0:
        norm = 0.0
        factor = unscale
        if CLIP:
            norm = summed_root(share_ptr, num_shares, SHARES) * unscale
            factor = unscale * clip_factor(norm, max_norm)
        tl.store(shared_ptr, norm)
        tl.store(shared_ptr + 1, factor)
        tl.store(shared_ptr + 2, skip)


@jit
def moments(g, m, v, keep1, add1, keep2, add2):
    return m * keep1 + g * add1, v * keep2 + g * g * add2


@jit
def moved(p, m, v, step_size, root, decay, eps):
    return p * decay - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)


@jit
def adamw_block(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, at, inside, factor, step_size, root, decay, keep1, add1, keep2, add2, eps,
    MASTER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block; without a mask its accesses are sixteen bytes wide whatever the tensor's length."""
    if MASKED:
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_ptr + at).to(tl.float32) * factor
        m = tl.load(m_ptr + at).to(tl.float32)
        v = tl.load(v_ptr + at).to(tl.float32)
        p = tl.load(w_ptr + at).to(tl.float32)
    m, v = moments(g, m, v, keep1, add1, keep2, add2)
    p = moved(p, m, v, step_size, root, decay, eps)
    if MASKED:
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=inside)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
        if MASTER:
            tl.store(w_ptr + at, p, mask=inside)
    else:
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty))
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty))
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty))
        if MASTER:
            tl.store(w_ptr + at, p)


@jit
def adamw_update(
    states_ptr,  # [T, WIDTH] i64
    grads_ptr,  # [T] i64
    sizes_ptr,  # [T] i64
    chunks_ptr,  # [C, 2] i32
    factors_ptr,  # [T, 3]
    shared_ptr,  # [3]
    p_like,  # a parameter, a gradient and a moment: their types are those of all
    g_like,
    m_like,
    length,
    keep1,
    add1,
    keep2,
    add2,
    eps,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANE: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A chunk's step. ``BACKWARDS``: the last chunk first, whose gradients the norm has read last."""
    chunk = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)
    first = tl.multiple_of(tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * length, 16)
    n = tl.load(sizes_ptr + tensor)
    row = states_ptr + tensor * WIDTH
    p_ptr = tl.load(row).to(p_like.dtype)
    m_ptr = tl.load(row + 1).to(m_like.dtype)
    v_ptr = tl.load(row + 2).to(m_like.dtype)
    g_ptr = tl.load(grads_ptr + tensor).to(g_like.dtype)
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, bytes_of(p_like.dtype, LANE))
        m_ptr = tl.multiple_of(m_ptr, bytes_of(m_like.dtype, LANE))
        v_ptr = tl.multiple_of(v_ptr, bytes_of(m_like.dtype, LANE))
        g_ptr = tl.multiple_of(g_ptr, bytes_of(g_like.dtype, LANE))
    w_ptr = p_ptr
    if MASTER:
        w_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            w_ptr = tl.multiple_of(w_ptr, 16)
    wait_for_last(DEPENDENT)
    step_size = tl.load(factors_ptr + 3 * tensor)
    root = tl.load(factors_ptr + 3 * tensor + 1)
    decay = tl.load(factors_ptr + 3 * tensor + 2)
    factor = tl.load(shared_ptr + 1)
    if MAXIMIZE:
        factor = -factor
    stop = tl.minimum(first + length, n)
    if tl.load(shared_ptr + 2) != 0.0:
        stop = first
    whole = tl.multiple_of(first + (stop - first) // BLOCK * BLOCK, 16)
    col = tl.arange(0, BLOCK)
    for start in tl.range(first, whole, BLOCK, num_stages=1):
        adamw_block(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, tl.multiple_of(start, 16) + col, col < BLOCK, factor, step_size, root,
            decay, keep1, add1, keep2, add2, eps, MASTER, False,
        )  # fmt: skip
    for start in tl.range(whole, stop, BLOCK, num_stages=1):
        adamw_block(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, start + col, start + col < n, factor, step_size, root, decay, keep1,
            add1, keep2, add2, eps, MASTER, True,
        )  # fmt: skip


@jit
def over(top, x):
    """top / x, and nothing where x is: the square of an inverse root is an inverse without a division's eight steps."""
    root = tl.rsqrt(x)
    return tl.where(x > 1e-37, top * root * root, 0.0)


@jit
def largest(x):
    """The largest of every group, found inside one warp."""
    return tl.max(tl.max(x, axis=1, keep_dims=True), axis=2, keep_dims=True)


@jit
def adamw_block_8bit(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, m_scale_ptr, v_scale_ptr, start, n, factor, step_size, root, decay, keep1, add1,
    keep2, add2, eps, MASTER: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moments are decoded, moved, and coded again by the new largest of their block of 256.

    A tile [groups, 2, 128] puts a group into one warp, four elements a lane twice: warps go along the first dim.
    """
    group = tl.arange(0, BLOCK // GROUP)[:, None, None]
    within = tl.arange(0, 2)[None, :, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
    at = start + group * GROUP + within
    block = start // GROUP + group
    inside = at < n
    known = block * GROUP < n
    if MASKED:
        m_scale = tl.load(m_scale_ptr + block, mask=known, other=0.0)
        v_scale = tl.load(v_scale_ptr + block, mask=known, other=0.0)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
        p = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + at, mask=inside, other=0)
        v = tl.load(v_ptr + at, mask=inside, other=0)
    else:
        m_scale = tl.load(m_scale_ptr + block)
        v_scale = tl.load(v_scale_ptr + block)
        g = tl.load(g_ptr + at).to(tl.float32) * factor
        p = tl.load(w_ptr + at).to(tl.float32)
        m = tl.load(m_ptr + at)
        v = tl.load(v_ptr + at)
    # A byte becomes a float as the low bits of 2²³ and back as those of 1.5 · 2²³: conversions are four times slower.
    m = (m.to(tl.int32) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    v = (v.to(tl.int32) ^ 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    m = m * tl.abs(m) * (m_scale * (1.0 / 16129.0))
    v = (v * v) * (v * v) * (v_scale * (1.0 / 4228250625.0))
    m, v = moments(g, m, v, keep1, add1, keep2, add2)
    inverse = tl.rsqrt(tl.sqrt(v) * root + eps)
    p = p * decay - step_size * (m * inverse * inverse)
    m_scale = largest(tl.abs(m))
    v_scale = largest(v)
    m_code = tl.sqrt(tl.abs(m) * over(16129.0, m_scale))
    v_code = tl.sqrt(tl.sqrt(v * over(4228250625.0, v_scale)))
    v_code = tl.maximum(v_code, tl.where(v > 0.0, 1.0, 0.0))  # what is not zero never becomes zero
    m_code = (tl.where(m < 0.0, -m_code, m_code) + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)
    v_code = (v_code + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)
    if MASKED:
        tl.store(m_scale_ptr + block, m_scale, mask=known)
        tl.store(v_scale_ptr + block, v_scale, mask=known)
        tl.store(m_ptr + at, m_code, mask=inside)
        tl.store(v_ptr + at, v_code, mask=inside)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
        if MASTER:
            tl.store(w_ptr + at, p, mask=inside)
    else:
        tl.store(m_scale_ptr + block, m_scale)
        tl.store(v_scale_ptr + block, v_scale)
        tl.store(m_ptr + at, m_code)
        tl.store(v_ptr + at, v_code)
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty))
        if MASTER:
            tl.store(w_ptr + at, p)


@jit
def adamw_update_8bit(
    states_ptr,
    grads_ptr,
    sizes_ptr,
    chunks_ptr,
    factors_ptr,
    shared_ptr,
    p_like,
    g_like,
    length,
    keep1,
    add1,
    keep2,
    add2,
    eps,
    MASTER: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    chunk = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)
    first = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * length
    n = tl.load(sizes_ptr + tensor)
    row = states_ptr + tensor * WIDTH
    p_ptr = tl.load(row).to(p_like.dtype)
    m_ptr = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    v_ptr = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    m_scale_ptr = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    v_scale_ptr = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    g_ptr = tl.load(grads_ptr + tensor).to(g_like.dtype)
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, bytes_of(p_like.dtype, 4))
        m_ptr = tl.multiple_of(m_ptr, 4)
        v_ptr = tl.multiple_of(v_ptr, 4)
        g_ptr = tl.multiple_of(g_ptr, bytes_of(g_like.dtype, 4))
    w_ptr = p_ptr
    if MASTER:
        w_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            w_ptr = tl.multiple_of(w_ptr, 16)
    wait_for_last(DEPENDENT)
    step_size = tl.load(factors_ptr + 3 * tensor)
    root = 1.0 / tl.load(factors_ptr + 3 * tensor + 1)
    decay = tl.load(factors_ptr + 3 * tensor + 2)
    factor = tl.load(shared_ptr + 1)
    if MAXIMIZE:
        factor = -factor
    stop = tl.minimum(first + length, n)
    if tl.load(shared_ptr + 2) != 0.0:
        stop = first
    whole = first + (stop - first) // BLOCK * BLOCK
    for start in tl.range(first, whole, BLOCK, num_stages=1):
        adamw_block_8bit(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, m_scale_ptr, v_scale_ptr, tl.multiple_of(start, 256), n, factor,
            step_size, root, decay, keep1, add1, keep2, add2, eps, MASTER, False, BLOCK,
        )  # fmt: skip
    for start in tl.range(whole, stop, BLOCK, num_stages=1):
        adamw_block_8bit(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, m_scale_ptr, v_scale_ptr, tl.multiple_of(start, 256), n, factor,
            step_size, root, decay, keep1, add1, keep2, add2, eps, MASTER, True, BLOCK,
        )  # fmt: skip
