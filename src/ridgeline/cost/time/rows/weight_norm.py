"""Time of weight normalization: a block a row over the first dim, or few blocks that walk strips over the last."""

from __future__ import annotations

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip

DEFAULTS: Coef = {
    "start_cycles": 4300.0,  # launch to last exit, next to nothing to do
    "row_cycles": 18.2,  # one row of a strip: two passes over it
    "row_grad_cycles": 20.5,  # and in the gradient
    "element_cycles": 1.35,  # one element of a block's own row, 32 bits
    "narrow": 2.4,  # longer for 16 bits
    "dram_frac": 0.5,  # share of the DRAM bandwidth: two passes, the second from the L2 in part
}


@family("weight_norm", "weight_norm", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """``n`` rows of ``c``; ``dim`` 0 keeps the rows, else the columns."""
    dims = call.dims()
    rows, columns, size = dims["n"], dims["c"], ITEMSIZE.get(call.dtype, 4.0)
    if dims.get("dim", 1) == 0:
        waves = -(-rows // (chip.num_sms * 4))  # blocks of a row each that share an SM
        cycles = waves * columns * coef["element_cycles"] * (1.0 if size > 2.0 else coef["narrow"])
    else:
        waves = -(-columns // 16 // (chip.num_sms * 2)) or 1  # columns a block owns when the last dim is kept
        cycles = waves * rows * coef["row_grad_cycles" if call.phase == "bwd" else "row_cycles"]
    moved = rows * columns * size
    floor_s = memory_floor_s(chip, moved, moved, warm_frac)
    stream_s = 2.0 * moved / (coef["dram_frac"] * chip.dram_bytes_per_s)
    busy_s = coef["start_cycles"] / chip.clock_hz + max(cycles / chip.clock_hz, stream_s)
    return Time(max(busy_s, floor_s), floor_s, "latency")
