"""Time of weight normalization over the last dim: few blocks, each walking a strip of the whole tensor."""

from __future__ import annotations

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.chip import Chip

STRIP = 16  # columns a block owns

DEFAULTS: Coef = {
    "start_cycles": 4000.0,  # launch to last exit, next to nothing to do
    "element_cycles": 1.12,  # per element of a block's strip: two passes over it (one recorded point, a speech encoder)
}


@family("weight_norm", "weight_norm", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    rows, columns = dims["n"], dims["c"]
    blocks = -(-columns // STRIP)
    waves = -(-blocks // (chip.num_sms * 2))
    passes = 2 if call.phase == "bwd" else 1
    cycles = coef["start_cycles"] + passes * waves * rows * min(columns, STRIP) * coef["element_cycles"]
    moved = rows * columns * ITEMSIZE.get(call.dtype, 4.0)
    floor_s = memory_floor_s(chip, moved, moved, warm_frac)
    return Time(max(cycles / chip.clock_hz, floor_s), floor_s, "latency")
