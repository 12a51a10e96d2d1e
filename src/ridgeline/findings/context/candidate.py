"""What a rule suspects, before it is scored against the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.findings.finding import Where
from ridgeline.findings.replay.calibration import Trust
from ridgeline.findings.replay.fix import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a rule suspects, before it is scored against the others."""

    what: str
    cause: str
    change: str
    where: Where
    fix: Fix
    evidence: tuple[dict[str, Any], ...] = ()
    spans: tuple[int, ...] = ()
    unchecked: tuple[str, ...] = ()
    trust: Trust | None = None  # where this form of a cause is known better than its rule
    least_frac: float = 0.02  # of the step, from which on it is worth a sentence
    sure_frac: float = 0.0  # of the step, what it must bring at worst: for what every eager program has some of
