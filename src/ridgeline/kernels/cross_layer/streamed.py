"""The cross layer where rows stay: 128 rows of the left factor lie in shared memory while all of the weight passes by.

Shapes: M rows, N columns of the result, K the inner dim in chunks of 64; tiles are 128 columns wide.
A tile of the product alone reads as much of the weight as of its rows, and reads its rows again for every tile. Here
rows are read once, and where the layer is not of low rank they are also what is added at the end.
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

from ridgeline.kernels.attention.kernel import _barriers


@gluon.jit
def _feed_chunk(desc, row, col, smem, full, empty, at, parity, BYTES: gl.constexpr):
    """One block through the copy engine, as soon as there is room for it."""
    mbarrier.wait(empty.index(at), parity)
    mbarrier.expect(full.index(at), BYTES)
    tma.async_copy_global_to_shared(desc, [row, col], full.index(at), smem.index(at))


@gluon.jit
def _feed_tiles(
    a_desc, w_desc, x0_desc, x_desc, a_smem, w_smem, t_smem, s_smem, bars, blocks, tiles,
    CHUNKS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, ENDS: gl.constexpr, TURNED: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """Rows chunk by chunk, all ahead where there are two buffers; the weight; and what the end of a tile reads, last,
    since it waits for the end of the tile before."""
    a_full, a_empty, w_full, w_empty, t_full, t_empty, _ = bars
    CHUNK_BYTES: gl.constexpr = 128 * 64 * 2
    END_BYTES: gl.constexpr = 128 * 128 * 2 * (2 if APART else 1)
    r, t, q = blocks * 0, blocks * 0, blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, first, parity = block * 128, (r % BUFFERS) * CHUNKS, ((r // BUFFERS) & 1) ^ 1
        if BUFFERS > 1:
            for c in range(CHUNKS):
                _feed_chunk(a_desc, row, c * 64, a_smem, a_full, a_empty, first + c, parity, CHUNK_BYTES)
        for j in range(tiles):
            for c in range(CHUNKS):
                if BUFFERS == 1:
                    if j == 0:
                        _feed_chunk(a_desc, row, c * 64, a_smem, a_full, a_empty, first + c, parity, CHUNK_BYTES)
                turn = ((q // STAGES) & 1) ^ 1
                if TURNED:
                    _feed_chunk(w_desc, c * 64, j * 128, w_smem, w_full, w_empty, q % STAGES, turn, CHUNK_BYTES)
                else:
                    _feed_chunk(w_desc, j * 128, c * 64, w_smem, w_full, w_empty, q % STAGES, turn, CHUNK_BYTES)
                q += 1
            end, whose = t % ENDS, t % 2
            mbarrier.wait(t_empty.index(end), ((t // ENDS) & 1) ^ 1)
            mbarrier.expect(t_full.index(whose), END_BYTES)
            tma.async_copy_global_to_shared(x0_desc, [row, j * 128], t_full.index(whose), t_smem.index(end))
            if APART:
                tma.async_copy_global_to_shared(x_desc, [row, j * 128], t_full.index(whose), s_smem.index(end))
            t += 1
        r += 1


@gluon.jit
def _tile_product(
    G: gl.constexpr, j, tile, mine, first, parity, last, a_smem, w_smem, bars,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr, KEEPS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """128×128 of the product, when it is this group's turn: the other one ends its own tile meanwhile.

    Of the last tile of a block, chunks of rows are given back as they are used up, but for the two that its end reads.
    """
    a_full, a_empty, w_full, w_empty, _, _, order = bars
    mbarrier.wait(order.index(G), (mine & 1) ^ (1 - G))
    acc = gl.zeros([128, 128], gl.float32, L)
    for c in gl.static_range(CHUNKS):
        q = tile * CHUNKS + c
        mbarrier.wait(a_full.index(first + c), parity)
        mbarrier.wait(w_full.index(q % STAGES), (q // STAGES) & 1)
        w = w_smem.index(q % STAGES)
        if not TURNED:
            w = w.permute((1, 0))
        on_its_way = warpgroup_mma(a_smem.index(first + c), w, acc, use_acc=c > 0, is_async=True)
        if c < CHUNKS - 1:
            acc = warpgroup_mma_wait(1, [on_its_way])
        if c == CHUNKS - 1:
            mbarrier.arrive(order.index(1 - G), count=1)
            acc = warpgroup_mma_wait(0, [on_its_way])
        if c > 0:
            mbarrier.arrive(w_empty.index((q - 1) % STAGES), count=1)
            kept = KEEPS and j == (c - 1) // 2
            mbarrier.arrive(a_empty.index(first + c - 1), count=1, pred=last and not kept)
    mbarrier.arrive(w_empty.index((tile * CHUNKS + CHUNKS - 1) % STAGES), count=1)
    kept = KEEPS and j == (CHUNKS - 1) // 2
    mbarrier.arrive(a_empty.index(first + CHUNKS - 1), count=1, pred=last and not kept)
    return acc


@gluon.jit
def _ended(
    half: gl.constexpr, acc, x0, x, bias_ptr, at, n,
    CROSS: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, H: gl.constexpr,
):  # fmt: skip
    """Half the columns of a tile: the product as it is kept, and the result."""
    if HAS_BIAS:
        col = at + half * 64 + gl.arange(0, 64, gl.SliceLayout(0, H))
        acc += gl.expand_dims(gl.load(bias_ptr + col, mask=col < n, other=0.0).to(gl.float32), 0)
    u = acc.to(DTYPE)
    if CROSS:
        acc = u.to(gl.float32) * x0.slice(half * 64, 64, dim=1).load(H).to(gl.float32)
    acc += x.load(H).to(gl.float32)
    return u, acc.to(DTYPE)


@gluon.jit
def _write(desc, row, col, smem, left, right):
    """A tile to memory, through shared memory; whoever comes next finds that empty."""
    smem.slice(0, 64, dim=1).store(left)
    smem.slice(64, 64, dim=1).store(right)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, col], smem)
    tma.store_wait(0)


@gluon.jit
def _cross_tiles(
    G: gl.constexpr, a_smem, w_smem, t_smem, s_smem, y_desc, u_desc, bias_ptr, bars, n, blocks, tiles,
    CHUNKS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, ENDS: gl.constexpr, TURNED: gl.constexpr,
    APART: gl.constexpr, CROSS: gl.constexpr, HAS_BIAS: gl.constexpr, SAVE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Every second tile: its product, then what is done to it, half its columns at a time to save registers."""
    a_full, a_empty, _, _, t_full, t_empty, _ = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    KEEPS: gl.constexpr = CROSS and not APART
    r, mine = blocks * 0, blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        first, parity = (r % BUFFERS) * CHUNKS, (r // BUFFERS) & 1
        begin = (r * tiles + G) % 2
        if begin >= tiles:  # nothing to do in this block, of which both have to let go
            for c in range(CHUNKS):
                mbarrier.wait(a_full.index(first + c), parity)
                mbarrier.arrive(a_empty.index(first + c), count=1)
        for j in range(begin, tiles, 2):
            tile, last = r * tiles + j, j + 2 >= tiles
            acc = _tile_product(G, j, tile, mine, first, parity, last, a_smem, w_smem, bars, CHUNKS, STAGES, TURNED,
                                KEEPS, L)  # fmt: skip
            left, right = gl.split(gl.permute(gl.reshape(acc, [128, 2, 64]), (0, 2, 1)))
            left = gl.convert_layout(left, H, assert_trivial=True)
            right = gl.convert_layout(right, H, assert_trivial=True)
            end = t_smem.index(tile % ENDS)
            if KEEPS:
                x_left, x_right = a_smem.index(first + 2 * j), a_smem.index(first + 2 * j + 1)
            else:
                x = s_smem.index(tile % ENDS)
                x_left, x_right = x.slice(0, 64, dim=1), x.slice(64, 64, dim=1)
            mbarrier.wait(t_full.index(G), mine & 1)
            u_left, left = _ended(0, left, end, x_left, bias_ptr, j * 128, n, CROSS, HAS_BIAS, DTYPE, H)
            u_right, right = _ended(1, right, end, x_right, bias_ptr, j * 128, n, CROSS, HAS_BIAS, DTYPE, H)
            if SAVE:
                _write(u_desc, block * 128, j * 128, end, u_left, u_right)
            _write(y_desc, block * 128, j * 128, end, left, right)
            mbarrier.arrive(t_empty.index(tile % ENDS), count=1)
            if KEEPS:
                mbarrier.arrive(a_empty.index(first + 2 * j), count=1, pred=last)
                mbarrier.arrive(a_empty.index(first + 2 * j + 1), count=1, pred=last)
            mine += 1
        r += 1


@gluon.jit
def cross_resident(
    a_desc,  # [M, K]
    w_desc,  # [N, K], or [K, N] where TURNED
    x0_desc,  # [M, N]; where not CROSS, what is added
    x_desc,  # [M, N]
    y_desc,  # [M, N]
    u_desc,  # [M, N] the product itself, which the backward pass needs
    bias_ptr,  # [N]
    n, blocks, tiles,
    CHUNKS: gl.constexpr,  # of 64 of the inner dim, an even number
    BUFFERS: gl.constexpr,  # of 128 rows of the left factor
    STAGES: gl.constexpr,  # chunks of the weight on their way
    ENDS: gl.constexpr,  # tiles that are ended at once, one or two
    TURNED: gl.constexpr,
    APART: gl.constexpr,  # x is not the left factor: the low-rank form
    CROSS: gl.constexpr,  # x0 · (product + bias) + x; else product + x0
    HAS_BIAS: gl.constexpr,
    SAVE: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 rows, one after the other; two groups of four warps take turns at the tensor cores."""
    DTYPE: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(DTYPE, [BUFFERS * CHUNKS, 128, 64], a_desc.layout)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 128] if TURNED else [STAGES, 128, 64], w_desc.layout)
    t_smem = gl.allocate_shared_memory(DTYPE, [ENDS, 128, 128], x0_desc.layout)
    s_smem = t_smem
    if APART:
        s_smem = gl.allocate_shared_memory(DTYPE, [ENDS, 128, 128], x_desc.layout)
    bars = (_barriers(BUFFERS * CHUNKS, 1), _barriers(BUFFERS * CHUNKS, 2), _barriers(STAGES, 1), _barriers(STAGES, 1),
            _barriers(2, 1), _barriers(ENDS, 1), _barriers(2, 1))  # fmt: skip
    gl.warp_specialize([
        (_cross_tiles, (0, a_smem, w_smem, t_smem, s_smem, y_desc, u_desc, bias_ptr, bars, n, blocks, tiles, CHUNKS,
                        BUFFERS, STAGES, ENDS, TURNED, APART, CROSS, HAS_BIAS, SAVE, DTYPE)),
        (_cross_tiles, (1, a_smem, w_smem, t_smem, s_smem, y_desc, u_desc, bias_ptr, bars, n, blocks, tiles, CHUNKS,
                        BUFFERS, STAGES, ENDS, TURNED, APART, CROSS, HAS_BIAS, SAVE, DTYPE)),
        (_feed_tiles, (a_desc, w_desc, x0_desc, x_desc, a_smem, w_smem, t_smem, s_smem, bars, blocks, tiles, CHUNKS,
                       BUFFERS, STAGES, ENDS, TURNED, APART)),
    ], [4, 1], [224, 56])  # fmt: skip
