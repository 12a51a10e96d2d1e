"""Why a device computes nothing: every idle moment, exposed copy and exposed collective with its cause and its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.trace.breakdown import by_device, layers_of
from ridgeline.trace.collectives import arrivals
from ridgeline.trace.intervals import Intervals, Nanos, covered_within, gaps, union
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Ids, Index, Mask, Trace

#: What may keep a device from computing. The host's own causes come first, in the order in which they claim a moment.
CAUSES = (
    "dataloader",  # the host waits for, or makes, the next batch
    "gc",  # Python's garbage collector runs
    "recompile",  # graph breaks, guards and compilation
    "allocator",  # cudaMalloc, cudaFree and the like
    "pageable_copy",  # a copy of pageable host memory: the host stages it while the device waits
    "pinned_copy",
    "synchronization",  # the host waited for the device, which then ran dry
    "launch_bound",  # the host was busy between launches
    "device_gap",  # work was queued, and started later than it could: scheduling between kernels
    "device_copy",  # a copy within or between devices, with nothing else running
    "communication",  # a collective with nothing computing beside it
    "straggler",  # a collective that waits for a rank which has not arrived, nothing computing beside it
    "unrecorded",  # work of a CUDA graph was queued and the device shows nothing: its kernels were not recorded
    "bubble",  # a wait that the schedule of a simulated run contains
    "unknown",
)
_HOST_CAUSES = CAUSES[:7]
_SYNC = re.compile(
    r"(?:Stream|Device|Event|Ctx|Context)_?Synchronize|^(?:cuda|hip)Memcpy(?!.*Async)(?:To|From|2D|3D)?"
    r"|^cuMemcpy\w*(?<!Async)$|^cuMemcpy[DH]to[DH](?:_v2)?$",
    re.IGNORECASE,
)
_ALLOCATOR = re.compile(
    r"^(?:cuda|hip|cu)(?:Malloc|Free|Host(?:Alloc|Register|Unregister|Free)|MemAlloc|MemFree|MemCreate|MemMap|MemUnmap"
    r"|MemRelease|MemAddressReserve|MemSetAccess|HostMalloc)",
)
_COMPILE = re.compile(
    r"torch/_dynamo/(?:convert_frame|output_graph|symbolic_convert)"
    r"|torch/_inductor/(?:compile_fx|graph|codecache|async_compile)|\(dynamo_timed\)"
    r"|^(?:_compile\.|compile_fx|TorchDynamo compile|dynamo_timed|CompileFx|entire_frame_compile|backend_compile)"
    r"|^(?:Inductor|AOTAutograd)\b.*compil|triton/(?:compiler|runtime/jit)\S*: (?:compile|_do_compile)",
    re.IGNORECASE,
)
_COPY_CALL = re.compile(r"Memcpy", re.IGNORECASE)
#: A wait that ends this long before the device runs dry still explains why nothing was queued.
_NEAR_NS = 30_000
#: Between queued kernels, and from a launch to its kernel, a device needs no more than this.
_GRAPH_CALL = re.compile(r"GraphLaunch", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches without compute, as columns: each belongs to one cause and one span to blame (-1: none)."""

    cause: NDArray[np.int8]
    ns: Nanos
    blame: Ids  # the host call or op behind it, or the exposed copy or collective itself
    before: Ids  # the device span that ended the stretch
    rank: Ids
    device: Ids
    step: Ids
    idle: Mask  # nothing ran at all; else a copy or collective ran alone


@dataclass(frozen=True, slots=True)
class Cause:
    """All time without compute that one cause explains, at one place."""

    cause: str
    idle_s: float  # the device ran nothing
    exposed_s: float  # only a copy or collective ran
    count: int
    module: str = ""
    source: str = ""
    op: str = ""
    name: str = ""  # of the span to blame
    longest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.idle_s + self.exposed_s


def idle_causes(trace: Trace) -> list[Cause]:
    """One row a cause, largest first, the mean over devices: idle seconds add up to the idle time of ``totals``."""
    return _grouped(trace, pieces_of(trace), by_place=False)


def idle_places(trace: Trace, limit: int = 200) -> list[Cause]:
    """One row for each cause at each module, source line and op, largest first."""
    return _grouped(trace, pieces_of(trace), by_place=True)[:limit]


def pieces_of(trace: Trace) -> Pieces:
    """Every stretch in which no kernel computes, cut by cause."""
    found: Pieces = trace.keep("pieces", lambda: _pieces_of(trace))
    return found


def _pieces_of(trace: Trace) -> Pieces:
    parts: list[Pieces] = []
    # When the last rank came to each collective; a span's own start where no other rank is known
    found = trace.start_ns.copy()
    for span, last in arrivals(trace).items():
        found[span] = found[last]
    arrived = found
    for rank in trace.ranks():
        host = _Host(trace, rank)
        work = trace.gpu & (trace.rank == rank)
        for _, device, mask in by_device(trace, work):
            parts += _idle_pieces(trace, host, rank, device, mask)
            parts += _exposed_pieces(trace, rank, device, mask, arrived)
    names = Pieces.__slots__
    if not parts:
        none = np.zeros(0, np.int32)
        return Pieces(none.astype(np.int8), none.astype(np.int64), none, none, none, none, none, none.astype(np.bool_))
    return Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class _Host:
    """What the threads that launch work of a rank were doing, by cause."""

    def __init__(self, trace: Trace, rank: int) -> None:
        own = trace.rank == rank
        calls = own & trace.of_kind(Kind.RUNTIME)
        self.has_calls = bool(calls.any())
        self.has_graphs = bool(named(trace, _GRAPH_CALL, calls).any())
        callers = trace.launch[own & trace.gpu & (trace.launch >= 0)]
        threads = (
            np.unique(trace.thread[callers]) if len(callers) else np.unique(trace.thread[own & (trace.thread >= 0)])
        )
        at_work = own & np.isin(trace.thread, threads)
        host_ops = at_work & trace.of_kind(Kind.OP, Kind.RUNTIME, Kind.PYTHON, Kind.ANNOTATION, Kind.OTHER)
        self.active = trace.busy(host_ops)
        self.rows: dict[str, Index] = {}
        self.covered: dict[str, Intervals] = {}
        for cause, mask in _cause_masks(trace, at_work).items():
            rows = trace.in_order(mask)
            self.rows[cause] = rows
            self.covered[cause] = union(trace.start_ns[rows], trace.end_ns[rows])


def _cause_masks(trace: Trace, at_work: Mask) -> dict[str, Mask]:
    calls = at_work & trace.of_kind(Kind.RUNTIME)
    python = at_work & trace.of_kind(Kind.PYTHON, Kind.ANNOTATION, Kind.OP)
    copies = calls & named(trace, _COPY_CALL, calls)
    pageable, pinned = _copy_calls(trace, copies)
    return {
        "dataloader": at_work & trace.of_kind(Kind.DATALOADER),
        "gc": at_work & trace.of_kind(Kind.GC),
        "recompile": python & named(trace, _COMPILE, python),
        "allocator": calls & named(trace, _ALLOCATOR, calls),
        "pageable_copy": pageable,
        "pinned_copy": pinned,
        "synchronization": (calls & named(trace, _SYNC, calls)) & ~pageable & ~pinned,
    }


def named(trace: Trace, pattern: re.Pattern[str], chosen: Mask) -> Mask:
    """Which of the chosen spans have a name that the pattern finds; each name is tried once."""
    numbers = np.unique(trace.name[chosen])
    hit = np.zeros(len(trace.words), dtype=np.bool_)
    hit[[number for number in numbers.tolist() if pattern.search(trace.words[number])]] = True
    return chosen & hit[trace.name]


def _copy_calls(trace: Trace, calls: Mask) -> tuple[Mask, Mask]:
    """Host calls of pageable and of pinned copies between host and device."""
    pageable, pinned = np.zeros(len(trace), np.bool_), np.zeros(len(trace), np.bool_)
    for found, words in ((pageable, ("HtoD pageable", "DtoH pageable")), (pinned, ("HtoD pinned", "DtoH pinned"))):
        copies = trace.matching("copy", words) & (trace.launch >= 0)
        found[trace.launch[copies]] = True
        found &= calls
    return pageable, pinned


def _idle_pieces(trace: Trace, host: _Host, rank: int, device: int, mask: Mask) -> list[Pieces]:
    """The gaps of one device, each cut at the launch that ended it."""
    order = trace.in_order(mask)
    start, end = trace.start_ns[order], trace.end_ns[order]
    busy = union(start, end)
    if len(busy.start) < 2:
        return []
    idle = gaps(busy, int(busy.start[0]), int(busy.end[-1]))
    next_row = order[np.searchsorted(start, idle.end, side="left")].astype(np.int32)
    launch = trace.launch[next_row]
    called = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], idle.start)
    late = np.clip(called, idle.start, idle.end)  # until here the host had not asked for it
    bubble = trace.busy((trace.rank == rank) & trace.of_kind(Kind.BUBBLE) & np.isin(trace.device, (device, -1)))
    planned = covered_within(bubble, idle.start, idle.end)
    pieces = [_piece("bubble", planned, np.full(len(late), -1, np.int32), next_row, rank, device, trace)]
    pieces += _host_pieces(trace, host, rank, device, Intervals(idle.start, late), next_row, launch, planned)
    rest = np.where(planned > 0, 0, idle.end - late)
    unlinked = np.where(launch < 0, rest, 0)
    for cause, ns in _after_launch(trace, host, idle, called, launch, rest):
        pieces.append(_piece(cause, ns, launch, next_row, rank, device, trace))
    return pieces + _unlinked_pieces(trace, host, rank, device, idle, next_row, unlinked)


def _after_launch(
    trace: Trace, host: _Host, idle: Intervals, called: Nanos, launch: Ids, rest: Nanos
) -> Iterator[tuple[str, Nanos]]:
    """From the launch on: the latency a device has, and what exceeds it, which no recorded span explains."""
    linked = launch >= 0
    queued = linked & (called <= idle.start)
    calling = np.where(queued | ~linked, 0, np.rint(trace.duration_s[np.maximum(launch, 0)] * 1e9).astype(np.int64))
    usual = np.minimum(rest, calling + 50_000)
    yield "device_gap", np.where(queued, usual, 0)
    yield "launch_bound", np.where(linked & ~queued, usual, 0)
    yield "unrecorded" if host.has_graphs else "unknown", np.where(linked, rest - usual, 0)


def _host_pieces(
    trace: Trace,
    host: _Host,
    rank: int,
    device: int,
    window: Intervals,
    next_row: Ids,
    launch: Ids,
    planned: Nanos,
) -> list[Pieces]:
    """From the moment the device ran dry until the launch: what the host did instead, the likeliest cause first."""
    left = np.where(planned > 0, 0, window.end - window.start)
    taken: Intervals | None = None
    found = []
    for cause in _HOST_CAUSES[:-1]:
        covered = host.covered[cause]
        if not len(covered.start):
            continue
        both = covered if taken is None else _merged(taken, covered)
        before = np.zeros(len(left), np.int64) if taken is None else covered_within(taken, window.start, window.end)
        spent = np.minimum(covered_within(both, window.start, window.end) - before, left)
        taken, left = both, left - spent
        blame = _overlapping(trace, host.rows[cause], window)
        found.append(_piece(cause, spent, blame, next_row, rank, device, trace))
    waited, waits = _after_wait(trace, host, window)
    found.append(_piece("synchronization", np.where(waited, left, 0), waits, next_row, rank, device, trace))
    found.append(_piece("launch_bound", np.where(waited, 0, left), launch, next_row, rank, device, trace))
    return found


def _merged(a: Intervals, b: Intervals) -> Intervals:
    return union(np.concatenate((a.start, b.start)), np.concatenate((a.end, b.end)))


def _after_wait(trace: Trace, host: _Host, window: Intervals) -> tuple[Mask, Ids]:
    """Gaps that follow a wait of the host for the device: nothing could be queued while it lasted."""
    rows = host.rows["synchronization"]
    nothing = np.zeros(len(window.start), np.bool_), np.full(len(window.start), -1, np.int32)
    if not len(rows):
        return nothing
    ends = np.maximum.accumulate(trace.end_ns[rows])
    at = np.searchsorted(trace.start_ns[rows], window.end, side="right") - 1
    last = np.maximum(at, 0)
    waited = (at >= 0) & (ends[last] >= window.start - _NEAR_NS) & (window.end > window.start)
    return waited, np.where(waited, rows[last], -1).astype(np.int32)


def _overlapping(trace: Trace, rows: Index, window: Intervals) -> Ids:
    """The span of a cause that begins last before the window closes: the one to blame."""
    at = np.searchsorted(trace.start_ns[rows], window.end, side="left") - 1
    return np.where(at >= 0, rows[np.maximum(at, 0)], -1).astype(np.int32)


def _unlinked_pieces(
    trace: Trace, host: _Host, rank: int, device: int, idle: Intervals, next_row: Ids, left: Nanos
) -> list[Pieces]:
    """Gaps whose next span has no launch in the trace: what the host did in them is all there is to go by."""
    nobody = np.full(len(left), -1, np.int32)
    found = []
    taken: Intervals | None = None
    for cause in _HOST_CAUSES:
        covered = host.covered[cause]
        if not len(covered.start):
            continue
        both = covered if taken is None else _merged(taken, covered)
        before = np.zeros(len(left), np.int64) if taken is None else covered_within(taken, idle.start, idle.end)
        spent = np.minimum(covered_within(both, idle.start, idle.end) - before, left)
        taken, left = both, left - spent
        found.append(_piece(cause, spent, _overlapping(trace, host.rows[cause], idle), next_row, rank, device, trace))
    if host.has_calls:
        return [*found, _piece("unknown", left, nobody, next_row, rank, device, trace)]
    active = np.minimum(covered_within(host.active, idle.start, idle.end), left)
    found.append(_piece("launch_bound", active, nobody, next_row, rank, device, trace))
    return [*found, _piece("unknown", left - active, nobody, next_row, rank, device, trace)]


def _exposed_pieces(trace: Trace, rank: int, device: int, mask: Mask, arrived: Nanos) -> list[Pieces]:
    """Copies and collectives that run while nothing computes, each span with its own share."""
    layers = layers_of(trace, mask)
    found = []
    for kind, exposed in ((Kind.COMMUNICATION, layers.exposed_comm), (Kind.MEMCPY, layers.exposed_memcpy)):
        order = trace.in_order(mask & trace.of_kind(kind))
        if not len(order):
            continue
        start, end = trace.start_ns[order], trace.end_ns[order]
        reached = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))
        fresh = np.minimum(np.maximum(start, reached), end)  # where two overlap, the first has it
        rows = order.astype(np.int32)
        complete = np.clip(arrived[order], fresh, end)
        waited = covered_within(exposed, fresh, complete)
        found.append(_piece("straggler", waited, rows, rows, rank, device, trace, idle=False))
        found += _by_sort(trace, kind, rows, covered_within(exposed, complete, end), rank, device)
    return found


def _by_sort(trace: Trace, kind: Kind, rows: Ids, spent: Nanos, rank: int, device: int) -> list[Pieces]:
    if kind is Kind.COMMUNICATION:
        return [_piece("communication", spent, rows, rows, rank, device, trace, idle=False)]
    copy = trace.optional("copy")[rows]
    words = {number: trace.words[number] for number in np.unique(copy).tolist()}
    sorts = np.array([_copy_cause(words[number]) for number in copy.tolist()])
    return [
        _piece(cause, np.where(sorts == cause, spent, 0), rows, rows, rank, device, trace, idle=False)
        for cause in np.unique(sorts).tolist()
    ]


def _copy_cause(copy: str) -> str:
    if copy.endswith("pageable"):
        return "pageable_copy"
    return "pinned_copy" if copy.endswith("pinned") or copy in ("HtoD", "DtoH") else "device_copy"


def _piece(
    cause: str, ns: Nanos, blame: Ids, before: Ids, rank: int, device: int, trace: Trace, *, idle: bool = True
) -> Pieces:
    kept = np.flatnonzero(ns > 0)
    num = len(kept)
    return Pieces(
        np.full(num, CAUSES.index(cause), np.int8),
        ns[kept],
        blame[kept],
        before[kept],
        np.full(num, rank, np.int32),
        np.full(num, device, np.int32),
        trace.step[before[kept]],
        np.full(num, idle, np.bool_),
    )


def _grouped(trace: Trace, pieces: Pieces, *, by_place: bool) -> list[Cause]:
    """Seconds and counts of pieces that share their cause, and their place if asked."""
    if not len(pieces.ns):
        return []
    span = np.where(pieces.blame >= 0, pieces.blame, pieces.before)
    keys = [pieces.cause.astype(np.int64)]
    if by_place:
        keys += [column[span].astype(np.int64) for column in (trace.module, trace.source, trace.op, trace.name)]
    different, first, inverse = np.unique(np.stack(keys, axis=1), axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    idle = np.bincount(inverse, np.where(pieces.idle, pieces.ns, 0), len(different))
    exposed = np.bincount(inverse, np.where(pieces.idle, 0, pieces.ns), len(different))
    num_devices = len(np.unique(pieces.rank * 2.0**32 + pieces.device))
    longest = np.zeros(len(different), np.int64)
    np.maximum.at(longest, inverse, pieces.ns)
    counts = np.bincount(inverse, minlength=len(different))
    rows = []
    for i in range(len(different)):
        place = {}
        if by_place:
            at = int(span[first[i]])
            place = {column: trace.text(column, at) for column in ("module", "source", "op", "name")}
        rows.append(
            Cause(
                CAUSES[int(different[i][0])],
                idle_s=idle[i] / 1e9 / num_devices,
                exposed_s=exposed[i] / 1e9 / num_devices,
                count=int(counts[i]),
                longest_s=int(longest[i]) / 1e9,
                **place,
            )
        )
    return sorted(rows, key=lambda row: -row.total_s)
