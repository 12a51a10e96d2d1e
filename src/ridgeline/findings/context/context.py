"""One rank of a trace as the rules see it: its steps, what ran, what held it, and what a change would bring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.context.fact import positive
from ridgeline.findings.context.kernel_name import KernelName, kernel_name
from ridgeline.findings.finding import Where
from ridgeline.findings.replay.calibration import NOISE, UNMEASURED_FRAC
from ridgeline.findings.replay.fix import Cure, HostClock, edit_of, joined
from ridgeline.findings.replay.loop import Loop, loop_of
from ridgeline.findings.replay.overhead import BARE_FRACS, UNTIMED_FRACS, Hosts, unrecorded, usual
from ridgeline.findings.replay.program import BACK_TO_BACK_S, Wiring, wire
from ridgeline.findings.replay.replay import Edit, Index, Mask, Schedule, Seconds, edited, no_edit, run
from ridgeline.findings.replay.window import Window, window_of
from ridgeline.hardware import Device
from ridgeline.trace.intervals import Intervals, covered_within, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace

HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.RUNTIME, Kind.STEP, Kind.DATALOADER, Kind.GC, Kind.OVERHEAD)


LOADER = r"dataloader.*(__next__|next)|_next_data|data_?loading|fetch_batch|DataPipe"
FED_LATE_FRAC, FED_LATE_S = 0.05, 2e-3
"""Waiting for batches, of a step and at least, from which on workers set the pace."""
MAX_DEPTH = 64
MANY_WORKS = 20_000
FORWARD_OPS = (
    r"^aten::(linear|layer_norm|rms_norm|group_norm|batch_norm|scaled_dot_product_attention|gelu|silu|relu|softmax|dropout"
    r"|conv\dd|embedding)$"
)
"""Ops that only a forward pass calls: in a backward pass they are a second time."""
BACKWARD = r"evaluate_function|Backward\d*$"
OWN_BACKWARD = r"^(?!CheckpointFunction)\w+Backward$"
"""Gradients that a program wrote itself (those of PyTorch end in a number): reversible layers and the like compute
forward work there by design."""
TAKEN_AWAY = r"^aten::(sub|rsub)_?$"
FACTORED = r"^aten::(_?linalg_\w+|cholesky\w*|_cholesky\w*|triangular_solve|lu_\w+|geqrf|ormqr|orgqr|svd|lstsq)$"
"""Factorizations and solves: what they launch is their solver's own."""
FACTORED_BACKWARD = r"^(Linalg|Cholesky|TriangularSolve|Lu)\w*Backward\d*$"
"""Gradients of such: PyTorch keeps TF32 out of their products, whatever is set."""
LOSS_BACKWARD = (
    r"^autograd::engine::evaluate_function: (NllLoss|CrossEntropy|MseLoss|L1Loss|SmoothL1|HuberLoss|BinaryCross|KlDiv)"
)
PASS_WORKS = 10
"""Launches between the gradients of two losses from which on they are of two passes."""
SURE_FRAC = 0.02
"""Of the step: what every eager program has some of (launches, pointwise kernels, odd sizes) is told from here on at
worst; a mistake that somebody made is told by what it brings at best."""
LONG_GAP_S = 2e-3
"""No op, and no fused optimizer over hundreds of tensors, needs this long between two launches: the host does
something else."""
VIEWS, VIEW_S, MANY_VIEWS = r"^aten::(select|slice|narrow|as_strided|view|expand|unsqueeze|transpose)$", 7e-6, 100
"""Ops that launch nothing, what one of them takes recorded at most, and how many fill a gap."""
ONGOING_FRAC, LATE_FRAC = 0.25, 0.1
"""Of what a round has in the mean, in half of them; and of a whole recording, in its later half."""
STOPS = 4
"""Gaps in which a thread was not running, at least: once is whatever a machine does."""
SILENT_S, SILENT_TIMES, SILENT_FRAC = 300e-6, 20.0, 0.25
"""Nor does a host that launches stay without an op for this long, and this many times as long as it usually does: of
such a gap ops cover less than a quarter."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waited: its place in the program, its span, the names around it from inside out, and its copy, if
    any."""

    call: int
    row: int
    names: tuple[str, ...]
    copy: str
    source: str
    num_bytes: int


class Scene:
    """Everything a rule may ask; columns named ``work_…`` have a row for each piece of device work in the window."""

    def __init__(self, trace: Trace, device: Device | None = None, others: Sequence[Trace] = ()) -> None:
        self.trace = trace
        self.device = device
        self.others = tuple(others)
        self._patterns = dict[str, Mask]()
        self.window: Window = window_of(trace)
        self.wiring: Wiring = wire(trace, self.window, trace.gpu)
        self.rows = self.wiring.work_rows
        self.loop: Loop = loop_of(self.wiring, self.window)
        self.hosts: Hosts = unrecorded(
            self.wiring.program,
            self._recorded_ops(),
            self._unrecorded_step_s(),
            self.loop,
            self._long_s,
            self._untimed_fracs(),
        )
        self.program = self.hosts.program
        self.base: Schedule = run(self.program)
        self.step_s: float = self._not_below_kernels(self.loop.step_s(self.program))  # in the steady state
        kept = self.hosts.others if self.program.num_works <= MANY_WORKS else ()  # each costs a replay a rule
        self._other_hosts = tuple((host, self._not_below_kernels(self.loop.step_s(host))) for host in kept)

    @cached_property
    def recorded(self) -> Schedule:
        """The replay with the recording's cost still in it: what the trace shows."""
        return self.base if self.program is self.wiring.program else run(self.wiring.program)

    @property
    def recorded_frac(self) -> float:
        """Of the recorded launching time, what is left without the recording."""
        return self.hosts.frac

    @cached_property
    def _long_s(self) -> Seconds:
        """What a gap must last to be something else than launching: of one full of views (a tensor taken apart into
        hundreds), nothing is long enough, and recording stretches it as any launching."""
        rows = np.flatnonzero(self.trace.of_kind(Kind.OP) & (self.trace.device < 0))
        views = np.sort(self.start_ns[rows[self.words_like(VIEWS)[self.trace.name[rows]]]])
        clock = self.clock
        num = np.searchsorted(views, clock.start_ns) - np.searchsorted(views, clock.gap_start_ns)
        full = num * VIEW_S > 0.5 * (clock.start_ns - clock.gap_start_ns) / 1e9
        return np.where(full & (num >= MANY_VIEWS), np.inf, LONG_GAP_S)

    def _recorded_ops(self) -> Seconds:
        """How many ops and annotations were recorded in the host time before each call."""
        rows = np.flatnonzero(self.trace.of_kind(Kind.OP, Kind.ANNOTATION) & (self.trace.device < 0))
        starts = np.sort(self.start_ns[rows])
        clock = self.clock
        first, last = np.searchsorted(starts, clock.gap_start_ns), np.searchsorted(starts, clock.start_ns)
        return np.asarray(last - first, dtype=np.float64)

    def _untimed_fracs(self) -> tuple[float, ...]:
        """What the recording leaves of the host's time: it is the ops that cost."""
        recorded = self.trace.of_kind(Kind.OP).any() and self.trace.of_kind(Kind.RUNTIME).any()
        return UNTIMED_FRACS if recorded else BARE_FRACS

    @property
    def recorded_step_s(self) -> float:
        return self.recorded.end_s / self.num_steps

    def _unrecorded_step_s(self) -> float | None:
        """What a step takes when nothing is recorded, if the recorder measured it."""
        return self.number("unprofiled_step_s")

    @property
    def is_timed(self) -> bool:
        """Whether a step was also timed without the recording."""
        return self._unrecorded_step_s() is not None

    @property
    def hides_its_host(self) -> bool:
        """Whether the device decides a step that was timed, so that nothing tells how fast the host is: as slow as it
        was recorded, or as fast as it usually is."""
        return self.is_timed and self.hosts.frac == 1.0 and bool(self._other_hosts)

    @property
    def noise_s(self) -> float:
        """What the step may differ by when it is measured again: as unrecorded steps vary, else as others did."""
        spread_s = self.number("unprofiled_spread_s")
        return UNMEASURED_FRAC * self.unrecorded_step_s if spread_s is None else NOISE * spread_s

    @property
    def num_devices(self) -> int:
        return max(1, len(np.unique(self.trace.device[self.rows])))

    @property
    def num_steps(self) -> int:
        return self.window.num_steps

    @cached_property
    def num_rounds(self) -> int:
        """Steps as far as one can tell: those that were marked, else those of the optimizer."""
        updates = 0 if self.window.is_marked else len(self.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP))
        return max(self.num_steps, updates)

    # what ran

    @cached_property
    def names(self) -> tuple[KernelName, ...]:
        """Family and precision of every word of the trace."""
        used = np.zeros(len(self.trace.words), dtype=bool)
        used[self.trace.name[self.rows]] = True
        return tuple(
            kernel_name(word) if wanted else KernelName("other")
            for word, wanted in zip(self.trace.words, used.tolist(), strict=True)
        )

    def family(self, *families: str) -> Mask:
        """Kernels of these families."""
        chosen = np.fromiter((name.family in families for name in self.names), dtype=bool, count=len(self.names))
        return np.asarray(chosen[self.trace.name[self.rows]] & (self.work_kind == int(Kind.KERNEL)), dtype=bool)

    def precision(self, *precisions: str) -> Mask:
        """Products of these precisions, by their names."""
        chosen = np.fromiter((name.precision in precisions for name in self.names), dtype=bool, count=len(self.names))
        return np.asarray(chosen[self.trace.name[self.rows]], dtype=bool)

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

    @cached_property
    def launched_late(self) -> Index:
        """Works that a call of their own launched after their stream had run dry."""
        order = np.lexsort((self.base.work_start_s, self.program.stream))
        same = np.concatenate(([False], self.program.stream[order][1:] == self.program.stream[order][:-1]))
        freed_s = np.concatenate(([0.0], self.base.work_end_s[order][:-1]))
        dry = np.zeros(len(order), dtype=bool)
        dry[order] = same & (self.base.work_start_s[order] - freed_s > BACK_TO_BACK_S)
        alone = np.bincount(self.program.call, minlength=self.program.num_calls)[self.program.call] == 1
        return np.flatnonzero(dry & alone & self.linked)

    @cached_property
    def linked(self) -> Mask:
        return self.trace.launch[self.rows] >= 0

    def per_step_s(self, works: Mask | Index) -> float:
        """Seconds of device work a step."""
        return float(self.work_s[works].sum()) / self.num_steps

    def frac(self, seconds_a_step: float) -> float:
        return seconds_a_step / self.step_s if self.step_s > 0 else 0.0

    # host time

    def host_spans(self, pattern: str, *kinds: Kind) -> Index:
        """Host spans of the window whose name has the pattern."""
        mask = self.words_like(pattern)[self.trace.name] & self.trace.of_kind(*(kinds or HOST_KINDS))
        return self.inside(np.flatnonzero(mask & (self.trace.device < 0)))

    def of_kind(self, *kinds: Kind) -> Index:
        return self.inside(np.flatnonzero(self.trace.of_kind(*kinds)))

    def inside(self, spans: Index) -> Index:
        """Those of the spans that begin in the window."""
        start = self.start_ns[spans]
        return spans[(start >= self.window.start_ns) & (start < self.window.end_ns)]

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
        return np.asarray((covered_within(host, self.launch_ns, self.launch_ns + 1) > 0) & self.linked, dtype=bool)

    @cached_property
    def launching(self) -> Intervals:
        """Host time spent on launching: calls, and the short gaps between them."""
        clock = self.clock
        return union(np.where(self._away, clock.start_ns, clock.gap_start_ns), clock.end_ns)

    @cached_property
    def elsewhere(self) -> Intervals:
        """Host time between calls that is too long to be the launching of an op."""
        return union(self.clock.gap_start_ns[self._away], self.clock.start_ns[self._away])

    @cached_property
    def _away(self) -> Mask:
        """Calls before which the host did something else for long; preparing an optimizer's step is launching, and so
        is waking the thread that prepares it once the backward pass of another has ended."""
        clock, gap_s = self.clock, self.wiring.program.gap_s
        usual_s = float(np.median(gap_s[gap_s > 0])) if (gap_s > 0).any() else 0.0
        ops = covered_within(self.time_of(self.of_kind(Kind.OP)), clock.gap_start_ns, clock.start_ns) / 1e9
        silent = (gap_s >= max(SILENT_S, SILENT_TIMES * usual_s)) & (ops < SILENT_FRAC * gap_s) & ~self._handed_over
        long = (gap_s >= self._long_s) | silent
        optimizer = self.time_of(self.host_spans(r"^Optimizer\.step"))
        inside_ns = covered_within(optimizer, clock.gap_start_ns, clock.start_ns)
        gap_ns = clock.start_ns - clock.gap_start_ns
        held = inside_ns > 0.5 * gap_ns
        handed = (inside_ns > 0) & (gap_ns - inside_ns < LONG_GAP_S * 1e9) & self._handed_over
        return np.asarray(long & ~held & ~handed, dtype=bool)

    @cached_property
    def _handed_over(self) -> Mask:
        """Calls that follow one of another thread: waking a thread takes its time."""
        rows, after = self.wiring.call_rows, self.wiring.program.after
        before = np.where(after >= 0, rows[np.maximum(after, 0)], -1)
        threads = self.trace.thread
        known = (rows >= 0) & (before >= 0)
        return np.asarray(known & (threads[np.maximum(rows, 0)] != threads[np.maximum(before, 0)]), dtype=bool)

    @cached_property
    def loading(self) -> Index:
        """Spans of the launching threads in which a batch is fetched."""
        spans = np.union1d(
            self.of_kind(Kind.DATALOADER), self.host_spans(LOADER, Kind.ANNOTATION, Kind.OP, Kind.PYTHON)
        )
        return spans[np.isin(self.trace.thread[spans], self.main_threads)]

    @cached_property
    def between_epochs(self) -> Intervals:
        """Time from one fetch to the next with nothing launched in between: the first found no more batches, and before
        the second the loader began again."""
        spans = self.loading[np.argsort(self.start_ns[self.loading], kind="stable")]
        starts, ends, launches = self.start_ns[spans], self.end_ns[spans], np.sort(self.launch_ns)
        if self._is_quiet(launches, ends[:-1], starts[1:]).any():  # so it does before the first and after the last step
            starts = np.concatenate((starts, [self.window.host_end_ns]))
            ends = np.concatenate(([self.window.start_ns], ends))
        else:
            starts, ends = starts[:0], ends[:0]
        quiet = self._is_quiet(launches, ends, starts)
        return union(ends[quiet], starts[quiet])

    @cached_property
    def first_fetches(self) -> Index:
        """Fetches with which an epoch begins."""
        return self.loading[np.isin(self.start_ns[self.loading], self.between_epochs.end)]

    @staticmethod
    def _is_quiet(launches: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Mask:
        """Whether nothing is launched from each start to its end."""
        none = np.searchsorted(launches, starts) == np.searchsorted(launches, ends)
        return np.asarray(none & (ends > starts), dtype=bool)

    @property
    def loads_itself(self) -> bool:
        """Whether batches are made by the thread that fetches them."""
        return bool(self.words_like("SingleProcess")[self.trace.name[self.loading]].any())

    def between(self, spans: Index) -> Intervals:
        """Time of the steps outside the spans, from the first span of a step to its last."""
        inner = self.time_of(spans)
        marks = np.array([*self.window.marks_ns, self.window.end_ns])
        step = np.searchsorted(marks, inner.start, side="right")
        same = step[1:] == step[:-1]
        return Intervals(inner.end[:-1][same], inner.start[1:][same])

    def host_s_a_launch(self) -> float:
        """What the host usually needs from one launch to the next."""
        gaps_s = self.program.gap_s + self.program.own_s
        usual = gaps_s[
            (self.wiring.program.gap_s < LONG_GAP_S) & (self.wiring.call_rows >= 0) & (self.program.waits_for < 0)
        ]
        return float(np.median(usual)) if len(usual) else 0.0

    def recurs(self, time: Intervals) -> bool:
        """Whether half of the rounds have a quarter of what a round has in the mean, or all of two: what a program does
        when it begins, or a machine once, is not what the program does. Rounds are marked steps, else those of the
        optimizer; without either, the later half of the launches has a tenth of it."""
        if not len(time.start):
            return False
        bounds = self._round_bounds
        if not len(bounds):
            return self.window.is_marked or self._late_frac(time) >= LATE_FRAC
        rounds = np.sort(covered_within(time, bounds[:-1], bounds[1:]))
        return bool(rounds[(len(rounds) - 1) // 2] >= ONGOING_FRAC * rounds.mean())

    def comes_again(self, spans: Index) -> bool:
        """Whether half of the rounds have a quarter as many of the spans as a round has in the mean: what a program
        does every so many steps (writing a line, looking at a sample) fell into the recording."""
        bounds = self._round_bounds
        if not len(bounds):
            return len(spans) > 0
        starts = np.sort(self.start_ns[spans])
        rounds = np.sort(np.diff(np.searchsorted(starts, bounds)))
        return bool(rounds[(len(rounds) - 1) // 2] >= max(1.0, ONGOING_FRAC * rounds.mean()))

    @cached_property
    def _round_bounds(self) -> NDArray[np.int64]:
        """Where rounds begin and the last one ends; nothing where nobody can tell, or there is one round."""
        updates = self.host_spans(r"^Optimizer\.step", Kind.ANNOTATION)
        ends = [*self.window.marks_ns] or self.end_ns[updates].tolist()[:-1]
        bounds = [self.window.start_ns, *sorted(ends), self.window.end_ns] if ends else []
        return np.array(bounds, dtype=np.int64)

    def _late_frac(self, time: Intervals) -> float:
        """Of this time, what lies beside the later half of the launches."""
        middle_ns = int(np.median(self.launch_ns)) if len(self.launch_ns) else self.window.start_ns
        late = covered_within(time, np.array([middle_ns]), np.array([max(middle_ns, self.window.end_ns)]))
        return float(late[0]) / max(1, time.total)

    def lasts(self, spans: Index) -> bool:
        """Whether spans are not of the beginning alone; of marked steps those that are a beginning are left out."""
        return len(spans) > 0 and (self.window.is_marked or self._late_frac(self.time_of(spans)) >= LATE_FRAC)

    def stalls(self, spans: Index) -> tuple[Index, float]:
        """Spans that took over ten times (and 50 µs more than) what their name usually takes by itself, without what
        is inside of it: a thread that is not running stops in the middle of an op as well as of a call."""
        waiting = self.wiring.call_rows[self.program.waits_for >= 0]
        own = spans[~np.isin(spans, waiting)]
        if not len(own):
            return own, 0.0
        inside = np.bincount(self.trace.parent[spans] + 1, self.trace.duration_s[spans], len(self.trace) + 1)[1:]
        seconds = np.maximum(0.0, self.trace.duration_s[own] - inside[own])
        usual = self._usual(self.trace.name[own], seconds)
        long = self._is_unusual(seconds, usual) & ~self._works_on(own, seconds, usual)
        return own[long], float((seconds - usual)[long].sum())

    @property
    def stopped_s(self) -> float:
        """The same where that is most of all long gaps."""
        return self.stopped_for_s(0.5)

    def stopped_for_s(self, least: float) -> float:
        """Seconds in long gaps between two ops that usually follow each other at once, if they are this share of such
        gaps: code that somebody wrote there would take its time whenever the two meet."""
        num, found_s = self._stops
        return found_s if num >= STOPS and found_s > least * self.elsewhere.total / 1e9 else 0.0

    @cached_property
    def _stops(self) -> tuple[int, float]:
        """How many such gaps there are, and their seconds beyond what is usual."""
        trace, rows, gap_s = self.trace, self.wiring.call_rows, self.wiring.program.gap_s
        after = self.wiring.program.after
        known = np.flatnonzero((rows >= 0) & (after >= 0) & (rows[np.maximum(after, 0)] >= 0))
        ops = np.where(trace.parent[rows] >= 0, trace.parent[rows], rows)
        words = trace.name[np.maximum(ops, 0)].astype(np.int64)
        _, pairs = np.unique(words[after[known]] * len(trace.words) + words[known], return_inverse=True)
        usual = self._usual(pairs.astype(np.int32), gap_s[known])
        long = self._is_unusual(gap_s[known], usual) & self._away[known]
        return int(long.sum()), float((gap_s[known] - usual)[long].sum())

    def unusual(self, spans: Index) -> Index:
        """The same of all spans, those with children as well: whatever is around a stall took as long."""
        seconds = self.trace.duration_s[spans]
        usual = self._usual(self.trace.name[spans], seconds)
        return spans[self._is_unusual(seconds, usual) & ~self._works_on(spans, seconds, usual)]

    def _works_on(self, spans: Index, seconds: Seconds, usual: Seconds) -> Mask:
        """Spans of ops that take as long whenever they are given tensors of these sizes: they compute on the host, and
        are not the ops of the same name that launch, over tensors of the same sizes perhaps."""
        shapes, names = self.trace.optional("shapes")[spans].astype(np.int64), self.trace.name[spans].astype(np.int64)
        alike = 2 * (names * len(self.trace.words) + shapes) + self._launching_spans[spans]
        _, same, counts = np.unique(alike, return_inverse=True, return_counts=True)
        shortest = np.full(len(counts), np.inf)
        np.minimum.at(shortest, same, seconds)
        long = self._is_unusual(shortest[same], usual)
        return np.asarray((shapes > 0) & (counts[same] >= self.num_rounds) & (self.num_rounds > 1) & long, dtype=bool)

    @cached_property
    def _launching_spans(self) -> Mask:
        """Rows of the trace in which something is launched."""
        found = np.zeros(len(self.trace), dtype=bool)
        for at in self._ancestry:
            found[at[at >= 0]] = True
        return found

    @staticmethod
    def _is_unusual(seconds: Seconds, usual: Seconds) -> Mask:
        return np.asarray((seconds > 10 * usual) & (seconds > usual + 50e-6), dtype=bool)

    @staticmethod
    def _usual(words: NDArray[np.int32], seconds: Seconds) -> Seconds:
        """The median duration of the spans with the same name; infinite where there are too few to tell."""
        order = np.lexsort((seconds, words))
        found, first, counts = np.unique(words[order], return_index=True, return_counts=True)
        medians = np.where(counts >= 8, seconds[order][first + counts // 2], np.inf)
        return np.asarray(medians[np.searchsorted(found, words)])

    # waits

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Calls that held their thread until the device was done, with what they were part of."""
        calls = np.flatnonzero((self.program.waits_for >= 0) & (self.wiring.call_rows >= 0))
        copies = self._copies_by_parent()
        return tuple(self._wait(call, copies) for call in calls.tolist())

    def _wait(self, call: int, copies: dict[int, str]) -> Wait:
        row = int(self.wiring.call_rows[call])
        path = self.trace.path(row)
        own = self.program.waits_for[call]
        copy = self.copy_word(int(own)) if self.program.call[own] == call else ""
        copy = copy or copies.get(int(self.trace.parent[row]), "") if self.trace.parent[row] >= 0 else copy
        names = tuple(self.trace.words[int(self.trace.name[at])] for at in path)
        source = next((self.trace.words[int(self.trace.source[at])] for at in path if self.trace.source[at]), "")
        return Wait(
            call, row, names, copy, source, self._copied_bytes(row, int(own) if self.program.call[own] == call else -1)
        )

    def _copied_bytes(self, row: int, own: int) -> int:
        """Bytes of the copy that a call waited for: its own, or the one made under the same op; 0 if unknown."""
        moved = self.trace.optional("bytes")
        if own >= 0:
            return max(0, int(moved[self.rows[own]]))
        works = self._copies_under.get(int(self.trace.parent[row]), ())
        return max((int(moved[self.rows[work]]) for work in works), default=0)

    def copies_of(self, wait: Wait) -> Sequence[int]:
        """The copies made under the op that a wait belongs to."""
        return self._copies_under.get(int(self.trace.parent[wait.row]), ()) if self.trace.parent[wait.row] >= 0 else ()

    @cached_property
    def _copies_under(self) -> dict[int, list[int]]:
        found = dict[int, list[int]]()
        for work in np.flatnonzero(self.work_kind == int(Kind.MEMCPY)).tolist():
            launch = int(self.trace.launch[self.rows[work]])
            if launch >= 0 and self.trace.parent[launch] >= 0:
                found.setdefault(int(self.trace.parent[launch]), []).append(work)
        return found

    def next_launch(self, call: int) -> int | None:
        """The next call of the same chain that launches or waits for something."""
        for _ in range(4):
            followers = self._followers.get(call)
            if not followers:
                return None
            call = followers[0]
            if self.wiring.call_rows[call] < 0 and call == self.program.num_calls - 1:
                return None  # the end of the window
            if float(self.wiring.program.gap_s[call]) > 100e-6 or self._launches[call]:
                return call
        return call

    def launches_between(self, first: int, last: int, but: Sequence[int] = ()) -> bool:
        """Whether kernels are launched between two calls, beside some that do not count."""
        low, high = np.searchsorted(self.program.call, (first + 1, last)).tolist()
        counted = int((self.work_kind[low:high] == int(Kind.KERNEL)).sum())
        aside = {work for work in but if low <= work < high and self.work_kind[work] == int(Kind.KERNEL)}
        return counted > len(aside)

    @cached_property
    def stream_order(self) -> tuple[Index, Index]:
        """Works in the order in which they ran, stream by stream, and the place of each in it."""
        order = np.lexsort((self.base.work_start_s, self.program.stream))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return order, place

    def looks_like(self, pattern: str) -> Mask:
        """Kernels and memsets whose op has the pattern."""
        return np.asarray(self.named(pattern, "op") & (self.work_kind != int(Kind.MEMCPY)), dtype=bool)

    @cached_property
    def _followers(self) -> dict[int, list[int]]:
        found = dict[int, list[int]]()
        for call, after in enumerate(self.program.after.tolist()):
            found.setdefault(after, []).append(call)
        return found

    @cached_property
    def _launches(self) -> Mask:
        launches = np.zeros(self.program.num_calls, dtype=bool)
        launches[self.program.call] = True
        return launches

    def outermost(self, spans: Index, pattern: str) -> Index:
        """For each span the outermost one around it (or itself) in a row of spans whose names have the pattern."""
        matching, found = self.words_like(pattern), spans.copy()
        at = self.trace.parent[spans].astype(np.int64)
        on = np.ones(len(spans), dtype=bool)
        while (on & (at >= 0)).any():
            on &= (at >= 0) & matching[self.trace.name[np.maximum(at, 0)]]
            found = np.where(on, at, found)
            at = np.where(on, self.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
        return np.unique(found)

    def _copies_by_parent(self) -> dict[int, str]:
        """The copy made under each host span that makes one directly."""
        return {parent: self.copy_word(works[-1]) for parent, works in self._copies_under.items()}

    @cached_property
    def is_on_device_copy(self) -> Mask:
        return np.asarray(self.copies("dtod") | (self.work_kind == int(Kind.MEMSET)), dtype=bool)

    def copy_word(self, work: int) -> str:
        """Direction and memory of a copy, lower case: ``htod pageable``; empty for other work."""
        row = int(self.rows[work])
        if self.trace.kind[row] != int(Kind.MEMCPY):
            return ""
        word = self.trace.words[int(self.trace.optional("copy")[row])] or self.trace.words[int(self.trace.name[row])]
        return word.lower()

    def copies(self, direction: str, memory: str = "") -> Mask:
        """Copies in a direction (``htod``, ``dtoh``), of pageable or pinned memory if asked for."""
        words = np.fromiter(
            (direction in word.lower() and memory in word.lower() for word in self.trace.words),
            dtype=bool,
            count=len(self.trace.words),
        )
        named = words[self.trace.optional("copy")[self.rows]] | words[self.trace.name[self.rows]]
        return np.asarray(named & (self.work_kind == int(Kind.MEMCPY)), dtype=bool)

    def stretched(self, time: Intervals) -> Intervals:
        """This time, and the whole of every long gap between calls that it fills at least half of."""
        held = covered_within(time, self.elsewhere.start, self.elsewhere.end) > 0.5 * (
            self.elsewhere.end - self.elsewhere.start
        )
        return joined(time, Intervals(self.elsewhere.start[held], self.elsewhere.end[held]))

    @cached_property
    def main_threads(self) -> Index:
        """Threads that launch work."""
        calls = self.wiring.call_rows
        return np.unique(self.trace.thread[calls[calls >= 0]])

    # what a change brings

    @cached_property
    def clock(self) -> HostClock:
        after = self.wiring.program.after
        ends = self.wiring.call_end_ns
        gap_start = np.where(after >= 0, ends[np.maximum(after, 0)], self.window.start_ns)
        return HostClock(gap_start, self.wiring.call_start_ns, ends)

    def edit(self, cure: Cure, *, best: bool) -> Edit:
        return edit_of(cure, self.program, self.clock, best=best)

    def most_s(self, cure: Cure) -> float:
        """What no cure of this kind can exceed: the step less the work that it does not touch, of the busiest stream or
        of all kernels, since those of several streams share one device."""
        left = np.ones(len(self.work_s), dtype=bool)
        left[cure.works] = False
        left[cure.aside] = False
        streams = np.bincount(self.program.stream, weights=self.work_s * left) if len(left) else np.zeros(1)
        busy_s = max(float(streams.max()), self._kernels_s(left)) / self.num_steps
        return max(0.0, self.longest_step_s - busy_s)

    def _kernels_s(self, chosen: Mask) -> float:
        """Seconds in which one of the chosen kernels runs."""
        kernels = chosen & (self.work_kind == int(Kind.KERNEL))
        return self.time_of(self.rows[kernels]).total / 1e9

    @cached_property
    def longest_step_s(self) -> float:
        """A step without the recording, by the slowest host that is thought possible where nobody timed one; as
        recorded where workers set the pace."""
        if self.is_timed:
            return self.unrecorded_step_s
        paced_s = self.recorded_step_s if self.is_fed_late else 0.0
        return max(self.unrecorded_step_s, paced_s, *(step_s for _, step_s in self._other_hosts))

    def touched_s(self, cure: Cure) -> float:
        """Device and host time a step that a cure is applied to."""
        works = np.union1d(cure.works, cure.aside)
        return float(self.work_s[works].sum() + cure.host.total / 1e9) / self.num_steps

    def claimed_s(self, cure: Cure) -> float:
        """The most a cure could bring if nothing else held the step: the time it claims, a step."""
        saved = self.edit(cure, best=True)
        works_s = self.work_s * (1.0 - saved.scale)
        works_s[saved.aside] = self.work_s[saved.aside]
        waited_s = self.base.call_end_s - self.base.call_start_s
        waits_s = np.maximum(self.program.stream_gap_s, self.program.latency_s)
        works_s[saved.closed] += np.maximum(0.0, waits_s[saved.closed])
        gap_s, own_s = np.maximum(0.0, self.program.gap_s), self.program.own_s
        host_s = float((gap_s * saved.cut_before + own_s * saved.cut_inside).sum()) + float(waited_s[saved.freed].sum())
        return (float(works_s.sum()) + host_s) / self.num_steps

    def no_edit(self) -> Edit:
        return no_edit(self.program)

    def step_after_s(self, edit: Edit) -> float:
        """Seconds of a step after a change, scheduled again."""
        if self.is_fed_late and not self._feeds(edit):
            return self.step_s
        return self._not_below_kernels(self.loop.step_s(edited(self.program, edit)), edit)

    def gains_s(self, edit: Edit) -> tuple[float, ...]:
        """Seconds of a step that a change saves, by the likeliest host and by the others."""
        if self.is_fed_late and not self._feeds(edit):
            return (0.0,)
        others = (
            step_s - self._not_below_kernels(self.loop.step_s(edited(host, edit)), edit)
            for host, step_s in self._other_hosts
        )
        return tuple(max(0.0, gain_s) for gain_s in (self.step_s - self.step_after_s(edit), *others))

    def _not_below_kernels(self, step_s: float, edit: Edit | None = None) -> float:
        """A replayed step, and where nobody timed one no less than its kernels took that a change does not touch. What
        keeps kernels of several streams apart is not always recorded (a library's own streams), and a replay lets them
        run all at once: 26 ms a step where the device was busy for 37."""
        if self.is_timed or self._num_streams < 2 or self.num_devices > 1:
            return step_s
        left = np.ones(len(self.rows), dtype=bool) if edit is None else (edit.scale >= 1.0) & ~edit.aside
        return max(step_s, self._kernels_s(left) / self.num_steps)

    @cached_property
    def _num_streams(self) -> int:
        return len(np.unique(self.program.stream[self.work_kind == int(Kind.KERNEL)]))

    @cached_property
    def is_fed_late(self) -> bool:
        """Steps wait for batches that workers make at their own pace: what is saved elsewhere is waited for."""
        if self.loads_itself or not len(self.loading):
            return False
        time = self.time_of(self.loading)
        return time.total / 1e9 / self.num_steps > max(FED_LATE_FRAC * self.step_s, FED_LATE_S)

    def _feeds(self, edit: Edit) -> bool:
        """Whether a change takes away most of the wait for batches."""
        before, _ = self.clock.cut(self.time_of(self.loading), 0.0)
        waited_s = np.maximum(0.0, self.program.gap_s)
        return float((np.minimum(edit.cut_before, before) * waited_s).sum()) >= 0.5 * float((before * waited_s).sum())

    def usual_gain_s(self, edit: Edit) -> float:
        """Seconds of a step that a change saves if the host is as fast as it usually is unrecorded, and what that frees
        was waited for in what the change removes."""
        before_s = self.step_s if self.is_timed else self.longest_step_s
        return max(0.0, before_s - self.loop.step_s(edited(usual(self.wiring.program, self._long_s), edit)))

    @property
    def unrecorded_step_s(self) -> float:
        """Seconds of a step without the recording, where the recorder measured that; else as replayed."""
        return self.step_s * self.pace

    @property
    def pace(self) -> float:
        """An unrecorded step over the replayed one, where both are known."""
        known_s = self._unrecorded_step_s()
        return known_s / self.step_s if known_s and self.step_s > 0 else 1.0

    # what is around a piece of work

    def under(self, pattern: str) -> Mask:
        """Works with a host span around their launch whose name has the pattern."""
        matching, trace = self.words_like(pattern), self.trace
        found = np.zeros(len(self.rows), dtype=bool)
        for at in self._ancestry:
            found |= (at >= 0) & matching[trace.name[np.maximum(at, 0)]]
        return found

    @cached_property
    def factored(self) -> Mask:
        """Works of factorizations and solves, and of their gradients: no setting of products reaches those inside, and
        there is no larger batch."""
        return np.asarray(self.named(FACTORED, "op") | self.under(FACTORED_BACKWARD), dtype=bool)

    def is_under(self, span: int, pattern: str) -> bool:
        matching = self.words_like(pattern)
        return any(matching[self.trace.name[at]] for at in self.trace.path(span))

    @cached_property
    def _ancestry(self) -> tuple[Index, ...]:
        """The spans around each launch, level by level, -1 above the outermost."""
        trace, levels = self.trace, list[Index]()
        at = trace.launch[self.rows].astype(np.int64)
        while (at >= 0).any() and len(levels) < MAX_DEPTH:
            levels.append(at)
            at = np.where(at >= 0, trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
        return tuple(levels)

    def op_time(self, works: Index) -> Intervals:
        """Host time of the ops that launch these works and nothing else."""
        trace = self.trace
        total, own = np.zeros(len(trace) + 1), np.zeros(len(trace) + 1)
        for at in self._ancestry:
            np.add.at(total, at, 1.0)
            np.add.at(own, at[works], 1.0)
        is_op = trace.of_kind(Kind.OP, Kind.RUNTIME)
        best = np.full(len(works), -1, dtype=np.int64)
        for at in self._ancestry:
            span = at[works]
            fits = (span >= 0) & is_op[np.maximum(span, 0)] & (own[span] >= 0.999 * total[span])
            best[fits] = span[fits]
        return self.time_of(np.unique(best[best >= 0]))

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass or an optimizer in the trace."""
        return len(self.host_spans(r"Backward\d*$|^Optimizer\.step")) > 0

    @cached_property
    def num_passes(self) -> int:
        """Backward passes of the window: losses of several tasks follow each other at once, those of several batches do
        not, and between two passes there is a forward one: losses of every layer or moment are of one pass."""
        starts = np.sort(self.start_ns[self.host_spans(LOSS_BACKWARD, Kind.OP)])
        if len(starts) < 2:
            return len(starts)
        between = np.diff(np.searchsorted(np.sort(self.launch_ns), starts)) >= PASS_WORKS
        calls = self.host_spans(FORWARD_OPS, Kind.OP)
        forward = np.sort(self.start_ns[calls[~self.spans_under(calls, BACKWARD)]])
        if len(forward):
            between &= np.diff(np.searchsorted(forward, starts)) > 0
        return 1 + int(between.sum())

    @cached_property
    def num_turns(self) -> int:
        """How often a forward pass is followed by a backward one, whatever its loss is made of."""
        nodes = self.host_spans(r"^autograd::engine::evaluate_function", Kind.OP)
        calls = self.host_spans(FORWARD_OPS, Kind.OP)
        forward = np.sort(self.start_ns[calls[~self.spans_under(calls, BACKWARD)]])
        before = np.unique(np.searchsorted(forward, self.start_ns[nodes]))
        return int((before > 0).sum())

    @property
    def passes_a_step(self) -> float:
        """Backward passes of an optimizer step, also where nobody marked the steps of a recording."""
        return self.num_passes / self._num_updates

    @property
    def turns_a_step(self) -> float:
        """The same by turns."""
        return self.num_turns / self._num_updates

    @cached_property
    def _num_updates(self) -> int:
        return max(self.num_steps, len(self.host_spans(r"^Optimizer\.step", Kind.ANNOTATION, Kind.OP)))

    @cached_property
    def recomputed(self) -> Mask:
        """Forward work that runs again inside the backward pass."""
        backward = self.under(BACKWARD)
        inside = self._forward_again
        reentrant = self.under(r"CheckpointFunctionBackward") & ~self.under(r"evaluate_function: (?!Checkpoint)")
        if not len(inside):
            return np.asarray(reentrant, dtype=bool)
        return np.asarray((backward & self.launched_in(self.recomputing)) | reentrant, dtype=bool)

    @cached_property
    def _forward_again(self) -> Index:
        """Ops of a forward pass inside of a backward one, but not those that somebody's own gradient is made of."""
        spans = self.host_spans(FORWARD_OPS, Kind.OP)
        own = self.host_spans(OWN_BACKWARD, Kind.OP)
        own = own[~np.array([self._goes_through_again(span) for span in own.tolist()], dtype=bool)]
        return spans[self.spans_under(spans, BACKWARD) & ~self._spans_inside(spans, own)]

    def _goes_through_again(self, node: int) -> bool:
        """Whether a gradient that somebody wrote runs layers forward and then backward, as checkpoints do: a reversible
        layer subtracts what it has computed again from what it was given."""
        names = self.trace.name[self._children_of(node)]
        forward, backward, taken = (
            bool(self.words_like(pattern)[names].any()) for pattern in (FORWARD_OPS, r"^autograd::engine", TAKEN_AWAY)
        )
        return forward and backward and not taken

    @cached_property
    def recomputing(self) -> Intervals:
        """Host time of forward passes inside the backward pass: from the node's start to the op after the last of
        them."""
        spans = self._forward_again
        parent = self.trace.parent[spans]
        order = np.lexsort((self.start_ns[spans], parent))
        spans, parent = spans[order], parent[order]
        if not len(spans):
            return Intervals(spans, spans)
        last = np.flatnonzero(np.concatenate((parent[1:] != parent[:-1], [True])))
        return union(self.start_ns[parent[last]], np.array([self._next_start(int(spans[i])) for i in last.tolist()]))

    def _next_start(self, span: int) -> int:
        """When the next span with the same parent starts; the parent's end if there is none."""
        parent = int(self.trace.parent[span])
        siblings = self.start_ns[self._children_of(parent)]
        later = siblings[siblings >= self.end_ns[span]]
        return int(later.min()) if len(later) else int(self.end_ns[parent])

    def _children_of(self, parent: int) -> Index:
        low = np.searchsorted(self._by_parent[1], parent)
        high = np.searchsorted(self._by_parent[1], parent, side="right")
        return self._by_parent[0][low:high]

    @cached_property
    def _by_parent(self) -> tuple[Index, Index]:
        order = np.argsort(self.trace.parent, kind="stable")
        return order, self.trace.parent[order].astype(np.int64)

    def _spans_inside(self, spans: Index, others: Index) -> Mask:
        """Which of the host spans have one of the others around them."""
        found, at = np.zeros(len(spans), dtype=bool), self.trace.parent[spans].astype(np.int64)
        while (at >= 0).any():
            found |= np.isin(at, others)
            at = np.where((at >= 0) & ~found, self.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
        return found

    def spans_under(self, spans: Index, pattern: str) -> Mask:
        """Which of the host spans have one around them whose name has the pattern."""
        matching, found = self.words_like(pattern), np.zeros(len(spans), dtype=bool)
        at = self.trace.parent[spans].astype(np.int64)
        while (at >= 0).any():
            found |= (at >= 0) & matching[self.trace.name[np.maximum(at, 0)]]
            at = np.where((at >= 0) & ~found, self.trace.parent[np.maximum(at, 0)], -1).astype(np.int64)
        return found

    # what was noted beside the spans

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the recorder wrote beside the spans."""
        found = self.trace.meta.get("ridgeline")
        return dict(found) if isinstance(found, dict) else {}

    def number(self, fact: str) -> float | None:
        """A noted quantity; None if it was not noted, or is no number above nothing."""
        return positive(self.facts.get(fact))

    @property
    def memory_frac(self) -> float | None:
        """Peak memory as a share of the device's; None if nobody said."""
        peak, total = self.number("peak_allocated_bytes"), self.number("total_bytes")
        if peak and total:
            return peak / total
        capacity = self.device.dram.capacity_bytes if self.device else None
        peaks = [float(c.value.max()) for name, c in self.trace.counters.items() if "memory" in name and len(c.value)]
        return max(peaks) / capacity if peaks and capacity else None

    # words

    def where(self, works: Index) -> Where:
        """The place that most of the works' time has in common."""
        if not len(works):
            return Where()
        rows = self.rows[works]
        weight = self.work_s[works]
        return Where(
            module=self._shared_path(self.trace.module[rows], weight),
            source=self._heaviest(self.trace.source[rows], weight),
            op=self._heaviest(self.trace.op[rows], weight),
        )

    def where_host(self, spans: Index) -> Where:
        if not len(spans):
            return Where()
        weight = self.trace.duration_s[spans]
        return Where(
            module=self._shared_path(self.trace.module[spans], weight),
            source=self._heaviest(self.trace.source[spans], weight),
            op=self._heaviest(self.trace.name[spans], weight),
        )

    def _heaviest(self, words: NDArray[np.int32], weight: Seconds) -> str:
        found, inverse = np.unique(words, return_inverse=True)
        sums = np.bincount(inverse, weights=weight)
        return self.trace.words[int(found[int(np.argmax(sums))])]

    def _shared_path(self, words: NDArray[np.int32], weight: Seconds) -> str:
        """The longest module path that holds at least nine tenths of the time."""
        found, inverse = np.unique(words, return_inverse=True)
        sums = np.bincount(inverse, weights=weight)
        total = float(sums.sum())
        prefixes: dict[str, float] = {}
        for word, seconds in zip(found.tolist(), sums.tolist(), strict=True):
            path = self.trace.words[word].split(".") if self.trace.words[word] else []
            for depth in range(1, len(path) + 1):
                key = ".".join(path[:depth])
                prefixes[key] = prefixes.get(key, 0.0) + seconds
        fitting = [path for path, seconds in prefixes.items() if seconds >= 0.9 * total]
        return max(fitting, key=len, default="")

    def evidence(self, works: Index, num: int = 5) -> tuple[dict[str, Any], ...]:
        """The kernels behind a finding, heaviest first: name, how many a step, milliseconds a step."""
        return self._table(self.trace.name[self.rows[works]], self.work_s[works], num, "kernel")

    def host_evidence(self, spans: Index, num: int = 5) -> tuple[dict[str, Any], ...]:
        return self._table(self.trace.name[spans], self.trace.duration_s[spans], num, "host span")

    def _table(self, words: NDArray[np.int32], seconds: Seconds, num: int, label: str) -> tuple[dict[str, Any], ...]:
        found, inverse, counts = np.unique(words, return_inverse=True, return_counts=True)
        sums = np.bincount(inverse, weights=seconds) if len(found) else np.zeros(0)
        heaviest = np.argsort(-sums, kind="stable")[:num]
        return tuple(
            {
                label: self.trace.words[int(found[i])],
                "times_a_step": round(float(counts[i]) / self.num_steps, 3),
                "ms_a_step": round(float(sums[i]) * 1e3 / self.num_steps, 6),
            }
            for i in heaviest.tolist()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a rule suspects, before it is weighed against the others."""

    what: str
    cause: str
    change: str
    where: Where
    cure: Cure
    evidence: tuple[dict[str, Any], ...] = ()
    spans: tuple[int, ...] = ()
    unchecked: tuple[str, ...] = ()
    least_frac: float = 0.02  # of the step, from which on it is worth a sentence
    sure_frac: float = 0.0  # of the step, what it must bring at worst: for what every eager program has some of
