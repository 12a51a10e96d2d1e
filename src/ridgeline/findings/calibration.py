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
    0.65,
    1.4,
    "fitted: with these factors the interval held what the fix brought in 32 of 35 causes planted on an H200",
)
TRUST: Mapping[str, Trust] = {
    "data-loader": Trust(
        0.5, 1.0, "fitted: removing the loader of a recorded ResNet-50 (V100) replays to 1.50x, more workers gave 1.26x"
    ),
    "padding": Trust(
        0.4, 1.2, "fitted: one recording on an H200, whose fix left half of the padding, gained 0.7 of the worst"
    ),
    "weight-casts": Trust(0.65, 1.7, "fitted: two recordings on an H200 gained 1.41 and 1.44 times the replayed best"),
    "recompute": Trust(0.65, 1.7, "fitted: one recording on an H200 gained 1.49 times the replayed best"),
    "pipeline-bubble": Trust(0.65, 1.0, "assumed: a schedule without bubbles is the best there is"),
    "launch-bound": Trust(0.65, 1.15, "fitted: three recordings on an H200 lay between the replayed worst and best"),
    "weight-streaming": Trust(
        0.65, 1.1, "fitted: one recording on an H200 gained 0.98 of the replayed best, all copies gone"
    ),
}
"""``benchmarks/planted_findings.py`` prints every case behind these."""


def trust(rule: str) -> Trust:
    return TRUST.get(rule, USUAL)
