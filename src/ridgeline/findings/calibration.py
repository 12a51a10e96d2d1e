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
    0.9,
    1.25,
    "fitted: of 67 causes planted on an H200, 55 gained what the replay has between its worst and its best, and all "
    "0.9 to 1.25 times that, beside what a step varies by itself",
)
TRUST: Mapping[str, Trust] = {
    "data-loader": Trust(
        0.6,
        1.05,
        "fitted: four workers gave a recorded ResNet-50 (V100) 0.65 of what a loader without any wait would",
    ),
    "padding": Trust(
        0.6, 1.2, "fitted: one recording on an H200, whose fix left half of the padding, gained 0.7 of the worst"
    ),
    "recompute": Trust(
        0.85,
        1.65,
        "fitted: recordings on an H200 gained 1.59 and 1.08 times the replayed best: hooks on saved tensors cost the "
        "forward pass as well",
    ),
    "exposed-copies": Trust(
        0.5,
        1.1,
        "fitted: one recording on an H200 gained 0.68 of the replay: copies take bandwidth from kernels beside them",
    ),
    "launch-bound": Trust(0.8, 1.15, "fitted: five recordings on an H200 gained up to 1.11 of the replayed best"),
    "pipeline-bubble": Trust(0.65, 1.0, "assumed: a schedule without bubbles is the best there is"),
}
"""``benchmarks/planted_findings.py`` prints every case behind these."""


def trust(rule: str) -> Trust:
    return TRUST.get(rule, USUAL)
