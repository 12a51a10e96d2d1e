"""Coefficients of one device put to work on another of its kin: what clocks, power budgets and special units change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.cost.time.chip import chip_of
from ridgeline.hardware import Device

PACED = frozenset({"launch_s", "fanout_s", "gap_s", "split_s", "splitk_s"})
"""Latencies of so many clocks: a launch of a product is 3,500 to 4,900 of them on four architectures, 4.3 to 1.6 µs."""
EXPONENTIAL_RATE = {"b300": 1.5, "gb300": 1.5}
"""Exponentials an SM computes per clock, over its kin. The vendor says twice for Blackwell Ultra's special units;
kernels that compute some of them on other units already are assumed to gain half of that (nobody measured here)."""
STREAMED = ("load_frac", "l2_frac")
"""How fast an SM streams keys and values past itself. A generation's kernels keep more loads in flight so that an SM
keeps up with its share of the DRAM: on a B200 0.73 of its port, on an H100 0.36, which has half as much DRAM bandwidth
for an SM and a clock. Decoding on a B200 by coefficients of three other architectures 52 → 29 %, of an H100 alone 39 →
22, on an L40S 31 → 20, on an A100 19 → 21 %. Devices of one architecture have the same SMs."""
VECTOR_J_PER_FLOP = {
    "pascal": 2.4e-11, "volta": 1.9e-11, "turing": 2.5e-11, "ampere": 1.5e-11, "ampere-ga10x": 1.7e-11, "ada": 1.6e-11,
    "hopper": 1.4e-11, "blackwell": 1.4e-11, "blackwell-consumer": 1.4e-11, "cdna1": 1.3e-11, "cdna2": 1.3e-11,
}  # fmt: skip
"""Board energy of a single-precision operation at the boost clock. Read off published products on a T4 and an L4, whose
70 W hold them at half of their peaks, and on a V100, which reaches its own; in between by the process (12, 7 to 8, 4
nm). CDNA's 300 W boards hold their boost clock at the vector peak by their datasheets: that over the peak."""
MATRIX_J_PER_FLOP = {"cdna2": 2.1e-12, "cdna3": 1.65e-12, "cdna4": 1.2e-12}
"""The same of a 16-bit matrix operation where no product was fitted. CDNA 3 from the best published products of an
MI300X (51 % of its peak under 750 W) and an MI325X (60 % under 1000 W): the exponent of the power cap explains both."""


def related_families(
    families: Mapping[str, Mapping[str, Any]], donor: Device, device: Device
) -> dict[str, Mapping[str, Any]]:
    """The donor's families as they are expected to be on ``device``."""
    found = dict(families)
    for name in ("gemm", "attention"):
        if name in found:
            found[name] = {key: _entry(entry, donor, device) for key, entry in found[name].items()}
    return found


def _entry(entry: Mapping[str, Any], donor: Device, device: Device) -> dict[str, Any]:
    return {**entry, "coef": adapted(entry["coef"], donor, device)}


def adapted(coef: Mapping[str, float], donor: Device, device: Device) -> dict[str, float]:
    """Latencies follow the clock, the power wanted follows the peak over the board's budget."""
    slower = donor.boost_hz / device.boost_hz
    hungrier = flops_per_j(device) / flops_per_j(donor)
    exponentials = EXPONENTIAL_RATE.get(device.name, 1.0) / EXPONENTIAL_RATE.get(donor.name, 1.0)
    factors = dict.fromkeys(PACED, slower) | {"power_frac": hungrier, "exp_per_clock": exponentials}
    if "load_frac" in coef and donor.arch != device.arch:
        factors |= dict.fromkeys(STREAMED, max(1.0, bytes_per_clock(device) / bytes_per_clock(donor)))
    return {name: value * factors.get(name, 1.0) for name, value in coef.items()}


def wanted_power_frac(arch: str, dtype: str, peak_flops_per_s: float, tdp_w: float) -> float | None:
    """Power wanted at the full rate over the board's limit, where the architecture tells and nothing was fitted."""
    joules = VECTOR_J_PER_FLOP.get(arch) if dtype == "fp32" else MATRIX_J_PER_FLOP.get(arch)
    if joules is None:
        return None
    halves = 1.0 if dtype == "fp32" else {"fp8": 0.5, "int8": 0.5, "fp4": 0.25, "tf32": 2.0}.get(dtype, 1.0)
    return joules * halves * peak_flops_per_s / tdp_w


def bytes_per_clock(device: Device) -> float:
    """DRAM bytes that are there for an SM in a clock."""
    chip = chip_of(device)
    return chip.dram_bytes_per_s / (chip.num_sms * chip.clock_hz)


def flops_per_j(device: Device) -> float:
    """The matrix peak for a watt of the board's budget."""
    return device.peak_flops_per_s("tensor", "fp16") / device.tdp_w
