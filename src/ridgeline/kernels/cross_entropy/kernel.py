"""Cross-entropy on the device: one read of the logits forward, one read and one write backward.

Shapes: N rows, V classes, S stretches of a row, P programs. A stretch is what one program reads; few long rows take
several. Short rows are held whole, several at a time.
loss = (1 − smoothing)·(lse − x[target]) + smoothing·(lse − mean(x)) + z_weight·lse².

lse is kept as two numbers, the row's maximum and the logarithm of the sum relative to it: subtracting one after the
other loses nothing, while their sum would lose the last digits of small probabilities.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.device import ends_of, let_next_start, row_lead, row_start, wait_for_last, whole_part
from ridgeline.kernels.function import jit

LOWEST = tl.constexpr(-2.0e38)  # still a number when multiplied by LOG2E
LOG2E = tl.constexpr(1.4426950408889634)


@jit
def power(x, top, NARROW: tl.constexpr):
    """exp(x − top); for 16-bit logits with one multiply-add, which is as right as they are."""
    return tl.exp2(x * LOG2E - top * LOG2E) if NARROW else tl.exp(x - top)


@jit
def added(x, top, total, level, counted, SMOOTH: tl.constexpr, NARROW: tl.constexpr):
    """One more block [GROUPS, VECTOR] into the running maximum, sum and level of each group.

    A group is what one thread reads with one instruction, so its maximum is found without meeting any other thread.
    """
    best = tl.maximum(top, tl.max(x, axis=1))
    total = total * tl.exp(top - best) + tl.sum(power(x, best[:, None], NARROW), axis=1)
    if SMOOTH:
        level += tl.where(counted, x, 0.0)  # summed at the end: Triton 3.6 fails on sums of a group in the loop
    return best, total, level


@jit
def sums_of(
    x_row,
    lead,
    first,
    last,
    SMOOTH: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    UNALIGNED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Maximum, sum of exp(x − maximum) and sum of x over a stretch; threads meet only at its end.

    Where rows are unaligned, positions count from the start of the row's first access, of which the first
    ``lead`` elements belong to the row before.
    """
    BLOCK: tl.constexpr = GROUPS * VECTOR
    NARROW: tl.constexpr = x_row.dtype.element_ty.primitive_bitwidth == 16
    at = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full([GROUPS], LOWEST, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    level = tl.zeros([GROUPS, VECTOR], tl.float32)
    if UNALIGNED:
        if first < lead:
            inside = (at >= lead) & (at < last)
            x = tl.load(x_row + at, mask=at // VECTOR * VECTOR < last, other=0.0, eviction_policy=POLICY)
            x = tl.where(inside, x.to(tl.float32), float("-inf"))
            top, total, level = added(x, top, total, level, inside, SMOOTH, NARROW)
            first += BLOCK
    whole = first + tl.maximum(last - first, 0) // BLOCK * BLOCK
    for start in tl.range(first, whole, BLOCK, num_stages=STAGES):
        x = tl.load(x_row + start + at, eviction_policy=POLICY).to(tl.float32)
        top, total, level = added(x, top, total, level, True, SMOOTH, NARROW)
    if whole < last:
        inside = whole + at < last
        if UNALIGNED:
            touched = (whole + at) // VECTOR * VECTOR < last
            x = tl.load(x_row + whole + at, mask=touched, other=0.0, eviction_policy=POLICY).to(tl.float32)
            x = tl.where(inside, x, float("-inf"))
        else:
            x = tl.load(x_row + whole + at, mask=inside, other=float("-inf"), eviction_policy=POLICY).to(tl.float32)
        top, total, level = added(x, top, total, level, inside, SMOOTH, NARROW)
    best = tl.max(top, axis=0)
    return best, tl.sum(total * tl.exp(top - best), axis=0), tl.sum(tl.sum(level, axis=1), axis=0)


@jit
def loss_of(picked, top, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH: tl.constexpr):
    loss = (top - picked) + log_sum
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - mean) + log_sum)
    lse = top + log_sum
    loss += z_weight * lse * lse
    # A target outside the classes is an error in PyTorch too; here it is loud, not silent.
    return tl.where((target >= 0) & (target < cols), loss, float("nan"))


@jit
def cross_entropy_stretches(
    x_ptr,  # [N, V], rows x_stride apart
    target_ptr,  # [N]
    part_ptr,  # [3, N, S] fp32: maximum, sum relative to it, sum of logits; unused where a row is one stretch
    loss_ptr,  # [N] fp32; 0 where the target is ignored
    count_ptr,  # [N] fp32; 1 where it is not
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
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    UNALIGNED: tl.constexpr,  # rows are unaligned
    POLICY: tl.constexpr,  # how long the L2 keeps what is read
):
    """One program a stretch. What the end of a row needs besides its sums is asked for at the beginning."""
    pid = tl.program_id(0)
    row = (pid // num_stretches).to(tl.int64)
    first = (pid % num_stretches) * length
    x_row = x_ptr + row * x_stride
    begin = x_row
    lead = 0
    if UNALIGNED:
        first = first // VECTOR * VECTOR
        begin = x_ptr + row * x_stride // VECTOR * VECTOR
        lead = (row * x_stride % VECTOR).to(tl.int32)
    last = tl.minimum(first + length, lead + cols)
    if WHOLE:
        target = tl.load(target_ptr + row).to(tl.int64)
        picked = tl.load(x_row + target, mask=(target >= 0) & (target < cols), other=0.0).to(tl.float32)
    top, total, level = sums_of(begin, lead, first, last, SMOOTH, GROUPS, VECTOR, STAGES, UNALIGNED, POLICY)
    let_next_start(EARLY)
    if WHOLE:
        log_sum = tl.log(total)
        loss = loss_of(picked, top, log_sum, level / cols, target, cols, smoothing, z_weight, SMOOTH)
        tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))
        if COUNT:
            tl.store(count_ptr + row, tl.where(target == ignore_index, 0.0, 1.0))
        tl.store(lse_ptr + row, top)
        tl.store(lse_ptr + rows + row, log_sum)
    else:
        all_parts = rows.to(tl.int64) * num_stretches
        tl.store(part_ptr + pid, top)
        tl.store(part_ptr + all_parts + pid, total)
        tl.store(part_ptr + 2 * all_parts + pid, level)


@jit
def cross_entropy_merge(
    x_ptr,
    target_ptr,
    part_ptr,  # [3, N, S]
    loss_ptr,
    count_ptr,
    lse_ptr,
    rows,
    cols,
    x_stride,
    num_stretches,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    COUNT: tl.constexpr,
    STRETCHES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The stretches of one row merged into its loss."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)
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
    if COUNT:
        tl.store(count_ptr + row, tl.where(target == ignore_index, 0.0, 1.0))
    tl.store(lse_ptr + row, top)
    tl.store(lse_ptr + rows + row, log_sum)


@jit
def cross_entropy_short(
    x_ptr,
    target_ptr,
    loss_ptr,  # [N] a row, or [P] the sum of a program's rows
    count_ptr,  # [N] or [P]: rows that are not ignored
    lse_ptr,
    rows,
    cols,
    x_stride,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,  # pieces that no row ends in
    EVEN: tl.constexpr,  # every tile has all its rows
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Rows short enough to be held whole, ROWS at a time in CHUNKS pieces; a program takes every P-th tile of rows.

    Where a sum is wanted, each program leaves one number: always of the same rows, in the same order. Targets are asked
    for one tile ahead: the logit they name is then asked for together with the row.
    """
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    col = tl.arange(0, BLOCK)[None, :]
    losses = tl.zeros([ROWS, 1], tl.float32)
    counts = tl.zeros([ROWS, 1], tl.float32)
    ahead = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    coming = tl.load(target_ptr + ahead, mask=ahead < rows, other=ignore_index).to(tl.int64)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        there = (row < rows) | EVEN
        start = row.to(tl.int64) * x_stride
        x_row = x_ptr + start
        begin = x_row
        lead = tl.zeros_like(row)
        if UNALIGNED:
            begin = x_ptr + start // VECTOR * VECTOR
            lead = (start % VECTOR).to(tl.int32)
        end = lead + cols
        target = coming
        known = (target >= 0) & (target < cols) & there
        picked = tl.load(x_row + target, mask=known, other=0.0).to(tl.float32)
        ahead = row + tl.num_programs(0) * ROWS
        coming = tl.load(target_ptr + ahead, mask=ahead < rows, other=ignore_index).to(tl.int64)
        held = ()
        highest = tl.full([ROWS, BLOCK], LOWEST, tl.float32)
        level = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            at = i * BLOCK + col
            if i < FULL and EVEN:
                x = tl.load(begin + at, eviction_policy=POLICY)
            else:
                inside = there & (at >= 0)
                if i >= FULL:
                    inside = there & (at // VECTOR * VECTOR < end if UNALIGNED else at < cols)
                x = tl.load(begin + at, mask=inside, other=float("-inf"), eviction_policy=POLICY)
            x = x.to(tl.float32)
            if UNALIGNED and (i == 0 or i >= FULL):
                x = tl.where((at >= lead) & (at < end), x, float("-inf"))
            highest = tl.maximum(highest, x)
            if SMOOTH:
                level += tl.where(there & (at >= lead) & (at < end), x, 0.0)
            held = held + (x,)
        top = tl.max(highest, axis=1, keep_dims=True)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            total += power(held[i], top, NARROW)
        log_sum = tl.log(tl.sum(total, axis=1, keep_dims=True))
        mean = tl.sum(level, axis=1, keep_dims=True) / cols
        loss = loss_of(picked, top, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH)
        counted = (target != ignore_index) & there
        loss = tl.where(counted, loss, 0.0)
        tl.store(lse_ptr + row, top, mask=there)
        tl.store(lse_ptr + rows + row, log_sum, mask=there)
        if SUM:
            losses += loss
            counts += counted.to(tl.float32)
        else:
            tl.store(loss_ptr + row, loss, mask=there)
    let_next_start(EARLY)
    if SUM:
        tl.store(loss_ptr + tl.program_id(0), tl.sum(tl.sum(losses, axis=1), axis=0))
        tl.store(count_ptr + tl.program_id(0), tl.sum(tl.sum(counts, axis=1), axis=0))


@jit
def cross_entropy_finish(
    loss_ptr,  # [P] fp32: losses of rows, or of programs
    count_ptr,  # [P] fp32: rows that counted in each
    out_ptr,  # [] loss
    weight_ptr,  # [] fp32: counted rows for a mean, 1 for a sum; what the backward pass divides by
    num,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Losses summed by one program in a fixed order, so the result has the same bits every time."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    wait_for_last(DEPENDENT)
    for start in range(0, num, BLOCK):
        total += tl.load(loss_ptr + start + at, mask=start + at < num, other=0.0)
        if MEAN:
            count += tl.load(count_ptr + start + at, mask=start + at < num, other=0.0)
    loss = tl.sum(total, axis=0)
    weight = 1.0
    if MEAN:
        weight = tl.sum(count, axis=0)
        loss = tl.div_rn(loss, weight)
    tl.store(out_ptr, loss.to(out_ptr.dtype.element_ty))
    tl.store(weight_ptr, weight)


@jit
def row_numbers(target_ptr, lse_ptr, grad_ptr, weight_ptr, row, rows, cols, ignore_index, PER_ROW: tl.constexpr):
    """What a row's gradient needs: its lse in two parts, its target's column, its factor, and whether it counts.

    Divided by the rows that count, not multiplied with what their reciprocal is rounded to: one rounding more, of every
    gradient alike, was as large as all others together.
    """
    target = tl.load(target_ptr + row).to(tl.int64)
    top = tl.load(lse_ptr + row)
    log_sum = tl.load(lse_ptr + rows + row)
    if PER_ROW:
        scale = tl.load(grad_ptr + row).to(tl.float32)
    else:
        scale = tl.div_rn(tl.load(grad_ptr).to(tl.float32), tl.load(weight_ptr))
    hit = tl.where((target >= 0) & (target < cols), target, -1).to(tl.int32)
    return top, log_sum, hit, scale, target != ignore_index


@jit
def gradient_of(x, c, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr):
    """scale · (softmax·(1 + 2·z_weight·lse) − target), and zero where the row does not count."""
    lse = top + log_sum
    if x_ptr.dtype.element_ty.primitive_bitwidth == 16:
        e = tl.exp2(x * LOG2E - lse * LOG2E)  # one multiply-add, as right as 16 bits are
    else:
        e = tl.exp((x - top) - log_sum)
    p = e * (1.0 + 2.0 * z_weight * lse) - smoothing / cols
    p = tl.where(c == hit, p - (1.0 - smoothing), p)
    return tl.where(counts, p * scale, 0.0)


@jit
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
    x = tl.load(x_ptr + row * x_stride + c, mask=c < cols, other=float("-inf")).to(tl.float32)
    top, log_sum, hit, scale, counts = row_numbers(
        target_ptr, lse_ptr, grad_ptr, weight_ptr, row, rows, cols, ignore_index, PER_ROW
    )
    dx = gradient_of(x, c, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
    tl.store(dx_ptr + row * dx_stride + c, dx.to(dx_ptr.dtype.element_ty), mask=c < cols)


@jit
def cross_entropy_backward_rows(
    x_ptr,  # [N, V], rows x_stride apart
    target_ptr,  # [N]
    lse_ptr,  # [2, N] fp32
    grad_ptr,  # [] or [N]: gradient of the loss
    weight_ptr,  # [] fp32
    dx_ptr,  # [N, V], dense; may be x itself
    rows,
    cols,
    x_stride,
    ignore_index,
    smoothing,
    z_weight,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least a row
    UNALIGNED: tl.constexpr,  # rows are not aligned to VECTOR elements
    VECTOR: tl.constexpr,
):
    """The same for short rows, several a program. Where they are unaligned, whole accesses first, then what is
    left of the first and the last access of each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    there = row < rows
    lead = 0
    if UNALIGNED:
        lead = row_lead(row, cols, VECTOR)
    end = lead + cols
    x_at = x_ptr + row_start(row, x_stride, UNALIGNED, VECTOR)
    dx_at = dx_ptr + row_start(row, cols, UNALIGNED, VECTOR)
    first = col // VECTOR * VECTOR
    whole = there & (first >= lead) & (first + VECTOR <= end) if UNALIGNED else there & (col < cols)
    x = tl.load(x_at + col, mask=whole, other=0.0).to(tl.float32)
    top, log_sum, hit, scale, counts = row_numbers(
        target_ptr, lse_ptr, grad_ptr, weight_ptr, tl.minimum(row, rows - 1), rows, cols, ignore_index, PER_ROW
    )
    dx = gradient_of(x, col - lead, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
    if UNALIGNED:
        k = tl.arange(0, 2 * VECTOR)[None, :] + tl.zeros([ROWS, 2 * VECTOR], tl.int32)
        at = tl.where(k < VECTOR, k, end // VECTOR * VECTOR + k - VECTOR)
        own = there & (at >= lead) & (at < end) & ((k >= VECTOR) | (lead > 0))
        rest = tl.load(x_at + at, mask=own, other=0.0).to(tl.float32)
        rest = gradient_of(rest, at - lead, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
        tl.store(dx_at + at, rest.to(dx_ptr.dtype.element_ty), mask=own)
    tl.store(dx_at + col, dx.to(dx_ptr.dtype.element_ty), mask=whole)


@jit
def cross_entropy_backward_ends(
    x_ptr,  # [N, V], rows x_stride apart
    target_ptr,  # [N]
    lse_ptr,  # [2, N] fp32
    grad_ptr,  # [] or [N]: gradient of the loss
    weight_ptr,  # [] fp32
    dx_ptr,  # [N, V], dense; may be x itself
    rows,
    cols,
    x_stride,
    ignore_index,
    smoothing,
    z_weight,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,  # at least a row's whole accesses
    VECTOR: tl.constexpr,
):
    """The same for short unaligned rows, a program each: whole accesses, a few elements apart."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    lead, whole = whole_part(row * cols, cols, VECTOR)
    end_at, own = ends_of(lead, whole, cols, VECTOR)
    ends = tl.load(x_ptr + row * x_stride + end_at, mask=own, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + (row * x_stride + lead) // VECTOR * VECTOR + c, mask=c < whole, other=0.0).to(tl.float32)
    top, log_sum, hit, scale, counts = row_numbers(
        target_ptr, lse_ptr, grad_ptr, weight_ptr, row, rows, cols, ignore_index, PER_ROW
    )
    dx = gradient_of(x, c, top, log_sum, hit - lead, scale, counts, cols, smoothing, z_weight, x_ptr)
    to = dx_ptr + (row * cols + lead) // VECTOR * VECTOR + c
    tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=c < whole)
    dx = gradient_of(ends, end_at, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
    tl.store(dx_ptr + row * cols + end_at, dx.to(dx_ptr.dtype.element_ty), mask=own)


@jit
def cross_entropy_backward_flat(
    x_ptr,  # [N, V], dense
    target_ptr,  # [N]
    lse_ptr,  # [2, N] fp32
    grad_ptr,  # [] or [N]: gradient of the loss
    weight_ptr,  # [] fp32
    dx_ptr,  # [N, V], dense; may be x itself
    rows,
    cols,
    ignore_index,
    smoothing,
    z_weight,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,  # at most V: a block lies in two rows at most
    VECTOR: tl.constexpr,
):
    """The same for unaligned rows: one stream of elements, of which a block may end a row."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = start // cols
    at = tl.arange(0, BLOCK)
    access = at // VECTOR * VECTOR
    c = (start - row * cols).to(tl.int32) + at
    left = tl.minimum(rows.to(tl.int64) * cols - start, BLOCK).to(tl.int32)
    x = tl.load(x_ptr + start + at, mask=access < left, other=0.0).to(tl.float32)
    top, log_sum, hit, scale, counts = row_numbers(
        target_ptr, lse_ptr, grad_ptr, weight_ptr, row, rows, cols, ignore_index, PER_ROW
    )
    dx = gradient_of(x, c, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
    if (row + 1) * cols - start < BLOCK:
        top, log_sum, hit, scale, counts = row_numbers(
            target_ptr, lse_ptr, grad_ptr, weight_ptr, tl.minimum(row + 1, rows - 1), rows, cols, ignore_index, PER_ROW
        )
        after = gradient_of(x, c - cols, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
        dx = tl.where(c >= cols, after, dx)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + start + at, dx, mask=access + VECTOR <= left)
    if left % VECTOR > 0:  # the last row's last elements
        rest = left // VECTOR * VECTOR + tl.arange(0, VECTOR)
        c_rest = (start + rest - (rows.to(tl.int64) - 1) * cols).to(tl.int32)
        x_rest = tl.load(x_ptr + start + rest, mask=rest < left, other=0.0).to(tl.float32)
        top, log_sum, hit, scale, counts = row_numbers(
            target_ptr, lse_ptr, grad_ptr, weight_ptr, rows - 1, rows, cols, ignore_index, PER_ROW
        )
        dx_rest = gradient_of(x_rest, c_rest, top, log_sum, hit, scale, counts, cols, smoothing, z_weight, x_ptr)
        tl.store(dx_ptr + start + rest, dx_rest.to(dx_ptr.dtype.element_ty), mask=rest < left)
