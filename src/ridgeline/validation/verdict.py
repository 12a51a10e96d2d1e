"""Published rows beside predictions: what an adapter returns, and the scores made of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ridgeline.validation.operators import Score


class Row(NamedTuple):
    """One line of a published file: its line number and its columns, as text."""

    line: int
    columns: Mapping[str, str]

    def text(self, name: str) -> str:
        """The column, stripped; empty when the file has none."""
        return self.columns.get(name, "").strip()

    def number(self, name: str) -> float | None:
        """The column as a number; None when it is empty or says something else."""
        try:
            value = float(self.text(name).replace(",", "").lstrip("~≈ "))
        except ValueError:
            return None
        return value if value == value and abs(value) != float("inf") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A published number beside ours, both in ``unit``; ``key`` names the row across versions of file and model."""

    row: int
    key: str
    source: str
    what: str  # the configuration in a few words, for the list of the worst
    metric: str
    unit: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def ape(self) -> float:
        return abs(self.error)

    @property
    def inside(self) -> bool:
        return bool(self.low <= self.measured <= self.high)  # the ends may be numpy's, whose bool JSON does not know

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "ape": self.ape, "inside": self.inside}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """A published row that could not be judged, and why."""

    row: int
    source: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        return {"row": self.row, "source": self.source, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheck:
    """Every row of a published file, judged or set aside with its reason."""

    name: str
    rows: tuple[Judged, ...]
    unused: tuple[Unused, ...]

    @property
    def all(self) -> Score | None:
        return judged_score(self.rows) if self.rows else None

    def by(self, key: str = "source") -> dict[str, Score]:
        """Scores grouped by ``source`` or ``metric``, in the order of their names."""
        groups: dict[str, list[Judged]] = {}
        for row in self.rows:
            groups.setdefault(getattr(row, key), []).append(row)
        return {name: judged_score(groups[name]) for name in sorted(groups)}

    def worst(self, num: int = 10) -> list[Judged]:
        return sorted(self.rows, key=lambda row: -row.ape)[:num]

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "all": _score_dict(self.all),
            "by": {name: _score_dict(found) for name, found in self.by().items()},
            "by_metric": {name: _score_dict(found) for name, found in self.by("metric").items()},
            "rows": [row.to_dict() for row in self.rows],
            "unused": [row.to_dict() for row in self.unused],
        }


def _score_dict(found: Score | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: getattr(found, name) for name in ("n", "mape", "median_ape", "bias", "coverage")}


def judged_score(rows: Sequence[Judged]) -> Score:
    """Mean and median absolute percentage error, bias and coverage."""
    apes = [row.ape for row in rows]
    return Score(
        len(rows),
        statistics.fmean(apes),
        statistics.median(apes),
        statistics.fmean(row.error for row in rows),
        statistics.fmean(row.inside for row in rows),
    )
