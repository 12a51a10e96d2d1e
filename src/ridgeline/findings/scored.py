"""A suspicion scored: what its change brings alone, by replay, and the finding that this makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.gains import (
    edit_for,
    gains_s,
    longest_step_s,
    most_gain_s,
    pace_of,
    step_noise_s,
    unrecorded_step_s,
    usual_gain_s,
)
from ridgeline.findings.context.host_time import is_fed_late
from ridgeline.findings.finding import Finding
from ridgeline.findings.replay.calibration import UNMEASURED_FRAC, Trust
from ridgeline.findings.replay.replay import Edit
from ridgeline.findings.rule import Rule


@dataclass(frozen=True, slots=True)
class Scored:
    """A suspicion with its edits and what they bring alone, in seconds a step."""

    rule: Rule
    candidate: Candidate
    best: Edit
    worst: Edit
    best_s: float
    worst_s: float
    likely_s: tuple[float, float]  # worst and best by the likeliest host alone; what is thought of them together
    surely_s: float  # worst by the likeliest host where the step does not tell how fast its host is

    @property
    def trust(self) -> Trust:
        return self.candidate.trust or self.rule.trust

    @property
    def expected_s(self) -> float:
        """The middle of what the likeliest host gives."""
        trusted = self.trust
        return (trusted.low * self.likely_s[0] + trusted.high * self.likely_s[1]) / 2


def scored_of(context: TraceContext, rule: Rule, candidate: Candidate) -> Scored:
    """A suspicion with what it brings at best and at worst, by every host that is thought possible."""
    best, worst = edit_for(context, candidate.fix, best=True), edit_for(context, candidate.fix, best=False)
    best_gains_s, worst_gains_s = gains_s(context, best), gains_s(context, worst)
    # Whether workers set the pace that the change would free.
    most_s = (
        usual_gain_s(context, best) if (candidate.fix.elastic and (context.is_timed or is_fed_late(context))) else 0.0
    )
    best_s, worst_s = max(*best_gains_s, *worst_gains_s, most_s), min(*best_gains_s, *worst_gains_s)
    likely_s = (worst_s, best_s) if context.is_timed else (worst_gains_s[0], max(best_gains_s[0], most_s))
    surely_s = worst_gains_s[-1] if context.is_timed else worst_gains_s[0]
    return Scored(rule, candidate, best, worst, best_s, worst_s, likely_s, surely_s)


def finding_of(context: TraceContext, found: Scored, in_turn_s: float) -> Finding:
    """What a change promises on its own, with what it adds to those above it."""
    trusted = found.trust
    step_s = unrecorded_step_s(context)
    had_s = most_gain_s(context, found.candidate.fix)
    best_s = min(trusted.high * found.best_s * pace_of(context), had_s, longest_step_s(context))
    beyond = min(1.0, had_s / max(1e-12, found.best_s * pace_of(context)))  # a replay may promise more than there is
    worst_s = min(best_s, beyond * trusted.low * found.worst_s * pace_of(context))
    noise_s = min(step_noise_s(context), max(best_s, UNMEASURED_FRAC * step_s))
    more = found.rule.slack
    high_s = min(longest_step_s(context), (1.0 + more) * best_s + noise_s)
    low_s = max(0.0, (1.0 - more) * worst_s - noise_s)
    candidate, fix = found.candidate, found.candidate.fix
    likely_s = tuple(min(best_s, factor * gain_s * pace_of(context))
                     for factor, gain_s in zip((trusted.low, trusted.high), found.likely_s, strict=True))  # fmt: skip
    return Finding(
        rule=found.rule.name,
        version=found.rule.version,
        what=candidate.what,
        where=candidate.where,
        cause=candidate.cause,
        change=candidate.change,
        low_ms=low_s * 1e3,
        high_ms=high_s * 1e3,
        expected_ms=min(high_s, sum(likely_s) / 2) * 1e3,
        later_ms=max(high_s, in_turn_s * pace_of(context)) * 1e3,
        in_turn_ms=in_turn_s * pace_of(context) * 1e3,
        step_frac=min(1.0, best_s / step_s) if step_s > 0 else 0.0,
        evidence=candidate.evidence,
        rows=candidate.spans,
        changed=context.rows[np.union1d(fix.works, fix.aside)],
        frees_host=any(len(part) for part in (fix.host.start, fix.spare.start, fix.freed, fix.closed)),
        unchecked=candidate.unchecked,
        basis=trusted.basis,
    )
