"""Pricing calls on a device: the family's time model under the device's calibration, remembered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost import (  # noqa: F401  (each registers its family)
    attention_calls,
    conv,
    indexing,
    interval,
    matmul,
    multitensor,
    norm,
    ordering,
    pooling,
    recurrent,
    reduction,
    roofline,
    softmax,
    stream,
    weightnorm,
)
from ridgeline.cost.calibration import Calibration, calibration_of
from ridgeline.cost.call import Call, Time, family_of
from ridgeline.cost.chip import Chip, chip_of
from ridgeline.hardware import Device

WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Price:
    """A priced call with where its coefficients come from."""

    time: Time
    basis: Basis
    family: str
    width: float  # log half-width of the 90 % interval


class Pricer:
    """Prices calls on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.chip: Chip = chip_of(device)
        self.calibration: Calibration = calibration_of(device)
        self.lowered: dict[tuple[object, ...], Any] = {}  # what nodes of equal meaning lower to
        self._prices: dict[tuple[Call, int], Price] = {}

    def price(self, call: Call, warm_frac: float = 0.0) -> Price:
        """What the call takes with this share of its inputs in L2 already."""
        step = round(warm_frac * WARM_STEPS)
        key = (call, step)
        found = self._prices.get(key)
        if found is None:
            found = self._priced(call, step / WARM_STEPS)
            if len(self._prices) > 200_000:
                self._prices.clear()
            self._prices[key] = found
        return found

    def _priced(self, call: Call, warm_frac: float) -> Price:
        family = family_of(call.kind)
        coef, basis = self.calibration.coef(family, call)
        time = family.model(call, self.chip, coef, warm_frac)
        return Price(
            time,
            basis,
            family.name,
            interval.half_width(self.calibration.intervals, call, family.name, basis, time.busy_s),
        )


@lru_cache(maxsize=32)
def pricer_of(device: Device) -> Pricer:
    return Pricer(device)
