"""Spans on lanes, as columns: one type for a run that was predicted and a run that was measured."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError

Ids = NDArray[np.int32]
Seconds = NDArray[np.float64]
_WORDS = ("name", "lane", "module", "op", "phase")


@dataclass(frozen=True, slots=True)
class Counter:
    """A quantity that holds from each time to the next."""

    at_s: Seconds
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Every span's start, duration and words; words are numbers into ``words``, kept once."""

    title: str
    words: tuple[str, ...]
    name: Ids
    lane: Ids
    module: Ids
    op: Ids
    phase: Ids
    start_s: Seconds
    duration_s: Seconds
    counters: Mapping[str, Counter] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> float:
        """When the last span ends; 0 for an empty trace."""
        return float((self.start_s + self.duration_s).max(initial=0.0))

    def lanes(self) -> list[str]:
        """The lanes in the order in which they first appear."""
        found, first = np.unique(self.lane, return_index=True)
        return [self.words[found[i]] for i in np.argsort(first)]

    def on(self, lane: str) -> NDArray[np.intp]:
        """Indices of a lane's spans in time order."""
        chosen = np.flatnonzero(self.lane == self._id(lane))
        return chosen[np.argsort(self.start_s[chosen], kind="stable")]

    def busy_s(self, lane: str) -> float:
        """Seconds in which at least one span of the lane runs."""
        chosen = self.on(lane)
        start, end = self.start_s[chosen], self.start_s[chosen] + self.duration_s[chosen]
        reached = np.maximum.accumulate(np.concatenate(([-np.inf], end[:-1]))) if len(chosen) else end
        return float(np.maximum(0.0, end - np.maximum(start, reached)).sum())

    def _id(self, word: str) -> int:
        return self.words.index(word) if word in self.words else -1


class TraceBuilder:
    """Collects spans and counters, then freezes them into a Trace."""

    def __init__(self, name: str) -> None:
        self._title = name
        self._ids: dict[str, int] = {}
        self._words = {column: array("i") for column in _WORDS}
        self._start_s, self._duration_s = array("d"), array("d")
        self._counters: dict[str, tuple[array[float], array[float]]] = {}
        self._notes: list[str] = []

    def add(
        self,
        name: str,
        lane: str,
        start_s: float,
        duration_s: float,
        *,
        module: str = "",
        op: str = "",
        phase: str = "",
    ) -> None:
        """One span; time cannot run backward."""
        if not duration_s >= 0.0 or not start_s == start_s:
            raise InputError(
                f"span {name!r} on lane {lane!r} starts at {start_s} s and lasts {duration_s} s: no such time"
            )
        for column, word in zip(_WORDS, (name, lane, module, op, phase), strict=True):
            self._words[column].append(self._ids.setdefault(word, len(self._ids)))
        self._start_s.append(start_s)
        self._duration_s.append(duration_s)

    def count(self, counter: str, at_s: float, value: float) -> None:
        """The counter has this value from ``at_s`` on."""
        times, values = self._counters.setdefault(counter, (array("d"), array("d")))
        times.append(at_s)
        values.append(value)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def build(self) -> Trace:
        columns = {column: np.array(ids, dtype=np.int32) for column, ids in self._words.items()}
        counters = {
            name: Counter(np.array(times), np.array(values)) for name, (times, values) in self._counters.items()
        }
        return Trace(
            self._title,
            tuple(self._ids),
            **columns,
            start_s=np.array(self._start_s),
            duration_s=np.array(self._duration_s),
            counters=counters,
            notes=tuple(self._notes),
        )
