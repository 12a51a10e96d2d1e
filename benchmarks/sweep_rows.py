"""Launch configurations of row kernels side by side: each is first compared with the reference, then timed in turns.

    python benchmarks/sweep_rows.py --out results --budget-s 60 --parts four_warps,quantizing
    python benchmarks/sweep_rows.py --pack kernels --jobs 12 --parts four_warps   (compiles, without a device)
    python benchmarks/sweep_rows.py --table data/recordings/h200/rows_sweep1.json.gz

Every configuration of a case sees the same inputs and the same gradients of its results, and memory full of NaN where
its results go. Times are taken in turns with a cold L2, a bare copy that moves as many bytes among them; a
configuration that is not right is not timed. One file, written again after every case.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
FILE = "sweep_rows.json.gz"
ROUNDS = 11
WARM = 4
"""Calls after every change of configuration, which has plans made anew: the first few are not as fast as the next."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A kernel of a function in one phase of a case, and the configurations to try beside its default."""

    kernel: str
    name: str
    phase: str
    of: Any
    configs: tuple[Any, ...]


def four_warps() -> Iterator[Sweep]:
    """Backward passes on programs of four warps, the default since they were timed, and on eight."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images as Im
    from ridgeline.kernels.rms_norm.config import Backward
    from ridgeline.kernels.shares import Streamed as T

    for rows, cols in ((4096, 50257), (2048, 151936)):
        of = case("bfloat16", rows=rows, cols=cols)
        yield Sweep("softmax.backward", "softmax", "bwd", of, (T(4, 4, 3, 4), T(4, 8, 3, 2)))
    wide = case("float32", rows=16384, cols=4099)
    kept = (Backward(1, 8, 512, 4, 3, 2, True, True), Backward(1, 3, 2048, 8, 3, 1, False))
    yield Sweep("layer_norm.backward", "layer_norm", "bwd", wide, kept)
    for batch, channels, side in ((4, 512, 128), (16, 512, 128), (32, 320, 56), (16, 640, 64), (16, 320, 96)):
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        tried = (Im(4, 4, 3, 4), Im(4, 8, 3, 2), Im(8, 4, 3, 2), Im(2, 4, 3, 8))
        yield Sweep("group_norm.backward_streamed", "group_norm_silu", "bwd", of, tried)
        if (channels, side) in ((320, 56), (640, 64)):
            ahead = (Im(8, 4, 3, 4), Im(4, 4, 3, 8), Im(4, 8, 3, 4))
            yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, ahead)
    of = case("bfloat16", batch=16, channels=512, side=128, groups=32)
    yield Sweep("group_norm.backward_streamed", "group_norm", "bwd", of, (Im(4, 4, 3, 4), Im(4, 8, 3, 2)))


def quantizing() -> Iterator[Sweep]:
    """Norms with 8-bit results: rows in one piece and in several, on four warps and on eight."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant.config import Tile

    four = (Tile(1, 4, 1024, 4, 3, 4), Tile(1, 1, 4096, 4, 3, 4), Tile(1, 1, 4096, 8, 3, 4), Tile(1, 1, 4096, 8, 3, 3))
    five = (Tile(1, 5, 1024, 4, 3, 3), Tile(1, 5, 1024, 4, 3, 2))
    eight = (Tile(1, 4, 2048, 8, 3, 2), Tile(1, 8, 1024, 4, 3, 2), Tile(1, 1, 8192, 8, 3, 2))
    for name, kind, group in (("layer_norm_quant", "float8_e4m3fn", 128), ("rms_norm_quant", "float8_e4m3fn", 128),
                              ("layer_norm_quant", "float8_e4m3fn", 0)):  # fmt: skip
        for rows, cols, tried in ((16384, 4096, four), (16384, 5120, five), (8192, 8192, eight)):
            if cols != 5120 or name == "layer_norm_quant":
                of = case("bfloat16", rows=rows, cols=cols, kind=kind, block=group)
                yield Sweep(name, name, "fwd", of, tried)


def losses() -> Iterator[Sweep]:
    """Cross-entropy of short and middling rows: a program a row, or walking over rows with the next on their way."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy.config import Forward
    from ridgeline.kernels.cross_entropy.config import Short as W

    tried = {
        (32768, 4096): (Forward(4096, 4, 1, 1), Forward(2048, 2, 1, 1), W(1, 8, 512, 2, 3, 8), W(1, 8, 512, 2, 3, 12),
                        W(1, 4, 1024, 4, 3, 5)),
        (16384, 8192): (Forward(8192, 8, 1, 1), Forward(4096, 4, 1, 1), W(1, 8, 1024, 4, 3, 4), W(1, 8, 1024, 4, 3, 6),
                        W(1, 4, 2048, 8, 3, 3)),
        (8192, 16384): (Forward(8192, 8, 1, 1), W(1, 8, 2048, 8, 3, 2), W(1, 8, 2048, 8, 3, 3)),
        (16384, 5000): (Forward(8192, 8, 1, 1), W(1, 5, 1024, 4, 3, 5), W(1, 10, 512, 2, 3, 8)),
        (65536, 2048): (W(4, 8, 256, 4, 1, 32), W(1, 8, 256, 1, 3, 16), W(1, 8, 256, 1, 3, 24), W(4, 8, 256, 4, 3, 4)),
        (65536, 1000): (W(8, 8, 128, 4, 1, 32), W(2, 8, 128, 1, 3, 16), W(2, 8, 128, 1, 3, 20), W(4, 8, 128, 2, 3, 10)),
        (262144, 256): (W(16, 4, 64, 4, 1, 64), W(16, 4, 64, 4, 3, 8), W(4, 4, 64, 1, 3, 24), W(4, 4, 64, 1, 3, 32)),
    }  # fmt: skip
    for (rows, cols), configs in tried.items():
        kernel = "cross_entropy.short" if cols <= 2048 else "cross_entropy.forward"
        yield Sweep(kernel, "cross_entropy", "fwd", case("bfloat16", rows=rows, cols=cols), configs)
    full = (Forward(4096, 4, 1, 1), W(1, 8, 512, 4, 3, 4), W(1, 8, 512, 4, 3, 6))
    yield Sweep("cross_entropy.forward", "cross_entropy", "fwd", case("float32", rows=16384, cols=4096), full)


def long_backward() -> Iterator[Sweep]:
    """Backward passes of long rows on eight warps, sixteen and more."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B

    wide = case("bfloat16", rows=8192, cols=12288)
    sixteen, eight = B(1, 3, 4096, 16, 3, 1, False), B(1, 6, 2048, 8, 3, 1, False)
    yield Sweep("rms_norm.backward", "rms_norm", "bwd", wide, (eight, sixteen))
    yield Sweep("layer_norm.backward", "layer_norm", "bwd", wide, (eight, B(1, 3, 4096, 16, 2, 1, False)))


def powers() -> Iterator[Sweep]:
    """Softmax's powers computed once, in shares that registers hold; two sigmoids an inverse."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images as Im
    from ridgeline.kernels.softmax.config import Shares as T

    kept = (T(4, 4, 4, 4, kept=True), T(4, 4, 6, 4, kept=True), T(8, 4, 6, 2, kept=True), T(8, 4, 4, 3, kept=True),
            T(4, 8, 6, 2, kept=True))  # fmt: skip
    for rows, cols in ((2048, 65536), (4096, 50257), (512, 262144), (4096, 32768), (2048, 128256), (8192, 32000)):
        of = case("bfloat16", rows=rows, cols=cols)
        yield Sweep("softmax.forward", "softmax", "fwd", of, (T(8, 4, 3, 4), *kept))
    for batch, channels, side in ((4, 512, 128), (16, 512, 128), (32, 320, 56)):
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        ahead, back = Im(8, 4, 3, 4, paired=True), Im(4, 4, 3, 4, paired=True)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, (ahead,))
        yield Sweep("group_norm.backward_streamed", "group_norm_silu", "bwd", of, (back,))


def wide() -> Iterator[Sweep]:
    """Softmax of long float32 rows."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.softmax.config import Shares as T

    for rows, cols in ((2048, 50257), (2048, 32000), (4096, 16384)):
        of = case("float32", rows=rows, cols=cols)
        yield Sweep("softmax.forward", "softmax", "fwd", of, (T(8, 4, 3, 4), T(8, 8, 3, 2), T(4, 4, 3, 8)))


def last() -> Iterator[Sweep]:
    """What has changed since it was last on a device."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy.config import Forward
    from ridgeline.kernels.cross_entropy.config import Short as W
    from ridgeline.kernels.qk_norm_rope.config import Heads
    from ridgeline.kernels.rms_norm_quant.config import Tile

    for name in ("layer_norm_quant", "rms_norm_quant"):
        for rows, cols, tried in ((16384, 5120, ()), (16384, 4096, (Tile(1, 4, 1024, 4, 3, 4),)), (8192, 6144, ())):
            of = case("bfloat16", rows=rows, cols=cols, kind="float8_e4m3fn", block=128)
            yield Sweep(name, name, "fwd", of, tried)
    for batch, seq, num, keys in ((4, 4096, 32, 8), (4, 4096, 28, 4)):
        of = case("bfloat16", batch=batch, seq=seq, heads=num, keys=keys, dim=128)
        yield Sweep("qk_norm_rope.forward", "qk_norm_rope", "fwd", of, (Heads(1, 1, 4), Heads(4, 1, 16)))
        back = (Heads(4, 4, 16), Heads(2, 10, 8), Heads(2, 8, 8), Heads(4, 3, 16))
        yield Sweep("qk_norm_rope.backward", "qk_norm_rope", "bwd", of, back)
    full = (Forward(4096, 4, 1, 1), W(1, 8, 512, 4, 3, 4), W(1, 8, 512, 4, 3, 6))
    yield Sweep("cross_entropy.forward", "cross_entropy", "fwd", case("float32", rows=16384, cols=4096), full)
    for rows, cols, steps in ((8192, 12000, (Forward(8192, 8, 1, 1),)), (16384, 10000, (Forward(4096, 4, 1, 1),)),
                              (32768, 3000, (Forward(4096, 4, 1, 1),))):  # fmt: skip
        yield Sweep("cross_entropy.forward", "cross_entropy", "fwd", case("bfloat16", rows=rows, cols=cols), steps)


def heads() -> Iterator[Sweep]:
    """Head norms with rotary embedding: a token at a time, or so many heads, whatever tokens they belong to."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.qk_norm_rope.config import Heads

    ahead = (Heads(4, 1, 16), Heads(4, 1, 32), Heads(8, 1, 32), Heads(2, 1, 8))  # a token at a time: gone since
    back = (Heads(8, 2, 32), Heads(8, 3, 32), Heads(4, 5, 16), Heads(4, 6, 16), Heads(2, 12, 8))
    for batch, seq, num, keys in ((4, 4096, 32, 8), (2, 8192, 64, 8), (4, 4096, 40, 8)):
        of = case("bfloat16", batch=batch, seq=seq, heads=num, keys=keys, dim=128)
        yield Sweep("qk_norm_rope.forward", "qk_norm_rope", "fwd", of, ahead)
        yield Sweep("qk_norm_rope.backward", "qk_norm_rope", "bwd", of, back)


def leaving() -> Iterator[Sweep]:
    """Logits that leave the L2 first, and that do not. (Norms, softmax and SwiGLU were tried as well, and lost.)"""
    from dataclasses import replace

    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy import config as loss

    for rows, cols in ((65536, 1000), (262144, 256), (65536, 2048), (8192, 16384), (8192, 32000)):
        if cols <= loss.SHORTEST_STRETCHED:
            kernel, way = "cross_entropy.short", loss.short(rows, cols, 2)
        else:
            kernel, way = "cross_entropy.forward", loss.forward(rows, cols, 2, 132)
        of = case("bfloat16", rows=rows, cols=cols)
        yield Sweep(kernel, "cross_entropy", "fwd", of, (way, replace(way, leaves=not way.leaves)))


def groups_whole() -> Iterator[Sweep]:
    """GroupNorm of groups that one program holds whole."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Whole as H

    for batch, channels, side, tried in (
        (32, 320, 56, (H(16, 3, 1), H(16, 2, 1))), (32, 320, 64, (H(16, 2, 1),)),
        (64, 640, 32, (H(8, 2, 2), H(8, 4, 1))), (64, 1280, 16, (H(4, 2, 4), H(8, 2, 4))),
    ):  # fmt: skip
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, tried)
    for dtype, batch, channels, side, tried in (
        ("float16", 8, 320, 64, (H(16, 2, 1),)), ("bfloat16", 2, 320, 64, (H(16, 1, 1),)),
        ("bfloat16", 2, 1280, 16, (H(4, 1, 4), H(16, 1, 1))), ("float16", 1, 64, 8, (H(1, 1, 8),)),
    ):  # fmt: skip
        of = case(dtype, batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm", "fwd", of, tried)


def scales() -> Iterator[Sweep]:
    """Norms to fp8 with a scale a block of 128, whose scales are no longer divided."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant.config import Tile

    six = (Tile(1, 6, 1024, 4, 3, 3), Tile(1, 6, 1024, 4, 3, 2), Tile(1, 3, 2048, 4, 3, 2))
    for name, rows, cols, tried in (("layer_norm_quant", 16384, 4096, ()), ("layer_norm_quant", 8192, 8192, ()),
                                    ("layer_norm_quant", 8192, 6144, six), ("rms_norm_quant", 8192, 8192, ()),
                                    ("rms_norm_quant", 8192, 6144, six[:1])):  # fmt: skip
        of = case("bfloat16", rows=rows, cols=cols, kind="float8_e4m3fn", block=128)
        yield Sweep(name, name, "fwd", of, tried)


def told() -> Iterator[Sweep]:
    """What the L2 is told of rows that are read and results that are written, and rows that are read twice."""
    from dataclasses import replace

    from ridgeline.kernels.contract import case
    from ridgeline.kernels.gated.config import Pointwise
    from ridgeline.kernels.layer_norm import config as layer
    from ridgeline.kernels.rms_norm import config as rms
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.softmax import config as soft

    def ways(found: Any) -> tuple[Any, ...]:
        last, first = replace(found, reads="evict_last"), replace(found, writes="evict_first")
        return last, first, replace(last, writes="evict_first")

    twice = {
        4096: (F(1, 0, 4096, 8), F(1, 0, 4096, 16), F(1, 0, 2048, 8), F(1, 0, 2048, 16), F(1, 1, 4096, 16),
               F(1, 2, 2048, 8)),
        8192: (F(1, 0, 8192, 16), F(1, 0, 4096, 16), F(1, 0, 2048, 8), F(1, 1, 8192, 32), F(1, 2, 4096, 16)),
        128: (F(32, 1, 128, 8), F(32, 1, 128, 4), F(16, 1, 128, 8), F(4, 1, 128, 2)),
        5120: (F(1, 0, 1024, 4), F(1, 0, 8192, 16)),
    }
    for dtype, rows, cols in (("bfloat16", 16384, 4096), ("bfloat16", 8192, 8192), ("bfloat16", 131072, 128),
                              ("float32", 8192, 4096), ("bfloat16", 8192, 5120), ("bfloat16", 2048, 4096)):  # fmt: skip
        of, size = case(dtype, rows=rows, cols=cols), 2 if dtype == "bfloat16" else 4
        more = twice.get(cols, ()) if rows > 2048 else twice[cols][:1]
        yield Sweep("rms_norm.forward", "rms_norm", "fwd", of, ways(rms.forward(rows, cols, size)) + more)
        if cols in (4096, 128) and rows > 2048:
            cols = 768 if cols == 128 else cols
            of, rows = case(dtype, rows=65536 if cols == 768 else rows, cols=cols), 65536 if cols == 768 else rows
            more = twice[4096][:4] if cols == 4096 else ()
            yield Sweep("layer_norm.forward", "layer_norm", "fwd", of, ways(layer.forward(rows, cols, size)) + more)
    of = case("bfloat16", rows=16384, cols=4096)
    yield Sweep("softmax.forward", "softmax", "fwd", of, ways(soft.forward(16384, 4096, 2)))
    yield Sweep("softmax.backward", "softmax", "bwd", of, ways(soft.backward(16384, 4096, 2)))
    of = case("bfloat16", rows=8192, cols=14336)
    shapes = (Pointwise(1024, 4), Pointwise(1024, 2), Pointwise(4096, 8), Pointwise(2048, 8))
    for phase, kernel in (("fwd", "gated.forward"), ("bwd", "gated.backward")):
        yield Sweep(kernel, "swiglu", phase, of, ways(Pointwise(2048, 4)) + shapes)


def shares_early() -> Iterator[Sweep]:
    """Backward passes of norms of middling size: the kernel of column sums started early, other programs and tiles."""
    from dataclasses import replace

    from ridgeline.kernels.contract import case
    from ridgeline.kernels.layer_norm import config as layer
    from ridgeline.kernels.rms_norm import config as rms
    from ridgeline.kernels.rms_norm.config import Backward as B

    more = {
        (2048, 4096): (B(1, 2, 2048, 8, 3, 1, True), B(1, 4, 1024, 4, 3, 3, True), B(1, 1, 4096, 16, 3, 1, True)),
        (8192, 128): (B(16, 1, 128, 4, 3, 4, True), B(64, 1, 128, 16, 3, 1, True), B(64, 1, 128, 8, 3, 1, True)),
        (131072, 128): (B(16, 1, 128, 4, 3, 5, True), B(32, 1, 128, 8, 3, 3, True), B(16, 1, 128, 4, 3, 6, True)),
        (4096, 1024): (B(1, 1, 1024, 4, 3, 3, True), B(4, 1, 1024, 8, 3, 1, True)),
    }
    sizes = ((2048, 4096), (8192, 128), (131072, 128), (4096, 1024), (4096, 5120), (1024, 8192), (512, 4096))
    for rows, cols in sizes:
        found = rms.backward(rows, cols, 2)
        tried = (*more.get((rows, cols), ()), replace(found, early=False))
        yield Sweep("rms_norm.backward", "rms_norm", "bwd", case("bfloat16", rows=rows, cols=cols), tried)
    wide = (B(1, 3, 4096, 16, 3, 1, False), B(1, 12, 1024, 4, 3, 1, False))
    for rows, cols, others in ((1024, 12288, wide), (2048, 4096, ()), (8192, 768, ()), (4096, 1024, ())):
        found = layer.backward(rows, cols, 2)
        tried = (*others, replace(found, early=False))
        yield Sweep("layer_norm.backward", "layer_norm", "bwd", case("bfloat16", rows=rows, cols=cols), tried)


def odd_backward() -> Iterator[Sweep]:
    """LayerNorm's backward pass of rows that start inside accesses, since its two sums meet once."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B

    for rows, cols, tried in (
        (32768, 4099, (B(1, 2, 2048, 8, 3, 2, True, True), B(1, 4, 1024, 4, 3, 3, True, True),
                       B(1, 5, 1024, 4, 3, 2, False))),
        (16384, 7001, (B(1, 2, 4096, 16, 3, 1, True, True), B(1, 4, 2048, 8, 3, 1, True, True))),
        (65536, 2049, (B(1, 2, 1024, 4, 3, 3, True, True), B(1, 2, 1024, 4, 3, 4, True, True))),
        (131072, 1001, (B(1, 4, 256, 1, 3, 10, True, True), B(1, 1, 1024, 4, 3, 5, True, True))),
    ):  # fmt: skip
        of = case("bfloat16", rows=rows, cols=cols)
        yield Sweep("layer_norm.backward", "layer_norm", "bwd", of, tried)


def fewer() -> Iterator[Sweep]:
    """Forward passes with sixteen numbers a thread instead of thirty-two, results that leave the L2 first or do not."""
    from dataclasses import replace

    from ridgeline.kernels.contract import case
    from ridgeline.kernels.gated.config import Pointwise as P
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.softmax.config import Softmax as S

    def leaving(*ways: Any) -> tuple[Any, ...]:
        return tuple(found for way in ways for found in (way, replace(way, writes="evict_first")))

    both = {"reads": "evict_last", "writes": "evict_first"}
    four, eight = F(1, 4, 1024, 4), F(1, 4, 2048, 8)
    for dtype, rows, cols, tried in (
        ("bfloat16", 16384, 4096, (*leaving(four, F(1, 2, 2048, 8), F(1, 1, 4096, 8)), F(2, 1, 4096, 16),
                                   F(1, 2, 2048, 8, **both))),
        ("bfloat16", 8192, 8192, (*leaving(eight, F(1, 2, 4096, 16)), F(1, 1, 8192, 16))),
        ("float32", 8192, 4096, leaving(four, F(1, 2, 2048, 8))),
        ("bfloat16", 2048, 4096, (four, F(1, 2, 2048, 8))),
        ("bfloat16", 8192, 5120, leaving(F(1, 5, 1024, 4), F(1, 3, 2048, 8))),
        ("bfloat16", 16384, 2048, (*leaving(F(1, 2, 1024, 4)), F(1, 1, 2048, 8))),
        ("bfloat16", 4096, 16384, (*leaving(F(1, 4, 4096, 16)), F(1, 2, 8192, 32))),
        ("float16", 16384, 3072, (*leaving(F(1, 3, 1024, 4)), F(1, 2, 2048, 8))),
    ):  # fmt: skip
        of = case(dtype, rows=rows, cols=cols)
        yield Sweep("rms_norm.forward", "rms_norm", "fwd", of, tried)
        if cols in (4096, 8192, 2048):
            yield Sweep("layer_norm.forward", "layer_norm", "fwd", of, tried[:5])
    for rows, cols, tried in (
        (16384, 4096, (*leaving(S(1, 4, 1024, 4), S(1, 2, 2048, 8)), S(1, 2, 2048, 8, **both))),
        (16384, 8192, leaving(S(1, 4, 2048, 8), S(1, 2, 4096, 16))),
        (65536, 1024, leaving(S(4, 4, 256, 4))), (8192, 16384, leaving(S(1, 4, 4096, 16))),
    ):  # fmt: skip
        yield Sweep("softmax.forward", "softmax", "fwd", case("bfloat16", rows=rows, cols=cols), tried)
    for rows, cols, tried in (
        (16384, 4096, (*leaving(S(1, 4, 1024, 4), S(1, 2, 2048, 8)), S(1, 1, 4096, 16), S(1, 2, 2048, 8, **both))),
        (65536, 1024, (*leaving(S(4, 4, 256, 4)), S(1, 1, 1024, 4), S(2, 4, 256, 2))),
        (4096, 32768, (*leaving(S(1, 1, 32768, 32)), S(1, 4, 8192, 32))),
        (8192, 8192, leaving(S(1, 4, 2048, 8), S(1, 2, 4096, 16))),
    ):  # fmt: skip
        yield Sweep("softmax.backward", "softmax", "bwd", case("bfloat16", rows=rows, cols=cols), tried)
    for rows, cols in ((8192, 14336), (2048, 8192)):
        of = case("bfloat16", rows=rows, cols=cols)
        yield Sweep("gated.forward", "swiglu", "fwd", of, (*leaving(P(1024, 4), P(512, 4)), P(2048, 8)))
        yield Sweep("gated.backward", "swiglu", "bwd", of, (*leaving(P(1024, 4), P(512, 4)), P(2048, 8), P(512, 2)))


def packed() -> Iterator[Sweep]:
    """Softmax of rows that a program holds two numbers a word, several programs a multiprocessor."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.softmax.config import Packed as P
    from ridgeline.kernels.softmax.config import Shares
    from ridgeline.kernels.softmax.config import Softmax as S

    last = "evict_last"
    held, shares = S(1, 4, 4096, 16, reads=last), Shares(8, 4, 4, 3, kept=True)
    for dtype, rows, cols, tried in (
        ("bfloat16", 8192, 16384, (held, P(8, 0, 3), P(8, 3, 4, last))),
        ("bfloat16", 8192, 14336, (held, P(8, 0, 4, last))), ("bfloat16", 600, 16384, (held,)),
        ("bfloat16", 8192, 20000, (S(1, 5, 4096, 16, reads=last), P(8, 3, 3, last), P(8, 2, 3))),
        ("bfloat16", 300, 20000, (S(1, 5, 4096, 16), P(16, 0, 2))),
        ("bfloat16", 8192, 24000, (P(16, 0, 2), Shares(8, 16, 3, 1))), ("bfloat16", 300, 24000, (shares,)),
        ("bfloat16", 4096, 32768, (P(16, 8, 2), Shares(8, 16, 3, 1))), ("bfloat16", 300, 32768, (Shares(8, 16, 3, 1),)),
        ("bfloat16", 4096, 50257, (P(16, 13, 2), shares)), ("float16", 8192, 32001, (P(16, 8, 2), shares)),
        ("bfloat16", 2048, 65536, (P(16, 12, 2), shares)), ("bfloat16", 300, 65536, (shares,)),
        ("bfloat16", 4096, 57344, (P(16, 13, 2), P(16, 10, 2, last))),
    ):  # fmt: skip
        yield Sweep("softmax.forward", "softmax", "fwd", case(dtype, rows=rows, cols=cols), tried)


def losses_packed() -> Iterator[Sweep]:
    """Cross-entropy of rows held two logits a word, and as float32 numbers or in blocks."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.cross_entropy.config import Forward as F
    from ridgeline.kernels.cross_entropy.config import Packed as P
    from ridgeline.kernels.cross_entropy.config import Short as W

    tried = {
        (32768, 3000): (W(1, 6, 512, 2, 3, 12), P(2, 16), P(4, 12, True)),
        (16384, 5000): (W(1, 10, 512, 2, 3, 8), P(4, 8), P(4, 12, True)),
        (8192, 7168): (P(4, 8, True), P(4, 8), P(8, 6, True)),
        (16384, 10000): (W(1, 10, 1024, 4, 3, 4), P(8, 5), P(8, 4, True)),
        (8192, 12000): (F(4096, 4, 1, 1, True), P(8, 4), P(4, 6, True)),
        (8192, 13000): (F(4096, 4, 1, 1, True), P(8, 4, True)),
        (8192, 20000): (F(4096, 4, 1, 1), P(8, 3)),
        (32768, 4096): (W(1, 8, 512, 2, 3, 12), P(2, 16, True), P(4, 10)),
        (16384, 8192): (W(1, 8, 1024, 4, 3, 6), P(4, 8, True)),
        (65536, 2048): (P(1, 24), P(2, 16)),
    }
    for (rows, cols), configs in tried.items():
        kernel = "cross_entropy.short" if cols <= 2048 else "cross_entropy.forward"
        yield Sweep(kernel, "cross_entropy", "fwd", case("bfloat16", rows=rows, cols=cols), configs)


def groups_packed() -> Iterator[Sweep]:
    """GroupNorm with a group a program, held two numbers a word. (Shares of longer ones were tried, and lost.)"""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Packed as P
    from ridgeline.kernels.group_norm.config import Whole as H

    for batch, channels, side, tried in ((64, 640, 32, (P(16, 2), H(8, 2, 2))),
                                         (64, 1280, 16, (P(8, 4), H(4, 2, 4)))):  # fmt: skip
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, tried)


def groups_clustered() -> Iterator[Sweep]:
    """GroupNorm with a group a cluster of programs, which tell each other their moments through shared memory: 32 to
    160 numbers a thread, most of them waiting in shared memory."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images
    from ridgeline.kernels.group_norm.config import Packed as P

    walked = Images(8, 4, 3, 4, paired=True)
    largest = (walked, P(8, 4, 16, 4), P(8, 4, 8, 12), P(8, 3, 8, 9), P(4, 8, 16, 12), P(16, 2, 4, 12), P(8, 4, 16, 5),
               P(8, 4, 16, 4, paired=False), P(4, 8, 16, 12, paired=False))  # fmt: skip
    for name, batch, channels, side, tried in (
        ("group_norm_silu", 4, 512, 128, largest),
        ("group_norm_silu", 32, 320, 64, (walked, P(8, 4, 4), P(8, 4, 2, 6), P(4, 8, 4, 6), P(16, 2, 1, 6),
                                          P(8, 3, 1, 15), P(8, 4, 2, 6, paired=False))),
        ("group_norm_silu", 32, 320, 56, (walked, P(8, 4, 2, 4), P(4, 8, 4, 4), P(16, 2, 1, 4), P(8, 3, 1, 11))),
        ("group_norm_silu", 16, 512, 128, largest[:7]),
        ("group_norm_silu", 64, 640, 32, (P(16, 2), P(8, 4, 1, 6), P(8, 4, 1, 5), P(4, 8, 2, 6))),
        ("group_norm_silu", 8, 512, 64, (walked, P(8, 4, 4, 4), P(8, 4, 8), P(4, 8, 8, 4), P(8, 3, 2, 11))),
        ("group_norm_silu", 8, 320, 128, (walked, P(8, 4, 8, 6), P(8, 3, 4, 15), P(4, 8, 16, 6))),
        ("group_norm_silu", 16, 640, 64, (walked, P(8, 4, 4, 6), P(8, 3, 2, 15), P(4, 8, 8, 6))),
        ("group_norm", 4, 512, 128, (walked, P(8, 4, 16, 4), P(8, 4, 8, 12), P(4, 8, 16, 12))),
        ("group_norm", 16, 512, 128, (walked, P(8, 4, 16, 4), P(8, 4, 8, 12), P(4, 8, 16, 12))),
        ("group_norm_silu", 64, 1280, 16, (P(8, 4), P(4, 8, 1, 6), P(4, 8, 1, 5))),
    ):  # fmt: skip
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", name, "fwd", of, tried)


def rows_clustered() -> Iterator[Sweep]:
    """Softmax with a row a cluster of programs, which tell each other their sums through shared memory."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.softmax.config import Packed as P
    from ridgeline.kernels.softmax.config import Shares

    last, walked = "evict_last", Shares(8, 4, 4, 3, kept=True)
    four, eight, two = P(16, 4, 2, last, cluster=4), P(8, 0, 3, last, cluster=8), P(16, 13, 2, cluster=2)
    plain = P(8, 0, 3, cluster=8)
    for dtype, rows, cols, tried in (
        ("bfloat16", 1024, 131072, (walked, four, eight, two, plain)),
        ("bfloat16", 2048, 128256, (walked, four, eight, two, plain)),
        ("bfloat16", 512, 262144, (walked, P(16, 13, 2, cluster=4), P(8, 0, 3, last, cluster=16),
                                   P(8, 0, 3, cluster=16))),
        ("bfloat16", 2048, 80000, (walked, P(16, 6, 2, last, cluster=2), P(8, 2, 3, last, cluster=4))),
        ("float16", 2048, 151936, (walked, P(16, 6, 2, last, cluster=4), P(8, 2, 3, last, cluster=8))),
        ("bfloat16", 1024, 131075, (walked, P(16, 5, 2, last, cluster=4), P(16, 5, 2, cluster=4))),
        ("bfloat16", 2048, 100003, (walked, P(16, 9, 2, last, cluster=2), P(16, 3, 2, last, cluster=4))),
        ("bfloat16", 64, 50304, (walked, P(8, 0, 3, cluster=4), P(8, 0, 3, cluster=8), P(4, 0, 6, cluster=8))),
        ("bfloat16", 16, 65536, (walked, P(8, 0, 3, cluster=8), P(8, 0, 3, cluster=16), P(4, 0, 6, cluster=16))),
        ("bfloat16", 128, 32768, (Shares(8, 16, 3, 1), P(8, 0, 3, cluster=2), P(8, 0, 3, cluster=4))),
    ):  # fmt: skip
        yield Sweep("softmax.forward", "softmax", "fwd", case(dtype, rows=rows, cols=cols), tried)


def odd_forward() -> Iterator[Sweep]:
    """Norms of rows that start inside accesses, a program a row, weights from copies that start where rows can."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Forward

    def F(chunks: int, block: int, num_warps: int, reads: str = "") -> Forward:
        return Forward(1, chunks, block, num_warps, reads=reads, apart=True)

    last = "evict_last"
    for dtype, rows, cols, tried in (
        ("bfloat16", 32768, 4099, (F(4, 1024, 4, last), F(4, 1024, 4))),
        ("bfloat16", 16384, 7001, (F(7, 1024, 4), F(7, 1024, 4, last))),
        ("bfloat16", 131072, 1001, (F(4, 256, 1), F(4, 256, 1, last))),
        ("bfloat16", 65536, 2049, (F(4, 512, 2), F(4, 512, 2, last))),
        ("bfloat16", 8192, 12289, (F(6, 2048, 8), F(6, 2048, 8, last))),
        ("float32", 16384, 4099, (F(4, 1024, 8, last), F(4, 1024, 8))),
        ("bfloat16", 2048, 5003, (F(5, 1024, 4),)),
    ):
        for name in ("layer_norm", "rms_norm"):
            yield Sweep(f"{name}.forward", name, "fwd", case(dtype, rows=rows, cols=cols), tried)


def stages() -> Iterator[Sweep]:
    """LayerNorm to fp8 in blocks of 128 with fewer rows on their way, and with more."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant.config import Tile

    for rows, cols, tried in (
        (16384, 4096, (Tile(1, 1, 4096, 4, 4, 4), Tile(1, 1, 4096, 4, 5, 4))),
        (8192, 8192, (Tile(1, 1, 8192, 8, 4, 2), Tile(1, 1, 8192, 8, 5, 2))),
        (8192, 6144, (Tile(1, 6, 1024, 4, 4, 3), Tile(1, 6, 1024, 4, 5, 3))),
        (16384, 5120, (Tile(1, 5, 1024, 4, 4, 3), Tile(1, 5, 1024, 4, 5, 3))),
    ):
        of = case("bfloat16", rows=rows, cols=cols, kind="float8_e4m3fn", block=128)
        yield Sweep("layer_norm_quant", "layer_norm_quant", "fwd", of, tried)


def rows_again() -> Iterator[Sweep]:
    """Backward passes of norms whose rows wait in shared memory and are read there twice: odd rows, then aligned."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward

    def B(cols: int, num_warps: int, slots: int, programs: int, keep: bool = False) -> Backward:
        chunks = -(-(cols // 8 * 8) // (256 * num_warps))
        return Backward(1, chunks, 256 * num_warps, num_warps, slots, programs, keep, again=True)

    tried: dict[tuple[str, int, int], tuple[tuple[Any, ...], ...]] = {
        ("layer_norm", 32768, 4099): ((4, 2, 4), (4, 3, 3), (8, 3, 2, True)),
        ("layer_norm", 16384, 5003): ((4, 3, 3), (4, 2, 3), (8, 3, 2, True)),
        ("layer_norm", 16384, 7001): ((8, 2, 2), (16, 3, 1, True)),
        ("layer_norm", 8192, 12289): ((16, 3, 1), (8, 3, 1, True)),
        ("layer_norm", 65536, 2049): ((4, 3, 5, True), (4, 2, 4), (2, 2, 8)),
        ("layer_norm", 131072, 1001): ((2, 3, 8), (1, 2, 16)),
        ("rms_norm", 32768, 4099): ((4, 3, 4, True), (8, 3, 2, True)),
        ("rms_norm", 16384, 5003): ((4, 2, 4, True), (4, 3, 3, True)),
        ("rms_norm", 16384, 7001): ((8, 3, 2, True), (16, 3, 1, True)),
        ("rms_norm", 8192, 12289): ((16, 3, 1, True),),
        ("layer_norm", 16384, 4096): ((4, 2, 4), (4, 3, 3), (8, 3, 2, True)),
        ("layer_norm", 16384, 5120): ((4, 3, 3), (4, 2, 3), (8, 3, 2)),
        ("layer_norm", 16384, 6144): ((8, 3, 2), (8, 2, 2)),
        ("layer_norm", 8192, 8192): ((8, 2, 2), (16, 3, 1, True)),
        ("layer_norm", 4096, 11008): ((16, 3, 1),),
        ("layer_norm", 4096, 16384): ((16, 2, 1),),
        ("layer_norm", 4096, 14336): ((16, 3, 1), (16, 2, 1)),
        ("layer_norm", 32768, 2560): ((4, 3, 4), (4, 2, 5)),
        ("layer_norm", 65536, 1280): ((2, 2, 8), (4, 3, 6, True)),
        ("rms_norm", 16384, 4096): ((4, 3, 4, True),),
        ("rms_norm", 8192, 8192): ((8, 3, 2, True),),
        ("rms_norm", 4096, 14336): ((16, 3, 1, True), (16, 2, 1, True)),
        ("rms_norm", 4096, 20480): ((16, 2, 1),),
        ("layer_norm", 4096, 20480): ((16, 2, 1),),
    }
    for (name, rows, cols), ways in tried.items():
        found = tuple(B(cols, *way) for way in ways)
        yield Sweep(f"{name}.backward", name, "bwd", case("bfloat16", rows=rows, cols=cols), found)


def middling() -> Iterator[Sweep]:
    """Backward passes of norms of widths that no sweep has timed, in the types and with the tiles there are."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B

    half = (B(1, 2, 1024, 4, 3, 5, True), B(1, 3, 512, 2, 3, 8, True), B(1, 5, 256, 1, 3, 8, True))
    for name, dtype, rows, cols, tried in (
        ("layer_norm", "bfloat16", 65536, 1280, half), ("rms_norm", "bfloat16", 65536, 1536, half[:2]),
        ("layer_norm", "float32", 32768, 1280, half[:2]), ("rms_norm", "float32", 8192, 5120, ()),
        ("layer_norm", "float32", 8192, 5120, ()), ("layer_norm", "float32", 4096, 7168, ()),
        ("rms_norm", "float32", 4096, 12288, (B(1, 3, 4096, 16, 2, 1, False), B(1, 6, 2048, 8, 2, 1, False))),
        ("layer_norm", "float32", 4096, 12288, (B(1, 3, 4096, 16, 2, 1, False), B(1, 6, 2048, 8, 2, 1, False))),
    ):  # fmt: skip
        yield Sweep(f"{name}.backward", name, "bwd", case(dtype, rows=rows, cols=cols), tried)


def misses() -> Iterator[Sweep]:
    """Where random shapes missed the figure: new defaults beside what they replace, and other tiles."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.rms_norm.config import again as A

    eight, last = B(1, 1, 2048, 8, 3, 4, True), "evict_last"
    back: tuple[tuple[str, str, int, int, tuple[Any, ...]], ...] = (
        ("rms_norm", "bfloat16", 27327, 2241, (A(2241, 2, 2, 8, True), B(1, 3, 1024, 4, 3, 2, True),
                                               A(2241, 4, 3, 4, True))),
        ("rms_norm", "bfloat16", 65536, 1588, (A(1588, 2, 2, 8, True), B(1, 1, 2048, 8, 3, 3, True))),
        ("rms_norm", "bfloat16", 16384, 3501, (B(1, 4, 1024, 4, 3, 2, True), A(3501, 4, 3, 4, True),
                                               A(3501, 8, 3, 2, True))),
        ("layer_norm", "bfloat16", 65536, 1536, (A(1536, 2, 2, 8), B(1, 6, 256, 1, 3, 8, True), eight)),
        ("layer_norm", "bfloat16", 65536, 2048, (A(2048, 2, 2, 8), eight)),
        ("layer_norm", "bfloat16", 27849, 1600, (A(1600, 2, 2, 8), eight)),
        ("layer_norm", "bfloat16", 65536, 1458, (A(1458, 2, 2, 8), B(1, 2, 1024, 4, 3, 3, True, True))),
        ("layer_norm", "bfloat16", 16384, 5120, (A(5120, 8, 3, 2), B(1, 5, 1024, 4, 3, 2, False),
                                                 B(1, 5, 1024, 4, 3, 2, True))),
        ("layer_norm", "bfloat16", 4096, 14336, (A(14336, 8, 3, 1), A(14336, 8, 2, 1))),
        ("layer_norm", "bfloat16", 4096, 16384, (A(16384, 8, 2, 1), A(16384, 16, 2, 1))),
        ("layer_norm", "bfloat16", 3904, 15708, ()), ("rms_norm", "bfloat16", 8192, 12289, (A(12289, 16, 3, 1, True),)),
        ("layer_norm", "bfloat16", 4550, 264, (B(1, 2, 256, 1, 3, 12, True), B(1, 2, 256, 1, 3, 8, True))),
        ("layer_norm", "bfloat16", 65536, 320, (B(1, 2, 256, 1, 3, 12, True), B(1, 2, 256, 1, 3, 16, True))),
        ("rms_norm", "bfloat16", 65536, 320, (B(1, 2, 256, 1, 3, 12, True), B(1, 2, 256, 1, 3, 16, True))),
        ("layer_norm", "bfloat16", 65536, 305, (B(1, 2, 256, 1, 3, 12, True),)),
        ("layer_norm", "float32", 65536, 448, (B(1, 4, 128, 1, 3, 12, True), B(1, 4, 128, 1, 3, 16, True))),
        ("layer_norm", "float32", 54126, 1600, (B(1, 4, 512, 4, 3, 4, True), B(1, 4, 512, 4, 3, 3, True))),
        ("layer_norm", "float32", 32768, 1280, (B(1, 3, 512, 2, 3, 5, True), B(1, 3, 512, 2, 3, 8, True))),
    )  # fmt: skip
    for name, dtype, rows, cols, tried in back:
        yield Sweep(f"{name}.backward", name, "bwd", case(dtype, rows=rows, cols=cols), tried)
    for rows, cols, ways in (
        (65536, 1280, (F(1, 3, 512, 2, last), F(1, 5, 256, 1, last), F(1, 2, 1024, 4, last))),
        (65536, 1536, (F(1, 3, 512, 2, last), F(1, 6, 256, 1, last), F(1, 2, 1024, 4, last))),
        (27334, 1152, (F(1, 3, 512, 2), F(1, 2, 1024, 4))),
        (4096, 14336, (F(1, 4, 4096, 16, last), F(1, 7, 2048, 8, last))),
        (4096, 16384, (F(1, 4, 4096, 16, last), F(1, 8, 2048, 8, last))),
    ):
        yield Sweep("layer_norm.forward", "layer_norm", "fwd", case("bfloat16", rows=rows, cols=cols), ways)


def ahead() -> Iterator[Sweep]:
    """Rows that are finished while the next one's sums are taken, by the rule for them and otherwise."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import ahead as A
    from ridgeline.kernels.rms_norm.config import ahead_tile

    ln, rms, bf16, fp16, fp32 = "layer_norm", "rms_norm", "bfloat16", "float16", "float32"
    tried: tuple[tuple[str, str, int, int, tuple[Any, ...]], ...] = (
        (ln, bf16, 16384, 5003, (A(5003, 8, 2, 2), A(5003, 4, 3, 3))), (rms, fp16, 65536, 642, (A(642, 1, 3, 12),)),
        (ln, bf16, 7519, 5376, ()), (ln, bf16, 4096, 14336, (A(14336, 8, 3, 1), A(14336, 16, 3, 1))),
        (ln, fp16, 8107, 7538, (A(7538, 8, 3, 1),)), (rms, bf16, 3048, 11450, ()), (ln, fp32, 3332, 10234, ()),
        (ln, bf16, 2470, 12288, (A(12288, 8, 3, 1),)), (ln, bf16, 9569, 12540, (A(12540, 8, 3, 1),)),
        (ln, bf16, 7756, 16384, (A(16384, 8, 2, 1),)), (rms, bf16, 12164, 1918, ()),
        (ln, bf16, 65536, 734, (A(734, 1, 3, 12), A(734, 2, 3, 8))), (rms, bf16, 6906, 2942, ()),
        (ln, bf16, 65536, 1458, (A(1458, 4, 3, 4),)), (ln, bf16, 65536, 305, ()), (ln, bf16, 4501, 4280, ()),
        (ln, bf16, 2699, 10898, ()), (rms, fp32, 4531, 14336, (A(14336, 16, 2, 1, False, 4),)),
        (ln, bf16, 38416, 3771, ()), (ln, bf16, 16384, 4096, ()), (ln, fp16, 3758, 6848, ()),
        (rms, bf16, 28094, 1250, ()), (rms, fp32, 19486, 593, ()), (ln, fp32, 30525, 1910, ()),
        (ln, fp32, 2155, 6822, ()), (ln, fp32, 36873, 503, ()), (ln, bf16, 18574, 2336, ()),
        (rms, bf16, 41683, 973, (A(973, 2, 3, 8),)), (ln, bf16, 65536, 312, ()), (rms, bf16, 65536, 384, ()),
        (ln, fp32, 9119, 3722, ()), (rms, bf16, 18810, 8216, ()), (ln, bf16, 27849, 1600, ()),
        (rms, bf16, 10576, 14008, ()), (rms, fp32, 5441, 9584, ()), (ln, bf16, 27000, 2049, ()),
        (ln, bf16, 30000, 1001, ()), (ln, fp32, 4849, 8632, ()), (ln, fp32, 15784, 768, ()),
        (ln, bf16, 8192, 8192, ()), (rms, bf16, 16384, 4096, ()), (ln, bf16, 65536, 768, ()),
        (rms, fp32, 876, 11008, ()), (rms, bf16, 8000, 5001, ()), (rms, fp32, 31713, 1781, ()),
    )  # fmt: skip
    for name, dtype, rows, cols, ways in tried:
        ruled = ahead_tile(cols, 4 if dtype == fp32 else 2, 1 if name == rms else 2)
        of = case(dtype, rows=rows, cols=cols)
        yield Sweep(f"{name}.backward", name, "bwd", of, (*((ruled,) if ruled else ()), *ways))


def odd_more() -> Iterator[Sweep]:
    """Odd rows that were not swept: read twice in shared memory beside finished a turn later, few rows, short ones."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import again as R
    from ridgeline.kernels.rms_norm.config import ahead as A
    from ridgeline.kernels.rms_norm.config import ahead_tile as T

    ln, rms, bf16, fp16, fp32 = "layer_norm", "rms_norm", "bfloat16", "float16", "float32"
    tried: tuple[tuple[str, str, int, int, tuple[Any, ...]], ...] = (
        (ln, fp16, 8107, 7538, (R(7538, 8, 3, 1), R(7538, 16, 3, 1))),
        (ln, bf16, 8107, 7538, (R(7538, 8, 3, 1), A(7538, 16, 3, 1))),
        (ln, fp16, 14076, 8482, (R(8482, 16, 3, 1), A(8482, 16, 3, 1))), (ln, bf16, 2699, 10898, (R(10898, 16, 3, 1),)),
        (rms, bf16, 16384, 7001, (T(7001, 2, 1), A(7001, 8, 3, 1))), (rms, bf16, 65536, 340, (A(340, 1, 3, 16),)),
        (rms, bf16, 12559, 701, (A(701, 2, 3, 8),)), (ln, bf16, 300, 5003, (A(5003, 8, 3, 2), R(5003, 8, 3, 2))),
        (ln, bf16, 1200, 735, (A(735, 1, 3, 12), A(735, 2, 3, 8))), (ln, bf16, 600, 3771, (A(3771, 8, 3, 2),)),
        (ln, bf16, 10371, 14904, (R(14904, 16, 2, 1),)), (rms, bf16, 3904, 15708, (R(15708, 16, 3, 1, True),)),
        (rms, bf16, 20000, 2500, (T(2500, 2, 1),)),
        (rms, bf16, 9000, 6001, (T(6001, 2, 1), B(1, 3, 2048, 8, 3, 1, True))),
        (rms, fp32, 3000, 11451, (A(11451, 16, 2, 1, False, 4),)),
        (ln, fp32, 65536, 640, (A(640, 1, 2, 12, False, 4),)),
        (ln, bf16, 4800, 6144, (A(6144, 8, 3, 2), B(1, 3, 2048, 8, 3, 1, False))),
        (ln, bf16, 5430, 4544, (A(4544, 8, 3, 2), B(1, 5, 1024, 4, 3, 2, False))),
        (ln, bf16, 9000, 3200, (A(3200, 8, 3, 2), B(1, 4, 1024, 4, 3, 2, True), B(1, 4, 1024, 4, 3, 3, True))),
    )  # fmt: skip
    for name, dtype, rows, cols, ways in tried:
        yield Sweep(f"{name}.backward", name, "bwd", case(dtype, rows=rows, cols=cols), ways)


def short_rows() -> Iterator[Sweep]:
    """Short rows: several a warp in pieces that leave few lanes idle; softmax of 1k to 2k columns on two warps."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.softmax.config import Softmax as S

    last = "evict_last"
    softmax: tuple[tuple[str, int, int, tuple[Any, ...]], ...] = (
        ("bfloat16", 65536, 394, (S(4, 2, 256, 4), S(1, 2, 256, 1), S(4, 2, 256, 4, 3, 8))),
        ("bfloat16", 65536, 1232, (S(1, 3, 512, 2, reads=last), S(1, 5, 256, 1, reads=last))),
        ("bfloat16", 30111, 1162, (S(1, 3, 512, 2, ends=True), S(1, 5, 256, 1, ends=True), S(1, 2, 1024, 4))),
        ("bfloat16", 65536, 1552, (S(1, 4, 512, 2, reads=last),)), ("float16", 18727, 1048, (S(1, 3, 512, 2),)),
        ("bfloat16", 65536, 264, (S(8, 3, 128, 4), S(8, 5, 64, 2), S(2, 2, 256, 2))),
        ("float32", 65536, 177, (S(4, 2, 128, 4), S(8, 3, 64, 4))),
    )  # fmt: skip
    for dtype, rows, cols, ways in softmax:
        yield Sweep("softmax.forward", "softmax", "fwd", case(dtype, rows=rows, cols=cols), ways)
    back: tuple[tuple[str, int, tuple[Any, ...]], ...] = (
        ("layer_norm", 312, (B(4, 5, 64, 1, 3, 8, True), B(2, 3, 128, 1, 3, 12, True), B(2, 3, 128, 1, 3, 8, True))),
        ("rms_norm", 384, (B(2, 3, 128, 1, 3, 16, True), B(2, 3, 128, 1, 3, 12, True), B(8, 3, 128, 4, 3, 4, True))),
        ("rms_norm", 304, (B(4, 5, 64, 1, 3, 12, True), B(2, 3, 128, 1, 3, 16, True))),
        ("rms_norm", 416, (B(2, 4, 128, 1, 3, 12, True),)), ("layer_norm", 480, (B(2, 4, 128, 1, 3, 8, True),)),
    )  # fmt: skip
    for name, cols, ways in back:
        yield Sweep(f"{name}.backward", name, "bwd", case("bfloat16", rows=65536, cols=cols), ways)
    for name, cols, ways in (
        ("layer_norm", 312, (F(8, 5, 64, 2), F(16, 5, 64, 4), F(8, 3, 128, 4), F(2, 2, 256, 2))),
        ("rms_norm", 304, (F(8, 5, 64, 2), F(16, 5, 64, 4), F(8, 3, 128, 4))),
    ):
        yield Sweep(f"{name}.forward", name, "fwd", case("bfloat16", rows=65536, cols=cols), ways)


def split_rows() -> Iterator[Sweep]:
    """Backward passes of norms: rows that clusters of programs share, short ones on one warp, and the last sums."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import ColumnSums as C
    from ridgeline.kernels.rms_norm.config import again as R
    from ridgeline.kernels.rms_norm.config import ahead

    def a(cols: int, warps: int, slots: int, programs: int, split: int = 1, itemsize: int = 2) -> Any:
        return ahead(cols, warps, slots, programs, False, itemsize, split)

    ln, rms, bf16, fp16, fp32 = "layer_norm", "rms_norm", "bfloat16", "float16", "float32"
    tried: tuple[tuple[str, str, int, int, tuple[Any, ...]], ...] = (
        (ln, fp32, 5259, 15736, (a(15736, 16, 2, 1, 2, 4), a(15736, 8, 3, 2, 4, 4))),
        (ln, bf16, 8730, 7362, (a(7362, 8, 3, 2, 2), a(7362, 4, 3, 4, 4))),
        (ln, bf16, 2522, 5680, (a(5680, 4, 3, 4, 2), a(5680, 8, 3, 2, 2))),
        (ln, bf16, 2470, 12288, (a(12288, 8, 3, 2, 2), a(12288, 8, 3, 2, 4), a(12288, 4, 3, 4, 4))),
        (ln, fp16, 5243, 14324, (a(14324, 16, 3, 1, 2), a(14324, 8, 3, 2, 4))),
        (rms, bf16, 6171, 13055, (a(13055, 8, 3, 2, 2), a(13055, 8, 3, 2, 4))),
        (ln, fp32, 2399, 9432, (a(9432, 16, 2, 1, 2, 4), a(9432, 8, 3, 2, 4, 4), a(9432, 8, 2, 2, 2, 4))),
        (rms, bf16, 3766, 18748, (a(18748, 16, 3, 1, 2), a(18748, 8, 3, 2, 4))),
        (ln, bf16, 17169, 789, (a(789, 1, 3, 12), a(789, 1, 3, 10))), (ln, bf16, 37447, 1037, (a(1037, 1, 3, 8),)),
        (ln, bf16, 7519, 5376, (a(5376, 4, 3, 4, 2),)), (ln, bf16, 5430, 4544, (a(4544, 4, 3, 4, 2),)),
        (rms, bf16, 15218, 1248, (B(1, 5, 256, 1, 3, 10, True), R(1248, 2, 2, 8, True), a(1248, 2, 3, 8))),
        (rms, fp32, 4648, 13968, (a(13968, 16, 2, 1, 2, 4), a(13968, 8, 3, 2, 4, 4))),
        (rms, bf16, 4543, 12243, (a(12243, 8, 3, 2, 2),)), (ln, bf16, 4845, 3200, (a(3200, 4, 3, 4, 2),)),
        (ln, bf16, 19066, 3207, (a(3207, 4, 3, 4, 2),)), (ln, fp32, 3523, 3200, (a(3200, 4, 3, 4, 2, 4),)),
        (ln, fp32, 7825, 5396, (a(5396, 8, 2, 2, 2, 4),)), (ln, bf16, 16384, 4096, (a(4096, 4, 3, 4, 2),)),
        (rms, bf16, 59519, 2744, (a(2744, 4, 3, 4),)), (ln, fp16, 65536, 648, (a(648, 1, 3, 12),)),
        (ln, bf16, 4096, 14336, (a(14336, 8, 3, 2, 4),)), (rms, bf16, 4046, 14336, (a(14336, 8, 3, 2, 2),)),
    )  # fmt: skip
    for name, dtype, rows, cols, ways in tried:
        yield Sweep(f"{name}.backward", name, "bwd", case(dtype, rows=rows, cols=cols), ways)
    for name, dtype, rows, cols in (
        (ln, bf16, 65536, 608), (rms, bf16, 12164, 1918), (ln, bf16, 5430, 4544), (rms, bf16, 6906, 2942),
        (ln, fp32, 15784, 768), (rms, bf16, 65536, 384),
    ):  # fmt: skip
        sums = (C(2048, 16, 16), C(2048, 8, 16), C(1024, 8, 8), C(512, 16, 8), C(512, 32, 16))
        yield Sweep("column_sums", name, "bwd", case(dtype, rows=rows, cols=cols), sums)


def strangers() -> Iterator[Sweep]:
    """What lost most on drawn shapes: odd rows forward, quantizing norms, groups of 20 by 20."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Apart, Images
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.rms_norm_quant.config import Tile
    from ridgeline.kernels.softmax.config import Softmax as S

    ln, rms, bf16, fp16, fp32, last = "layer_norm", "rms_norm", "bfloat16", "float16", "float32", "evict_last"

    def apart(chunks: int, block: int, warps: int, kept: bool = False) -> Any:
        return F(1, chunks, block, warps, last if kept else "", apart=True)

    forward: tuple[tuple[str, str, int, int, tuple[Any, ...]], ...] = (
        (ln, fp32, 65536, 603, (apart(5, 128, 1, True), apart(3, 256, 2, True), F(4, 5, 128, 4, last))),
        (ln, fp32, 32725, 1035, (apart(5, 256, 2, True), apart(3, 512, 4, True), apart(9, 128, 1, True))),
        (rms, bf16, 3766, 18748, (apart(5, 4096, 16, True), apart(3, 8192, 32, True))),
        (ln, bf16, 3766, 18748, (apart(5, 4096, 16, True), apart(3, 8192, 32, True))),
        (rms, bf16, 15309, 14721, (apart(4, 4096, 16, True),)),
        (ln, fp32, 2111, 4496, (F(1, 5, 1024, 4), F(1, 3, 2048, 8))),
    )  # fmt: skip
    for name, dtype, rows, cols, ways in forward:
        yield Sweep(f"{name}.forward", name, "fwd", case(dtype, rows=rows, cols=cols), ways)
    narrow: tuple[tuple[str, str, int, int, str, int, tuple[Any, ...]], ...] = (
        (f"{ln}_quant", bf16, 49495, 1920, "int8", 128, (Tile(1, 4, 512, 2, 3, 8), Tile(1, 8, 256, 1, 3, 8))),
        (f"{ln}_quant", bf16, 11106, 6144, "float8_e4m3fn", 0, (Tile(1, 6, 1024, 4, 3, 3), Tile(1, 6, 1024, 4, 4, 2))),
        (f"{rms}_quant", bf16, 7003, 9792, "float8_e4m3fn", 64,
         (Tile(1, 5, 2048, 8, 3, 2), Tile(1, 5, 2048, 8), Tile(1, 10, 1024, 4, 3, 2))),
        (f"{rms}_quant", bf16, 85849, 2432, "int8", 128, (Tile(1, 5, 512, 2, 3, 8), Tile(1, 10, 256, 1, 3, 10))),
        (f"{ln}_quant", fp32, 13693, 6144, "float8_e4m3fn", 128, (Tile(1, 3, 2048, 8, 3, 2), Tile(1, 3, 2048, 8))),
        (f"{ln}_quant", fp16, 138679, 738, "float8_e4m3fn", 0, ()),
        (f"{rms}_quant", fp16, 44396, 3385, "float8_e4m3fn", 0, (Tile(1, 7, 512, 2, 3, 8),)),
    )  # fmt: skip
    for name, dtype, rows, cols, kind, block, ways in narrow:
        yield Sweep(name, name, "fwd", case(dtype, rows=rows, cols=cols, kind=kind, block=block), ways)
    short = (S(16, 7, 64, 4, ends=True), S(8, 4, 128, 4, ends=True), S(4, 2, 256, 4), S(2, 2, 256, 2, ends=True))
    yield Sweep("softmax.forward", "softmax", "fwd", case(bf16, rows=65536, cols=430), short)
    for name, dtype, batch, channels, side, groups, steps in (
        ("group_norm", fp16, 512, 128, 20, 32, (400,)), ("group_norm_silu", fp16, 40, 2560, 20, 32, (400,)),
        ("group_norm_silu", fp16, 23, 384, 72, 16, (864, 432)),
    ):  # fmt: skip
        of = case(dtype, batch=batch, channels=channels, side=side, groups=groups)
        back = tuple(Images(4, 4, 3, 4, early=True, step=step) for step in steps)
        yield Sweep("group_norm.backward_streamed", name, "bwd", of, (*back, Apart()))


def meetings() -> Iterator[Sweep]:
    """Long groups and rows in fewer, longer shares: where more than a hundred programs meet, waiting may be what
    takes time."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images as Im
    from ridgeline.kernels.shares import Streamed as T

    for dtype, batch, channels, side in (("float16", 3, 320, 192), ("float32", 4, 1024, 96), ("bfloat16", 6, 128, 160)):
        of, wide = case(dtype, batch=batch, channels=channels, side=side, groups=16), dtype == "float32"
        ahead = tuple(Im(8, warps, 3, 16 // warps, paired=not wide) for warps in (8, 16))
        back = tuple(Im(4, warps, 3, 16 // warps, early=True) for warps in (8, 16))
        yield Sweep("group_norm.streamed", "group_norm", "fwd", of, ahead)
        yield Sweep("group_norm.backward_streamed", "group_norm", "bwd", of, back)
    for dtype, rows, cols in (("float32", 64, 250880), ("float32", 141, 100352), ("float32", 421, 120304)):
        of = case(dtype, rows=rows, cols=cols)
        yield Sweep("softmax.backward", "softmax", "bwd", of, (T(4, 8, 3, 2), T(4, 16, 3, 1)))
        yield Sweep("softmax.forward", "softmax", "fwd", of, (T(8, 8, 3, 2), T(8, 16, 3, 1)))


def odd_long() -> Iterator[Sweep]:
    """Softmax of long rows that start inside accesses, whose shares are whole accesses, by clusters of other sizes."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.softmax.config import Packed as P

    last = "evict_last"
    for rows, cols, tried in (
        (1024, 131075, (P(16, 4, 2, last, cluster=4), P(8, 0, 3, last, cluster=8), P(16, 12, 2, last, cluster=2))),
        (2048, 65537, (P(16, 13, 2), P(16, 4, 2, last, cluster=2), P(8, 0, 3, last, cluster=4))),
        (512, 262147, (P(8, 0, 3, last, cluster=16), P(16, 4, 2, last, cluster=8))),
        (64, 50257, (P(8, 0, 3, cluster=4), P(16, 0, 2, cluster=2))),
    ):
        yield Sweep("softmax.forward", "softmax", "fwd", case("bfloat16", rows=rows, cols=cols), tried)


def groups_shared() -> Iterator[Sweep]:
    """GroupNorm forward with all of a share in shared memory: few registers, six programs a multiprocessor."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Packed as P

    for batch, channels, side, tried in (
        (16, 512, 128, (P(8, 6, 16, 8), P(8, 5, 16, 8), P(8, 6, 16, 8, paired=False), P(16, 3, 8, 8), P(8, 3, 8, 16))),
        (4, 512, 128, (P(8, 6, 16, 8), P(8, 6, 16, 8, paired=False), P(16, 3, 8, 8))),
        (8, 512, 64, (P(8, 6, 4, 8), P(8, 6, 4, 8, paired=False))),
        (16, 640, 64, (P(8, 5, 4, 10), P(8, 6, 8, 5))), (8, 320, 128, (P(8, 5, 8, 10), P(8, 6, 16, 5))),
        (32, 320, 64, (P(16, 2, 1, 10), P(8, 5, 2, 10), P(8, 6, 4, 5))), (32, 320, 56, (P(16, 3, 1, 7), P(8, 6, 2, 7))),
        (64, 640, 32, (P(8, 5, 1, 10), P(16, 3, 1, 5))), (64, 1280, 16, (P(8, 6, 1, 5), P(8, 8, 1, 5))),
    ):  # fmt: skip
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, tried)
        if channels == 512 and side == 128:
            yield Sweep("group_norm.streamed", "group_norm", "fwd", of, tried[:1] + tried[-1:])


def groups_back() -> Iterator[Sweep]:
    """GroupNorm backward with a group a program, both inputs in shared memory, and the kernel of sums started early.
    (Clusters of programs were tried, and lost.)"""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Images as Im
    from ridgeline.kernels.group_norm.config import Packed as P

    def step(num: int) -> Im:
        return Im(4, 4, 3, 4, early=True, step=num)

    late, early = Im(4, 4, 3, 4), Im(4, 4, 3, 4, early=True)
    for batch, channels, side, tried in (
        (32, 320, 56, (step(448), step(784), step(224))), (64, 512, 28, (step(112), step(392), step(784))),
        (32, 512, 40, (step(400), step(800), step(320))),
        (64, 1280, 16, (P(8, 4, early=True), P(8, 5, early=True))), (128, 320, 32, (P(8, 4, early=True),)),
        (64, 384, 32, (P(8, 4, early=True), P(8, 3, early=True))), (64, 512, 32, (P(8, 3, early=True),)),
        (128, 640, 16, (P(4, 8, early=True), P(8, 4, early=True))), (256, 256, 16, (P(2, 16, early=True),)),
        (4, 512, 128, ()), (16, 512, 128, ()),
    ):  # fmt: skip
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.backward_streamed", "group_norm_silu", "bwd", of, (late, early, *tried))
        if channels in (1280, 384):
            yield Sweep("group_norm.backward_streamed", "group_norm", "bwd", of, (late, early, *tried))


def groups_flat() -> Iterator[Sweep]:
    """Short groups a program each, wherever channels start, against sums first and results later, and fewer warps and
    more; groups of float32 against those that pass through shared memory."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Apart, Flat, Tile

    for dtype, batch, channels, side in (
        ("bfloat16", 128, 2048, 7), ("bfloat16", 128, 1024, 14), ("bfloat16", 256, 256, 13), ("float32", 64, 1024, 14),
        ("float32", 64, 512, 28), ("float16", 64, 320, 30),
    ):  # fmt: skip
        of = case(dtype, batch=batch, channels=channels, side=side, groups=32)
        length = channels // 32 * side * side
        warps = 4 if length <= 5120 else 8
        ahead = (Flat(warps, 32 // warps), Flat(2 * warps, 16 // warps), Apart())
        yield Sweep("group_norm.flat", "group_norm_silu", "fwd", of, ahead)
        back = tuple(Tile(num, 32 if channels > 256 else 64) for num in (4, 8, 16))
        yield Sweep("group_norm.tile", "group_norm_silu", "bwd", of, (*back, Apart()))
    for batch, channels, side, groups in ((200, 2560, 7, 8), (64, 256, 63, 32), (64, 640, 30, 32)):
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=groups)
        for kernel, phase in (("group_norm.flat", "fwd"), ("group_norm.tile", "bwd")):
            yield Sweep(kernel, "group_norm_silu", phase, of, (Apart(),))
    for batch, channels, side in ((128, 320, 32), (64, 640, 16)):
        of = case("float32", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, (Apart(),))
        yield Sweep("group_norm.backward_streamed", "group_norm_silu", "bwd", of, (Apart(),))


def rows_short() -> Iterator[Sweep]:
    """Softmax: odd rows of one warp, several a program and one; rows of 1k to 2.5k columns in places that fit; few odd
    rows in one program each and in clusters."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.softmax.config import Packed as P
    from ridgeline.kernels.softmax.config import Softmax as S

    def odd(chunks: int, block: int, *rows: int) -> tuple[S, ...]:
        return tuple(S(num, chunks, block, num, ends=True) for num in rows)

    four = S(1, 2, 1024, 4)
    fit = {1232: (four, S(2, 3, 512, 4), S(4, 5, 256, 4)), 2200: (S(1, 3, 1024, 4), S(2, 5, 512, 4)),
           1552: (four, S(2, 4, 512, 4), S(4, 7, 256, 4)), 1048: (four, S(2, 3, 512, 4))}  # fmt: skip
    for dtype, rows, cols, tried in (
        ("bfloat16", 65536, 394, odd(2, 256, 1, 4, 8)), ("float32", 65536, 177, odd(2, 128, 1, 4, 8)),
        ("bfloat16", 131072, 1001, odd(4, 256, 1, 2, 4)),
    ):  # fmt: skip
        yield Sweep("softmax.forward", "softmax", "fwd", case(dtype, rows=rows, cols=cols), tried)
        yield Sweep("softmax.backward", "softmax", "bwd", case(dtype, rows=rows, cols=cols), tried)
    for rows, cols in ((65536, 1232), (65536, 1552), (18727, 1048), (40000, 2200)):
        yield Sweep("softmax.forward", "softmax", "fwd", case("bfloat16", rows=rows, cols=cols), fit[cols])
    apart = (S(1, 2, 1024, 4, ends=True), S(4, 5, 256, 4, ends=True), S(1, 5, 256, 1, ends=True))
    yield Sweep("softmax.forward", "softmax", "fwd", case("bfloat16", rows=30111, cols=1162), apart)
    few = (S(1, 3, 8192, 32, ends=True), P(8, 0, 3, cluster=4))
    for rows, cols in ((8, 20721), (3, 20724)):
        yield Sweep("softmax.forward", "softmax", "fwd", case("float16", rows=rows, cols=cols), few)


def heads_back() -> Iterator[Sweep]:
    """Head norms backward on two warps for other types and head dims."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.qk_norm_rope.config import Heads, rows

    for dtype, heads, keys, dim in (("bfloat16", 28, 4, 128), ("float16", 32, 8, 128), ("bfloat16", 32, 8, 64),
                                    ("bfloat16", 16, 4, 256), ("float32", 32, 8, 128)):  # fmt: skip
        of = case(dtype, batch=4, seq=4096, heads=heads, keys=keys, dim=dim)
        yield Sweep("qk_norm_rope.backward", "qk_norm_rope", "bwd", of, (Heads(2, 10, rows(2, dim)),))


def lean() -> Iterator[Sweep]:
    """Backward passes of norms whose turns have a tenth fewer instructions, by themselves and where another kernel had
    been faster."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import again
    from ridgeline.kernels.rms_norm.config import ahead as later

    layer: tuple[tuple[str, int, int, tuple[B, ...]], ...] = (
        ("bfloat16", 6676, 11752, (again(11752, 8, 3, 1), later(11752, 16, 2, 1))),
        ("bfloat16", 8829, 11197, (later(11197, 16, 2, 1),)),
        ("bfloat16", 8107, 7538, (again(7538, 8, 3, 2), again(7538, 8, 2, 2), later(7538, 16, 3, 1))),
        ("float16", 6807, 15579, (again(15579, 16, 2, 1),)),
        ("bfloat16", 19128, 13006, (again(13006, 16, 2, 1),)),
        ("bfloat16", 51367, 3499, ()),
        ("bfloat16", 65536, 2065, (again(2065, 4, 3, 4),)),
        ("float16", 3433, 8192, (again(8192, 8, 3, 2), later(8192, 16, 3, 1))),
        ("bfloat16", 5654, 5376, ()),
        ("bfloat16", 65536, 440, (later(440, 1, 3, 12), again(440, 1, 3, 12))),
        ("float32", 65536, 450, (later(450, 1, 3, 12, itemsize=4),)),
        ("float32", 2287, 14336, ()),
    )
    plain: tuple[tuple[str, int, int, tuple[B, ...]], ...] = (
        ("bfloat16", 2672, 14336, (again(14336, 16, 3, 1, True), later(14336, 16, 3, 1), again(14336, 8, 3, 1))),
        ("bfloat16", 11460, 14803, (later(14803, 16, 2, 1), again(14803, 8, 2, 1))),
        ("bfloat16", 65536, 369, (later(369, 1, 3, 12), again(369, 1, 3, 16, True))),
        ("bfloat16", 65536, 392, (later(392, 1, 3, 12), again(392, 1, 3, 16, True))),
        ("bfloat16", 16384, 7001, (again(7001, 8, 3, 2, True),)),
        ("bfloat16", 10478, 3513, (again(3513, 4, 3, 4, True),)),
        ("bfloat16", 8000, 5001, (again(5001, 8, 3, 2, True), again(5001, 4, 3, 3, True))),
        ("bfloat16", 4431, 5376, (later(5376, 8, 3, 2),)),
        ("float32", 36830, 1204, (later(1204, 2, 3, 8, itemsize=4),)),
        ("bfloat16", 13333, 16302, ()),
    )
    for name, shapes in (("layer_norm", layer), ("rms_norm", plain)):
        for dtype, rows, cols, tried in shapes:
            yield Sweep(f"{name}.backward", name, "bwd", case(dtype, rows=rows, cols=cols), tried)


def fitting() -> Iterator[Sweep]:
    """Long rows to eight bits walked over; forward passes of odd rows on as many warps as fit."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.rms_norm_quant.config import Tile as T

    def odd(chunks: int, warps: int) -> F:
        return F(1, chunks, 256 * warps, warps, "evict_last", "", True)

    narrow = "float8_e4m3fn"
    for name, dtype, rows, cols, kind, group, tiles in (
        ("layer_norm", "bfloat16", 10468, 16384, narrow, 0, (T(1, 4, 4096, 16, 3, 1), T(1, 2, 8192, 32, 2, 1))),
        ("rms_norm", "bfloat16", 7926, 13696, narrow, 64, (T(1, 4, 4096, 16, 3, 1), T(1, 7, 2048, 8, 3, 1))),
        ("layer_norm", "bfloat16", 10468, 12288, narrow, 128, (T(1, 3, 4096, 16, 3, 1), T(1, 6, 2048, 8, 3, 1))),
        ("rms_norm", "float16", 1053, 22016, narrow, 0, (T(1, 3, 8192, 32, 2, 1), T(1, 6, 4096, 16, 2, 1))),
        ("layer_norm", "float16", 45303, 3584, "int8", 0, (T(1, 2, 2048, 8, 3, 2),)),
        ("rms_norm", "bfloat16", 28494, 6816, "int8", 0, (T(1, 7, 1024, 4, 3, 2),)),
        ("layer_norm", "bfloat16", 20284, 3720, "int8", 0, ()),
    ):  # fmt: skip
        of = case(dtype, rows=rows, cols=cols, kind=kind, block=group)
        yield Sweep(f"{name}_quant", f"{name}_quant", "fwd", of, tiles)
    for dtype, rows, cols, ways in (
        ("bfloat16", 65536, 2065, (odd(5, 2), odd(9, 1))), ("bfloat16", 8829, 11197, (odd(3, 16), odd(11, 4))),
        ("float16", 6807, 15579, (odd(4, 16),)), ("bfloat16", 19128, 13006, (odd(4, 16), odd(13, 4))),
        ("float32", 2287, 14336, (F(1, 7, 2048, 8, "evict_last"), F(1, 2, 8192, 32, "evict_last"))),
    ):  # fmt: skip
        yield Sweep("layer_norm.forward", "layer_norm", "fwd", case(dtype, rows=rows, cols=cols), ways)


def asked_early() -> Iterator[Sweep]:
    """Weights asked for with rows and after their sums; norms of sums and images, whose kernels ask before they write
    (nothing beside them: before, 4×512×128×128 took 45.2 µs, 8×320×128×128 53.4, 32×320×56×56 39.7, 16×512×128×128
    157.7)."""
    from dataclasses import replace

    from ridgeline.kernels.contract import case
    from ridgeline.kernels.layer_norm import config as layers
    from ridgeline.kernels.rms_norm import config as rms

    for name, config, shapes in (
        ("rms_norm", rms, ((2048, 4096), (16384, 4096), (8192, 8192), (512, 5120), (2048, 5120), (4096, 768))),
        ("layer_norm", layers, ((2048, 4096), (512, 4096), (16384, 4096), (256, 8192), (4096, 768))),
    ):
        for rows, cols in shapes:
            usual = config.forward(rows, cols, 2)
            other = (replace(usual, early=not usual.early),)
            yield Sweep(f"{name}.forward", name, "fwd", case("bfloat16", rows=rows, cols=cols), other)
    for rows, cols in ((2048, 4096), (16384, 5120), (8192, 7001)):
        yield Sweep("rms_norm.forward", "add_rms_norm", "fwd", case("bfloat16", rows=rows, cols=cols), ())
    for batch, channels, side in ((4, 512, 128), (8, 320, 128), (32, 320, 56), (16, 512, 128)):
        of = case("bfloat16", batch=batch, channels=channels, side=side, groups=32)
        yield Sweep("group_norm.streamed", "group_norm_silu", "fwd", of, ())


def past() -> Iterator[Sweep]:
    """Gradients past the norm added to rows that wait in shared memory, beside rows that registers hold."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import again

    wide, long = B(1, 2, 8192, 32, 1, 1, False), B(1, 0, 0, 16, 1, 1, False)
    for rows, cols, ways in (
        (3000, 14336, (wide,)), (4096, 16384, (wide, again(16384, 16, 3, 1, True))), (2048, 18432, (long,)),
        (9001, 5376, (again(5376, 8, 3, 2, True),)), (8192, 8192, (again(8192, 8, 3, 2, True),)),
        (4096, 12288, (again(12288, 8, 3, 1),)), (7321, 6144, (again(6144, 8, 3, 2, True),)),
    ):  # fmt: skip
        yield Sweep("rms_norm.backward", "add_rms_norm", "bwd", case("bfloat16", rows=rows, cols=cols), ways)
    for rows, cols, ways in (
        (4096, 14336, (wide,)), (4096, 16384, (wide,)), (2048, 18432, (long, again(18432, 16, 2, 1))),
        (4001, 8192, (again(8192, 8, 3, 2),)), (2470, 12288, (again(12288, 8, 3, 1),)),
        (9001, 5376, (again(5376, 8, 3, 2),)), (20000, 1600, (again(1600, 2, 2, 8),)),
    ):  # fmt: skip
        yield Sweep("layer_norm.backward", "add_layer_norm", "bwd", case("bfloat16", rows=rows, cols=cols), ways)


def walked_narrow() -> Iterator[Sweep]:
    """Rows to eight bits: some thousand rows walked over, or a program each."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant import config

    for name, dtype, rows, cols, kind, group in (
        ("layer_norm_quant", "float16", 8119, 4608, "float8_e4m3fn", 128),
        ("layer_norm_quant", "bfloat16", 4096, 4096, "float8_e4m3fn", 0),
        ("layer_norm_quant", "bfloat16", 4096, 8192, "float8_e4m3fn", 128),
        ("rms_norm_quant", "bfloat16", 4096, 4096, "float8_e4m3fn", 128),
        ("rms_norm_quant", "bfloat16", 7321, 5120, "float8_e4m3fn", 0),
        ("rms_norm_quant", "bfloat16", 6000, 7168, "float8_e4m3fn", 128),
    ):
        of = case(dtype, rows=rows, cols=cols, kind=kind, block=group)
        walks = config.walking(cols, group, name == "layer_norm_quant")
        yield Sweep(name, name, "fwd", of, (walks, config.apiece(rows, cols, 2, group)))


def narrow_warps() -> Iterator[Sweep]:
    """Rows to eight bits on fewer warps: what does not depend on a row's length is 100 instructions of every warp."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm_quant.config import Tile as T

    eight, int8 = "float8_e4m3fn", "int8"
    for name, rows, cols, kind, group, ways in (
        ("layer_norm_quant", 16384, 4096, eight, 0, (T(1, 8, 512, 2, 3, 4),)),
        ("layer_norm_quant", 16384, 4096, eight, 128, (T(1, 8, 512, 2, 3, 4),)),
        ("layer_norm_quant", 24000, 3584, int8, 0, (T(1, 7, 512, 2, 3, 5), T(1, 7, 512, 2, 3, 4))),
        ("layer_norm_quant", 16384, 3072, eight, 128, (T(1, 6, 512, 2, 3, 5),)),
        ("layer_norm_quant", 30000, 2880, eight, 0, (T(1, 6, 512, 2, 3, 5),)),
        ("layer_norm_quant", 8200, 7168, eight, 0, (T(1, 7, 1024, 4, 3, 2),)),
        ("layer_norm_quant", 8200, 7168, eight, 128, (T(1, 7, 1024, 4, 3, 2),)),
        ("rms_norm_quant", 16384, 4096, eight, 0, (T(1, 8, 512, 2, 3, 6), T(1, 8, 512, 2, 3, 5))),
        ("rms_norm_quant", 16384, 4096, eight, 128, (T(1, 8, 512, 2, 3, 5),)),
        ("rms_norm_quant", 24000, 3584, int8, 0, (T(1, 7, 512, 2, 3, 6),)),
        ("rms_norm_quant", 16384, 3072, eight, 128, (T(1, 6, 512, 2, 3, 7),)),
        ("rms_norm_quant", 8200, 7168, eight, 128, (T(1, 7, 1024, 4, 3, 3), T(1, 7, 1024, 4, 3, 2))),
    ):
        of = case("bfloat16", rows=rows, cols=cols, kind=kind, block=group)
        yield Sweep(name, name, "fwd", of, ways)


def lost_by_models() -> Iterator[Sweep]:
    """What shapes of models lost by the first draw, beside what it took them with and what else might do."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.rms_norm.config import Backward as B
    from ridgeline.kernels.rms_norm.config import Forward as F
    from ridgeline.kernels.rms_norm.config import again
    from ridgeline.kernels.rms_norm_quant.config import Tile as T
    from ridgeline.kernels.softmax.config import Softmax as S

    def rows(kernel: str, name: str, phase: str, dtype: str, num: int, cols: int, *ways: Any) -> Sweep:
        return Sweep(kernel, name, phase, case(dtype, rows=num, cols=cols), ways)

    last, half = "evict_last", "float16"
    yield rows("rms_norm.forward", "rms_norm", "fwd", "bfloat16", 4854, 18432, F(1, 3, 8192, 32, last),
               F(1, 9, 2048, 8, last))  # fmt: skip
    for dtype, num in ((half, 1088), ("bfloat16", 4096)):
        reads = last if num == 4096 else ""
        yield rows("layer_norm.forward", "layer_norm", "fwd", dtype, num, 18432, F(1, 3, 8192, 32, reads),
                   F(1, 9, 2048, 8, reads))  # fmt: skip
    yield rows("layer_norm.backward", "layer_norm", "bwd", half, 1088, 18432, again(18432, 16, 2, 1))
    for cols in (1152, 1280, 1536):
        places = -(-cols // 256)
        yield rows("rms_norm.forward", "rms_norm", "fwd", half, 65536, cols, F(1, -(-cols // 512), 512, 2, last),
                   F(4, places, 256, 4, last))  # fmt: skip
    yield rows("rms_norm.backward", "add_rms_norm", "bwd", "bfloat16", 3000, 14336, again(14336, 8, 3, 1))
    yield rows("rms_norm.backward", "add_rms_norm", "bwd", "bfloat16", 2048, 18432, again(18432, 8, 2, 1))
    yield rows("layer_norm.backward", "add_layer_norm", "bwd", "bfloat16", 4096, 14336, again(14336, 8, 3, 1))
    for name in ("rms_norm", "layer_norm"):
        yield rows(f"{name}.backward", name, "bwd", "bfloat16", 32768, 768, B(1, 3, 256, 1, 3, 12, True))
    for num, cols, ways in (
        (16384, 17408, (F(1, 3, 8192, 32), F(1, 5, 4096, 16))), (4096, 29568, (F(1, 4, 8192, 32), F(1, 8, 4096, 16))),
    ):  # fmt: skip
        of = case(half, rows=num, cols=cols, kind="float8_e4m3fn", per="row", block=0)
        yield Sweep("quantize.rows", "quantize", "fwd", of, ways)
    for dtype, num, cols, group, ways in (
        ("float32", 16384, 1280, 128, (T(1, 3, 512, 4), T(1, 3, 512, 4, 3, 4), T(1, 5, 256, 2, 3, 8))),
        ("bfloat16", 2048, 4096, 0, (T(1, 4, 1024, 4, 3, 4),)),
        ("bfloat16", 2048, 8192, 128, (T(1, 1, 8192, 8, 4, 2),)),
        ("bfloat16", 16384, 3072, 128, (T(1, 6, 512, 2, 3, 4),)),
        ("bfloat16", 30000, 2880, 0, (T(1, 6, 512, 2, 3, 4),)),
    ):
        of = case(dtype, rows=num, cols=cols, kind="float8_e4m3fn", block=group)
        yield Sweep("layer_norm_quant", "layer_norm_quant", "fwd", of, ways)
    for num, cols in ((14756, 50265), (8192, 30522)):
        yield rows("cross_entropy.backward", "cross_entropy", "bwd", "bfloat16", num, cols)
    for num, cols in ((1458, 32000), (4096, 32000), (3000, 28992)):
        yield rows("softmax.backward", "softmax", "bwd", "bfloat16", num, cols, S(1, 1, 32768, 32), S(1, 4, 8192, 32))
    yield rows("rms_norm.forward", "rms_norm", "fwd", "bfloat16", 1024, 1536, F(1, 3, 512, 2, early=True),
               F(1, 1, 2048, 8, early=True))  # fmt: skip
    yield rows("rms_norm.forward", "rms_norm", "fwd", "float32", 3269, 1536, F(1, 3, 512, 4), F(1, 1, 2048, 8))


PARTS: dict[str, Callable[[], Iterator[Sweep]]] = {
    "lost_by_models": lost_by_models,
    "narrow_warps": narrow_warps,
    "past": past,
    "walked_narrow": walked_narrow,
    "asked_early": asked_early,
    "four_warps": four_warps,
    "quantizing": quantizing,
    "losses": losses,
    "powers": powers,
    "wide": wide,
    "heads": heads,
    "last": last,
    "long_backward": long_backward,
    "leaving": leaving,
    "groups_whole": groups_whole,
    "scales": scales,
    "told": told,
    "fewer": fewer,
    "shares_early": shares_early,
    "odd_backward": odd_backward,
    "packed": packed,
    "losses_packed": losses_packed,
    "groups_packed": groups_packed,
    "stages": stages,
    "groups_clustered": groups_clustered,
    "rows_clustered": rows_clustered,
    "odd_forward": odd_forward,
    "rows_again": rows_again,
    "middling": middling,
    "misses": misses,
    "odd_long": odd_long,
    "ahead": ahead,
    "short_rows": short_rows,
    "odd_more": odd_more,
    "split_rows": split_rows,
    "strangers": strangers,
    "meetings": meetings,
    "groups_shared": groups_shared,
    "groups_back": groups_back,
    "groups_flat": groups_flat,
    "rows_short": rows_short,
    "heads_back": heads_back,
    "lean": lean,
    "fitting": fitting,
}


def wanted_variants(parts: list[str]) -> list[Any]:
    """What a pack must hold for these parts."""
    from ridgeline.kernels import tuning
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for part in parts:
        for sweep in PARTS[part]():
            cases = list(dict.fromkeys((sweep.of, compared(sweep.of))))
            found += variants_of(sweep.name, cases)
            for config in sweep.configs:
                with tuning.forced(sweep.kernel, config):
                    found += variants_of(sweep.name, cases)
    return list(dict.fromkeys(found))


def bits(value: Any) -> Any:
    import torch

    return value.reshape(-1).view(torch.uint8)


MOST_CHECKED, LEAST_CHECKED, MOST_COMPARED = 8200, 1200, 1 << 25
"""Rows at most that are compared with float64 (turns and ends are the same in more), rows that always are, numbers from
which on there are fewer."""


def compared(of: Any) -> Any:
    """The case with fewer rows, where it has more of them than need be compared."""
    from ridgeline.kernels.contract import case

    sizes = dict(of.sizes)
    if "rows" not in sizes:
        return of
    most = min(MOST_CHECKED, max(LEAST_CHECKED, MOST_COMPARED // sizes["cols"])) if "cols" in sizes else MOST_CHECKED
    return case(of.dtype, **sizes | {"rows": min(sizes["rows"], most)})


def checked(sweep: Sweep, configs: list[Any], device: Any) -> dict[Any, list[str]]:
    """What is wrong with the results of each configuration: nothing, in an empty list."""
    import torch

    from ridgeline.bench.check import _is_float, poison, results
    from ridgeline.bench.verdict import judge
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    args = trial.make(compared(sweep.of), device, torch.Generator(device).manual_seed(1))
    wide = tuple(value.double() if _is_float(value) else value for value in args)
    meant = results(trial.reference, wide, 1, trial.constants)
    eager = results(trial.eager, args, 1, trial.constants)
    found: dict[Any, list[str]] = {}
    for config in configs:
        found[config] = []
        try:
            with tuning.forced(sweep.kernel, config):
                poison(device)
                ours = results(trial.call, args, 1, trial.constants)
                poison(device)
                again = results(trial.call, args, 1, trial.constants)
            for (what, mine), (_, second), (_, theirs), (_, right) in zip(ours, again, eager, meant, strict=True):
                verdict = judge(mine, theirs, right, trial.times_eager)
                if not verdict:
                    found[config].append(f"{what}: {verdict}")
                if trial.deterministic and not torch.equal(bits(mine), bits(second)):
                    found[config].append(f"{what}: not the same twice")
        except Exception as error:
            found[config].append(f"{type(error).__name__}: {str(error)[:300]}")
    return found


READ = "bare read"
"""Stands among configurations for a kernel that reads as many bytes and does nothing else."""


def reading(num_bytes: int, device: Any) -> Callable[[], None]:
    import reading
    import torch

    return reading.run(torch.ones(num_bytes // 4, dtype=torch.int32, device=device), 8, 4096, 1, "")


def timed(
    sweep: Sweep, configs: list[Any], flush: Any, device: Any, rounds: int = ROUNDS
) -> tuple[dict[Any, list[float]], int]:
    """Seconds of every round of every configuration, and of a copy of as many bytes (None), and, where next to nothing
    is written, of a bare read; and those bytes."""
    import torch

    from ridgeline.bench.race import HEAD_START_CYCLES, moved_bytes, runner
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    args = trial.make(sweep.of, device, torch.Generator(device).manual_seed(0))
    torch.manual_seed(0)
    run = runner(trial.timed or trial.call, args, sweep.phase, trial.constants)
    num_bytes = moved_bytes(trial, args, sweep.phase)
    source = torch.empty(num_bytes // 8, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    bare = reading(num_bytes, device) if sweep.name == "cross_entropy" and sweep.phase == "fwd" else None
    marks: dict[Any, list[Any]] = {config: [] for config in [*configs, *([READ] if bare else []), None]}

    def turn(config: Any, call: Callable[[], Any]) -> None:
        for _ in range(WARM):
            call()
        flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        marks[config].append((start, end))

    order = list(marks)
    for i in range(rounds):
        for config in order[i % len(order) :] + order[: i % len(order)]:
            if config is None:
                turn(None, lambda: target.copy_(source))
                continue
            if config is READ:
                turn(READ, bare)
                continue
            with tuning.forced(sweep.kernel, config):
                turn(config, run)
        torch.cuda.synchronize(device)
    return {config: [a.elapsed_time(b) * 1e-3 for a, b in pairs] for config, pairs in marks.items()}, num_bytes


def kernels_in(sweep: Sweep, flush: Any, device: Any) -> dict[str, float]:
    """Seconds of each kernel of a call by the profiler, with a cold L2: launches and gaps are not in them."""
    import torch

    from ridgeline.bench.clock import kernels_of
    from ridgeline.bench.race import runner
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    args = trial.make(sweep.of, device, torch.Generator(device).manual_seed(0))
    run = runner(trial.timed or trial.call, args, sweep.phase, trial.constants)
    run()

    def cold() -> Iterator[Any]:
        for _ in range(3):
            flush.zero_()
            torch.cuda.synchronize()
            yield run

    found = kernels_of(cold())
    kinds = dict.fromkeys(kind for stretch in found for kind, _ in stretch)
    return {kind: statistics.median(sum(s for k, s in stretch if k == kind) for stretch in found) for kind in kinds}


def default_of(sweep: Sweep, device: Any) -> Any:
    """The configuration that the library takes by itself."""
    import torch

    from ridgeline.bench.race import runner
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    args = trial.make(sweep.of, device, torch.Generator(device).manual_seed(0))
    run = runner(trial.timed or trial.call, args, sweep.phase, trial.constants)
    with tuning.asked() as choices:
        run()
    return next((found[2] for found in choices if found[0] == sweep.kernel), None)


def swept(sweep: Sweep, flush: Any, device: Any, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Rows of one sweep: configuration, whether it is right, seconds."""
    import torch

    default = default_of(sweep, device)
    configs = [config for config in dict.fromkeys([default, *sweep.configs]) if config is not None]
    wrong = checked(sweep, configs, device)
    torch.cuda.empty_cache()
    times, num_bytes = timed(sweep, [config for config in configs if not wrong[config]], flush, device, rounds)
    torch.cuda.empty_cache()
    base = {"kernel": sweep.kernel, "primitive": sweep.name, "phase": sweep.phase, "case": str(sweep.of),
            "num_bytes": num_bytes}  # fmt: skip
    rows = []
    for config in [*configs, *([READ] if READ in times else []), None]:
        samples = sorted(times.get(config, []))
        told = config if config is None else {"bare": "read"} if config is READ else asdict(config)
        rows.append(base | {
            "config": told, "default": config is not None and config == default,
            "wrong": wrong.get(config, []), "s": statistics.median(samples) if samples else None,
            "low_s": samples[1] if samples else None,
        })  # fmt: skip
    return rows


def shown(row: dict[str, Any]) -> str:
    config = "copy" if row["config"] is None else " ".join(f"{k}={v}" for k, v in row["config"].items())
    mark = "*" if row["default"] else " "
    took = f"{1e6 * row['s']:8.1f} us {row['num_bytes'] / row['s'] / 1e12:5.2f}" if row["s"] else "not timed"
    return f"{row['kernel']:28s} {row['case']:64s} {mark}{config:90s} {took} {' '.join(row['wrong'])[:200]}"


def table(found: dict[str, Any]) -> Iterator[str]:
    """The rows of a recording for a note, in Markdown; a copy of as many bytes ends each case."""
    copy = found["copy_bytes_per_s"]
    yield f"Copy of 1 GiB in the same run: {copy / 1e12:.2f} TB/s."
    yield ""
    yield "| kernel | case | configuration | µs | TB/s | of the copy | as large |"
    yield "|---|---|---|---|---|---|---|"
    large = {(row["kernel"], row["case"]): row["s"] for row in found["rows"] if row["config"] is None}
    for row in found["rows"]:
        config = "a bare copy" if row["config"] is None else " ".join(f"{k}={v}" for k, v in row["config"].items())
        config += " (default)" if row["default"] else ""
        case = row["case"].replace("bfloat16", "bf16")
        if row["s"] is None:
            yield f"| {row['kernel']} | {case} | {config} | {'; '.join(row['wrong'])[:120]} | | | |"
            continue
        rate, bare = row["num_bytes"] / row["s"], large[row["kernel"], row["case"]] / row["s"]
        cells = f"{1e6 * row['s']:.1f} | {rate / 1e12:.2f} | {rate / copy:.0%} | {bare:.0%}"
        yield f"| {row['kernel']} | {case} | {config} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--split", default="", help="parts whose kernels are timed one by one as well")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pack", type=Path, help="compile what these parts need into this folder, and time nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns that are timed of every configuration")
    asked = parser.parse_args()
    if asked.pack:
        from ridgeline.kernels import pack

        made = pack.write(asked.pack, wanted_variants(asked.parts.split(",")), jobs=asked.jobs)
        print(f"{len(made.entries)} kernels in {time.perf_counter() - BEGAN:.0f} s")
        return
    if asked.table:
        print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
        return
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.clock import FLUSH_BYTES
    from ridgeline.bench.race import Course, copy_bandwidth
    from ridgeline.kernels import direct

    direct.RECORD_AFTER = sys.maxsize  # a recorded backward pass keeps its plan, whatever is forced later
    asked.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda")
    found: dict[str, Any] = {"copy_bytes_per_s": copy_bandwidth(Course(device)), "rows": [], "split": [], "errors": []}
    print(f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for part, sweep in ((name, sweep) for name in asked.parts.split(",") for sweep in PARTS[name]()):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({"case": f"{sweep.kernel} {sweep.of}", "error": "no time left"})
            continue
        try:
            rows = swept(sweep, flush, device, asked.rounds)
            found["rows"] += rows
            print("\n".join(map(shown, rows)), flush=True)
            if part in asked.split.split(","):
                kernels = kernels_in(sweep, flush, device)
                found["split"].append({"kernel": sweep.kernel, "case": str(sweep.of), "kernels_s": kernels})
                print("split", sweep.kernel, sweep.of, {k: round(1e6 * s, 1) for k, s in kernels.items()}, flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:400]}"
            found["errors"].append({"case": f"{sweep.kernel} {sweep.of}", "error": text,
                                    "trace": traceback.format_exc()[-1500:]})  # fmt: skip
            print("FAILED", sweep.kernel, sweep.of, text, flush=True)
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found, default=str).encode()))
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found, default=str).encode()))


if __name__ == "__main__":
    main()
