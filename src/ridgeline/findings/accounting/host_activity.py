"""What the host did at each instant of a window: the innermost span of the thread on the critical path, by kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.idle import named
from ridgeline.trace.intervals import Intervals, Nanos, covered_within, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.nesting import stacks_of
from ridgeline.trace.table import Ids, Index, Mask, Trace

HOST_KINDS = (
    *(Kind.OP, Kind.RUNTIME, Kind.PYTHON, Kind.ANNOTATION, Kind.STEP, Kind.DATALOADER, Kind.GC, Kind.OVERHEAD),
    Kind.OTHER,
)
ENCLOSING = (Kind.PYTHON, Kind.ANNOTATION, Kind.STEP, Kind.OTHER)
"""Spans that a thread may be inside of while it waits for another thread."""
#: Kinds of host activity; a piece of idle time has one of them.
ACTIVITIES = (
    *("loader", "collector", "first_use", "recorder", "allocator", "synchronize", "copy_call", "launch_call"),
    *("runtime", "op", "python", "between_ops", "host_code", "asleep", "unrecorded"),
)
_CODE = {name: code for code, name in enumerate(ACTIVITIES)}
_ALLOCATOR = re.compile(
    r"^(?:cuda|hip|cu)(?:Malloc|Free|Host(?:Alloc|Register|Unregister|Free)|MemAlloc|MemFree|MemCreate|MemMap|MemUnmap"
    r"|MemRelease|MemAddressReserve|MemSetAccess|HostMalloc)"
)
_SYNCHRONIZE = re.compile(r"Synchronize|^(?:cuda|hip)EventQuery|^(?:cuda|hip)StreamQuery", re.IGNORECASE)
_COPY = re.compile(r"Memcpy|Memset", re.IGNORECASE)
_LAUNCH = re.compile(r"Launch", re.IGNORECASE)
_LOADS_CODE = re.compile(
    r"^(?:cu|hip)(?:ModuleLoad|LibraryLoad|Link(?:Create|Add|Complete)|ModuleGetFunction|LibraryGetKernel|KernelGetFunc)"
    r"|^nvrtc|^cudaFuncGetAttributes|^cu(?:Init|CtxCreate|DevicePrimaryCtxRetain)|^cudaGetDeviceProperties"
)
_COMPILES = re.compile(
    r"torch/_dynamo/(?:convert_frame|output_graph|symbolic_convert)|\(dynamo_timed\)"
    r"|torch/_inductor/(?:compile_fx|graph|codecache|async_compile)|autotun|do_bench"
    r"|^(?:_compile\.|compile_fx|TorchDynamo compile|dynamo_timed|CompileFx|entire_frame_compile|backend_compile)"
    r"|^(?:Inductor|AOTAutograd)\b.*compil|triton/(?:compiler|runtime/jit)\S*: (?:compile|_do_compile)"
    r"|torch/utils/cpp_extension|CachingAutotuner|precompile",
    re.IGNORECASE,
)
_CALLS_COMPILED = re.compile(r"\.py\(\d+\): (?:run|__call__|inner|wrapper|compile_wrapper|launch_metadata)$")
"""Frames of the compiler that are around every call of what it compiled before, and of tuned Triton kernels."""
_ASLEEP = re.compile(
    r"\btime\.?sleep|built-in (?:function|method) (?:sleep|select|poll|acquire|wait)|threading\.py\(\d+\): wait"
    r"|selectors\.py\(\d+\): select|\b(?:nanosleep|epoll_wait|futex|pthread_cond_wait|sem_wait)\b",
    re.IGNORECASE,
)
_PLANS = re.compile(r"cudnn|conv|attention|triton|jit|compiled|_scaled_mm|autotun", re.IGNORECASE)
"""Ops that build a plan, compile or tune when they meet a shape that is new to them."""
NEAR_NS = 2_000_000
"""Between two recorded host spans a thread that is silent for less than this runs the interpreter or glue code."""


class Pieces(NamedTuple):
    """Stretches of host time: which window they are of, the activity, and the span that shows it (-1: none does)."""

    window: NDArray[np.intp]
    ns: Nanos
    activity: NDArray[np.int8]
    span: Ids


@dataclass(slots=True)
class _Stretch:
    """Stretches that are still to be explained."""

    window: NDArray[np.intp]
    start: Nanos
    end: Nanos


class Host:
    """The threads of one rank: who launches work, and what each of them was doing when."""

    def __init__(self, trace: Trace, rank: int) -> None:
        self.trace = trace
        own = (trace.rank == rank) & (trace.thread >= 0) & (trace.device < 0) & trace.of_kind(*HOST_KINDS)
        self.rows: Index = np.flatnonzero(own)
        nested = bool((trace.parent[self.rows] >= 0).any())
        self.parent = trace.parent if nested else stacks_of(
            trace.start_ns, trace.end_ns, trace.kind, np.where(own, trace.thread, -1).astype(np.int32)
        ).parent  # fmt: skip
        calls = trace.launch[trace.gpu & (trace.rank == rank) & (trace.launch >= 0)]
        self.launching = _by_count(trace.thread[calls[trace.thread[calls] >= 0]])
        others = _by_count(trace.thread[self.rows])
        self.threads = [*self.launching, *(thread for thread in others if thread not in self.launching)]
        self.own_class, self.overrides = self._classes()

    @property
    def main(self) -> int:
        """The thread that launches most work, else the one with most spans; -1 without host spans."""
        return self.threads[0] if self.threads else -1

    def activities(self, windows: Intervals, thread: Ids) -> Pieces:
        """Every window cut by what the host did in it; ``thread`` is that whose launch ended each."""
        found: list[Pieces] = []
        for number in np.unique(thread).tolist():
            own = np.flatnonzero(thread == number)
            stretch = _Stretch(own, windows.start[own], windows.end[own])
            done, soft, silent = self._on_thread(stretch, number)
            found.append(done)
            handed, soft_left = self._handed_over(soft, number)
            found += [*handed, *self._enclosed(soft_left, number)]
            found += self._silent(silent, number)
        return Pieces(*(np.concatenate([getattr(part, name) for part in found]) for name in Pieces._fields))

    def _classes(self) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """For each span its own activity, and the activity that it lends to everything inside of it (-1: none)."""
        trace = self.trace
        own = np.full(len(trace), _CODE["host_code"], np.int8)
        own[trace.of_kind(Kind.OP)] = _CODE["op"]
        own[trace.of_kind(Kind.PYTHON)] = _CODE["python"]
        mask = np.zeros(len(trace), np.bool_)
        mask[self.rows] = True
        calls = mask & trace.of_kind(Kind.RUNTIME)
        own[calls] = _CODE["runtime"]
        for name, pattern in (("launch_call", _LAUNCH), ("copy_call", _COPY), ("synchronize", _SYNCHRONIZE),
                              ("allocator", _ALLOCATOR)):  # fmt: skip
            own[named(trace, pattern, calls)] = _CODE[name]
        python = mask & trace.of_kind(Kind.PYTHON, Kind.ANNOTATION, Kind.OTHER)
        own[named(trace, _ASLEEP, python)] = _CODE["asleep"]
        lends = np.full(len(trace), -1, np.int8)
        lends[named(trace, _LOADS_CODE, calls) | self._first_launches(calls)] = _CODE["first_use"]
        spans = mask & trace.of_kind(Kind.PYTHON, Kind.ANNOTATION, Kind.OP)
        compiles = named(trace, _COMPILES, spans) & ~named(trace, _CALLS_COMPILED, spans)
        lends[compiles] = _CODE["first_use"]
        lends[self._first_calls(mask & trace.of_kind(Kind.OP))] = _CODE["first_use"]
        lends[mask & trace.of_kind(Kind.OVERHEAD)] = _CODE["recorder"]
        lends[mask & trace.of_kind(Kind.DATALOADER)] = _CODE["loader"]
        lends[mask & trace.of_kind(Kind.GC)] = _CODE["collector"]
        return own, lends

    def _first_calls(self, ops: Mask) -> Index:
        """Ops that took long because they met a shape for the first time: 300 µs of their own time at least, ten times
        as much as such an op usually takes, and three times as much as the same op on the same shapes took later. Of
        shapes that come once, the op must be quick on others: one that is never quick may always take as long."""
        trace = self.trace
        rows = np.flatnonzero(ops)
        if not len(rows):
            return rows
        inner = rows[self.parent[rows] >= 0]
        inside = np.bincount(self.parent[inner], weights=trace.duration_s[inner], minlength=len(trace))
        spent = trace.duration_s[rows] - inside[rows]
        slow = np.flatnonzero(spent >= 300e-6)
        if not len(slow):
            return rows[slow]
        usual = float(np.median(spent))
        shapes = trace.optional("shapes")
        code = trace.name[rows].astype(np.int64) * (len(trace.words) + 1) + shapes[rows]
        slow = slow[spent[slow] >= 10.0 * usual]
        alike = np.flatnonzero(np.isin(code, np.unique(code[slow])))
        alike = alike[np.lexsort((trace.start_ns[rows[alike]], code[alike]))]
        begins = np.flatnonzero(np.diff(code[alike], prepend=-1))
        is_slow = np.zeros(len(rows), np.bool_)
        is_slow[slow] = True
        quick = set(trace.name[rows[~is_slow]].tolist())
        chosen = []
        for same in np.split(alike, begins[1:]):
            i = int(same[0]) if len(same) else -1
            if i < 0 or not is_slow[i]:
                continue
            if len(same) > 1:
                is_first = bool(spent[i] >= 3.0 * float(np.median(spent[same[1:]])))
            else:
                name = int(trace.name[rows[i]])
                is_first = shapes[rows[i]] > 0 and name in quick and bool(_PLANS.search(trace.words[name]))
            chosen += [i] if is_first else []
        return rows[np.array(chosen, dtype=np.intp)]

    def _first_launches(self, calls: Mask) -> Mask:
        """Launch calls that loaded the kernel they launched: its first launch, half a millisecond or longer, and twenty
        times as long as launches usually take."""
        trace = self.trace
        found = np.zeros(len(trace), np.bool_)
        works = np.flatnonzero(trace.gpu & (trace.launch >= 0))
        works = works[calls[trace.launch[works]]]
        if not len(works):
            return found
        works = works[np.argsort(trace.start_ns[trace.launch[works]], kind="stable")]
        first = works[np.unique(trace.name[works], return_index=True)[1]]
        took = trace.duration_s[trace.launch[works]]
        slow = trace.duration_s[trace.launch[first]] >= max(500e-6, 20.0 * float(np.median(took)))
        found[trace.launch[first[slow]]] = True
        return found & named(trace, _LAUNCH, calls)

    def _of_thread(self, thread: int, windows: _Stretch) -> Index:
        """Host spans of a thread that overlap the windows, enclosing ones first."""
        trace = self.trace
        rows = self.rows[trace.thread[self.rows] == thread]
        wanted = union(windows.start, windows.end)
        hit = covered_within(wanted, trace.start_ns[rows], trace.end_ns[rows]) > 0
        rows = rows[hit]
        return np.asarray(rows[np.lexsort((-trace.end_ns[rows], trace.start_ns[rows]))], dtype=np.intp)

    def _innermost(self, windows: _Stretch, thread: int) -> tuple[_Stretch, Ids]:
        """The windows cut wherever a span of the thread begins or ends, and the innermost span of each cut."""
        trace = self.trace
        rows = self._of_thread(thread, windows)
        cuts = np.unique(np.concatenate((trace.start_ns[rows], trace.end_ns[rows])))
        first = np.searchsorted(cuts, windows.start, side="right")
        num = np.maximum(np.searchsorted(cuts, windows.end, side="left") - first, 0)
        which = np.repeat(np.arange(len(num)), num + 1)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(num + 1) - (num + 1), num + 1)
        at = first[which] + offset
        if len(cuts):
            start = np.where(offset == 0, windows.start[which], cuts[np.clip(at - 1, 0, len(cuts) - 1)])
            end = np.where(offset == num[which], windows.end[which], cuts[np.clip(at, 0, len(cuts) - 1)])
        else:
            start, end = windows.start[which], windows.end[which]
        kept = end > start
        parts = _Stretch(windows.window[which[kept]], start[kept], end[kept])
        begun = np.searchsorted(trace.start_ns[rows], parts.start, side="right") - 1
        span = np.where(begun >= 0, rows[np.maximum(begun, 0)] if len(rows) else -1, -1).astype(np.int32)
        over = np.flatnonzero((span >= 0) & (trace.end_ns[np.maximum(span, 0)] <= parts.start))
        while len(over):
            span[over] = self.parent[span[over]]
            over = over[(span[over] >= 0)]
            over = over[trace.end_ns[span[over]] <= parts.start[over]]
        return parts, span

    def _on_thread(self, windows: _Stretch, thread: int) -> tuple[Pieces, tuple[_Stretch, Ids], _Stretch]:
        """(what the thread itself did, where it was only inside enclosing spans, where it shows nothing)."""
        parts, span = self._innermost(windows, thread)
        shown = span >= 0
        soft = shown & self.trace.of_kind(*ENCLOSING)[np.maximum(span, 0)]
        hard = shown & ~soft
        done = self._pieces(parts, hard, span)
        return done, (_chosen(parts, soft), span[soft]), _chosen(parts, ~shown)

    def _pieces(self, parts: _Stretch, chosen: Mask, span: Ids) -> Pieces:
        spans = span[chosen]
        return Pieces(parts.window[chosen], (parts.end - parts.start)[chosen], self.activity_of(spans), spans)

    def activity_of(self, spans: Ids) -> NDArray[np.int8]:
        """The activity of each span: its own, unless a span around it says more."""
        if not len(spans):
            return np.zeros(0, np.int8)
        distinct, inverse = np.unique(spans, return_inverse=True)
        own = self.own_class[distinct]
        lent = np.full(len(distinct), -1, np.int8)
        at = distinct.astype(np.int64)
        for _ in range(256):
            alive = at >= 0
            if not alive.any():
                break
            says = np.where(alive, self.overrides[np.maximum(at, 0)], -1)
            lent = np.where((says == _CODE["collector"]) | ((lent < 0) & (says >= 0)), says, lent).astype(np.int8)
            at = np.where(alive, self.parent[np.maximum(at, 0)], -1)
        kept = np.isin(own, (_CODE["allocator"], _CODE["synchronize"])) & (lent == _CODE["first_use"])
        answer: NDArray[np.int8] = np.where((lent >= 0) & ~kept, lent, own).astype(np.int8)[inverse]
        return answer

    def _handed_over(self, soft: tuple[_Stretch, Ids], thread: int) -> tuple[list[Pieces], tuple[_Stretch, Ids]]:
        """Where the thread was only inside an enclosing span, what another thread that launches work did."""
        stretch, span = soft
        made: list[Pieces] = []
        for other in self.launching:
            if other == thread or not len(stretch.window):
                continue
            numbered = _Stretch(np.arange(len(stretch.window)), stretch.start, stretch.end)
            parts, inner = self._innermost(numbered, other)
            works = (inner >= 0) & ~self.trace.of_kind(*ENCLOSING)[np.maximum(inner, 0)]
            works &= self.own_class[np.maximum(inner, 0)] != _CODE["synchronize"]
            back = parts.window
            taken = _Stretch(stretch.window[back], parts.start, parts.end)
            made.append(self._pieces(taken, works, inner))
            span = span[back[~works]]
            stretch = _chosen(taken, ~works)
        return made, (stretch, span)

    def _enclosed(self, soft: tuple[_Stretch, Ids], thread: int) -> list[Pieces]:
        """Where only enclosing spans show: Python frames are named, the rest is code between ops."""
        stretch, span = soft
        if not len(stretch.window):
            return []
        activity = self.activity_of(span)
        glue = activity == _CODE["host_code"]
        short = self._silence(stretch, thread, span) < NEAR_NS
        activity = np.where(glue & short, _CODE["between_ops"], activity).astype(np.int8)
        return [Pieces(stretch.window, stretch.end - stretch.start, activity, span)]

    def _silence(self, stretch: _Stretch, thread: int, span: Ids) -> Nanos:
        """How long the thread shows no op and no call around each stretch."""
        rows = self.rows[self.trace.thread[self.rows] == thread]
        rows = rows[~self.trace.of_kind(*ENCLOSING)[rows]]
        starts = np.sort(self.trace.start_ns[rows])
        ends = np.sort(self.trace.end_ns[rows])
        if not len(rows):
            return np.full(len(stretch.start), 2**62)
        before = np.searchsorted(ends, stretch.start, side="right") - 1
        after = np.searchsorted(starts, stretch.end, side="left")
        low = np.where(before >= 0, ends[np.maximum(before, 0)], -(2**61))
        high = np.where(after < len(starts), starts[np.minimum(after, len(starts) - 1)], 2**61)
        return np.asarray(high - low, dtype=np.int64)

    def _silent(self, silent: _Stretch, thread: int) -> list[Pieces]:
        """Where the thread shows nothing: what any other thread did; else the code between its spans before and after;
        before its first span and after its last one nothing is known."""
        made: list[Pieces] = []
        for other in self.threads[:8]:
            if other == thread or not len(silent.window):
                continue
            parts, inner = self._innermost(silent, other)
            works = inner >= 0
            made.append(self._pieces(parts, works, inner))
            silent = _chosen(parts, ~works)
        if len(silent.window):
            nobody = np.full(len(silent.window), -1, np.int32)
            lasts = self._silence(silent, thread, nobody)
            between = np.where(lasts < NEAR_NS, _CODE["between_ops"], _CODE["host_code"])
            activity = np.where(lasts < 2**60, between, _CODE["unrecorded"]).astype(np.int8)
            made.append(Pieces(silent.window, silent.end - silent.start, activity, nobody))
        return made


def host_of(trace: Trace, rank: int) -> Host:
    """The host of a rank, looked at once for a trace."""
    found: Host = trace.keep(f"host of rank {rank}", lambda: Host(trace, rank))
    return found


def _chosen(stretch: _Stretch, mask: Mask) -> _Stretch:
    return _Stretch(stretch.window[mask], stretch.start[mask], stretch.end[mask])


def _by_count(threads: Sequence[int] | Ids) -> list[int]:
    """Threads, the one that occurs most first."""
    numbers, counts = np.unique(np.asarray(threads), return_counts=True)
    return [int(number) for number in numbers[np.argsort(-counts, kind="stable")] if number >= 0]
