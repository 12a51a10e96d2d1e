"""Time of reductions: the block and grid shape ATen's reduce kernel chooses, and what that shape costs.

The tensor is seen as [outer, reduced, inner]. Rows (inner = 1) are folded by lanes that read side by side; columns by
threads that each own up to four outputs. Few outputs and much to reduce split one output over several blocks, which
meet in global memory behind a cleared counter: that last meeting is serial and often decides the time.
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.elementwise import blend, bound_of, issue_s, timed

DEFAULTS: Coef = {
    "dram_frac": 0.916,  # share of the datasheet DRAM bandwidth a full grid of loads reaches
    "l2_frac": 0.7,  # share of the L2 bandwidth
    "overlap": 3.27,  # exponent of the blend of memory, instruction and latency time
    "start_cycles": 3640.0,  # launch, index set-up and exit of a grid with next to nothing to reduce
    "miss_cycles": 392.0,  # added when loads come from DRAM
    "load_cycles": 354.0,  # one dependent round of loads, hit in the L2
    "load_miss_cycles": 511.0,  # added when it misses
    "round_cycles": 82.4,  # added when a round has four loads instead of one vector
    "fold_cycles": 20.0,  # one halving step through shared memory
    "ramp_cycles": 29500.0,  # lost while DRAM reaches its steady rate, in full for a long kernel
    "ramp_bytes": 70100000.0,  # traffic at which half of the ramp has been lost
    "thread_instr": 191.0,  # instructions per thread: indices, folding, store
    "load_instr": 12.3,  # instructions per load: address, guard
    "value_instr": 6.52,  # instructions per value loaded
    "guard_instr": 4.04,  # more per value of a maximum, which lets a NaN through
    "guard_thread_instr": 73.4,  # and per thread
    "index_instr": 23.0,  # more per value when its index is carried along
    "index_thread_instr": 168.0,  # and per thread
    "index_cycles": 408.0,  # and per round of loads
    "meet_cycles": 3290.0,  # splitting an output over blocks: write, fence, count
    "meet_round_cycles": 511.0,  # the last block reads one partial result per row of threads
    "meet_ragged": 1.6,  # rounds take longer when its last lanes have no output
    "clear_cycles": 2000.0,  # the memset that clears the counters
    "fused_frac": 0.85,  # Triton reduction: share of the DRAM bandwidth
    "fused_start_cycles": 3660.0,  # its start
    "fused_split_cycles": 1520.0,  # the second kernel of a split reduction
    "fused_row_instr": 10.0,  # its instructions per value, along rows
    "fused_column_instr": 28.0,  # and along columns, whose loads are not vectors
}

_SM_THREADS = 2048
_VECTOR_FROM = 128  # rows at least this long are read in vectors
_MIN_VALUES, _MAX_VALUES = 16, 256  # values per thread below which a split is not worth it, above which it is forced


class Launch(NamedTuple):
    """Block and grid of one reduction."""

    width: int
    height: int
    vector: int
    values: int  # inputs each thread folds
    grid: int  # blocks along the outputs
    splits: int  # blocks per output
    split_rows: bool  # threads of one block share an output along its height


def _pow2(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def launch(outer: int, reduced: int, inner: int, num_sms: int, input_vector: int = 4) -> Launch:
    """The configuration the library chooses for [outer, reduced, inner] on this many SMs."""
    along_rows, num_outputs, vector = inner == 1, outer * inner, 1
    if along_rows:
        dim0, dim1 = (reduced // input_vector if reduced >= _VECTOR_FROM else reduced), num_outputs
    else:
        vector = 4 if inner % 4 == 0 else 2 if inner % 2 == 0 else 1
        dim0, dim1 = num_outputs // vector, reduced
    threads = 512 // vector  # max threads
    width0, height0 = min(_pow2(dim0), threads), min(_pow2(dim1), threads)
    height = min(height0, threads // min(width0, 32))
    width = min(width0, threads // height)
    values = _ceil(reduced, width) if along_rows else reduced
    step_out = 1 if along_rows else width
    split_rows = values >= height * _MIN_VALUES or values >= _MAX_VALUES
    if split_rows:
        values = _ceil(values, height)
    else:
        step_out *= height
    grid, splits = _ceil(num_outputs // vector, step_out), 1
    target = num_sms * (_SM_THREADS // (width * height))
    if split_rows and values >= _MAX_VALUES and grid <= target:
        splits = max(min(_ceil(target, grid), _ceil(values, _MIN_VALUES)), _ceil(values, _MAX_VALUES))
        values = _ceil(values, splits)
    return Launch(width, height, vector, values, grid, splits, split_rows)


def _thread(
    coef: Coef, shape: Launch, view: tuple[int, int, int], op: str, input_vector: int, cold: float
) -> tuple[float, float]:
    """Instructions of a thread, and the cycles it waits for its loads."""
    per_value, per_thread = coef["value_instr"], coef["thread_instr"]
    wait = coef["load_cycles"] + coef["load_miss_cycles"] * cold
    if op in ("index", "guard"):
        per_value += coef[f"{op}_instr"]
        per_thread += coef[f"{op}_thread_instr"]
        wait += coef["index_cycles"] if op == "index" else 0.0
    if view[2] == 1 and view[1] >= _VECTOR_FROM:
        loads = _ceil(shape.values, input_vector)
        return per_thread + loads * (coef["load_instr"] + per_value * input_vector), loads * wait
    work = shape.values * (coef["load_instr"] + per_value * shape.vector)
    return per_thread + work, _ceil(shape.values, 4) * (wait + coef["round_cycles"])  # loads a thread has in flight


def reduce_s(
    chip: Chip, coef: Coef, view: tuple[int, int, int], size: float, out_bytes: float, warm_frac: float, op: str = "sum"
) -> tuple[float, int, bool]:
    """Seconds and kernels of one reduction, and whether instructions rather than bytes bound it.

    ``op`` is sum (also mean: eight 16-bit values a load), norm, guard (maximum) or index (arg-maximum).
    """
    outer, reduced, inner = view
    input_vector = 8 if op == "sum" and size <= 2.0 else 4
    shape = launch(outer, reduced, inner, chip.num_sms, input_vector)
    threads, blocks, cold = shape.width * shape.height, shape.grid * shape.splits, 1.0 - warm_frac
    instructions, wait_cycles = _thread(coef, shape, view, op, input_vector, cold)
    waves = max(1.0, blocks / (chip.num_sms * (_SM_THREADS // threads)))
    moved = float(outer) * reduced * inner * size + out_bytes
    memory = max(
        moved * cold / (coef["dram_frac"] * chip.dram_bytes_per_s), moved / (coef["l2_frac"] * chip.l2_bytes_per_s)
    )
    issue = issue_s(chip, instructions * threads * blocks)
    folds = (shape.width.bit_length() - 1 if inner == 1 else 0) + (
        shape.height.bit_length() - 1 if shape.split_rows else 0
    )
    chain = waves * (wait_cycles + coef["fold_cycles"] * folds) / chip.clock_hz
    body = blend(coef["overlap"], blend(coef["overlap"], memory, issue), chain)
    start = (
        coef["start_cycles"]
        + coef["miss_cycles"] * cold
        + coef["ramp_cycles"] * cold * moved / (moved + coef["ramp_bytes"])
    )
    if shape.splits > 1:
        # Blocks that share an output leave partial results; the last one to arrive folds them
        rows = shape.height if inner > 1 else shape.height * shape.width
        ragged = coef["meet_ragged"] if inner > 1 and (outer * inner // shape.vector) % shape.width else 1.0
        meet_cycles = coef["meet_cycles"] + coef["meet_round_cycles"] * ragged * _ceil(shape.splits, rows)
        start += coef["clear_cycles"] + meet_cycles
    return start / chip.clock_hz + body, 2 if shape.splits > 1 else 1, issue > memory


def _view(call: Call, dims: dict[str, int]) -> tuple[int, int, int]:
    if call.kind == "reduce":
        return dims["outer"], dims["reduced"], dims["inner"]
    n, c = dims["n"], dims["c"]
    if call.kind == "sum_dim0":
        return 1, n, c
    return (n, c, 1) if call.kind.endswith("dim1") else (1, n * c, 1)


def _fused_s(chip: Chip, coef: Coef, view: tuple[int, int, int], size: float, warm_frac: float) -> tuple[float, int]:
    """A reduction compiled by Inductor: split in two kernels when its outputs alone do not fill the chip."""
    outer, reduced, inner = view
    numel = float(outer) * reduced * inner
    memory = max(
        numel * size * (1.0 - warm_frac) / (coef["fused_frac"] * chip.dram_bytes_per_s),
        numel * size / (coef["l2_frac"] * chip.l2_bytes_per_s),
    )
    narrow = min(2.0, max(1.0, 64.0 / inner)) * coef["fused_column_instr"]  # short rows of columns leave lanes idle
    issue = issue_s(chip, numel * (coef["fused_row_instr"] if inner == 1 else narrow))
    split = outer * inner < chip.num_sms * 64 and reduced > (8192 if inner == 1 else 512)
    start = (
        coef["fused_start_cycles"]
        + coef["miss_cycles"] * (1.0 - warm_frac)
        + (coef["fused_split_cycles"] if split else 0.0)
    )
    return start / chip.clock_hz + blend(coef["overlap"], memory, issue), 2 if split else 1


def _op(call: Call, dims: dict[str, int]) -> str:
    if call.kind == "argmax_dim1" or dims.get("index", 0):
        return "index"
    if call.kind == "max_dim1" or dims.get("guard", 0):
        return "guard"
    return "norm" if call.kind == "norm_all" or dims.get("norm", 0) else "sum"


@family("reduction", "reduce sum_dim0 sum_dim1 mean_dim1 sum_all argmax_dim1 max_dim1 norm_all", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    outer, reduced, inner = _view(call, dims)
    op = _op(call, dims)
    out_bytes = float(dims.get("out_bytes", outer * inner * (8 if op == "index" else size)))
    if outer * reduced * inner <= 0:
        return Time(0.0, 0.0, "latency", 0)
    floor_s = memory_floor_s(chip, float(outer) * reduced * inner * size, out_bytes, warm_frac)
    if call.library == "inductor":
        busy_s, num_kernels = _fused_s(chip, coef, (outer, reduced, inner), size, warm_frac)
        return timed(busy_s, floor_s, bound_of(busy_s, floor_s, False, warm_frac), num_kernels)
    busy_s, num_kernels, issue_bound = reduce_s(chip, coef, (outer, reduced, inner), size, out_bytes, warm_frac, op)
    return timed(busy_s, floor_s, bound_of(busy_s, floor_s, issue_bound, warm_frac), num_kernels)
