"""Device memory over time: how high it went, when, and who held it then."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Trace

_TOTAL = re.compile(r"^(?:allocated_bytes|memory_bytes)\b.*?(?:\(GPU (\d+)\))?$")


@dataclass(frozen=True, slots=True)
class Peak:
    """The most a device held at once."""

    device: int
    at_s: float
    allocated_bytes: int
    reserved_bytes: int  # -1: not recorded
    recorded_bytes: int  # of the allocations that the trace saw being made; the rest was there before
    holders: tuple[Holder, ...]

    @property
    def earlier_bytes(self) -> int:
        """Allocated before the recording began: parameters, as a rule."""
        return self.allocated_bytes - self.recorded_bytes


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
    found = []
    for name, counter in trace.counters.items():
        match = _TOTAL.match(name)
        if not match or not len(counter.value) or "(host)" in name:
            continue
        device = int(match.group(1) or 0)
        top = int(np.argmax(counter.value))
        at_s = float(counter.at_s[top])
        held = live_at(trace, device, at_s)
        found.append(
            Peak(
                device=device,
                at_s=at_s,
                allocated_bytes=int(counter.value[top]),
                reserved_bytes=_reserved(trace, device, at_s),
                recorded_bytes=int(trace.optional("bytes")[held].sum()) if len(held) else 0,
                holders=tuple(_holders(trace, held)[:limit]),
            )
        )
    return found


def live_at(trace: Trace, device: int, at_s: float) -> Index:
    """Allocations that a device holds at a time."""
    at = round(at_s * 1e9)
    chosen = trace.of_kind(Kind.ALLOCATION) & (trace.device == device)
    return np.flatnonzero(chosen & (trace.start_ns <= at) & (trace.end_ns > at))


def _reserved(trace: Trace, device: int, at_s: float) -> int:
    counter = trace.counters.get(f"reserved_bytes (GPU {device})")
    if counter is None or not len(counter.value):
        return -1
    at = int(np.searchsorted(counter.at_s, at_s, side="right")) - 1
    return int(counter.value[max(at, 0)])


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
