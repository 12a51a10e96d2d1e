"""What a step yields: tokens or images a second, and what a million of them cost."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.prediction import Prediction
from ridgeline.errors import ModelError


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
    family = _family(prediction.graph.name)
    if family is None or "batch" not in meta or prediction.expected_s <= 0:
        return None
    unit, num = _yielded(family, meta["batch"], meta.get("seq", 1), str(meta.get("mode", prediction.graph.mode)))
    return Rate(unit, num, num / prediction.expected_s, prediction.usd / num * 1e6)


def _family(name: str) -> str | None:
    from ridgeline.models.card import find

    try:
        return find(name)[0].family
    except ModelError:
        return None


def _yielded(family: str, batch: int, seq: int, mode: str) -> tuple[str, int]:
    if family in {"llm", "moe", "state-space", "encoder"}:
        return "tokens", batch * (1 if mode == "decode" else seq)
    return (
        "images" if family in {"vision", "detection", "segmentation", "diffusion", "multimodal"} else "samples"
    ), batch
