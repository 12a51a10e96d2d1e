"""What a change would do to a replay, at best and at worst, and which time it lays claim to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.replay.replay import Edit, Index, Mask, Program, Seconds, no_edit
from ridgeline.trace.intervals import NONE as NO_TIME
from ridgeline.trace.intervals import Intervals, covered_within, difference, union

EMPTY: Index = np.zeros(0, dtype=np.int64)
NOWHERE = Intervals(NO_TIME, NO_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What remains after the change: a share of some work and of some host time, without some waits.

    ``keep_best`` and ``keep_worst`` are the shares of the works' duration that remain, one number or one for each;
    ``aside`` is work that no longer holds up its stream at best, and stays where it is at worst.
    """

    works: Index = field(default_factory=lambda: EMPTY)
    keep_best: Seconds | float = 1.0
    keep_worst: Seconds | float = 1.0
    host: Intervals = NOWHERE
    host_best: float = 1.0
    host_worst: float = 1.0
    spare: Intervals = NOWHERE  # host time that goes with it at best, and stays at worst
    freed: Index = field(default_factory=lambda: EMPTY)
    aside: Index = field(default_factory=lambda: EMPTY)
    aside_at_worst: bool = False
    closed: Index = field(default_factory=lambda: EMPTY)  # at best no longer waits before it starts
    elastic: bool = False  # the host time is waiting for others who run on: time won elsewhere is waited here

    @property
    def is_empty(self) -> bool:
        parts = (self.works, self.host.start, self.freed, self.aside, self.closed)
        return not any(len(part) for part in parts)


@dataclass(slots=True)
class TimeBudget:
    """Who has claimed which work, wait and host time: nothing is promised twice."""

    works: Mask
    calls: Mask
    host: Intervals = NOWHERE

    def left_for(self, fix: Fix) -> Fix:
        """What is left of the fix after earlier claims."""
        free = ~self.works[fix.works]
        return replace(
            fix,
            works=fix.works[free],
            keep_best=_chosen(fix.keep_best, free),
            keep_worst=_chosen(fix.keep_worst, free),
            host=difference(fix.host, self.host),
            spare=difference(difference(fix.spare, fix.host), self.host),
            freed=fix.freed[~self.calls[fix.freed]],
            aside=fix.aside[~self.works[fix.aside]],
        )

    def spend(self, fix: Fix) -> Fix:
        """What is left of the fix; it is claimed now."""
        left = self.left_for(fix)
        self.works[left.works] = True
        self.works[left.aside] = True
        self.calls[left.freed] = True
        self.host = joined(self.host, left.host, left.spare)
        return left


def joined(*parts: Intervals) -> Intervals:
    """The time that any of them covers."""
    return union(np.concatenate([part.start for part in parts]), np.concatenate([part.end for part in parts]))


def _chosen(keep: Seconds | float, mask: Mask) -> Seconds | float:
    return keep[mask] if isinstance(keep, np.ndarray) else keep


def time_budget(program: Program) -> TimeBudget:
    return TimeBudget(np.zeros(program.num_works, dtype=bool), np.zeros(program.num_calls, dtype=bool))


@dataclass(frozen=True, slots=True)
class HostClock:
    """Where on the trace's clock each call's host time lies: the gap before it and the call itself."""

    gap_start_ns: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    def cut(self, host: Intervals, keep: float) -> tuple[Seconds, Seconds]:
        """Shares cut of the time before and inside each call when only a share of this host time is kept."""
        before = covered_within(host, self.gap_start_ns, self.start_ns) / np.maximum(
            1, self.start_ns - self.gap_start_ns
        )
        inside = covered_within(host, self.start_ns, self.end_ns) / np.maximum(1, self.end_ns - self.start_ns)
        return np.asarray(before * (1.0 - keep)), np.asarray(inside * (1.0 - keep))


def edit_of(fix: Fix, program: Program, clock: HostClock, *, best: bool) -> Edit:
    """The change to the replay, at its best or at its worst."""
    edit = no_edit(program)
    scale, aside, freed = edit.scale, edit.aside, edit.freed
    edit.closed[fix.closed if best else EMPTY] = True
    scale[fix.works] = fix.keep_best if best else fix.keep_worst
    if best or fix.aside_at_worst:
        aside[fix.aside] = True
    freed[fix.freed] = True
    before, inside = clock.cut(fix.host, fix.host_best if best else fix.host_worst)
    if best and len(fix.spare.start):
        more_before, more_inside = clock.cut(fix.spare, fix.host_best)
        before, inside = before + more_before, inside + more_inside
    return replace(edit, cut_before=before, cut_inside=inside)
