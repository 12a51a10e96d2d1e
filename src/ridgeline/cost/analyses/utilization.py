"""How much of the device a predicted step uses: the step's share of the peaks."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.prediction import Prediction
from ridgeline.cost.time.chip import Chip, chip_of


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the wall time: matrix units at their peak (MFU) and DRAM at its bandwidth."""

    mfu_frac: float
    dram_frac: float


def matrix_peak_flops_per_s(chip: Chip, dtype: str) -> float:
    """The matrix peak for this dtype; the vector units do what the matrix units cannot."""
    return chip.tensor_flops_per_s.get(dtype, chip.vector_flops_per_s)


def utilization(prediction: Prediction) -> Utilization:
    """What share of the step's wall time its arithmetic and its bytes would need at the peaks."""
    wall_s = prediction.expected_s
    if wall_s <= 0:
        return Utilization(0.0, 0.0)
    chip = chip_of(prediction.device)
    matrix_s = sum(
        line.work.matrix_flops / matrix_peak_flops_per_s(chip, line.work.dtype) * line.times
        for line in prediction.lines
    )
    dram_s = sum(line.work.num_bytes * line.cold_frac * line.times for line in prediction.lines) / chip.dram_bytes_per_s
    return Utilization(matrix_s / wall_s, min(1.0, dram_s / wall_s))
