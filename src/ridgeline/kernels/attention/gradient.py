"""The gradients of attention on Hopper, in Gluon: the same bits every time from two kernels, or faster from one.

Two kernels cost seven products instead of five and need no atomics and no workspace beyond two numbers a row: one owns
keys and walks queries (dK, dV), one owns queries and walks keys (dQ). ``attention_fused`` owns keys and adds its share
of dQ to a float32 buffer through the copy engine, in whatever order programs come by. Shapes are those of kernel.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention.kernel import (
    _barriers,
    _bias,
    _bias_memory,
    _blocks_seen,
    _extent,
    _feed_rows,
    _fetch,
    _keys_of,
    _num_listed,
    _plain_blocks,
    _rows_of,
    _store,
    _taken,
    _tanh,
    _tile,
    _turn,
)
from ridgeline.kernels.function import gluon_jit, jit
from ridgeline.kernels.row_stream import let_next_start


@builtin
def _add_to_global(tensor_desc, coord, src, _semantic=None):
    """Add a block of shared memory to global memory through the copy engine; its completion is a store's."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon_jit
def _wait_for_the_last():
    """Nothing after this kernel starts before the one that it was a dependent of has ended."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _padded_start(b, q0, VARLEN: gl.constexpr):
    """Where a sequence's numbers start in a head's buffer: every sequence begins a block of 64."""
    start = q0
    if VARLEN:
        start = (q0 + b * 64) // 64 * 64
    return start


@jit
def attention_prepare(
    o_ptr, do_ptr, lse_ptr, delta_ptr, lse2_ptr, dq_ptr, q_starts, o_b, o_h, o_l, do_b, do_h, do_l, H, L, padded, d,
    dqk,
    D: tl.constexpr, ROWS: tl.constexpr, VARLEN: tl.constexpr, ZERO: tl.constexpr, DQ: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o · do), and the log-sum-exp in base 2: infinity where a row saw nothing, so that it counts 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    rows, q0, to, batch = L, 0, 0, b
    if VARLEN:
        q0 = tl.load(q_starts + b)
        rows = tl.load(q_starts + b + 1) - q0
        to = (q0 + b * 64) // 64 * 64
        batch = 0
    if tl.program_id(0) * ROWS < rows:
        col = tl.arange(0, D)
        inside = (row < rows)[:, None] & (col < d)[None, :]
        at = (q0 + row).to(tl.int64)[:, None]
        b64, h64 = tl.zeros([], tl.int64) + batch, tl.zeros([], tl.int64) + h
        o = tl.load(o_ptr + b64 * o_b + h64 * o_h + at * o_l + col[None, :], mask=inside, other=0.0).to(tl.float32)
        do = tl.load(do_ptr + b64 * do_b + h64 * do_h + at * do_l + col[None, :], mask=inside, other=0.0).to(tl.float32)
        head = (b64 * H + h64) * padded + to + row
        tl.store(delta_ptr + head, tl.sum(o * do, 1))
        lse = tl.load(lse_ptr + (b64 * H + h64) * L + q0 + row, mask=row < rows, other=float("-inf"))
        tl.store(lse2_ptr + head, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
        if ZERO:
            wide = tl.arange(0, DQ)
            tl.store(dq_ptr + head[:, None] * DQ + wide[None, :], tl.zeros([ROWS, DQ], tl.float32))


@gluon_jit
def _dq_step(q, do, smems, bars, it, block, more, dq, lse, delta, scale, pre, row, keys, lo, hi, MASK: gl.constexpr,
             BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
             KEYMASK: gl.constexpr, CAPPED: gl.constexpr, DTYPE: gl.constexpr):
    k_smem, v_smem, bias_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    slot, turn = it % STAGES, (it // STAGES) & 1
    zero = gl.zeros([64, BN], gl.float32, S_L)
    k = k_smem.index(slot).reshape([BN, D])
    s_on_its_way = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), turn)
    v = v_smem.index(slot).reshape([BN, DV])
    dp_on_its_way = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s_on_its_way])
    if CAPPED:
        s = _tanh(s * pre)
    if KEYMASK:
        s = s + gl.expand_dims(_bias(bias_smem, slot, KEYMASK, S_L), 0)
    p = gl.exp2(s * scale - gl.expand_dims(lse, 1))
    if MASK:
        col = gl.expand_dims(block * BN + gl.arange(0, BN, gl.SliceLayout(0, S_L)), 0)
        seen = col < keys
        if BAND >= 1:
            seen = seen & (col <= gl.expand_dims(row, 1) + hi)
        if BAND == 2:
            seen = seen & (col >= gl.expand_dims(row, 1) + lo)
        p = gl.where(seen, p, 0.0)
    if CAPPED:
        s = gl.where(p == 0.0, 0.0, 1.0 - s * s)  # the slope of the cap; nothing where nothing is seen
    nxt = it + 1
    mbarrier.wait(k_full.index(nxt % STAGES), (nxt // STAGES) & 1, pred=more)  # ends a basic block, as in the forward
    dp = warpgroup_mma_wait(0, [dp_on_its_way])
    mbarrier.arrive(v_empty.index(slot), count=1)
    ds = p * (dp - gl.expand_dims(delta, 1))
    if CAPPED:
        ds = ds * s
    dq = warpgroup_mma(gl.convert_layout(ds.to(DTYPE), gl.DotOperandLayout(0, O_L, 2)), k, dq)
    mbarrier.arrive(k_empty.index(slot), count=1)
    return dq, nxt


@gluon_jit
def _dq_tile(
    c: gl.constexpr, m, b, h, dq_ptr, g_b, g_h, g_l, lse_ptr, delta_ptr, padded, q, do, smems, bars, sizes, H, d,
    scale, pre, scale_out, it, local,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr, DTYPE: gl.constexpr,
):
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
    first, stop = _blocks_seen(m, keys, lo, hi, BM, BN, BAND)
    row0 = m * BM + c * 64
    row = row0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
    at = (batch * H + h).to(gl.int64) * padded + _padded_start(b, q0, VARLEN) + row
    lse = gl.load(lse_ptr + at, mask=row < rows, other=float("inf"))
    delta = gl.load(delta_ptr + at, mask=row < rows, other=0.0)
    dq = gl.zeros([64, D], gl.float32, O_L)
    mbarrier.wait(q_full.index(c), local & 1)
    mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1)
    begin, end = _plain_blocks(row0, first, stop, keys, lo, hi, BN, BAND, True)
    if BAND == 2:
        for j in range(first, min(begin, stop)):
            dq, it = _dq_step(q, do, smems, bars, it, j, j + 1 < stop, dq, lse, delta, scale, pre, row, keys, lo, hi,
                              True, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, DTYPE)
    for j in range(begin, end):
        dq, it = _dq_step(q, do, smems, bars, it, j, j + 1 < stop, dq, lse, delta, scale, pre, row, keys, lo, hi,
                          False, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, DTYPE)
    for j in range(end, stop):
        dq, it = _dq_step(q, do, smems, bars, it, j, j + 1 < stop, dq, lse, delta, scale, pre, row, keys, lo, hi,
                          True, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, DTYPE)
    mbarrier.arrive(q_empty.index(c), count=1)
    base = dq_ptr + batch.to(gl.int64) * g_b + h.to(gl.int64) * g_h + q0.to(gl.int64) * g_l
    _store(base, dq * scale_out, row0, rows, g_l, d, D)
    return it, local + 1


@gluon_jit
def _dq_rows(
    c: gl.constexpr, dq_ptr, g_b, g_h, g_l, lse_ptr, delta_ptr, padded, q_smem, do_smem, smems, bars, sizes, tiles,
    num_m, H, heads, group, d, scale, pre, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr, DTYPE: gl.constexpr,
):
    q = q_smem.index(c).reshape([64, D])
    do = do_smem.index(c).reshape([64, DV])
    it = 0
    local = 0
    for j in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        m, bh = _taken(index, tiles, num_m, heads, group, sizes, BAND == 1, VARLEN)
        b, h = bh // H, bh % H
        if (index < tiles) & (m * BM < _rows_of(b, index < tiles, sizes, VARLEN)):
            it, local = _dq_tile(c, m, b, h, dq_ptr, g_b, g_h, g_l, lse_ptr, delta_ptr, padded, q, do, smems, bars,
                                 sizes, H, d, scale, pre, scale_out, it, local, BM, BN, D, DV, STAGES, BAND, KEYMASK,
                                 CAPPED, VARLEN, DTYPE)


@gluon_jit
def attention_queries(
    q_desc, do_desc, k_desc, v_desc, dq_ptr, lse_ptr, delta_ptr, mask_ptr, q_starts, k_starts, order, padded, B, H, K,
    L, S, longest, lo, hi, align, d, mask_b, g_b, g_h, g_l, group, scale, pre, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr,
):
    """dQ: a program owns 128 query rows and walks the keys they see; dK and dV start where programs have ended."""
    let_next_start(True)
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BM == 128)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BM // 2, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BM // 2, DV], do_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BN, DV], v_desc.layout)
    bias_smem = _bias_memory(STAGES, BN, KEYMASK)
    bars = (_barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 2 if KEYMASK else 1), _barriers(STAGES, 2),
            _barriers(STAGES, 1), _barriers(STAGES, 2))
    sizes = (L, S, lo, hi, align, q_starts, k_starts, order)
    num_m, heads = (longest + BM - 1) // BM, B * H
    tiles = _num_listed(num_m * heads, sizes, VARLEN)
    smems = (k_smem, v_smem, bias_smem)
    gl.warp_specialize([
        (_dq_rows, (0, dq_ptr, g_b, g_h, g_l, lse_ptr, delta_ptr, padded, q_smem, do_smem, smems, bars, sizes, tiles,
                    num_m, H, heads, group, d, scale, pre, scale_out, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED,
                    VARLEN, DTYPE)),
        (_dq_rows, (1, dq_ptr, g_b, g_h, g_l, lse_ptr, delta_ptr, padded, q_smem, do_smem, smems, bars, sizes, tiles,
                    num_m, H, heads, group, d, scale, pre, scale_out, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED,
                    VARLEN, DTYPE)),
        (_feed_rows, ((q_desc, q_desc, do_desc, k_desc, k_desc, v_desc, v_desc),
                      (q_smem, q_smem, do_smem, k_smem, k_smem, v_smem, v_smem, bias_smem), bars, mask_ptr, mask_b,
                      sizes, tiles, num_m, H, K, heads, group, True, False, BM, BN, D, DV, STAGES, BAND, KEYMASK,
                      VARLEN, 1, 0, 0)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon_jit
def _rows_seeing(n, rows, lo, hi, BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr, LEAST: gl.constexpr):
    """Blocks of query rows that see any key of block n, and inside them those that see all: first, edge, past, stop.

    At least so many, though they may see nothing.
    """
    stop = (rows + BM - 1) // BM
    first = stop * 0
    edge = first
    if BAND >= 1:
        first = min(max(n * BN - hi, 0) // BM, stop - LEAST)
        edge = min((max((n + 1) * BN - 1 - hi, 0) + BM - 1) // BM, stop)
    past = stop
    if BAND == 2:
        stop = max(min(stop, (max((n + 1) * BN - lo, 0) + BM - 1) // BM), first + LEAST)
        edge = min(edge, stop)
        past = max(min(max(n * BN - lo + 1, 0) // BM, stop), edge)
    return first, edge, past, stop


@gluon_jit
def _feed_keys_item(
    n, b, hp, descs, smems, bars, padded, sizes, H, split, ratio, it, local,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    VARLEN: gl.constexpr, LEAST: gl.constexpr,
):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem = smems
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
    at = [batch, hp // split, k0 + n * BN, 0]
    _fetch(k_desc, at, kv_full, kv_empty, k_smem, local, 0, BN * (D + DV) * 2)
    tma.async_copy_global_to_shared(v_desc, at, kv_full.index(0), v_smem.index(0))
    first, edge, past, stop = _rows_seeing(n, rows, lo, hi, BM, BN, BAND, LEAST)
    start = _padded_start(b, q0, VARLEN)
    for j in range(first, stop):  # from the last rows, where all programs of a head meet, to the first
        i = first + stop - 1 - j
        for r in range(ratio):
            h = hp * ratio + r
            flat = (batch * H + h) * padded + start
            slot, turn, row = it % STAGES, it // STAGES, q0 + i * BM
            _fetch(q_desc, [batch, h, row, 0], q_full, q_empty, q_smem, turn, slot, BM * D * 2 + BM * 4)
            tma.async_copy_global_to_shared(lse_desc, [flat + i * BM], q_full.index(slot), lse_smem.index(slot))
            _fetch(do_desc, [batch, h, row, 0], do_full, do_empty, do_smem, turn, slot, BM * DV * 2 + BM * 4)
            tma.async_copy_global_to_shared(delta_desc, [flat + i * BM], do_full.index(slot), delta_smem.index(slot))
            it += 1
    return it, local + 1


@gluon_jit
def _feed_keys(
    descs, smems, bars, padded, sizes, items, num_n, parts, group, H, K, split,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    VARLEN: gl.constexpr, LEAST: gl.constexpr,
):
    """Feeds the kernels that own keys: K and V once, then Q, dO and two numbers a row, for every head of the group."""
    ratio = H // K // split
    it = 0
    local = 0
    for j in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        n, part = _taken(index, items, num_n, parts, group, sizes, False, VARLEN)
        b, hp = part // (K * split), part % (K * split)
        if (index < items) & (n * BN < _keys_of(b, index < items, sizes, VARLEN)):
            it, local = _feed_keys_item(n, b, hp, descs, smems, bars, padded, sizes, H, split, ratio, it, local, BM,
                                        BN, D, DV, STAGES, BAND, VARLEN, LEAST)


@gluon_jit
def _hidden(p, i, key, lo, hi, BM: gl.constexpr, BAND: gl.constexpr, S_L: gl.constexpr):
    """Transposed probabilities of row block i with zeros where the band hides a key."""
    row = gl.expand_dims(i * BM + gl.arange(0, BM, gl.SliceLayout(0, S_L)), 0)
    if BAND >= 1:
        p = gl.where(gl.expand_dims(key, 1) <= row + hi, p, 0.0)
    if BAND == 2:
        p = gl.where(gl.expand_dims(key, 1) >= row + lo, p, 0.0)
    return p


@gluon_jit
def _dkv_step(i, it, k, v, smems, bars, dk, dv, scale, pre, key, lo, hi, MASK: gl.constexpr, BM: gl.constexpr,
              D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, CAPPED: gl.constexpr,
              ROLE: gl.constexpr, DTYPE: gl.constexpr):
    """Transposed scores, so that P and dS are already the left operands of dV and dK, in registers.

    A wide head leaves no registers for both: then one group makes dV (ROLE 1) and the other dK (ROLE 2).
    """
    q_smem, do_smem, lse_smem, delta_smem = smems
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    COL: gl.constexpr = gl.SliceLayout(0, S_L)
    slot, turn = it % STAGES, (it // STAGES) & 1
    q = q_smem.index(slot).reshape([BM, D])
    do = do_smem.index(slot).reshape([BM, DV])
    zero = gl.zeros([64, BM], gl.float32, S_L)
    mbarrier.wait(q_full.index(slot), turn)
    s_on_its_way = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(slot), turn)
    if ROLE == 1:
        s = warpgroup_mma_wait(0, [s_on_its_way])
    else:
        dp_on_its_way = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s_on_its_way])
    if CAPPED:
        s = _tanh(s * pre)
    p = gl.exp2(s * scale - gl.expand_dims(lse_smem.index(slot).load(COL), 0))
    if MASK:
        p = _hidden(p, i, key, lo, hi, BM, BAND, S_L)
    if ROLE == 0:
        dv_on_its_way = warpgroup_mma(gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, V_L, 2)), do, dv,
                                      is_async=True)
        dp = warpgroup_mma_wait(1, [dp_on_its_way])
    if ROLE == 1:
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, V_L, 2)), do, dv)
    if ROLE == 2:
        dp = warpgroup_mma_wait(0, [dp_on_its_way])
    if ROLE != 1:
        ds = p * (dp - gl.expand_dims(delta_smem.index(slot).load(COL), 0))
        if CAPPED:
            ds = ds * (1.0 - s * s)
        left = gl.convert_layout(ds.to(DTYPE), gl.DotOperandLayout(0, K_L, 2))
    if ROLE == 0:
        dk_on_its_way = warpgroup_mma(left, q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, [dv_on_its_way])
        mbarrier.arrive(do_empty.index(slot), count=1)
        dk = warpgroup_mma_wait(0, [dk_on_its_way])
    else:
        if ROLE == 2:
            dk = warpgroup_mma(left, q, dk)
        mbarrier.arrive(do_empty.index(slot), count=1)
    mbarrier.arrive(q_empty.index(slot), count=1)
    return dk, dv, it + 1


@gluon_jit
def _kept_rows(value, kept, L: gl.constexpr):
    """Rows of keys that the mask hides have no gradient."""
    return gl.where(gl.expand_dims(gl.convert_layout(kept, gl.SliceLayout(1, L)), 1), value, 0.0)


@gluon_jit
def _dkv_item(
    c: gl.constexpr, n, b, hp, ptrs, k, v, smems, bars, sizes, ratio, d, dv_dim, scale, pre, scale_out, it, local,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr, ROLE: gl.constexpr, DTYPE: gl.constexpr,
):
    dk_ptr, dk_b, dk_h, dk_l, dv_ptr, dv_b, dv_h, dv_l, mask_ptr, mask_b = ptrs
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    K_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    rows, keys, q0, k0, lo, hi, batch = _extent(b, sizes, VARLEN)
    key0 = n * BN
    if ROLE == 0:
        key0 += c * 64
    key = key0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
    first, edge, past, stop = _rows_seeing(n, rows, lo, hi, BM, BN, BAND, 0)
    mbarrier.wait(kv_full.index(0), local & 1)
    dk = gl.zeros([64, D if ROLE != 1 else 16], gl.float32, K_L)
    dv = gl.zeros([64, DV if ROLE != 2 else 16], gl.float32, V_L)
    if BAND == 2:
        for j in range(past, stop):
            for _ in range(ratio):
                dk, dv, it = _dkv_step(past + stop - 1 - j, it, k, v, smems, bars, dk, dv, scale, pre, key, lo, hi,
                                       True, BM, D, DV, STAGES, BAND, CAPPED, ROLE, DTYPE)
    for _ in range((past - edge) * ratio):
        dk, dv, it = _dkv_step(0, it, k, v, smems, bars, dk, dv, scale, pre, key, lo, hi, False, BM, D, DV, STAGES,
                               BAND, CAPPED, ROLE, DTYPE)
    if BAND >= 1:
        for j in range(first, edge):
            for _ in range(ratio):
                dk, dv, it = _dkv_step(first + edge - 1 - j, it, k, v, smems, bars, dk, dv, scale, pre, key, lo, hi,
                                       True, BM, D, DV, STAGES, BAND, CAPPED, ROLE, DTYPE)
    mbarrier.arrive(kv_empty.index(0), count=1)
    if KEYMASK:
        kept = gl.load(mask_ptr + b.to(gl.int64) * mask_b + key, mask=key < keys, other=0) != 0
    if ROLE != 1:
        if KEYMASK:
            dk = _kept_rows(dk, kept, K_L)
        to = dk_ptr + batch.to(gl.int64) * dk_b + hp.to(gl.int64) * dk_h + k0.to(gl.int64) * dk_l
        _store(to, dk * scale_out, key0, keys, dk_l, d, D)
    if ROLE != 2:
        if KEYMASK:
            dv = _kept_rows(dv, kept, V_L)
        to = dv_ptr + batch.to(gl.int64) * dv_b + hp.to(gl.int64) * dv_h + k0.to(gl.int64) * dv_l
        _store(to, dv, key0, keys, dv_l, dv_dim, DV)
    return it, local + 1


@gluon_jit
def _dkv_rows(
    c: gl.constexpr, ptrs, k_smem, v_smem, smems, bars, sizes, items, num_n, parts, group, H, K, split, d, dv_dim,
    scale, pre, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr, ROLE: gl.constexpr, DTYPE: gl.constexpr,
):
    OWN: gl.constexpr = c * 64 if ROLE == 0 else 0
    k = k_smem.index(0).reshape([BN, D]).slice(OWN, 64, dim=0)
    v = v_smem.index(0).reshape([BN, DV]).slice(OWN, 64, dim=0)
    it = 0
    local = 0
    for j in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        n, part = _taken(index, items, num_n, parts, group, sizes, False, VARLEN)
        b, hp = part // (K * split), part % (K * split)
        if (index < items) & (n * BN < _keys_of(b, index < items, sizes, VARLEN)):
            it, local = _dkv_item(c, n, b, hp, ptrs, k, v, smems, bars, sizes, H // K // split, d, dv_dim, scale, pre,
                                  scale_out, it, local, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, VARLEN, ROLE,
                                  DTYPE)


@gluon_jit
def attention_keys(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, mask_ptr, q_starts, k_starts, order, padded,
    B, H, K, split, L, S, longest_keys, lo, hi, align, d, dv_dim, mask_b, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, group,
    scale, pre, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, CAPPED: gl.constexpr, VARLEN: gl.constexpr, WIDE: gl.constexpr,
):
    """dK and dV: a program owns BN keys and walks the rows of the heads that share them (or a ``split`` of those)."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BN == (64 if WIDE else 128))
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, DV], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, DV], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    bars = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    sizes = (L, S, lo, hi, align, q_starts, k_starts, order)
    parts, num_n = B * K * split, (longest_keys + BN - 1) // BN
    items = _num_listed(num_n * parts, sizes, VARLEN)
    smems = (q_smem, do_smem, lse_smem, delta_smem)
    ptrs = (dk_ptr, dk_b, dk_h, dk_l, dv_ptr, dv_b, dv_h, dv_l, mask_ptr, mask_b)
    gl.warp_specialize([
        (_dkv_rows, (0, ptrs, k_smem, v_smem, smems, bars, sizes, items, num_n, parts, group, H, K, split, d, dv_dim,
                     scale, pre, scale_out, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, VARLEN, 1 if WIDE else 0,
                     DTYPE)),
        (_dkv_rows, (1, ptrs, k_smem, v_smem, smems, bars, sizes, items, num_n, parts, group, H, K, split, d, dv_dim,
                     scale, pre, scale_out, BM, BN, D, DV, STAGES, BAND, KEYMASK, CAPPED, VARLEN, 2 if WIDE else 0,
                     DTYPE)),
        (_feed_keys, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc),
                      (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem), bars, padded, sizes, items, num_n,
                      parts, group, H, K, split, BM, BN, D, DV, STAGES, BAND, VARLEN, 0)),
    ], [4, 1], [240, 24])  # fmt: skip
    _wait_for_the_last()


@gluon_jit
def _fused_step(
    c: gl.constexpr, s, i, it, flat, masked, k, v, k_cols, kept, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, dk,
    dv, scale, key, keys, lo, hi,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, BAND: gl.constexpr,
    KEYMASK: gl.constexpr, DTYPE: gl.constexpr,
):
    """From the scores of row block i to its share of dV, dK and dQ."""
    q_smem, do_smem, lse_smem, delta_smem = smems
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_L)
    slot, turn = it % STAGES, (it // STAGES) & 1
    q = q_smem.index(slot).reshape([BM, D])
    do = do_smem.index(slot).reshape([BM, D])
    zero = gl.zeros([64, BM], gl.float32, S_L)
    mbarrier.wait(do_full.index(slot), turn)
    dp_on_its_way = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    p = gl.exp2(s * scale - gl.expand_dims(lse_smem.index(slot).load(COL), 0))
    if masked:
        p = gl.where(gl.expand_dims(key < keys, 1), p, 0.0)
        p = _hidden(p, i, key, lo, hi, BM, BAND, S_L)
    if KEYMASK:
        p = gl.where(gl.expand_dims(kept, 1), p, 0.0)
    dv_on_its_way = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_on_its_way])
    ds = (p * (dp - gl.expand_dims(delta_smem.index(slot).load(COL), 0))).to(DTYPE)
    # Two buffers need no barrier back: who has written block i + 1 has read block i, and nobody goes on without both.
    shared = ds_smem.index(it & 1)
    shared.slice(c * 64, 64, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    dk_on_its_way = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
    mbarrier.wait(ds_full.index(0), it & 1)
    none = gl.zeros([BM, D // 2], gl.float32, Q_L)
    dq_on_its_way = warpgroup_mma(shared.permute((1, 0)), k_cols, none, use_acc=False, is_async=True)
    dv, dk = warpgroup_mma_wait(1, [dv_on_its_way, dk_on_its_way])
    mbarrier.arrive(q_empty.index(slot), count=1)
    dq = warpgroup_mma_wait(0, [dq_on_its_way])
    tma.store_wait(BUFFERS - 1)
    to = dq_smem.index(c * BUFFERS + it % BUFFERS)
    to.store(dq)
    fence_async_shared()
    _add_to_global(dq_desc, [flat + i * BM, c * (D // 2)], to)
    return dk, dv, it + 1


@gluon_jit
def _scores_of(it, k, q_smem, bars, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    q_full = bars[2]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    mbarrier.wait(q_full.index(it % STAGES), (it // STAGES) & 1)
    q = q_smem.index(it % STAGES).reshape([BM, D])
    return warpgroup_mma(k, q.permute((1, 0)), gl.zeros([64, BM], gl.float32, S_L), use_acc=False)


@gluon_jit
def _fused_item(
    c: gl.constexpr, n, b, hp, ptrs, k, v, k_cols, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, sizes, H, ratio,
    padded, d, scale, scale_out, it, local,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    BAND: gl.constexpr, KEYMASK: gl.constexpr, DTYPE: gl.constexpr,
):
    """All rows that see a block of keys, from the last, where all programs of a head meet, to the first."""
    dk_ptr, dk_b, dk_h, dk_l, dv_ptr, dv_b, dv_h, dv_l, mask_ptr, mask_b = ptrs
    kv_full, kv_empty = bars[0], bars[1]
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    rows, keys, lo, hi = sizes[0], sizes[1], sizes[2], sizes[3]
    key0 = n * BN + c * 64
    key = key0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
    kept = key >= 0
    if KEYMASK:
        kept = gl.load(mask_ptr + b.to(gl.int64) * mask_b + key, mask=key < keys, other=0) != 0
    first, edge, past, stop = _rows_seeing(n, rows, lo, hi, BM, BN, BAND, 1)
    tail = (n + 1) * BN > keys
    mbarrier.wait(kv_full.index(0), local & 1)
    dk = gl.zeros([64, D], gl.float32, A_L)
    dv = gl.zeros([64, D], gl.float32, A_L)
    base = (b * H + hp * ratio) * padded
    i = stop - 1
    for _ in range(first, stop):
        for r in range(ratio):
            s = _scores_of(it, k, smems[0], bars, BM, D, STAGES)
            dk, dv, it = _fused_step(c, s, i, it, base + r * padded, tail | (i < edge) | (i >= past), k, v, k_cols,
                                     kept, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, dk, dv, scale, key, keys,
                                     lo, hi, BM, D, STAGES, BUFFERS, BAND, KEYMASK, DTYPE)
        i -= 1
    mbarrier.arrive(kv_empty.index(0), count=1)
    to = dk_ptr + b.to(gl.int64) * dk_b + hp.to(gl.int64) * dk_h
    _store(to, dk * scale_out, key0, keys, dk_l, d, D)
    to = dv_ptr + b.to(gl.int64) * dv_b + hp.to(gl.int64) * dv_h
    _store(to, dv, key0, keys, dv_l, d, D)
    return it


@gluon_jit
def _fused_rows(
    c: gl.constexpr, ptrs, k_smem, v_smem, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, sizes, items, parts, group,
    H, K, split, padded, d, scale, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    BAND: gl.constexpr, KEYMASK: gl.constexpr, DTYPE: gl.constexpr,
):
    whole = k_smem.index(0).reshape([BN, D])
    k = whole.slice(c * 64, 64, dim=0)
    k_cols = whole.slice(c * (D // 2), D // 2, dim=1)
    v = v_smem.index(0).reshape([BN, D]).slice(c * 64, 64, dim=0)
    it = 0
    for j in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _turn(j)
        n, part = _tile(index, items // parts, parts, group, False)
        if index < items:
            it = _fused_item(c, n, part // (K * split), part % (K * split), ptrs, k, v, k_cols, smems, ds_smem, dq_smem,
                             dq_desc, bars, ds_full, sizes, H, H // K // split, padded, d, scale, scale_out, it, j, BM,
                             BN, D, STAGES, BUFFERS, BAND, KEYMASK, DTYPE)
    tma.store_wait(0)


@gluon_jit
def attention_fused(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_ptr, dv_ptr, mask_ptr, padded, B, H, K,
    split, L, S, lo, hi, d, mask_b, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, group, scale, scale_out,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    BAND: gl.constexpr, KEYMASK: gl.constexpr,
):
    """dK, dV and dQ from five products: a program owns 128 keys; the copy engine adds its share of dQ to memory."""
    DTYPE: gl.constexpr = q_desc.dtype
    gl.static_assert(BN == 128 and BM == 64 and D == 128)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], DTYPE))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2 * BUFFERS, BM, D // 2], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    q_empty = _barriers(STAGES, 2)  # rows of Q and dO are given back together
    bars = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), q_empty, _barriers(STAGES, 1), q_empty)
    ds_full = _barriers(1, 2)
    sizes = (L, S, lo, hi, 0, mask_ptr, mask_ptr, mask_ptr)
    parts = B * K * split
    items = (S + BN - 1) // BN * parts
    smems = (q_smem, do_smem, lse_smem, delta_smem)
    ptrs = (dk_ptr, dk_b, dk_h, dk_l, dv_ptr, dv_b, dv_h, dv_l, mask_ptr, mask_b)
    gl.warp_specialize([
        (_fused_rows, (0, ptrs, k_smem, v_smem, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, sizes, items, parts,
                       group, H, K, split, padded, d, scale, scale_out, BM, BN, D, STAGES, BUFFERS, BAND, KEYMASK,
                       DTYPE)),
        (_fused_rows, (1, ptrs, k_smem, v_smem, smems, ds_smem, dq_smem, dq_desc, bars, ds_full, sizes, items, parts,
                       group, H, K, split, padded, d, scale, scale_out, BM, BN, D, STAGES, BUFFERS, BAND, KEYMASK,
                       DTYPE)),
        (_feed_keys, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc),
                      (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem), bars, padded, sizes, items,
                      items // parts, parts, group, H, K, split, BM, BN, D, D, STAGES, BAND, False, 1)),
    ], [4, 1], [240, 24])  # fmt: skip


@jit
def attention_rounded(
    sum_ptr, dq_ptr, H, L, padded, d, g_b, g_h, g_l, scale, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """dQ as it was summed in float32, scaled and rounded to where it belongs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1)
    col = tl.arange(0, D)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    inside = (row < L)[:, None] & (col < d)[None, :]
    found = tl.load(sum_ptr + (bh.to(tl.int64) * padded + row)[:, None] * D + col[None, :], mask=inside, other=0.0)
    to = dq_ptr + b * g_b + h * g_h + row.to(tl.int64)[:, None] * g_l + col[None, :]
    tl.store(to, (found * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@jit
def attention_sum(part_ptr, out_ptr, K, size, o_b, o_h, o_l, d, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum over a head's SPLIT partial results of ``size`` elements each, in a fixed order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLIT):
        total += tl.load(part_ptr + (head * SPLIT + s) * size + at, mask=inside, other=0.0)
    to = out_ptr + head // K * o_b + head % K * o_h + (at // d).to(tl.int64) * o_l + at % d
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)
