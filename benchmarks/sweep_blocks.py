"""Launch configurations of every other family side by side, by the rules of `sweep_rows.py`.

    python benchmarks/sweep_blocks.py --out results --budget-s 30 --parts ordered,quantized,losses,uneven
    python benchmarks/sweep_blocks.py --pack kernels --jobs 12
    python benchmarks/sweep_blocks.py --table data/recordings/h200/blocks_sweep4.json.gz

How rows of embedding bags are put in order for their gradients; norms to eight bits that were far from a copy on drawn
shapes; losses of rows that start inside accesses; pieces of GroupNorm's channels that are no powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import sweep_rows
from sweep_rows import Sweep


def ordered() -> Iterator[Sweep]:
    """PyTorch's sort, all pairs, digits of several widths: gradients of one table."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.embedding_bag.config import Order

    library, pairs = Order(0, 0, 0, 0), Order(32, 0, 256, 4)
    for batch, rows, dim, length, tried in (
        (1434, 474085, 48, 8, (library, pairs, Order(64, 0, 128, 4), Order(1024, 7, 16, 4))),
        (722, 71686, 192, 20, (library, pairs, Order(1024, 6, 16, 4), Order(512, 6, 16, 4))),
        (21490, 165772, 128, 1, (library, pairs, Order(1024, 6, 16, 4), Order(512, 6, 16, 4), Order(1024, 6, 16, 8))),
        (61582, 4484, 128, 1, (library, Order(1024, 7, 16, 4), Order(512, 7, 16, 4), Order(2048, 7, 16, 8))),
        (65536, 133581, 16, 8, (library, Order(1024, 6, 16, 4), Order(2048, 6, 16, 8), Order(2048, 6, 32, 8))),
    ):
        of = case("float32", tables=1, batch=batch, rows=rows, dim=dim, length=length, mode="sum", index="int64")
        yield Sweep("embedding_bag.order", "embedding_bag", "bwd", of, tried)


def quantized() -> Iterator[Sweep]:
    """Rows of 1.3k to 3k columns with more programs a multiprocessor, long ones walked over as well."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant.config import Tile

    two = (Tile(1, 2, 1024, 4, 3, 6), Tile(1, 1, 2048, 4, 3, 6), Tile(1, 4, 512, 2, 3, 8), Tile(1, 2, 1024, 4, 3, 5))
    three = (Tile(1, 3, 1024, 4, 3, 5), Tile(1, 3, 1024, 4, 3, 6))
    long = (Tile(1, 5, 2048, 8, 3, 2), Tile(1, 10, 1024, 4, 3, 2), Tile(1, 5, 2048, 8, 2, 2))
    for name, rows, cols, kind, block, tried in (
        ("layer_norm_quant", 49495, 1920, "int8", 128, two),
        ("layer_norm_quant", 32768, 1536, "float8_e4m3fn", 0, two),
        ("rms_norm_quant", 40000, 2048, "float8_e4m3fn", 128, two),
        ("rms_norm_quant", 85849, 2432, "int8", 128, three),
        ("layer_norm_quant", 24000, 2560, "float8_e4m3fn", 0, three),
        ("layer_norm_quant", 11106, 6144, "float8_e4m3fn", 0, (Tile(1, 6, 1024, 4, 3, 3), Tile(1, 6, 1024, 4, 3, 2))),
        ("rms_norm_quant", 7003, 9792, "float8_e4m3fn", 64, long),
        ("layer_norm_quant", 3484, 8960, "float8_e4m3fn", 128, (*long[:1], Tile(1, 5, 2048, 8, 2, 1),
                                                                Tile(1, 3, 4096, 16, 3, 1))),
    ):  # fmt: skip
        yield Sweep(name, name, "fwd", case("bfloat16", rows=rows, cols=cols, kind=kind, block=block), tried)


def losses() -> Iterator[Sweep]:
    """Odd rows of 2k to 8k columns held whole instead of in blocks of 2048."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy.config import Forward, Short

    for dtype, rows, cols, tried in (
        ("bfloat16", 25054, 3191, (Short(1, 7, 512, 2, 1, 12), Short(1, 4, 1024, 4, 1, 8), Short(1, 13, 256, 1, 1, 16),
                                   Short(1, 7, 512, 2, 2, 12), Forward(1024, 2, 1, 1), Forward(4096, 4, 1, 1))),
        ("bfloat16", 16384, 5003, (Short(1, 5, 1024, 4, 1, 8), Short(1, 10, 512, 2, 1, 10), Short(1, 5, 1024, 4, 2, 6),
                                   Forward(1024, 2, 1, 1))),
        ("float32", 16384, 3191, (Short(1, 7, 512, 4, 1, 8), Short(1, 13, 256, 2, 1, 12), Forward(1024, 4, 1, 1))),
    ):  # fmt: skip
        yield Sweep("cross_entropy.forward", "cross_entropy", "fwd", case(dtype, rows=rows, cols=cols), tried)


def uneven() -> Iterator[Sweep]:
    """GroupNorm's backward pass of images whose channels powers of two hardly divide: pieces of other lengths."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images

    for name, dtype, batch, channels, side, groups, steps in (
        ("group_norm", "float16", 512, 128, 20, 32, (16, 400, 200)),
        ("group_norm_silu", "float16", 119, 2560, 20, 32, (16, 400, 200)),
        ("group_norm_silu", "bfloat16", 197, 128, 36, 8, (16, 432, 648)),
    ):
        of = case(dtype, batch=batch, channels=channels, side=side, groups=groups)
        tried = tuple(Images(4, 4, 3, 4, early=True, step=step) for step in steps)
        yield Sweep("group_norm.backward_streamed", name, "bwd", of, tried)


sweep_rows.PARTS = {"ordered": ordered, "quantized": quantized, "losses": losses, "uneven": uneven}

if __name__ == "__main__":
    sweep_rows.main()
