"""Collectives: which spans of different ranks are one operation, who came late, and how fast the bytes moved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.trace.breakdown import by_device, layers_of
from ridgeline.trace.intervals import Nanos, covered_within
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Ids, Index, Trace

_SORTS = (
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("send_recv", re.compile(r"send_?recv|\bsend\b|\brecv\b|sendrecv|isend|irecv", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
)


def sort_of(text: str) -> str:
    """``all_reduce``, ``all_gather``, … by a collective's or kernel's name; empty if it says none."""
    return next((sort for sort, pattern in _SORTS if pattern.search(text)), "")


def bus_factor(sort: str, group_size: int) -> float:
    """What the busiest link carries per byte of message: the algorithm's lower bound; nan for an unknown sort."""
    if group_size < 1 or not sort:
        return float("nan")
    share = (group_size - 1) / group_size
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "all_to_all": share}
    return factors.get(sort, 1.0)


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one rank as small columns, in time order; what is kept of a rank when there are many."""

    rank: int
    sort: tuple[str, ...]
    group: tuple[str, ...]
    start: Nanos  # since 1970, or since the clock's own zero
    end: Nanos
    num_bytes: Nanos
    group_size: Ids
    exposed: Nanos
    span: Ids  # index in the trace it came from

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation over all ranks whose traces are at hand."""

    index: int
    sort: str
    group: str
    group_size: int
    num_ranks: int  # seen
    num_bytes: int  # of the message; -1: not recorded
    first_s: float  # when the first rank arrived, since the clock's zero
    skew_s: float  # between the first rank's start and the last's
    last_rank: int
    duration_s: float  # from the first start to the last end
    transfer_s: float  # from the last start to the last end: no rank is waited for any more
    exposed_s: float  # mean over ranks: nothing computed beside it
    bus_bytes_per_s: float  # nan where bytes are not recorded


@dataclass(frozen=True, slots=True)
class Straggler:
    """What one rank's late arrivals cost the others."""

    rank: int
    num_last: int
    num_collectives: int
    waited_s: float  # by the earliest rank of each collective in which this one came last
    mean_lateness_s: float  # against the median arrival, over all collectives


def calls_of(trace: Trace) -> list[Calls]:
    """The collectives of every rank in the trace."""
    comm = trace.gpu & trace.of_kind(Kind.COMMUNICATION)
    exposed = np.zeros(len(trace), dtype=np.int64)
    for _, _, mask in by_device(trace, trace.gpu):
        layers = layers_of(trace, mask)
        own = np.flatnonzero(mask & comm)
        exposed[own] = covered_within(layers.exposed_comm, trace.start_ns[own], trace.end_ns[own])
    return [_calls(trace, rank, trace.in_order(comm & (trace.rank == rank)), exposed) for rank in trace.ranks()]


def _calls(trace: Trace, rank: int, rows: Index, exposed: Nanos) -> Calls:
    names, groups = trace.optional("collective"), trace.optional("group")
    texts = {(int(names[i]), int(trace.name[i])) for i in rows}
    sorts = {key: sort_of(trace.words[key[0]]) or sort_of(trace.words[key[1]]) for key in texts}
    return Calls(
        rank=rank,
        sort=tuple(sorts[int(names[i]), int(trace.name[i])] for i in rows),
        group=tuple(trace.words[int(groups[i])] for i in rows),
        start=trace.start_ns[rows] + trace.origin_ns,
        end=trace.end_ns[rows] + trace.origin_ns,
        num_bytes=trace.optional("message_bytes")[rows].astype(np.int64),
        group_size=trace.optional("group_size")[rows].astype(np.int32),
        exposed=exposed[rows],
        span=rows.astype(np.int32),
    )


def matched(ranks: Iterable[Calls]) -> list[list[tuple[int, int]]]:
    """Groups of (position of the rank, position of its call) that are one operation.

    The n-th call of a sort and group on one rank is the n-th on the others where the counts agree; where a recording
    began later on some rank, calls are paired by the overlap of their times.
    """
    known = list(ranks)
    by_sort: dict[tuple[str, str], dict[int, list[int]]] = {}
    for at, calls in enumerate(known):
        for i, key in enumerate(zip(calls.sort, calls.group, strict=True)):
            by_sort.setdefault(key, {}).setdefault(at, []).append(i)
    found: list[list[tuple[int, int]]] = []
    for members in by_sort.values():
        found += _aligned(known, members)
    return sorted(found, key=lambda op: min(int(known[at].start[i]) for at, i in op))


def _aligned(known: list[Calls], members: dict[int, list[int]]) -> Iterator[list[tuple[int, int]]]:
    counts = {len(calls) for calls in members.values()}
    if len(counts) == 1:
        for n in range(counts.pop()):
            yield [(at, calls[n]) for at, calls in members.items()]
        return
    longest = max(members, key=lambda at: len(members[at]))
    operations = [[(longest, i)] for i in members[longest]]
    begun = known[longest].start[members[longest]]
    ended = known[longest].end[members[longest]]
    for at, calls in members.items():
        if at == longest:
            continue
        for i in calls:
            overlap = np.minimum(ended, known[at].end[i]) - np.maximum(begun, known[at].start[i])
            best = int(np.argmax(overlap))
            if overlap[best] >= 0 and all(other != at for other, _ in operations[best]):
                operations[best].append((at, i))
            else:
                operations.append([(at, i)])
    yield from operations


def collectives(ranks: Iterable[Calls]) -> list[Collective]:
    """Every operation with its skew and bandwidth, in time order."""
    known = list(ranks)
    return [_collective(n, operation, known) for n, operation in enumerate(matched(known))]


def _collective(index: int, operation: list[tuple[int, int]], known: list[Calls]) -> Collective:
    starts = np.array([known[at].start[i] for at, i in operation])
    ends = np.array([known[at].end[i] for at, i in operation])
    at, i = operation[int(np.argmax(starts))]
    calls = known[at]
    num_bytes = int(max(known[a].num_bytes[b] for a, b in operation))
    size = max(int(max(known[a].group_size[b] for a, b in operation)), len(operation))
    transfer_s = max(int(ends.max() - starts.max()), 0) / 1e9
    moved = num_bytes * bus_factor(calls.sort[i], size) if num_bytes >= 0 else float("nan")
    return Collective(
        index=index,
        sort=calls.sort[i],
        group=calls.group[i],
        group_size=size,
        num_ranks=len(operation),
        num_bytes=num_bytes,
        first_s=int(starts.min()) / 1e9,
        skew_s=int(starts.max() - starts.min()) / 1e9,
        last_rank=calls.rank,
        duration_s=int(ends.max() - starts.min()) / 1e9,
        transfer_s=transfer_s,
        exposed_s=float(np.mean([known[a].exposed[b] for a, b in operation])) / 1e9,
        bus_bytes_per_s=moved / transfer_s if transfer_s else float("nan"),
    )


def stragglers(ranks: Iterable[Calls]) -> list[Straggler]:
    """How often and by how much each rank came last, the costliest first; empty for a single rank."""
    known = list(ranks)
    operations = [operation for operation in matched(known) if len(operation) > 1]
    last, waited = np.zeros(len(known), np.int64), np.zeros(len(known))
    late: list[list[int]] = [[] for _ in known]
    for operation in operations:
        starts = np.array([known[at].start[i] for at, i in operation])
        at = operation[int(np.argmax(starts))][0]
        last[at] += 1
        waited[at] += int(starts.max() - starts.min()) / 1e9
        middle = int(np.median(starts))
        for (member, _), start in zip(operation, starts.tolist(), strict=True):
            late[member].append(start - middle)
    if not operations:
        return []
    rows = [
        Straggler(calls.rank, int(last[at]), len(late[at]), float(waited[at]), float(np.mean(late[at] or [0])) / 1e9)
        for at, calls in enumerate(known)
    ]
    return sorted(rows, key=lambda row: (-row.waited_s, row.rank))


def arrivals(trace: Trace) -> dict[int, int]:
    """For each collective's span, that of the rank which arrived last; nothing for a single rank."""
    known = calls_of(trace)
    found: dict[int, int] = {}
    for operation in matched(known) if len(known) > 1 else ():
        if len(operation) < 2:
            continue
        starts = [int(known[at].start[i]) for at, i in operation]
        at, i = operation[starts.index(max(starts))]
        found |= {int(known[a].span[b]): int(known[at].span[i]) for a, b in operation}
    return found
