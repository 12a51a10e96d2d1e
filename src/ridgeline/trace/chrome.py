"""Traces as Chrome JSON, which Perfetto opens: a lane a thread, modules nested, memory as a counter."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import InputError
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import VOCABULARY, Column, Index, Trace

Event = dict[str, Any]


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the trace, one event a line; the file opens at ui.perfetto.dev, and reads back as the same trace."""
    target = Path(path)
    opened = gzip.open if target.suffix == ".gz" else open
    try:
        with opened(target, "wt", encoding="utf-8") as out:
            other = {"title": trace.title, "notes": list(trace.notes), "ridgeline": _facts(trace)}
            out.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(other, default=str) + ',"traceEvents":[\n')
            for i, event in enumerate(events(trace)):
                out.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
            out.write("\n]}\n")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


Lanes = dict[tuple[int, str], tuple[int, int, Index]]


def _lanes(trace: Trace) -> Lanes:
    """(process, thread) numbers and spans, in time order, of each rank's lanes: the host's first."""
    order = np.lexsort((trace.start_s, trace.lane, trace.rank))
    change = np.flatnonzero((np.diff(trace.rank[order]) != 0) | (np.diff(trace.lane[order]) != 0)) + 1
    groups = np.split(order, change) if len(order) else []
    keys = {(int(trace.rank[rows[0]]), trace.words[trace.lane[rows[0]]]): rows for rows in groups}
    found: Lanes = {}
    for rank in sorted({rank for rank, _ in keys}):
        lanes = sorted(
            (lane for r, lane in keys if r == rank),
            key=lambda lane: (
                lane != "host",
                [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", lane) if part],
            ),
        )
        found |= {(rank, lane): (rank + 1, tid, keys[rank, lane]) for tid, lane in enumerate(lanes, start=1)}
    return found


def _facts(trace: Trace) -> dict[str, Any]:
    """What the events cannot say: which lane is which device, stream or thread, and what is known of the run."""
    lanes = []
    for (rank, lane), (pid, tid, spans) in _lanes(trace).items():
        first = int(spans[0])
        place = {column: int(getattr(trace, column)[first]) for column in ("device", "stream", "thread")}
        lanes.append({"pid": pid, "tid": tid, "lane": lane, "rank": rank, **place})
    # format
    return {
        "format": 1,
        "title": trace.title,
        "notes": list(trace.notes),
        "origin_ns": trace.origin_ns,
        "lanes": lanes,
        "meta": {key: value for key, value in trace.meta.items() if _is_plain(value)},
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, (str, int, float))


def events(trace: Trace) -> Iterator[Event]:
    """Names of the lanes, then their spans, then modules and counters."""
    lanes = _lanes(trace)
    ranks = sorted({rank for rank, _ in lanes}) or [0]
    for rank in ranks:
        own = {lane: tid for (r, lane), (_, tid, _) in lanes.items() if r == rank}
        yield _meta("process_name", rank + 1, 0, trace.title if len(ranks) == 1 else f"rank {rank}")
        for lane, tid in (*own.items(), ("modules", len(own) + 1)):
            yield _meta("thread_name", rank + 1, tid, lane)
            sort = {"sort_index": tid}
            yield {"ph": "M", "pid": rank + 1, "tid": tid, "name": "thread_sort_index", "args": sort}
    yield from _spans(trace, lanes)
    for rank in ranks:
        if (rank, "device") in lanes:
            spans = lanes[rank, "device"][2]
            yield from _modules(trace, spans, rank + 1, sum(r == rank for r, _ in lanes) + 1)
    yield from _counters(trace)


def _meta(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(name: str, pid: int, tid: int, start_ns: int, end_ns: int, args: Event, category: str = "") -> Event:
    """A complete event; Chrome's unit is the microsecond."""
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    kind = {"cat": category} if category else {}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **kind, **times, "args": args}


def _spans(trace: Trace, lanes: Lanes) -> Iterator[Event]:
    words = trace.words
    called = np.zeros(len(trace), dtype=np.bool_)
    called[trace.launch[trace.launch >= 0]] = True
    # links are written as correlations, and launch configurations are of no use to a viewer
    optional = {
        name: column
        for name, column in trace.extra.items()
        if name not in ("correlation", "external", "sequence", "grid", "block") and column.ndim == 1
    }
    for pid, tid, spans in lanes.values():
        for i in spans.tolist():
            start_s = float(trace.start_s[i])
            end_ns = _ns(start_s + float(trace.duration_s[i]))
            args: Event = {key: words[getattr(trace, key)[i]] for key in ("module", "op", "phase", "source")}
            args = {key: value for key, value in args.items() if value} | dict(_cells(trace, optional, i))
            if trace.step[i] >= 0:
                args["step"] = int(trace.step[i])
            if trace.launch[i] >= 0 or called[i]:
                args["correlation"] = int(trace.launch[i]) if trace.launch[i] >= 0 else i
            category = Kind(int(trace.kind[i])).name.lower()
            yield _slice(words[trace.name[i]], pid, tid, _ns(start_s), end_ns, args, category)


def _cells(trace: Trace, optional: Mapping[str, Column], i: int) -> Iterator[tuple[str, Any]]:
    """The optional values a span has."""
    for name, column in optional.items():
        value = column[i].item()
        if VOCABULARY[name] is str:
            if value > 0:
                yield name, trace.words[value]
        elif value == value and value != -1:
            yield name, value


def _modules(trace: Trace, spans: Index, pid: int, tid: int) -> Iterator[Event]:
    """The module hierarchy over the device's clock: a level opens with its first kernel and closes after its last."""
    opened: list[tuple[str, int]] = []
    last_ns = 0
    for i in spans.tolist():
        path = trace.words[trace.module[i]].split(".") if trace.words[trace.module[i]] else []
        start_ns = _ns(float(trace.start_s[i]))
        num = 0
        while num < len(path) and num < len(opened) and path[num] == opened[num][0]:
            num += 1
        kept = num
        yield from _closed(opened, kept, last_ns, pid, tid)
        opened += [(part, start_ns) for part in path[kept:]]
        last_ns = max(start_ns, _ns(float(trace.start_s[i]) + float(trace.duration_s[i])))
    yield from _closed(opened, 0, last_ns, pid, tid)


def _closed(opened: list[tuple[str, int]], kept: int, end_ns: int, pid: int, tid: int) -> Iterator[Event]:
    while len(opened) > kept:
        full = ".".join(part for part, _ in opened)
        name, start_ns = opened.pop()
        yield _slice(name, pid, tid, start_ns, end_ns, {"module": full})


def _counters(trace: Trace) -> Iterator[Event]:
    """Only changes are written: a counter holds until the next."""
    for name, counter in trace.counters.items():
        before = None
        for at_s, value in zip(counter.at_s.tolist(), counter.value.tolist(), strict=True):
            if value != before:
                yield {"ph": "C", "pid": 1, "name": name, "ts": _ns(at_s) / 1e3, "args": {name: value}}
            before = value
