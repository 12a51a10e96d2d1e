"""Many imagined devices of one parent at once: the changes of ``override``, and its checks, on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import HardwareError
from ridgeline.hardware.device import Device
from ridgeline.hardware.override import SCALES_WITH_CORES, dimension_of, field_of, read_value

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fleet:
    """Devices by number. ``wrong`` says why one cannot be, and is empty for those that can."""

    parent: Device
    numbers: Mapping[str, Floats]
    wrong: NDArray[np.str_]
    changed: NDArray[np.bool_]
    asked: tuple[str, ...]  # numbers that were changed; others follow

    def __len__(self) -> int:
        return len(self.wrong)

    def part(self, index: NDArray[np.intp]) -> Fleet:
        """Some of the devices."""
        numbers = {field: values[index] for field, values in self.numbers.items()}
        return Fleet(self.parent, numbers, self.wrong[index], self.changed[index], self.asked)


def fleet(parent: Device, changes: Mapping[str, tuple[Floats, bool]], num: int) -> Fleet:
    """``num`` devices: for every change its values (SI units, or factors where the flag says so), one a device."""
    before = parent.numbers()
    numbers = {field: np.full(num, value, dtype=np.float64) for field, value in before.items()}
    wrong, asked = np.full(num, "", dtype=object), dict[str, None]()
    for key, (values, is_factor) in changes.items():
        field = field_of(key)
        if field in asked:
            raise HardwareError(f"{parent.name}: two changes of {field}; give it once")
        asked[field] = None
        dimension, where = dimension_of(field), f"{parent.name} with {key}"
        read_value(before, field, "1x" if is_factor and field in before else dimension.example, where)
        found = values * before.get(field, np.nan) if is_factor else values.astype(np.float64)
        if is_factor and dimension.whole:
            found = np.where(values > 0, np.maximum(1, np.round(found)), found)
        possible = (found >= dimension.least) & (found <= dimension.most)
        if dimension.whole:
            possible &= found == np.trunc(found)
        for value in np.unique(values[~possible]).tolist():
            shown = f"{value:g}x" if is_factor else f"{value:g}"
            wrong[(values == value) & ~possible & (wrong == "")] = (
                f"{where}={shown}: expected {dimension.noun} from {dimension.least:g} to {dimension.most:g}"
            )
        numbers[field] = np.where(possible, found, before.get(field, dimension.least))
    cores, clock = numbers["num_cores"] / before["num_cores"], numbers["boost_hz"] / before["boost_hz"]
    for field in before.keys() - asked.keys():
        is_peak = field.startswith(("tensor.", "vector."))
        if is_peak or field in SCALES_WITH_CORES:
            numbers[field] = numbers[field] * cores
        if is_peak or field in ("l2.bandwidth_bytes_per_s", "shared.bandwidth_bytes_per_s", "base_hz", "tensor_hz"):
            numbers[field] = numbers[field] * clock
    impossible = {
        "idle power is not below TDP; raise tdp or lower idle": numbers["idle_w"] >= numbers["tdp_w"],
        "the l2 would hold more than the whole memory; raise memory or lower l2": (
            numbers["l2.capacity_bytes"] >= numbers["dram.capacity_bytes"]
        ),
        "the base clock is above the boost clock; raise clock or lower base_clock": (
            numbers["base_hz"] > numbers["boost_hz"]
        ),
    }
    for reason, mask in impossible.items():
        wrong[mask & (wrong == "")] = reason
    changed = np.zeros(num, dtype=bool)
    for field, values in numbers.items():
        changed |= values != before.get(field, np.nan)
    return Fleet(parent, numbers, wrong.astype(str), changed, tuple(asked))
