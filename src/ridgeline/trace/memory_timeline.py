"""PyTorch's memory timelines (``export_memory_timeline``): bytes held over time, by category."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError
from ridgeline.trace.payload import read_bytes
from ridgeline.trace.table import Trace, TraceBuilder

Bytes = NDArray[np.int64]
#: In the order of PyTorch's category numbers.
CATEGORIES = (
    "parameter",
    "optimizer state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd detail",
    "unknown",
)
PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = 1, 2, 3, 4
MAX_ROWS = 50_000_000


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes held from each time to the next, one column a category; columns add up to what is held."""

    at_s: NDArray[np.float64]
    by_category: Mapping[str, Bytes]
    origin_ns: int = 0
    notes: tuple[str, ...] = field(default=())

    def total_bytes(self) -> Bytes:
        return np.asarray(np.sum(list(self.by_category.values()), axis=0), dtype=np.int64)

    @property
    def peak(self) -> int:
        """The row where most is held."""
        return int(np.argmax(self.total_bytes()))

    def at_peak(self) -> list[tuple[str, int]]:
        """What holds the peak: category and bytes, largest first."""
        held = [(name, int(column[self.peak])) for name, column in self.by_category.items()]
        return sorted(((name, num) for name, num in held if num), key=lambda row: -row[1])

    def trace(self, title: str) -> Trace:
        """The timeline as counters of a trace."""
        build = TraceBuilder(title)
        build.describe(origin_ns=self.origin_ns, format="memory_timeline")
        columns = {"memory_bytes": self.total_bytes()}
        columns |= {f"memory_bytes: {name}": column for name, column in self.by_category.items() if column.any()}
        for name, column in columns.items():
            for at_s, value in zip(self.at_s.tolist(), column.tolist(), strict=True):
                build.count(name, at_s, value)
        for note in self.notes:
            build.note(note)
        return build.build()


def read_memory_timeline(path: str | os.PathLike[str]) -> MemoryTimeline:
    """A ``.raw.json.gz`` (single events) or ``.json`` (sums by category) file, packed or not."""
    text = read_bytes(path)
    if text[:200].lstrip()[:1] == b"<":
        raise InputError(
            f"{path} is an HTML page, which holds a picture of the timeline and no numbers: "
            "call export_memory_timeline with a name that ends in .raw.json.gz"
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; was it cut short?") from None
    if (
        isinstance(document, list)
        and len(document) == 2
        and all(isinstance(part, list) for part in document)
        and len(document[0]) == len(document[1])
        and all(isinstance(row, list) for row in document[1])
        and not any(isinstance(at, list) for at in document[0])
    ):
        # Times in µs; the first column of sizes is a zero that PyTorch draws from
        times, sizes = document
        rows = _table(path, sizes, len(CATEGORIES) + 1)
        at_us = _table(path, times, 1)[:, 0]
        origin_us = int(at_us.min()) if len(at_us) else 0
        held = {name: rows[:, i + 1] for i, name in enumerate(CATEGORIES)}
        return MemoryTimeline(np.asarray((at_us - origin_us) * 1e-6, dtype=np.float64), held, origin_us * 1000)
    if isinstance(document, list) and document and all(isinstance(row, list) and len(row) == 4 for row in document):
        return _from_events(path, document)
    raise InputError(
        f"{path} is no memory timeline: expected rows of [time, action, bytes, category], "
        "or [times, sizes by category], as export_memory_timeline writes them"
    )


def is_memory_timeline(head: bytes) -> bool:
    """Whether a file that begins like this may be a timeline: a list of lists."""
    return head.lstrip()[:1] == b"[" and head.lstrip()[1:].lstrip()[:1] == b"["


def _table(path: str | os.PathLike[str], rows: list[Any], width: int) -> Bytes:
    try:
        found = np.array(rows, dtype=np.int64).reshape(-1, width)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{path} is no memory timeline: some rows are not {width} whole numbers") from None
    if len(found) > MAX_ROWS:
        raise InputError(f"{path} has {len(found):,} rows, more than {MAX_ROWS:,}: record fewer steps")
    return found


def _from_events(path: str | os.PathLike[str], document: list[Any]) -> MemoryTimeline:
    """A destroyed block has its bytes counted down; a new version moves them (two rows) to another category."""
    rows = _table(path, document, 4)
    at_ns, action, num, category = rows.T
    known = (category >= 0) & (category < len(CATEGORIES)) & (action >= PREEXISTING) & (action <= DESTROY)
    notes = () if known.all() else (f"{int((~known).sum()):,} rows of unknown action or category are left out",)
    at_ns, action, num, category = at_ns[known], action[known], num[known], category[known]
    change = np.where(action == DESTROY, -np.abs(num), num)
    started = at_ns[at_ns >= 0]
    origin_ns = int(started.min()) if len(started) else 0
    since_ns = np.where(at_ns < 0, 0, at_ns - origin_ns)
    order = np.argsort(since_ns, kind="stable")
    times, last = np.unique(since_ns[order], return_index=True)
    ends = np.append(last[1:], len(order)) - 1 if len(order) else last
    held = {
        name: np.cumsum(np.where(category[order] == i, change[order], 0))[ends] for i, name in enumerate(CATEGORIES)
    }
    return MemoryTimeline(np.asarray(times * 1e-9, dtype=np.float64), held, origin_ns, notes)
