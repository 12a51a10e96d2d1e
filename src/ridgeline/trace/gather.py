"""Chrome events, batch by batch, into columns: the half of reading that sees Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.columns import BAD_TIME, Ints, Texts, Words, durations_ns, floats, instants_ns, ints
from ridgeline.trace.decode import ARGS, FLOATS, INSTANT, MARKS, OWN_ARGS, TEXTS, WORDS, absent
from ridgeline.trace.dialect import CATEGORIES, WINDOWS
from ridgeline.trace.kind import WORK, Kind
from ridgeline.trace.table import Column

_ON_DEVICE = frozenset(
    name for name, kind in CATEGORIES.items() if kind in WORK or name in ("gpu_user_annotation", "cuda_sync")
)
#: What a collective says of itself; looked at only where there is one.
_OF_COLLECTIVES = ("group", "dtype", "in_elements", "out_elements", "group_size")
#: Arguments read for rows of each sort, first whether they are collectives; the others are not looked at.
READ_DEVICE = (
    "collective", "external", "correlation", "device", "stream", "bytes", "grid", "block", "registers", "shared_bytes",
    "occupancy", "graph_node", "wait_stream", "wait_event",
)  # fmt: skip
READ_HOST = (
    "collective", "external", "sequence", "forward_thread", "shapes", "dtypes", "strides", "concrete", "stack",
    "hierarchy", "flops",
)  # fmt: skip
#: Our own files: everything that is not a mark.
READ_OWN = tuple(name for name in OWN_ARGS if name not in {"device", "stream"} | INSTANT | MARKS)


class _NoArgs:
    """Arguments of an event that has none."""

    def __getattr__(self, name: str) -> Any:
        return absent(name)


_NO_ARGS = _NoArgs()
_NO_STREAM = absent("stream")
_SPANS_ONLY, _FLOWS_TOO = ("X",), ("X", "f", "s", "t")
_TS, _DUR, _CAT, _NAME, _PID, _TID, _ARGS = map(attrgetter, ("ts", "dur", "cat", "name", "pid", "tid", "args"))


@dataclass(slots=True)
class Gathered:
    """What batches leave behind: dense columns in pieces, arguments as (rows, values)."""

    own: bool = False  # written by ourselves: every argument is ours
    words: Words = field(default_factory=Words)
    categories: Words = field(default_factory=Words)
    processes: Words = field(default_factory=Words)
    tasks: Words = field(default_factory=Words)
    places: list[tuple[str, str]] = field(default_factory=list)  # (process, thread) that rows are on
    dense: dict[str, list[Column]] = field(default_factory=dict)
    sparse: dict[str, list[tuple[Ints, Column]]] = field(default_factory=dict)
    num_rows: int = 0
    num_bad_times: int = 0
    num_negative: int = 0  # spans that end before they start
    in_ns: bool | None = None
    labels: dict[tuple[str, str, str], str] = field(default_factory=dict)
    opened: list[Any] = field(default_factory=list)  # B and E events, until they are paired
    memory: list[tuple[Any, ...]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    flows: list[tuple[Any, ...]] = field(default_factory=list)  # where correlations are missing
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.words)

    def take(self, batch: list[Any], *, exact: bool) -> None:
        """The events of one batch."""
        complete = [event for event in batch if event.ph == "X"]
        if len(complete) != len(batch):
            skipped = _FLOWS_TOO if "correlation" in self.sparse else _SPANS_ONLY
            self._marks([event for event in batch if event.ph not in skipped])
        if self.own:  # slices without a kind are drawn for viewers: they repeat what spans say
            complete = [event for event in complete if event.cat]
        if complete:
            self._spans(complete, exact)

    def settle(self) -> None:
        """Pairs of process and thread as numbers, once everything has been seen."""
        code = self.column("process", np.int32).astype(np.int64) * len(self.tasks) + self.column("task", np.int32)
        different, inverse = np.unique(code, return_inverse=True)
        processes, tasks = self.processes.frozen(), self.tasks.frozen()
        keys: dict[tuple[str, str], int] = {}
        number = [
            keys.setdefault((processes[c // len(tasks)], tasks[c % len(tasks)]), len(keys)) for c in different.tolist()
        ]
        self.places = list(keys)
        self.dense["place"] = [np.array(number, dtype=np.int32)[inverse]]

    def column(self, name: str, kind: Any) -> Column:
        return np.concatenate(self.dense[name]) if self.dense.get(name) else np.zeros(0, dtype=kind)

    def argument(self, name: str, absent: float, kind: Any) -> Column:
        """An argument for every row; ``absent`` where a row has none."""
        column = np.full(self.num_rows, absent, dtype=kind)
        for rows, values in self.sparse.get(name, ()):
            column[rows] = values
        return column

    def _marks(self, events: list[Any]) -> None:
        """Names of processes and threads, memory instants, begin-end pairs and flows."""
        for event in events:
            ph, args = event.ph, getattr(event, "args", None)
            if ph == "s" or ph == "f":
                self.flows.append((ph, event.id, event.pid, event.tid, event.ts))
            elif ph == "i" or ph == "I":
                if args is not None and event.name == "[memory]":
                    self.memory.append((event.ts, event.pid, event.tid, args.addr, args.size, args.device_type,
                                        args.device_id, args.allocated, args.reserved))  # fmt: skip
            elif ph == "M":
                if args is not None:
                    label = args.name if args.name is not None else args.labels
                    self.labels[str(event.name), str(event.pid), str(event.tid)] = str(label)
            elif ph in ("B", "E", "b", "e"):
                self.opened.append(event)

    def _spans(self, events: list[Any], exact: bool) -> None:
        start = instants_ns(list(map(_TS, events)), exact=exact)
        events, start = self._timed(events, start)
        category = self.categories.ids(list(map(_CAT, events)))
        events, start, category = self._without_windows(events, start, category)
        num = len(events)
        self._append("start", start)
        duration, num_negative = durations_ns(list(map(_DUR, events)), in_ns=bool(self.in_ns))
        self._append("duration", duration)
        self.num_negative += num_negative
        self._append("category", category)
        self._append("name", self.words.ids(list(map(_NAME, events))))
        self._append("process", self.processes.ids(list(map(_PID, events))))
        self._append("task", self.tasks.ids(list(map(_TID, events))))
        self._arguments([_NO_ARGS if args is None else args for args in map(_ARGS, events)], category)
        self.num_rows += num

    def _append(self, name: str, column: Column) -> None:
        self.dense.setdefault(name, []).append(column)

    def _timed(self, events: list[Any], start: Ints) -> tuple[list[Any], Ints]:
        """Events that have a time, and whether the clock counts nanoseconds."""
        if self.in_ns is None:
            self.in_ns = next((event.ts > 1e17 for event in events if isinstance(event.ts, int)), False)
        good = start != BAD_TIME
        if good.all():
            return events, start
        self.num_bad_times += int((~good).sum())
        return [events[i] for i in np.flatnonzero(good)], start[good]

    def _without_windows(
        self, events: list[Any], start: Ints, category: NDArray[np.int32]
    ) -> tuple[list[Any], Ints, NDArray[np.int32]]:
        """The recording's own mark is kept apart: it is no span."""
        window = np.isin(category, [i for word, i in self.categories.items() if str(word).lower() in WINDOWS])
        if not window.any():
            return events, start, category
        for i in np.flatnonzero(window):
            lasted, _ = durations_ns([events[i].dur], in_ns=bool(self.in_ns))
            self.windows.append((int(start[i]), int(start[i] + lasted[0])))
        kept = np.flatnonzero(~window)
        return [events[i] for i in kept], start[kept], category[kept]

    def _arguments(self, args: list[Any], category: NDArray[np.int32]) -> None:
        names = [str(word).strip().lower() for word in self.categories]
        kind = np.array([int(CATEGORIES.get(name, Kind.OTHER)) for name in names], dtype=np.int8)[category]
        device = np.array([name in _ON_DEVICE for name in names], dtype=np.bool_)[category]
        strange = np.flatnonzero(np.array([name not in CATEGORIES for name in names], dtype=np.bool_)[category])
        if len(strange):  # an unknown category runs on a device if it says on which stream
            device[strange] = [args[i].stream not in (None, _NO_STREAM) for i in strange]
        self._append("on_device", device)
        if self.own:
            self._read(args, np.arange(len(args)), READ_OWN)
            return
        host = ~device & np.isin(kind, (Kind.OP, Kind.ANNOTATION, Kind.OTHER))
        self._read(args, np.flatnonzero(device), READ_DEVICE)
        self._read(args, np.flatnonzero(~device & (kind == Kind.RUNTIME)), ("correlation",))
        self._read(args, np.flatnonzero(host), READ_HOST)

    def _read(self, args: list[Any], rows: NDArray[np.intp], names: tuple[str, ...]) -> None:
        if not len(rows):
            return
        chosen = [args[i] for i in rows] if len(rows) < len(args) else args
        found = [self._read_one(name, chosen, rows) for name in names]
        if names[0] == "collective" and found[0]:  # it has more to say
            for name in _OF_COLLECTIVES:
                self._read_one(name, chosen, rows)

    def _read_one(self, name: str, chosen: list[Any], rows: NDArray[np.intp]) -> bool:
        """One argument of some rows; whether any of them has it."""
        for take, nothing in _takers(name, self.own):
            values = list(map(take, chosen))
            if values.count(nothing) < len(values):
                self.sparse.setdefault(name, []).append((rows + self.num_rows, self._typed(name, values)))
                return True
        return False

    def _typed(self, name: str, values: Sequence[Any]) -> Column:
        if name in TEXTS:
            return self.texts.ids(values)
        if name in WORDS:
            return self.words.ids(values)
        return floats(values) if name in FLOATS else ints(values)


@cache
def _takers(name: str, own: bool) -> tuple[tuple[attrgetter[Any], Any], ...]:
    """How to take an argument under each of its names, and what an event without it has."""
    slots = [name] if own else [name if not i else f"{name}_{i}" for i in range(len(ARGS[name]))]
    return tuple((attrgetter(slot), absent(slot)) for slot in slots)
