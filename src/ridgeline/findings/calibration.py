"""How far replayed gains are from realized ones, rule by rule: factors on the worst and on the best case, with their
basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trust:
    """A realized gain lies between ``low`` times the worst and ``high`` times the best replayed one."""

    low: float
    high: float
    basis: str


USUAL = Trust(
    0.5,
    1.4,
    "fitted: of 34 causes planted on an H200 the realized gain lay between half the worst and 1.4 times the best "
    "replayed one "
    "in 28; benchmarks/planted_findings.py prints every case",
)
TRUST: Mapping[str, Trust] = {
    "data-loader": Trust(
        0.5, 1.0, "fitted: removing the loader of a recorded ResNet-50 (V100) replays to 1.50x, more workers gave 1.26x"
    ),
    "weight-casts": Trust(0.5, 1.7, "fitted: two recordings on an H200 gained 1.41 and 1.44 times the replayed best"),
    "recompute": Trust(0.5, 1.7, "fitted: one recording on an H200 gained 1.49 times the replayed best"),
    "launch-bound": Trust(
        0.5, 1.15, "fitted: three recordings on an H200 lay between the worst and the best replayed gain"
    ),
}


def trust(rule: str) -> Trust:
    return TRUST.get(rule, USUAL)
