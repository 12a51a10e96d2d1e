"""Cross-entropy of 16-bit rows that a program holds as they came, two logits a word, in Gluon.

Shapes as in kernel.py; a row lies in CHUNKS pieces of BLOCK logits, all of them asked for at once. While memory brings
a logit, an SM issues fourteen instructions a lane: largest ones are found two at a time, and a logit becomes
float32 once, for its power.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from ridgeline.kernels.function import gluon_jit
from ridgeline.kernels.row_stream import halves, higher_bf16, higher_fp16, let_next_start

LOWEST = gl.constexpr(-2.0e38)  # still a number when multiplied by LOG2_E
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon_jit
def row_words(
    x_at, access, low, end, CHUNKS: gl.constexpr, PIECE: gl.constexpr, LINES: gl.constexpr, FULL: gl.constexpr,
    LOWEST_TWO: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """The pieces of a row, two of −inf a word where they are not the row's."""
    held = ()
    for i in gl.static_range(CHUNKS):
        if i < FULL and (i > 0 or not LINES):
            held = held + (gl.load(x_at + i * PIECE, eviction_policy=POLICY),)  # type: ignore[assignment]
        else:
            there = access < end - i * PIECE
            if LINES and i == 0:
                there = there & (access >= low)
            words = gl.load(x_at + i * PIECE, mask=there, other=LOWEST_TWO, eviction_policy=POLICY)
            held = held + (words,)  # type: ignore[assignment]
    return held


@gluon_jit
def cross_entropy_packed(
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
    CHUNKS: gl.constexpr,
    BLOCK: gl.constexpr,
    FULL: gl.constexpr,  # pieces that no row ends in
    LINES: gl.constexpr,  # rows start inside lines of the L2, and reading starts with the line
    EARLY: gl.constexpr,
    POLICY: gl.constexpr,  # how long the L2 keeps what is read
):
    """A program takes every P-th row. Targets are asked for a row ahead, what they name together with the row."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    BF16: gl.constexpr = x_ptr.dtype.element_ty == gl.bfloat16
    LOWEST_TWO: gl.constexpr = -8323200 if BF16 else -67044352  # two of −inf
    L: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    PIECE: gl.constexpr = BLOCK // 2
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    c = gl.arange(0, PIECE, L)
    access = c // 4 * 4
    x_words = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    losses = (pid * 0).to(gl.float32)
    counts = (step * 0).to(gl.float32)
    coming = gl.load(target_ptr + pid).to(gl.int64)
    for row in range(pid, rows, step):
        start = row.to(gl.int64) * x_stride  # type: ignore[attr-defined]
        low = 0
        begin = start // 8 * 4
        if LINES:
            low = (start % 64 // 8 * 4).to(gl.int32)
            begin = start // 64 * 32
        target = coming
        known = (target >= 0) & (target < cols)
        picked = gl.load(x_ptr + start + target, mask=known, other=0.0).to(gl.float32)
        held = row_words(
            x_words + begin + c, access, low, low + cols // 2, CHUNKS, PIECE, LINES, FULL, LOWEST_TWO, POLICY
        )
        coming = gl.load(target_ptr + gl.minimum(row + step, rows - 1)).to(gl.int64)
        highest = held[0]
        for i in gl.static_range(1, CHUNKS):
            highest = higher_bf16(highest, held[i]) if BF16 else higher_fp16(highest, held[i])
        a, b = halves(highest, BF16)
        top = gl.maximum(gl.max(gl.maximum(a, b), axis=0), LOWEST)
        base = top * LOG2_E
        sums = gl.zeros([PIECE], gl.float32, L)
        level = gl.zeros([PIECE], gl.float32, L)
        for i in gl.static_range(CHUNKS):
            a, b = halves(held[i], BF16)
            sums += gl.exp2(a * LOG2_E - base) + gl.exp2(b * LOG2_E - base)
            if SMOOTH:
                own = access < low + cols // 2 - i * PIECE
                if LINES and i == 0:
                    own = own & (access >= low)
                level += gl.where(own, a + b, 0.0)
        log_sum = gl.log(gl.sum(sums, axis=0))
        loss = (top - picked) + log_sum
        if SMOOTH:
            mean = gl.sum(level, axis=0) / cols
            loss = (1.0 - smoothing) * loss + smoothing * ((top - mean) + log_sum)
        lse = top + log_sum
        loss += z_weight * lse * lse
        loss = gl.where(known, loss, float("nan"))  # an error in PyTorch too; here it is loud, not silent
        counted = target != ignore_index
        loss = gl.where(counted, loss, 0.0)
        gl.store(lse_ptr + row, top)
        gl.store(lse_ptr + rows + row, log_sum)
        if SUM:
            losses += loss
            counts += counted.to(gl.float32)
        else:
            gl.store(loss_ptr + row, loss)
    let_next_start(EARLY)
    if SUM:
        gl.store(loss_ptr + pid, losses)
        gl.store(count_ptr + pid, counts)
