"""Chrome events, batch by batch, into columns: the half of reading that sees Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.columns import BAD_TIME, Ints, Texts, Words, durations_ns, floats, instants_ns, ints
from ridgeline.trace.decode import ARGS, OWN_ARGS, UNSET
from ridgeline.trace.dialect import CATEGORIES, WINDOWS
from ridgeline.trace.kind import WORK, Kind
from ridgeline.trace.table import Column

_ON_DEVICE = frozenset(
    name for name, kind in CATEGORIES.items() if kind in WORK or name in ("gpu_user_annotation", "cuda_sync")
)
_NUMBERS = ("in_elements", "out_elements", "group_size")
#: Arguments read for rows of each sort; the others are not looked at.
READ_DEVICE = (
    "external", "correlation", "device", "stream", "bytes", "grid", "block", "registers", "shared_bytes", "occupancy",
    "collective", "group", "dtype", *_NUMBERS, "graph_node", "wait_stream", "wait_event",
)  # fmt: skip
READ_RUNTIME = ("external", "correlation")
READ_HOST = (
    "external", "sequence", "forward_thread", "shapes", "dtypes", "strides", "stack", "hierarchy", "flops",
    "collective", "group", "dtype", *_NUMBERS,
)  # fmt: skip
#: Our own files: everything that is not a mark.
READ_OWN = tuple(name for name in OWN_ARGS if name not in ("device", "stream", "name", "labels", "addr", "size"))
_WORDS = frozenset(
    ("collective", "group", "dtype", "stack", "hierarchy", "module", "op", "phase", "source", "node", "copy", "link")
)
_TEXTS = frozenset(("shapes", "dtypes", "strides", "grid", "block"))
_FLOATS = frozenset(("occupancy", "occupancy_frac", "flops", "floor_s", "expected_s", "energy_j"))


class _NoArgs:
    """Arguments of an event that has none."""

    def __getattr__(self, name: str) -> None:
        return None


_NO_ARGS = _NoArgs()


@dataclass(slots=True)
class Gathered:
    """What batches leave behind: dense columns in pieces, arguments as (rows, values)."""

    own: bool = False  # written by ourselves: every argument is ours
    words: Words = field(default_factory=Words)
    categories: Words = field(default_factory=Words)
    places: Words = field(default_factory=Words)  # (pid, tid)
    dense: dict[str, list[Column]] = field(default_factory=dict)
    sparse: dict[str, list[tuple[Ints, Column]]] = field(default_factory=dict)
    num_rows: int = 0
    num_bad_times: int = 0
    in_ns: bool | None = None
    labels: dict[tuple[str, str, str], str] = field(default_factory=dict)
    opened: list[Any] = field(default_factory=list)  # B and E events, until they are paired
    memory: list[tuple[Any, ...]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    flows: list[tuple[Any, ...]] = field(default_factory=list)
    num_flows: int = 0
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.words)

    def take(self, batch: list[Any], *, exact: bool) -> None:
        """The events of one batch."""
        complete = [event for event in batch if event.ph == "X"]
        if len(complete) != len(batch):
            self._marks([event for event in batch if event.ph != "X"])
        if self.own:  # slices without a kind are drawn for viewers: they repeat what spans say
            complete = [event for event in complete if event.cat]
        if complete:
            self._spans(complete, exact)

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
            ph, args = event.ph, event.args
            if ph == "s" or ph == "f":
                self.num_flows += 1
                if "correlation" not in self.sparse:  # they matter only where correlations are missing
                    self.flows.append((ph, event.id, event.pid, event.tid, event.ts))
            elif ph == "i" or ph == "I":
                if event.name == "[memory]" and args is not None:
                    self.memory.append((event.ts, event.pid, event.tid, args.addr, args.size, args.device_type,
                                        args.device_id, args.allocated, args.reserved))  # fmt: skip
            elif ph == "M":
                if args is not None:
                    label = args.name if args.name is not None else args.labels
                    self.labels[str(event.name), str(event.pid), str(event.tid)] = str(label)
            elif ph in ("B", "E", "b", "e"):
                self.opened.append(event)

    def _spans(self, events: list[Any], exact: bool) -> None:
        start = instants_ns([event.ts for event in events], exact=exact)
        events, start = self._timed(events, start)
        category = self.categories.ids([event.cat for event in events])
        events, start, category = self._without_windows(events, start, category)
        num = len(events)
        self._append("start", start)
        self._append("duration", durations_ns([event.dur for event in events], in_ns=bool(self.in_ns)))
        self._append("category", category)
        self._append("name", self.words.ids([event.name for event in events]))
        self._append("place", self.places.ids([(event.pid, event.tid) for event in events]))
        self._arguments([_NO_ARGS if event.args is None else event.args for event in events], category)
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
            lasted = durations_ns([events[i].dur], in_ns=bool(self.in_ns))
            self.windows.append((int(start[i]), int(start[i] + lasted[0])))
        kept = np.flatnonzero(~window)
        return [events[i] for i in kept], start[kept], category[kept]

    def _arguments(self, args: list[Any], category: NDArray[np.int32]) -> None:
        names = [str(word).strip().lower() for word in self.categories]
        kind = np.array([int(CATEGORIES.get(name, Kind.OTHER)) for name in names], dtype=np.int8)[category]
        device = np.array([name in _ON_DEVICE for name in names], dtype=np.bool_)[category]
        strange = np.flatnonzero(np.array([name not in CATEGORIES for name in names], dtype=np.bool_)[category])
        if len(strange):  # an unknown category runs on a device if it says on which stream
            device[strange] = [args[i].stream is not None for i in strange]
        self._append("on_device", device)
        if self.own:
            self._read(args, np.arange(len(args)), READ_OWN)
            return
        host = ~device & np.isin(kind, (Kind.OP, Kind.ANNOTATION, Kind.OTHER))
        self._read(args, np.flatnonzero(device), READ_DEVICE)
        self._read(args, np.flatnonzero(~device & (kind == Kind.RUNTIME)), READ_RUNTIME)
        self._read(args, np.flatnonzero(host), READ_HOST)

    def _read(self, args: list[Any], rows: NDArray[np.intp], names: Sequence[str]) -> None:
        if not len(rows):
            return
        chosen = [args[i] for i in rows] if len(rows) < len(args) else args
        for name in names:
            values = given(chosen, name, 1 if self.own else len(ARGS[name]))
            if values is not None:
                self.sparse.setdefault(name, []).append((rows + self.num_rows, self._typed(name, values)))

    def _typed(self, name: str, values: Sequence[Any]) -> Column:
        if name in _TEXTS:
            return self.texts.ids(values)
        if name in _WORDS:
            return self.words.ids(["" if value is None else value for value in values])
        return floats(values) if name in _FLOATS else ints(values)


def given(args: Sequence[Any], name: str, num_names: int) -> list[Any] | None:
    """An argument of every event under the first of its names that any of them has; None if none has it."""
    for i in range(num_names):
        values = list(map(attrgetter(name if not i else f"{name}_{i}"), args))
        if values.count(None) + (values.count(UNSET) if name in _TEXTS else 0) < len(values):
            return values
    return None
