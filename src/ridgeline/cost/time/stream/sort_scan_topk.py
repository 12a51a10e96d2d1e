"""Time of sort, cumulative sum and top-k: the kernels CUB and ATen choose by row length and number of rows."""

from __future__ import annotations

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream import elementwise as stream
from ridgeline.cost.time.stream.elementwise import Sweep, blend, issue_s, timed

DEFAULTS: Coef = {
    "overlap": 1.3,  # exponent of the blend of a lone block's latency and the chip's throughput
    "memset_cycles": 2200.0,  # clearing a counter
    "tiny_cycles": 2200.0,  # a kernel over a few hundred numbers
    # sort of short rows, one block each
    "block_cycles": 11100.0,  # a 1024-wide block sort apart from its bits
    "block_bit_cycles": 599.0,  # and per key bit
    "block_width_frac": 0.142,  # longer per doubling of the threads
    "narrow_frac": 0.31,  # a 128-wide block takes this share
    "block_instr": 22.2,  # lane instructions per padded element and key bit
    "narrow_instr_frac": 2.06,  # more for 128-wide blocks, whose threads hold four
    "bitonic_cycles": 9520.0,  # sort of at most 32 numbers
    "bitonic_instr": 574.0,  # lane instructions per thread of it
    # radix sort over the whole chip
    "pass_cycles": 13500.0,  # one onesweep pass, nothing to sort
    "pass_fill_cycles": 4500.0,  # more as tiles fill the chip
    "pass_fill_elements": 50000.0,  # at this number of elements half of it
    "pass_instr": 320.0,  # lane instructions per element and pass
    "histogram_cycles": 5000.0,  # the histogram kernel
    "histogram_instr": 8.76,  # merging its bins, per element, until the grid is full
    "histogram_digit_instr": 20.0,  # and per digit
    "histogram_full_elements": 45000.0,  # elements per SM that fill its grid
    "index_cycles": 2300.0,  # writing the initial indices
    "index_instr": 120.0,  # lane instructions per index
    "gather_cycles": 3300.0,  # reordering after a sort of tagged segments
    "gather_instr": 260.0,  # lane instructions per element
    "segment_cycles": 5000.0,  # one pass over segments, a block each
    "segment_element_cycles": 1.97,  # a lone block, per element
    "segment_instr": 386.0,  # lane instructions per element when blocks share an SM
    # scan
    "scan_cycles": 5580.0,  # two kernels of a chip-wide scan
    "scan_look_cycles": 2560.0,  # waiting for predecessors as tiles fill the chip
    "scan_look_elements": 40600.0,  # at this number of elements half of it
    "scan_frac": 0.588,  # share of the DRAM bandwidth
    "scan_wide_instr": 100.0,  # lane instructions per element
    "scan_narrow_cycles": 5200.0,  # 16-bit elements: longer,
    "scan_narrow_instr": 120.0,  # and more instructions
    "row_cycles": 1230.0,  # row scan: launch
    "row_step_cycles": 1290.0,  # one step of a block over twice its width: load, sweep up, sweep down
    "row_level_cycles": 139.0,  # more per doubling of the width
    "row_miss_cycles": 742.0,  # more when the step misses the L2
    "row_instr": 370.0,  # lane instructions per thread and step
    # top-k
    "select_cycles": 9150.0,  # one-block radix select
    "select_step_cycles": 6780.0,  # per 1024 candidates and 16 key bits
    "select_instr": 1620.0,  # lane instructions per thread and step
    "digit_instr": 63.4,  # chip-wide select: counting digits, per element and pass
    "digit_cycles": 1790.0,  # its start
    "digit_block_cycles": 45.0,  # adding up the counts of one block
    "digit_row_cycles": 2.2,  # and of one row
    "within_cycles": 4400.0,  # marking the blocks that matter
    "within_block_cycles": 3.6,  # per block
    "take_cycles": 8000.0,  # collecting the winners
    "take_instr": 126.0,  # lane instructions per element
    "select_scan_cycles": 31100.0,  # the scans and small kernels between
}


def _copy_s(chip: Chip, numel: float, size: float, warm_frac: float) -> float:
    return stream.sweep_s(
        chip, stream.DEFAULTS, Sweep(numel, numel * size, numel * size, 1, 0, size, "copy"), warm_frac
    )


def _kernel_s(chip: Chip, cycles: float, numel: float, instructions: float) -> float:
    return cycles / chip.clock_hz + issue_s(chip, numel * instructions)


def block_sort_s(chip: Chip, coef: Coef, rows: float, length: int, bits: float) -> float:
    """Rows short enough for one block each: 32 by a bitonic network, up to 4096 by a block's radix sort."""
    if length <= 32:
        return blend(
            coef["overlap"], coef["bitonic_cycles"] / chip.clock_hz, issue_s(chip, rows * 32 * coef["bitonic_instr"])
        )
    padded = 128 if length <= 128 else 1024 if length <= 1024 else 2048 if length <= 2048 else 4096
    cycles = coef["block_cycles"] + coef["block_bit_cycles"] * bits
    instr = coef["block_instr"] * bits
    if padded == 128:
        cycles, instr = cycles * coef["narrow_frac"], instr * coef["narrow_instr_frac"]
    else:
        cycles *= 1.0 + coef["block_width_frac"] * ((padded // 1024).bit_length() - 1)
    return blend(coef["overlap"], cycles / chip.clock_hz, issue_s(chip, rows * padded * instr))


def radix_sort_s(chip: Chip, coef: Coef, numel: float, bits: float) -> tuple[float, int]:
    """A chip-wide radix sort of keys with indices: histogram, then one pass per eight bits."""
    passes = max(1, round(bits / 8))
    counted = min(numel, coef["histogram_full_elements"] * chip.num_sms)
    histogram = _kernel_s(
        chip, coef["histogram_cycles"], counted, coef["histogram_instr"] + coef["histogram_digit_instr"] * passes
    )
    histogram += numel * bits / 8 / chip.dram_bytes_per_s
    filling = coef["pass_fill_cycles"] * numel / (numel + coef["pass_fill_elements"])
    one = _kernel_s(chip, coef["pass_cycles"] + filling + coef["memset_cycles"], numel, coef["pass_instr"])
    return histogram + passes * one + (2 * coef["memset_cycles"] + coef["tiny_cycles"]) / chip.clock_hz, 4 + 2 * passes


def _segments_s(chip: Chip, coef: Coef, rows: int, length: int, bits: float) -> tuple[float, int]:
    passes = -(-int(bits) // 6)
    alone = length * coef["segment_element_cycles"] / chip.clock_hz
    shared = -(-rows // chip.num_sms) * chip.num_sms * length * coef["segment_instr"]
    return passes * (coef["segment_cycles"] / chip.clock_hz + max(alone, issue_s(chip, shared))), passes


def sort_s(chip: Chip, coef: Coef, rows: int, length: int, size: float, warm_frac: float) -> tuple[float, int]:
    """Sort of ``rows`` rows along their length, values with indices."""
    numel, bits = float(rows) * length, 8.0 * size
    copied = _copy_s(chip, numel, size, warm_frac)
    if length <= 4096:
        index = Sweep(numel, 0.0, 8.0 * numel, 1, 0, 8.0, "strided")
        spread = stream.sweep_s(chip, stream.DEFAULTS, index, 1.0) if rows > 1 else _copy_s(chip, numel, 8.0, 1.0)
        spread += 1400.0 / chip.clock_hz
        return copied + spread + _copy_s(chip, numel, size, 1.0) + block_sort_s(chip, coef, rows, length, bits), 5
    filled = _kernel_s(chip, coef["index_cycles"], numel, coef["index_instr"])
    if rows >= 128:
        busy_s, passes = _segments_s(chip, coef, rows, length, bits)
        return copied + filled + busy_s, 2 + passes
    busy_s, kernels = radix_sort_s(chip, coef, numel, bits)
    if rows == 1:
        return copied + filled + busy_s, 2 + kernels
    tagged_s, tagged = radix_sort_s(chip, coef, numel, 8.0)
    gathered = _kernel_s(chip, coef["gather_cycles"], numel, coef["gather_instr"])
    return copied + filled + busy_s + tagged_s + gathered, 3 + kernels + tagged


def _row_threads(rows: int, length: int) -> int:
    """Width of a row-scan block, of 512 threads in all, as the library splits it between rows and columns."""
    log_x, log_y = max(0, (length - 1).bit_length()), max(0, (rows - 1).bit_length())
    if 9 + log_x < log_y:
        return 512  # the library's unsigned arithmetic wraps around here
    return 1 << min(9, max(4, (9 + log_x - log_y) // 2))


def scan_s(chip: Chip, coef: Coef, rows: int, length: int, size: float, warm_frac: float) -> tuple[float, int]:
    """Cumulative sum along rows: one row by CUB's look-back scan, several by a block that steps along them."""
    numel, cold = float(rows) * length, 1.0 - warm_frac
    if rows == 1:
        narrow = size <= 2.0
        cycles = coef["scan_cycles"] + coef["scan_look_cycles"] * numel / (numel + coef["scan_look_elements"])
        cycles += coef["scan_narrow_cycles"] * numel / (numel + 4000.0) if narrow else 0.0
        memory = 2.0 * numel * size / (coef["scan_frac"] * chip.dram_bytes_per_s) * (0.8 + 0.2 * cold)
        issue = issue_s(chip, numel * coef["scan_narrow_instr" if narrow else "scan_wide_instr"])
        return cycles / chip.clock_hz + max(memory, issue), 2
    width = _row_threads(rows, length)
    steps, blocks = -(-length // (2 * width)), -(-rows // (512 // width))
    step = (
        coef["row_step_cycles"] + coef["row_level_cycles"] * (width.bit_length() - 1) + coef["row_miss_cycles"] * cold
    )
    waves = max(1.0, blocks / (chip.num_sms * 4))
    latency = steps * step * waves / chip.clock_hz
    issue = issue_s(chip, 512.0 * blocks * steps * coef["row_instr"])
    return coef["row_cycles"] / chip.clock_hz + blend(4.0, latency, issue), 1


def topk_s(chip: Chip, coef: Coef, rows: int, length: int, k: int, size: float, warm_frac: float) -> tuple[float, int]:
    """The k largest of each row: radix select, then a sort of the winners."""
    bits = 8.0 * size
    sorted_s = block_sort_s(chip, coef, rows, k, bits) if k > 1 else 0.0
    num_sorts = 1 if k > 1 else 0
    # Where ATen's top-k spreads each row over several blocks
    limits = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    whole_chip_select = length >= next((least for most, least in limits if rows <= most), 400)
    if not whole_chip_select:
        threads = min(1024, -(-length // 32) * 32)
        steps = max(1.0, length / 1024.0)
        lone = coef["select_cycles"] + coef["select_step_cycles"] * (length / 1024.0) * (0.75 + bits / 64.0)
        busy = issue_s(chip, rows * threads * steps * coef["select_instr"])
        return blend(coef["overlap"], lone / chip.clock_hz, busy) + sorted_s, 1 + num_sorts
    return _whole_chip_topk_s(chip, coef, rows, length, size, warm_frac) + sorted_s, 9 + 3 * round(size) + num_sorts


def _whole_chip_topk_s(chip: Chip, coef: Coef, rows: int, length: int, size: float, warm_frac: float) -> float:
    numel, passes = float(rows) * length, max(1, round(size))
    items = min(64, max(4, -(-int(numel) // (chip.num_sms * 8 * 256))))
    per_row = -(-length // (256 * items))
    digits = (
        coef["digit_cycles"]
        + coef["digit_cycles"] * 0.65
        + coef["digit_block_cycles"] * per_row
        + coef["digit_row_cycles"] * rows
    )
    within = coef["within_cycles"] + coef["within_block_cycles"] * per_row * rows
    one = _kernel_s(chip, digits + within, numel, coef["digit_instr"])
    cold_s = numel * size * (1.0 - warm_frac) / (0.9 * chip.dram_bytes_per_s)
    first_s = min(cold_s, 6e-6)
    taken = _kernel_s(chip, coef["take_cycles"] + coef["select_scan_cycles"], numel, coef["take_instr"])
    return passes * one + first_s + taken


def _widened(chip: Chip, dtype: str, numel: float, warm_frac: float) -> tuple[float, float, float]:
    """Sums of whole numbers are made in 64 bits: (seconds of the cast, bytes read and bytes summed per element)."""
    size = ITEMSIZE[dtype]
    if dtype not in ("int32", "int16", "int8", "uint8", "bool"):
        return 0.0, size, size
    sweep = Sweep(numel, numel * size, numel * 8.0, 1, 0.0, size, "cast")
    return stream.sweep_s(chip, stream.DEFAULTS, sweep, warm_frac), size, 8.0


@family("ordering", "sort cumsum topk", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    if call.kind == "topk":
        rows, length = dims["n"], dims["v"]
    else:
        rows, length = (dims["n"], dims["c"]) if "c" in dims else (1, dims["n"])
    numel = float(rows) * length
    if numel <= 0.0:
        return Time(0.0, 0.0, "latency", 0)
    if call.kind == "topk":
        busy_s, kernels = topk_s(chip, coef, rows, length, dims["k"], size, warm_frac)
        written = rows * dims["k"] * (size + 8.0)
    elif call.kind == "sort":
        busy_s, kernels = sort_s(chip, coef, rows, length, size, warm_frac)
        written = numel * (size + 8.0)
    else:
        widened_s, size_in, size = _widened(chip, call.dtype, numel, warm_frac)
        busy_s, kernels = scan_s(chip, coef, rows, length, size, 1.0 if widened_s and numel < 1e6 else warm_frac)
        busy_s, kernels = busy_s + widened_s, kernels + (widened_s > 0.0)
        written, size = numel * size, size_in
    floor_s = memory_floor_s(chip, numel * size, written, warm_frac)
    return timed(busy_s, floor_s, "latency" if busy_s > 8.0 * floor_s else "compute", kernels)
