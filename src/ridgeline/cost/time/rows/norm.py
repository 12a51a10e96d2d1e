"""Time of layer, RMS, group and batch normalization as ATen's, cuDNN's and Inductor's kernels run them."""

from __future__ import annotations

from math import ceil, log2

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows.rowwise import (
    Kernel,
    dimensions,
    kernel,
    left_over,
    looped,
    looped_coef,
    reread_bytes,
    reread_frac,
    resident_blocks,
    spilled,
    stream_s,
    triton_coef,
    triton_persistent,
    triton_rows,
)
from ridgeline.errors import CostError

DEFAULTS: dict[str, float] = {
    "launch_cycles": 1500.0,  # an empty kernel as a profiler sees it
    "dram_frac": 0.941,  # of the datasheet bandwidth a long stream reaches
    "l2_frac": 0.501,  # of the L2 bandwidth
    "evict_frac": 0.184,  # dirty share of a cold L2 that a stream must write back
    "evict_ramp_frac": 0.0408,  # stream length, in L2 capacities, at which half of that is paid
    "reread_frac": 0.868,  # of the L2 the rows in flight may fill and still be found there by the next pass
    "left_frac": 0.524,  # of the L2 the tensors of one kernel may fill and still be found there by the next kernel
    "tail_frac": 1.0,  # share of the last partial wave of blocks that is waited for
    "miss_cycles": 900.0,  # a load that goes to DRAM instead of L2, in Inductor's kernels
    "stats_cycles": 1100.0,  # a kernel on a vector of channels, beyond its launch
    "params_cycles": 1910.0,  # a kernel on the (sample, channel) matrix of group norm, beyond its launch
    "params_row": 1.28,  # … more per (sample, group)
    "memset_cycles": 1640.0,  # a memset, its launch included
    "reduce.step": 64.3,  # the column sum of partial gradients: cycles per serial row
    "reduce.multi": 18500.0,  # … when several blocks share a column
    # vectorized_layer_norm_kernel: 128 threads a row, 4 elements each, two passes; work unit: 128 elements
    **looped_coef("ln", 2320, 0.0, 1060, 864, 258, 27.4, 2.21),
    **looped_coef("rms", 1370, 0.0, 698, 754, 133, 6.35, 1.98),
    "ln.wide_work": 2.8,  # more work a row of 32-bit elements
    "rms.wide_work": 4.07,
    "rms.wide": 0.751,  # latency of an iteration on 32-bit elements, which the compiler unrolls further
    # RowwiseMomentsCUDAKernel and LayerNormForwardCUDAKernel: rows that 4 does not divide
    **looped_coef("moments", 3590, 0.0, 21.4, 794, 1210, 13.0, 2.9),
    **looped_coef("momentsr", 3070, 0.0, 6.73, 720, 1150, 2.55, 1.24),
    **looped_coef("affine", 511, 0.0, 789, 0.0, 88.1, 3.17, 1.48),
    # layer_norm_grad_input_kernel, vectorized (work unit: 128 elements) or not (32 elements)
    **looped_coef("dx", 465, 744, 533, 605, 118, 13.1, 1.91),
    **looped_coef("dxs", 474, 1790, 613, 651, 0.0, 20.2, 1.97),
    "dx.bias": 3.77,  # more work a row for the mean that RMS norm does not have
    "dx.far": 435.0,  # more latency an iteration once the rows of an SM exceed its L1
    # GammaBetaBackwardCUDAKernelTemplate, a warp of columns: 8 rows a thread and iteration; a warp alone; partial sums
    **looped_coef("dgb", 415, 1980, 0.0, 692, 1360, 39.7, 1.55),
    **looped_coef("dgs", 931, 170, 550, 14.8, 160, 1.5, 1.13),
    **looped_coef("dgp", 36.7, 4430, 45.9, 45.4, 0.0, 152, 1.85),
    "dgb.bias": 1.17,  # the sum for the bias beside that for the weight
    # group norm: moments of a group, affine map, layout copy; gradients per channel, input gradient, column sums
    **looped_coef("gmoments", 2.31, 4430, 384, 383, 0.0, 33.6, 1.2),
    **looped_coef("gaffine", 1850, 0.0, 0.0, 2720, 0.0, 308, 2.7),
    **looped_coef("gcopy", 11.0, 311, 0.0, 3070, 0.0, 750, 1.6),
    **looped_coef("gsums", 1840, 0.0, 277, 605, 118, 321, 8.0),
    **looped_coef("gdx", 2220, 0.0, 0.0, 601, 0.0, 461, 5.81),
    **looped_coef("gdgb", 46.0, 418, 540, 672, 0.0, 0.0, 3.0),
    # ATen batch norm, one block a channel: statistics, affine map, the whole backward
    **looped_coef("bstat", 805, 1840, 396, 431, 1220, 3.13, 1.33),
    **looped_coef("baffine", 1260, 818, 424, 664, 146, 181, 8.0),
    **looped_coef("bdx", 2130, 0.0, 921, 490, 851, 94.9, 1.26),
    # ATen batch norm on channels-last tensors
    **looped_coef("cstat", 2780, 48.2, 935, 1770, 1380, 479, 1.0),
    **looped_coef("caffine", 293, 618, 870, 1200, 1110, 101, 1.7),
    **looped_coef("csums", 29.6, 574, 497, 790, 1740, 0.0, 1.0),
    **looped_coef("cdx", 1210, 2650, 344, 1650, 460, 47.7, 1.8),
    # cuDNN batch norm (fp32): inference, training and backward, one block a channel, or persistent on channels-last
    **looped_coef("ninfer", 2000, 888, 122, 236, 2.23, 396, 6.47),
    **looped_coef("ninfer_nhwc", 4160, 5690, 0.0, 0.0, 0.0, 875, 3.92),
    **looped_coef("ntrain", 2660, 506, 323, 284, 1420, 21.8, 1.0),
    **looped_coef("ntrain_nhwc", 7840, 1080, 25.8, 268, 0.0, 7.0, 1.0),
    **looped_coef("nback", 22.1, 185, 1460, 1090, 3320, 10.2, 1.42),
    **looped_coef("nback_nhwc", 98.9, 8250, 301, 488, 0.0, 10.8, 1.69),
    **triton_coef(5.82, 75.4, 609, 1540, 426, 7.4, 623, 8.0, 1080),
    "triton.mixed": 1.37,  # the row kernel that also keeps partial column sums, over one that does not
    "triton.columns": 1.21,  # the column-sum kernel's time over its DRAM traffic
}
NEEDS = {"layer_norm": ("n", "c"), "rms_norm": ("n", "c"), "group_norm": ("n", "c", "h", "w", "groups"),
         "batch_norm": ("n", "c", "h", "w")}  # fmt: skip
VECTOR = 4
ROW_THREADS = 128
MOMENT_THREADS = 512


def _normalize(rows: int, width: int, size: float, is_rms: bool, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """Layer or RMS norm forward: one fused kernel when 4 divides the row, else moments and then the affine map."""
    moved = rows * width * size
    if width % VECTOR == 0:
        key, resident = "rms" if is_rms else "ln", resident_blocks(ROW_THREADS, 32 if size < 4 else 48)
        steps = ceil(width / (VECTOR * ROW_THREADS)) * (coef["rms.wide"] if is_rms and size >= 4 else 1.0)
        read = moved + reread_bytes(rows, width * size, resident, 2, chip, coef)
        work = ceil(width / 128) + (size >= 4) * coef[key + ".wide_work"]
        return [looped(key, chip, coef, rows, resident, steps, work, warm, stream_s(chip, coef, read, moved, warm))]
    again, suffix = max(warm, left_over(moved, chip, coef)), "r" if is_rms else ""
    steps, warps = ceil(width / MOMENT_THREADS), ceil(width / 32)
    read_s, map_s = stream_s(chip, coef, moved, 0.0, warm), stream_s(chip, coef, moved, moved, again)
    return [
        looped("moments" + suffix, chip, coef, rows, 4, steps, warps, warm, read_s),
        looped("affine", chip, coef, rows, 8, ceil(width / 256), warps, again, map_s),
    ]


def _normalize_backward(
    rows: int, width: int, size: float, is_rms: bool, chip: Chip, coef: Coef, warm: float
) -> list[Kernel]:
    moved, vectorized = rows * width * size, width % VECTOR == 0
    steps = ceil(width / (VECTOR * ROW_THREADS))
    memory_s = stream_s(chip, coef, 2 * moved + 2 * reread_bytes(rows, width * size, 16, 3, chip, coef), moved, warm)
    beyond_l1 = spilled(2 * width * size * max(1.0, min(16.0, rows / chip.num_sms)), chip.smem_bytes)
    work = ceil(width / (128 if vectorized else 32)) + (0.0 if is_rms else coef["dx.bias"])
    key = "dx" if vectorized else "dxs"
    beyond_l2 = reread_frac(rows, width * size, 16, 3, chip, coef)
    extra = steps * (1 if vectorized else VECTOR) * (beyond_l1 * coef["dx.far"] + beyond_l2 * coef[key + ".miss"])
    made = [looped(key, chip, coef, rows, 16, steps, work, warm, memory_s, extra)]
    again = max(warm, left_over(3 * moved, chip, coef))
    return made + _parameter_gradients(rows, width, size, is_rms, chip, coef, again)


def _parameter_gradients(
    rows: int, width: int, size: float, is_rms: bool, chip: Chip, coef: Coef, warm: float
) -> list[Kernel]:
    """Sums over rows: a column of blocks when rows are few, partial sums and a second pass when they are many."""
    columns = ceil(width / 32)
    memory_s = stream_s(chip, coef, 2 * rows * width * size, 0.0, warm)
    more = 1.0 if is_rms else coef["dgb.bias"]
    if rows > 65536 and width // 32 < chip.num_sms // 2:  # many rows
        parts = min(32768 // columns, ceil(rows / 32))  # max partial blocks
        tiles = ceil(rows / (32 * parts))
        made = [looped("dgp", chip, coef, columns * parts, 32, tiles, tiles * more, warm, memory_s)]
        return made + _column_sums(parts, width, chip, coef) * (1 if is_rms else 2)
    if rows < 64:
        return [looped("dgs", chip, coef, columns, 32, rows / 8, rows / 8 * more, warm, memory_s)]
    threads_y = 8 if rows < 128 else 16 if rows < 256 else 32
    tiles = ceil(rows / (8 * threads_y))
    resident = resident_blocks(32 * threads_y, 64)
    return [looped("dgb", chip, coef, columns, resident, tiles * more, tiles * threads_y * more, warm, memory_s)]


def _column_sums(parts: int, width: int, chip: Chip, coef: Coef) -> list[Kernel]:
    if parts * width > 2**18 and width < 1100:
        memset = _memset("memset", chip, coef)
        cycles = coef["reduce.multi"] * (1.0 if width % 4 == 0 else 0.7)
        return [memset, kernel("reduce", chip, coef, 1.0, cycles, 1.0, 0.0, 0.0, 0.0)]
    lanes = 1 if width >= 128 else 512 // (1 << ceil(log2(width)))
    return [kernel("reduce", chip, coef, 1.0, 0.0, parts / lanes, coef["reduce.step"], 0.0, 0.0)]


def _channels(name: str, chip: Chip, coef: Coef) -> Kernel:
    """A kernel on a vector of channels."""
    return kernel(name, chip, coef, 1.0, coef["stats_cycles"], 0.0, 0.0, 0.0, 0.0)


def _statistics(training: int) -> tuple[str, ...]:
    """The kernels on the statistics themselves."""
    return ("update_stats",) if training else ("cast_stats", "invstd")


def _memset(name: str, chip: Chip, coef: Coef) -> Kernel:
    return kernel(name, chip, coef, 1.0, coef["memset_cycles"] - coef["launch_cycles"], 0.0, 0.0, 0.0, 0.0)


def _parameters(name: str, chip: Chip, coef: Coef, rows: float) -> Kernel:
    """A kernel on the (sample, channel) matrix of group norm."""
    return kernel(name, chip, coef, 1.0, coef["params_cycles"] + coef["params_row"] * rows, 0.0, 0.0, 0.0, 0.0)


def _mapped(key: str, chip: Chip, coef: Coef, numel: float, moved_s: float, warm: float) -> Kernel:
    """An elementwise kernel with index arithmetic: 512 elements a block."""
    return looped(key, chip, coef, ceil(numel / 512), 16, 1.0, 1.0, warm, moved_s)


def _group_forward(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    samples, channels, plane, groups = dims["n"], dims["c"], dims["h"] * dims["w"], dims["groups"]
    numel = samples * channels * plane
    moved, made, again = numel * size, [], warm
    if dims.get("nhwc", 0):
        made.append(_mapped("gcopy", chip, coef, numel, stream_s(chip, coef, moved, moved, warm), warm))
        again = max(warm, left_over(2 * moved, chip, coef))
    length = channels // groups * plane
    threads = 32 if length < MOMENT_THREADS else MOMENT_THREADS
    steps = ceil(length / threads)
    blocks, resident = samples * groups, resident_blocks(threads)
    memory_s = stream_s(chip, coef, moved, 0.0, again)
    made.append(looped("gmoments", chip, coef, blocks, resident, steps, steps * threads / 512, again, memory_s))
    made.append(_parameters("fused_params", chip, coef, 0.1 * samples * groups))
    again = max(warm, left_over(moved, chip, coef))
    made.append(_mapped("gaffine", chip, coef, numel, stream_s(chip, coef, moved, moved, again), again))
    return made


def _group_backward(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    samples, channels, plane, groups = dims["n"], dims["c"], dims["h"] * dims["w"], dims["groups"]
    numel = samples * channels * plane
    moved = numel * size
    threads = 32 if plane < MOMENT_THREADS else MOMENT_THREADS
    steps = ceil(plane / threads)
    again = max(warm, left_over(2 * moved, chip, coef))
    held = left_over(3 * moved, chip, coef)
    read_s, work = stream_s(chip, coef, 2 * moved, 0.0, warm), steps * threads / 512
    sums = looped("gsums", chip, coef, samples * channels, resident_blocks(threads), steps, work, warm, read_s)
    rows = samples if samples <= 128 else samples / 32
    return [
        sums,
        _parameters("channel_scale", chip, coef, 0.0),
        _parameters("fused_params", chip, coef, samples * groups),
        _mapped("gdx", chip, coef, numel, stream_s(chip, coef, 2 * moved, moved, again), again),
        looped("gdgb", chip, coef, ceil(channels / 256), 8, rows, 0.0, held, 0.0),
    ]


def _threads_for(count: int) -> int:
    return int(min(512, max(32, 1 << ceil(log2(max(1, count))))))


def _channel_steps(samples: int, plane: int) -> int:
    """Serial iterations of a block of 512 threads that walks one channel, samples by plane."""
    threads = _threads_for(plane)
    return ceil(samples * threads / 512) * ceil(plane / threads)


def _batch_native(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """ATen's own kernels on contiguous tensors: a block a channel."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    samples, channels, plane = dims["n"], dims["c"], dims["h"] * dims["w"]
    moved, steps = samples * channels * plane * size, _channel_steps(samples, plane)
    if call.phase == "bwd":
        read = 2 * moved + 2 * reread_bytes(channels, samples * plane * size, 4, 3, chip, coef)
        return [looped("bdx", chip, coef, channels, 4, steps, steps, warm, stream_s(chip, coef, read, moved, warm))]
    made, again = [], warm
    if dims.get("training", 1):
        read_s = stream_s(chip, coef, moved, 0.0, warm)
        made.append(looped("bstat", chip, coef, channels, 4, steps, steps, warm, read_s))
        again = max(warm, left_over(moved, chip, coef))
    made += [_channels(name, chip, coef) for name in _statistics(dims.get("training", 1))]
    threads = max(_threads_for(plane // 4), min(_threads_for(plane), 64))
    per_block = max(64 // threads, 1)
    blocks_y = max(1, min(256 * 1024 // channels, ceil(samples / per_block)))
    steps = ceil(samples / (blocks_y * per_block)) * ceil(plane / threads)
    resident = resident_blocks(threads * per_block)
    memory_s = stream_s(chip, coef, moved, moved, again)
    work = steps * threads * per_block / 512
    made.append(looped("baffine", chip, coef, channels * blocks_y, resident, steps, work, again, memory_s))
    return made


def _columns_grid(rows: int, channels: int) -> tuple[int, int, int, int]:
    """(blocks along channels, threads a block, of them along rows, blocks along rows) on channels-last tensors."""
    pow2_channels = 1 << int(log2(channels))
    deep = min(1 << int(log2(ceil(rows / 16))), 512 // min(pow2_channels, 32))
    lanes = min(pow2_channels, 512 // deep)
    return ceil(channels / lanes), lanes * deep, deep, min(ceil(rows / (deep * 16)), 128)


def _columns(
    key: str, rows: int, channels: int, tall: int, chip: Chip, coef: Coef, warm: float, memory_s: float
) -> Kernel:
    """A kernel on channels-last tensors: ``tall`` blocks along the rows, four rows a thread and iteration."""
    wide, threads, deep, _ = _columns_grid(rows, channels)
    steps = ceil(rows / (deep * tall) / 4)
    resident = resident_blocks(threads)
    return looped(key, chip, coef, wide * tall, resident, steps, steps * threads / 512, warm, memory_s)


def _batch_channels_last(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """ATen's own kernels on channels-last tensors: blocks of channels by rows."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    rows, channels, training = dims["n"] * dims["h"] * dims["w"], dims["c"], dims.get("training", 1)
    backward, moved = call.phase == "bwd", rows * channels * size
    read = 2 * moved if backward else moved
    tall = _columns_grid(rows, channels)[3]
    made: list[Kernel] = []
    again = warm
    if backward or training:
        if tall >= 8:  # fewer blocks do not share a channel
            made.append(_memset("fill", chip, coef))
        read_s = stream_s(chip, coef, read, 0.0, warm)
        key = "csums" if backward else "cstat"
        made.append(_columns(key, rows, channels, tall if tall >= 8 else 1, chip, coef, warm, read_s))
        again = max(warm, left_over(read, chip, coef))
    if not backward:
        made += [_channels(name, chip, coef) for name in _statistics(training)]
    map_s = stream_s(chip, coef, read, moved, again)
    return [*made, _columns("cdx" if backward else "caffine", rows, channels, tall, chip, coef, again, map_s)]


def _batch_cudnn(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """cuDNN's single-precision kernels."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    samples, channels, plane = dims["n"], dims["c"], dims["h"] * dims["w"]
    moved = samples * channels * plane * size
    nhwc, training = dims.get("nhwc", 0), dims.get("training", 1)
    work = samples * plane / 1024
    if call.phase == "fwd" and not training:
        memory_s = stream_s(chip, coef, moved, moved, warm)
        if nhwc:
            return [_mapped("ninfer_nhwc", chip, coef, moved / size, memory_s, warm)]
        return [looped("ninfer", chip, coef, samples * channels, 8, ceil(plane / 1024), plane / 512, warm, memory_s)]
    backward = call.phase == "bwd"
    key, reads = ("nback", 2) if backward else ("ntrain", 1)
    again = reread_bytes(1, moved, 1, 2, chip, coef)
    memory_s = stream_s(chip, coef, reads * (moved + again), moved, warm)
    if not nhwc:
        return [looped(key, chip, coef, channels, 4, work, work, warm, memory_s)]
    memset = _memset("memset", chip, coef)
    total = moved / size / (1024 * chip.num_sms)
    return [memset, looped(key + "_nhwc", chip, coef, chip.num_sms, 1, total, total, warm, memory_s)]


def _triton(call: Call, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """Inductor: the row kernel, and in the backward the column sums, inside it when rows are many."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    rows, width, is_rms = dims["n"], dims["c"], call.kind == "rms_norm"
    if call.phase == "fwd":
        return triton_rows(rows, width, size, 1, chip, coef, warm)
    if rows * width >= 5 * 2**20 and rows >= 2 * width and width <= 8192:
        name, busy_s, bound = triton_persistent(rows, width, size, 2, chip, coef, warm)
        sums = kernel("reduce", chip, coef, 1.0, coef["reduce.multi"], 1.0, 0.0, 0.0, 0.0)
        return [(name, busy_s * coef["triton.mixed"], bound), *[sums] * (1 if is_rms else 2)]
    made, moved = triton_rows(rows, width, size, 2, chip, coef, warm), rows * width * size
    again = max(warm, left_over(3 * moved, chip, coef))
    memory_s = coef["triton.columns"] * stream_s(chip, coef, 2 * moved, 0.0, again)
    columns = kernel("triton_columns", chip, coef, 1.0, coef["triton.first"], 1.0, coef["triton.block"], 0.0, memory_s)
    return [*made, columns, kernel("triton_combine", chip, coef, 1.0, coef["triton.combine"], 0.0, 0.0, 0.0, 0.0)]


def kernels(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> list[Kernel]:
    """The kernels the library launches for this call, in order, each with its time."""
    dims = dimensions(call, *NEEDS[call.kind])
    if min(dims[name] for name in NEEDS[call.kind]) <= 0:
        return []
    if call.kind in ("layer_norm", "rms_norm"):
        if call.library == "inductor":
            return _triton(call, chip, coef, warm_frac)
        normalize = _normalize if call.phase == "fwd" else _normalize_backward
        return normalize(dims["n"], dims["c"], ITEMSIZE[call.dtype], call.kind == "rms_norm", chip, coef, warm_frac)
    if call.kind == "group_norm":
        return (_group_forward if call.phase == "fwd" else _group_backward)(call, chip, coef, warm_frac)
    if ITEMSIZE[call.dtype] >= 4 and call.library == "cudnn":
        return _batch_cudnn(call, chip, coef, warm_frac)
    return (_batch_channels_last if dims.get("nhwc", 0) else _batch_native)(call, chip, coef, warm_frac)


def _floor_s(call: Call, chip: Chip, warm_frac: float) -> float:
    dims = call.dims()
    moved = dims["n"] * dims["c"] * dims.get("h", 1) * dims.get("w", 1) * ITEMSIZE[call.dtype]
    return memory_floor_s(chip, moved if call.phase == "fwd" else 2 * moved, moved, warm_frac)


@family("norm", "layer_norm rms_norm group_norm batch_norm", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """Normalizations over rows, groups and channels."""
    if call.phase not in ("fwd", "bwd"):
        raise CostError(f"{call.kind} has phases fwd and bwd, not {call.phase!r}")
    made = kernels(call, chip, coef, warm_frac)
    if not made:
        return Time(0.0, 0.0, "latency", 0)
    floor_s = _floor_s(call, chip, warm_frac)
    return Time(max(floor_s, sum(k[1] for k in made)), floor_s, max(made, key=lambda k: k[1])[2], len(made))
