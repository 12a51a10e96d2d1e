"""Cross-entropy on the device: one read of the logits forward, one read and one write backward.

Shapes: N rows, V classes, S stretches of a row. A stretch is what one program reads; few long rows take several.
loss = (1 − smoothing)·(lse − x[target]) + smoothing·(lse − mean(x)) + z_weight·lse².
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def cross_entropy_stretches(
    x_ptr,  # [N, V], rows x_stride apart
    part_ptr,  # [N, S, 3] fp32: maximum, sum relative to it, sum of logits
    cols,
    x_stride,
    length,
    num_stretches,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maximum and sum of exponentials of one stretch of a row."""
    pid = tl.program_id(0)
    row = (pid // num_stretches).to(tl.int64)
    which = pid % num_stretches
    col = tl.arange(0, BLOCK)
    first = which * length
    last = tl.minimum(first + length, cols)
    top = LOWEST
    total = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_ptr + row * x_stride + c, mask=c < last, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        if SMOOTH:
            level += tl.where(c < last, x, 0.0)
    to = part_ptr + pid.to(tl.int64) * 3
    tl.store(to, top)
    tl.store(to + 1, tl.sum(total, axis=0))
    if SMOOTH:
        tl.store(to + 2, tl.sum(level, axis=0))


@triton.jit
def cross_entropy_row_losses(
    x_ptr,
    target_ptr,  # [N] int64
    part_ptr,
    loss_ptr,  # [N] fp32; 0 where the target is ignored
    lse_ptr,  # [N] fp32
    rows,
    cols,
    x_stride,
    num_stretches,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """Stretches of each row merged into its loss."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, STRETCHES)[None, :]
    inside = (row[:, None] < rows) & (s < num_stretches)
    at = part_ptr + (row[:, None].to(tl.int64) * num_stretches + s) * 3
    top = tl.load(at, mask=inside, other=LOWEST)
    total = tl.load(at + 1, mask=inside, other=0.0)
    best = tl.max(top, axis=1)
    lse = best + tl.log(tl.sum(total * tl.exp(top - best[:, None]), axis=1))
    target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int64)
    counted = (target != ignore_index) & (row < rows)
    picked = tl.load(
        x_ptr + row.to(tl.int64) * x_stride + target, mask=counted & (target >= 0) & (target < cols), other=0.0
    )
    loss = lse - picked.to(tl.float32)
    if SMOOTH:
        mean = tl.sum(tl.load(at + 2, mask=inside, other=0.0), axis=1) / cols
        loss = (1.0 - smoothing) * loss + smoothing * (lse - mean)
    loss += z_weight * lse * lse
    # A target outside the classes is an error in PyTorch too; here it is loud, not silent.
    loss = tl.where((target >= 0) & (target < cols), loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(counted, loss, 0.0), mask=row < rows)
    tl.store(lse_ptr + row, lse, mask=row < rows)


@triton.jit
def cross_entropy_finish(
    loss_ptr,  # [N] fp32
    target_ptr,  # [N]
    out_ptr,  # [] loss
    weight_ptr,  # [] fp32: 1 / counted rows for a mean, 1 for a sum; what the backward pass multiplies with
    rows,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row losses summed by one program in a fixed order, so the result has the same bits every time."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + at
        total += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
        count += (target != ignore_index).to(tl.int32)
    weight = 1.0
    if MEAN:
        weight = 1.0 / tl.sum(count, axis=0).to(tl.float32)
    tl.store(out_ptr, (tl.sum(total, axis=0) * weight).to(out_ptr.dtype.element_ty))
    tl.store(weight_ptr, weight)


@triton.jit
def cross_entropy_backward(
    x_ptr,  # [N, V], rows x_stride apart
    target_ptr,  # [N]
    lse_ptr,  # [N] fp32
    grad_ptr,  # [] or [N]: gradient of the loss
    weight_ptr,  # [] fp32
    dx_ptr,  # [N, V], rows dx_stride apart; may be x itself
    cols,
    x_stride,
    dx_stride,
    blocks_per_row,
    ignore_index,
    smoothing,
    z_weight,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = weight · (softmax·(1 + 2·z_weight·lse) − target), every element on its own."""
    pid = tl.program_id(0)
    row = (pid // blocks_per_row).to(tl.int64)
    c = (pid % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    if PER_ROW:
        scale = tl.load(grad_ptr + row).to(tl.float32)
    else:
        scale = tl.load(grad_ptr).to(tl.float32) * tl.load(weight_ptr)
    x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - lse) * (1.0 + 2.0 * z_weight * lse) - smoothing / cols
    p = tl.where(c == target, p - (1.0 - smoothing), p)
    dx = tl.where(target == ignore_index, 0.0, p * scale)
    tl.store(dx_ptr + row * dx_stride + c, dx.to(dx_ptr.dtype.element_ty), mask=c < cols)
