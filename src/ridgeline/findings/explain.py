"""From a context to findings: every rule asked, time claimed once, gains replayed alone and in sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ridgeline.findings.alternatives import with_alternatives
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.first_use import is_warm_up
from ridgeline.findings.context.gains import (
    budget_s,
    hides_its_host,
    longest_step_s,
    step_after_s,
    step_noise_s,
    unchanged,
    unrecorded_step_s,
)
from ridgeline.findings.context.loop_turns import LOOPS, STOPS, are_one_loop
from ridgeline.findings.finding import Finding, clipped
from ridgeline.findings.replay.fix import time_budget
from ridgeline.findings.rule import Rule, is_general, rule_named, rules
from ridgeline.findings.scored import Scored, finding_of, scored_of

LEAST_SHARE = 0.25


def findings_of(context: TraceContext, chosen: Iterable[Rule] | None = None) -> list[Finding]:
    """What to change, most valuable first; together they bring at most the step, as recorded where nobody timed one."""
    if not context.program.num_works or is_warm_up(context):
        return []
    asked = [
        (rule, rule.detect(context))
        for rule in (rules() if chosen is None else sorted(chosen, key=lambda rule: rule.order))
    ]
    scored = [scored_of(context, rule, candidate) for rule, candidate in _budgeted(context, asked)]
    scored.sort(key=lambda found: -found.expected_s)
    told = _with_turns(context, _summed(context, scored), scored)
    step_ms = unrecorded_step_s(context) * 1e3
    return [clipped(finding, step_ms) for finding in with_alternatives(context, told, scored, asked)]


def _budgeted(context: TraceContext, asked: Sequence[tuple[Rule, Candidate | None]]) -> list[tuple[Rule, Candidate]]:
    """Suspicions with what is left of their claims, the most specific first."""
    budget, kept = time_budget(context.program), list[tuple[Rule, Candidate]]()
    for found, candidate in asked:
        if candidate is None:
            continue
        fix = budget.left_for(candidate.fix)
        if fix.is_empty or budget_s(context, fix) < candidate.least_frac * context.step_s:
            continue
        kept.append((found, replace(candidate, fix=budget.spend(candidate.fix))))
    return kept


def _summed(context: TraceContext, scored: list[Scored]) -> list[Finding]:
    """Gains alone, and in sequence: each after those above it, so that a second bottleneck shows."""
    so_far, before_s = unchanged(context), context.step_s
    made = list[Finding]()
    for found in scored:
        after_s = step_after_s(context, so_far | found.best)
        in_turn_s = max(0.0, before_s - after_s)
        finding = finding_of(context, found, in_turn_s)
        # A gain that only shows once the findings above are fixed is worth one from this share of what is then left on,
        # and of the step.
        later = in_turn_s >= max(0.1 * before_s, 0.03 * context.step_s)
        step_ms = unrecorded_step_s(context) * 1e3
        worth = finding.expected_ms >= found.candidate.least_frac * step_ms
        sure = _surely_ms(context, found, finding) >= found.candidate.sure_frac * step_ms
        if (worth or later) and sure and len(made) < 12:
            made.append(finding)
            so_far, before_s = so_far | found.best, min(before_s, after_s)
    fitted = sorted(_fitted(made, longest_step_s(context) * 1e3), key=lambda finding: -finding.expected_ms)
    return _widened(fitted, longest_step_s(context) * 1e3)


def _surely_ms(context: TraceContext, found: Scored, finding: Finding) -> float:
    """What a finding brings at worst: by every host, or, where the gain is on the device and the step does not tell how
    fast its host is, by the likeliest one (13.5 of 31 ms were to be had where a host as slow as it was recorded would
    have left nothing)."""
    if found.rule.saves == "host" or (context.is_timed and not hides_its_host(context)):
        return finding.low_ms
    worst_s = found.trust.low * found.surely_s
    return max(0.0, (1.0 - found.rule.slack) * worst_s - step_noise_s(context)) * 1e3


def _fitted(made: list[Finding], step_ms: float) -> list[Finding]:
    """Findings that together promise at most this step: what exceeds it is taken from what says that the host is slow,
    which is the rest of what has a cause of its own, and then from all but the first alike."""
    made = _rest_capped(made, step_ms)
    total_ms = sum(finding.high_ms for finding in made)
    if total_ms <= step_ms or len(made) < 2:
        return made
    first, rest = made[0], made[1:]
    share = max(0.0, step_ms - first.high_ms) / (total_ms - first.high_ms)
    share = max(share, LEAST_SHARE)
    if share == LEAST_SHARE:  # the first alone promises nearly all: it gives some of it up as well
        left_ms = step_ms - share * (total_ms - first.high_ms)
        first = _capped(first, left_ms / first.high_ms)
    return [first, *(_capped(finding, share) for finding in rest)]


def _rest_capped(made: list[Finding], step_ms: float) -> list[Finding]:
    """What says that the host is slow, cut by most of what is too much, but not below what is expected of it."""
    # Of what findings promise beyond the step, taken from what says that the host is slow.
    over_ms = (2.0 / 3.0) * max(0.0, sum(finding.high_ms for finding in made) - step_ms)
    kept = list[Finding]()
    for finding in made:
        least_ms = max(finding.expected_ms, LEAST_SHARE * finding.high_ms)
        cut_ms = min(over_ms, max(0.0, finding.high_ms - least_ms)) if is_general(finding.rule) else 0.0
        kept.append(_capped(finding, 1.0 - cut_ms / finding.high_ms) if cut_ms else finding)
        over_ms -= cut_ms
    return kept


def _widened(made: list[Finding], step_ms: float) -> list[Finding]:
    """Upper ends moved by what gains were seen past them, as far as the step has room left: of what has a cause of its
    own before what says that the host is slow, and the first finding first."""
    room_ms, more_ms = max(0.0, step_ms - sum(finding.high_ms for finding in made)), dict[int, float]()
    for i in sorted(range(len(made)), key=lambda i: (is_general(made[i].rule), i)):
        more_ms[i] = min(room_ms, rule_named(made[i].rule).more_at_best * made[i].high_ms)
        room_ms -= more_ms[i]
    ends_ms = [finding.high_ms + more_ms[i] for i, finding in enumerate(made)]
    return [
        replace(finding, high_ms=high_ms, later_ms=max(high_ms, finding.later_ms))
        for finding, high_ms in zip(made, ends_ms, strict=True)
    ]


def _with_turns(context: TraceContext, made: list[Finding], scored: Sequence[Scored]) -> list[Finding]:
    """Where a loop and what it stops for in each turn are told apart, the first of the two may bring what both do, as
    far as the step has room (10.4 of 15.8 ms on an H200, 5.3 and 5.2 at most apart)."""
    fixes = {found.rule.name: found.candidate.fix for found in scored}
    room_ms = max(0.0, longest_step_s(context) * 1e3 - sum(finding.high_ms for finding in made))
    loop = next((i for i, finding in enumerate(made) if finding.rule in LOOPS), None)
    stop = next((i for i, finding in enumerate(made) if finding.rule in STOPS), None)
    if loop is None or stop is None or not are_one_loop(context, fixes[made[loop].rule], fixes[made[stop].rule]):
        return made
    first, other = sorted((loop, stop))
    high_ms = made[first].high_ms + min(room_ms, made[other].high_ms)
    both = replace(made[first], high_ms=high_ms, later_ms=max(high_ms, made[first].later_ms))
    return [both if i == first else finding for i, finding in enumerate(made)]


def _capped(finding: Finding, share: float) -> Finding:
    """A smaller promise; what the change would bring on its own stays what it is."""
    high_ms = finding.high_ms * min(1.0, share)
    low_ms = min(finding.low_ms, high_ms)
    expected_ms = min(finding.expected_ms, (low_ms + high_ms) / 2)
    return replace(finding, low_ms=low_ms, high_ms=high_ms, expected_ms=expected_ms)
