"""Device memory over time: how high it went, when, and who held it then."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

_TOTAL = re.compile(r"^(?:allocated_bytes(?: since start)?|memory_bytes)(?: \(GPU (\d+)\)| stage (\d+))?$")
BEFORE = "before the recording"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most a device held at once."""

    device: int
    at_s: float
    allocated_bytes: int
    reserved_bytes: int  # -1: not recorded
    recorded_bytes: int  # of the allocations that the trace saw being made; the rest was there before
    holders: tuple[Holder, ...]
    categories: tuple[tuple[str, int], ...] = ()  # largest first; together all that is allocated, where any is known

    @property
    def earlier_bytes(self) -> int:
        """Allocated before the recording began: parameters, as a rule."""
        return self.allocated_bytes - self.recorded_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "at_ms": self.at_s * 1e3,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes if self.reserved_bytes >= 0 else None,
            "by_category": dict(self.categories),
            "holders": [asdict(holder) for holder in self.holders],
        }


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory that one op in one module held at the peak."""

    op: str
    module: str
    phase: str
    source: str
    num_bytes: int
    count: int


def peaks(trace: Trace, limit: int = 20) -> list[Peak]:
    """The peak of every device whose memory was recorded, with its largest holders."""
    totals = {name: _TOTAL.match(name) for name in trace.counters if len(trace.counters[name].value)}
    return [_peak(trace, name, int(match[1] or match[2] or 0), limit) for name, match in totals.items() if match]


def _peak(trace: Trace, name: str, device: int, limit: int) -> Peak:
    counter = trace.counters[name]
    top = int(np.argmax(counter.value))
    at_s, most = float(counter.at_s[top]), int(counter.value[top])
    # Holders that whoever made the trace has written into it
    # What a trace without allocations says of them: for each device rows of category, line, bytes and blocks
    told = trace.meta.get("memory_holders")
    rows = told.get(str(device), ()) if isinstance(told, dict) else ()
    holders = [
        Holder("", "", str(category), str(line), int(num), int(count)) for category, line, num, count in rows
    ] or _holders(trace, live_at(trace, device, at_s))
    recorded = sum(holder.num_bytes for holder in holders)
    # Categories that have counters of their own
    parts = [part for part in trace.counters if part.startswith(f"{name}: ")]
    categories = _largest({part.removeprefix(f"{name}: "): _value(trace, part, at_s) for part in parts}) or _phases(
        holders, most - recorded
    )
    known = [name for name in (f"reserved_bytes (GPU {device})", "reserved_bytes") if name in trace.counters]
    return Peak(
        device,
        at_s,
        most,
        (_value(trace, known[0], at_s) if known and len(trace.counters[known[0]].value) else -1),
        recorded,
        tuple(holders[:limit]),
        categories,
    )


def _phases(holders: list[Holder], before_bytes: int) -> tuple[tuple[str, int], ...]:
    """What the holders are, and what was there before them; nothing where nobody is known."""
    sums = {BEFORE: before_bytes} if holders else {}
    for holder in holders:
        sums[holder.phase or "other"] = sums.get(holder.phase or "other", 0) + holder.num_bytes
    return _largest(sums)


def _largest(sums: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((name, num) for name, num in sums.items() if num > 0), key=lambda row: -row[1]))


def live_at(trace: Trace, device: int, at_s: float) -> Index:
    """Allocations that a device holds at a time."""
    at = round(at_s * 1e9)
    chosen = trace.of_kind(Kind.ALLOCATION) & (trace.device == device)
    return np.flatnonzero(chosen & (trace.start_ns <= at) & (trace.end_ns > at))


def _value(trace: Trace, name: str, at_s: float) -> int:
    """What a counter says at a time: its last word until then."""
    counter = trace.counters[name]
    return int(counter.value[max(int(np.searchsorted(counter.at_s, at_s, side="right")) - 1, 0)])


def _holders(trace: Trace, held: Index) -> list[Holder]:
    sizes = trace.optional("bytes")
    sums: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for row in held.tolist():
        key = (trace.text("op", row), trace.text("module", row), trace.text("phase", row), trace.text("source", row))
        total, count = sums.get(key, (0, 0))
        sums[key] = (total + int(sizes[row]), count + 1)
    rows = [Holder(*key, total, count) for key, (total, count) in sums.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)


def over_time(trace: Trace, device: int = 0, column: str = "phase") -> dict[str, tuple[list[float], list[int]]]:
    """Bytes held over time by phase (or op, or module): (times, bytes) after each change, of recorded allocations."""
    rows = np.flatnonzero(trace.of_kind(Kind.ALLOCATION) & (trace.device == device))
    sizes, keys = trace.optional("bytes")[rows], getattr(trace, column)[rows]
    found = {}
    for key in np.unique(keys).tolist():
        own = np.flatnonzero(keys == key)
        at = np.concatenate((trace.start_ns[rows[own]], trace.end_ns[rows[own]]))
        change = np.concatenate((sizes[own], -sizes[own]))
        order = np.argsort(at, kind="stable")
        found[trace.words[key]] = ((at[order] / 1e9).tolist(), np.cumsum(change[order]).tolist())
    return found
