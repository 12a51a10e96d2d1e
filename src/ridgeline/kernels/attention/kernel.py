"""Attention on Hopper, in Gluon: two groups of warps compute, one warp feeds them through the copy engine.

Shapes: B batch, H query heads, K key heads (H a multiple of K), L query rows, S keys, D head dim of queries and keys,
DV of values (both padded to 64, 128 or 256; heads of 136 to 192 are 128 columns and E, F = 64 others). Scores are kept
in base 2: ``scale`` is the softmax scale times log2(e), or the cap times it where scores are capped by tanh first.

What a row sees is a band of keys: row i sees keys i + lo to i + hi. BAND 0 is no band (full attention), 1 has only the
upper edge (causal), 2 both (a sliding window). A mask over keys comes as one number a key, 0 or minus infinity, which
the feeding warp writes beside the keys. Sequences of different length lie one after the other (VARLEN): a tile ends
where its sequence does, and which tiles there are at all was listed before, the longest first (order.py).

Forward: a program takes 128 query rows of a head, each group 64 of them. While a group's softmax of one block of keys
runs, its product P·V of the block before and the other group's products keep the tensor cores busy.

The gradients are in gradient.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.function import gluon_jit

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon_jit
def _tile(index, num_m, num_heads, group, BACKWARDS: gl.constexpr):
    """Tile number → (row block, head): long blocks first, ``group`` heads side by side so that they share the L2."""
    section = index // (num_m * group)
    width = min(num_heads - section * group, group)
    inside = index - section * num_m * group
    m = inside // width
    if BACKWARDS:
        m = num_m - 1 - m
    return m, section * group + inside % width


@gluon_jit
def _taken(index, tiles, num_m, num_heads, group, sizes, BACKWARDS: gl.constexpr, VARLEN: gl.constexpr):
    """The same; of sequences of different length by the list of those tiles that have rows."""
    m, head = _tile(index, num_m, num_heads, group, BACKWARDS)
    if VARLEN:
        found = gl.load(sizes[7] + 1 + index, mask=index < tiles, other=0)
        m, head = found // num_heads, found % num_heads
    return m, head


@gluon_jit
def _num_listed(tiles, sizes, VARLEN: gl.constexpr):
    """How many tiles there are: all, or those of the list."""
    if VARLEN:
        tiles = gl.load(sizes[7])
    return tiles


@gluon_jit
def _turn(j):
    """The j-th tile of this program: back and forth, so that who had the longest gets the shortest next."""
    num, mine = gl.num_programs(0), gl.program_id(0)
    return j * num + mine + (j % 2) * (num - 1 - 2 * mine)


@gluon_jit
def _extent(b, sizes, VARLEN: gl.constexpr):
    """Rows and keys of sequence b, where each start, and the edges of the band its row 0 sees."""
    L, S, lo, hi, align, q_starts, k_starts, _ = sizes
    rows, keys, q0, k0, batch = L, S, L * 0, S * 0, b
    if VARLEN:
        q0 = gl.load(q_starts + b)
        k0 = gl.load(k_starts + b)
        rows = gl.load(q_starts + b + 1) - q0
        keys = gl.load(k_starts + b + 1) - k0
        lo += (keys - rows) * align
        hi += (keys - rows) * align
        batch = b * 0
    return rows, keys, q0, k0, lo, hi, batch


@gluon_jit
def _rows_of(b, there, sizes, VARLEN: gl.constexpr):
    """Query rows of sequence b, if there is one."""
    rows = sizes[0]
    if VARLEN:
        at = sizes[5] + b
        rows = gl.load(at + 1, mask=there, other=0) - gl.load(at, mask=there, other=0)
    return rows


@gluon_jit
def _keys_of(b, there, sizes, VARLEN: gl.constexpr):
    """Keys of sequence b, if there is one."""
    keys = sizes[1]
    if VARLEN:
        at = sizes[6] + b
        keys = gl.load(at + 1, mask=there, other=0) - gl.load(at, mask=there, other=0)
    return keys


@gluon_jit
def _blocks_seen(m, keys, lo, hi, BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr):
    """First and one past the last block of keys that rows of block m see; at least one, so that every row answers."""
    end = keys
    if BAND >= 1:
        end = min((m + 1) * BM + hi, keys)
    stop = (max(end, 1) + BN - 1) // BN
    first = stop * 0
    if BAND == 2:
        first = min(max(m * BM + lo, 0) // BN, stop - 1)
    return first, stop


@gluon_jit
def _barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon_jit
def _without_the_rest(values, num, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the rows past a sequence's end: what lies there may be no number, and nothing times that is not 0."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, L)), 1)
    for j in gl.static_range(WIDTH // 64):
        part = values.slice(j * 64, 64, dim=1)
        found = part.load(L)
        part.store(gl.where(row < num, found, 0.0).to(found.dtype))


@gluon_jit
def _fetch(desc, at, full, empty, smem, turn, slot, NUM_BYTES: gl.constexpr):
    """Wait until the slot is free, then start the copy into it."""
    mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
    mbarrier.expect(full.index(slot), NUM_BYTES)
    tma.async_copy_global_to_shared(desc, at, full.index(slot), smem.index(slot))


@gluon_jit
def _feed_tile(
    m, b, h, descs, smems, bars, mask_ptr, mask_b, sizes, it, local, ratio,
    EXTRA: gl.constexpr, DESCENDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, KEYMASK: gl.constexpr, VARLEN: gl.constexpr,
    Q_STAGES: gl.constexpr, E: gl.constexpr, F: gl.constexpr,
):
    q_desc, q2_desc, extra_desc, k_desc, k2_desc, v_desc, v2_desc = descs
    q_smem, q2_smem, extra_smem, k_smem, k2_smem, v_smem, v2_smem, bias_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    M_L: gl.constexpr = gl.BlockedLayout([BN // 32], [32], [1], [0])
    rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
    q_bytes: gl.constexpr = 64 * (D + DV if EXTRA else D + E) * 2
    for c in gl.static_range(BM // 64):
        row = q0 + m * BM + c * 64
        mine = c * Q_STAGES + local % Q_STAGES
        _fetch(q_desc, [batch, h, row, 0], q_full, q_empty, q_smem, local // Q_STAGES, mine, q_bytes)
        if E > 0:
            tma.async_copy_global_to_shared(q2_desc, [batch, h, row, D], q_full.index(mine), q2_smem.index(mine))
        if EXTRA:
            tma.async_copy_global_to_shared(extra_desc, [batch, h, row, 0], q_full.index(mine), extra_smem.index(mine))
    first, stop = _blocks_seen(m, keys, lo, hi, BM, BN, BAND)
    if KEYMASK:
        mask = mask_ptr + b.to(gl.int64) * mask_b
        col = (stop - 1 if DESCENDING else first) * BN + gl.arange(0, BN, M_L)
        kept = gl.load(mask + col, mask=col < keys, other=0)
    for j in range(first, stop):
        block = first + stop - 1 - j if DESCENDING else j
        at = [batch, h // ratio, k0 + block * BN, 0]
        slot, turn = it % STAGES, it // STAGES
        _fetch(k_desc, at, k_full, k_empty, k_smem, turn, slot, BN * (D + E) * 2)
        if E > 0:
            rest = [batch, h // ratio, k0 + block * BN, D]
            tma.async_copy_global_to_shared(k2_desc, rest, k_full.index(slot), k2_smem.index(slot))
        if KEYMASK:
            bias_smem.index(slot).store(gl.where(kept != 0, 0.0, float("-inf")))
            mbarrier.arrive(k_full.index(slot), count=1)
            col = (block - 1 if DESCENDING else block + 1) * BN + gl.arange(0, BN, M_L)
            kept = gl.load(mask + col, mask=(col >= 0) & (col < keys), other=0)  # the next block's
        _fetch(v_desc, at, v_full, v_empty, v_smem, turn, slot, BN * (DV + F) * 2)
        if F > 0:
            rest = [batch, h // ratio, k0 + block * BN, DV]
            tma.async_copy_global_to_shared(v2_desc, rest, v_full.index(slot), v2_smem.index(slot))
        it += 1
    return it, local + 1


@gluon_jit
def _feed_rows(
    descs, smems, bars, mask_ptr, mask_b, sizes, tiles, num_m, H, K, heads, group,
    EXTRA: gl.constexpr, DESCENDING: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, KEYMASK: gl.constexpr, VARLEN: gl.constexpr,
    Q_STAGES: gl.constexpr, E: gl.constexpr, F: gl.constexpr,
):
    """Feeds the kernels that own query rows: 64 rows of Q (and of dO) for each group, then blocks of K and V."""
    it = 0
    local = 0
    for j in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        m, bh = _taken(index, tiles, num_m, heads, group, sizes, BAND == 1, VARLEN)
        b, h = bh // H, bh % H
        if (index < tiles) & (m * BM < _rows_of(b, index < tiles, sizes, VARLEN)):
            it, local = _feed_tile(m, b, h, descs, smems, bars, mask_ptr, mask_b, sizes, it, local, H // K, EXTRA,
                                   DESCENDING, BM, BN, D, DV, STAGES, BAND, KEYMASK, VARLEN, Q_STAGES, E, F)


@gluon_jit
def _tanh(x):
    """tanh of x / (2 log2 e): exact to a float's rounding in absolute terms, which is what a score needs."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x))


@gluon_jit
def _seen(s, row, col, keys, lo, hi, BAND: gl.constexpr, PAST: gl.constexpr):
    """Scores of keys that a row sees; the others minus infinity."""
    if PAST:
        s = gl.where(col < keys, s, float("-inf"))
    if BAND >= 1:
        s = gl.where(col <= row + hi, s, float("-inf"))
    if BAND == 2:
        s = gl.where(col >= row + lo, s, float("-inf"))
    return s


@gluon_jit
def _online(s, m_i, l_i, bias, scale, pre, row, block, keys, lo, hi, MASK: gl.constexpr, BN: gl.constexpr,
            BAND: gl.constexpr, KEYMASK: gl.constexpr, CAPPED: gl.constexpr, S_L: gl.constexpr):
    """One step of the online softmax: probabilities, new maximum and sum, and the factor for what came before."""
    if CAPPED:
        s = _tanh(s * pre)
    if KEYMASK:
        s = s + gl.expand_dims(bias, 0)
    if MASK:
        col = gl.expand_dims(block * BN + gl.arange(0, BN, gl.SliceLayout(0, S_L)), 0)
        s = _seen(s, gl.expand_dims(row, 1), col, keys, lo, hi, BAND, not KEYMASK)
    m_new = gl.maximum(m_i, gl.max(s, 1))
    finite = gl.where(m_new == float("-inf"), 0.0, m_new) if MASK or KEYMASK else m_new
    alpha = gl.exp2(m_i * scale - finite * scale)
    p = gl.exp2(s * scale - gl.expand_dims(finite * scale, 1))
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon_jit
def _bias(bias_smem, slot, KEYMASK: gl.constexpr, S_L: gl.constexpr):
    """The numbers of a block of keys, where there are any."""
    if KEYMASK:
        return bias_smem.index(slot).load(gl.SliceLayout(0, S_L))
    else:
        return 0.0


@gluon_jit
def _scores(q, q2, k_smem, k2_smem, slot, BN: gl.constexpr, D: gl.constexpr, E: gl.constexpr, S_L: gl.constexpr):
    """Q · Kᵀ of a block, on its way; of a head's D columns and, where it has more, the E others."""
    zero = gl.zeros([64, BN], gl.float32, S_L)
    s = warpgroup_mma(q, k_smem.index(slot).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if E > 0:
        s = warpgroup_mma(q2, k2_smem.index(slot).reshape([BN, E]).permute((1, 0)), s, is_async=True)
    return s


@gluon_jit
def _step(q, q2, smems, bars, it, block, more, p_op, o, o2, m_i, l_i, scale, pre, row, keys, lo, hi,
          MASK: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
          BAND: gl.constexpr, KEYMASK: gl.constexpr, CAPPED: gl.constexpr, DTYPE: gl.constexpr, E: gl.constexpr,
          F: gl.constexpr):
    """Scores of the next block and P·V of this one go out together; the softmax runs while P·V does."""
    k_smem, k2_smem, v_smem, v2_smem, bias_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    nxt = it + 1
    ks, vs = nxt % STAGES, it % STAGES
    s_on_its_way = _scores(q, q2, k_smem, k2_smem, ks, BN, D, E, S_L)
    mbarrier.wait(v_full.index(vs), (it // STAGES) & 1)
    o_on_its_way = warpgroup_mma(p_op, v_smem.index(vs).reshape([BN, DV]), o, is_async=True)
    if F > 0:
        o2 = warpgroup_mma(p_op, v2_smem.index(vs).reshape([BN, F]), o2, is_async=True)
    s = warpgroup_mma_wait(2 if F > 0 else 1, [s_on_its_way])
    bias = _bias(bias_smem, ks, KEYMASK, S_L)
    mbarrier.arrive(k_empty.index(ks), count=1)
    p, m_i, l_i, alpha = _online(s, m_i, l_i, bias, scale, pre, row, block, keys, lo, hi, MASK, BN, BAND, KEYMASK,
                                 CAPPED, S_L)
    half = p.to(DTYPE)
    # Waiting for the next keys here ends a basic block: without it ptxas moves the wait for O above the softmax.
    after = nxt + 1
    mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=more)
    if F > 0:
        O2_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F, 16])
        o, o2, half, l_i = warpgroup_mma_wait(0, [o_on_its_way, o2, half, l_i])
        o2 = o2 * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O2_L)), 1)
    else:
        o, half, l_i = warpgroup_mma_wait(0, [o_on_its_way, half, l_i])
    mbarrier.arrive(v_empty.index(vs), count=1)
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_L)), 1)
    return gl.convert_layout(half, gl.DotOperandLayout(0, O_L, 2)), o, o2, m_i, l_i, nxt


@gluon.constexpr_function
def _wide(D):
    """64 rows of D columns with eight neighbors of a row in each thread, for 16-byte stores."""
    high = [[0, 32 << i] for i in range((D // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *high, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, D],
    )


@gluon_jit
def _store(ptr, value, row0, rows, step, d, D: gl.constexpr):
    """64 rows of a head, ``step`` elements apart; those past the last are left out."""
    WIDE: gl.constexpr = _wide(D)
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    col = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    at = gl.expand_dims(row.to(gl.int64) * step, 1) + gl.expand_dims(col, 0)
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(col < d, 0)
    gl.store(ptr + at, gl.convert_layout(value.to(ptr.dtype.element_ty), WIDE), mask=inside)


@gluon_jit
def _plain_blocks(row0, first, stop, keys, lo, hi, BN: gl.constexpr, BAND: gl.constexpr, PAST: gl.constexpr):
    """Blocks that all 64 rows see whole, and therefore without a mask: from the first to one past the last."""
    end = stop
    if PAST:
        end = min(end, keys // BN)
    if BAND >= 1:
        end = min(end, max(row0 + hi + 1, 0) // BN)
    begin = first
    if BAND == 2:
        begin = max(begin, (max(row0 + 63 + lo, 0) + BN - 1) // BN)
    return begin, max(end, begin)


@gluon_jit
def _pass_by(c: gl.constexpr, first, stop, bars, it, local, STAGES: gl.constexpr, Q_STAGES: gl.constexpr):
    """A group whose rows are all past the last: it gives back what it is fed."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    mine = c * Q_STAGES + local % Q_STAGES
    mbarrier.wait(q_full.index(mine), (local // Q_STAGES) & 1)
    mbarrier.arrive(q_empty.index(mine), count=1)
    for _ in range(first, stop):
        slot, turn = it % STAGES, (it // STAGES) & 1
        mbarrier.wait(k_full.index(slot), turn)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), turn)
        mbarrier.arrive(v_empty.index(slot), count=1)
        it += 1
    return it, local + 1


@gluon_jit
def _attend_tile(
    c: gl.constexpr, m, b, h, o_ptr, o_b, o_h, o_l, lse_ptr, sink_ptr, q_smem, q2_smem, smems, bars, sizes, H, d, scale,
    pre, it, local,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, SINK: gl.constexpr, VARLEN: gl.constexpr, DTYPE: gl.constexpr,
    Q_STAGES: gl.constexpr, E: gl.constexpr, F: gl.constexpr,
):
    k_smem, k2_smem, v_smem, v2_smem, bias_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
    first, stop = _blocks_seen(m, keys, lo, hi, BM, BN, BAND)
    row0 = m * BM + c * 64
    row = row0 + gl.arange(0, 64, ROW)
    mine = c * Q_STAGES + local % Q_STAGES
    q = q_smem.index(mine).reshape([64, D])
    q2 = q2_smem.index(mine).reshape([64, E if E > 0 else D])
    mbarrier.wait(q_full.index(mine), (local // Q_STAGES) & 1)
    slot = it % STAGES
    mbarrier.wait(k_full.index(slot), (it // STAGES) & 1)
    s = warpgroup_mma_wait(0, [_scores(q, q2, k_smem, k2_smem, slot, BN, D, E, S_L)])
    bias = _bias(bias_smem, slot, KEYMASK, S_L)
    mbarrier.arrive(k_empty.index(slot), count=1)
    m_i = gl.full([64], float("-inf"), gl.float32, ROW)
    l_i = gl.zeros([64], gl.float32, ROW)
    p, m_i, l_i, _ = _online(s, m_i, l_i, bias, scale, pre, row, stop - 1, keys, lo, hi, True, BN, BAND, KEYMASK,
                             CAPPED, S_L)
    p_op = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, O_L, 2))
    o, o2 = gl.zeros([64, DV], gl.float32, O_L), local
    if F > 0:
        O2_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F, 16])
        o2 = gl.zeros([64, F], gl.float32, O2_L)
    if VARLEN:  # what lies past this sequence's last value is another's, and may be no number
        if keys < stop * BN:
            mbarrier.wait(v_full.index(slot), (it // STAGES) & 1)
            _without_the_rest(v_smem.index(slot).reshape([BN, DV]), keys - (stop - 1) * BN, BN, DV)
            if F > 0:
                _without_the_rest(v2_smem.index(slot).reshape([BN, F]), keys - (stop - 1) * BN, BN, F)
            fence_async_shared()
    mbarrier.wait(k_full.index((it + 1) % STAGES), ((it + 1) // STAGES) & 1, pred=stop > first + 1)
    begin, end = _plain_blocks(row0, first, stop - 1, keys, lo, hi, BN, BAND, False)
    if BAND >= 1:
        for j in range(end, stop - 1):  # blocks that cross the upper edge, from the last to the first
            block = end + stop - 2 - j
            p_op, o, o2, m_i, l_i, it = _step(q, q2, smems, bars, it, block, block > first, p_op, o, o2, m_i, l_i,
                                              scale, pre, row, keys, lo, hi, True, BN, D, DV, STAGES, BAND, KEYMASK,
                                              CAPPED, DTYPE, E, F)
    for j in range(begin, end):
        block = begin + end - 1 - j
        p_op, o, o2, m_i, l_i, it = _step(q, q2, smems, bars, it, block, block > first, p_op, o, o2, m_i, l_i, scale,
                                          pre, row, keys, lo, hi, False, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED,
                                          DTYPE, E, F)
    if BAND == 2:
        for j in range(first, min(begin, stop - 1)):
            block = first + min(begin, stop - 1) - 1 - j
            p_op, o, o2, m_i, l_i, it = _step(q, q2, smems, bars, it, block, block > first, p_op, o, o2, m_i, l_i,
                                              scale, pre, row, keys, lo, hi, True, BN, D, DV, STAGES, BAND, KEYMASK,
                                              CAPPED, DTYPE, E, F)
    mbarrier.arrive(q_empty.index(mine), count=1)
    slot = it % STAGES
    mbarrier.wait(v_full.index(slot), (it // STAGES) & 1)
    o = warpgroup_mma(p_op, v_smem.index(slot).reshape([BN, DV]), o)
    if F > 0:
        o2 = warpgroup_mma(p_op, v2_smem.index(slot).reshape([BN, F]), o2)
    mbarrier.arrive(v_empty.index(slot), count=1)
    top = m_i * scale
    if SINK:  # one more score without a value
        sink = gl.load(sink_ptr + h).to(gl.float32) * LOG2_E
        raised = gl.maximum(top, sink)
        l_i = l_i * gl.exp2(top - raised) + gl.exp2(sink - raised)
        o = o * gl.expand_dims(gl.convert_layout(gl.exp2(top - raised), gl.SliceLayout(1, O_L)), 1)
        if F > 0:
            o2 = o2 * gl.expand_dims(gl.convert_layout(gl.exp2(top - raised), gl.SliceLayout(1, O2_L)), 1)
        top = raised
    none = l_i == 0.0  # a row that sees no key: zeros, and a log-sum-exp of minus infinity; NaN stays NaN
    lse = gl.where(none, float("-inf"), top * LN_2 + gl.log(l_i))
    gl.store(lse_ptr + (batch * H + h).to(gl.int64) * sizes[0] + q0 + row, lse, mask=row < rows)
    inverse = gl.where(none, 0.0, 1.0 / l_i)
    base = o_ptr + batch.to(gl.int64) * o_b + h.to(gl.int64) * o_h + q0.to(gl.int64) * o_l
    _store(base, o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_L)), 1), row0, rows, o_l, d, DV)
    if F > 0:
        o2 = o2 * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O2_L)), 1)
        _store(base + DV, o2, row0, rows, o_l, d - DV, F)
    return it + 1, local + 1


@gluon_jit
def _attend(
    c: gl.constexpr, o_ptr, o_b, o_h, o_l, lse_ptr, sink_ptr, q_smem, q2_smem, smems, bars, sizes, tiles, num_m, H,
    heads, group, d, scale, pre,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, SINK: gl.constexpr, VARLEN: gl.constexpr, DTYPE: gl.constexpr,
    Q_STAGES: gl.constexpr, E: gl.constexpr, F: gl.constexpr,
):
    """One group of four warps: 64 query rows of every tile, keys from the last block to the first."""
    it = 0
    local = 0
    for j in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        m, bh = _taken(index, tiles, num_m, heads, group, sizes, BAND == 1, VARLEN)
        b, h = bh // H, bh % H
        rows = _rows_of(b, index < tiles, sizes, VARLEN)
        if (index < tiles) & (m * BM + c * 64 < rows):
            it, local = _attend_tile(c, m, b, h, o_ptr, o_b, o_h, o_l, lse_ptr, sink_ptr, q_smem, q2_smem, smems, bars,
                                     sizes, H, d, scale, pre, it, local, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED,
                                     SINK, VARLEN, DTYPE, Q_STAGES, E, F)
        elif (index < tiles) & (m * BM < rows):
            rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
            first, stop = _blocks_seen(m, keys, lo, hi, BM, BN, BAND)
            it, local = _pass_by(c, first, stop, bars, it, local, STAGES, Q_STAGES)


@gluon_jit
def attention_forward(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_ptr, lse_ptr, mask_ptr, sink_ptr, q_starts, k_starts, order, B,
    H, K, L, S, longest, lo, hi, align, d, mask_b, o_b, o_h, o_l, group, scale, pre,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, SINK: gl.constexpr, VARLEN: gl.constexpr, Q_STAGES: gl.constexpr,
    E: gl.constexpr, F: gl.constexpr,
):
    """Tiles of 128 query rows, 64 for each of two groups of warps."""
    DTYPE: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = 2
    gl.static_assert(BM == 128)
    q_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * Q_STAGES, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, DV], v_desc.layout)
    q2_smem, k2_smem = q_smem, k_smem
    if E > 0:
        q2_smem = gl.allocate_shared_memory(DTYPE, [GROUPS * Q_STAGES, 1, 1, 64, E], q2_desc.layout)
        k2_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, E], k2_desc.layout)
    v2_smem = v_smem
    if F > 0:
        v2_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, F], v2_desc.layout)
    bias_smem = _bias_memory(STAGES, BN, KEYMASK)
    bars = (_barriers(GROUPS * Q_STAGES, 1), _barriers(GROUPS * Q_STAGES, 1), _barriers(STAGES, 2 if KEYMASK else 1),
            _barriers(STAGES, GROUPS), _barriers(STAGES, 1), _barriers(STAGES, GROUPS))
    sizes = (L, S, lo, hi, align, q_starts, k_starts, order)
    num_m, heads = (longest + BM - 1) // BM, B * H
    tiles = _num_listed(num_m * heads, sizes, VARLEN)
    smems = (k_smem, k2_smem, v_smem, v2_smem, bias_smem)
    gl.warp_specialize([
        (_attend, (0, o_ptr, o_b, o_h, o_l, lse_ptr, sink_ptr, q_smem, q2_smem, smems, bars, sizes, tiles, num_m, H,
                   heads, group, d, scale, pre, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, SINK, VARLEN, DTYPE,
                   Q_STAGES, E, F)),
        (_attend, (1, o_ptr, o_b, o_h, o_l, lse_ptr, sink_ptr, q_smem, q2_smem, smems, bars, sizes, tiles, num_m, H,
                   heads, group, d, scale, pre, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, SINK, VARLEN, DTYPE,
                   Q_STAGES, E, F)),
        (_feed_rows, ((q_desc, q2_desc, q_desc, k_desc, k2_desc, v_desc, v2_desc),
                      (q_smem, q2_smem, q_smem, k_smem, k2_smem, v_smem, v2_smem, bias_smem), bars, mask_ptr, mask_b,
                      sizes, tiles, num_m, H, K, heads, group, False, True, BM, BN, D, DV, STAGES, BAND, KEYMASK,
                      VARLEN, Q_STAGES, E, F)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon_jit
def _bias_memory(STAGES: gl.constexpr, BN: gl.constexpr, KEYMASK: gl.constexpr):
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.allocate_shared_memory(gl.float32, [STAGES, BN if KEYMASK else 16], FLAT)
