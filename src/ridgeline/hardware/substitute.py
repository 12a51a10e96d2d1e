"""What really computes a dtype on a unit that has no peak for it: the widening rules, tried in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class StandIn(NamedTuple):
    """The peak used instead, scaled by ``factor``, and why."""

    unit: str
    dtype: str
    factor: float
    why: str


def _same(unit: str, dtype: str, why: str) -> StandIn:
    return StandIn(unit, dtype, 1.0, why)


_FP32 = _same("vector", "fp32", "runs on vector fp32")
_UPCAST = _same("vector", "fp32", "converted to fp32 and run on vector fp32")
_INTEGER = StandIn("vector", "fp32", 0.5, "one operation a lane and clock, half of vector fp32 where an FMA counts two")
_INT32 = _same("vector", "int32", "runs at the vector int32 rate")

_RULES: dict[tuple[str, str], tuple[StandIn, ...]] = {
    ("tensor", "fp64"): (_same("vector", "fp64", "runs on vector fp64"),),
    ("tensor", "fp32"): (_FP32,),
    ("tensor", "tf32"): (_same("tensor", "fp32", "runs as fp32"), _FP32),
    ("tensor", "fp16"): (_same("vector", "fp16", "runs on vector fp16"), _UPCAST),
    ("tensor", "bf16"): (_same("vector", "bf16", "runs on vector bf16"), _UPCAST),
    ("tensor", "fp8_e5m2"): (_same("tensor", "fp8", "both fp8 formats share a rate"),),
    ("tensor", "int8"): (_same("vector", "int8", "runs on vector int8 dot products"),),
    ("tensor", "uint8"): (
        _same("tensor", "int8", "signed and unsigned share a rate"),
        _same("vector", "int8", "signed and unsigned share a rate"),
    ),
    ("tensor", "complex64"): (_FP32,),
    ("tensor", "complex128"): (_same("tensor", "fp64", "runs as fp64"), _same("vector", "fp64", "runs on vector fp64")),
    ("vector", "tf32"): (_FP32,),
    ("vector", "fp16"): (_UPCAST,),
    ("vector", "bf16"): (_UPCAST,),
    ("vector", "fp8"): (_UPCAST,),
    ("vector", "fp8_e5m2"): (_UPCAST,),
    ("vector", "fp6"): (_UPCAST,),
    ("vector", "fp4"): (_UPCAST,),
    ("vector", "int32"): (_INTEGER,),
    ("vector", "int16"): (_INT32, _INTEGER),
    ("vector", "int8"): (_INT32, _INTEGER),
    ("vector", "uint8"): (_INT32, _INTEGER),
    ("vector", "int4"): (_INT32, _INTEGER),
    ("vector", "bool"): (_INT32, _INTEGER),
    ("vector", "int64"): (
        StandIn("vector", "int32", 0.5, "two int32 operations each"),
        StandIn("vector", "fp32", 0.25, "two integer operations each, at half of vector fp32"),
    ),
    ("vector", "complex64"): (_FP32,),
    ("vector", "complex128"): (_same("vector", "fp64", "runs on vector fp64"),),
}


def substitute(unit: str, dtype: str, peaks: Mapping[tuple[str, str], float]) -> StandIn | None:
    """The first rule whose peak the device has; None when the device cannot do it at all."""
    rules = _RULES.get((unit, dtype), ())
    return next((rule for rule in rules if (rule.unit, rule.dtype) in peaks), None)
