"""A product whose rows stay: 128 rows of the left factor lie in shared memory while all of the weight passes by.

Shapes: M rows, N columns of the result, K the inner dim in chunks of 64; tiles are 128 columns wide.
A tile of its own reads as much of the weight as of its rows, and every tile reads its rows again. Here rows are read
once, which pays where sums are short and rows are many: the last step of the cross layer's gradients.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention.kernel import _barriers
from ridgeline.kernels.function import gluon_jit


@gluon_jit
def _feed_chunk(desc, row, col, smem, full, empty, at, parity):
    """128×64 or 64×128 through the copy engine, as soon as there is room."""
    mbarrier.wait(empty.index(at), parity)
    mbarrier.expect(full.index(at), 128 * 64 * 2)
    tma.async_copy_global_to_shared(desc, [row, col], full.index(at), smem.index(at))


@gluon_jit
def _feed_tiles(
    a_desc, w_desc, x_desc, a_smem, w_smem, x_smem, bars, blocks, tiles,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """Rows chunk by chunk with the first tile; the weight; and what is added, last, since it waits for a tile's end."""
    a_full, a_empty, w_full, w_empty, x_full, x_empty, _ = bars
    r, t, q = blocks * 0, blocks * 0, blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, parity = block * 128, (r & 1) ^ 1
        for j in range(tiles):
            for c in range(CHUNKS):
                if j == 0:
                    _feed_chunk(a_desc, row, c * 64, a_smem, a_full, a_empty, c, parity)
                _feed_chunk(w_desc, c * 64, j * 128, w_smem, w_full, w_empty, q % STAGES, ((q // STAGES) & 1) ^ 1)
                q += 1
            end, whose = t % ENDS, t % 2
            mbarrier.wait(x_empty.index(end), ((t // ENDS) & 1) ^ 1)
            mbarrier.expect(x_full.index(whose), 128 * 128 * 2)
            tma.async_copy_global_to_shared(x_desc, [row, j * 128], x_full.index(whose), x_smem.index(end))
            t += 1
        r += 1


@gluon_jit
def _tile_product(
    G: gl.constexpr, tile, mine, parity, last, a_smem, w_smem, bars,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """128×128 of the product, when it is this group's turn: the other one ends its own tile meanwhile.

    Of the last tile of a block, chunks of rows are given back as they are used up.
    """
    a_full, a_empty, w_full, w_empty, _, _, order = bars
    mbarrier.wait(order.index(G), (mine & 1) ^ (1 - G))
    acc = gl.zeros([128, 128], gl.float32, L)
    for c in gl.static_range(CHUNKS):
        q = tile * CHUNKS + c
        mbarrier.wait(a_full.index(c), parity)
        mbarrier.wait(w_full.index(q % STAGES), (q // STAGES) & 1)
        on_its_way = warpgroup_mma(a_smem.index(c), w_smem.index(q % STAGES), acc, use_acc=c > 0, is_async=True)
        if c < CHUNKS - 1:
            acc = warpgroup_mma_wait(1, [on_its_way])
        if c == CHUNKS - 1:
            mbarrier.arrive(order.index(1 - G), count=1)
            acc = warpgroup_mma_wait(0, [on_its_way])
        if c > 0:
            mbarrier.arrive(w_empty.index((q - 1) % STAGES), count=1)
            mbarrier.arrive(a_empty.index(c - 1), count=1, pred=last)
    mbarrier.arrive(w_empty.index((tile * CHUNKS + CHUNKS - 1) % STAGES), count=1)
    mbarrier.arrive(a_empty.index(CHUNKS - 1), count=1, pred=last)
    return acc


@gluon_jit
def _end_tile(y_desc, row, col, smem, acc, DTYPE: gl.constexpr):
    """What is added, and the tile to memory through the place of that; half the columns at a time saves registers."""
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left, right = gl.split(gl.permute(gl.reshape(acc, [128, 2, 64]), (0, 2, 1)))
    left = gl.convert_layout(left, H, assert_trivial=True)
    right = gl.convert_layout(right, H, assert_trivial=True)
    left += smem.slice(0, 64, dim=1).load(H).to(gl.float32)
    left_out = left.to(DTYPE)
    right += smem.slice(64, 64, dim=1).load(H).to(gl.float32)
    right_out = right.to(DTYPE)
    smem.slice(0, 64, dim=1).store(left_out)
    smem.slice(64, 64, dim=1).store(right_out)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, col], smem)
    tma.store_wait(0)


@gluon_jit
def _every_other_tile(
    G: gl.constexpr, a_smem, w_smem, x_smem, y_desc, bars, blocks, tiles,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, ENDS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    a_full, a_empty, _, _, x_full, x_empty, _ = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    r, mine = blocks * 0, blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        parity = r & 1
        begin = (r * tiles + G) % 2
        if begin >= tiles:  # nothing to do in this block, of which both have to let go
            for c in range(CHUNKS):
                mbarrier.wait(a_full.index(c), parity)
                mbarrier.arrive(a_empty.index(c), count=1)
        for j in range(begin, tiles, 2):
            tile, last = r * tiles + j, j + 2 >= tiles
            acc = _tile_product(G, tile, mine, parity, last, a_smem, w_smem, bars, CHUNKS, STAGES, L)
            end = x_smem.index(tile % ENDS)
            mbarrier.wait(x_full.index(G), mine & 1)
            _end_tile(y_desc, block * 128, j * 128, end, acc, DTYPE)
            mbarrier.arrive(x_empty.index(tile % ENDS), count=1)
            mine += 1
        r += 1


@gluon_jit
def cross_resident(
    a_desc,  # [M, K]
    w_desc,  # [K, N]
    x_desc,  # [M, N]
    y_desc,  # [M, N] a w + x
    blocks, tiles,
    CHUNKS: gl.constexpr,  # of 64 of the inner dim
    STAGES: gl.constexpr,  # chunks of the weight on their way
    ENDS: gl.constexpr,  # tiles that are ended at once, one or two
):  # fmt: skip
    """Blocks of 128 rows, one after the other; two groups of four warps take turns at the tensor cores."""
    DTYPE: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(DTYPE, [CHUNKS, 128, 64], a_desc.layout)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 128], w_desc.layout)
    x_smem = gl.allocate_shared_memory(DTYPE, [ENDS, 128, 128], x_desc.layout)
    bars = (_barriers(CHUNKS, 1), _barriers(CHUNKS, 2), _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(2, 1),
            _barriers(ENDS, 1), _barriers(2, 1))  # fmt: skip
    gl.warp_specialize([
        (_every_other_tile, (0, a_smem, w_smem, x_smem, y_desc, bars, blocks, tiles, CHUNKS, STAGES, ENDS, DTYPE)),
        (_every_other_tile, (1, a_smem, w_smem, x_smem, y_desc, bars, blocks, tiles, CHUNKS, STAGES, ENDS, DTYPE)),
        (_feed_tiles, (a_desc, w_desc, x_desc, a_smem, w_smem, x_smem, bars, blocks, tiles, CHUNKS, STAGES, ENDS)),
    ], [4, 1], [224, 56])  # fmt: skip
