"""What a step yields: tokens or images a second, and what a million of them cost."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.prediction import Prediction
from ridgeline.models.card import yielded


@dataclass(frozen=True, slots=True)
class Rate:
    """``num`` things a step; ``per_s`` of them every second."""

    unit: str
    num: int
    per_s: float
    usd_per_million: float


def rate_of(prediction: Prediction) -> Rate | None:
    """Tokens, images or samples a second where the zoo knows what a step holds, else None."""
    meta = prediction.graph.meta
    found = yielded(prediction.graph.name, meta, str(meta.get("mode", prediction.graph.mode)))
    if found is None or prediction.expected_s <= 0:
        return None
    unit, num = found
    return Rate(unit, num, num / prediction.expected_s, prediction.usd / num * 1e6)
