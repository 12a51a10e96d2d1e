"""Launch configurations of embedding bags, dropout and cross layers, PyTorch beside each, calls as users make them.

    python benchmarks/sweep_tables.py --pack kernels --jobs 12                 (compiles, without a device)
    RIDGELINE_KERNEL_PACK=kernels python benchmarks/sweep_tables.py --out results --budget-s 55
    python benchmarks/sweep_tables.py --table data/recordings/h200/tables_sweep1.json.gz

Unlike `sweep_rows.py` calls that come again are repeated without Python here: a gradient of bags is a dozen launches,
and from Python it is the host that takes time. Every configuration has a graph of its own, and three calls before each
that is timed. Results are first compared with float64 in fewer bags, and with themselves; a configuration that is not
right is not timed. ``--split`` has the profiler time kernel by kernel. One file, written again after every case.
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
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
FILE = "sweep_tables.json.gz"
ROUNDS, WARM = 7, 3
EAGER = "eager"

from sweep_rows import Sweep, bits


def one_table(dtype: str, batch: int, rows: int, dim: int, length: int, **more: Any) -> Any:
    from ridgeline.kernels.contract import case

    given = {"mode": "sum", "index": "int64"} | more
    return case(dtype, tables=1, batch=batch, rows=rows, dim=dim, length=length, **given)


def sums() -> Iterator[Sweep]:
    """Long bags with a program each whose warps meet at the end, and as many bags a program as there were."""
    from ridgeline.kernels.embedding_bag.config import Forward as F

    for dtype, batch, rows, dim, length, more, tried in (
        ("float16", 381, 4334, 192, 50, {"mode": "mean", "index": "int32"},
         (F(1, 16, 4), F(1, 16, 4, True), F(1, 32, 8, True), F(1, 64, 16, True), F(1, 32, 16, True))),
        ("float32", 2834, 25786, 32, 50, {},
         (F(16, 8, 4), F(1, 32, 1, True), F(1, 64, 2, True), F(1, 16, 1, True), F(2, 64, 4, True))),
        ("bfloat16", 370, 1922, 384, 20, {},
         (F(1, 8, 4), F(1, 32, 16, True), F(1, 16, 8, True), F(1, 32, 8, True), F(1, 8, 4, True))),
        ("float32", 1091, 45936, 24, 20, {}, (F(16, 8, 4), F(1, 32, 1, True), F(1, 16, 1, True), F(2, 32, 2, True))),
        ("float16", 6970, 4314, 64, 50, {"index": "int32"},
         (F(16, 8, 4), F(1, 16, 1, True), F(1, 32, 2, True), F(4, 16, 4, True), F(1, 32, 1, True))),
        ("float32", 16384, 200000, 128, 20, {}, (F(4, 8, 4), F(1, 8, 1, True), F(1, 16, 2, True), F(1, 16, 4, True))),
        ("float32", 2123, 280286, 384, 8, {"index": "int32"},
         (F(4, 8, 4), F(1, 8, 4, True), F(1, 8, 4), F(1, 16, 8, True))),
        ("float32", 1434, 474085, 48, 8, {}, (F(8, 8, 4), F(1, 16, 1, True), F(2, 16, 2, True), F(1, 8, 1, True))),
        ("bfloat16", 53739, 96116, 32, 20, {"mode": "mean"},
         (F(32, 8, 4), F(1, 32, 1, True), F(4, 32, 4, True), F(4, 16, 4, True), F(16, 16, 4))),
        ("bfloat16", 256, 60000, 512, 100, {},
         (F(1, 8, 4), F(1, 16, 8, True), F(1, 32, 16, True), F(1, 32, 8, True))),
        ("float16", 900, 100000, 64, 100, {}, (F(2, 32, 4), F(1, 64, 4, True), F(1, 128, 8, True), F(1, 32, 2, True))),
    ):  # fmt: skip
        yield Sweep("embedding_bag.forward", "embedding_bag", "fwd",
                    one_table(dtype, batch, rows, dim, length, **more), tried)  # fmt: skip


def gradients() -> Iterator[Sweep]:
    """PyTorch's sort, digits whose blocks count by themselves, and digits with a launch that counts for them."""
    from ridgeline.kernels.embedding_bag.config import Order as O

    library = O(0, 0, 0, 0)
    for dtype, batch, rows, dim, length, more, tried in (
        ("float16", 6970, 4314, 64, 50, {"index": "int32"},
         (library, O(512, 7, 16, 4, 8), O(1024, 7, 16, 8, 8), O(512, 7, 16, 4, 2))),
        ("float32", 2834, 25786, 32, 50, {}, (library, O(512, 8, 16, 4, 8), O(1024, 8, 16, 8, 8), O(512, 5, 16, 4, 8))),
        ("bfloat16", 53739, 96116, 32, 20, {"mode": "mean"}, (library, O(512, 6, 16, 4, 4), O(1024, 6, 16, 8, 4))),
        ("float32", 61582, 4484, 128, 1, {}, (O(512, 7, 16, 4), O(512, 7, 16, 4, 8), O(1024, 7, 16, 8, 8))),
        ("float32", 21490, 165772, 128, 1, {}, (O(512, 6, 16, 4), O(512, 6, 16, 4, 4), O(256, 6, 16, 4, 4))),
        ("float32", 1000, 50000, 64, 8, {}, (O(32, 0, 256, 4), O(512, 6, 16, 4), O(256, 8, 16, 4))),
        ("float32", 16384, 200000, 128, 20, {"skewed": True}, (library, O(512, 6, 16, 4, 4), O(1024, 6, 16, 8, 4))),
        ("float16", 65536, 2000, 32, 20, {}, (library, O(512, 6, 16, 4, 4), O(2048, 6, 16, 8, 4))),
    ):  # fmt: skip
        yield Sweep("embedding_bag.order", "embedding_bag", "bwd",
                    one_table(dtype, batch, rows, dim, length, **more), tried)  # fmt: skip


def chunks() -> Iterator[Sweep]:
    """Sorted indices of a program that sums gradients, and how many of these are on their way."""
    from ridgeline.kernels.embedding_bag.config import Update as U

    for dtype, batch, rows, dim, length, tried in (
        ("float16", 6970, 4314, 64, 50, (U(64, 8, 1), U(32, 8, 1), U(128, 8, 1), U(32, 16, 1), U(64, 4, 1))),
        ("float32", 16384, 200000, 128, 20, (U(64, 8, 1), U(32, 8, 1), U(64, 4, 1), U(16, 8, 1))),
        ("float32", 2123, 280286, 384, 8, (U(8, 4, 1), U(8, 8, 1), U(8, 4, 2), U(16, 4, 1))),
    ):
        yield Sweep("embedding_bag.update", "embedding_bag", "bwd", one_table(dtype, batch, rows, dim, length), tried)


def wide() -> Iterator[Sweep]:
    """Few bags: columns shared out to programs, and a program each."""
    from ridgeline.kernels.embedding_bag.config import Forward as F

    for dtype, batch, rows, dim, length, more, tried in (
        ("bfloat16", 256, 60000, 512, 100, {}, (F(1, 32, 2, True, 64), F(1, 16, 2, True, 128), F(1, 32, 4, True, 128))),
        ("float32", 612, 30000, 192, 50, {}, (F(1, 32, 2, True, 64), F(1, 16, 1, True, 64), F(1, 16, 4, True))),
        ("float16", 1900, 500000, 96, 20, {}, (F(1, 32, 1, True, 32), F(1, 16, 1, True, 32), F(1, 32, 2, True, 64))),
        ("float32", 3100, 90000, 64, 20, {}, (F(1, 8, 1, True), F(1, 16, 1, True, 32), F(1, 16, 2, True))),
        ("float32", 4100, 700000, 128, 8, {"index": "int32"},
         (F(1, 8, 1, False, 64), F(1, 8, 2), F(1, 4, 1, True, 128), F(1, 8, 4))),
        ("bfloat16", 6200, 20000, 384, 3, {}, (F(4, 4, 4), F(1, 4, 1, False, 128), F(1, 4, 1, False, 256))),
        ("float32", 3300, 40000, 32, 8, {}, (F(1, 16, 1, True), F(1, 8, 1), F(4, 8, 1))),
        ("float16", 7400, 9000, 8, 8, {"mode": "mean"}, (F(1, 16, 1, True), F(4, 8, 1), F(16, 8, 1))),
        ("float32", 1451, 1000000, 256, 50, {}, (F(1, 16, 2, True, 128), F(1, 16, 4, True), F(1, 8, 1, True, 64))),
    ):  # fmt: skip
        yield Sweep("embedding_bag.forward", "embedding_bag", "fwd",
                    one_table(dtype, batch, rows, dim, length, **more), tried)  # fmt: skip


LOW_RANKS = (("bfloat16", 52115, 1504, 64), ("float16", 20857, 512, 128), ("bfloat16", 5355, 1024, 128),
             ("bfloat16", 38758, 2048, 32), ("bfloat16", 11568, 640, 64))  # fmt: skip


def crossing(dtype: str, batch: int, dim: int, rank: int) -> Any:
    from ridgeline.kernels.contract import case

    return case(dtype, batch=batch, dim=dim, rank=rank)


FEWER = (("bfloat16", 4920, 1504, 128), ("bfloat16", 3158, 2048, 32), ("bfloat16", 691, 1504, 128))


def ends() -> Iterator[Sweep]:
    """The product that ends a low-rank layer, in tiles of its own or as other products are made."""
    from ridgeline.kernels.cross_layer.config import NO_TILE
    from ridgeline.kernels.cross_layer.config import Tile as T

    tried = (NO_TILE, T(64, 64, 4, 4), T(64, 128, 8, 2), T(128, 64, 8, 2), T(64, 128, 16, 2), T(32, 64, 4, 8),
             T(32, 128, 8, 4))  # fmt: skip
    for of in (*LOW_RANKS, *FEWER):
        yield Sweep("cross_layer.end", "cross_layer", "fwd", crossing(*of), tried)


def ends_back() -> Iterator[Sweep]:
    """The same backward."""
    from ridgeline.kernels.cross_layer.config import NO_TILE
    from ridgeline.kernels.cross_layer.config import Tile as T

    for of in (*LOW_RANKS, *FEWER):
        tried = (NO_TILE, T(64, 64, 4, 4), T(64, 128, 16, 2), T(32, 128, 8, 4))
        yield Sweep("cross_layer.end", "cross_layer", "bwd", crossing(*of), tried)


def squares() -> Iterator[Sweep]:
    """Full layers of few columns in such tiles, forward and backward."""
    from ridgeline.kernels.cross_layer.config import Tile as T

    for phase in ("fwd", "bwd"):
        for dtype, batch, dim in (("float16", 64950, 200), ("float16", 13913, 256), ("float16", 22230, 128),
                                  ("bfloat16", 1500, 256)):  # fmt: skip
            tried = (T(64, 64, 8, 2), T(64, 64, 4, 3), T(64, 128, 8, 2), T(128, 64, 8, 2), T(64, 32, 4, 4))
            yield Sweep("cross_layer.end", "cross_layer", phase, crossing(dtype, batch, dim, 0), tried)


def again() -> Iterator[Sweep]:
    """The second product computed again backward, beside reading it; both weights' gradients in one pass or two."""
    from ridgeline.kernels.cross_layer.config import NO_TILE
    from ridgeline.kernels.cross_layer.config import Tile as T
    from ridgeline.kernels.cross_layer.config import Weights as W

    apart = ("cross_layer.weights", W(0, 0, 0, 0, 0))
    for of in LOW_RANKS:
        tried = (NO_TILE, T(64, 64, 8, 4), T(64, 128, 8, 2), T(128, 64, 8, 2), T(64, 128, 16, 2), T(32, 128, 8, 4))
        pairs = [(("cross_layer.again", each),) for each in tried]
        pairs += [(("cross_layer.weights", each),) for each in (W(64, 64, 4, 4, 2), W(128, 64, 8, 3, 2))]
        pairs += [(apart,), (apart, ("cross_layer.again", NO_TILE), ("cross_layer.end", NO_TILE))]
        yield Sweep("cross_layer.again", "cross_layer", "bwd", crossing(*of), tuple(pairs))


def passes() -> Iterator[Sweep]:
    """The pointwise pass backward with more programs, and the last product by cuBLAS."""
    from ridgeline.kernels.cross_layer.config import Pass, Product

    for dtype, batch, dim in (("float16", 13913, 256), ("float16", 22230, 128), ("bfloat16", 16384, 512),
                              ("bfloat16", 49781, 640), ("float16", 64950, 200)):  # fmt: skip
        block = 1 << (min(dim, 512) - 1).bit_length()
        tried = [Pass(4096 // block, block, 8, 4), Pass(2048 // block, block, 4, 4), Pass(2048 // block, block, 4, 8),
                 Pass(4096 // block, block, 8, 8), Pass(8192 // block, block, 16, 2)]  # fmt: skip
        of = crossing(dtype, batch, dim, 0)
        pairs = [(("cross_layer.backward", each),) for each in tried]
        pairs += [(("cross_layer.product", Product(0, 0, 0, 0, 0)),),
                  (("cross_layer.product", Product(128, 256, 64, 8, 3)),)]  # fmt: skip
        yield Sweep("cross_layer.backward", "cross_layer", "bwd", of, tuple(pairs))


def products() -> Iterator[Sweep]:
    """Backward passes whose kernels are worth timing one by one (``--split``)."""
    for of in (("bfloat16", 52115, 1504, 64), ("bfloat16", 5355, 1024, 128)):
        yield Sweep("cross_layer.none", "cross_layer", "bwd", crossing(*of), ())


def tiles() -> Iterator[Sweep]:
    """GroupNorm's backward pass, short groups a program each: fewer warps for as many places."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.group_norm.config import Tile as T
    from ridgeline.kernels.group_norm.config import Walk as W

    for name, dtype, batch, channels, side, groups, tried in (
        ("group_norm", "bfloat16", 210, 512, 14, 32, (T(16, 32), T(4, 32), T(4, 64))),
        ("group_norm_silu", "float32", 256, 896, 14, 8, (W(8, 16, 256), W(8, 8, 256), W(8, 32, 128), W(8, 32, 64))),
        ("group_norm_silu", "float16", 300, 640, 13, 32, (T(16, 32), T(4, 32), T(8, 64))),
        ("group_norm", "float32", 100, 1024, 14, 32, (T(8, 32), T(16, 64), T(4, 32))),
        ("group_norm_silu", "float16", 408, 2560, 7, 8, (W(8, 64, 64), W(16, 64, 64), W(4, 32, 64), W(8, 128, 32))),
    ):  # fmt: skip
        of = case(dtype, batch=batch, channels=channels, side=side, groups=groups)
        yield Sweep("group_norm.tile", name, "bwd", of, tried)


def dropped() -> Iterator[Sweep]:
    """Programs that share a tile of dropout, and elements that end inside accesses."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.dropout_add.config import Tile as T

    tried = (T(128, 4), T(128, 4, 2), T(256, 4), T(256, 8, 2))
    for phase, dtype, rows, cols in (
        ("bwd", "float32", 333, 1001), ("bwd", "float32", 169, 1912), ("bwd", "float32", 40, 2048),
        ("bwd", "float32", 615, 1352), ("bwd", "float32", 3493, 12288), ("fwd", "float32", 169, 1912),
        ("bwd", "bfloat16", 77, 4000),
    ):  # fmt: skip
        of, kernel = case(dtype, rows=rows, cols=cols, p=0.2), "forward" if phase == "fwd" else "backward"
        fitting = tuple(each for each in tried if each.parts == 1 or dtype == "float32")
        yield Sweep(f"dropout_add.{kernel}", "dropout_add", phase, of, fitting)


def crossed() -> Iterator[Sweep]:
    """Odd widths in longer rows, as they are now."""
    from ridgeline.kernels.contract import case

    for phase in ("fwd", "bwd"):
        for dtype, batch, dim, rank in (
            ("float16", 19960, 429, 0), ("bfloat16", 738, 845, 0), ("bfloat16", 8192, 845, 0),
            ("bfloat16", 2605, 429, 0), ("float16", 65536, 429, 0), ("bfloat16", 16384, 1001, 64),
        ):  # fmt: skip
            yield Sweep("cross_layer.none", "cross_layer", phase, case(dtype, batch=batch, dim=dim, rank=rank), ())


def updates() -> Iterator[Sweep]:
    """Fused steps beside sparse gradients and PyTorch's optimizers."""
    from ridgeline.kernels.contract import case

    for tables, batch, rows, dim, length, optimizer in (
        (1, 5327, 78201, 96, 3, "sgd"), (5, 5668, 7960, 24, 8, "sgd"), (8, 1592, 5456, 48, 8, "adam"),
        (1, 2048, 100000, 64, 1, "rowwise_adagrad"), (2, 5972, 19277, 128, 8, "adam"),
        (1, 16384, 500000, 64, 20, "sgd"),
    ):  # fmt: skip
        of = case("float32", tables=tables, batch=batch, rows=rows, dim=dim, length=length, optimizer=optimizer)
        yield Sweep("embedding_bag.none", "embedding_bags_update", "step", of, ())


def others() -> Iterator[Sweep]:
    """Steps of few small tensors, and losses whose weight's gradient was scaled by one."""
    from ridgeline.kernels.contract import case
    from ridgeline.kernels.grad_norm.op import LISTS

    LISTS["four small"], LISTS["fifteen small"] = (4096, 4096, 58, 1), (64, 700, 9, 1000, 1500, *(100,) * 10)
    for name in ("four small", "fifteen small"):
        yield Sweep("adamw.none", "adamw", "fwd", case("float32", list=name, max_norm=-1.0, master=False), ())
    for rows, cols, hidden in ((1578, 50280, 4096), (3084, 64000, 1536)):
        of = case("bfloat16", rows=rows, cols=cols, hidden=hidden)
        yield Sweep("linear_cross_entropy.none", "linear_cross_entropy", "step", of, ())


PARTS = {"sums": sums, "gradients": gradients, "crossed": crossed, "dropped": dropped, "updates": updates,
         "others": others, "chunks": chunks, "wide": wide,
         "tiles": tiles, "products": products, "ends": ends, "ends_back": ends_back, "again": again,
         "passes": passes, "squares": squares}  # fmt: skip


def forcing(sweep: Sweep, config: Any) -> ExitStack:
    """A configuration of the sweep's kernel, or of several kernels, in pairs with their names."""
    from ridgeline.kernels import tuning

    stack = ExitStack()
    if config is not None and config != EAGER:
        for name, each in config if isinstance(config, tuple) else ((sweep.kernel, config),):
            stack.enter_context(tuning.forced(name, each))
    return stack


def wanted_variants(parts: list[str]) -> list[Any]:
    """What a pack must hold for these parts."""
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for sweep in (sweep for part in parts for sweep in PARTS[part]()):
        for config in (None, *sweep.configs):
            with forcing(sweep, config):
                found += variants_of(sweep.name, [sweep.of, compared(sweep.of)])
    return list(dict.fromkeys(found))


def compared(of: Any) -> Any:
    """The case with fewer bags or rows, where it has more of them than need be compared."""
    import race_families

    from ridgeline.kernels.grad_norm.op import LISTS

    race_families.NAMED.update(LISTS)
    return race_families.fewer(of)


def wrong_of(sweep: Sweep, config: Any, device: Any) -> list[str]:
    """What is wrong with results beside float64, and beside a second call."""
    import torch

    from ridgeline.bench.check import check_case

    checked = check_case(sweep.name, compared(sweep.of), device, 1)
    found = [f"{each.what}: {each.note}" for each in checked if not each.ok]
    if sweep.name != "cross_layer" and (sweep.name != "embedding_bag" or sweep.phase != "bwd"):
        return found
    return found + same_twice(sweep, torch.device(device))


def failing(sweep: Sweep, config: Any, device: Any) -> list[str]:
    """What is wrong, or why it cannot be run at all: the other configurations are timed all the same."""
    try:
        return wrong_of(sweep, config, device)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"]


def same_twice(sweep: Sweep, device: Any) -> list[str]:
    """Results of the whole case, twice and beside PyTorch's: orders differ where there are more blocks."""
    import torch

    from ridgeline.bench.race import runner
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    args = trial.make(sweep.of, device, torch.Generator(device).manual_seed(2))
    torch.manual_seed(0)
    run = runner(trial.call, args, sweep.phase, trial.constants)
    first, second = listed(run()), listed(run())
    torch.manual_seed(0)
    meant = listed(runner(trial.raced or trial.eager, args, sweep.phase, trial.constants)())
    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))
    apart = max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(first, meant))
    return ([] if same else ["not the same twice"]) + ([f"{apart:.1e} off PyTorch's"] if not apart < 0.02 else [])


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def entrants(sweep: Sweep, device: Any) -> tuple[dict[Any, Callable[[], Any]], int, dict[str, list[str]]]:
    """A runner for each configuration that is right, the default first, and PyTorch's last."""
    import torch

    from ridgeline.bench.race import moved_bytes, runner
    from ridgeline.kernels.contract import trials

    trial = trials()[sweep.name][1]
    generator = torch.Generator(device).manual_seed(0)
    if trial.laps:
        laps = trial.laps(sweep.of, device, generator)
        return {None: laps.runs["ridgeline"], EAGER: laps.runs[EAGER]}, laps.num_bytes, {}
    args = trial.make(sweep.of, device, generator)
    found: dict[Any, Callable[[], Any]] = {}
    wrong: dict[str, list[str]] = {}
    for config in (None, *sweep.configs):
        with forcing(sweep, config):
            if said := failing(sweep, config, device):
                wrong[str(config)] = said
                continue
            found[config] = runner(trial.timed or trial.call, args, sweep.phase, trial.constants)
    found[EAGER] = runner(trial.raced or trial.eager, args, sweep.phase, trial.constants)
    return found, moved_bytes(trial, args, sweep.phase), wrong


def timed(sweep: Sweep, runs: dict[Any, Callable[[], Any]], flush: Any) -> dict[Any, list[float]]:
    """Seconds of every round of every entrant, in turns."""
    import torch

    from ridgeline.bench.race import HEAD_START_CYCLES

    marks: dict[Any, list[Any]] = {who: [] for who in runs}
    order = list(runs)
    for i in range(ROUNDS):
        for who in order[i % len(order) :] + order[: i % len(order)]:
            with forcing(sweep, who):
                for _ in range(WARM):
                    runs[who]()
                flush.zero_()
                torch.cuda._sleep(HEAD_START_CYCLES * (1 if sweep.phase == "fwd" else 3))
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                runs[who]()
                end.record()
                marks[who].append((start, end))
        torch.cuda.synchronize()
    return {who: [a.elapsed_time(b) * 1e-3 for a, b in pairs] for who, pairs in marks.items()}


def kernels_in(sweep: Sweep, who: Any, run: Callable[[], Any], flush: Any) -> dict[str, float]:
    """Seconds of each kernel of a call by the profiler, with a cold L2."""
    import torch

    from ridgeline.bench.clock import kernels_of

    def cold() -> Iterator[Any]:
        for _ in range(3):
            flush.zero_()
            torch.cuda.synchronize()
            yield run

    with forcing(sweep, who):
        run()
        found = kernels_of(cold())
    kinds = dict.fromkeys(kind for stretch in found for kind, _ in stretch)
    return {kind[:60]: statistics.median(sum(s for k, s in each if k == kind) for each in found) for kind in kinds}


def swept(sweep: Sweep, flush: Any, device: Any, split: bool) -> list[dict[str, Any]]:
    """Rows of one sweep: configuration, seconds, and what was wrong."""
    runs, num_bytes, wrong = entrants(sweep, device)
    times = timed(sweep, runs, flush)
    base = {"kernel": sweep.kernel, "primitive": sweep.name, "phase": sweep.phase, "case": str(sweep.of),
            "num_bytes": num_bytes}  # fmt: skip
    rows = [base | {"config": config, "wrong": said, "s": None} for config, said in wrong.items()]
    for who, samples in times.items():
        told = {name: str(each) for name, each in who} if isinstance(who, tuple) else who
        told = told if isinstance(told, (dict, str, type(None))) else asdict(told)
        more = {"kernels_s": kernels_in(sweep, who, runs[who], flush)} if split else {}
        rows.append(base | {"config": told, "wrong": [], "s": statistics.median(samples), "low_s": min(samples)} | more)
    return rows


def shown(row: dict[str, Any]) -> str:
    given = row["config"]
    config = " ".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, dict) else given or "default"
    took = f"{1e6 * row['s']:8.1f} us" if row["s"] else f"not timed {row['wrong']}"
    return f"{row['kernel']:24s} {row['phase']:4s} {row['case']:84s} {config:60s} {took}"


def table(found: dict[str, Any]) -> Iterator[str]:
    """The rows of a recording for a note, in Markdown."""
    yield "| phase | case | configuration | µs | eager over it |"
    yield "|---|---|---|---|---|"
    eager = {(row["phase"], row["case"]): row["s"] for row in found["rows"] if row["config"] == EAGER}
    for row in found["rows"]:
        given = row["config"]
        config = " ".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, dict) else given or "default"
        took = f"{1e6 * row['s']:.1f}" if row["s"] else str(row["wrong"])[:80]
        over = f"{eager[row['phase'], row['case']] / row['s']:.2f}" if row["s"] and eager else ""
        yield f"| {row['phase']} | {row['primitive']} {row['case']} | {config} | {took} | {over} |"
        for kernel, s in row.get("kernels_s", {}).items():
            yield f"| | | {kernel} | {1e6 * s:.1f} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--budget-s", type=float, default=55.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--split", default="", help="cases (numbers in their part, as gradients:0) timed by kernel")
    parser.add_argument("--python", action="store_true", help="calls are not repeated in C++, which has to be built")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        made = pack.write(asked.pack, wanted_variants(asked.parts.split(",")), jobs=asked.jobs)
        return print(f"{len(made.entries)} kernels in {time.perf_counter() - BEGAN:.0f} s")
    measure(asked)


def measure(asked: argparse.Namespace) -> None:
    import torch
    from race_families import direct_calls

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.clock import FLUSH_BYTES

    device = torch.device("cuda")
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"direct": not asked.python and direct_calls(), "rows": [], "errors": []}
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    parts = [[(part, i, sweep) for i, sweep in enumerate(PARTS[part]())] for part in asked.parts.split(",")]
    work = [each for i in range(max(map(len, parts))) for part in parts for each in part[i : i + 1]]
    for part, i, sweep in work:
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({"case": f"{sweep.phase} {sweep.of}", "error": "no time left"})
            continue
        try:
            rows = swept(sweep, flush, device, f"{part}:{i}" in asked.split.split(","))
            found["rows"] += rows
            print("\n".join(map(shown, rows)), flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            found["errors"].append({"case": f"{sweep.phase} {sweep.of}", "error": text,
                                    "trace": traceback.format_exc()[-1200:]})  # fmt: skip
            print("FAILED", sweep.phase, sweep.of, text, flush=True)
        torch.cuda.empty_cache()
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found, default=str).encode()))
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found, default=str).encode()))
    print(f"{time.perf_counter() - BEGAN:.0f} s, {len(found['errors'])} failed or not reached")


if __name__ == "__main__":
    main()
