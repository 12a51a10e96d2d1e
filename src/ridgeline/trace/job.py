"""A job of many ranks, read one rank at a time: what is kept of each is a row and its collectives."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ridgeline.trace.breakdown import Totals, total_of
from ridgeline.trace.collectives import Calls, Collective, Straggler, calls_of, collectives, stragglers
from ridgeline.trace.idle import Cause, idle_causes
from ridgeline.trace.quality import quality
from ridgeline.trace.read import read_ranks
from ridgeline.trace.steps import steps_of
from ridgeline.trace.table import Trace


@dataclass(frozen=True, slots=True)
class RankRow:
    """What one rank did."""

    rank: int
    source: str  # the file
    num_spans: int
    totals: Totals
    linked: Totals
    num_steps: int
    mean_step_s: float  # nan where no steps are marked
    causes: tuple[Cause, ...]
    quality: str  # good, usable or poor


@dataclass(frozen=True, slots=True)
class Job:
    """Every rank's row, and what ranks do together."""

    ranks: tuple[RankRow, ...]
    collectives: tuple[Collective, ...]
    stragglers: tuple[Straggler, ...]

    @property
    def compute_spread_frac(self) -> float:
        """How much more the busiest rank computes than the median one: imbalance."""
        compute = [row.totals.compute_ms for row in self.ranks]
        middle = float(np.median(compute)) if compute else 0.0
        return max(compute) / middle - 1.0 if middle else float("nan")


def survey(paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str], *, cache: bool = False) -> Job:
    """All ranks of a job, a folder or a list of files; memory holds one rank at a time."""
    return survey_traces(read_ranks(paths, cache=cache))


def survey_traces(traces: Iterable[Trace]) -> Job:
    """The same for traces at hand, each with one rank or several."""
    rows: list[RankRow] = []
    calls: list[Calls] = []
    for trace in traces:
        for rank in trace.ranks():
            own = trace if len(trace.ranks()) == 1 else trace.of_rank(rank)
            rows.append(_row(own, rank))
            calls += [_light(found) for found in calls_of(own)]
    rows.sort(key=lambda row: row.rank)
    calls.sort(key=lambda found: found.rank)
    return Job(tuple(rows), tuple(collectives(calls)), tuple(stragglers(calls)))


def _row(trace: Trace, rank: int) -> RankRow:
    found = [step for step in steps_of(trace, rank) if step.number >= 0]
    return RankRow(
        rank=rank,
        source=str(trace.meta.get("source_file", trace.title)),
        num_spans=len(trace),
        totals=total_of(trace, trace.gpu),
        linked=total_of(trace, trace.linked),
        num_steps=len(found),
        mean_step_s=float(np.mean([step.total_s for step in found])) if found else float("nan"),
        causes=tuple(idle_causes(trace)),
        quality=quality(trace).verdict,
    )


def _light(calls: Calls) -> Calls:
    """Columns of their own, so that the trace they came from can go."""
    columns = {
        name: getattr(calls, name).copy() for name in ("start", "end", "num_bytes", "group_size", "exposed", "span")
    }
    return Calls(calls.rank, calls.sort, calls.group, **columns)
