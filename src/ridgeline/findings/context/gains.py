"""What a change brings: the step replayed after an edit, and what bounds a gain."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import (
    TraceContext,
    _long_gap_s,
    derived,
    kernels_s,
    not_below_kernels,
    unprofiled_step_s,
)
from ridgeline.findings.context.host_time import is_fed_late, loading_spans
from ridgeline.findings.replay.calibration import NOISE, UNMEASURED_FRAC
from ridgeline.findings.replay.fix import Fix, edit_of
from ridgeline.findings.replay.overhead import usual
from ridgeline.findings.replay.replay import Edit, Schedule, edited, no_edit, run


@derived
def recorded_schedule(context: TraceContext) -> Schedule:
    """The replay with the recording's cost still in it: what the trace shows."""
    return context.base if context.program is context.wiring.program else run(context.wiring.program)


def recorded_frac(context: TraceContext) -> float:
    """Of the recorded launching time, what is left without the recording."""
    return context.hosts.frac


def recorded_step_s(context: TraceContext) -> float:
    return recorded_schedule(context).end_s / context.num_steps


def hides_its_host(context: TraceContext) -> bool:
    """Whether the device decides a step that was timed, so that nothing tells how fast the host is: as slow as it
    was recorded, or as fast as it usually is."""
    return context.is_timed and context.hosts.frac == 1.0 and bool(context.other_hosts)


def step_noise_s(context: TraceContext) -> float:
    """What the step may differ by when it is measured again: as unrecorded steps vary, else as others did; and what an
    unsteady program differed by between its two measurements."""
    spread_s = context.number("unprofiled_spread_s")
    varies_s = UNMEASURED_FRAC * unrecorded_step_s(context) if spread_s is None else NOISE * spread_s
    return varies_s + unsteady_s(context)


def unsteady_s(context: TraceContext) -> float:
    """Seconds by which a step took longer unrecorded than recorded, if that is a tenth and more than steps vary by:
    recording only slows a program, so it ran differently in the two."""
    timed_s = unprofiled_step_s(context)
    if timed_s is None:
        return 0.0
    over_s = timed_s - context.window.step_s
    return over_s if over_s > max(0.1 * timed_s, 3.0 * (context.number("unprofiled_spread_s") or 0.0)) else 0.0


def edit_for(context: TraceContext, fix: Fix, *, best: bool) -> Edit:
    return edit_of(fix, context.program, context.clock, best=best)


def most_gain_s(context: TraceContext, fix: Fix) -> float:
    """What no fix of this kind can exceed: the step less the work that it does not touch, of the busiest stream or
    of all kernels, since those of several streams share one device."""
    left = np.ones(len(context.work_s), dtype=bool)
    left[fix.works] = False
    left[fix.aside] = False
    streams = np.bincount(context.program.stream, weights=context.work_s * left) if len(left) else np.zeros(1)
    busy_s = max(float(streams.max()), kernels_s(context, left)) / context.num_steps
    return max(0.0, longest_step_s(context) - busy_s)


@derived
def longest_step_s(context: TraceContext) -> float:
    """A step without the recording, by the slowest host that is thought possible where nobody timed one; as
    recorded where workers set the pace."""
    if context.is_timed:
        return unrecorded_step_s(context)
    paced_s = recorded_step_s(context) if is_fed_late(context) else 0.0
    return max(unrecorded_step_s(context), paced_s, *(step_s for _, step_s in context.other_hosts))


def touched_by_s(context: TraceContext, fix: Fix) -> float:
    """Device and host time a step that a fix is applied to."""
    works = np.union1d(fix.works, fix.aside)
    return float(context.work_s[works].sum() + fix.host.total / 1e9) / context.num_steps


def budget_s(context: TraceContext, fix: Fix) -> float:
    """The most a fix could bring if nothing else held the step: the time it claims, a step."""
    saved = edit_for(context, fix, best=True)
    works_s = context.work_s * (1.0 - saved.scale)
    works_s[saved.aside] = context.work_s[saved.aside]
    waited_s = context.base.call_end_s - context.base.call_start_s
    waits_s = np.maximum(context.program.stream_gap_s, context.program.latency_s)
    works_s[saved.closed] += np.maximum(0.0, waits_s[saved.closed])
    gap_s, own_s = np.maximum(0.0, context.program.gap_s), context.program.own_s
    host_s = float((gap_s * saved.cut_before + own_s * saved.cut_inside).sum()) + float(waited_s[saved.freed].sum())
    return (float(works_s.sum()) + host_s) / context.num_steps


def unchanged(context: TraceContext) -> Edit:
    return no_edit(context.program)


def step_after_s(context: TraceContext, edit: Edit) -> float:
    """Seconds of a step after a change, scheduled again."""
    if is_fed_late(context) and not _feeds(context, edit):
        return context.step_s
    return not_below_kernels(context, context.loop.step_s(edited(context.program, edit)), edit)


def gains_s(context: TraceContext, edit: Edit) -> tuple[float, ...]:
    """Seconds of a step that a change saves, by the likeliest host and by the others."""
    if is_fed_late(context) and not _feeds(context, edit):
        return (0.0,)
    others = (
        step_s - not_below_kernels(context, context.loop.step_s(edited(host, edit)), edit)
        for host, step_s in context.other_hosts
    )
    return tuple(max(0.0, gain_s) for gain_s in (context.step_s - step_after_s(context, edit), *others))


def _feeds(context: TraceContext, edit: Edit) -> bool:
    """Whether a change takes away most of the wait for batches."""
    before, _ = context.clock.cut(context.time_of(loading_spans(context)), 0.0)
    waited_s = np.maximum(0.0, context.program.gap_s)
    return float((np.minimum(edit.cut_before, before) * waited_s).sum()) >= 0.5 * float((before * waited_s).sum())


def usual_gain_s(context: TraceContext, edit: Edit) -> float:
    """Seconds of a step that a change saves if the host is as fast as it usually is unrecorded, and what that frees
    was waited for in what the change removes."""
    before_s = context.step_s if context.is_timed else longest_step_s(context)
    return max(0.0, before_s - context.loop.step_s(edited(usual(context.wiring.program, _long_gap_s(context)), edit)))


def unrecorded_step_s(context: TraceContext) -> float:
    """Seconds of a step without the recording, where the recorder measured that; else as replayed."""
    return context.step_s * pace_of(context)


def pace_of(context: TraceContext) -> float:
    """An unrecorded step over the replayed one, where both are known."""
    known_s = unprofiled_step_s(context)
    return known_s / context.step_s if known_s and context.step_s > 0 else 1.0
