"""Kernels that cuDNN's heuristic is known to take, and what it would take where it was not asked."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.conv.cudnn_choice import Shape, choose
from ridgeline.cost.time.conv.implicit_gemm import (
    CLUSTERED,
    Choice,
    Problem,
    clusters_at_once,
    implicit_s,
    is_shared,
    waves_of,
)
from ridgeline.cost.time.conv.matrix_units import cold_share
from ridgeline.cost.time.conv.problem import (
    SMS,
    Conv,
    Cost,
    Site,
    memset_cost,
    odd_filters,
    padded_channels,
    pass_choice,
    sum_costs,
    w_transform,
    widened_sum,
    x_transform,
    y_transform,
)

LEARNED_ARCH, MEASURED = "hopper", "h200"
TILED = ("tma", "tma_strided", "copy", "copy_strided", "analytic", "warp", "warp_strided", "plain")


def chosen_kernel(site: Site, conv: Conv, op: str) -> list[Choice]:
    """What cuDNN takes for a pass, where its heuristic has been asked: what each tree of its answers says."""
    if site.chip.arch != LEARNED_ARCH or conv.dtype not in ("bf16", "fp16", "tf32", "fp32"):
        return []
    found = choose(Shape(op, conv.dtype, conv.channels_last, conv.n, conv.c, conv.o, conv.groups, conv.taps, conv.side,
                         conv.stride, conv.pad, max(1, conv.in_px // conv.width), conv.width, conv.out_px))  # fmt: skip
    # Side of the widest filters that the heuristic was asked about; the patches of vision transformers are wider
    patch = conv.side > 11 and conv.groups == 1 and conv.rank == 2
    return [Choice("copy", 128, 128, 32) if patch and one.way in ("indexed", "vector") else one for one in found]


_SAY = (3.0, 1.0, 1.0, 1.0)
"""Weight of the trees' votes: the first grew from far more answers (least error where 7,200 answers judge)."""


def likely_cost(costs: Sequence[Cost | None]) -> Cost | None:
    """Of what several trees say, the time that is missed least on average, as a share of the time that passes.

    That is the median with each time weighing its inverse: told twice what passes, a call is off by all of it, told
    half of it by a half.
    """
    known = sorted((cost, say / cost[0]) for cost, say in zip(costs, _SAY, strict=False) if cost is not None)
    half, seen = 0.5 * sum(weight for _, weight in known), 0.0
    for cost, weight in known:
        seen += weight
        if seen >= half:
            return cost
    return None


def problem_of(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """The implicit GEMM of a pass: rows are pixels, or output channels for the weight gradient."""
    x, y, w = (cold_share(site, conv, size) for size in (conv.touched_bytes, conv.output_bytes, conv.weight_bytes))
    wide, size = padded_channels(conv.c), conv.itemsize
    if op == "fwd":
        return Problem(conv.n * conv.out_px, conv.o, wide, conv.taps, x + w, conv.output_bytes, size)
    if op == "dgrad":
        # Input gradients that visit, under a stride, only the taps which meet a pixel
        share = conv.stride**conv.rank if choice.way in ("tma_strided", "copy", "copy_strided", "warp_strided") else 1
        return Problem(
            conv.n * conv.in_px, wide, padded_channels(conv.o), conv.taps / share, y + w, conv.input_bytes, size
        )
    columns, repeat = (wide, conv.taps) if choice.way in CLUSTERED else (wide * conv.taps, 1)
    return Problem(conv.o, columns, conv.n * conv.out_px, 1.0, x + y, conv.weight_bytes, size, repeat)


def kernel_features(conv: Conv, choice: Choice, problem: Problem) -> list[float]:
    """A kernel's problem and choice, as the factor learned for it asks for them; nothing of what is warm."""
    high, wide, pixels, inner = max(1, choice.rows), max(1, choice.columns), conv.n * conv.out_px, conv.c * conv.taps
    tiles = -(-problem.rows // high) * -(-problem.columns // wide) * problem.repeat * choice.split
    work = problem.rows * problem.columns * problem.channels * problem.taps * problem.repeat
    return [float(conv.dtype == "tf32"), float(conv.channels_last), conv.n, conv.c, conv.o, conv.taps, conv.side,
            conv.stride, conv.out_px, conv.in_px, pixels, conv.n * conv.in_px, inner, conv.o * conv.taps,
            pixels * inner, pixels * conv.o, problem.rows, problem.columns, problem.channels,
            problem.channels * problem.taps, work, choice.rows, choice.columns, choice.depth,
            choice.cluster_rows * choice.cluster_columns, choice.split, tiles, tiles / SMS, tiles / SMS % 1.0,
            problem.rows % high, problem.columns % wide, problem.channels % 64,
            *_grid_features(conv, choice, problem)]  # fmt: skip


def _grid_features(conv: Conv, choice: Choice, problem: Problem) -> list[float]:
    """How tiles lie in clusters, and clusters in waves."""
    high, wide = max(1, choice.rows), max(1, choice.columns)
    down, across = -(-problem.rows // high), -(-problem.columns // wide) * problem.repeat
    steps = problem.taps * -(-problem.channels // max(1, choice.depth))
    at_once = clusters_at_once(SMS, choice.cluster_rows * choice.cluster_columns)
    waves = -(-down // choice.cluster_rows) * -(-across // choice.cluster_columns) / at_once
    return [choice.cluster_rows, choice.cluster_columns, float(choice.shared), waves, waves % 1.0, -(-waves // 1.0),
            float(is_shared(choice, waves, steps)), steps, down, across, down % choice.cluster_rows,
            across % choice.cluster_columns, problem.rows * problem.columns / (down * across * high * wide),
            float(conv.dtype == "fp16")]  # fmt: skip


def _left_over(site: Site, conv: Conv, choice: Choice, op: str, problem: Problem) -> float:
    """What a kernel takes over what its structure says, where that was learned: on the measured architecture."""
    share = site.coef["residue_frac"]
    if not share or conv.groups > 1 or site.chip.arch != LEARNED_ARCH:
        return 1.0
    trees = residue.kernel_trees(f"{choice.way}.{op}")
    return exp(share * residue.logs(trees, [kernel_features(conv, choice, problem)])[0]) if trees else 1.0


def kernel_cost(site: Site, conv: Conv, choice: Choice, op: str, problem: Problem) -> Cost:
    """The kernel itself with what it needs cleared before and added up after."""
    coef = pass_choice(site.coef, f"{choice.way}.{op}")
    main = implicit_s(site.chip, coef, problem, choice, conv.dtype) * _left_over(site, conv, choice, op, problem), 1
    if choice.way in CLUSTERED:
        waves, steps = waves_of(site.chip, problem, choice), problem.taps * -(-problem.channels // choice.depth)
        if is_shared(choice, waves, steps):
            return sum_costs((site.cycles_s(site.coef["share_init_cycles"]), 1), main)
        return sum_costs(memset_cost(site), main) if waves > 2.0 else main
    if choice.split == 1:
        return main
    if choice.way == "copy" and op == "wgrad":
        partial = choice.split * problem.rows * problem.columns * 4.0
        added_s = partial / (site.coef["reduce_frac"] * site.chip.l2_bytes_per_s)
        return sum_costs(memset_cost(site), main, (site.cycles_s(site.coef["reduce_cycles"]) + added_s, 1))
    return sum_costs(memset_cost(site), main)


ORDERS = {
    "fwd": (x_transform, w_transform, y_transform),
    "dgrad": (w_transform, y_transform, x_transform),
    "wgrad": (x_transform, y_transform, w_transform),
}
"""Transforms of the two inputs and of the result of a pass."""


def by_tiles(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A pass by tiles over channels-last tensors, between the transforms that make and unmake them."""
    main = kernel_cost(site, conv, choice, op, problem_of(site, conv, choice, op))
    if not conv.channels_last:
        order = ORDERS[op]
        main = sum_costs(order[0](site, conv), order[1](site, conv), main, order[2](site, conv, fresh=True))
    if choice.way == "plain":
        return main
    widened = sum_costs(widened_sum(site, conv, conv.in_px, conv.c), widened_sum(site, conv, conv.out_px, conv.o))
    if op == "dgrad" and choice.way == "copy" and conv.stride > 1:
        main = sum_costs(main, (conv.input_bytes / site.coef["fold_bytes_per_s"], 1))
    odd = odd_filters(site, conv) if op != "wgrad" else (0.0, 0)
    num_cleared = int(bool(conv.c % 8 or conv.o % 8)) if conv.channels_last else 2 * (conv.c % 8 > 0)
    return sum_costs(main, widened, odd, *[memset_cost(site)] * num_cleared)


_VECTOR_TILES = {"vector.fwd": (64, 32), "indexed.fwd": (256, 64), "scatter.dgrad": (64, 64), "atomic.wgrad": (32, 32),
                 "indexed.wgrad": (128, 32)}  # fmt: skip
"""Tiles of the older kernels of the vector units that suit their recorded times best."""
_VECTOR_DEPTH, _FEWEST = 8, 264
"""Depth of their steps, and blocks below which a weight gradient's inner loop is sliced."""


def _vector_problem(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """The same on vector units, where taps and channels make one inner loop and nothing is padded."""
    cold, out, inner = 1.0 - site.warm_frac, conv.n * conv.out_px, conv.c * conv.taps
    x, y, w = conv.touched_bytes, conv.output_bytes, conv.weight_bytes
    if op == "fwd":
        return Problem(out, conv.o, inner, 1.0, cold * (x + w), y, conv.itemsize)
    if op == "wgrad":
        return Problem(conv.o, inner, out, 1.0, cold * (x + y), w, conv.itemsize)
    deep = conv.o * conv.taps
    rows, columns, depth = (out, inner, conv.o) if choice.way == "scatter" else (conv.n * conv.in_px, conv.c, deep)
    return Problem(rows, columns, depth, 1.0, cold * (y + w), conv.input_bytes, conv.itemsize)


def vector_choice(site: Site, conv: Conv, choice: Choice, op: str) -> tuple[Choice, Problem]:
    """The choice with its tile and slices, and what it works on."""
    group, problem = f"{choice.way}.{op}", _vector_problem(site, conv, choice, op)
    rows, columns = _VECTOR_TILES.get(group) or (choice.rows, choice.columns)
    split = 1
    if group in ("atomic.wgrad", "indexed.wgrad"):
        tiles = -(-problem.rows // rows) * -(-problem.columns // columns)
        split = max(1, min(-(-problem.channels // 256), -(-_FEWEST // tiles)))
    return Choice(choice.way, rows, columns, _VECTOR_DEPTH, split=split), problem


def vector_kernel(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    taken, problem = vector_choice(site, conv, choice, op)
    alone_s = implicit_s(site.chip, pass_choice(site.coef, f"{choice.way}.{op}"), problem, taken, conv.dtype)
    main = alone_s * _left_over(site, conv, taken, op, problem), 1
    if choice.way == "scatter":
        return sum_costs(memset_cost(site, conv.input_bytes), main)
    return sum_costs(memset_cost(site), main) if taken.split > 1 else main


def vector_way(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A pass on the vector units, with the transforms to the layout it is written for."""
    main = vector_kernel(site, conv, choice, op)
    as_first = op != "wgrad" and choice.way in ("simt", "indexed", "scatter")
    as_last = op == "wgrad" and choice.way == "simt"
    if (as_first and conv.channels_last) or (as_last and not conv.channels_last):
        order = ORDERS[op]
        return sum_costs(order[0](site, conv), order[1](site, conv), main, order[2](site, conv, fresh=True))
    return main
