"""What else a finding's time may be lost to: causes with evidence of their own that the finding left nothing to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.gains import claimed_s, step_after_s, unrecorded_step_s
from ridgeline.findings.finding import Finding, Instead
from ridgeline.findings.rule import Rule
from ridgeline.findings.scored import Weighed, finding_of, weighed_of

GENERAL = ("launch-bound", "host-code")
"""Rules that say the host is too slow, where no other knows why."""
WORTH_FRAC = 0.05
"""Of the step: a smaller finding is not worth a second thought."""
AS_MUCH = 0.5
"""Of what a finding is expected to bring, what another cause must bring to be meant by the same time."""
SAME = 0.5
"""Of what another change brings alone, what it may bring beside the finding's: more is time of its own."""
MOST, MOST_WEIGHED = 2, 4
AMBIGUOUS = frozenset({
    "launch-bound", "host-code", "host-contention", "micro-batches", "small-batch", "tensor-loop", "pointwise-chains",
    "unfused-optimizer", "logging", "host-round-trip", "value-read", "pageable-copies", "exposed-copies",
    "small-copies", "weight-streaming", "graph-breaks",
})  # fmt: skip
"""Rules that read a cause out of a pattern which others leave as well; the rest have an event, a type or a layout that
nothing else makes."""
GENERALLY: Mapping[str, frozenset[str]] = {
    "launch-bound": frozenset(
        {"micro-batches", "small-batch", "tensor-loop", "pointwise-chains", "unfused-optimizer", "graph-breaks"}
    ),
    "host-code": frozenset({"host-contention"}),
}
"""Findings whose time a slow host may have instead: many short kernels are also many launches, and a thread that stops
may have been at work. Of every other finding about the host that would be said as well, and say less."""
TELLS: Mapping[str, str] = {
    "launch-bound": "a step timed out of torch.cuda.graph; if it takes as long, launches are not what it waits for",
    "host-code": "a recording with stacks, in which the same line of Python is there in every step",
    "host-contention": "the same run on a machine of its own: its stops are gone, or at other places",
    "micro-batches": "whether a pass needs what the one before gave; if not, all of them can be one",
    "small-batch": "a step with twice the batch, timed",
    "tensor-loop": "whether a turn of the loop needs what the one before gave; if not, all of them can be one op",
    "pointwise-chains": "the functions around these kernels compiled, and a step timed",
    "unfused-optimizer": "whether it is weights that these kernels write",
    "weight-streaming": "whether it is weights that are copied: the same values in every step",
    "pageable-copies": "is_pinned() of what is copied",
    "exposed-copies": "a step whose batch is on the device already, timed",
    "small-copies": "a step whose batch is on the device already, timed",
    "logging": "whether what is read is printed or written, and nothing is computed with it",
    "host-round-trip": "whether something is computed on the host with what is read",
    "value-read": "a step without these reads, timed",
    "graph-breaks": "TORCH_LOGS=graph_breaks, which names every break, or none",
}
"""What to look at or to try, by the cause that it would show."""


def with_instead(
    scene: TraceContext,
    told: Sequence[Finding],
    weighed: Sequence[Weighed],
    asked: Sequence[tuple[Rule, Candidate | None]],
) -> list[Finding]:
    """Findings with what their time may be lost to instead; none is added, taken away or moved."""
    step_ms = unrecorded_step_s(scene) * 1e3
    doubtful = [one for one in told if one.rule in AMBIGUOUS and one.expected_ms >= WORTH_FRAC * step_ms]
    if not doubtful:
        return list(told)
    least_ms = AS_MUCH * min(one.expected_ms for one in doubtful)
    others = _others(scene, {one.rule for one in told}, asked, least_ms)
    edits = {one.rule.name: one for one in weighed}
    return [
        replace(one, instead=_instead(scene, one, edits[one.rule], others)) if one in doubtful else one for one in told
    ]


def _others(
    scene: TraceContext, told: set[str], asked: Sequence[tuple[Rule, Candidate | None]], least_ms: float
) -> list[tuple[Weighed, Finding]]:
    """Causes that are not told, each with all of the time that it would claim if it were asked first."""
    found = list[tuple[float, Rule, Candidate]]()
    for rule, candidate in asked:
        if rule.name in told:
            continue
        if candidate is None and rule.suspect is not None:
            candidate = rule.suspect(scene)
        if candidate is not None and not candidate.cure.is_empty:
            found.append((claimed_s(scene, candidate.cure) * 1e3, rule, candidate))
    found = sorted((one for one in found if one[0] >= least_ms), key=lambda one: -one[0])[:MOST_WEIGHED]
    weighed = [weighed_of(scene, rule, candidate) for _, rule, candidate in found]
    return [(one, finding_of(scene, one, 0.0)) for one in weighed]


def _instead(
    scene: TraceContext, finding: Finding, own: Weighed, others: Sequence[tuple[Weighed, Finding]]
) -> tuple[Instead, ...]:
    """Those of the others that would bring as much, and hardly anything once the finding's change is made."""
    fitting = [
        (other, promised)
        for other, promised in others
        if finding.rule in GENERALLY.get(other.rule.name, AMBIGUOUS)
        and promised.expected_ms >= AS_MUCH * finding.expected_ms
        and _is_same_time(scene, own, other)
    ]
    fitting.sort(key=lambda one: (one[0].rule.name in GENERAL, -one[1].expected_ms))
    return tuple(_as_instead(promised) for _, promised in fitting[:MOST])


def _is_same_time(scene: TraceContext, own: Weighed, other: Weighed) -> bool:
    """Whether a change brings less than half of what it brings alone once the other is made as well."""
    alone_s = scene.step_s - step_after_s(scene, other.best)
    after_s = step_after_s(scene, own.best)
    return after_s - step_after_s(scene, own.best | other.best) < SAME * alone_s


def _as_instead(promised: Finding) -> Instead:
    return Instead(
        rule=promised.rule,
        what=promised.what,
        cause=promised.cause,
        change=promised.change,
        tell=TELLS.get(promised.rule, ""),
        low_ms=promised.low_ms,
        high_ms=promised.high_ms,
    )
