"""What a trace can and cannot answer: everything that is missing or odd in it, and what that does to the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.trace.breakdown import total_of
from ridgeline.trace.idle import idle_causes, named
from ridgeline.trace.intervals import covered_within
from ridgeline.trace.kind import Kind
from ridgeline.trace.steps import windows_of
from ridgeline.trace.table import Trace

NOTE, WARNING, SEVERE = "note", "warning", "severe"
#: Calls that put something on a device; memsets are left out, since those of no bytes put nothing there.
_LAUNCH = re.compile(
    r"^(?:cuda|hip)(?:Ext)?(?:Module)?LaunchKernel|^cuLaunchKernel|^(?:cuda|hip)Memcpy\w*Async|GraphLaunch|LaunchCooperative",
    re.IGNORECASE,
)
_GRAPH = re.compile(r"GraphLaunch", re.IGNORECASE)
_WAITS = re.compile(r"Synchronize|Memcpy|Memset|EventQuery|GraphInstantiate|Host(?:Register|Alloc)")
COLD_NS = 100_000_000
"""Of a call that does not wait for the device: the longest of warm ones take a tenth of it."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing to know before believing an answer."""

    code: str
    severity: str  # note, warning or severe
    what: str
    effect: str
    share_frac: float = 0.0  # of spans or of time, as ``what`` says
    count: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """Everything found, the most severe first; an empty list is a trace without reproach."""

    issues: tuple[Issue, ...]

    @property
    def verdict(self) -> str:
        """``good``, ``usable`` or ``poor``."""
        severities = {issue.severity for issue in self.issues}
        return "poor" if SEVERE in severities else "usable" if WARNING in severities else "good"

    def has(self, code: str) -> bool:
        return any(issue.code == code for issue in self.issues)

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "issues": [asdict(issue) for issue in self.issues]}


def quality(trace: Trace) -> Quality:
    """Checks a trace; nothing is dropped because of what is found."""
    found = [issue for check in _CHECKS for issue in check(trace)]
    order = (SEVERE, WARNING, NOTE)
    return Quality(tuple(sorted(found, key=lambda issue: (order.index(issue.severity), -issue.share_frac, issue.code))))


def _damage(trace: Trace) -> Iterator[Issue]:
    if trace.meta.get("truncated"):
        yield Issue("truncated", SEVERE, f"the file is incomplete: {trace.meta['truncated']}",
                    "totals cover what could be read; what came after is missing from every answer")  # fmt: skip
    lost = int(trace.meta.get("num_lost", 0))
    if lost:
        share = lost / (lost + len(trace))
        yield Issue("unreadable", SEVERE if share > 0.01 else WARNING, f"{lost:,} events could not be read",
                    "their time is missing from every answer", share, lost)  # fmt: skip


def _unusable(trace: Trace) -> Iterator[Issue]:
    if trace.meta.get("unread"):
        yield Issue("unread", WARNING, str(trace.meta["unread"]),
                    "the others are in no answer: unpack the archive and give its folder")  # fmt: skip
    num = int(trace.meta.get("num_negative", 0))
    if num:
        share = num / max(1, len(trace))
        yield Issue("negative", SEVERE if share > 0.01 else WARNING, f"{num:,} events end before they start",
                    "they are counted as taking no time: totals are too small by theirs", share, num)  # fmt: skip


def _set_aside(trace: Trace) -> Iterator[Issue]:
    aside = trace.meta.get("set_aside", ())
    if aside:
        yield Issue("set_aside", WARNING, f"{len(aside)} files of the folder could not be read as traces: {aside[0]}",
                    "they are in no answer; a rank that is among them is missing", 0.0, len(aside))  # fmt: skip


def _no_device(trace: Trace) -> Iterator[Issue]:
    if not len(trace) and trace.counters:
        yield Issue("no_spans", NOTE, "the file knows of counters alone, memory as a rule",
                    "nothing is said of time: record a trace beside it")  # fmt: skip
    elif not len(trace):
        yield Issue("empty", SEVERE, "the trace holds no spans", "there is nothing to analyze")
    elif not trace.gpu.any():
        yield Issue("no_device", WARNING, "no kernel, copy or collective was recorded on any device",
                    "device totals are zero: record with the CUDA activity on, unless nothing ran there")  # fmt: skip


def _unlinked(trace: Trace) -> Iterator[Issue]:
    work, calls = trace.gpu, trace.of_kind(Kind.RUNTIME)
    num, lost = int(work.sum()), int((work & (trace.launch < 0)).sum())
    if not num or not lost:
        return
    if not calls.any():
        if trace.meta.get("format") in ("kineto", "nsys", "chrome"):
            yield Issue("no_calls", WARNING, "no launch calls were recorded",
                        "idle time cannot be told by cause, and kernels have no op or module", 1.0, lost)  # fmt: skip
        return
    complete, linked = total_of(trace, work), total_of(trace, work & (trace.launch >= 0))
    share = lost / num
    yield Issue(
        "unlinked", WARNING if share > 0.01 else NOTE,
        f"{lost:,} of {num:,} device events have no launch in the file",
        f"totals of all events count them; a tool that drops them reports {linked.busy_ms:.3f} ms busy instead of "
        f"{complete.busy_ms:.3f} and {linked.idle_ms:.3f} ms idle instead of {complete.idle_ms:.3f}; "
        "their ops and modules are unknown",
        share, lost,
    )  # fmt: skip


def _early(trace: Trace) -> Iterator[Issue]:
    """Work that was launched before the recording began, work it did not see any more, and work it missed."""
    calls = named(trace, _LAUNCH, trace.of_kind(Kind.RUNTIME))
    linked = trace.gpu & (trace.launch >= 0)
    if not calls.any() or not linked.any():
        return
    first = trace.start_ns[linked].min()
    early = int((trace.gpu & (trace.launch < 0) & (trace.start_ns < first)).sum())
    if early:
        yield Issue("early_kernels", NOTE, f"{early:,} device events were launched before the recording began",
                    "they belong to earlier steps, and have no op or module", early / int(trace.gpu.sum()),
                    early)  # fmt: skip
    used = np.zeros(len(trace), dtype=np.bool_)
    used[trace.launch[linked]] = True
    barren, last = calls & ~used, trace.start_ns[used].max()
    late = int((barren & (trace.start_ns > last)).sum())
    dropped, num = int(barren.sum()) - late, int(calls.sum())
    if late > 2:
        yield Issue("late_launches", NOTE, f"the last {late:,} launch calls have no device event yet",
                    "the recording ended before they ran", late / num, late)  # fmt: skip
    if dropped > max(2, 0.001 * num):
        share = dropped / num
        yield Issue("dropped_kernels", SEVERE if share > 0.1 else WARNING if share > 0.01 else NOTE,
                    f"{dropped:,} of {num:,} launch calls have no device event although later ones do",
                    "device events were dropped: busy time is too small", share, dropped)  # fmt: skip


def _graphs(trace: Trace) -> Iterator[Issue]:
    calls = named(trace, _GRAPH, trace.of_kind(Kind.RUNTIME))
    if not calls.any():
        return
    missing_s = sum(cause.idle_s for cause in idle_causes(trace) if cause.cause == "unrecorded")
    total_s = total_of(trace, trace.gpu).total_ms / 1e3
    if total_s and missing_s > 0.005 * total_s:
        share = missing_s / total_s
        yield Issue("graph_replays", SEVERE if share > 0.1 else WARNING,
                    f"{missing_s * 1e3:.1f} ms show no device work although graph replays were queued",
                    "kernels inside CUDA graphs were not recorded: that time is work, not idleness; read idle time "
                    f"without the cause 'unrecorded', and record with CUDA graphs off to see it ({int(calls.sum())} "
                    "replays)", share, int(calls.sum()))  # fmt: skip


def _missing(trace: Trace) -> Iterator[Issue]:
    """Things a recording may contain and this one does not."""
    ops = trace.of_kind(Kind.OP)
    if trace.meta.get("format") not in ("kineto", "chrome", "nsys"):
        return
    if ops.any() and not (trace.optional("shapes")[ops] > 0).any():
        yield Issue("no_shapes", NOTE, "input shapes were not recorded",
                    "floors, padding and layouts cannot be judged; record with record_shapes=True")  # fmt: skip
    if ops.any() and not trace.source.any():
        yield Issue("no_stacks", NOTE, "no Python stacks were recorded",
                    "causes are named by op, not by source line; record with with_stack=True")  # fmt: skip
    if ops.any() and not trace.module.any():
        yield Issue("no_modules", NOTE, "no modules were recorded",
                    "time is told by op, not by module; record with with_modules=True or with_stack=True")  # fmt: skip
    if not (trace.step >= 0).any():
        yield Issue("no_steps", NOTE, "no steps are marked",
                    "all is judged over the whole trace, warm-up included; call profiler.step()")  # fmt: skip


def _steps(trace: Trace) -> Iterator[Issue]:
    numbers = {rank: windows_of(trace, rank) for rank in trace.ranks()[:64]}
    counts = {len(windows.number) for windows in numbers.values() if len(windows.number) and windows.number[0] >= 0}
    if len(counts) > 1:
        yield Issue("uneven_steps", WARNING, f"ranks have between {min(counts)} and {max(counts)} steps",
                    "ranks are compared on steps that not all of them have")  # fmt: skip
    if counts and max(counts) == 1:
        yield Issue("one_step", NOTE, "only one step was recorded",
                    "there is no telling warm-up from steady state, or noise from change")  # fmt: skip
    for windows in list(numbers.values())[:1]:
        lasts = windows.end - windows.start
        if len(lasts) >= 4 and lasts[0] > 1.5 * np.median(lasts[1:]):
            yield Issue("warm_up", NOTE, f"the first step takes {lasts[0] / np.median(lasts[1:]):.1f}× the median",
                        "means over steps include warm-up; medians do not")  # fmt: skip


def _clock(trace: Trace) -> Iterator[Issue]:
    kernels = trace.gpu & trace.of_kind(Kind.KERNEL)
    if trace.meta.get("clock_ns", 1) >= 1000 and kernels.any():
        busy = trace.busy(trace.gpu)
        num = max(0, len(busy.start) - 1)
        idle_ns = int(busy.end[-1] - busy.start[0]) - busy.total if len(busy.start) else 0
        share = num * 500 / idle_ns if idle_ns else 0.0  # half a microsecond each, as a rule
        yield Issue("clock", WARNING if share > 0.05 else NOTE,
                    "times are whole microseconds",
                    f"each of {num:,} gaps is off by up to 1 µs: idle time of {idle_ns / 1e6:.3f} ms is uncertain by "
                    f"about {num * 500 / 1e6:.3f} ms, and kernels of a few µs by tens of percent",
                    min(share, 1.0), num)  # fmt: skip
    if trace.meta.get("grid_ns"):
        yield Issue("grid", NOTE,
                    f"times have more digits than a JSON number holds ({trace.meta['grid_ns']} ns apart)",
                    "totals take both ends of a span on that grid, as other tools do; from the digits themselves "
                    f"idle time is {_exact_idle_ms(trace):.3f} ms")  # fmt: skip


def _exact_idle_ms(trace: Trace) -> float:
    busy = trace.busy(trace.gpu)
    return (int(busy.end[-1] - busy.start[0]) - busy.total) / 1e6 if len(busy.start) else 0.0


def _overhead(trace: Trace) -> Iterator[Issue]:
    spent = trace.of_kind(Kind.OVERHEAD)
    total_s = trace.end_s
    if spent.any() and total_s:
        spent_s = trace.busy(spent).total / 1e9
        share = spent_s / total_s
        if share > 0.002:
            yield Issue("overhead", WARNING if share > 0.03 else NOTE,
                        f"the profiler itself took {spent_s * 1e3:.1f} ms", "steps are that much too long", share,
                        int(spent.sum()))  # fmt: skip
    python, ops = int(trace.of_kind(Kind.PYTHON).sum()), int(trace.of_kind(Kind.OP).sum())
    if python > 200 and python > ops:
        yield Issue("stack_overhead", NOTE, f"Python stacks were recorded ({python:,} frames for {ops:,} ops)",
                    "the host runs slower than without: launch-bound time is overstated", 0.0, python)  # fmt: skip


def _cold(trace: Trace) -> Iterator[Issue]:
    """Calls that wait for nothing and take a tenth of a second open the device or load code: a first use."""
    if not trace.gpu.any():
        return
    long = trace.of_kind(Kind.RUNTIME) & (trace.end_ns - trace.start_ns > COLD_NS)
    long &= ~named(trace, _WAITS, long)
    busy, span = trace.busy(trace.gpu), (trace.start_ns[trace.gpu].min(), trace.end_ns[trace.gpu].max())
    start, end = (np.clip(edge[long], *span) for edge in (trace.start_ns, trace.end_ns))
    idle_ns = int((end - start - covered_within(busy, start, end)).sum())
    share = idle_ns / max(1, int(span[1] - span[0]))
    if share > 0.05:
        yield Issue("cold", SEVERE if share > 0.5 else WARNING,
                    f"{idle_ns / 1e6:,.0f} ms pass in {len(start)} calls that open the device or load code",
                    "a first use, which later steps do not have: record after a few steps", share,
                    len(start))  # fmt: skip


def _order(trace: Trace) -> Iterator[Issue]:
    """Spans that overlap on a stream, or start before their launch."""
    rows = trace.in_order(trace.gpu)
    if not len(rows):
        return
    code = (trace.rank[rows].astype(np.int64) * 4096 + trace.device[rows]) * 2**31 + trace.stream[rows]
    order = np.argsort(code, kind="stable")
    rows, code = rows[order], code[order]
    slack = int(trace.meta.get("clock_ns", 1)) * (2 if trace.meta.get("clock_ns", 1) > 1 else 1)
    overlap = (code[1:] == code[:-1]) & (trace.start_ns[rows[1:]] + slack < trace.end_ns[rows[:-1]])
    num = int(overlap.sum())
    if num > 0.001 * len(rows) and num > 2:
        yield Issue("overlap", NOTE, f"{num:,} device events start before the one ahead of them on their stream ends",
                    "programmatic dependent launches, graph branches or rounding; unions count their time once",
                    num / len(rows), num)  # fmt: skip
    linked = rows[trace.launch[rows] >= 0]
    early = int((trace.start_ns[linked] + slack < trace.start_ns[trace.launch[linked]]).sum())
    if early > 0.001 * len(linked) and early > 2:
        yield Issue("clock_skew", WARNING, f"{early:,} kernels start before they are launched",
                    "host and device clocks disagree: idle causes and launch delays are shifted",
                    early / len(linked), early)  # fmt: skip


def _ranks(trace: Trace) -> Iterator[Issue]:
    world = trace.meta.get("distributed", {}).get("world_size")
    num = max(len(trace.ranks()), int(trace.meta.get("num_ranks", 0)))
    if isinstance(world, int) and world > num:
        yield Issue("missing_ranks", NOTE, f"{num} of {world} ranks are at hand",
                    "waiting for a straggler cannot be told from slow communication", 1 - num / world,
                    world - num)  # fmt: skip


def _strangers(trace: Trace) -> Iterator[Issue]:
    """Files that were given together as the ranks of one job, and may be none."""
    worlds = trace.meta.get("worlds", ())
    if len(worlds) < 2:
        return
    stated = sorted({world for world in worlds if isinstance(world, int)})
    silent = sum(not isinstance(world, int) for world in worlds)
    says = "files are of jobs of different sizes" if len(stated) > 1 else "files do not say which rank they are"
    if len(stated) > 1 or silent:
        yield Issue("strangers", WARNING, f"{len(worlds) if len(stated) > 1 else silent} of {len(worlds)} {says}",
                    "all are taken as ranks of one job and numbered as they come; traces of different programs are "
                    "to be explained one at a time", silent / len(worlds), silent)  # fmt: skip


_CHECKS: tuple[Callable[[Trace], Iterator[Issue]], ...] = (
    _set_aside, _damage, _unusable, _no_device, _unlinked, _early, _graphs, _missing, _steps, _clock, _overhead, _cold,
    _order, _ranks, _strangers,
)  # fmt: skip
