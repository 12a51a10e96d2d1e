"""Allocations and frees that a profiler notes as instants, as spans of memory held and totals over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.columns import BAD_TIME, Ints, instants_ns, ints
from ridgeline.trace.gather import Gathered

Totals = dict[str, tuple[Ints, NDArray[np.float64]]]


@dataclass(slots=True)
class Allocations:
    """One row for each block that was allocated while recording; totals of every device."""

    start: Ints
    end: Ints
    num_bytes: Ints
    device: NDArray[np.int32]
    place: list[tuple[str, str]]
    totals: Totals = field(default_factory=dict)

    def thread_of(self, threads: list[tuple[str, str]]) -> NDArray[np.int32]:
        """The number of the thread that allocated each; new threads are added to the list."""
        number = {pair: i for i, pair in enumerate(threads)}
        for pair in self.place:
            if pair not in number:
                number[pair] = len(threads)
                threads.append(pair)
        return np.array([number[pair] for pair in self.place], dtype=np.int32)


def allocations_of(gathered: Gathered, *, exact: bool) -> Allocations:
    """Blocks by address, and allocated and reserved bytes of every device over time."""
    events = gathered.memory
    empty = np.zeros(0, dtype=np.int64)
    if not events:
        return Allocations(empty, empty, empty, empty.astype(np.int32), [])
    at = instants_ns([event[0] for event in events], exact=exact)
    address, size, kind, index, allocated, reserved = (ints([event[i] for event in events]) for i in range(3, 9))
    size = ints([event[4] for event in events], 0)
    device = np.where(kind == 0, -1, np.maximum(index, 0)).astype(np.int32)
    order = np.flatnonzero(at != BAD_TIME)
    order = order[np.argsort(at[order], kind="stable")]
    places = [(str(event[1]), str(event[2])) for event in events]
    # An allocation until the next event at its address, which frees it, or the recording's end
    last = int(at[order[-1]]) if len(order) else 0
    known = order[address[order] >= 0]
    known = known[np.lexsort((np.arange(len(known)), address[known], device[known]))]  # by address, then time
    ends = np.full(len(known), last, dtype=np.int64)
    same = (device[known[1:]] == device[known[:-1]]) & (address[known[1:]] == address[known[:-1]])
    ends[:-1][same] = at[known[1:]][same]
    made = size[known] > 0
    rows, ends = known[made], ends[made]
    by_time = np.argsort(at[rows], kind="stable")
    rows, ends = rows[by_time], ends[by_time]
    found = Allocations(at[rows], ends, size[rows], device[rows], [places[row] for row in rows.tolist()])
    found.totals = _totals(order, at, size, device, allocated, reserved)
    return found


def _totals(
    order: NDArray[np.intp], at: Ints, size: Ints, device: NDArray[np.int32], allocated: Ints, reserved: Ints
) -> Totals:
    """What the allocator says it holds; where it does not say, the sum of what was seen."""
    found: Totals = {}
    for number in np.unique(device[order]).tolist():
        rows = order[device[order] == number]
        where = "host" if number < 0 else f"GPU {number}"
        said = (allocated[rows] >= 0).all()
        total = allocated[rows] if said else np.cumsum(size[rows])
        found[f"allocated_bytes ({where})" if said else f"allocated_bytes since start ({where})"] = (
            at[rows],
            total.astype(np.float64),
        )
        if (reserved[rows] >= 0).all() and (reserved[rows] > 0).any():
            found[f"reserved_bytes ({where})"] = (at[rows], reserved[rows].astype(np.float64))
    return found
