"""Numbers with the unit they must have: what a device file or an override may say, and what is nonsense."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ridgeline.errors import HardwareError, UnitError
from ridgeline.units import parse_quantity

_NUMBER = r"[-+]?(?:\d[\d_]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_PREFIX = r"(?:[kKMGTPE]|Ki|Mi|Gi|Ti|m|u|µ|n)?"
_FACTOR = re.compile(rf"^\s*({_NUMBER})\s*[x×X]\s*$")


@dataclass(frozen=True, slots=True)
class Dimension:
    """A kind of quantity: how its unit is written, an example, and the range outside which it is a typing mistake."""

    noun: str
    example: str
    units: tuple[str, ...]
    least: float
    most: float
    whole: bool = False

    def read(self, value: object, where: str, *, unit_required: bool = False) -> float:
        """The SI value of ``value`` (a number, or text with a unit), refused when unit or size cannot be right."""
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise HardwareError(f"{where}: expected {self.noun} such as {self.example}, found {value!r}")
        if isinstance(value, str):
            return self.check(self._from_text(value, where, unit_required), where, value)
        if unit_required and self.units:
            raise HardwareError(f"{where}: {value!r} has no unit; write {self.noun} as text such as {self.example!r}")
        return self.check(float(value), where, value)

    def check(self, number: float, where: str, written: object) -> float:
        """``number`` if it is possible for this kind of quantity."""
        if not self.least <= number <= self.most:  # also refuses nan
            raise HardwareError(
                f"{where}: {written!r} cannot be {self.noun}; expected one such as {self.example},"
                f" from {self.least:g} to {self.most:g}"
            )
        if self.whole and number != int(number):
            raise HardwareError(f"{where}: {written!r} must be a whole number, such as {self.example}")
        return number

    def _from_text(self, text: str, where: str, unit_required: bool) -> float:
        clean = self._without_money_marks(text) if "USD" in self.units else text
        if not _pattern(self.units, unit_required).match(clean):
            raise HardwareError(f"{where}: cannot read {text!r} as {self.noun}; write it such as {self.example}")
        try:
            return parse_quantity(clean)
        except UnitError as error:
            raise HardwareError(f"{where}: {error}") from error

    @staticmethod
    def _without_money_marks(text: str) -> str:
        return re.sub(r"\s*/\s*(h|hr|hour)\s*$", "", text.strip().removeprefix("$"))


@cache
def _pattern(units: tuple[str, ...], unit_required: bool) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(unit) for unit in units)
    optional = "" if unit_required and units else "?"
    return re.compile(rf"^\s*{_NUMBER}\s*{_PREFIX}(?:{alternatives}){optional}\s*$")


COUNT = Dimension("a count", "132", (), 1, 1e7, whole=True)
BYTES = Dimension("a capacity in bytes", "100MB", ("B",), 1e3, 1e15)
BANDWIDTH = Dimension("a bandwidth in bytes per second", "4.8TB/s", ("B/s", "bit/s", "bps"), 1e8, 1e17)
RATE = Dimension("a rate in operations per second", "989TFLOP/s", ("FLOP/s", "FLOPS", "OP/s", "OPS"), 1e8, 1e20)
CLOCK = Dimension("a clock in hertz", "1980MHz", ("Hz",), 1e7, 1e11)
POWER = Dimension("a power in watts", "700W", ("W",), 0.1, 1e6)
PRICE = Dimension("a price in USD per hour", "3.99USD", ("USD",), 1e-4, 1e5)


def factor_of(value: object) -> float | None:
    """``'2x'`` → 2.0; None when ``value`` is not written as a factor."""
    match = _FACTOR.match(value) if isinstance(value, str) else None
    return float(match.group(1).replace("_", "")) if match else None
