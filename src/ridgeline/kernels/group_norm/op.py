"""GroupNorm over channels in groups, forward and backward, with SiLU fused behind it where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import split_rows, tuning
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.group_norm import config, kernel, reference, streamed
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, is_widest, launchable, num_sms, vector_of
from ridgeline.kernels.rms_norm.op import plan_reduce
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two, template

_STATS = Kernel(kernel.group_norm_stats, vectors=("length", "stretch"))
_MERGE = Kernel(kernel.group_norm_merge)
_APPLY = Kernel(kernel.group_norm_apply, vectors=("positions",))
_SUMS = Kernel(kernel.group_norm_channel_sums, vectors=("positions",))
_DX = Kernel(kernel.group_norm_dx, vectors=("positions",))
_FLAT = Kernel(kernel.group_norm_flat, vectors=("length",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr"))
_TILE = Kernel(kernel.group_norm_tile, vectors=("positions",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr"))
_WALK = Kernel(kernel.group_norm_walk, vectors=("length",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr"))
_BACKWARD_WALK = Kernel(
    kernel.group_norm_backward_walk,
    vectors=("positions",),
    loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "sums_ptr"),
)
_STREAMED = Kernel(streamed.group_norm_streamed, vectors=("cols", "length"), loose=("word_ptr",), cooperative=True)
_BACKWARD_STREAMED = Kernel(
    streamed.group_norm_backward_streamed, vectors=("cols", "length"), loose=("word_ptr",), cooperative=True
)
_WHOLE = Kernel(streamed.group_norm_whole, vectors=("cols",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr"))
_PACKED = Kernel(
    streamed.group_norm_packed, vectors=("length",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr")
)
_BACKWARD_PACKED = Kernel(
    streamed.group_norm_backward_packed, vectors=("length",), loose=("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr")
)
_forward_plans, _backward_plans = Plans(), Plans()
WALK_STAGES, WALKING = 3, 3
"""Blocks of a group on their way, and persistent CTAs per SM in the backward."""
MOST_SAMPLES = 65535
"""Of a grid whose second dimension they are."""


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    silu: bool = False,
) -> Tensor:
    """Normalize channels in groups, as ``F.group_norm``; ``silu`` puts SiLU behind it, in the same pass.

    ``input`` is ``[N, C, …]`` and is made contiguous where it is not.
    """
    return GROUP_NORM(input, num_groups, weight, bias, eps, silu)


def _forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return GROUP_NORM.on_host(x, groups, weight, bias, eps, silu)
    x = x.contiguous()
    w, b = x if weight is None else weight, x if bias is None else bias
    key = (x.shape, w.shape, b.shape, x.dtype, w.dtype, b.dtype, groups, weight is None, bias is None, silu,
           x.get_device(), x.data_ptr() & 15)  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        plan = _forward_plans[key] = _plan_forward(x, groups, weight, bias, silu)
    return plan(x, w, b, eps)


def _plan_forward(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool) -> Any:
    GROUP_NORM.check(x, groups, weight, bias)
    on, channels = x.get_device(), x.shape[1]
    rows, per_group = x.shape[0] * groups, channels // groups
    positions = x.numel() // max(1, x.shape[0] * channels)
    length = per_group * positions
    kinds = (_plan_streamed, _plan_flat)  # float32 128×320×32×32: 96 and 87 µs, 64×640×16×16 33 and 26
    through = None
    for plan_of in kinds[::-1] if x.element_size() == 4 and length <= config.LONGEST_FLAT else kinds:
        through = through or plan_of(x, groups, weight, bias, silu, rows, length, positions)
    if through is not None:
        return through
    chosen = _choose(x, rows, length, positions)
    stretch = cdiv(cdiv(length, chosen.num_stretches), chosen.block) * chosen.block
    num = max(1, cdiv(length, stretch))
    blocks = cdiv(positions, chosen.out_block)
    w, b = x if weight is None else weight, x if bias is None else bias
    part = template((3, rows, num), torch.float32, x.device)
    stats = template((x.shape[0], groups), torch.float32, x.device)
    measure = _STATS.bind(
        (x, part, rows, length, stretch, num),
        grid=(rows * num,),
        constants={"BLOCK": chosen.block, "STAGES": 3},
        num_warps=chosen.num_warps,
        num_stages=3,
        device=on,
        vector=vector_of(x.element_size(), x.data_ptr(), length),
    )
    merge = _MERGE.bind(
        (part, stats, stats, rows, length, num, 0.0),
        grid=(rows,),
        constants={"STRETCHES": power_of_two(num)},
        num_warps=1,
        device=on,
    )
    apply = _APPLY.bind(
        (x, w, b, stats, stats, x, channels, per_group, positions, blocks),
        grid=(x.shape[0] * channels * blocks,),
        constants={
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "SILU": silu,
            "BLOCK": chosen.out_block,
        },
        num_warps=chosen.out_warps,
        device=on,
        vector=vector_of(x.element_size(), x.data_ptr(), positions),
    )

    def plan(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        parts = torch.empty_like(part, memory_format=torch.contiguous_format)
        mean = torch.empty_like(stats, memory_format=torch.contiguous_format)
        rstd = torch.empty_like(stats, memory_format=torch.contiguous_format)
        y = torch.empty_like(x)
        measure(x, parts, rows, length, stretch, num)
        merge(parts, mean, rstd, rows, length, num, eps)
        apply(x, w, b, mean, rstd, y, channels, per_group, positions, blocks)
        return y, mean, rstd

    return plan


def _plan_flat(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool, rows: int, length: int,
    positions: int,
) -> Any:  # fmt: skip
    """The forward pass with a group a program, wherever its channels start; else None."""
    sizes = {"groups": rows, "length": length, "positions": positions, "dtype": x.dtype}
    default = config.flat(rows, length, positions, num_sms(x.get_device())) or config.Apart()
    chosen: Any = tuning.choose("group_norm.flat", sizes, default)
    if isinstance(chosen, config.Apart) or not rows:
        return None
    stats = template((x.shape[0], groups), torch.float32, x.device)
    w, b = x if weight is None else weight, x if bias is None else bias
    vector = min(POINTER_ALIGNMENT_BYTES // x.element_size(), 4 if positions < 8 else 8)
    accesses = 32 * chosen.num_warps
    numbers = (length, groups, x.shape[1] // groups, positions, cdiv(1 << 32, positions), 1 / length)
    held = isinstance(chosen, config.Flat)
    own = {"CHUNKS": cdiv(length, accesses * vector)} if held else {"STAGES": WALK_STAGES}
    run = (_FLAT if held else _WALK).bind(
        (x, w, b, x, stats, stats, *numbers, 0.0),
        grid=(rows,),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
                   "STRADDLE": positions % vector != 0, "ACCESSES": accesses, "VECTOR": vector, **own},
        num_warps=chosen.num_warps,
        num_stages=1 if held else WALK_STAGES,
        max_registers=split_rows.registers_of(chosen.num_warps, chosen.programs_per_sm) if held else 0,
        device=x.get_device(),
        vector=vector_of(x.element_size(), x.data_ptr(), length),
    )  # fmt: skip
    return _filling(run, stats, numbers)


def _streaming(
    kernel: str, tensors: tuple[Tensor, ...], rows: int, length: int, positions: int, silu: bool
) -> tuple[Any, split_rows.Cut | None]:
    """How large images pass through shared memory, and how their groups are cut; or None."""
    wide = max(tensor.element_size() for tensor in tensors)
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    narrow = min(tensor.element_size() for tensor in tensors)
    streamable = is_widest(vector_of(narrow, pointers, positions), narrow)
    if not streamable or INTERPRETING or not rows:
        return None, None
    default: Any = config.streamed(tensors[0].nbytes, len(tensors), wide, length) or config.Apart()
    if len(tensors) == 1 and wide == 2:
        sms = num_sms(tensors[0].get_device())
        alone = config.packed(rows, length, tensors[0].nbytes, sms, silu)
        if tensors[0].shape[0] > MOST_SAMPLES:
            alone = None
        default = alone or config.whole(rows, length, sms) or default
    if len(tensors) == 2 and wide == narrow == 2 and isinstance(default, config.Images):
        sms, places = num_sms(tensors[0].get_device()), 32 * default.chunks * POINTER_ALIGNMENT_BYTES // wide
        default = replace(default, step=config.uneven_piece(positions, places))
        if tensors[0].shape[0] <= MOST_SAMPLES:
            default = config.packed_backward(rows, length, positions, sms) or default
    sizes = {"groups": rows, "positions": positions, "dtype": tensors[0].dtype}
    chosen: Any = tuning.choose(kernel, sizes, default)
    if isinstance(chosen, (config.Whole, config.Packed, config.Apart)):
        return chosen, None
    on, vector = tensors[0].get_device(), POINTER_ALIGNMENT_BYTES // wide
    if chosen.step:
        return chosen, split_rows.cut(chosen, rows, length, on, vector=vector, piece=chosen.step)
    accesses = power_of_two(min(chosen.accesses, chosen.chunks))
    while True:  # pieces as long as leave every warp one
        piece = config.piece(positions, vector, accesses)
        found = split_rows.cut(chosen, rows, length, on, vector=vector, piece=piece)
        if accesses == 1 or found is None or cdiv(found.length, piece) >= chosen.num_warps:
            return chosen, found
        accesses //= 2


def _plan_streamed(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool, rows: int, length: int,
    positions: int,
) -> Any:  # fmt: skip
    """The forward pass in one read, where the image is large enough and its channels are whole blocks; else None."""
    chosen, found = _streaming("group_norm.streamed", (x,), rows, length, positions, silu)
    if isinstance(chosen, config.Whole):
        return _plan_whole(chosen, x, groups, weight, bias, silu, rows, length, positions)
    if isinstance(chosen, config.Packed):
        return _plan_packed(chosen, x, groups, weight, bias, silu, rows, length, positions)
    if found is None:
        return None
    stats = template((x.shape[0], groups), torch.float32, x.device)
    w, b = x if weight is None else weight, x if bias is None else bias
    numbers = (groups, x.shape[1] // groups, positions)
    run = split_rows.bind(
        _STREAMED, chosen, found, (x, w, b, x, stats, stats), rows, length, (*numbers, 0.0),
        {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
         "PAIRED": silu and chosen.paired},
        {"device": x.get_device(), "vector": found.vector},
    )  # fmt: skip
    return _filling(run, stats, numbers)


def _filling(run: Any, stats: Tensor, numbers: tuple[float, ...]) -> Any:
    """A plan that allocates what a bound kernel writes."""

    def plan(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean = torch.empty_like(stats, memory_format=torch.contiguous_format)
        rstd = torch.empty_like(stats, memory_format=torch.contiguous_format)
        y = torch.empty_like(x)
        run(x, w, b, y, mean, rstd, *numbers, eps)
        return y, mean, rstd

    return plan


def _plan_whole(
    chosen: config.Whole, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool, rows: int,
    length: int, positions: int,
) -> Any:  # fmt: skip
    """The forward pass with a group a program."""
    stats = template((x.shape[0], groups), torch.float32, x.device)
    w, b = x if weight is None else weight, x if bias is None else bias
    numbers = (rows, length, groups, x.shape[1] // groups, positions)
    block = 256 * chosen.num_warps
    run = _WHOLE.bind(
        (x, w, b, x, stats, stats, *numbers, 0.0),
        grid=(min(rows, chosen.programs_per_sm * num_sms(x.get_device())),),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
                   "CHUNKS": cdiv(length, block), "BLOCK": block, "SLOTS": chosen.slots},
        num_warps=chosen.num_warps,
        max_registers=split_rows.registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=x.get_device(),
        vector=POINTER_ALIGNMENT_BYTES // x.element_size(),
    )  # fmt: skip
    return _filling(run, stats, numbers)


def _plan_packed(
    chosen: config.Packed, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, silu: bool, rows: int,
    length: int, positions: int,
) -> Any:  # fmt: skip
    """The forward pass with a group or a share of one a program, as many programs as these."""
    stats = template((x.shape[0], groups), torch.float32, x.device)
    w, b = x if weight is None else weight, x if bias is None else bias
    block, cluster = 256 * chosen.num_warps, chosen.cluster
    share, full = length // cluster, length // cluster // block
    numbers = (share, x.shape[1] // groups, positions, block // positions, block % positions, 1 / share)
    run = _PACKED.bind(
        (x, w, b, x, stats, stats, *numbers, 0.0),
        grid=(groups * cluster, rows // groups),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
                   "PAIRED": silu and chosen.paired, "SHARES": cluster, "CHUNKS": cdiv(share, block),
                   "SHARED": min(chosen.shared, full), "BLOCK": block, "FULL": full, "READS": chosen.reads},
        num_warps=chosen.num_warps,
        max_registers=split_rows.registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=x.get_device(),
        vector=POINTER_ALIGNMENT_BYTES // x.element_size(),
        cluster=cluster,
    )  # fmt: skip
    return _filling(run, stats, numbers)


def _plan_backward_streamed(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor, silu: bool,
    positions: int,
) -> Any:  # fmt: skip
    """The backward pass in one read of both inputs, or None."""
    samples, channels, on = x.shape[0], x.shape[1], x.get_device()
    length = channels // groups * positions
    chosen, found = _streaming("group_norm.backward_streamed", (x, dy), samples * groups, length, positions, silu)
    if isinstance(chosen, config.Packed):
        return _plan_backward_packed(chosen, dy, x, groups, weight, bias, stats, silu, positions)
    if found is None:
        return None
    w, b = x if weight is None else weight, x if bias is None else bias
    pieces = positions // found.block
    sums = template((2, samples * pieces, channels), torch.float32, x.device)
    column = template((channels,), w.dtype, x.device)
    numbers = (groups, channels // groups, positions)
    run = split_rows.bind(
        _BACKWARD_STREAMED, chosen, found, (dy, x, w, b, stats, stats, x, sums), samples * groups, length, numbers,
        {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
         "PAIRED": silu and chosen.paired, "KEPT": silu and chosen.kept, "EARLY": chosen.early,
         "STEP": found.block},
        {"device": on, "vector": found.vector},
    )  # fmt: skip
    reduce = plan_reduce(sums, column, samples * pieces, channels, on, second=column, early=chosen.early)
    return _adding(run, reduce, sums, column, numbers)


def _adding(run: Any, reduce: Any, sums: Tensor, column: Tensor, numbers: tuple[float, ...]) -> Any:
    """A plan whose kernel leaves sums of pieces, which another adds up to the weights' gradients."""
    _, num, channels = sums.shape

    def plan(dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.empty_like(sums, memory_format=torch.contiguous_format)
        dx = torch.empty_like(x)
        dw = torch.empty_like(column, memory_format=torch.contiguous_format)
        db = torch.empty_like(column, memory_format=torch.contiguous_format)
        run(dy, x, w, b, mean, rstd, dx, both, *numbers)
        reduce(both, dw, db, num, channels)
        return dx, dw, db

    return plan


def _plan_backward_packed(
    chosen: config.Packed, dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, silu: bool, positions: int,
) -> Any:  # fmt: skip
    """The backward pass with a group a program, as many programs as these."""
    samples, channels, on = x.shape[0], x.shape[1], x.get_device()
    length = channels // groups * positions
    w, b = x if weight is None else weight, x if bias is None else bias
    chunks, per = config.accesses(length, positions, chosen.num_warps)
    pieces = positions // (256 * per)
    sums = template((2, samples * pieces, channels), torch.float32, x.device)
    column = template((channels,), w.dtype, x.device)
    numbers = (length, channels // groups, positions, 1 / length)
    run = _BACKWARD_PACKED.bind(
        (dy, x, w, b, stats, stats, x, sums, *numbers),
        grid=(groups, samples),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
                   "PAIRED": silu and chosen.paired, "CHUNKS": chunks, "PER": per,
                   "EVEN": length == chunks * 256 * chosen.num_warps, "EARLY": chosen.early},
        num_warps=chosen.num_warps,
        max_registers=split_rows.registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=on,
        vector=POINTER_ALIGNMENT_BYTES // x.element_size(),
    )  # fmt: skip
    reduce = plan_reduce(sums, column, samples * pieces, channels, on, second=column, early=chosen.early)
    return _adding(run, reduce, sums, column, numbers)


def _plan_backward_tile(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor, silu: bool,
    positions: int,
) -> Any:  # fmt: skip
    """The backward pass with a group a program, a channel a line; else None."""
    samples, channels, on = x.shape[0], x.shape[1], x.get_device()
    per_group = channels // groups
    sizes = {"groups": samples * groups, "positions": positions, "dtype": x.dtype}
    default = config.tile(samples * groups, per_group, positions, num_sms(on), x.element_size()) or config.Apart()
    chosen: Any = tuning.choose("group_norm.tile", sizes | {"per_group": per_group}, default)
    if isinstance(chosen, config.Apart) or not x.numel():
        return None
    w, b = x if weight is None else weight, x if bias is None else bias
    column = template((channels,), w.dtype, x.device)
    num, held = cdiv(positions, chosen.width), isinstance(chosen, config.Tile)
    pieces = 1 if held else num
    own = {"PER_GROUP": power_of_two(per_group), "CHUNKS": num} if held else {"LINES": chosen.lines, "PIECES": num}
    sums = template((2, samples * pieces, channels), torch.float32, x.device)
    numbers = (samples * pieces * channels, groups, per_group, positions, 1 / (per_group * positions))
    run = (_TILE if held else _BACKWARD_WALK).bind(
        (dy, x, w, b, stats, stats, x, sums, *numbers),
        grid=(samples * groups,),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu,
                   "WIDTH": chosen.width, **own},
        num_warps=chosen.num_warps,
        max_registers=0 if held else split_rows.registers_of(chosen.num_warps, WALKING),
        device=on,
        vector=vector_of(min(x.element_size(), dy.element_size()), x.data_ptr() | dy.data_ptr(), positions),
    )  # fmt: skip
    reduce = plan_reduce(sums, column, samples * pieces, channels, on, second=column)
    return _adding(run, reduce, sums, column, numbers)


def _choose(x: Tensor, rows: int, length: int, positions: int) -> config.Groups:
    sizes = {"groups": rows, "length": length, "positions": positions, "dtype": x.dtype}
    return tuning.choose("group_norm", sizes, config.default(rows, length, positions, num_sms(x.get_device())))


def _backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return GROUP_NORM_BACKWARD.on_host(dy, x, groups, weight, bias, mean, rstd, silu)
    x, dy = x.contiguous(), dy.contiguous()
    w, b = x if weight is None else weight, x if bias is None else bias
    key = (x.shape, w.shape, b.shape, x.dtype, w.dtype, b.dtype, dy.dtype, groups, weight is None, bias is None, silu,
           x.get_device(), (x.data_ptr() | dy.data_ptr()) & 15)  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _plan_backward(dy, x, groups, weight, bias, mean, silu)
    return plan(dy, x, w, b, mean, rstd)


def _plan_backward(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor, silu: bool
) -> Any:
    GROUP_NORM.check(x, groups, weight, bias)
    on, samples, channels = x.get_device(), x.shape[0], x.shape[1]
    lines, per_group = samples * channels, channels // groups
    positions = x.numel() // max(1, lines)
    kinds = (_plan_backward_streamed, _plan_backward_tile)
    through = None
    for plan_of in kinds[::-1] if config.is_ragged(x.element_size(), positions) else kinds:
        through = through or plan_of(dy, x, groups, weight, bias, stats, silu, positions)
    if through is not None:
        return through
    chosen = _choose(x, samples * groups, per_group * positions, positions)
    blocks = cdiv(positions, chosen.out_block)
    w, b = x if weight is None else weight, x if bias is None else bias
    sums = template((2, samples, channels), torch.float32, x.device)
    column = template((channels,), w.dtype, x.device)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "SILU": silu, "BLOCK": chosen.out_block}
    vector = vector_of(x.element_size(), x.data_ptr() | dy.data_ptr(), positions)
    add = _SUMS.bind(
        (dy, x, w, b, stats, stats, sums, lines, channels, per_group, positions),
        grid=(lines,),
        constants=flags | {"STAGES": 3},
        num_warps=chosen.out_warps,
        num_stages=3,
        device=on,
        vector=vector,
    )
    write = _DX.bind(
        (dy, x, w, b, stats, stats, sums, x, lines, channels, per_group, positions, blocks),
        grid=(lines * blocks,),
        constants=flags | {"PER_GROUP": power_of_two(per_group)},
        num_warps=chosen.out_warps,
        device=on,
        vector=vector,
    )
    reduce = plan_reduce(sums, column, samples, channels, on, second=column)

    def plan(dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.empty_like(sums, memory_format=torch.contiguous_format)
        dx = torch.empty_like(x)
        dw = torch.empty_like(column, memory_format=torch.contiguous_format)
        db = torch.empty_like(column, memory_format=torch.contiguous_format)
        add(dy, x, w, b, mean, rstd, both, lines, channels, per_group, positions)
        write(dy, x, w, b, mean, rstd, both, dx, lines, channels, per_group, positions, blocks)
        reduce(both, dw, db, samples, channels)
        return dx, dw, db

    return plan


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(x: Tensor, groups: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = [x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats[0], stats[1]


def _backward_fake(dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if weight is None else weight.dtype
    columns = [x.new_empty((x.shape[1],), dtype=dtype) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), columns[0], columns[1]


def _support(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> str | None:
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups or not x.shape[1]:
        return f"x {tuple(x.shape)} is not [N, C, …] with C a multiple of {groups} groups"
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and (value.shape != x.shape[1:2] or not value.is_contiguous()):
            return f"{name} has shape {tuple(value.shape)}, x has {x.shape[1]} channels"
    return float_reason(x=x, weight=weight, bias=bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.groups, weight, bias, _, ctx.silu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, output[1], output[2])


def _grads(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dw, db = GROUP_NORM_BACKWARD(dy, x, ctx.groups, weight, bias, mean, rstd, ctx.silu)
    want_w, want_b = (value is not None and value.requires_grad for value in (weight, bias))
    return dx, None, dw if want_w else None, db.to(bias.dtype) if want_b else None, None, None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    channels, side = of["channels"], of["side"]
    x = (drawn(of["batch"], channels, side, side) + 0.5).to(dtype)
    return x, of["groups"], (1 + 0.3 * drawn(channels)).to(dtype), (0.3 * drawn(channels)).to(dtype), 1e-5


def _problem(dtype: str, batch: int, channels: int, side: int, groups: int) -> Case:
    return case(dtype, batch=batch, channels=channels, side=side, groups=groups)


def _trial(call: Any, eager: Any, meant: Any, mistakes: dict[str, Any]) -> Trial:
    return Trial(
        make=_make,
        call=call,
        eager=eager,
        reference=meant,
        mistakes=mistakes,
        checks=tuple(
            _problem(dtype, *sizes)
            for dtype in DTYPES
            for sizes in ((1, 2, 2, 1), (2, 6, 5, 3), (2, 64, 16, 32), (1, 320, 33, 32), (1, 128, 96, 4),
                          (4, 160, 128, 32), (10, 96, 96, 4), (16, 512, 32, 64), (24, 320, 56, 32), (90, 128, 28, 16),
                          (6, 320, 64, 32), (1, 320, 64, 32), (9, 320, 64, 32), (8, 512, 64, 32), (4, 320, 128, 32),
                          (2, 512, 128, 32), (64, 640, 16, 32), (24, 512, 32, 32), (3, 2048, 7, 32), (2, 1024, 14, 32),
                          (2, 320, 13, 32), (1, 640, 30, 32), (170, 128, 20, 32), (4, 64, 192, 4))
        ),
        races=(_problem("bfloat16", 8, 320, 64, 32), _problem("bfloat16", 4, 512, 128, 32),
               _problem("float32", 2, 256, 128, 32), _problem("bfloat16", 16, 512, 128, 32),
               _problem("bfloat16", 32, 320, 56, 32)),
        small=(_problem("bfloat16", 1, 320, 8, 32),),
    )  # fmt: skip


GROUP_NORM_BACKWARD = declare(
    name="group_norm_backward",
    repeats=True,
    keyed=True,
    summary="gradients of group_norm",
    schema="(Tensor dy, Tensor x, int groups, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool silu)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    reference=reference.backward,
    support=lambda dy, x, groups, weight, bias, *_: _support(x, groups, weight, bias) or float_reason(dy=dy),
    cost=elementwise_cost(16.0),
    num_results=3,
)
GROUP_NORM = declare(
    name="group_norm",
    repeats=True,
    keyed=True,
    summary="channels normalized in groups, with SiLU behind it where asked",
    schema="(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, bool silu) -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    setup=_setup,
    backward=_grads,
    trials={
        "group_norm": _trial(group_norm, reference.eager, reference.group_norm, {"one group": reference.one_group}),
        "group_norm_silu": _trial(
            lambda x, groups, w, b, eps: group_norm(x, groups, w, b, eps, silu=True),
            reference.eager_silu,
            reference.group_norm_silu,
            {"activation ignored": reference.silu_ignored},
        ),
    },
)
