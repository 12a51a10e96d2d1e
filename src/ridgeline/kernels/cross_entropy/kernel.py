"""Cross-entropy on the device: one read of the logits forward, one read and one write backward.

Shapes: N rows, V classes, S stretches of a row, P programs. A stretch is what one program reads; few long rows take
several. Short rows are held whole, several at a time.
loss = (1 − smoothing)·(lse − x[target]) + smoothing·(lse − mean(x)) + z_weight·lse².

lse is kept as two numbers, the row's maximum and the logarithm of the sum relative to it: subtracting one after the
other loses nothing, while their sum would lose the last digits of small probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
FAR = tl.constexpr(20.0)


@triton.jit
def sums_of(x_row, first, last, offset, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Sum of exp(x − offset), maximum and sum of x over a stretch; threads meet only at its end."""
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        c = start + col
        x = tl.load(x_row + c, mask=c < last, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - offset)
        top = tl.maximum(top, x)
        if SMOOTH:
            level += tl.where(c < last, x, 0.0)
    return tl.sum(total, axis=0), tl.max(top, axis=0), tl.sum(level, axis=0)


@triton.jit
def loss_of(picked, top, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH: tl.constexpr):
    loss = (top - picked) + log_sum
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - mean) + log_sum)
    lse = top + log_sum
    loss += z_weight * lse * lse
    # A target outside the classes is an error in PyTorch too; here it is loud, not silent.
    return tl.where((target >= 0) & (target < cols), loss, float("nan"))


@triton.jit
def cross_entropy_stretches(
    x_ptr,  # [N, V], rows x_stride apart
    target_ptr,  # [N]
    part_ptr,  # [3, N, S] fp32: maximum, sum relative to it, sum of logits; unused where a row is one stretch
    loss_ptr,  # [N] fp32; 0 where the target is ignored
    lse_ptr,  # [2, N] fp32
    rows,
    cols,
    x_stride,
    length,
    num_stretches,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Exponentials are taken relative to the largest of the first block: no thread waits for another inside a row.

    Where a later logit is far above that, the sums are taken again, relative to the true maximum.
    """
    pid = tl.program_id(0)
    row = (pid // num_stretches).to(tl.int64)
    first = (pid % num_stretches) * length
    last = tl.minimum(first + length, cols)
    x_row = x_ptr + row * x_stride
    c = first + tl.arange(0, BLOCK)
    start = tl.load(x_row + c, mask=c < last, other=float("-inf")).to(tl.float32)
    offset = tl.maximum(tl.max(start, axis=0), LOWEST)
    total, top, level = sums_of(x_row, first, last, offset, SMOOTH, BLOCK, STAGES)
    if top - offset > FAR:
        offset = top
        total, top, level = sums_of(x_row, first, last, offset, SMOOTH, BLOCK, STAGES)
    if WHOLE:
        log_sum = tl.log(total) - (top - offset)
        target = tl.load(target_ptr + row).to(tl.int64)
        picked = tl.load(x_row + target, mask=(target >= 0) & (target < cols), other=0.0).to(tl.float32)
        loss = loss_of(picked, top, log_sum, level / cols, target, cols, smoothing, z_weight, SMOOTH)
        tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))
        tl.store(lse_ptr + row, top)
        tl.store(lse_ptr + rows + row, log_sum)
    else:
        all_parts = rows.to(tl.int64) * num_stretches
        tl.store(part_ptr + pid, top)
        tl.store(part_ptr + all_parts + pid, total * tl.exp(offset - top))
        tl.store(part_ptr + 2 * all_parts + pid, level)


@triton.jit
def cross_entropy_merge(
    x_ptr,
    target_ptr,
    part_ptr,  # [3, N, S]
    loss_ptr,
    lse_ptr,
    rows,
    cols,
    x_stride,
    num_stretches,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """The stretches of one row merged into its loss."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, STRETCHES)
    at = part_ptr + row * num_stretches + s
    all_parts = rows.to(tl.int64) * num_stretches
    tops = tl.load(at, mask=s < num_stretches, other=LOWEST)
    totals = tl.load(at + all_parts, mask=s < num_stretches, other=0.0)
    level = tl.sum(tl.load(at + 2 * all_parts, mask=s < num_stretches, other=0.0), axis=0)
    top = tl.max(tops, axis=0)
    log_sum = tl.log(tl.sum(totals * tl.exp(tops - top), axis=0))
    target = tl.load(target_ptr + row).to(tl.int64)
    picked = tl.load(x_ptr + row * x_stride + target, mask=(target >= 0) & (target < cols), other=0.0).to(tl.float32)
    loss = loss_of(picked, top, log_sum, level / cols, target, cols, smoothing, z_weight, SMOOTH)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, top)
    tl.store(lse_ptr + rows + row, log_sum)


@triton.jit
def cross_entropy_short(
    x_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    rows,
    cols,
    x_stride,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows short enough to be held whole, ROWS at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (col < cols)
    x_row = x_ptr + row.to(tl.int64) * x_stride
    x = tl.load(x_row[:, None] + col, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, axis=1), LOWEST)
    log_sum = tl.log(tl.sum(tl.exp(x - top[:, None]), axis=1))
    mean = tl.sum(tl.where(inside, x, 0.0), axis=1) / cols
    target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int64)
    known = (target >= 0) & (target < cols) & (row < rows)
    picked = tl.load(x_row + target, mask=known, other=0.0).to(tl.float32)
    loss = loss_of(picked, top, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss), mask=row < rows)
    tl.store(lse_ptr + row, top, mask=row < rows)
    tl.store(lse_ptr + rows + row, log_sum, mask=row < rows)


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
    for start in tl.range(0, rows, BLOCK, num_stages=3):
        row = start + at
        total += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if MEAN:
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
    lse_ptr,  # [2, N] fp32
    grad_ptr,  # [] or [N]: gradient of the loss
    weight_ptr,  # [] fp32
    dx_ptr,  # [N, V], rows dx_stride apart; may be x itself
    rows,
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
    top = tl.load(lse_ptr + row)
    log_sum = tl.load(lse_ptr + rows + row)
    if PER_ROW:
        scale = tl.load(grad_ptr + row).to(tl.float32)
    else:
        scale = tl.load(grad_ptr).to(tl.float32) * tl.load(weight_ptr)
    x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=float("-inf")).to(tl.float32)
    p = tl.exp((x - top) - log_sum) * (1.0 + 2.0 * z_weight * (top + log_sum)) - smoothing / cols
    p = tl.where(c == target, p - (1.0 - smoothing), p)
    dx = tl.where(target == ignore_index, 0.0, p * scale)
    tl.store(dx_ptr + row * dx_stride + c, dx.to(dx_ptr.dtype.element_ty), mask=c < cols)
