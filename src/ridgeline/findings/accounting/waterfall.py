"""A step from the floor of its work to its measured length, as bars that add up to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.findings.accounting.avoidable import SORTS, avoidable_of
from ridgeline.findings.accounting.host_activity import Host, host_of
from ridgeline.findings.accounting.idle import REASONS, idle_of
from ridgeline.findings.accounting.labels import STAGES, label_of, remedy_of, stage_of
from ridgeline.findings.accounting.partition import Owned, owned_of
from ridgeline.findings.context.kernel_name import kernel_name
from ridgeline.trace.analyses.table import Table
from ridgeline.trace.breakdown import by_device
from ridgeline.trace.collectives import Calls, calls_of, matched
from ridgeline.trace.intervals import Intervals, Nanos
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Ids, Index, Trace

UNNAMED = ("idle:unrecorded", "idle:no_host", "idle:device_wait")
"""Bars of idle time for which the trace shows no host activity."""


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a bar that one place in the program has."""

    module: str
    source: str
    op: str
    name: str
    ms: float  # a step
    count: float  # a step
    longest_ms: float
    rows: tuple[int, ...] = ()  # spans of the trace, the longest first

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "rows"} | {"rows": list(self.rows)}


@dataclass(frozen=True, slots=True)
class Bar:
    """One step of the waterfall; ``ns`` is the sum over the window's steps and devices, an integer."""

    key: str
    stage: str
    label: str
    ns: int
    ms: float  # of one step
    frac: float  # of the step
    count: float  # pieces a step
    remedy: str
    is_named: bool = True
    parts: tuple[Part, ...] = ()
    findings: tuple[str, ...] = ()  # rules of the findings that are about this bar

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"parts": [part.to_dict() for part in self.parts], "findings": list(self.findings)}


STRETCHED = ("op", "between_ops", "launch_call", "runtime", "python", "copy_call", "recorder", "allocator", "latency")
"""Host activities that a recording makes longer; what it costs is taken from these first."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Bars that sum exactly to the step as recorded; without the bar ``recording``, to the step when nothing records.
    """

    step_ms: float  # as recorded
    total_ns: int  # of the window, over its steps and devices
    num_steps: int
    num_devices: int
    start_s: float
    end_s: float
    bars: tuple[Bar, ...]
    floor_frac: float  # of kernel time, how much has a known floor
    named_idle_frac: float  # of idle time, how much has a named activity; 1 without idle time
    notes: tuple[str, ...] = ()
    pieces: Pieces | None = field(default=None, repr=False, compare=False)

    def bars_of(self, trace: Trace, rows: Sequence[int], least_frac: float = 0.1) -> list[Bar]:
        """The bars that spans of the trace are in, by how much: as what is shown for them, around it, or as the device
        span that an idle stretch ended with. Bars with less than this share of what the spans have are left out."""
        if self.pieces is None or not len(rows):
            return []
        wanted = np.zeros(len(trace) + 1, np.bool_)
        wanted[np.asarray(rows, dtype=np.intp)] = True
        hit = wanted[self.pieces.ended_by]  # the last place, for -1, is never wanted
        at = self.pieces.span.astype(np.int64)
        hit |= wanted[at]
        launch = np.where(at >= 0, trace.launch[np.maximum(at, 0)], -1)
        at = np.where(launch >= 0, launch, at)
        for _ in range(256):
            hit |= wanted[at]
            at = np.where(at >= 0, trace.parent[np.maximum(at, 0)], -1)
            if not (at >= 0).any():
                break
        score = np.bincount(self.pieces.bar[hit], self.pieces.ns[hit], len(self.pieces.keys))
        least = least_frac * float(score.sum())
        kept = {key: float(score[i]) for i, key in enumerate(self.pieces.keys) if score[i] > least}
        return sorted((bar for bar in self.bars if bar.key in kept), key=lambda bar: -kept[bar.key])

    @property
    def unrecorded_ms(self) -> float:
        """The step without the cost of recording it; all shares are of this."""
        recording = self.bar("recording")
        return self.step_ms - (recording.ms if recording else 0.0)

    def without_recording(self, step_ms: float) -> Waterfall:
        """The same with what the recording itself cost as a bar of its own, so that the others sum to ``step_ms``: it
        is taken from host activities that a recording stretches, then from the rest of the idle time."""
        per_step = self.num_steps * self.num_devices
        left = self.total_ns - round(step_ms * 1e6 * per_step)
        bars = {bar.key: bar for bar in self.bars if bar.stage in ("idle", "host")}
        first = {key: bar.ns for key, bar in bars.items() if key.split(":")[1] in STRETCHED}
        rest = {key: bar.ns for key, bar in bars.items() if key not in first}
        taken: dict[str, int] = {}
        for group in (first, rest):
            whole = sum(group.values())
            part = min(whole, max(0, left - sum(taken.values())))
            for key, ns in group.items():
                taken[key] = min(ns, ns * part // whole if whole else 0)
        cost = sum(taken.values())
        base = self.total_ns - cost
        if cost <= 0 or base <= 0:
            return self
        shorter = [_shortened(bar, taken.get(bar.key, 0), base) for bar in self.bars]
        ms = cost / 1e6 / per_step
        recording = Bar("recording", "recording", label_of("recording"), cost, ms, cost / base, 0.0,
                        remedy_of("recording"))  # fmt: skip
        return replace(self, bars=(*(bar for bar in shorter if bar.ns), recording))

    def stage_ms(self, stage: str) -> float:
        return sum(bar.ms for bar in self.bars if bar.stage == stage)

    def largest(self, num: int = 3) -> list[Bar]:
        """The largest bars that something can be done about: all but the floor."""
        told = (bar for bar in self.bars if bar.stage not in ("floor", "recording"))
        return sorted(told, key=lambda bar: -bar.ns)[:num]

    def bar(self, key: str) -> Bar | None:
        return next((bar for bar in self.bars if bar.key == key), None)

    def with_findings(self, rules: Mapping[str, Sequence[str]]) -> Waterfall:
        """The same with the rules of findings beside the bars they are about."""
        bars = tuple(replace(bar, findings=tuple(rules.get(bar.key, ()))) for bar in self.bars)
        return replace(self, bars=bars)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_ms": self.step_ms,
            "unrecorded_ms": self.unrecorded_ms,
            "total_ns": self.total_ns,
            "num_steps": self.num_steps,
            "num_devices": self.num_devices,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "floor_frac": self.floor_frac,
            "named_idle_frac": self.named_idle_frac,
            "stages": [{"stage": stage, "label": STAGES[stage], "ms": self.stage_ms(stage)} for stage in STAGES],
            "bars": [bar.to_dict() for bar in self.bars],
            "notes": list(self.notes),
        }


def _shortened(bar: Bar, ns: int, base_ns: int) -> Bar:
    """A bar with some of its time taken away, its parts in proportion; shares are of another whole."""
    share = (bar.ns - ns) / bar.ns
    parts = tuple(replace(part, ms=part.ms * share) for part in bar.parts) if ns else bar.parts
    return replace(bar, ns=bar.ns - ns, ms=bar.ms * share, frac=(bar.ns - ns) / base_ns, parts=parts)


def waterfall_table(found: Waterfall | None) -> Table:
    """Every part of every bar as a row."""
    columns = ("stage", "bar", "key", "module", "source", "op", "name", "ms", "share_frac", "count", "longest_ms")
    rows = [
        (bar.stage, bar.label, bar.key, part.module, part.source, part.op, part.name, part.ms,
         part.ms / found.step_ms if found.step_ms else 0.0, part.count, part.longest_ms)
        for bar in found.bars for part in bar.parts
    ] if found else []  # fmt: skip
    return Table("waterfall", columns, tuple(rows))


@dataclass(frozen=True, slots=True)
class Pieces:
    """The waterfall as columns: the bar of each stretch of time, the span shown for it, the device span after it."""

    keys: tuple[str, ...]
    bar: Ids
    ns: Nanos
    span: Ids
    ended_by: Ids


@dataclass(slots=True)
class _Ledger:
    """Pieces of time: which bar, how long, the span that is shown for it, and the span whose place it has."""

    keys: dict[str, int]
    bar: list[Ids]
    ns: list[Nanos]
    span: list[Ids]
    place: list[Ids]
    ended_by: list[Ids]

    def add(
        self, bars: Sequence[str] | Ids, ns: Nanos, span: Ids, place: Ids | None = None, ended_by: Ids | None = None
    ) -> None:
        if not len(ns):
            return
        codes = bars if isinstance(bars, np.ndarray) else np.array([self.code(bar) for bar in bars], np.int32)
        self.bar.append(codes.astype(np.int32))
        self.ns.append(ns.astype(np.int64))
        self.span.append(span.astype(np.int32))
        self.place.append((span if place is None else place).astype(np.int32))
        self.ended_by.append(np.full(len(ns), -1, np.int32) if ended_by is None else ended_by.astype(np.int32))

    def pieces(self) -> Pieces | None:
        if not self.bar:
            return None
        bar, ns = np.concatenate(self.bar), np.concatenate(self.ns)
        return Pieces(tuple(self.keys), bar, ns, np.concatenate(self.span), np.concatenate(self.ended_by))

    def code(self, bar: str) -> int:
        return self.keys.setdefault(bar, len(self.keys))


def waterfall_of(
    trace: Trace,
    start_ns: int,
    end_ns: int,
    num_steps: int = 1,
    *,
    others: Sequence[Trace] = (),
    extra_s: NDArray[np.float64] | None = None,
    max_parts: int = 12,
) -> Waterfall:
    """The accounting of a window. Floors are taken from the trace's column ``floor_s``; ``others`` are further ranks,
    whose collectives tell waiting from transfer; ``extra_s`` has for each span the seconds that a model does not need.
    """
    end_ns = max(end_ns, start_ns) if len(trace) else start_ns
    book = _Ledger({}, [], [], [], [], [])
    arrived, half_arrived = arrivals_of(trace, others)
    inside = trace.gpu & (trace.start_ns < end_ns) & (trace.end_ns > start_ns)
    num_devices, priced_ns, kernel_ns = 0, 0, 0
    for rank, device, mask in by_device(trace, trace.gpu if trace.gpu.any() else inside):
        chosen = mask & inside
        works = trace.in_order(chosen)
        num_devices += 1
        owned = owned_of(trace, works, start_ns, end_ns, arrived[works])
        early = owned_of(trace, works, start_ns, end_ns, half_arrived[works]).waited_ns if others else owned.waited_ns
        known, whole = _kernels(trace, book, works, owned.ns, extra_s)
        priced_ns, kernel_ns = priced_ns + known, kernel_ns + whole
        _copies(trace, book, works, owned.ns)
        _collectives(trace, book, works, owned, early, bool(others))
        _idle(trace, book, host_of(trace, rank), rank, device, trace.in_order(mask), owned.gaps)
    if not num_devices:  # the host alone
        for rank in trace.ranks() or [0]:
            num_devices += 1
            everything = Intervals(np.array([start_ns]), np.array([end_ns]))
            gap = everything if end_ns > start_ns else Intervals(*(np.zeros(0, np.int64),) * 2)
            _idle(trace, book, host_of(trace, rank), rank, -1, np.zeros(0, np.intp), gap)
    per_step = max(1, num_steps) * num_devices
    bars = _bars(trace, book, per_step, (end_ns - start_ns) * num_devices, max_parts)
    idle = [bar for bar in bars if bar.stage == "idle"]
    idle_ns = sum(bar.ns for bar in idle)
    named_ns = sum(bar.ns for bar in idle if bar.is_named)
    return Waterfall(
        step_ms=(end_ns - start_ns) / 1e6 / max(1, num_steps),
        total_ns=(end_ns - start_ns) * num_devices,
        num_steps=max(1, num_steps),
        num_devices=num_devices,
        start_s=start_ns / 1e9,
        end_s=end_ns / 1e9,
        bars=bars,
        floor_frac=priced_ns / kernel_ns if kernel_ns else 0.0,
        named_idle_frac=named_ns / idle_ns if idle_ns else 1.0,
        notes=_notes(trace, priced_ns, kernel_ns, bars),
        pieces=book.pieces(),
    )


def arrivals_of(trace: Trace, others: Sequence[Trace] = ()) -> tuple[Nanos, Nanos]:
    """From when on each collective transfers, and from when on half of its ranks were there. It transfers when the last
    rank came; of a rank alone, for the time that the fastest of three or more equal calls took, counted back from the
    end; else from the span's own start."""
    last, half = trace.start_ns.copy(), trace.start_ns.copy()
    rows = np.flatnonzero(trace.gpu & trace.of_kind(Kind.COMMUNICATION))
    if not len(rows):
        return last, half
    own = calls_of(trace)
    known: list[Calls] = [*own, *(calls for other in others for calls in calls_of(other))]
    if len(known) > 1:
        for operation in matched(known):
            came = sorted(int(known[at].start[i]) - trace.origin_ns for at, i in operation)
            for at, i in operation:
                if at < len(own) and len(operation) > 1:
                    last[known[at].span[i]], half[known[at].span[i]] = came[-1], came[(len(came) - 1) // 2]
        return last, half
    code = np.stack([trace.name[rows], trace.optional("collective")[rows], trace.optional("group")[rows],
                     trace.optional("message_bytes")[rows]], axis=1)  # fmt: skip
    _, inverse, counts = np.unique(code, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    took = trace.end_ns[rows] - trace.start_ns[rows]
    least = np.full(len(counts), 2**62)
    np.minimum.at(least, inverse, took)
    fits = (counts >= 3)[inverse] & (trace.optional("message_bytes")[rows] > 0)
    last[rows[fits]] = (trace.end_ns[rows] - least[inverse])[fits]
    return last, half


def _kernels(
    trace: Trace, book: _Ledger, works: Index, owned: Nanos, extra_s: NDArray[np.float64] | None
) -> tuple[int, int]:
    """Kernels and memsets: what is avoidable, the floor of the rest, and what they take above it by family. Returns
    the nanoseconds that have a floor, and all of them."""
    at = np.flatnonzero(trace.of_kind(Kind.KERNEL, Kind.MEMSET)[works] & (owned > 0))
    rows, ns = works[at].astype(np.int32), owned[at]
    if not len(rows):
        return 0, 0
    took_ns = np.maximum(trace.end_ns[rows] - trace.start_ns[rows], 1)
    extra = None if extra_s is None else np.clip(extra_s[rows] * 1e9 / took_ns, 0.0, 1.0)
    sort, frac = avoidable_of(trace, rows.astype(np.intp), extra)
    lost = np.minimum(np.rint(ns * frac).astype(np.int64), ns)
    for code, name in enumerate(SORTS):
        own = (sort == code) & (lost > 0)
        book.add(np.full(int(own.sum()), book.code(f"avoidable:{name}")), lost[own], rows[own])
    rest = ns - lost
    floor_s = trace.optional("floor_s")[rows]
    known = np.isfinite(floor_s)
    share = rest / took_ns  # of the kernel, what it owns of the window and is not avoidable
    floor = np.where(known, np.minimum(rest, np.rint(np.nan_to_num(floor_s) * 1e9 * share)), 0).astype(np.int64)
    floor = np.maximum(floor, 0)
    kept = floor > 0
    book.add(np.full(int(kept.sum()), book.code("floor")), floor[kept], rows[kept])
    distinct, inverse = np.unique(trace.name[rows], return_inverse=True)
    families = [kernel_name(trace.words[word]).family for word in distinct.tolist()]
    for prefix, which, column in (("kernels", known, rest - floor), ("unpriced", ~known, rest)):
        codes = np.array([book.code(f"{prefix}:{family}") for family in families], np.int32)[inverse]
        chosen = which & (column > 0)
        book.add(codes[chosen], column[chosen], rows[chosen])
    priced = int((lost + np.where(known, rest, 0)).sum())
    return priced, int(ns.sum())


def _copies(trace: Trace, book: _Ledger, works: Index, owned: Nanos) -> None:
    at = np.flatnonzero(trace.of_kind(Kind.MEMCPY)[works] & (owned > 0))
    rows = works[at].astype(np.int32)
    words = [trace.words[word] for word in trace.optional("copy")[rows].tolist()]
    book.add([f"copy:{word or 'unknown'}" for word in words], owned[at], rows)


def _collectives(trace: Trace, book: _Ledger, works: Index, owned: Owned, early: Nanos, has_others: bool) -> None:
    """Collectives with nothing beside them: waiting until half of the ranks came (``early``) and then for the last, the
    least time that the link needs for their bytes, and what the transfer takes above it."""
    at = np.flatnonzero(trace.of_kind(Kind.COMMUNICATION)[works] & (owned.ns > 0))
    rows = works[at].astype(np.int32)
    waited, early = owned.waited_ns[at], np.minimum(early, owned.waited_ns)[at]
    moved, floor_s = owned.ns[at] - waited, trace.optional("floor_s")[rows]
    took_ns = np.maximum(trace.end_ns[rows] - trace.start_ns[rows], 1)
    known = np.isfinite(floor_s)
    least = np.rint(np.nan_to_num(floor_s) * 1e9 * owned.ns[at] / took_ns).astype(np.int64)  # what is not hidden of it
    least = np.where(known, np.minimum(moved, least), 0)
    parts = {"floor": least, "bandwidth": np.where(known, moved - least, 0), "transfer": np.where(known, 0, moved)}
    parts |= {"wait": early, "skew": waited - early} if has_others else {"wait_alone": waited}
    for name, ns in parts.items():
        if (kept := ns > 0).any():
            book.add(np.full(int(kept.sum()), book.code(f"comm:{name}")), ns[kept], rows[kept])


def _idle(trace: Trace, book: _Ledger, host: Host, rank: int, device: int, works: Index, gaps: Intervals) -> None:
    found = idle_of(trace, host, rank, device, works, gaps)
    prefix = "idle" if trace.gpu.any() else "host"
    codes = np.array([book.code(f"{prefix}:{reason}") for reason in REASONS], np.int32)
    launch = np.where(found.ended_by >= 0, trace.launch[np.maximum(found.ended_by, 0)], -1)
    # The place is that of the host span where it has one, else that of what the gap led to
    place = found.span.copy()
    blind = (place < 0) | ((trace.module[np.maximum(place, 0)] == 0) & (trace.source[np.maximum(place, 0)] == 0))
    toward = np.where(launch >= 0, launch, found.ended_by)
    place = np.where(blind & (toward >= 0), toward, place)
    book.add(codes[found.reason], found.ns, found.span, place, found.ended_by)


def _bars(trace: Trace, book: _Ledger, per_step: int, total_ns: int, max_parts: int) -> tuple[Bar, ...]:
    """Bars in the order of the stages, the largest of a stage first."""
    if not book.bar:
        return ()
    bar, ns = np.concatenate(book.bar), np.concatenate(book.ns)
    span, place = np.concatenate(book.span), np.concatenate(book.place)
    sums = np.zeros(len(book.keys), np.int64)
    np.add.at(sums, bar, ns)
    made = []
    for key, code in book.keys.items():
        if not sums[code]:
            continue
        own = np.flatnonzero((bar == code) & (ns > 0))
        made.append(
            Bar(
                key=key,
                stage=stage_of(key),
                label=label_of(key),
                ns=int(sums[code]),
                ms=int(sums[code]) / 1e6 / per_step,
                frac=int(sums[code]) / total_ns if total_ns else 0.0,
                count=len(own) / per_step,
                remedy=remedy_of(key),
                is_named=key not in UNNAMED,
                parts=_parts(trace, ns[own], span[own], place[own], per_step, max_parts),
            )
        )
    order = list(STAGES)
    return tuple(sorted(made, key=lambda one: (order.index(one.stage), -one.ns)))


def _parts(trace: Trace, ns: Nanos, span: Ids, place: Ids, per_step: int, limit: int) -> tuple[Part, ...]:
    """A bar by module, source line, op and name, the largest first."""
    at, shown = np.maximum(place, 0), np.maximum(span, 0)
    empty = (place < 0, span < 0)
    columns = [np.where(empty[0], 0, column[at]) for column in (trace.module, trace.source, trace.op)]
    code = np.stack([*columns, np.where(empty[1], 0, trace.name[shown])], axis=1)
    distinct, inverse = np.unique(code, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    sums, counts = np.zeros(len(distinct), np.int64), np.bincount(inverse, minlength=len(distinct))
    np.add.at(sums, inverse, ns)
    made = []
    for i in np.argsort(-sums, kind="stable")[:limit].tolist():
        own = np.flatnonzero(inverse == i)
        own = own[np.argsort(-ns[own], kind="stable")]
        module, source, op, name = (trace.words[int(word)] for word in distinct[i])
        rows = tuple(dict.fromkeys(int(row) for row in span[own[:8]] if row >= 0))[:5]
        ms, longest_ms = int(sums[i]) / 1e6 / per_step, int(ns[own[0]]) / 1e6
        made.append(Part(module, source, op, name, ms, int(counts[i]) / per_step, longest_ms, rows))
    return tuple(made)


def _notes(trace: Trace, priced_ns: int, kernel_ns: int, bars: Sequence[Bar]) -> tuple[str, ...]:
    notes = []
    if kernel_ns and priced_ns < 0.995 * kernel_ns:
        bare = "shapes" not in trace.extra and not trace.meta.get("origin")  # a simulated schedule has none to record
        why = ": record shapes (record_shapes=True) to know it" if bare else ""
        notes.append(f"the floor is known for {priced_ns / kernel_ns:.0%} of kernel time{why}")
    keys = {bar.key for bar in bars}
    if "comm:wait_alone" in keys:
        notes.append("one rank was recorded: collectives wait for as long as they exceed the fastest of equal calls")
    if "idle:no_host" in keys:
        notes.append("no host events in this file: record CPU activities to see what the device waits for")
    return tuple(notes)
