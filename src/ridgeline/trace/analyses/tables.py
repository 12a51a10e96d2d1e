"""Tables of a trace by name: kernels, ops, modules, collectives, ranks, copies, streams, steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, nearest
from ridgeline.trace.analyses.table import Table, Value, sorted_rows
from ridgeline.trace.breakdown import layers_of, stream_shares, total_of
from ridgeline.trace.collectives import Calls, bus_factor, calls_of, matched
from ridgeline.trace.intervals import covered_within
from ridgeline.trace.kind import Kind
from ridgeline.trace.steps import CATEGORIES, steps
from ridgeline.trace.table import Column, Index, Trace

WORDS = ("name", "op", "module", "source", "phase", "shapes", "dtypes", "copy", "collective", "lane", "node", "bound")
NUMBERS = ("rank", "device", "stream", "step", "thread")


def table_of(trace: Trace, name: str, by: Sequence[str] = (), others: Sequence[Trace] = ()) -> Table:
    """One of :data:`TABLES`; ``by`` adds columns to what rows are grouped by, ``others`` are further ranks."""
    if name not in TABLES:
        raise InputError(f"no table {name!r}{nearest(name, TABLES)}; tables: {', '.join(TABLES)}")
    for column in by:
        if column not in (*WORDS, *NUMBERS):
            raise InputError(f"cannot group by {column!r}{nearest(column, (*WORDS, *NUMBERS))}")
    return TABLES[name](trace, tuple(by), tuple(others))


class _Groups:
    """Rows of a trace that agree in some columns, and sums over them."""

    def __init__(self, trace: Trace, rows: Index, keys: Sequence[str]) -> None:
        self.trace, self.rows, self.keys = trace, rows, tuple(keys)
        code = np.stack([_column(trace, key)[rows].astype(np.int64) for key in self.keys], axis=1)
        self.distinct, self.of = np.unique(code, axis=0, return_inverse=True)
        self.of = self.of.reshape(-1)
        self.num = len(self.distinct)
        self.count = np.bincount(self.of, minlength=self.num)

    def sum(self, values: Column) -> NDArray[np.float64]:
        return np.asarray(np.bincount(self.of, values, self.num), dtype=np.float64)

    def known_sum(self, name: str) -> NDArray[np.float64]:
        """Of an optional column: nan where no row of a group has it."""
        values = self.trace.optional(name)[self.rows].astype(np.float64)
        has = np.isfinite(values) & (values >= 0)
        return np.where(self.sum(has) > 0, self.sum(np.where(has, values, 0.0)), np.nan)

    def median(self, values: Column) -> NDArray[np.float64]:
        order = np.lexsort((values, self.of))
        first = np.concatenate(([0], np.cumsum(self.count)[:-1]))
        low, high = order[first + (self.count - 1) // 2], order[first + self.count // 2]
        return np.asarray((values[low] + values[high]) / 2, dtype=np.float64)

    def main(self, key: str, weight: Column) -> list[str]:
        """The word of a column that has most of each group's weight, and how many others there are."""
        words = _column(self.trace, key)[self.rows].astype(np.int64)
        pairs, inverse = np.unique(np.stack([self.of, words], axis=1), axis=0, return_inverse=True)
        total = np.bincount(inverse.reshape(-1), weight, len(pairs))
        kept = pairs[:, 1] > 0
        best, others = [0] * self.num, np.bincount(pairs[kept, 0], minlength=self.num)
        for i in np.flatnonzero(kept)[np.argsort(total[kept], kind="stable")].tolist():
            best[int(pairs[i, 0])] = int(pairs[i, 1])
        names = [self.trace.words[word] for word in best]
        return [f"{word} (+{num - 1})" if num > 1 else word for word, num in zip(names, others.tolist(), strict=True)]

    def labels(self, i: int) -> list[Value]:
        return [
            self.trace.words[int(code)] if key in WORDS else int(code)
            for key, code in zip(self.keys, self.distinct[i], strict=True)
        ]


def _column(trace: Trace, key: str) -> Column:
    return np.asarray(getattr(trace, key)) if hasattr(trace, key) else trace.optional(key)


def _device_table(trace: Trace, name: str, rows: Index, keys: Sequence[str], beside: Sequence[str]) -> Table:
    """Device work by some columns: time, floor, expectation, bound, and where most of it is."""
    columns = (*keys, "count", "total_ms", "median_us", "share_frac", "floor_ms", "expected_ms", "times_floor",
               *beside)  # fmt: skip
    if not len(rows):
        return Table(name, columns, ())
    groups, spent = _Groups(trace, rows, keys), trace.duration_s[rows]
    total, median = groups.sum(spent), groups.median(spent)
    floor, expected = groups.known_sum("floor_s"), groups.known_sum("expected_s")
    has_floor = np.isfinite(trace.optional("floor_s")[rows])
    priced = groups.sum(np.where(has_floor, spent, 0.0))
    mains = [groups.main(key, spent) for key in beside]
    whole = float(total.sum()) or 1.0
    made = [
        (
            *groups.labels(i), int(groups.count[i]), float(total[i]) * 1e3, float(median[i]) * 1e6,
            float(total[i]) / whole, float(floor[i]) * 1e3, float(expected[i]) * 1e3,
            float(priced[i] / floor[i]) if floor[i] > 0 else float("nan"), *(main[i] for main in mains),
        )
        for i in range(groups.num)
    ]  # fmt: skip
    known = float(spent[has_floor].sum()) / (float(spent.sum()) or 1.0)
    note = f"{known:.0%} of this device time has a floor" if has_floor.any() else "no floors: shapes or device unknown"
    return Table(name, columns, sorted_rows(made, len(keys) + 1), note)


def _kernels(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    rows = np.flatnonzero(trace.gpu & trace.of_kind(Kind.KERNEL, Kind.MEMSET, Kind.COMMUNICATION))
    keys = (*by, "name") if "name" not in by else by
    beside = [key for key in ("bound", "module", "op", "shapes") if key not in by]
    return _device_table(_with_shapes(trace, rows), "kernels", rows, keys, beside)


def _with_shapes(trace: Trace, rows: Index) -> Trace:
    """Kernels with the shapes of the op that launched them, where those were recorded."""
    if "shapes" not in trace.extra:
        return trace
    shapes = trace.extra["shapes"].copy()
    at = np.where(trace.launch[rows] >= 0, trace.launch[rows], -1)
    found = shapes[rows].copy()
    for _ in range(24):
        walking = (at >= 0) & (found == 0)
        if not walking.any():
            break
        found = np.where(walking, shapes[np.maximum(at, 0)], found)
        at = np.where(walking, trace.parent[np.maximum(at, 0)], -1)
    shapes[rows] = found
    return trace.with_columns(shapes=shapes)


def _modules(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    rows = np.flatnonzero(trace.gpu)
    return _device_table(trace, "modules", rows, (*by, "module"), ("op", "name", "source"))


def _ops(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    """Ops on the host: calls, time with and without what they call, and the device time of their launches."""
    keys = (*by, "name") if "name" not in by else by
    columns = (*keys, "count", "host_total_ms", "host_self_ms", "device_ms", "num_kernels", "device_frac", "module",
               "source")  # fmt: skip
    rows = np.flatnonzero(trace.of_kind(Kind.OP) & (trace.device < 0))
    if not len(rows):
        return Table("ops", columns, ())
    groups, spent = _Groups(trace, rows, keys), trace.duration_s[rows]
    inside = np.flatnonzero(trace.of_kind(Kind.OP) & (trace.parent >= 0))
    within = np.bincount(trace.parent[inside], trace.duration_s[inside], len(trace))
    alone = np.maximum(spent - within[rows], 0.0)
    # Device work belongs to the innermost op around its launch
    work = np.flatnonzero(trace.gpu & (trace.launch >= 0))
    op = _around(trace, trace.launch[work])
    device = np.bincount(op[op >= 0], trace.duration_s[work[op >= 0]], len(trace))[rows]
    kernels = np.bincount(op[op >= 0], minlength=len(trace))[rows]
    sums = [groups.sum(column) for column in (spent, alone, device, kernels)]
    whole = float(trace.duration_s[trace.gpu].sum()) or 1.0
    mains = [groups.main(key, spent) for key in ("module", "source")]
    made = [
        (*groups.labels(i), int(groups.count[i]), *(float(column[i]) * 1e3 for column in sums[:3]), int(sums[3][i]),
         float(sums[2][i]) / whole, *(main[i] for main in mains))
        for i in range(groups.num)
    ]  # fmt: skip
    at = len(keys) + (3 if len(work) else 1)
    return Table("ops", columns, sorted_rows(made, at), "host time of nested ops counts for each of them")


def _around(trace: Trace, calls: Column) -> NDArray[np.int64]:
    """The innermost op around each call; -1 if there is none."""
    ops, at = trace.of_kind(Kind.OP), calls.astype(np.int64)
    while True:
        walking = (at >= 0) & ~ops[np.maximum(at, 0)]
        if not walking.any():
            return at
        at = np.where(walking, trace.parent[np.maximum(at, 0)], at)


def _copies(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    """Memory copies by direction and kind of host memory: bytes, bandwidth, and what nothing else hid."""
    keys = (*by, "copy") if "copy" not in by else by
    columns = (*keys, "count", "bytes", "total_ms", "bytes_per_s", "exposed_ms", "median_us", "op", "module", "source")
    rows = np.flatnonzero(trace.gpu & trace.of_kind(Kind.MEMCPY))
    if not len(rows):
        return Table("copies", columns, ())
    groups, spent = _Groups(trace, rows, keys), trace.duration_s[rows]
    sizes, median = groups.known_sum("bytes"), groups.median(spent)
    found = np.zeros(len(trace))
    code = trace.rank.astype(np.int64) * 2**32 + trace.device
    for value in np.unique(code[rows]).tolist():
        own = rows[code[rows] == value]
        layers = layers_of(trace, trace.gpu & (code == value))
        found[own] = covered_within(layers.exposed_memcpy, trace.start_ns[own], trace.end_ns[own]) / 1e9
    exposed_s = found[rows]
    total, exposed = groups.sum(spent), groups.sum(exposed_s)
    mains = [groups.main(key, spent) for key in ("op", "module", "source")]
    made = [
        (*groups.labels(i), int(groups.count[i]), float(sizes[i]), float(total[i]) * 1e3,
         float(sizes[i] / total[i]) if total[i] > 0 else float("nan"), float(exposed[i]) * 1e3, float(median[i]) * 1e6,
         *(main[i] for main in mains))
        for i in range(groups.num)
    ]  # fmt: skip
    return Table("copies", columns, sorted_rows(made, len(keys) + 2))


def _collectives(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    """Every collective over the ranks at hand: bytes, bandwidths, skew, and in which order the ranks came."""
    columns = ("index", "sort", "group", "group_size", "num_ranks", "bytes", "start_ms", "duration_ms", "transfer_ms",
               "exposed_ms", "skew_ms", "algorithm_bytes_per_s", "bus_bytes_per_s", "last_rank",
               "arrival_order")  # fmt: skip
    known: list[Calls] = [calls for one in (trace, *others) for calls in calls_of(one)]
    operations = matched(known)
    origin = min((int(calls.start.min()) for calls in known if len(calls)), default=0)
    made: list[tuple[Value, ...]] = []
    for index, operation in enumerate(operations):
        starts = np.array([known[at].start[i] for at, i in operation])
        ends = np.array([known[at].end[i] for at, i in operation])
        order = [known[operation[i][0]].rank for i in np.argsort(starts, kind="stable").tolist()]
        at, i = operation[0]
        calls = known[at]
        num_bytes = max(int(known[a].num_bytes[b]) for a, b in operation)
        size = max(max(int(known[a].group_size[b]) for a, b in operation), len(operation))
        transfer_s = max(int(ends.max() - starts.max()), 0) / 1e9
        rate = num_bytes / transfer_s if num_bytes >= 0 and transfer_s > 0 else float("nan")
        exposed_s = float(np.mean([known[a].exposed[b] for a, b in operation])) / 1e9
        row = (
            index, calls.sort[i], calls.group[i], size, len(operation), num_bytes if num_bytes >= 0 else None,
            (int(starts.min()) - origin) / 1e6, int(ends.max() - starts.min()) / 1e6, transfer_s * 1e3,
            exposed_s * 1e3, int(starts.max() - starts.min()) / 1e6, rate, rate * bus_factor(calls.sort[i], size),
            order[-1], " ".join(map(str, order)),
        )  # fmt: skip
        made.append(row)
    note = "" if len(known) > 1 else "one rank: skew and arrival order need the traces of the others"
    return Table("collectives", columns, tuple(made), note)


def _ranks(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    columns = ("rank", "total_ms", "busy_ms", "compute_ms", "exposed_comm_ms", "exposed_memcpy_ms", "idle_ms",
               "num_gpu_events", "num_steps", "mean_step_ms")  # fmt: skip
    made: list[tuple[Value, ...]] = []
    for one in (trace, *others):
        for rank in one.ranks():
            own = one if len(one.ranks()) == 1 else one.of_rank(rank)
            total = total_of(own, own.gpu)
            marked = [step.total_s * 1e3 for step in steps(own) if step.number >= 0]
            made.append(
                (rank, total.total_ms, total.busy_ms, total.compute_ms, total.exposed_comm_ms, total.exposed_memcpy_ms,
                 total.idle_ms, total.num_gpu_events, len(marked), float(np.mean(marked)) if marked else None)
            )
    return Table("ranks", columns, tuple(sorted(made, key=lambda row: int(row[0] or 0))))


def _streams(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    columns = ("rank", "device", "stream", "count", "busy_ms", "compute_ms", "comm_ms", "copy_ms", "idle_ms",
               "busy_frac")  # fmt: skip
    made = [
        (one.rank, one.device, one.stream, one.shares.num_spans, one.shares.busy_s * 1e3, one.shares.compute_s * 1e3,
         one.shares.comm_s * 1e3, one.shares.memcpy_s * 1e3, one.shares.idle_s * 1e3,
         one.shares.busy_s / one.shares.total_s if one.shares.total_s > 0 else 0.0)
        for one in stream_shares(trace)
    ]  # fmt: skip
    return Table("streams", columns, sorted_rows(made, 4))


def _steps(trace: Trace, by: tuple[str, ...], others: tuple[Trace, ...]) -> Table:
    columns = ("rank", "step", "start_ms", "total_ms", "compute_ms", "exposed_comm_ms", "exposed_memcpy_ms", "idle_ms",
               "num_kernels", *(f"{name}_ms" for name in CATEGORIES))  # fmt: skip
    made = tuple(
        (one.rank, one.number, one.start_s * 1e3, one.total_s * 1e3, one.shares.compute_s * 1e3,
         one.shares.exposed_comm_s * 1e3, one.shares.exposed_memcpy_s * 1e3, one.shares.idle_s * 1e3, one.num_kernels,
         *(one.categories_s[name] * 1e3 for name in CATEGORIES))
        for one in steps(trace)
    )  # fmt: skip
    return Table("steps", columns, made)


TABLES: Mapping[str, Callable[[Trace, tuple[str, ...], tuple[Trace, ...]], Table]] = {
    "kernels": _kernels,
    "ops": _ops,
    "modules": _modules,
    "collectives": _collectives,
    "ranks": _ranks,
    "copies": _copies,
    "streams": _streams,
    "steps": _steps,
}
