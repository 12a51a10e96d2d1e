"""Time of gathers and scatters: embedding tables, their gradients, and rows or elements picked by index."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream import elementwise as stream
from ridgeline.cost.time.stream import sort_scan_topk as ordering
from ridgeline.cost.time.stream.elementwise import Sweep, blend, issue_s, timed

DEFAULTS: Coef = {
    "overlap": 10.9,  # exponent of the blend of latency, instructions and bytes
    "start_cycles": 2360.0,  # a gather of a few rows
    "miss_cycles": 1390.0,  # longer when indices and rows come from DRAM
    "block_cycles": 1.18,  # the chip starts one block, a row each, in this many clocks
    "row_frac": 0.773,  # share of the DRAM bandwidth that whole rows reach
    "l2_frac": 0.581,  # share of the L2 bandwidth
    "pick_instr": 90.0,  # lane instructions per element picked on its own, as the index-computing kernel
    "atomic_start_cycles": 3640.0,  # a scatter of a few rows
    "atomic_instr": 243.0,  # lane instructions per 32-bit element added atomically
    "atomic_narrow_instr": 280.0,  # and per 16-bit element
    "bag_overlap": 1.66,  # exponent of the blend of a bag's walk and the chip's throughput
    "bag_start_cycles": 4000.0,  # a sum over bags, nothing to add
    "bag_entry_cycles": 275.0,  # one entry of a bag after the other, from the L2
    "bag_miss_cycles": 240.0,  # more when its row comes from DRAM
    "bag_chunk_instr": 338.0,  # lane instructions per bag and 32 columns
    "bag_entry_instr": 42.4,  # and per entry
    "bag_stall_instr": 6.66,  # slots lost per entry that misses the L2, with every SM full
    "feature_cycles": 3530.0,  # table gradient of few indices: start
    "feature_index_cycles": 47.2,  # every index in turn
    "feature_miss_cycles": 23.0,  # more when its row comes from DRAM
    "tile_cycles": 24300.0,  # sort of a few thousand indices by one block
    "pass_cycles": 11000.0,  # one radix pass over 64-bit indices, whose digit is always the same
    "pass_instr": 65.4,  # its lane instructions per index
    "digit_cycles": 2730.0,  # more when the digit varies
    "digit_instr": 110.0,  # and more instructions
    "between_cycles": 26000.0,  # the small kernels that find equal indices
    "between_instr": 700.0,  # and their instructions per index
    "segment_instr": 17300.0,  # summing rows of equal index: lane instructions per partial sum
    "column_instr": 165.0,  # and per column of it
    "value_instr": 45.3,  # and per row element read
    "segment_cycles": 3600.0,  # start of each of its two kernels
    "put_cycles": 41000.0,  # accumulating assignment: the small kernels that sort few positions
    "put_sets_cycles": 26000.0,  # more where several index tensors make up a position
    "put_sort_cycles": 38000.0,  # more where they are too many for one block
    "put_index_instr": 3300.0,  # lane instructions per position then
    "put_instr": 7200.0,  # lane instructions per element added on its own, a warp for each run
    "put_row_instr": 84.0,  # and per element of a row
    "put_again_cycles": 220.0,  # one more of the same position, elements one by one
    "put_again_row_cycles": 1900.0,  # and rows
}

_TILE_INDICES = 2304  # up to this many one block sorts them: 256 threads of nine


def _unique(rows: float, count: float) -> float:
    """Distinct rows among ``count`` uniform picks of ``rows``."""
    return rows * -math.expm1(-count / rows) if rows > 0 else 0.0


def gather_s(chip: Chip, coef: Coef, rows: float, row_bytes: float, table_bytes: float, warm_frac: float) -> float:
    """Rows copied from a table by index, a block each: first touches from DRAM, the rest from the L2."""
    moved = rows * row_bytes
    if row_bytes % 16.0:
        # Elements or ragged rows picked one by one: index arithmetic, and a whole sector for every miss
        numel = rows * max(1.0, row_bytes / 4.0)
        sector_bytes, cold = max(row_bytes, 32.0), 1.0 - warm_frac
        missed = missed_frac(chip, max(1.0, table_bytes / sector_bytes), sector_bytes, rows)
        fetched = rows * (sector_bytes * missed + row_bytes + 8.0) * cold
        memory = fetched / (coef["row_frac"] * chip.dram_bytes_per_s)
        start = coef["start_cycles"] + coef["miss_cycles"] * cold
        return start / chip.clock_hz + blend(coef["overlap"], memory, issue_s(chip, numel * coef["pick_instr"]))
    from_dram = moved * missed_frac(chip, max(1.0, table_bytes / row_bytes), row_bytes, rows)
    cold = 1.0 - warm_frac
    dram_s = (from_dram + moved) * cold / (coef["row_frac"] * chip.dram_bytes_per_s)
    memory = max(dram_s, 2.0 * moved / (coef["l2_frac"] * chip.l2_bytes_per_s))
    blocks = rows * max(1.0, row_bytes / 4096.0)
    start = coef["start_cycles"] + coef["miss_cycles"] * cold
    return start / chip.clock_hz + blend(coef["overlap"], memory, blocks * coef["block_cycles"] / chip.clock_hz)


def scatter_s(chip: Chip, coef: Coef, rows: float, row_bytes: float, size: float, warm_frac: float) -> float:
    """Rows added atomically into a table."""
    numel = rows * row_bytes / size
    instr = coef["atomic_instr" if size > 2.0 else "atomic_narrow_instr"]
    memory = 3.0 * rows * row_bytes * (1.0 - warm_frac) / (0.8 * chip.dram_bytes_per_s)
    start = coef["atomic_start_cycles"] + coef["miss_cycles"] * (1.0 - warm_frac)
    return start / chip.clock_hz + blend(coef["overlap"], memory, issue_s(chip, numel * instr))


def bag_s(chip: Chip, coef: Coef, bags: float, length: float, width: float, missed: float, warm_frac: float) -> float:
    """Sums of embedding rows: a warp per bag and 32 columns walks its entries, a share of which miss the L2."""
    chunks = bags * math.ceil(width / 32.0)
    rounds = math.ceil(chunks / (8 * 1024.0))
    cold = 1.0 - warm_frac
    wait = coef["bag_entry_cycles"] + coef["bag_miss_cycles"] * cold * missed
    latency = rounds * length * wait / chip.clock_hz
    per_entry = coef["bag_entry_instr"] + coef["bag_stall_instr"] * cold * missed
    issue = issue_s(chip, 32.0 * chunks * (coef["bag_chunk_instr"] + per_entry * length))
    start = coef["bag_start_cycles"] + coef["miss_cycles"] * cold
    return start / chip.clock_hz + blend(coef["bag_overlap"], latency, issue)


def missed_frac(chip: Chip, table_rows: float, row_bytes: float, count: float) -> float:
    """Share of picks that come from DRAM: first touches, and all of them once the table outgrows the L2."""
    first = _unique(table_rows, count) / count
    return first + (1.0 - first) * (1.0 - stream.resident_frac(chip, table_rows * row_bytes))


def _index_sort_s(chip: Chip, coef: Coef, count: float, rows: float) -> tuple[float, int]:
    if count <= _TILE_INDICES:
        return coef["tile_cycles"] / chip.clock_hz, 1
    varied = min(8.0, math.ceil(math.log2(max(2.0, rows)) / 8.0))
    fixed = ordering.DEFAULTS["histogram_cycles"] + 3.0 * ordering.DEFAULTS["memset_cycles"]
    cycles = fixed + 8.0 * (coef["pass_cycles"] + ordering.DEFAULTS["memset_cycles"]) + varied * coef["digit_cycles"]
    return cycles / chip.clock_hz + issue_s(chip, count * (8.0 * coef["pass_instr"] + varied * coef["digit_instr"])), 20


def table_gradient_s(
    chip: Chip, coef: Coef, rows: float, width: float, count: float, size: float, warm_frac: float, bags: bool
) -> tuple[float, int]:
    """Gradient of a table: few indices one after the other, many sorted so that equal ones are summed."""
    table_bytes = rows * width * size
    numel = table_bytes / size
    filled = stream.sweep_s(
        chip, stream.DEFAULTS, Sweep(numel, 0.0, table_bytes, 0, stream.DEFAULTS["fill_instr"], size, "plain"), 0.0
    )
    if not bags and count <= 3072:  # up to this many indices a table gradient is not sorted
        wait = coef["feature_index_cycles"] + coef["feature_miss_cycles"] * (1.0 - warm_frac)
        return filled + (coef["feature_cycles"] + count * wait) / chip.clock_hz, 2
    sorted_s, kernels = _index_sort_s(chip, coef, count, rows)
    unique = _unique(rows, count)
    parts = unique + max(0.0, count - unique) / 10  # rows one thread sums before partial sums are joined
    lanes = max(32.0, math.ceil(width / 32.0) * 32.0)
    work = (parts + unique) * (coef["segment_instr"] + coef["column_instr"] * lanes) + coef[
        "value_instr"
    ] * count * lanes
    between = coef["between_cycles"] + 2.0 * coef["segment_cycles"]
    return filled + sorted_s + between / chip.clock_hz + issue_s(
        chip, work + count * coef["between_instr"]
    ), kernels + 11


def put_s(chip: Chip, coef: Coef, dims: Mapping[str, int]) -> tuple[float, int]:
    """Accumulating assignment: positions are sorted, then a warp adds each run of equal ones."""
    count, width, sets, rows = (float(dims[key]) for key in ("count", "width", "sets", "rows"))
    many = count > _TILE_INDICES
    cycles = coef["put_cycles"] + coef["put_sets_cycles"] * (sets > 1.0) + coef["put_sort_cycles"] * many
    sort_s = cycles / chip.clock_hz + many * issue_s(chip, count * coef["put_index_instr"])
    each = coef["put_instr" if width == 1.0 else "put_row_instr"]
    again = coef["put_again_cycles" if width == 1.0 else "put_again_row_cycles"] * count / max(1.0, rows)
    add_s = max(issue_s(chip, count * sets * width * each), again / chip.clock_hz)
    return sort_s + add_s + coef["start_cycles"] / chip.clock_hz, 12 + 9 * (sets > 1.0) + 7 * many


def _put_dims(dims: Mapping[str, int]) -> dict[str, int]:
    """A recorded call's own words in those of the model: pairs of a batch of squares, or rows of a table."""
    if "count" in dims:
        return dict(dims)
    if "pairs" in dims:
        return {"count": dims["pairs"], "width": 1, "sets": dims["b"], "rows": dims["f"] * dims["f"]}
    return {"count": dims["n"], "width": dims["d"], "sets": 1, "rows": dims["v"]}


@family("index_put", "index_put", DEFAULTS)
def put_model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = _put_dims(call.dims())
    moved = dims["count"] * dims["sets"] * dims["width"] * ITEMSIZE[call.dtype]
    busy_s, kernels = put_s(chip, coef, dims)
    return timed(busy_s, memory_floor_s(chip, moved, 0.0, warm_frac), "latency", kernels)


def _rows_of(call: Call, dims: dict[str, int], size: float) -> tuple[float, float, float]:
    """Rows picked, bytes of each, bytes of the table."""
    if call.kind in ("gather", "scatter"):
        row_bytes = float(dims["row_bytes"])
        return float(dims["rows"]), row_bytes, float(dims.get("table_bytes", dims["rows"] * dims["row_bytes"]))
    row_bytes = dims["d"] * size
    count = dims["b"] * dims["l"] if call.kind == "embedding_bag" else dims["n"]
    return float(count), row_bytes, dims["v"] * row_bytes


@family("indexing", "embedding embedding_bag index_select gather_rows index_add gather scatter", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    rows, row_bytes, table_bytes = _rows_of(call, dims, size)
    if rows * row_bytes <= 0.0:
        return Time(0.0, 0.0, "latency", 0)
    kernels, moved = 1, rows * row_bytes
    touched = min(moved, table_bytes)
    if call.phase == "bwd" and call.kind in ("embedding", "embedding_bag", "index_select", "gather_rows"):
        bags = call.kind == "embedding_bag"
        busy_s, kernels = table_gradient_s(chip, coef, dims["v"], dims["d"], rows, size, warm_frac, bags)
        read = moved / dims["l"] if bags else moved
        floor_s = memory_floor_s(chip, read, table_bytes, warm_frac)
    elif call.kind == "embedding_bag":
        missed = missed_frac(chip, dims["v"], row_bytes, rows)
        busy_s = bag_s(chip, coef, dims["b"], dims["l"], dims["d"], missed, warm_frac)
        unique_bytes = _unique(dims["v"], rows) * row_bytes * 0.9
        floor_s = memory_floor_s(chip, unique_bytes, dims["b"] * row_bytes, warm_frac)
    elif call.kind in ("index_add", "scatter"):
        busy_s = scatter_s(chip, coef, rows, row_bytes, size, warm_frac)
        floor_s = memory_floor_s(chip, moved, touched, warm_frac)
    else:
        busy_s = gather_s(chip, coef, rows, row_bytes, table_bytes, warm_frac)
        unique_bytes = _unique(table_bytes / row_bytes, rows) * row_bytes * 0.9
        floor_s = memory_floor_s(chip, unique_bytes, moved, warm_frac)
    return timed(busy_s, floor_s, "latency" if busy_s > 4.0 * floor_s else "memory", kernels)
