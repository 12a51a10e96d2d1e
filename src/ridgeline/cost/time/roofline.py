"""The speed of light with a practical share of it: for ops that declare nothing but flops and bytes."""

from __future__ import annotations

from ridgeline.cost.call import Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip

DEFAULTS: Coef = {
    "compute_frac": 0.6,  # share of the peak that unknown arithmetic reaches
    "memory_frac": 0.8,  # share of the DRAM bandwidth
    "start_s": 3e-6,  # launch and drain
}


@family("roofline", "roofline", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    memory_s = memory_floor_s(chip, dims["read_bytes"], dims["written_bytes"], warm_frac)
    matrix_flops = dims.get("matrix_flops", 0)
    compute_s = (dims["flops"] - matrix_flops) / chip.vector_flops_per_s
    if matrix_flops:
        compute_s += matrix_flops / chip.peak_flops_per_s(call.dtype)
    busy_s = coef["start_s"] + max(memory_s / coef["memory_frac"], compute_s / coef["compute_frac"])
    return Time(busy_s, max(memory_s, compute_s), "memory" if memory_s >= compute_s else "compute")
