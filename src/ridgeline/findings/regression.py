"""Gating runs from files: step times of every run a side, the verdict, and what changed between two typical runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import FindingError
from ridgeline.findings.diff import Change, Difference, diff, idle_by_cause
from ridgeline.findings.gate import Verdict, gate
from ridgeline.findings.labels import spoken
from ridgeline.result import Result
from ridgeline.trace.read import read, trace_files
from ridgeline.trace.steps import steps
from ridgeline.trace.table import Trace

WARM_UP = 1
"""Steps at the start of a run that do not count, when there are enough others."""


@dataclass(frozen=True, slots=True, repr=False)
class Gate(Result):
    """The verdict with its reasons; ``difference`` is missing where only step times were given."""

    verdict: Verdict
    difference: Difference | None

    @property
    def failed(self) -> bool:
        return self.verdict.failed

    @property
    def causes(self) -> tuple[Change, ...]:
        """What moved the step most, in the direction of the verdict."""
        if self.difference is None:
            return ()
        slower = self.verdict.slowdown_frac > 0
        return tuple(change for change in self.difference.changes if (change.delta_ms > 0) == slower)[:3]

    @property
    def message(self) -> str:
        """One line for a log: the verdict, by how much, and the root cause."""
        v = self.verdict
        moved = f"{v.slowdown_frac:+.1%} ({v.low_frac:+.1%} to {v.high_frac:+.1%}; {v.max_frac:.1%} allowed)"
        head = f"{v.verdict}: step {v.baseline_s * 1e3:.4g} → {v.runs_s * 1e3:.4g} ms, {moved}"
        because = "; ".join(f"{spoken(c.key)} {c.delta_ms:+.3g} ms, {c.why}" for c in self.causes)
        return f"{head}; {because}" if because and v.verdict in ("regression", "improvement", "inconclusive") else head

    def summary(self) -> str:
        return self.message

    def records(self) -> list[dict[str, Any]]:
        """One row a cause."""
        return [cause.to_dict() for cause in self.causes]

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.verdict.to_dict(),
            "message": self.message,
            "causes": [cause.to_dict() for cause in self.causes],
            "difference": self.difference.to_dict() if self.difference else None,
        }


def gate_runs(baseline: Path, runs: Path, max_frac: float) -> Gate:
    """Read both sides and compare."""
    before, after = runs_of(baseline), runs_of(runs)
    found = gate([run.steps_s for run in before], [run.steps_s for run in after], max_frac)
    a, b = _typical(before), _typical(after)
    difference = diff(a.trace(), b.trace(), idle_by_cause) if a.file and b.file else None
    return Gate(found, difference)


@dataclass(frozen=True, slots=True)
class Run:
    """Step times of one run, and the trace they are from, if any."""

    name: str
    steps_s: tuple[float, ...]
    file: Path | None = None

    def trace(self) -> Trace:
        if self.file is None:
            raise FindingError(f"run {self.name} has step times and no trace: give traces to learn what changed")
        return read(self.file)


def runs_of(path: Path) -> list[Run]:
    """A trace a run from a folder, or lists of step times from a JSON file."""
    if not path.exists():
        raise FindingError(f"{path} does not exist: give a folder of traces, one a run, or a JSON file of step times")
    if path.is_file() and (listed := _listed(path)) is not None:
        return listed
    runs = [
        Run(file.name, _steady([step.total_s for step in steps(read(file)) if step.total_s > 0]), file)
        for file in trace_files(path)
    ]
    empty = [run.name for run in runs if not run.steps_s]
    if empty:
        raise FindingError(f"no steps and no device work in {', '.join(empty[:3])}: nothing to compare")
    return runs


def _listed(path: Path) -> list[Run] | None:
    """Step times as JSON: a list of seconds for every run, by name or in order; None if it is something else."""
    if path.suffix != ".json" or path.stat().st_size > 50_000_000:
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    named = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    runs = [
        Run(str(name), _steady(times))
        for name, times in named
        if (isinstance(times, list) and bool(times) and all(isinstance(x, (int, float)) and x > 0 for x in times))
    ]
    if runs and len(runs) == len(document):
        return runs
    if isinstance(document, list) and not any(isinstance(part, dict) for part in document):
        raise FindingError(
            f"{path} is a list, but not of step times: write a list of seconds for every run, such as "
            "[[0.0201, 0.0199], [0.0203, 0.0200]], all above zero"
        )
    return None


def _steady(times_s: Sequence[float]) -> tuple[float, ...]:
    """Without the warm-up, when three or more steps are left."""
    return tuple(times_s[WARM_UP:] if len(times_s) >= WARM_UP + 3 else times_s)


def _typical(runs: Sequence[Run]) -> Run:
    """The run in the middle."""
    order = sorted(runs, key=lambda run: float(np.median(run.steps_s)))
    return order[len(order) // 2]
