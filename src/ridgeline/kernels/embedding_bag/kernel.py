"""Embedding bags on the device: rows gathered and summed; gradients summed by sorted row, and applied where they land.

Shapes: R rows of all tables together, D columns, T tables, B bags of each, N indices, C chunks of sorted indices.
Bags are numbered table by table. An index outside the tables gives NaN in its bag and no gradient.
"""

from __future__ import annotations

import triton.language as tl

from ridgeline.kernels.function import jit


@jit
def bounds(offsets_ptr, bag, inside, num_offsets, num_indices):
    """Where a bag's indices start and end; the last offset may be left out."""
    start = tl.load(offsets_ptr + bag, mask=inside, other=0).to(tl.int64)
    closed = inside & (bag + 1 < num_offsets)
    end = tl.load(offsets_ptr + bag + 1, mask=closed, other=0).to(tl.int64)
    return start, tl.where(closed, end, tl.where(inside, num_indices, 0).to(tl.int64))


@jit
def embedding_bag_forward(
    weight_ptr,  # [R, D]
    scale_ptr,  # [R, 2] fp32: scale and shift of each row of codes
    indices_ptr,  # [N]
    offsets_ptr,  # [T·B] or one more
    starts_ptr,  # [T] i64: first row of each table
    factor_ptr,  # [N] weights of the samples
    out_ptr,  # [B, T·D]
    num_rows,
    dim,
    num_bags,
    batch,
    num_offsets,
    num_indices,
    padding,
    MANY: tl.constexpr,
    CODES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    EXACT: tl.constexpr,
    BAGS: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
):
    """A program sums DIM columns of BAGS bags, AHEAD rows of each at a time: a warp a bag, so that nothing crosses
    warps.

    LATE: every place of the AHEAD has a sum of its own to the end, where warps meet once; the next turn's indices are
    asked for before this turn's rows, so that a turn waits for one answer of memory instead of two.
    """
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = bag < num_bags
    start, end = bounds(offsets_ptr, bag, inside, num_offsets, num_indices)
    table = bag // batch
    base = tl.zeros([BAGS], tl.int64)
    if MANY:
        base = tl.load(starts_ptr + table, mask=inside, other=0)
    first = tl.program_id(1) * DIM
    col = first + tl.arange(0, DIM)[None, None, :]
    place = tl.arange(0, AHEAD)[None, :]
    acc = tl.zeros([BAGS, AHEAD if LATE else 1, DIM], tl.float32)
    count = tl.zeros([BAGS], tl.float32)
    at = start[:, None] + place
    index = tl.load(indices_ptr + at, mask=at < end[:, None], other=0).to(tl.int64) if LATE else at
    for step in range(0, tl.max(end - start, axis=0), AHEAD):
        at = start[:, None] + step + place
        there = at < end[:, None]
        following = index
        if LATE:
            following = tl.load(indices_ptr + at + AHEAD, mask=at + AHEAD < end[:, None], other=0).to(tl.int64)
        else:
            index = tl.load(indices_ptr + at, mask=there, other=0).to(tl.int64)
        if PADDED:
            there = there & (index != padding)
        row = index + base[:, None]
        known = there & (index >= 0) & (row < num_rows)
        mask = known[:, :, None] if EXACT else known[:, :, None] & (col < dim)
        x = tl.load(weight_ptr + row[:, :, None] * dim + col, mask=mask, other=0.0).to(tl.float32)
        if CODES:
            scale = tl.load(scale_ptr + 2 * row, mask=known, other=0.0)
            shift = tl.load(scale_ptr + 2 * row + 1, mask=known, other=0.0)
            x = x * scale[:, :, None] + shift[:, :, None]
        if WEIGHTED:
            x *= tl.load(factor_ptr + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
        x += tl.where(there & ~known, float("nan"), 0.0)[:, :, None]
        acc += x if LATE else tl.sum(x, axis=1)[:, None, :]
        if MEAN:
            count += tl.sum(there.to(tl.float32), axis=1)
        index = following
    acc = tl.sum(acc, axis=1)
    if MEAN:
        acc = acc / tl.maximum(count, 1.0)[:, None]
    tables = num_bags // batch
    own = first + tl.arange(0, DIM)[None, :]
    to = ((bag % batch).to(tl.int64) * tables + table)[:, None] * dim + own
    mask = inside[:, None] if EXACT else inside[:, None] & (own < dim)
    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def keyed(
    indices_ptr, offsets_ptr, starts_ptr, factor_ptr, key_ptr, bag_ptr, share_ptr, num_rows, num_bags, batch,
    num_offsets, num_indices, padding, MANY: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
    PADDED: tl.constexpr, BAGS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each index's row, bag and share."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = bag < num_bags
    start, end = bounds(offsets_ptr, bag, inside, num_offsets, num_indices)
    base = tl.zeros([BAGS], tl.int64)
    if MANY:
        base = tl.load(starts_ptr + bag // batch, mask=inside, other=0)
    longest = tl.max(end - start, axis=0)
    count = tl.zeros([BAGS], tl.float32)
    if MEAN:
        count = (end - start).to(tl.float32)
        if PADDED:
            count = tl.zeros([BAGS], tl.float32)
            for step in range(0, longest, AHEAD):
                at = start[:, None] + step + tl.arange(0, AHEAD)[None, :]
                there = at < end[:, None]
                index = tl.load(indices_ptr + at, mask=there, other=0).to(tl.int64)
                count += tl.sum((there & (index != padding)).to(tl.float32), axis=1)
    for step in range(0, longest, AHEAD):
        at = start[:, None] + step + tl.arange(0, AHEAD)[None, :]
        there = at < end[:, None]
        index = tl.load(indices_ptr + at, mask=there, other=0).to(tl.int64)
        row = index + base[:, None]
        known = (index >= 0) & (row < num_rows)
        if PADDED:
            known = known & (index != padding)
        tl.store(key_ptr + at, tl.where(known, row, num_rows).to(key_ptr.dtype.element_ty), mask=there)
        tl.store(bag_ptr + at, bag[:, None] + tl.zeros([BAGS, AHEAD], tl.int32), mask=there)
        if WEIGHTED or MEAN:
            share = tl.zeros([BAGS, AHEAD], tl.float32) + 1.0
            if WEIGHTED:
                share = tl.load(factor_ptr + at, mask=there, other=0.0).to(tl.float32)
            if MEAN:
                share = share / tl.maximum(count, 1.0)[:, None]
            tl.store(share_ptr + at, share, mask=there)


@jit
def embedding_keys(
    indices_ptr,  # [N]
    offsets_ptr,
    starts_ptr,  # [T] i64
    factor_ptr,  # [N]
    key_ptr,  # [N] row among all tables' rows; R for what has no row
    bag_ptr,  # [N] i32
    share_ptr,  # [N] fp32: what the bag's gradient is multiplied by
    out_ptr,  # [R·D] the gradient, where there is one
    num_rows,
    num_bags,
    batch,
    num_offsets,
    num_indices,
    padding,
    programs,
    size,
    MANY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    PADDED: tl.constexpr,
    BAGS: tl.constexpr,
    AHEAD: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Each index's row, bag and share, as the backward pass sorts and uses them; zeros for every row that no index
    names, CLEARED numbers a program, by the programs after those."""
    block = tl.program_id(0).to(tl.int64) - programs
    if block < 0:
        keyed(
            indices_ptr, offsets_ptr, starts_ptr, factor_ptr, key_ptr, bag_ptr, share_ptr, num_rows, num_bags, batch,
            num_offsets, num_indices, padding, MANY, WEIGHTED, MEAN, PADDED, BAGS, AHEAD,
        )  # fmt: skip
    else:
        if CLEARED > 0:
            at = block * CLEARED + tl.arange(0, CLEARED)
            tl.store(out_ptr + at, tl.zeros([CLEARED], out_ptr.dtype.element_ty), mask=at < size)


@jit
def applied(
    g, row, w, weight_ptr, first_ptr, second_ptr, m, v, s, col, mask, dim, lr, eps, decay, keep1, keep2, add1, add2,
    fix1, fix2, OPTIMIZER: tl.constexpr,
):  # fmt: skip
    """One row's summed gradient, stored (0) or applied: SGD (1), row-wise Adagrad (2), Adam (3)."""
    to = weight_ptr + row * dim + col
    if OPTIMIZER == 0:
        tl.store(to, g.to(weight_ptr.dtype.element_ty), mask=mask)
    else:
        g += decay * w
        if OPTIMIZER == 1:
            w -= lr * g
        if OPTIMIZER == 2:
            s += tl.sum(tl.where(mask, g * g, 0.0), axis=0) / dim
            tl.store(first_ptr + row, s)
            w -= lr * tl.div_rn(g, tl.sqrt_rn(s) + eps)
        if OPTIMIZER == 3:
            m = m * keep1 + g * add1
            v = v * keep2 + g * g * add2
            tl.store(first_ptr + row * dim + col, m, mask=mask)
            tl.store(second_ptr + row * dim + col, v, mask=mask)
            w -= lr * tl.div_rn(m * fix1, tl.sqrt_rn(v * fix2) + eps)
        tl.store(to, w.to(weight_ptr.dtype.element_ty), mask=mask)


@jit
def fixes(step_ptr, log2_keep1, log2_keep2, OPTIMIZER: tl.constexpr):
    """Adam's bias corrections, in float64 as long as it matters."""
    fix1 = 1.0
    fix2 = 1.0
    add1 = 0.0
    add2 = 0.0
    if OPTIMIZER == 3:
        step = tl.load(step_ptr).to(tl.float64)
        fix1 = (1.0 / (1.0 - tl.exp2(step * log2_keep1))).to(tl.float32)
        fix2 = (1.0 / (1.0 - tl.exp2(step * log2_keep2))).to(tl.float32)
        one = 0.0 * step + 1.0  # in float64: 1 - 0.999 in float32 is off by thirteen millionths of itself
        add1 = (1.0 - tl.exp2(one * log2_keep1)).to(tl.float32)
        add2 = (1.0 - tl.exp2(one * log2_keep2)).to(tl.float32)
    return fix1, fix2, add1, add2


@jit
def embedding_update(
    key_ptr,  # [N] sorted
    order_ptr,  # [N] where each sorted index stood, or its bag
    bag_ptr,  # [N] i32
    share_ptr,  # [N] fp32
    grad_ptr,  # [B, T·D]
    weight_ptr,  # [R, D]: what is updated, or the gradient that is written
    first_ptr,  # Adagrad [R] fp32; Adam [R, D] fp32
    second_ptr,  # Adam [R, D] fp32
    part_ptr,  # [C, 2, D] fp32: sums of rows that reach into a chunk, and out of it
    step_ptr,  # [] fp32
    num_indices,
    num_rows,
    dim,
    batch,
    tables,
    length,
    lr,
    eps,
    decay,
    keep1,
    keep2,
    log2_keep1,
    log2_keep2,
    OPTIMIZER: tl.constexpr,
    SHARED: tl.constexpr,
    DIRECT: tl.constexpr,
    DIM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program walks through a chunk of sorted indices, sums what belongs to one row and applies it.

    Rows that cross the ends of chunks leave their sums in ``part``, so that every sum has one fixed order.
    """
    chunk = tl.program_id(0).to(tl.int64)
    begin = chunk * length
    end = tl.minimum(begin + length, num_indices)
    col = tl.arange(0, DIM)
    fits = col < dim
    fix1, fix2, add1, add2 = fixes(step_ptr, log2_keep1, log2_keep2, OPTIMIZER)
    before = tl.load(key_ptr + begin - 1, mask=begin > 0, other=-1).to(tl.int64)
    acc = tl.zeros([DIM], tl.float32)
    for i in range(begin, end, AHEAD):
        grads = ()
        rows = ()
        lasts = ()
        weights = ()
        ms = ()
        vs = ()
        ss = ()
        for u in tl.static_range(AHEAD):
            at = i + u
            inside = at < end
            row = tl.load(key_ptr + at, mask=inside, other=num_rows).to(tl.int64)
            after = tl.load(key_ptr + at + 1, mask=at + 1 < num_indices, other=-1).to(tl.int64)
            place = tl.load(order_ptr + at, mask=inside, other=0)
            valid = inside & (row < num_rows)
            bag = place.to(tl.int32) if DIRECT else tl.load(bag_ptr + place, mask=valid, other=0)
            source = (bag % batch).to(tl.int64) * tables + bag // batch
            g = tl.load(grad_ptr + source * dim + col, mask=fits & valid, other=0.0).to(tl.float32)
            if SHARED:
                g *= tl.load(share_ptr + place, mask=valid, other=0.0)
            last = valid & (row != after)
            whole = last & (row != before)
            w = g
            m = g
            v = g
            s = 0.0
            if OPTIMIZER > 0:
                w = tl.load(weight_ptr + row * dim + col, mask=fits & whole, other=0.0).to(tl.float32)
            if OPTIMIZER == 2:
                s = tl.load(first_ptr + row, mask=whole, other=0.0)
            if OPTIMIZER == 3:
                m = tl.load(first_ptr + row * dim + col, mask=fits & whole, other=0.0)
                v = tl.load(second_ptr + row * dim + col, mask=fits & whole, other=0.0)
            grads = grads + (g,)
            rows = rows + (row,)
            lasts = lasts + (last,)
            weights = weights + (w,)
            ms = ms + (m,)
            vs = vs + (v,)
            ss = ss + (s,)
        for u in tl.static_range(AHEAD):
            acc += grads[u]
            row = rows[u]
            if lasts[u]:
                if row == before:
                    tl.store(part_ptr + chunk * 2 * dim + col, acc, mask=fits)
                else:
                    applied(
                        acc, row, weights[u], weight_ptr, first_ptr, second_ptr, ms[u], vs[u], ss[u], col, fits, dim,
                        lr, eps, decay, keep1, keep2, add1, add2, fix1, fix2, OPTIMIZER,
                    )  # fmt: skip
                acc = tl.zeros([DIM], tl.float32)
    row = tl.load(key_ptr + end - 1).to(tl.int64)
    after = tl.load(key_ptr + end, mask=end < num_indices, other=-1).to(tl.int64)
    if row == after:
        half = tl.where(row == before, 0, 1)
        tl.store(part_ptr + (chunk * 2 + half) * dim + col, acc, mask=fits)


@jit
def embedding_merge(
    key_ptr,
    weight_ptr,
    first_ptr,
    second_ptr,
    part_ptr,
    step_ptr,
    num_indices,
    num_rows,
    dim,
    length,
    lr,
    eps,
    decay,
    keep1,
    keep2,
    log2_keep1,
    log2_keep2,
    OPTIMIZER: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The rows that began in a chunk and went on after it: their parts summed in order, then applied."""
    chunk = tl.program_id(0).to(tl.int64)
    begin = chunk * length
    end = tl.minimum(begin + length, num_indices)
    row = tl.load(key_ptr + end - 1).to(tl.int64)
    after = tl.load(key_ptr + end, mask=end < num_indices, other=-1).to(tl.int64)
    before = tl.load(key_ptr + begin - 1, mask=begin > 0, other=-1).to(tl.int64)
    if (row == after) & (row != before) & (row < num_rows):
        last = chunk + 1  # the last chunk that starts with this row: steps that double while it does, then halve
        step = tl.cast(1, tl.int64)
        growing = step
        while step > 0:
            at = (last + step) * length
            same = tl.load(key_ptr + at, mask=at < num_indices, other=-1).to(tl.int64) == row
            last = tl.where(same, last + step, last)
            growing = tl.where(same, growing, 0)
            step = tl.where(growing > 0, step * 2, step // 2)
        col = tl.arange(0, DIM)
        fits = col < dim
        part = tl.arange(0, PARTS)
        acc = tl.zeros([PARTS, DIM], tl.float32)
        for start in range(chunk + 1, last + 1, PARTS):
            at = start + part
            inside = (at <= last)[:, None] & fits[None, :]
            acc += tl.load(part_ptr + (at * 2 * dim)[:, None] + col[None, :], mask=inside, other=0.0)
        g = tl.load(part_ptr + (chunk * 2 + 1) * dim + col, mask=fits, other=0.0) + tl.sum(acc, axis=0)
        fix1, fix2, add1, add2 = fixes(step_ptr, log2_keep1, log2_keep2, OPTIMIZER)
        w = g
        m = g
        v = g
        s = 0.0
        if OPTIMIZER > 0:
            w = tl.load(weight_ptr + row * dim + col, mask=fits, other=0.0).to(tl.float32)
        if OPTIMIZER == 2:
            s = tl.load(first_ptr + row)
        if OPTIMIZER == 3:
            m = tl.load(first_ptr + row * dim + col, mask=fits, other=0.0)
            v = tl.load(second_ptr + row * dim + col, mask=fits, other=0.0)
        applied(
            g, row, w, weight_ptr, first_ptr, second_ptr, m, v, s, col, fits, dim, lr, eps, decay, keep1, keep2, add1,
            add2, fix1,
            fix2, OPTIMIZER,
        )  # fmt: skip


@jit
def embedding_weight_grad(
    weight_ptr,  # [R, D]
    grad_ptr,  # [B, T·D]
    key_ptr,  # [N] rows, in the order of the indices
    bag_ptr,  # [N] i32
    out_ptr,  # [N]
    num_indices,
    num_rows,
    dim,
    batch,
    tables,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a sample's weight: its row times its bag's gradient."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, DIM)[None, :]
    inside = at < num_indices
    row = tl.load(key_ptr + at, mask=inside, other=num_rows).to(tl.int64)
    valid = (inside & (row < num_rows))[:, None] & (col < dim)
    bag = tl.load(bag_ptr + at, mask=inside, other=0)
    source = (bag % batch).to(tl.int64) * tables + bag // batch
    w = tl.load(weight_ptr + row[:, None] * dim + col, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + source[:, None] * dim + col, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, tl.sum(w * g, axis=1).to(out_ptr.dtype.element_ty), mask=inside)
