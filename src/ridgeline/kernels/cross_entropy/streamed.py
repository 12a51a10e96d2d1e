"""Cross-entropy of many rows on Hopper, in Gluon: a warp a row, logits on their way long before it comes to them.

Shapes: N rows, V classes. A program is one warp and takes every P-th row, in chunks of 32 lanes · ACCESSES · 8 logits
of 16 bits. Copies run SLOTS chunks ahead, across the ends of rows: reading never stops. A lane has the maximum and the
sum of powers of what it saw itself; lanes meet once a row, and no warp ever waits for another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ridgeline.kernels.stream import halves, higher_bf16, higher_fp16, let_next_start

LOWEST = gl.constexpr(-2.0e38)  # still a number when multiplied by LOG2_E
LOG2_E = gl.constexpr(1.4426950408889634)
WORDS = gl.constexpr(4)  # of an access of 16 bytes
BY_ACCESS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1]))
"""Accesses of 32 lanes side by side, so that lanes meet no other's bank."""


@gluon.jit
def highest_of(words, BF16: gl.constexpr):
    """The largest number that a lane has, two compared at a time."""
    if BF16:
        low, high = halves(gl.reduce(gl.reduce(words, 2, higher_bf16), 1, higher_bf16), BF16)
    else:
        low, high = halves(gl.reduce(gl.reduce(words, 2, higher_fp16), 1, higher_fp16), BF16)
    return gl.maximum(low, high)


@gluon.jit
def in_lane(x):
    """The sum of what a lane has."""
    return gl.sum(gl.sum(x, axis=2), axis=1)


@gluon.jit
def ask(x_ptr, smem, slot, row, chunk, rows, width, step, c, access, CHUNK: gl.constexpr):
    """Asks for one chunk of a row; past the end of it, and of all rows, for nothing."""
    at = x_ptr + row.to(gl.int64) * step + chunk * CHUNK
    there = access < gl.where(row < rows, width - chunk * CHUNK, 0)
    async_copy.async_copy_global_to_shared(smem.index(slot), at + c, mask=there)
    async_copy.commit_group()


@gluon.jit
def further(row, chunk, chunks, num_programs):
    """Where the chunk after this one is: in the program's next row where this one ends."""
    ends = chunk + 1 == chunks
    return gl.where(ends, row + num_programs, row), gl.where(ends, 0, chunk + 1)


@gluon.jit
def loss_of(picked, top, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH: gl.constexpr):
    """As kernel.py has it."""
    loss = (top - picked) + log_sum
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - mean) + log_sum)
    lse = top + log_sum
    loss += z_weight * lse * lse
    return gl.where((target >= 0) & (target < cols), loss, float("nan"))


@gluon.jit
def cross_entropy_walked(
    x_ptr,  # [N, V] of 16 bits, rows x_stride apart
    target_ptr,  # [N]
    loss_ptr,  # [N] a row, or [P] the sum of a program's rows
    count_ptr,  # [N] or [P]: rows that are not ignored
    lse_ptr,  # [2, N] fp32
    rows,
    cols,
    x_stride,
    ignore_index,
    smoothing,
    z_weight,
    SMOOTH: gl.constexpr,
    SUM: gl.constexpr,
    ACCESSES: gl.constexpr,
    SLOTS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Row by row: maximum and sum, and at its end its loss. Where a sum is wanted, each program leaves one number."""
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    CHUNK: gl.constexpr = 32 * ACCESSES * WORDS
    L: gl.constexpr = gl.BlockedLayout([1, ACCESSES, WORDS], [32, 1, 1], [1, 1, 1], [2, 1, 0])
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    smem = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, ACCESSES, WORDS], BY_ACCESS)
    word_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    lane = gl.arange(0, 32, LANES).expand_dims(1).expand_dims(2)
    piece = gl.arange(0, ACCESSES, gl.SliceLayout(0, gl.SliceLayout(2, L))).expand_dims(0).expand_dims(2)
    access = (piece * 32 + lane) * WORDS
    c = access + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, L))).expand_dims(0).expand_dims(0)
    access = access + gl.zeros([32, ACCESSES, WORDS], gl.int32, L)
    width = cols // 2
    step = x_stride // 2
    chunks = (width + CHUNK - 1) // CHUNK
    num_programs = gl.num_programs(0)
    first = gl.program_id(0)
    ahead_row = first
    ahead_chunk = first * 0
    for slot in gl.static_range(SLOTS):
        ask(word_ptr, smem, slot, ahead_row, ahead_chunk, rows, width, step, c, access, CHUNK)
        ahead_row, ahead_chunk = further(ahead_row, ahead_chunk, chunks, num_programs)
    losses = 0.0
    counts = 0.0
    slot = first * 0
    coming = gl.load(target_ptr + first, mask=first < rows, other=ignore_index).to(gl.int64)
    for row in range(first, rows, num_programs):
        target = coming
        known = (target >= 0) & (target < cols)
        picked = gl.load(x_ptr + row.to(gl.int64) * x_stride + target, mask=known, other=0.0).to(gl.float32)
        after = row + num_programs
        coming = gl.load(target_ptr + after, mask=after < rows, other=ignore_index).to(gl.int64)
        top = gl.full([32], LOWEST, gl.float32, LANES)
        total = gl.zeros([32], gl.float32, LANES)
        level = gl.zeros([32], gl.float32, LANES)
        for chunk in range(chunks):
            async_copy.wait_group(SLOTS - 1)
            words = smem.index(slot).load(L)
            ask(word_ptr, smem, slot, ahead_row, ahead_chunk, rows, width, step, c, access, CHUNK)
            ahead_row, ahead_chunk = further(ahead_row, ahead_chunk, chunks, num_programs)
            slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)
            if chunk + 1 == chunks:
                inside = access < width - chunk * CHUNK
                if SMOOTH:
                    low, high = halves(gl.where(inside, words, 0), BF16)
                    level += in_lane(low + high)
                words = gl.where(inside, words, -8323200 if BF16 else -67044352)  # two of minus infinity
            elif SMOOTH:
                low, high = halves(words, BF16)
                level += in_lane(low + high)
            best = gl.maximum(top, highest_of(words, BF16))
            low, high = halves(words, BF16)
            base = (best * LOG2_E).expand_dims(1).expand_dims(2)
            powers = gl.exp2(low * LOG2_E - base) + gl.exp2(high * LOG2_E - base)
            total = total * gl.exp2((top - best) * LOG2_E) + in_lane(powers)
            top = best
        best = gl.max(top, axis=0)
        log_sum = gl.log(gl.sum(total * gl.exp2((top - best) * LOG2_E), axis=0))
        mean = gl.sum(level, axis=0) / cols
        loss = loss_of(picked, best, log_sum, mean, target, cols, smoothing, z_weight, SMOOTH)
        counted = target != ignore_index
        loss = gl.where(counted, loss, 0.0)
        gl.store(lse_ptr + row, best)
        gl.store(lse_ptr + rows + row, log_sum)
        if SUM:
            losses += loss
            counts += gl.where(counted, 1.0, 0.0)
        else:
            gl.store(loss_ptr + row, loss)
    let_next_start(EARLY)
    if SUM:
        gl.store(loss_ptr + first, losses)
        gl.store(count_ptr + first, counts)
