"""How much of the device a predicted step uses: each line's roofs, and the step's share of the peaks."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.prediction import Prediction
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.work import Work


@dataclass(frozen=True, slots=True)
class Roof:
    """Seconds a line would take if one resource at its peak were all it needed, over all its runs."""

    compute_s: float
    dram_s: float
    l2_s: float


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the wall time: matrix units at their peak (MFU) and DRAM at its bandwidth."""

    mfu_frac: float
    dram_frac: float


def matrix_peak_flops_per_s(chip: Chip, dtype: str) -> float:
    """The matrix peak for this dtype; the vector units do what the matrix units cannot."""
    return chip.tensor_flops_per_s.get(dtype, chip.vector_flops_per_s)


def roofs(prediction: Prediction) -> list[Roof]:
    """One roof a line, in the order of ``prediction.rows()``."""
    chip = chip_of(prediction.device)
    return [_roof(chip, line.work, line.times, line.cold_frac) for line in prediction.lines]


def _roof(chip: Chip, work: Work, times: int, cold_frac: float) -> Roof:
    matrix_s = work.matrix_flops / matrix_peak_flops_per_s(chip, work.dtype)
    vector_s = max(0.0, work.flops - work.matrix_flops) / chip.vector_flops_per_s
    num_bytes = work.num_bytes * times
    return Roof(
        (matrix_s + vector_s) * times, num_bytes * cold_frac / chip.dram_bytes_per_s, num_bytes / chip.l2_bytes_per_s
    )


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
