"""Coefficients of one device put to work on another of its kin: what clocks, power budgets and special units change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.hardware import Device

PACED = frozenset({"launch_s", "fanout_s", "gap_s", "split_s", "splitk_s"})
"""Latencies of so many clocks: a launch of a product is 3,500 to 4,900 of them on four architectures, 4.3 to 1.6 µs."""
EXPONENTIAL_RATE = {"b300": 2.0, "gb300": 2.0}
"""Exponentials an SM computes per clock, over its kin (vendor's description of Blackwell Ultra's special units)."""
FAMILIES = ("gemm", "attention")


def borrowed(families: Mapping[str, Mapping[str, Any]], donor: Device, device: Device) -> dict[str, Mapping[str, Any]]:
    """The donor's families as they are expected to be on ``device``."""
    found = dict(families)
    for name in FAMILIES:
        if name in found:
            found[name] = {key: _entry(entry, donor, device) for key, entry in found[name].items()}
    return found


def _entry(entry: Mapping[str, Any], donor: Device, device: Device) -> dict[str, Any]:
    return {**entry, "coef": adapted(entry["coef"], donor, device)}


def adapted(coef: Mapping[str, float], donor: Device, device: Device) -> dict[str, float]:
    """Latencies follow the clock, the power wanted follows the peak over the board's budget."""
    slower = donor.boost_hz / device.boost_hz
    hungrier = _flops_per_j(device) / _flops_per_j(donor)
    exponentials = EXPONENTIAL_RATE.get(device.name, 1.0) / EXPONENTIAL_RATE.get(donor.name, 1.0)
    factors = dict.fromkeys(PACED, slower) | {"power_frac": hungrier, "exp_per_clock": exponentials}
    return {name: value * factors.get(name, 1.0) for name, value in coef.items()}


def _flops_per_j(device: Device) -> float:
    return device.peak_flops_per_s("tensor", "fp16") / device.tdp_w
