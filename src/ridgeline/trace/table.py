"""Spans as columns: one type for a run that was predicted, simulated or measured."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError
from ridgeline.trace.intervals import Intervals, Nanos, union
from ridgeline.trace.kind import WORK, Kind

Ids = NDArray[np.int32]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]
Seconds = NDArray[np.float64]
Column = NDArray[Any]

WORD_COLUMNS = ("name", "lane", "module", "op", "phase", "source")
LINK_COLUMNS = ("launch", "parent")
#: Columns a maker may leave out, and the value that then says "not known" in every row.
ABSENT: Mapping[str, int] = {
    "lane": 0,
    "module": 0,
    "op": 0,
    "phase": 0,
    "source": 0,
    "kind": int(Kind.OTHER),
    "rank": 0,
    "device": -1,
    "stream": -1,
    "thread": -1,
    "launch": -1,
    "parent": -1,
    "step": -1,
}
#: Optional columns (``Trace.extra``): what they hold, and the type whose "absent" is -1, nan or word 0.
VOCABULARY: Mapping[str, type] = {
    "bytes": np.int64,  # moved by a copy or memset
    "flops": np.float64,
    "read_bytes": np.int64,
    "written_bytes": np.int64,
    "grid": np.int32,  # three numbers a span
    "block": np.int32,  # three numbers a span
    "registers": np.int32,
    "shared_bytes": np.int32,
    "occupancy_frac": np.float64,
    "message_bytes": np.int64,  # of a collective: what one rank contributes or receives, the larger
    "group_size": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "sequence": np.int64,  # autograd's number, which a forward op shares with its backward
    "graph_node": np.int64,
    "wait_stream": np.int32,
    "wait_event": np.int64,
    "microbatch": np.int32,
    "stage": np.int32,
    "floor_s": np.float64,
    "expected_s": np.float64,
    "energy_j": np.float64,
    # words
    "shapes": str,
    "dtypes": str,
    "strides": str,
    "concrete": str,  # arguments that are no tensors: numbers, flags, lists of them
    "copy": str,  # "HtoD pageable", "DtoH pinned", "DtoD", …
    "collective": str,  # "all_reduce", …
    "group": str,  # process group
    "node": str,  # of the captured graph
    "link": str,  # of a simulated network
    "bound": str,  # what the floor is limited by: compute, memory, latency
}


def absent_of(column: str) -> float:
    """The value of an optional column where a span has none: -1, nan, or word 0."""
    kind = VOCABULARY.get(column)
    if kind is None:
        known = ", ".join(sorted(VOCABULARY))
        raise InputError(f"no optional span column {column!r}; known: {known} (trace/table.py keeps the vocabulary)")
    if kind is str:
        return 0
    return float("nan") if kind is np.float64 else -1


@dataclass(frozen=True, slots=True)
class Counter:
    """A quantity that holds from each time to the next."""

    at_s: Seconds
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Every span's times, place, links and words; words are numbers into ``words``, kept once, and word 0 is empty.

    Make one with :class:`TraceBuilder` span by span, or with :func:`from_columns` from arrays.
    """

    title: str
    words: tuple[str, ...]
    name: Ids
    lane: Ids
    module: Ids
    op: Ids
    phase: Ids
    source: Ids
    start_s: Seconds
    duration_s: Seconds
    kind: NDArray[np.int8]
    rank: Ids
    device: Ids
    stream: Ids
    thread: Ids
    launch: Ids
    parent: Ids
    step: Ids
    extra: Mapping[str, Column] = field(default_factory=dict)
    counters: Mapping[str, Counter] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    origin_ns: int = 0
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # derived, computed once

    def __len__(self) -> int:
        return len(self.start_s)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Something that follows from the trace alone, made once; arrays among it are read-only."""
        if name not in self._kept:
            value = make()
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            self._kept[name] = value
        return self._kept[name]

    @property
    def end_s(self) -> float:
        """When the last span ends; 0 for an empty trace."""
        return float((self.start_s + self.duration_s).max(initial=0.0))

    @property
    def start_ns(self) -> Nanos:
        """Starts as whole nanoseconds since the origin; sums of these are exact."""
        found: Nanos = self.keep("start_ns", lambda: np.rint(self.start_s * 1e9).astype(np.int64))
        return found

    @property
    def end_ns(self) -> Nanos:
        found: Nanos = self.keep("end_ns", lambda: np.rint((self.start_s + self.duration_s) * 1e9).astype(np.int64))
        return found

    @property
    def gpu(self) -> Mask:
        """Spans that keep a device busy: kernels, communication, copies and memsets."""
        found: Mask = self.keep("gpu", lambda: self.of_kind(*WORK) & (self.device >= 0))
        return found

    @property
    def linked(self) -> Mask:
        """Device work whose launch is in the trace."""
        return self.gpu & (self.launch >= 0)

    def of_kind(self, *kinds: Kind) -> Mask:
        """Which spans are of one of the kinds."""
        chosen = np.zeros(128, dtype=np.bool_)
        chosen[[int(kind) for kind in kinds]] = True
        return np.asarray(chosen[self.kind], dtype=np.bool_)

    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.rank)]

    def devices(self) -> list[int]:
        """Devices that have spans, in order; empty when the trace knows only the host."""
        found = np.unique(self.device)
        return [int(device) for device in found[found >= 0]]

    def lanes(self) -> list[str]:
        """The lanes in the order in which they first appear."""
        found, first = np.unique(self.lane, return_index=True)
        return [self.words[found[i]] for i in np.argsort(first)]

    def on(self, lane: str) -> Index:
        """Indices of a lane's spans in time order."""
        return self.in_order(self.lane == self.word_id(lane))

    def in_order(self, mask: Mask) -> Index:
        """Indices of the chosen spans in time order."""
        chosen = np.flatnonzero(mask)
        return chosen[np.argsort(self.start_s[chosen], kind="stable")]

    def busy(self, mask: Mask) -> Intervals:
        """The time in which at least one of the chosen spans runs."""
        return union(self.start_ns[mask], self.end_ns[mask])

    def busy_s(self, lane: str) -> float:
        """Seconds in which at least one span of the lane runs."""
        chosen = self.on(lane)
        start, end = self.start_s[chosen], self.start_s[chosen] + self.duration_s[chosen]
        reached = np.maximum.accumulate(np.concatenate(([-np.inf], end[:-1]))) if len(chosen) else end
        return float(np.maximum(0.0, end - np.maximum(start, reached)).sum())

    def word_id(self, word: str) -> int:
        """The number of a word; -1 if no span has it."""
        return self.words.index(word) if word in self.words else -1

    def text(self, column: str, span: int) -> str:
        """A word of one span: ``trace.text("name", 7)``."""
        return self.words[int(self._column(column)[span])]

    def optional(self, column: str) -> Column:
        """An optional column, filled with its absent value if this trace does not have it."""
        found = self.extra.get(column)
        if found is not None:
            return found
        absent, kind = absent_of(column), VOCABULARY[column]
        return np.full(len(self), absent, dtype=np.int32 if kind is str else kind)

    def matching(self, column: str, accept: Iterable[str]) -> Mask:
        """Which spans have one of the words in a column."""
        wanted = set(accept)
        chosen = np.fromiter((word in wanted for word in self.words), dtype=np.bool_, count=len(self.words))
        return np.asarray(chosen[self._column(column)], dtype=np.bool_)

    def children(self, span: int) -> Index:
        """Spans directly inside a host span, in time order."""
        return self.in_order(self.parent == span)

    def path(self, span: int) -> list[int]:
        """The way up: a kernel, its launch, the ops around that, the annotations and the step."""
        found, seen, at = [], set[int](), int(span)
        while at >= 0 and at not in seen:
            found.append(at)
            seen.add(at)
            launch = int(self.launch[at])
            at = launch if launch >= 0 else int(self.parent[at])
        return found

    def select(self, chosen: Mask | Index) -> Trace:
        """Some of the spans as a trace of their own; links to spans left out become -1."""
        index = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        moved = np.full(len(self) + 1, -1, dtype=np.int32)  # the last place stands for "no link"
        moved[index] = np.arange(len(index), dtype=np.int32)
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        for link in LINK_COLUMNS:
            columns[link] = moved[columns[link]]
        return replace(self, **columns, extra={name: column[index] for name, column in self.extra.items()})

    def with_used_words(self) -> Trace:
        """The same spans with no words but their own: what is kept of many traces stays small."""
        columns = {name: getattr(self, name) for name in WORD_COLUMNS}
        columns |= {name: column for name, column in self.extra.items() if VOCABULARY[name] is str}
        used = np.unique(np.concatenate([np.zeros(1, np.int32), *columns.values()]))
        moved = {name: np.searchsorted(used, column).astype(np.int32) for name, column in columns.items()}
        own = {name: column for name, column in moved.items() if name in WORD_COLUMNS}
        extra = {name: moved.get(name, column) for name, column in self.extra.items()}
        return replace(self, words=tuple(self.words[word] for word in used.tolist()), **own, extra=extra, counters={})

    def of_rank(self, rank: int) -> Trace:
        """The spans of one rank."""
        return self.select(self.rank == rank)

    def with_columns(self, **columns: Column) -> Trace:
        """The same spans with columns replaced or optional ones added."""
        own: dict[str, Any] = {name: column for name, column in columns.items() if name in COLUMNS}
        extra = {name: column for name, column in columns.items() if name not in COLUMNS}
        for name, column in columns.items():
            _check(name, column, len(self))
        made = replace(self, **own, extra={**self.extra, **extra})
        return made._keeping(self) if set(columns) <= _PRICES else made

    def with_more_words(self, words: tuple[str, ...]) -> Trace:
        """The same spans with words added after those there are."""
        assert words[: len(self.words)] == self.words
        return replace(self, words=words)._keeping(self)

    def with_meta(self, **meta: Any) -> Trace:
        """The same spans with more known of the run as a whole."""
        return replace(self, meta={**self.meta, **meta})._keeping(self)

    def _keeping(self, other: Trace) -> Trace:
        """This trace with what was derived from another that has the same spans."""
        self._kept.update(other._kept)
        return self

    def with_words(self, **columns: list[str]) -> Trace:
        """The same spans with word columns given as text, one word a span."""
        ids = {word: i for i, word in enumerate(self.words)}
        numbered = {
            name: np.fromiter((ids.setdefault(word, len(ids)) for word in words), dtype=np.int32)
            for name, words in columns.items()
        }
        return replace(self, words=tuple(ids)).with_columns(**numbered)

    def _column(self, column: str) -> Column:
        return self.optional(column) if column in VOCABULARY else np.asarray(getattr(self, column))


COLUMNS = tuple(
    f.name
    for f in fields(Trace)
    if f.name not in ("title", "words", "extra", "counters", "notes", "meta", "origin_ns", "_kept")
)
#: Columns from which nothing that a trace keeps is derived.
_PRICES = frozenset(("floor_s", "expected_s", "flops", "read_bytes", "written_bytes", "bound", "energy_j"))
_TYPES: Mapping[str, type] = {"start_s": np.float64, "duration_s": np.float64, "kind": np.int8}


def _check(name: str, column: Column, num_spans: int) -> None:
    if name not in COLUMNS:
        absent_of(name)  # refuses what is not in the vocabulary
    if len(column) != num_spans:
        raise InputError(f"span column {name!r} has {len(column)} rows; the trace has {num_spans} spans")


def from_columns(
    title: str,
    words: Iterable[str],
    *,
    name: Column,
    start_s: Column,
    duration_s: Column,
    extra: Mapping[str, Column] | None = None,
    counters: Mapping[str, Counter] | None = None,
    notes: Iterable[str] = (),
    meta: Mapping[str, Any] | None = None,
    origin_ns: int = 0,
    **columns: Column,
) -> Trace:
    """A trace from arrays; columns left out are filled with the value that says "not known". Word 0 must be ``""``."""
    words = tuple(words)
    if not words or words[0] != "":
        raise InputError("words of a trace begin with the empty word: number 0 says that a span has none")
    given = {"name": name, "start_s": start_s, "duration_s": duration_s, **columns}
    for column in set(given) - set(COLUMNS):
        raise InputError(f"no span column {column!r}; optional ones go into extra")
    num = len(start_s)
    full: dict[str, Column] = {}
    for column in COLUMNS:
        kind = _TYPES.get(column, np.int32)
        values = given.get(column)
        full[column] = np.full(num, ABSENT[column], kind) if values is None else np.asarray(values, dtype=kind)
        _check(column, full[column], num)
    optional = dict(extra or {})
    for column, values in optional.items():
        _check(column, values, num)
    return Trace(
        title, words, **full, extra=optional, counters=dict(counters or {}), notes=tuple(notes), meta=dict(meta or {}),
        origin_ns=origin_ns,
    )  # fmt: skip


def concat(traces: list[Trace], title: str) -> Trace:
    """Several traces in one table, on one clock: ranks of a job, or pieces of a run."""
    if not traces:
        return TraceBuilder(title).build()
    origin_ns = min(trace.origin_ns for trace in traces)
    ids: dict[str, int] = {"": 0}
    parts = [_moved(trace, ids, origin_ns) for trace in traces]
    offsets = np.cumsum([0] + [len(trace) for trace in traces])
    for (columns, _), offset in zip(parts, offsets, strict=False):
        for link in LINK_COLUMNS:
            columns[link] = np.where(columns[link] >= 0, columns[link] + offset, -1).astype(np.int32)
    optional = sorted({name for _, extra in parts for name in extra})
    joined = {name: np.concatenate([columns[name] for columns, _ in parts]) for name in COLUMNS}
    extra = {name: np.concatenate(_aligned(name, traces, parts)) for name in optional}
    counters: dict[str, Counter] = {}
    for trace in traces:
        for key, counter in trace.counters.items():
            moved = replace(counter, at_s=counter.at_s + (trace.origin_ns - origin_ns) / 1e9)
            counters[key if key not in counters else f"{key} (rank {trace.ranks()[0] if len(trace) else 0})"] = moved
    notes = dict.fromkeys(note for trace in traces for note in trace.notes)
    return Trace(
        title, tuple(ids), **joined, extra=extra, counters=counters, notes=tuple(notes), meta=dict(traces[0].meta),
        origin_ns=origin_ns,
    )  # fmt: skip


def _moved(trace: Trace, ids: dict[str, int], origin_ns: int) -> tuple[dict[str, Column], dict[str, Column]]:
    """Columns with words renumbered and times on the new origin."""
    number = np.fromiter(
        (ids.setdefault(word, len(ids)) for word in trace.words), dtype=np.int32, count=len(trace.words)
    )
    columns = {name: getattr(trace, name) for name in COLUMNS}
    columns |= {name: number[columns[name]] for name in WORD_COLUMNS}
    columns["start_s"] = (trace.start_ns + (trace.origin_ns - origin_ns)) / 1e9
    extra = {name: number[values] if VOCABULARY[name] is str else values for name, values in trace.extra.items()}
    return columns, extra


def _aligned(name: str, traces: list[Trace], parts: list[tuple[dict[str, Column], dict[str, Column]]]) -> list[Column]:
    found = [extra.get(name) for _, extra in parts]
    shape = next(column.shape[1:] for column in found if column is not None)
    kind = np.int32 if VOCABULARY[name] is str else VOCABULARY[name]
    return [
        np.full((len(trace), *shape), absent_of(name), dtype=kind) if column is None else column
        for trace, column in zip(traces, found, strict=True)
    ]


class TraceBuilder:
    """Collects spans and counters, then freezes them into a Trace."""

    def __init__(self, name: str) -> None:
        self._title = name
        self._ids: dict[str, int] = {"": 0}
        self._words = {column: array("i") for column in WORD_COLUMNS}
        self._numbers = {column: array("i") for column in ABSENT if column not in WORD_COLUMNS}
        self._start_s, self._duration_s = array("d"), array("d")
        self._extra: dict[str, dict[int, Any]] = {}
        self._counters: dict[str, tuple[array[float], array[float]]] = {}
        self._notes: list[str] = []
        self._meta: dict[str, Any] = {}
        self._origin_ns = 0

    def add(
        self,
        name: str,
        lane: str,
        start_s: float,
        duration_s: float,
        *,
        module: str = "",
        op: str = "",
        phase: str = "",
        source: str = "",
        kind: Kind | None = None,
        device: int | None = None,
        stream: int | None = None,
        thread: int | None = None,
        rank: int = 0,
        launch: int = -1,
        parent: int = -1,
        step: int = -1,
        extra: Mapping[str, Any] | None = None,
    ) -> int:
        """One span; time cannot run backward. Returns its index, for links of later spans.

        Without a kind, a lane whose name begins with ``host`` holds ops on thread 0 and any other lane kernels on
        device 0.
        """
        if not duration_s >= 0.0 or not start_s == start_s:
            raise InputError(
                f"span {name!r} on lane {lane!r} starts at {start_s} s and lasts {duration_s} s: no such time"
            )
        at_host = (
            lane.startswith("host") if kind is None and device is None else kind not in WORK and device in (None, -1)
        )
        kind = (Kind.OP if at_host else Kind.KERNEL) if kind is None else kind
        device = (-1 if at_host else 0) if device is None else device
        stream = (-1 if at_host else 0) if stream is None else stream
        thread = (0 if at_host else -1) if thread is None else thread
        for column, word in zip(WORD_COLUMNS, (name, lane, module, op, phase, source), strict=True):
            self._words[column].append(self._word(word))
        numbers = (int(kind), rank, device, stream, thread, launch, parent, step)
        for values, number in zip(self._numbers.values(), numbers, strict=True):
            values.append(number)
        index = len(self._start_s)
        self._start_s.append(start_s)
        self._duration_s.append(duration_s)
        for column, value in (extra or {}).items():
            absent_of(column)
            self._extra.setdefault(column, {})[index] = self._word(value) if VOCABULARY[column] is str else value
        return index

    def _word(self, word: str) -> int:
        return self._ids.setdefault(word, len(self._ids))

    def count(self, counter: str, at_s: float, value: float) -> None:
        """The counter has this value from ``at_s`` on."""
        times, values = self._counters.setdefault(counter, (array("d"), array("d")))
        times.append(at_s)
        values.append(value)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def describe(self, *, origin_ns: int | None = None, **meta: Any) -> None:
        """What is known of the run as a whole."""
        self._meta |= meta
        self._origin_ns = self._origin_ns if origin_ns is None else origin_ns

    def build(self) -> Trace:
        columns = {name: np.array(ids, dtype=np.int32) for name, ids in (self._words | self._numbers).items()}
        counters = {
            name: Counter(np.array(times), np.array(values)) for name, (times, values) in self._counters.items()
        }
        return from_columns(
            self._title,
            self._ids,
            **columns,
            start_s=np.array(self._start_s),
            duration_s=np.array(self._duration_s),
            extra={name: self._dense(name, cells) for name, cells in self._extra.items()},
            counters=counters,
            notes=self._notes,
            meta=self._meta,
            origin_ns=self._origin_ns,
        )

    def _dense(self, name: str, cells: Mapping[int, Any]) -> Column:
        shape = np.shape(next(iter(cells.values())))
        kind = np.int32 if VOCABULARY[name] is str else VOCABULARY[name]
        column = np.full((len(self._start_s), *shape), absent_of(name), dtype=kind)
        for index, value in cells.items():
            column[index] = value
        return column
