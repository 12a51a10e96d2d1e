"""Time of recurrent layers in cuDNN: every step a small matrix product and a pointwise cell, one after the other."""

from __future__ import annotations

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.elementwise import timed

DEFAULTS: Coef = {
    "product_cycles": 4870.0,  # one step's matrix product, apart from its weights
    "product_l2_frac": 0.558,  # share of the L2 bandwidth at which it reads the recurrent weights
    "product_row_cycles": 8.0,  # and per sequence of the batch
    "cell_cycles": 3730.0,  # one step's pointwise cell
    "cell_element_cycles": 3.14e-07,  # and per hidden value of the batch
    "input_frac": 0.316,  # share of the matrix peak that the products over many steps reach
    "input_cycles": 6970.0,  # start of each of them
    "layer_cycles": 17700.0,  # copies and fills around a layer
}


def _chunks(layer: int, seq: int, batch: int) -> int:
    """Products over several steps of the input: the first layer at once, the next follow the one below."""
    if layer == 0:
        return 1
    steps = 2 if batch > 64 else 4 if batch > 32 else max(1, seq // 8)
    return max(1, seq // steps)


@family("recurrent", "lstm", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    hidden, seq, batch, layers = dims["hidden"], dims["seq"], dims["batch"], dims["layers"]
    if hidden * seq * batch * layers <= 0:
        return Time(0.0, 0.0, "latency", 0)
    peak = chip.tensor_flops_per_s.get(call.dtype, chip.vector_flops_per_s)
    weights = 4.0 * hidden * hidden * size
    product = (coef["product_cycles"] + coef["product_row_cycles"] * batch) / chip.clock_hz + weights / (
        coef["product_l2_frac"] * chip.l2_bytes_per_s
    )
    cell = (coef["cell_cycles"] + coef["cell_element_cycles"] * batch * hidden) / chip.clock_hz
    busy_s, kernels, flops = 0.0, 3, 0.0
    for layer in range(layers):
        width = dims["input"] if layer == 0 else hidden
        chunks = _chunks(layer, seq, batch)
        input_flops = 8.0 * seq * batch * hidden * width
        flops += input_flops + 8.0 * seq * batch * hidden * hidden
        busy_s += seq * (product + cell) + input_flops / (coef["input_frac"] * peak)
        busy_s += (chunks * coef["input_cycles"] + coef["layer_cycles"]) / chip.clock_hz
        kernels += 2 * seq + chunks + 4
    if call.phase == "bwd":  # gradients of the steps in turn, of the weights at the end
        busy_s, kernels, flops = 2.0 * busy_s, 2 * kernels, 2.0 * flops
    moved = layers * 2.0 * weights
    floor_s = max(flops / peak, memory_floor_s(chip, moved, seq * batch * hidden * size, warm_frac))
    return timed(busy_s, floor_s, "latency", kernels)
