"""The norm of a list of tensors: a share a chunk, then their sum in a fixed order; and the list scaled by a factor.

Shapes: T tensors, C chunks.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import let_next_start, wait_for_last
from ridgeline.kernels.function import jit


@jit
def squares_of(at_ptr, n, start, col, acc, MASKED: tl.constexpr):
    if MASKED:
        g = tl.load(at_ptr + start + col, mask=start + col < n, other=0.0).to(tl.float32)
    else:
        g = tl.load(at_ptr + start + col).to(tl.float32)
    return acc + g * g


@jit
def norm_shares(
    addresses_ptr,  # [T] i64
    sizes_ptr,  # [T] i64
    chunks_ptr,  # [C, 2] i32
    share_ptr,  # [C] fp32
    like_ptr,  # any of the tensors: its type is that of all
    length,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum of squares of one chunk."""
    let_next_start(EARLY)
    chunk = tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)
    first = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * length
    n = tl.load(sizes_ptr + tensor)
    at_ptr = tl.load(addresses_ptr + tensor).to(like_ptr.dtype)
    if ALIGNED:
        at_ptr = tl.multiple_of(at_ptr, 16)
    first = tl.multiple_of(first, 16)
    stop = tl.minimum(first + length, n)
    whole = tl.multiple_of(first + (stop - first) // BLOCK * BLOCK, 16)
    col = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, whole, BLOCK, num_stages=1):
        acc = squares_of(at_ptr, n, tl.multiple_of(start, 16), col, acc, False)
    for start in tl.range(whole, stop, BLOCK, num_stages=1):
        acc = squares_of(at_ptr, n, start, col, acc, True)
    tl.store(share_ptr + chunk, tl.sum(acc, axis=0))


@jit
def norm_total(
    share_ptr,  # [C] fp32
    found_ptr,  # [2] fp32: the norm, and the factor that brings it to max_norm at most
    num_shares,
    max_norm,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The root of the sum of all shares, in a fixed order; the factor is clip_grad_norm_'s."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
    norm = summed_root(share_ptr, num_shares, BLOCK)
    tl.store(found_ptr, norm)
    tl.store(found_ptr + 1, clip_factor(norm, max_norm))


@jit
def summed_root(share_ptr, num_shares, BLOCK: tl.constexpr):
    """The root of the sum, added in float64: there are few enough."""
    col = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, num_shares, BLOCK, num_stages=1):
        acc += tl.load(share_ptr + start + col, mask=start + col < num_shares, other=0.0).to(tl.float64)
    return tl.sqrt(tl.sum(acc, axis=0)).to(tl.float32)


@jit
def clip_factor(norm, max_norm):
    """As clip_grad_norm_: max_norm / (norm + 1e-6), at most one; NaN stays NaN."""
    factor = tl.div_rn(max_norm, norm + 1e-6)
    return tl.where(factor > 1.0, 1.0, factor)


@jit
def scale_all(
    addresses_ptr,
    sizes_ptr,
    chunks_ptr,
    found_ptr,  # [2] fp32: norm, factor
    like_ptr,
    length,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Every tensor times the factor, in place; a factor of one moves nothing.

    From the last chunk to the first: what the norm has read last is in the L2 still.
    """
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)
    first = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * length
    n = tl.load(sizes_ptr + tensor)
    at_ptr = tl.load(addresses_ptr + tensor).to(like_ptr.dtype)
    if ALIGNED:
        at_ptr = tl.multiple_of(at_ptr, 16)
    first = tl.multiple_of(first, 16)
    stop = tl.minimum(first + length, n)
    wait_for_last(DEPENDENT)
    factor = tl.load(found_ptr + 1)
    if factor == 1.0:
        stop = first
    whole = tl.multiple_of(first + (stop - first) // BLOCK * BLOCK, 16)
    col = tl.arange(0, BLOCK)
    for start in tl.range(first, whole, BLOCK, num_stages=1):
        to = at_ptr + tl.multiple_of(start, 16) + col
        tl.store(to, (tl.load(to).to(tl.float32) * factor).to(like_ptr.dtype.element_ty))
    for start in tl.range(whole, stop, BLOCK, num_stages=1):
        to = at_ptr + start + col
        inside = start + col < n
        x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, (x * factor).to(like_ptr.dtype.element_ty), mask=inside)
