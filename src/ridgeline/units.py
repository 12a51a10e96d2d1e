"""Quantities in SI inside, converted only here and where they are drawn."""

from __future__ import annotations

import math
import re

from ridgeline.errors import UnitError

KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
           "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9,
           "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}  # fmt: skip
_NUMBER = re.compile(r"^\s*([-+]?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(.*?)\s*$")
_UNITS = ("FLOP/s", "FLOPS", "FLOP", "OP/s", "OPS", "B/s", "bit/s", "bps", "Hz", "B", "s", "W", "J", "USD", "")


def parse_quantity(text: str) -> float:
    """``'100MB'`` → 1e8, ``'4.8TB/s'`` → 4.8e12, ``'1980MHz'`` → 1.98e9, ``'96Mi'`` → 96·2²⁰, ``'700'`` → 700."""
    match = _NUMBER.match(text)
    if not match:
        raise UnitError(f"cannot read {text!r} as a quantity: write a number and an optional unit, as 100MB or 4.8TB/s")
    number, suffix = float(match.group(1).replace("_", "")), match.group(2)
    if math.isinf(number):
        raise UnitError(f"{text!r} is too large to be a quantity: write a number such as 100MB or 4.8TB/s")
    for unit in _UNITS:
        if suffix.endswith(unit):
            prefix = suffix[: len(suffix) - len(unit)] if unit else suffix
            if prefix in _PREFIX:
                return number * _PREFIX[prefix] / (8 if unit in ("bit/s", "bps") else 1)
    raise UnitError(f"unknown unit {suffix!r} in {text!r}: use B, B/s, FLOP/s, Hz, s, W or J with k M G T or Ki Mi Gi")


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for scale, unit in steps:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) / scale < 999.5 else f"{value / scale:,.0f} {unit}"
    scale, unit = steps[-1]
    return f"{value / scale:.3g} {unit}"


def show_ms(value_s: float) -> str:
    """Milliseconds to three digits, never with an exponent: ``3,360 ms``."""
    value = value_s * 1e3
    return f"{value:,.0f} ms" if value >= 999.5 else f"{value:.3g} ms"


def show_seconds(value_s: float) -> str:
    return "0 s" if value_s == 0 else _scaled(value_s, [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])


def show_bytes(value_bytes: float) -> str:
    return _scaled(value_bytes, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])


def show_flops(value_flops: float) -> str:
    return _scaled(value_flops, [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")])


def show_joules(value_j: float) -> str:
    return _scaled(value_j, [(1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")])


def show_usd(value_usd: float) -> str:
    return f"${value_usd:,.2f}" if value_usd >= 1 else f"${value_usd:.3g}"
