"""All that is said of a run: how far it can be trusted, where the time went, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ridgeline.errors import FindingError
from ridgeline.findings.accounting.account import account, with_prices
from ridgeline.findings.accounting.needed import Comparison, compared
from ridgeline.findings.accounting.waterfall import Waterfall, waterfall_table
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.first_use import is_warm_up
from ridgeline.findings.context.floors import Gap, gaps_of, priced
from ridgeline.findings.context.gains import (
    longest_step_s,
    recorded_frac,
    recorded_schedule,
    recorded_step_s,
    unrecorded_step_s,
    unsteady_s,
)
from ridgeline.findings.explain import findings_of
from ridgeline.findings.finding import Finding, clipped, together_ms
from ridgeline.findings.recording import what_is_missing
from ridgeline.findings.replay.critical_path import path_ms
from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.profiler.floors import device_of
from ridgeline.result import Result
from ridgeline.trace.analyses.table import Table
from ridgeline.trace.analyses.tables import table_of
from ridgeline.trace.breakdown import totals
from ridgeline.trace.idle import Cause, idle_causes, idle_places
from ridgeline.trace.kind import Kind
from ridgeline.trace.memory import Peak, peaks
from ridgeline.trace.quality import quality
from ridgeline.trace.steps import Step, steps
from ridgeline.trace.table import Trace
from ridgeline.units import show_bytes

HEALTHY_FRAC = 0.9
FIRST_USE = (
    "A first use: most of the time the device is opened, code is loaded or compiled, or plans are built. Record "
    "after a few steps."
)


@dataclass(frozen=True, slots=True)
class Replay:
    """How well the run was understood: the replay of what was recorded against what was recorded."""

    recorded_ms: float
    replayed_ms: float
    step_ms: float  # unrecorded, where the recorder measured that
    error_frac: float
    unexplained_frac: float  # of the time, in which the device waited and the trace does not say for what
    host_frac: float  # of the recorded host time that is left when the recording's own cost is taken out
    num_steps: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One rank in a few numbers."""

    rank: int
    totals: Mapping[str, Mapping[str, float]]
    steps: tuple[Step, ...]
    idle: tuple[Cause, ...]
    comm_s: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Result):
    """Findings with what they rest on; times in milliseconds where the name says so."""

    title: str
    device: str
    verdict: str
    quality: Mapping[str, Any]
    replay: Replay
    totals: Mapping[str, Mapping[str, float]]
    steps: tuple[Step, ...]
    idle: tuple[Cause, ...]
    places: tuple[Cause, ...]
    findings: tuple[Finding, ...]
    ranks: tuple[Summary, ...]
    gaps: tuple[Gap, ...] = ()
    path_ms: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[Peak, ...] = ()
    waterfall: Waterfall | None = None
    against_model: Comparison | None = field(default=None, compare=False)
    context: TraceContext | None = field(default=None, repr=False, compare=False)

    def table(self, name: str, by: Sequence[str] | str = ()) -> Table:
        """Kernels, ops, modules, collectives, ranks, copies, streams, steps or the waterfall as a table; ``by`` adds
        columns to what its rows are grouped by. ``table("kernels").to_dataframe()`` needs pandas."""
        if self.context is None:
            raise FindingError("this explanation has no trace any more: explain the trace again")
        keys = (by,) if isinstance(by, str) else tuple(by)
        if name == "waterfall":
            return waterfall_table(self.waterfall)
        trace = self.context.trace
        if name in ("kernels", "modules"):
            trace = with_prices(trace, -(2**62), 2**62, self.context.device)
        if name == "ranks" and len(self.ranks) > 1:
            return ranks_table(self.ranks)
        return table_of(trace, name, keys, self.context.others)

    def summary(self) -> str:
        return f"{self.title}: {self.verdict}"

    def records(self) -> list[dict[str, Any]]:
        """One row a finding, the largest first."""
        return [
            {
                "finding": f.what,
                "low_ms": f.low_ms,
                "likely_ms": f.expected_ms,
                "high_ms": f.high_ms,
                "change": f.change,
            }
            for f in self.findings
        ]

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, without the recording where that is known."""
        return self.replay.step_ms

    @property
    def recoverable_ms(self) -> float:
        """What the findings bring together, by their best estimates; never more than the step."""
        return min(self.step_ms, together_ms(self.findings))

    @property
    def busy_frac(self) -> float:
        """Share of the time in which the device does anything."""
        whole = self.totals["all"]
        return whole["busy_ms"] / whole["total_ms"] if whole["total_ms"] else 0.0

    @property
    def step_busy_frac(self) -> float:
        """Share of the step without the recording in which the device does anything."""
        step = self.waterfall
        if step is None or not step.bars:
            return self.busy_frac
        return 1.0 - sum(bar.frac for bar in step.bars if bar.stage in ("idle", "host"))

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "title": self.title,
            "device": self.device,
            "verdict": self.verdict,
            "quality": {**self.quality, "replay": asdict(self.replay)},
            "totals": {name: dict(part) for name, part in self.totals.items()},
            "step_ms": self.step_ms,
            "recoverable_ms": self.recoverable_ms,
            "waterfall": self.waterfall.to_dict() if self.waterfall else None,
            "against_model": self.against_model.to_dict() if self.against_model else None,
            "steps": [step_document(step) for step in self.steps],
            "idle_causes": idle_document(self.idle, self.places),
            "findings": [finding.to_dict() for finding in self.findings],
            "critical_path_ms": dict(self.path_ms),
            "gaps": [gap.to_dict() for gap in self.gaps],
            "memory": [peak.to_dict() for peak in self.memory],
            "ranks": [
                {"rank": rank.rank, "totals": {name: dict(part) for name, part in rank.totals.items()}}
                for rank in self.ranks
            ],
        }


def step_document(step: Step) -> dict[str, Any]:
    shares = step.shares
    return {
        "step": step.number,
        "rank": step.rank,
        "start_ms": step.start_s * 1e3,
        "total_ms": step.total_s * 1e3,
        "compute_ms": shares.compute_s * 1e3,
        "exposed_comm_ms": shares.exposed_comm_s * 1e3,
        "exposed_memcpy_ms": shares.exposed_memcpy_s * 1e3,
        "idle_ms": shares.idle_s * 1e3,
        "gpu_frac": step.gpu_frac,
        "num_kernels": step.num_kernels,
        "categories_ms": {name: seconds * 1e3 for name, seconds in step.categories_s.items()},
    }


def idle_document(causes: Sequence[Cause], places: Sequence[Cause]) -> dict[str, Any]:
    """Causes by name, each with its milliseconds and the places it has most of them."""
    return {
        cause.cause: {
            "idle_ms": cause.idle_s * 1e3,
            "exposed_ms": cause.exposed_s * 1e3,
            "count": cause.count,
            "places": [
                {
                    "module": place.module,
                    "source": place.source,
                    "op": place.op,
                    "name": place.name,
                    "ms": place.total_s * 1e3,
                    "count": place.count,
                }
                for place in [place for place in places if place.cause == cause.cause][:5]
            ],
        }
        for cause in causes
    }


def summary_of(trace: Trace) -> Summary:
    """A rank's numbers, small enough to keep a thousand of."""
    comm = trace.of_kind(Kind.COMMUNICATION) & (trace.device >= 0)
    return Summary(
        int(trace.rank[0]) if len(trace) else 0,
        totals(trace),
        tuple(steps(trace)),
        tuple(idle_causes(trace)),
        float(trace.duration_s[comm].sum()),
    )


def ranks_table(ranks: Sequence[Summary]) -> Table:
    """One row a rank of a job."""
    columns = ("rank", "total_ms", "busy_ms", "compute_ms", "exposed_comm_ms", "exposed_memcpy_ms", "idle_ms",
               "num_gpu_events", "num_steps", "mean_step_ms")  # fmt: skip
    rows = []
    for one in ranks:
        whole, marked = one.totals["all"], [step.total_s * 1e3 for step in one.steps if step.number >= 0]
        numbers = (float(whole[name]) for name in columns[1:7])
        mean = float(np.mean(marked)) if marked else None
        rows.append((one.rank, *numbers, int(whole["num_gpu_events"]), len(marked), mean))
    return Table("ranks", columns, tuple(sorted(rows)))


def communication_of(trace: Trace) -> Trace:
    """A rank's collectives alone."""
    return trace.select(trace.of_kind(Kind.COMMUNICATION) & (trace.device >= 0)).with_used_words()


def mean_totals(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Over ranks: times are means, events add up."""
    if len(found) == 1:
        return {name: dict(part) for name, part in found[0].items()}
    return {
        name: {
            key: (sum if key.startswith("num_") else _mean)([one[name][key] for one in found]) for key in found[0][name]
        }
        for name in found[0]
    }


def mean_causes(found: Sequence[Sequence[Cause]]) -> tuple[Cause, ...]:
    """Over ranks, as the totals are: times are means, so that causes add up to the idle time; counts add up."""
    if len(found) == 1:
        return tuple(found[0])
    rows: dict[str, list[Cause]] = {}
    for cause in (cause for one in found for cause in one):
        rows.setdefault(cause.cause, []).append(cause)
    made = [
        Cause(
            name,
            sum(cause.idle_s for cause in own) / len(found),
            sum(cause.exposed_s for cause in own) / len(found),
            sum(cause.count for cause in own),
            longest_s=max(cause.longest_s for cause in own),
        )
        for name, own in rows.items()
    ]
    return tuple(sorted(made, key=lambda cause: -cause.total_s))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def explained(
    trace: Trace,
    summaries: Sequence[Summary],
    others: Sequence[Trace] = (),
    device: Device | None = None,
    needed: Graph | None = None,
) -> Explanation:
    """Explain one rank in the light of all, and of the work that a model needs."""
    found = device or device_of(trace)
    context = TraceContext(trace, found, others)
    findings = tuple(findings_of(context))
    whole = mean_totals([summary.totals for summary in summaries])
    own = next((one for one in summaries if len(trace) and one.rank == int(trace.rank[0])), summaries[0])
    checked = quality(trace)
    against = compared(trace, needed) if needed is not None else None
    extra_s = against.extra_s if against else None
    recorded = account(priced(context) or trace, found, others, extra_s)
    waterfall = recorded.without_recording(unrecorded_step_s(context) * 1e3)
    findings, rules = _within_bars(findings, waterfall, trace, longest_step_s(context) * 1e3)
    waterfall = waterfall.with_findings(rules)
    cold = is_warm_up(context) or (checked.verdict == "poor" and checked.has("cold") and not findings)
    return Explanation(
        title=trace.title,
        device=found.name if found else _recorded_name(trace),
        verdict=FIRST_USE if cold else verdict_of(context, findings, whole),
        quality=checked.to_dict(),
        replay=replay_of(context),
        totals=whole,
        steps=own.steps if len(summaries) == 1 else tuple(step for one in summaries for step in one.steps),
        idle=mean_causes([summary.idle for summary in summaries]),
        places=tuple(idle_places(trace)),
        findings=findings,
        ranks=tuple(summaries),
        gaps=gaps_of(context),
        path_ms=path_ms(context.wiring.program, recorded_schedule(context), context.num_steps),
        memory=tuple(peaks(trace)),
        waterfall=waterfall,
        against_model=against,
        context=context,
    )


def _within_bars(
    findings: Sequence[Finding], waterfall: Waterfall, trace: Trace, longest_ms: float
) -> tuple[tuple[Finding, ...], dict[str, list[str]]]:
    """Findings that promise at most what the bars that they are about have, and the rules about each bar.

    A finding is about the bars of the device spans that it changes and of its evidence. Host time that goes makes what
    follows it start earlier: where these bars hold less than is promised, it is about all of the idle time, and about
    what a step takes longer than the bars at the slowest host that explains the recording (where nobody timed the step,
    the bars are those of the likeliest).
    """
    idle = [bar for bar in waterfall.bars if bar.stage == "idle"]
    kept, rules = [], dict[str, list[str]]()
    for finding in findings:
        bars = waterfall.bars_of(trace, [*finding.rows, *finding.changed.tolist()], 0.01)
        over_ms = max(0.0, longest_ms - waterfall.unrecorded_ms) if finding.frees_host else 0.0
        if finding.frees_host and sum(bar.ms for bar in bars) < finding.high_ms:
            bars = [*bars, *(bar for bar in idle if bar not in bars)]
        for bar in bars:
            rules.setdefault(bar.key, []).append(finding.rule)
        kept.append(clipped(finding, over_ms + sum(bar.ms for bar in bars)) if bars else finding)
    return tuple(sorted(kept, key=lambda finding: -finding.expected_ms)), rules


def _recorded_name(trace: Trace) -> str:
    for properties in trace.meta.get("devices") or ():
        if isinstance(properties, dict) and properties.get("name"):
            return str(properties["name"])
    return ""


def replay_of(context: TraceContext) -> Replay:
    recorded_s = context.window.step_s
    as_recorded_s = recorded_step_s(context)
    return Replay(
        recorded_s * 1e3,
        context.step_s * 1e3,
        unrecorded_step_s(context) * 1e3,
        abs(as_recorded_s - recorded_s) / recorded_s if recorded_s > 0 else 0.0,
        context.wiring.unexplained_s / context.window.duration_s if context.window.duration_s > 0 else 0.0,
        recorded_frac(context),
        context.num_steps,
    )


def _held(peak: Peak) -> str:
    """Of a file that knows of memory alone."""
    most = ", ".join(f"{show_bytes(num)} {name}" for name, num in peak.categories[:2])
    return f"Memory alone: {show_bytes(peak.allocated_bytes)} at the peak{f', of which {most}' if most else ''}."


def _nothing_ran(trace: Trace) -> str:
    """Of a trace without device events: because it is cut off or unreadable, or because there were none."""
    if trace.meta.get("truncated"):
        return "The file is cut off before any device work: what is left says nothing of the device. Export it again."
    if not len(trace) and (lost := int(trace.meta.get("num_lost", 0))):
        return f"Nothing could be read: none of the {lost:,} events has a readable time. Export the trace again."
    if not len(trace):
        return "The trace is empty: it holds no events. Record at least one step."
    return "No device work in this trace: it was recorded without GPU activities, or the program ran on the CPU alone."


def verdict_of(context: TraceContext, findings: Sequence[Finding], whole: Mapping[str, Mapping[str, float]]) -> str:
    """One sentence a person would say."""
    total_ms, busy_ms = whole["all"]["total_ms"], whole["all"]["busy_ms"]
    if not len(context.trace) and (held := peaks(context.trace)):
        return _held(max(held, key=lambda peak: peak.allocated_bytes))
    if not whole["all"]["num_gpu_events"]:
        return _nothing_ran(context.trace)
    busy = busy_ms / total_ms if total_ms else 0.0
    if findings:
        # Of the step: findings that bring less, now and once those above them are done, are not in the verdict.
        least_ms = 0.02 * unrecorded_step_s(context) * 1e3
        weighty = [finding for finding in findings[:2] if finding.later_ms >= least_ms] or findings[:1]
        named = [finding.cause.split(":")[0].split(" (")[0] for finding in weighty]
        share = min(1.0, together_ms(findings) / 1e3 / unrecorded_step_s(context))
        causes = ", and ".join(named)
        causes = causes[:1].upper() + causes[1:]
        missing = what_is_missing(context) if busy < 0.5 else ""
        return f"{causes}: {share:.0%} of the step can be won back.{_unsteady(context)}{' ' * bool(missing)}{missing}"
    lost = context.wiring.unexplained_s / context.window.duration_s
    if (lost > 0.1 or busy < 0.5) and (missing := what_is_missing(context)):
        return f"The device is busy {busy:.0%} of the time, and the trace does not say what it waits for. {missing}"
    if quality(context.trace).has("no_calls") and busy < HEALTHY_FRAC:
        return (
            f"No known mistake was found; the device is busy {busy:.0%} of the time, and without launch calls in the "
            "file nobody can say what it waits for."
        )
    if lost > 0.1:
        return f"No known mistake. The device waits {lost:.0%} of the time and the trace does not say for what."
    if busy >= HEALTHY_FRAC:
        return f"Healthy: the device is busy {busy:.0%} of the time and no known mistake was found."
    if not context.is_timed and recorded_frac(context) < 1.0:
        alone = min(1.0, busy * recorded_step_s(context) / unrecorded_step_s(context))
        return (
            f"No known mistake was found; the device is busy {busy:.0%} of the recording, which slows the host, and "
            f"about {alone:.0%} of the time without it."
        )
    return f"No known mistake was found; the device is busy {busy:.0%} of the time."


def _unsteady(context: TraceContext) -> str:
    over_s = unsteady_s(context)
    if not over_s:
        return ""
    timed_s = unrecorded_step_s(context)
    return (
        f" The baseline is unsteady: a step took {timed_s * 1e3:.3g} ms without the profiler and "
        f"{(timed_s - over_s) * 1e3:.3g} ms with it, which every interval below is wider by; time it again."
    )
