"""How good findings are: on causes that were injected, recorded and fixed, named or not, and the gain held or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.planted.recordings import ControlProgram, InjectedCase
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.explain import findings_of
from ridgeline.findings.finding import Finding
from ridgeline.profiler.floors import device_of
from ridgeline.trace.table import Trace

NAMES: Mapping[str, tuple[str, ...]] = {
    "data loader": ("data-loader",),
    "cpu affinity": ("cpu-affinity",),
    "pageable copy": ("slow-copies",),
    "pinned copy on the compute stream": ("exposed-copies",),
    "blocking copy": ("exposed-copies", "slow-copies", "synchronization"),
    "copies in line": ("exposed-copies", "host-round-trip", "weight-streaming"),
    "many small copies": ("slow-copies",),
    "synchronization": ("synchronization",),
    "synchronous logging": ("logging",),
    "round trip through the host": ("host-round-trip",),
    "host-bound": ("launch-bound", "tensor-loop"),
    "unfused optimizer": ("unfused-optimizer",),
    "small batch": ("micro-batches",),
    "allocator": ("allocator",),
    "garbage collection": ("garbage-collection",),
    "graph break": ("graph-breaks",),
    "recompilation": ("first-use",),
    "unfused pointwise chain": ("pointwise-chains",),
    "fp32 matmul": ("tensor-cores-unused",),
    "NCHW convolution": ("channels-first",),
    "unfused attention": ("attention",),
    "padding": ("padding",),
    "fp32 logits": ("logits",),
    "logits laid out for the loss": ("logits",),
    "misaligned sizes": ("misaligned-sizes",),
    "index backward": ("lookup-gradient",),
    "dense embedding gradient": ("lookup-gradient",),
    "gradient memsets": ("needless-work",),
    "needless recompute": ("needless-work",),
    "weights cast every step": ("weight-casts",),
    "weights streamed from the host": ("weight-streaming",),
    "host code": ("host-code",),
    "host preprocessing": ("host-code", "data-loader"),
    "copies between layouts": ("channels-first",),
    "needless gradients": ("needless-work",),
    "cpu contention": ("host-contention",),
    "activations kept on the host": ("weight-streaming", "exposed-copies", "host-round-trip"),
    "a pass that is not needed": ("needless-work",),
    "cache grown by concatenation": ("needless-work",),
    "small collectives": ("exposed-communication",),
    "exposed communication": ("exposed-communication",),
}
"""The rules that name a cause."""
REMEDIES: Mapping[str, str] = {
    "synchronous logging": "every N steps",
    "unfused optimizer": "fused=True for an update",
    "small batch": "a larger batch",
}
"""Advice that removes a cause: a finding of another rule that gives it names the cause as well."""
GENERAL = ("launch-bound", "host-code")
"""Rules that say that the host is slow, where no other knows why."""
WEIGHTY_FRAC = 0.02


@dataclass(frozen=True, slots=True)
class Score:
    """One injected case: where its cause stands among the findings, and whether the interval held the realized gain."""

    case: str
    cause: str
    gain_ms: float
    step_ms: float  # of the program with the cause, without a profiler
    place: int | None  # 0 is first; None is not named
    finding: Finding | None
    still_named: bool  # the cause is named in the fixed run as well
    others: tuple[tuple[str, float], ...]  # findings of the fixed run over 2 % of its step, with their share
    noise_ms: float = 0.0  # what the medians of both programs vary by

    @property
    def named(self) -> bool:
        return self.place is not None and self.place < 2

    @property
    def width(self) -> float | None:
        """Of the interval, as a share of the realized gain."""
        if self.finding is None or self.gain_ms <= 0:
            return None
        return (self.finding.high_ms - self.finding.low_ms) / self.gain_ms

    @property
    def held(self) -> bool:
        return self.finding is not None and self.finding.low_ms <= self.gain_ms <= self.finding.high_ms

    @property
    def confirmed(self) -> bool:
        """What was advised was done, and brought at least the low end of what was promised and more than noise: of a
        program that was thought to be well, the finding was true."""
        return self.finding is not None and self.gain_ms >= max(self.finding.low_ms, self.noise_ms)


def score(case: InjectedCase) -> Score:
    """Explain a case's recordings with the cause and with the fix."""
    rules = NAMES.get(case.cause, ())
    planted = _findings(case.trace("planted"))
    fixed = _findings(case.trace("fixed")) if "fixed" in case.files else ()
    place = next((i for i, finding in enumerate(planted) if finding.rule in rules), None)
    if (place is None or place > 1) and (remedy := REMEDIES.get(case.cause)):
        place = next((i for i, finding in enumerate(planted[:2]) if remedy in finding.change), place)
    if place is not None:
        rules = (*rules, planted[place].rule)
    return Score(
        case.name,
        case.cause,
        case.gain_s * 1e3,
        case.injected.median_s * 1e3,
        place,
        planted[place] if place is not None else None,
        any(finding.rule in rules and finding.step_frac > WEIGHTY_FRAC for finding in fixed),
        _weighty(fixed),
        case.uncertainty_s * 1e3,
    )


def found_in(program: ControlProgram) -> tuple[tuple[str, float], ...]:
    """What is found in a program without a cause over 2 % of its step, with its share."""
    return _weighty(_findings(program.trace()))


def _weighty(findings: Sequence[Finding]) -> tuple[tuple[str, float], ...]:
    return tuple((finding.rule, finding.step_frac) for finding in findings if finding.step_frac > WEIGHTY_FRAC)


def _findings(trace: Trace) -> Sequence[Finding]:
    return findings_of(TraceContext(trace, device_of(trace)))
