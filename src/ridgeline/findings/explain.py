"""From a scene to findings: every rule asked, time claimed once, gains replayed alone and in sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ridgeline.findings.calibration import HOST_RULES, UNMEASURED_FRAC, at_best, slack, trust
from ridgeline.findings.cure import open_ledger
from ridgeline.findings.finding import Finding
from ridgeline.findings.replay import Edit
from ridgeline.findings.rule import Rule, rules
from ridgeline.findings.scene import Candidate, Scene

LATER_FRAC, LATER_STEP_FRAC = 0.1, 0.03
"""A gain that only shows once the findings above are fixed is worth one from this share of what is then left on, and
of the step."""
LEAST_SHARE = 0.25
GIVEN_WAY = 2.0 / 3.0
"""Of what findings promise beyond the step, taken from what says that the host is slow."""
MAX_FINDINGS = 12
GENERAL = ("launch-bound", "host-code")
"""Rules that say the host is too slow, where no other knows why."""


@dataclass(frozen=True, slots=True)
class _Weighed:
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
    def expected_s(self) -> float:
        """The middle of what the likeliest host gives."""
        trusted = trust(self.rule.name)
        return (trusted.low * self.likely_s[0] + trusted.high * self.likely_s[1]) / 2


def findings_of(scene: Scene, chosen: Iterable[Rule] | None = None) -> list[Finding]:
    """What to change, most valuable first; together they bring at most the step, as recorded where nobody timed one."""
    if not scene.program.num_works:
        return []
    weighed = [_weighed(scene, rule, candidate) for rule, candidate in _claimed(scene, chosen)]
    weighed.sort(key=lambda found: -found.expected_s)
    return _summed(scene, weighed)


def _claimed(scene: Scene, chosen: Iterable[Rule] | None) -> list[tuple[Rule, Candidate]]:
    """Suspicions with what is left of their claims, the most specific first."""
    ledger, kept = open_ledger(scene.program), list[tuple[Rule, Candidate]]()
    for found in rules() if chosen is None else sorted(chosen, key=lambda r: r.order):
        candidate = found.detect(scene)
        if candidate is None:
            continue
        cure = ledger.preview(candidate.cure)
        if cure.is_empty or scene.claimed_s(cure) < candidate.least_frac * scene.step_s:
            continue
        kept.append((found, replace(candidate, cure=ledger.claim(candidate.cure))))
    return kept


def _weighed(scene: Scene, rule: Rule, candidate: Candidate) -> _Weighed:
    best, worst = scene.edit(candidate.cure, best=True), scene.edit(candidate.cure, best=False)
    best_gains_s, worst_gains_s = scene.gains_s(best), scene.gains_s(worst)
    most_s = scene.usual_gain_s(best) if _is_paced(scene, candidate) else 0.0
    best_s, worst_s = max(*best_gains_s, *worst_gains_s, most_s), min(*best_gains_s, *worst_gains_s)
    likely_s = (worst_s, best_s) if scene.is_timed else (worst_gains_s[0], max(best_gains_s[0], most_s))
    surely_s = worst_gains_s[-1] if scene.is_timed else worst_gains_s[0]
    return _Weighed(rule, candidate, best, worst, best_s, worst_s, likely_s, surely_s)


def _is_paced(scene: Scene, candidate: Candidate) -> bool:
    """Whether workers set the pace that the change would free."""
    return candidate.cure.elastic and (scene.is_timed or scene.is_fed_late)


def _summed(scene: Scene, weighed: list[_Weighed]) -> list[Finding]:
    """Gains alone, and in sequence: each after those above it, so that a second bottleneck shows."""
    so_far, before_s = scene.no_edit(), scene.step_s
    made = list[Finding]()
    for found in weighed:
        after_s = scene.step_after_s(so_far | found.best)
        in_turn_s = max(0.0, before_s - after_s)
        finding = _finding(scene, found, in_turn_s)
        later = in_turn_s >= max(LATER_FRAC * before_s, LATER_STEP_FRAC * scene.step_s)
        step_ms = scene.unrecorded_step_s * 1e3
        worth = finding.expected_ms >= found.candidate.least_frac * step_ms
        sure = _surely_ms(scene, found, finding) >= found.candidate.sure_frac * step_ms
        if (worth or later) and sure and len(made) < MAX_FINDINGS:
            made.append(finding)
            so_far, before_s = so_far | found.best, min(before_s, after_s)
    fitted = sorted(_fitted(made, scene.longest_step_s * 1e3), key=lambda finding: -finding.expected_ms)
    return _widened(fitted, scene.longest_step_s * 1e3)


def _surely_ms(scene: Scene, found: _Weighed, finding: Finding) -> float:
    """What a finding brings at worst: by every host, or, where the gain is on the device and the step does not tell how
    fast its host is, by the likeliest one (13.5 of 31 ms were to be had where a host as slow as it was recorded would
    have left nothing)."""
    if found.rule.name in HOST_RULES or (scene.is_timed and not scene.hides_its_host):
        return finding.low_ms
    worst_s = trust(found.rule.name).low * found.surely_s
    return max(0.0, (1.0 - slack(found.rule.name)) * worst_s - scene.noise_s) * 1e3


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
    over_ms = GIVEN_WAY * max(0.0, sum(finding.high_ms for finding in made) - step_ms)
    kept = list[Finding]()
    for finding in made:
        least_ms = max(finding.expected_ms, LEAST_SHARE * finding.high_ms)
        cut_ms = min(over_ms, max(0.0, finding.high_ms - least_ms)) if finding.rule in GENERAL else 0.0
        kept.append(_capped(finding, 1.0 - cut_ms / finding.high_ms) if cut_ms else finding)
        over_ms -= cut_ms
    return kept


def _widened(made: list[Finding], step_ms: float) -> list[Finding]:
    """Upper ends moved by what gains were seen past them, as far as the step has room left: of what has a cause of its
    own before what says that the host is slow, and the first finding first."""
    room_ms, more_ms = max(0.0, step_ms - sum(finding.high_ms for finding in made)), dict[int, float]()
    for i in sorted(range(len(made)), key=lambda i: (made[i].rule in GENERAL, i)):
        more_ms[i] = min(room_ms, at_best(made[i].rule) * made[i].high_ms)
        room_ms -= more_ms[i]
    ends_ms = [finding.high_ms + more_ms[i] for i, finding in enumerate(made)]
    return [
        replace(finding, high_ms=high_ms, later_ms=max(high_ms, finding.later_ms))
        for finding, high_ms in zip(made, ends_ms, strict=True)
    ]


def _capped(finding: Finding, share: float) -> Finding:
    """A smaller promise; what the change would bring on its own stays what it is."""
    high_ms = finding.high_ms * min(1.0, share)
    low_ms = min(finding.low_ms, high_ms)
    expected_ms = min(finding.expected_ms, (low_ms + high_ms) / 2)
    return replace(finding, low_ms=low_ms, high_ms=high_ms, expected_ms=expected_ms)


def _finding(scene: Scene, found: _Weighed, in_turn_s: float) -> Finding:
    trusted = trust(found.rule.name)
    step_s = scene.unrecorded_step_s
    had_s = scene.most_s(found.candidate.cure)
    best_s = min(trusted.high * found.best_s * scene.pace, had_s, scene.longest_step_s)
    beyond = min(1.0, had_s / max(1e-12, found.best_s * scene.pace))  # a replay may promise more than there is
    worst_s = min(best_s, beyond * trusted.low * found.worst_s * scene.pace)
    noise_s = min(scene.noise_s, max(best_s, UNMEASURED_FRAC * step_s))
    more = slack(found.rule.name)
    high_s = min(scene.longest_step_s, (1.0 + more) * best_s + noise_s)
    low_s = max(0.0, (1.0 - more) * worst_s - noise_s)
    candidate = found.candidate
    likely_s = tuple(min(best_s, factor * gain_s * scene.pace)
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
        later_ms=max(high_s, in_turn_s * scene.pace) * 1e3,
        in_turn_ms=in_turn_s * scene.pace * 1e3,
        step_frac=min(1.0, best_s / step_s) if step_s > 0 else 0.0,
        evidence=candidate.evidence,
        rows=candidate.spans,
        unchecked=candidate.unchecked,
        basis=trusted.basis,
    )
