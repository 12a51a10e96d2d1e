"""Energy from activity: what idles, what switches, what moves; and the clock that a power limit leaves."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.call import Coef
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.unmeasured.related_device import wanted_power_frac
from ridgeline.cost.work import Work

DEFAULTS: Coef = {
    # fitted on sustained loops and whole models on an H200 with a 700 W limit
    "idle_frac": 0.155,  # board power with nothing running, of the power limit
    "busy_frac": 0.35,  # instruction issue, caches and clocks while any kernel runs
    "matrix_frac": 1.13,  # matrix arithmetic at its peak rate would draw this much more
    "byte_frac": 0.66,  # DRAM at its peak rate draws this much more
    "cap_frac": 0.945,  # the mean that the power controller settles at when the limit binds
    "throttle": 0.5,  # how much slower matrix kernels get per unit of power wanted above the limit
}


@dataclass(frozen=True, slots=True)
class Activity:
    """What a stretch of work did, in extensive quantities."""

    busy_s: float
    peak_matrix_s: float  # matrix flops over the peak rate of their dtype
    peak_dram_s: float  # bytes over the DRAM bandwidth

    def __add__(self, other: Activity) -> Activity:
        return Activity(
            self.busy_s + other.busy_s, self.peak_matrix_s + other.peak_matrix_s, self.peak_dram_s + other.peak_dram_s
        )


def matrix_rate_flops_per_s(chip: Chip, dtype: str, coef: Coef) -> float:
    """Matrix operations a second that draw what the matrix units draw at their peak.

    Full precision on the vector units of architectures other than the one the coefficients were fitted on draws less:
    what published products tell of an operation's energy, above a board that is merely busy.
    """
    peak = chip.tensor_flops_per_s.get("fp8" if dtype == "fp8_e5m2" else dtype)
    if peak is not None:
        return peak
    wanted = wanted_power_frac(chip.arch, "fp32", chip.vector_flops_per_s, chip.tdp_w)
    if chip.arch == "hopper" or wanted is None:  # the architecture that was fitted
        return chip.vector_flops_per_s
    above = max(0.1, wanted - coef["idle_frac"] - coef["busy_frac"]) / coef["matrix_frac"]  # min share
    return chip.vector_flops_per_s / min(1.0, above)


def activity_of(
    work: Work, busy_s: float, matrix_peak_flops_per_s: float, dram_bytes_per_s: float, cold_frac: float
) -> Activity:
    """What the work did while it ran; bytes found in L2 cost no DRAM energy."""
    return Activity(busy_s, work.matrix_flops / matrix_peak_flops_per_s, work.num_bytes * cold_frac / dram_bytes_per_s)


def dynamic_j(activity: Activity, coef: Coef, scale_w: float) -> float:
    """Joules above idle; ``scale_w`` is the power limit the chip was designed for, whatever limit is set now."""
    return joules_of(activity.busy_s, activity.peak_matrix_s, activity.peak_dram_s, coef, scale_w)


def joules_of(busy_s: float, peak_matrix_s: float, peak_dram_s: float, coef: Coef, scale_w: float) -> float:
    """The same of the parts of an activity."""
    return scale_w * (
        coef["busy_frac"] * busy_s + coef["matrix_frac"] * peak_matrix_s + coef["byte_frac"] * peak_dram_s
    )


def throttle_factor(activity: Activity, wall_s: float, coef: Coef, scale_w: float, limit_w: float) -> float:
    """How much longer sustained work takes because it would draw more than the limit; 1 where it would not."""
    if wall_s <= 0:
        return 1.0
    wanted_w = scale_w * coef["idle_frac"] + dynamic_j(activity, coef, scale_w) / wall_s
    return 1.0 + coef["throttle"] * max(0.0, wanted_w / limit_w - 1.0)


def idle_j(wall_s: float, coef: Coef, scale_w: float) -> float:
    """Joules of a board that does nothing for ``wall_s``."""
    return scale_w * coef["idle_frac"] * wall_s


def energy_j(activity: Activity, wall_s: float, coef: Coef, scale_w: float, limit_w: float) -> float:
    """Joules of the board over ``wall_s``, never more than the limit lets through."""
    drawn = idle_j(wall_s, coef, scale_w) + dynamic_j(activity, coef, scale_w)
    return min(drawn, limit_w * coef["cap_frac"] * wall_s)
