"""Pieces of device code that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reduce_partials(
    partial_ptr,  # [1 or 2, P, C] fp32
    out_ptr,  # [C]
    second_ptr,  # [C], of the second array where there is one
    num_partials,
    cols,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[c] = sum over p of partial[p, c], in a fixed order: the second half of a deterministic column sum.

    The grid's second dimension picks one of two stacked arrays.
    """
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    start = partial_ptr + which * num_partials * cols
    acc = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, num_partials, PARTS):
        at = first + part
        inside = (at[:, None] < num_partials) & (col[None, :] < cols)
        acc += tl.load(start + at[:, None].to(tl.int64) * cols + col[None, :], mask=inside, other=0.0)
    total = tl.sum(acc, axis=0)
    if which == 0:
        tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)
    else:
        tl.store(second_ptr + col, total.to(second_ptr.dtype.element_ty), mask=col < cols)
