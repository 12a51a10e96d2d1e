"""One rank of a trace as the rules see it: its steps, what ran, what held it, and what a change would bring."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.fact import positive
from ridgeline.findings.context.kernel_name import KernelName, kernel_name
from ridgeline.findings.replay.fix import HostClock
from ridgeline.findings.replay.loop import Loop, loop_of
from ridgeline.findings.replay.overhead import BARE_FRACS, UNTIMED_FRACS, Hosts, unrecorded
from ridgeline.findings.replay.program import Wiring, wire
from ridgeline.findings.replay.replay import Edit, Index, Mask, Schedule, Seconds, run
from ridgeline.findings.replay.window import Window, window_of
from ridgeline.hardware import Device
from ridgeline.trace.intervals import Intervals, covered_within, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.RUNTIME, Kind.STEP, Kind.DATALOADER, Kind.GC, Kind.OVERHEAD)


SURE_FRAC = 0.02
"""Of the step: what every eager program has some of (launches, pointwise kernels, odd sizes) is told from here on at
worst; a mistake that somebody made is told by what it brings at best."""

LONG_GAP_S = 2e-3
"""No op, and no fused optimizer over hundreds of tensors, needs this long between two launches: the host does
something else."""

VIEWS, VIEW_S, MANY_VIEWS = r"^aten::(select|slice|narrow|as_strided|view|expand|unsqueeze|transpose)$", 7e-6, 100
"""Ops that launch nothing, what one of them takes recorded at most, and how many fill a gap."""


Value = TypeVar("Value")


def derived(compute: Callable[[TraceContext], Value]) -> Callable[[TraceContext], Value]:
    """A function of a trace context that is computed once for each."""

    @wraps(compute)
    def known(context: TraceContext) -> Value:
        if compute not in context.derived:
            context.derived[compute] = compute(context)
        return cast(Value, context.derived[compute])

    return known


class TraceContext:
    """Everything a rule may ask; columns named ``work_…`` have a row for each piece of device work in the window."""

    def __init__(self, trace: Trace, device: Device | None = None, others: Sequence[Trace] = ()) -> None:
        self.trace = trace
        self.device = device
        self.others = tuple(others)
        self._patterns = dict[str, Mask]()
        self.derived = dict[Callable[..., Any], Any]()  # see the decorator of this name
        self.window: Window = window_of(trace)
        self.wiring: Wiring = wire(trace, self.window, trace.gpu)
        self.rows = self.wiring.work_rows
        self.loop: Loop = loop_of(self.wiring, self.window)
        self.hosts: Hosts = unrecorded(
            self.wiring.program,
            _recorded_ops(self),
            unprofiled_step_s(self),
            self.loop,
            _long_gap_s(self),
            _untimed_fracs(self),
        )
        self.program = self.hosts.program
        self.base: Schedule = run(self.program)
        self.step_s: float = not_below_kernels(self, self.loop.step_s(self.program))  # in the steady state
        kept = self.hosts.others if self.program.num_works <= 20_000 else ()  # each costs a replay a rule
        self.other_hosts = tuple((host, not_below_kernels(self, self.loop.step_s(host))) for host in kept)

    @property
    def is_timed(self) -> bool:
        """Whether a step was also timed without the recording."""
        return unprofiled_step_s(self) is not None

    @property
    def num_steps(self) -> int:
        return self.window.num_steps

    def family(self, *families: str) -> Mask:
        """Kernels of these families."""
        chosen = np.fromiter(
            (name.family in families for name in kernel_names(self)), dtype=bool, count=len(kernel_names(self))
        )
        return np.asarray(chosen[self.trace.name[self.rows]] & (self.work_kind == int(Kind.KERNEL)), dtype=bool)

    def named(self, pattern: str, column: str = "name") -> Mask:
        """Works in whose name (or op, module, …) the pattern is found."""
        return np.asarray(self.words_like(pattern)[self.column(column)[self.rows]], dtype=bool)

    def words_like(self, pattern: str) -> Mask:
        """Which words of the trace have the pattern."""
        known = self._patterns.get(pattern)
        if known is None:
            search = re.compile(pattern, re.IGNORECASE).search
            known = np.fromiter(
                (search(word) is not None for word in self.trace.words), dtype=bool, count=len(self.trace.words)
            )
            self._patterns[pattern] = known
        return known

    def column(self, name: str) -> NDArray[Any]:
        own = getattr(self.trace, name, None)
        return np.asarray(own) if own is not None else self.trace.optional(name)

    @cached_property
    def work_kind(self) -> NDArray[np.int8]:
        return self.trace.kind[self.rows]

    @cached_property
    def work_s(self) -> Seconds:
        return self.program.duration_s

    @cached_property
    def launch_ns(self) -> NDArray[np.int64]:
        """When the call that launched each piece of work started."""
        return self.wiring.call_start_ns[self.program.call]

    def per_step_s(self, works: Mask | Index) -> float:
        """Seconds of device work a step."""
        return float(self.work_s[works].sum()) / self.num_steps

    def frac(self, seconds_a_step: float) -> float:
        return seconds_a_step / self.step_s if self.step_s > 0 else 0.0

    def host_spans(self, pattern: str, *kinds: Kind) -> Index:
        """Host spans of the window whose name has the pattern."""
        mask = self.words_like(pattern)[self.trace.name] & self.trace.of_kind(*(kinds or HOST_KINDS))
        return inside_window(self, np.flatnonzero(mask & (self.trace.device < 0)))

    def of_kind(self, *kinds: Kind) -> Index:
        return inside_window(self, np.flatnonzero(self.trace.of_kind(*kinds)))

    @cached_property
    def start_ns(self) -> NDArray[np.int64]:
        return self.trace.start_ns

    @cached_property
    def end_ns(self) -> NDArray[np.int64]:
        return self.trace.end_ns

    def time_of(self, spans: Index) -> Intervals:
        """The time that spans cover."""
        return union(self.start_ns[spans], self.end_ns[spans])

    def launched_in(self, host: Intervals) -> Mask:
        """Work whose launch lies in this host time."""
        return np.asarray(
            (covered_within(host, self.launch_ns, self.launch_ns + 1) > 0) & (self.trace.launch[self.rows] >= 0),
            dtype=bool,
        )

    @cached_property
    def clock(self) -> HostClock:
        after = self.wiring.program.after
        ends = self.wiring.call_end_ns
        gap_start = np.where(after >= 0, ends[np.maximum(after, 0)], self.window.start_ns)
        return HostClock(gap_start, self.wiring.call_start_ns, ends)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the recorder wrote beside the spans."""
        found = self.trace.meta.get("ridgeline")
        return dict(found) if isinstance(found, dict) else {}

    def number(self, fact: str) -> float | None:
        """A noted quantity; None if it was not noted, or is no number above nothing."""
        return positive(self.facts.get(fact))


def _recorded_ops(context: TraceContext) -> Seconds:
    """How many ops and annotations were recorded in the host time before each call."""
    rows = np.flatnonzero(context.trace.of_kind(Kind.OP, Kind.ANNOTATION) & (context.trace.device < 0))
    starts = np.sort(context.start_ns[rows])
    clock = context.clock
    first, last = np.searchsorted(starts, clock.gap_start_ns), np.searchsorted(starts, clock.start_ns)
    return np.asarray(last - first, dtype=np.float64)


@derived
def _long_gap_s(context: TraceContext) -> Seconds:
    """What a gap must last to be something else than launching: of one full of views (a tensor taken apart into
    hundreds), nothing is long enough, and recording stretches it as any launching."""
    rows = np.flatnonzero(context.trace.of_kind(Kind.OP) & (context.trace.device < 0))
    views = np.sort(context.start_ns[rows[context.words_like(VIEWS)[context.trace.name[rows]]]])
    clock = context.clock
    num = np.searchsorted(views, clock.start_ns) - np.searchsorted(views, clock.gap_start_ns)
    full = num * VIEW_S > 0.5 * (clock.start_ns - clock.gap_start_ns) / 1e9
    return np.where(full & (num >= MANY_VIEWS), np.inf, LONG_GAP_S)


def _untimed_fracs(context: TraceContext) -> tuple[float, ...]:
    """What the recording leaves of the host's time: it is the ops that cost."""
    recorded = context.trace.of_kind(Kind.OP).any() and context.trace.of_kind(Kind.RUNTIME).any()
    return UNTIMED_FRACS if recorded else BARE_FRACS


def unprofiled_step_s(context: TraceContext) -> float | None:
    """What a step takes when nothing is recorded, if the recorder measured it."""
    return context.number("unprofiled_step_s")


def num_devices(context: TraceContext) -> int:
    return max(1, len(np.unique(context.trace.device[context.rows])))


@derived
def _num_streams(context: TraceContext) -> int:
    return len(np.unique(context.program.stream[context.work_kind == int(Kind.KERNEL)]))


def not_below_kernels(context: TraceContext, step_s: float, edit: Edit | None = None) -> float:
    """A replayed step, and where nobody timed one no less than its kernels took that a change does not touch. What
    keeps kernels of several streams apart is not always recorded (a library's own streams), and a replay lets them
    run all at once: 26 ms a step where the device was busy for 37."""
    if context.is_timed or _num_streams(context) < 2 or num_devices(context) > 1:
        return step_s
    left = np.ones(len(context.rows), dtype=bool) if edit is None else (edit.scale >= 1.0) & ~edit.aside
    return max(step_s, kernels_s(context, left) / context.num_steps)


def kernels_s(context: TraceContext, chosen: Mask) -> float:
    """Seconds in which one of the chosen kernels runs."""
    kernels = chosen & (context.work_kind == int(Kind.KERNEL))
    return context.time_of(context.rows[kernels]).total / 1e9


@derived
def kernel_names(context: TraceContext) -> tuple[KernelName, ...]:
    """Family and precision of every word of the trace."""
    used = np.zeros(len(context.trace.words), dtype=bool)
    used[context.trace.name[context.rows]] = True
    return tuple(
        kernel_name(word) if wanted else KernelName("other")
        for word, wanted in zip(context.trace.words, used.tolist(), strict=True)
    )


def inside_window(context: TraceContext, spans: Index) -> Index:
    """Those of the spans that begin in the window."""
    start = context.start_ns[spans]
    return spans[(start >= context.window.start_ns) & (start < context.window.end_ns)]
