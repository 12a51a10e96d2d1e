"""What else a finding's time may be lost to: causes with evidence of their own that the finding left nothing to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.gains import budget_s, step_after_s, unrecorded_step_s
from ridgeline.findings.finding import Alternative, Finding
from ridgeline.findings.rule import Rule, rule_named
from ridgeline.findings.scored import Scored, finding_of, scored_of

AS_MUCH = 0.5
"""Of what a finding is expected to bring, what another cause must bring to be meant by the same time."""


def with_alternatives(
    context: TraceContext,
    told: Sequence[Finding],
    scored: Sequence[Scored],
    asked: Sequence[tuple[Rule, Candidate | None]],
) -> list[Finding]:
    """Findings with what their time may be lost to instead; none is added, taken away or moved."""
    step_ms = unrecorded_step_s(context) * 1e3
    # Of the step: a smaller finding is not worth a second thought.
    doubtful = [one for one in told if rule_named(one.rule).is_ambiguous and one.expected_ms >= 0.05 * step_ms]
    if not doubtful:
        return list(told)
    least_ms = AS_MUCH * min(one.expected_ms for one in doubtful)
    others = _others(context, {one.rule for one in told}, asked, least_ms)
    edits = {one.rule.name: one for one in scored}
    return [
        replace(one, alternatives=_alternatives(context, one, edits[one.rule], others)) if one in doubtful else one
        for one in told
    ]


def _others(
    context: TraceContext, told: set[str], asked: Sequence[tuple[Rule, Candidate | None]], least_ms: float
) -> list[tuple[Scored, Finding]]:
    """Causes that are not told, each with all of the time that it would claim if it were asked first."""
    found = list[tuple[float, Rule, Candidate]]()
    for rule, candidate in asked:
        if rule.name in told:
            continue
        if candidate is None and rule.suspect is not None:
            candidate = rule.suspect(context)
        if candidate is not None and not candidate.fix.is_empty:
            found.append((budget_s(context, candidate.fix) * 1e3, rule, candidate))
    found = sorted((one for one in found if one[0] >= least_ms), key=lambda one: -one[0])[:4]
    scored = [scored_of(context, rule, candidate) for _, rule, candidate in found]
    return [(one, finding_of(context, one, 0.0)) for one in scored]


def _alternatives(
    context: TraceContext, finding: Finding, own: Scored, others: Sequence[tuple[Scored, Finding]]
) -> tuple[Alternative, ...]:
    """Those of the others that would bring as much, and hardly anything once the finding's change is made."""
    fitting = [
        (other, promised)
        for other, promised in others
        if (other.rule.alternative_to is None or finding.rule in other.rule.alternative_to)
        and promised.expected_ms >= AS_MUCH * finding.expected_ms
        and _is_same_time(context, own, other)
    ]
    fitting.sort(key=lambda one: (one[0].rule.is_general, -one[1].expected_ms))
    return tuple(_as_alternative(promised) for _, promised in fitting[:2])


def _is_same_time(context: TraceContext, own: Scored, other: Scored) -> bool:
    """Whether a change brings less than half of what it brings alone once the other is made as well."""
    alone_s = context.step_s - step_after_s(context, other.best)
    after_s = step_after_s(context, own.best)
    # Of what another change brings alone, what it may bring beside the finding's: more is time of its own.
    return after_s - step_after_s(context, own.best | other.best) < 0.5 * alone_s


def _as_alternative(promised: Finding) -> Alternative:
    return Alternative(
        rule=promised.rule,
        what=promised.what,
        cause=promised.cause,
        change=promised.change,
        tell=rule_named(promised.rule).tell,
        low_ms=promised.low_ms,
        high_ms=promised.high_ms,
    )
