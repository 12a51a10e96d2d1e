"""What a trace means: the cause of lost time, where it is, what removes it and how much that brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Where:
    """The place in the user's program, as far as the trace knows it."""

    module: str = ""
    source: str = ""
    op: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        parts = [self.module, self.source, self.op]
        place = " · ".join(part for part in parts if part) or "the whole step"
        return place if self.rank is None else f"rank {self.rank}: {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another cause that a finding's time may have: what speaks for it, what to change then, what that brings, and what
    tells the two apart. It is no further finding, and its milliseconds are not added to any."""

    rule: str
    what: str
    cause: str
    change: str
    tell: str
    low_ms: float
    high_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time; milliseconds are of one step.

    ``low_ms`` to ``high_ms`` is what the change brings on its own; ``later_ms`` is the most it brings once the findings
    above it are fixed, when another bottleneck no longer hides it.
    """

    rule: str
    version: int
    what: str
    where: Where
    cause: str
    change: str
    low_ms: float
    high_ms: float
    expected_ms: float
    later_ms: float
    step_frac: float  # of the step, what it brings at best and on its own, without noise
    in_turn_ms: float = 0.0  # what it adds at best to the findings above it
    evidence: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[int, ...] = ()  # spans of the trace that the evidence stands for
    changed: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp), repr=False, compare=False)
    """Device spans that the change removes or shortens."""
    frees_host: bool = True  # the change also removes host time or waiting
    unchecked: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()  # for the same time
    basis: str = "assumed"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the place is one string and its parts."""
        document = asdict(self)
        document["where"] = str(self.where)
        document["place"] = asdict(self.where)
        for name in ("rows", "changed", "frees_host"):
            del document[name]
        return document


def clipped(finding: Finding, most_ms: float) -> Finding:
    """The finding with no promise above this, such as its step or the bar of time that it explains."""
    low_ms, high_ms = min(finding.low_ms, most_ms), min(finding.high_ms, most_ms)
    return replace(
        finding,
        low_ms=low_ms,
        high_ms=high_ms,
        expected_ms=min(finding.expected_ms, most_ms),
        later_ms=min(finding.later_ms, most_ms),
        in_turn_ms=min(finding.in_turn_ms, most_ms),
    )


def together_ms(findings: Sequence[Finding]) -> float:
    """What findings bring together, by their best estimates: two that free the same time do not bring it twice."""
    alone_ms = [finding.expected_ms for finding in findings]
    in_turn_ms = sum(finding.in_turn_ms for finding in findings)
    return min(sum(alone_ms), max(in_turn_ms, *alone_ms)) if alone_ms else 0.0
