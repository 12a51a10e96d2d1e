"""Attention on Hopper, in Gluon: two groups of warps compute, one warp feeds them through the copy engine.

Shapes: B batch, H query heads, K key heads (H a multiple of K), L query rows, S keys, D head dim (padded to 64 or 128).
Scores are kept in base 2: ``scale`` is the softmax scale times log2(e).

Forward: a program takes 128 query rows of a head, each group 64 of them. While a group's softmax of one block of keys
runs, its product P·V of the block before and the other group's products keep the tensor cores busy.

Backward is two kernels, which costs seven products instead of five and needs no atomics: the same bits every time, no
workspace beyond two numbers a row. One owns keys and walks queries (dK, dV), one owns queries and walks keys (dQ). A
fused kernel that adds dQ with atomics was measured slower than both together: see docs/log.md.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _tile(index, num_m, num_heads, group, CAUSAL: gl.constexpr):
    """Tile number → (row block, head): long blocks first, ``group`` heads side by side so that they share the L2."""
    section = index // (num_m * group)
    width = min(num_heads - section * group, group)
    inside = index - section * num_m * group
    m = inside // width
    if CAUSAL:
        m = num_m - 1 - m
    return m, section * group + inside % width


@gluon.jit
def _num_blocks(m, S, shift, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Blocks of keys that rows of block m see; at least one, so that every row gets an answer."""
    end = S
    if CAUSAL:
        end = min((m + 1) * BM + shift, S)
    return (max(end, 1) + BN - 1) // BN


@gluon.jit
def _barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _fetch(desc, at, full, empty, smem, turn, slot, NUM_BYTES: gl.constexpr):
    """Wait until the slot is free, then start the copy into it."""
    mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
    mbarrier.expect(full.index(slot), NUM_BYTES)
    tma.async_copy_global_to_shared(desc, at, full.index(slot), smem.index(slot))


@gluon.jit
def _feed_rows(
    q_desc, extra_desc, k_desc, v_desc, q_smem, extra_smem, k_smem, v_smem, bars, tiles, num_m, H, K, S, shift, heads,
    group,
    EXTRA: gl.constexpr, DESCENDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Feeds the kernels that own query rows: 64 rows of Q (and of dO) for each group, then blocks of K and V."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    it = 0
    local = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, bh = _tile(index, num_m, heads, group, CAUSAL)
        b, h = bh // H, bh % H
        for c in gl.static_range(2):
            row = m * BM + c * (BM // 2)
            _fetch(q_desc, [b, h, row, 0], q_full, q_empty, q_smem, local, c, (2 if EXTRA else 1) * (BM // 2) * D * 2)
            if EXTRA:
                tma.async_copy_global_to_shared(extra_desc, [b, h, row, 0], q_full.index(c), extra_smem.index(c))
        n = _num_blocks(m, S, shift, BM, BN, CAUSAL)
        for j in range(n):
            block = n - 1 - j if DESCENDING else j
            at = [b, h // (H // K), block * BN, 0]
            _fetch(k_desc, at, k_full, k_empty, k_smem, it // STAGES, it % STAGES, BN * D * 2)
            _fetch(v_desc, at, v_full, v_empty, v_smem, it // STAGES, it % STAGES, BN * D * 2)
            it += 1
        local += 1


@gluon.jit
def _online(s, m_i, l_i, scale, row, block, S, shift, MASK: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
            S_L: gl.constexpr):
    """One step of the online softmax: probabilities, new maximum and sum, and the factor for what came before."""
    if MASK:
        col = gl.expand_dims(block * BN + gl.arange(0, BN, gl.SliceLayout(0, S_L)), 0)
        seen = col < S
        if CAUSAL:
            seen = seen & (col <= gl.expand_dims(row, 1) + shift)
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1))
    finite = gl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
    alpha = gl.exp2(m_i * scale - finite * scale)
    p = gl.exp2(s * scale - gl.expand_dims(finite * scale, 1))
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _step(q, k_smem, v_smem, bars, it, block, p_op, o, m_i, l_i, scale, row, S, shift, MASK: gl.constexpr,
          BN: gl.constexpr,
          D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    """Scores of the next block and P·V of this one go out together; the softmax runs while P·V does."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    nxt = it + 1
    ks, vs = nxt % STAGES, it % STAGES
    zero = gl.zeros([64, BN], gl.float32, S_L)
    k = k_smem.index(ks).reshape([BN, D])
    s_on_its_way = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(vs), (it // STAGES) & 1)
    o_on_its_way = warpgroup_mma(p_op, v_smem.index(vs).reshape([BN, D]), o, is_async=True)
    s = warpgroup_mma_wait(1, [s_on_its_way])
    mbarrier.arrive(k_empty.index(ks), count=1)
    p, m_i, l_i, alpha = _online(s, m_i, l_i, scale, row, block, S, shift, MASK, BN, CAUSAL, S_L)
    half = p.to(DTYPE)
    # Waiting for the next keys here ends a basic block: without it ptxas moves the wait for O above the softmax.
    after = nxt + 1
    mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=block > 0)
    o, half, l_i = warpgroup_mma_wait(0, [o_on_its_way, half, l_i])
    mbarrier.arrive(v_empty.index(vs), count=1)
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_L)), 1)
    return gl.convert_layout(half, gl.DotOperandLayout(0, O_L, 2)), o, m_i, l_i, nxt


@gluon.constexpr_function
def _wide(D):
    """64 rows of D columns with eight neighbors of a row in each thread, for 16-byte stores."""
    high = [[0, 32], [0, 64]] if D == 128 else [[0, 32]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *high, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, D],
    )


@gluon.jit
def _store(ptr, value, bh, row0, L, d, D: gl.constexpr):
    """64 rows of a head into a dense [B, H, L, d] tensor."""
    WIDE: gl.constexpr = _wide(D)
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    col = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    at = (bh.to(gl.int64) * L + gl.expand_dims(row, 1)) * d + gl.expand_dims(col, 0)
    inside = gl.expand_dims(row < L, 1) & gl.expand_dims(col < d, 0)
    gl.store(ptr + at, gl.convert_layout(value.to(ptr.dtype.element_ty), WIDE), mask=inside)


@gluon.jit
def _attend(c: gl.constexpr, o_ptr, lse_ptr, q_smem, k_smem, v_smem, bars, tiles, num_m, L, S, shift, heads, group, d,
            scale,
            BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
            DTYPE: gl.constexpr):
    """One group of four warps: 64 query rows of every tile, keys from the last block to the first."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    q = q_smem.index(c).reshape([64, D])
    it = 0
    local = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, bh = _tile(index, num_m, heads, group, CAUSAL)
        n = _num_blocks(m, S, shift, BM, BN, CAUSAL)
        row0 = m * BM + c * 64
        row = row0 + gl.arange(0, 64, ROW)
        mbarrier.wait(q_full.index(c), local & 1)
        stage = it % STAGES
        mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
        k = k_smem.index(stage).reshape([BN, D])
        s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([64, BN], gl.float32, S_L), use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        m_i = gl.full([64], float("-inf"), gl.float32, ROW)
        l_i = gl.zeros([64], gl.float32, ROW)
        p, m_i, l_i, _ = _online(s, m_i, l_i, scale, row, n - 1, S, shift, True, BN, CAUSAL, S_L)
        p_op = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, O_L, 2))
        o = gl.zeros([64, D], gl.float32, O_L)
        mbarrier.wait(k_full.index((it + 1) % STAGES), ((it + 1) // STAGES) & 1, pred=n > 1)
        masked = 1  # blocks that need a mask: the last one, and those that cross the diagonal
        if CAUSAL:
            masked = min(max(n - max(row0 + shift, 0) // BN, 1), n)
        for j in range(1, masked):
            p_op, o, m_i, l_i, it = _step(q, k_smem, v_smem, bars, it, n - 1 - j, p_op, o, m_i, l_i, scale, row, S,
                                          shift, True,
                                          BN, D, STAGES, CAUSAL, DTYPE)
        for j in range(masked, n):
            p_op, o, m_i, l_i, it = _step(q, k_smem, v_smem, bars, it, n - 1 - j, p_op, o, m_i, l_i, scale, row, S,
                                          shift, False,
                                          BN, D, STAGES, CAUSAL, DTYPE)
        mbarrier.arrive(q_empty.index(c), count=1)
        stage = it % STAGES
        mbarrier.wait(v_full.index(stage), (it // STAGES) & 1)
        o = warpgroup_mma(p_op, v_smem.index(stage).reshape([BN, D]), o)
        mbarrier.arrive(v_empty.index(stage), count=1)
        it += 1
        local += 1
        none = l_i == 0.0  # a row that sees no key: zeros, and a log-sum-exp of minus infinity; NaN stays NaN
        lse = gl.where(none, float("-inf"), m_i * scale * 0.6931471805599453 + gl.log(l_i))
        gl.store(lse_ptr + bh.to(gl.int64) * L + row, lse, mask=row < L)
        inverse = gl.convert_layout(gl.where(none, 0.0, 1.0 / l_i), gl.SliceLayout(1, O_L))
        _store(o_ptr, o * gl.expand_dims(inverse, 1), bh, row0, L, d, D)


@gluon.jit
def forward(q_desc, k_desc, v_desc, o_ptr, lse_ptr, B, H, K, L, S, shift, d, group, scale, BM: gl.constexpr,
            BN: gl.constexpr,
            D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BM == 128)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BM // 2, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_desc.layout)
    bars = (_barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    num_m, heads = (L + BM - 1) // BM, B * H
    tiles = num_m * heads
    gl.warp_specialize([
        (_attend, (0, o_ptr, lse_ptr, q_smem, k_smem, v_smem, bars, tiles, num_m, L, S, shift, heads, group, d, scale,
        BM, BN, D,
                   STAGES, CAUSAL, DTYPE)),
        (_attend, (1, o_ptr, lse_ptr, q_smem, k_smem, v_smem, bars, tiles, num_m, L, S, shift, heads, group, d, scale,
        BM, BN, D,
                   STAGES, CAUSAL, DTYPE)),
        (_feed_rows, (q_desc, q_desc, k_desc, v_desc, q_smem, q_smem, k_smem, v_smem, bars, tiles, num_m, H, K, S,
        shift, heads,
                      group, False, True, BM, BN, D, STAGES, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def prepare(o_ptr, do_ptr, lse_ptr, delta_ptr, lse2_ptr, do_b, do_h, do_l, H, L, padded, d, D: tl.constexpr,
            ROWS: tl.constexpr):
    """delta = rowsum(o · do), and the log-sum-exp in base 2: infinity where a row saw nothing, so that it counts 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1)
    col = tl.arange(0, D)
    inside = (row < L)[:, None] & (col < d)[None, :]
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    o = tl.load(o_ptr + (bh.to(tl.int64) * L + row)[:, None] * d + col[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + b * do_b + h * do_h + row[:, None] * do_l + col[None, :], mask=inside,
                 other=0.0).to(tl.float32)
    to = bh.to(tl.int64) * padded + row
    tl.store(delta_ptr + to, tl.sum(o * do, 1))
    lse = tl.load(lse_ptr + bh.to(tl.int64) * L + row, mask=row < L, other=float("-inf"))
    tl.store(lse2_ptr + to, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))


@gluon.jit
def _dq_step(q, do, k_smem, v_smem, bars, it, block, dq, lse, delta, scale, row, S, shift, more, MASK: gl.constexpr,
             BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage, turn = it % STAGES, (it // STAGES) & 1
    zero = gl.zeros([64, BN], gl.float32, S_L)
    k = k_smem.index(stage).reshape([BN, D])
    s_on_its_way = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), turn)
    v = v_smem.index(stage).reshape([BN, D])
    dp_on_its_way = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s_on_its_way])
    p = gl.exp2(s * scale - gl.expand_dims(lse, 1))
    if MASK:
        col = gl.expand_dims(block * BN + gl.arange(0, BN, gl.SliceLayout(0, S_L)), 0)
        seen = col < S
        if CAUSAL:
            seen = seen & (col <= gl.expand_dims(row, 1) + shift)
        p = gl.where(seen, p, 0.0)
    nxt = it + 1
    mbarrier.wait(k_full.index(nxt % STAGES), (nxt // STAGES) & 1, pred=more)  # ends a basic block, as in the forward
    dp = warpgroup_mma_wait(0, [dp_on_its_way])
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 1))).to(DTYPE), gl.DotOperandLayout(0, O_L, 2))
    dq = warpgroup_mma(ds, k, dq)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq, nxt


@gluon.jit
def _dq_rows(c: gl.constexpr, dq_ptr, lse_ptr, delta_ptr, padded, q_smem, do_smem, k_smem, v_smem, bars, tiles, num_m,
             L, S, shift,
             heads, group, d, scale, scale_out, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
             STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = q_smem.index(c).reshape([64, D])
    do = do_smem.index(c).reshape([64, D])
    it = 0
    local = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, bh = _tile(index, num_m, heads, group, CAUSAL)
        n = _num_blocks(m, S, shift, BM, BN, CAUSAL)
        row0 = m * BM + c * 64
        row = row0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
        at = bh.to(gl.int64) * padded + row
        lse = gl.load(lse_ptr + at, mask=row < padded, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=row < padded, other=0.0)
        dq = gl.zeros([64, D], gl.float32, O_L)
        mbarrier.wait(q_full.index(c), local & 1)
        mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
        plain = S // BN  # blocks that need no mask
        if CAUSAL:
            plain = min(max(row0 + 1 + shift, 0) // BN, plain)
        plain = min(plain, n)
        for j in range(plain):
            dq, it = _dq_step(q, do, k_smem, v_smem, bars, it, j, dq, lse, delta, scale, row, S, shift, j + 1 < n,
                              False, BN, D,
                              STAGES, CAUSAL, DTYPE)
        for j in range(plain, n):
            dq, it = _dq_step(q, do, k_smem, v_smem, bars, it, j, dq, lse, delta, scale, row, S, shift, j + 1 < n,
                              True, BN, D,
                              STAGES, CAUSAL, DTYPE)
        mbarrier.arrive(q_empty.index(c), count=1)
        local += 1
        _store(dq_ptr, dq * scale_out, bh, row0, L, d, D)


@gluon.jit
def backward_queries(q_desc, do_desc, k_desc, v_desc, dq_ptr, lse_ptr, delta_ptr, padded, B, H, K, L, S, shift, d,
                     group, scale,
                     scale_out, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                     CAUSAL: gl.constexpr):
    """dQ: a program owns 128 query rows and walks the keys they see."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BM == 128)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BM // 2, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BM // 2, D], do_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], v_desc.layout)
    bars = (_barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    num_m, heads = (L + BM - 1) // BM, B * H
    tiles = num_m * heads
    gl.warp_specialize([
        (_dq_rows, (0, dq_ptr, lse_ptr, delta_ptr, padded, q_smem, do_smem, k_smem, v_smem, bars, tiles, num_m, L, S,
        shift, heads,
                    group, d, scale, scale_out, BM, BN, D, STAGES, CAUSAL, DTYPE)),
        (_dq_rows, (1, dq_ptr, lse_ptr, delta_ptr, padded, q_smem, do_smem, k_smem, v_smem, bars, tiles, num_m, L, S,
        shift, heads,
                    group, d, scale, scale_out, BM, BN, D, STAGES, CAUSAL, DTYPE)),
        (_feed_rows, (q_desc, do_desc, k_desc, v_desc, q_smem, do_smem, k_smem, v_smem, bars, tiles, num_m, H, K, S,
        shift, heads,
                      group, True, False, BM, BN, D, STAGES, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _first_rows(n, shift, L, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """The first block of query rows that sees any key of block n; past the last where none does."""
    first = 0
    if CAUSAL:
        first = min(max(n * BN - shift, 0) // BM, (L + BM - 1) // BM)
    return first


@gluon.jit
def _feed_keys(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, do_smem, lse_smem,
               delta_smem, bars,
               padded, items, parts, H, K, split, L, shift, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
               STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Feeds the kernel that owns keys: K and V once, then Q, dO and two numbers a row, for every head of the group."""
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    ratio = H // K // split
    num_m = (L + BM - 1) // BM
    it = 0
    local = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        n, part = index // parts, index % parts
        b, hp = part // (K * split), part % (K * split)
        at = [b, hp // split, n * BN, 0]
        _fetch(k_desc, at, kv_full, kv_empty, k_smem, local, 0, 2 * BN * D * 2)
        tma.async_copy_global_to_shared(v_desc, at, kv_full.index(0), v_smem.index(0))
        first = _first_rows(n, shift, L, BM, BN, CAUSAL)
        for r in range(ratio):
            h = hp * ratio + r
            for i in range(first, num_m):
                slot, turn, flat = it % STAGES, it // STAGES, (b * H + h) * padded + i * BM
                _fetch(q_desc, [b, h, i * BM, 0], q_full, q_empty, q_smem, turn, slot, BM * D * 2 + BM * 4)
                tma.async_copy_global_to_shared(lse_desc, [flat], q_full.index(slot), lse_smem.index(slot))
                _fetch(do_desc, [b, h, i * BM, 0], do_full, do_empty, do_smem, turn, slot, BM * D * 2 + BM * 4)
                tma.async_copy_global_to_shared(delta_desc, [flat], do_full.index(slot), delta_smem.index(slot))
                it += 1
        local += 1


@gluon.jit
def _dkv_step(i, it, k, v, q_smem, do_smem, lse_smem, delta_smem, bars, dk, dv, scale, key, S, shift,
              MASK: gl.constexpr,
              BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    """Transposed scores, so that P and dS are already the left operands of dV and dK, in registers."""
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_L)
    stage, turn = it % STAGES, (it // STAGES) & 1
    q = q_smem.index(stage).reshape([BM, D])
    do = do_smem.index(stage).reshape([BM, D])
    zero = gl.zeros([64, BM], gl.float32, S_L)
    mbarrier.wait(q_full.index(stage), turn)
    s_on_its_way = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), turn)
    dp_on_its_way = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s_on_its_way])
    p = gl.exp2(s * scale - gl.expand_dims(lse_smem.index(stage).load(COL), 0))
    if MASK:
        seen = gl.expand_dims(key, 1) < S
        if CAUSAL:
            row = i * BM + gl.arange(0, BM, COL)
            seen = seen & (gl.expand_dims(key, 1) <= gl.expand_dims(row, 0) + shift)
        p = gl.where(seen, p, 0.0)
    dv_on_its_way = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_on_its_way])
    ds = (p * (dp - gl.expand_dims(delta_smem.index(stage).load(COL), 0))).to(DTYPE)
    dk_on_its_way = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, [dv_on_its_way])
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk = warpgroup_mma_wait(0, [dk_on_its_way])
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv, it + 1


@gluon.jit
def _dkv_rows(c: gl.constexpr, dk_ptr, dv_ptr, lse_smem, delta_smem, q_smem, k_smem, v_smem, do_smem, bars, items,
              parts, H, K, split,
              L, S, shift, d, scale, scale_out, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
              STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    num_m = (L + BM - 1) // BM
    k = k_smem.index(0).reshape([BN, D]).slice(c * 64, 64, dim=0)
    v = v_smem.index(0).reshape([BN, D]).slice(c * 64, 64, dim=0)
    it = 0
    local = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        n, part = index // parts, index % parts
        key0 = n * BN + c * 64
        key = key0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
        first = _first_rows(n, shift, L, BM, BN, CAUSAL)
        edge = num_m if (n + 1) * BN > S else first  # keys past the end need a mask everywhere
        if CAUSAL:
            edge = max(edge, min(max((n + 1) * BN - shift + BM - 1, 0) // BM, num_m))
        mbarrier.wait(kv_full.index(0), local & 1)
        dk = gl.zeros([64, D], gl.float32, A_L)
        dv = gl.zeros([64, D], gl.float32, A_L)
        for _ in range(H // K // split):
            for i in range(first, edge):
                dk, dv, it = _dkv_step(i, it, k, v, q_smem, do_smem, lse_smem, delta_smem, bars, dk, dv, scale, key,
                                       S, shift, True, BM,
                                       D, STAGES, CAUSAL, DTYPE)
            for i in range(edge, num_m):
                dk, dv, it = _dkv_step(i, it, k, v, q_smem, do_smem, lse_smem, delta_smem, bars, dk, dv, scale, key,
                                       S, shift, False, BM,
                                       D, STAGES, CAUSAL, DTYPE)
        mbarrier.arrive(kv_empty.index(0), count=1)
        local += 1
        _store(dk_ptr, dk * scale_out, part, key0, S, d, D)
        _store(dv_ptr, dv, part, key0, S, d, D)


@gluon.jit
def backward_keys(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, padded, B, H, K, split, L, S,
                  shift, d, scale,
                  scale_out, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                  CAUSAL: gl.constexpr):
    """dK and dV: a program owns 128 keys and walks the rows of the heads that share them (or a ``split`` of those)."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BN == 128)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    bars = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    parts = B * K * split
    items = (S + BN - 1) // BN * parts
    gl.warp_specialize([
        (_dkv_rows, (0, dk_ptr, dv_ptr, lse_smem, delta_smem, q_smem, k_smem, v_smem, do_smem, bars, items, parts, H,
        K, split, L, S,
                     shift, d, scale, scale_out, BM, BN, D, STAGES, CAUSAL, DTYPE)),
        (_dkv_rows, (1, dk_ptr, dv_ptr, lse_smem, delta_smem, q_smem, k_smem, v_smem, do_smem, bars, items, parts, H,
        K, split, L, S,
                     shift, d, scale, scale_out, BM, BN, D, STAGES, CAUSAL, DTYPE)),
        (_feed_keys, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, do_smem,
        lse_smem, delta_smem,
                      bars, padded, items, parts, H, K, split, L, shift, BM, BN, D, STAGES, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def sum_parts(part_ptr, out_ptr, num, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum over a head's SPLIT partial results of ``size`` elements each, in a fixed order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    head, within = at // size, at % size
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLIT):
        total += tl.load(part_ptr + (head * SPLIT + s) * size + within, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
