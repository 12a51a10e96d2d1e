"""Traces as Chrome JSON, which Perfetto opens: a lane a thread, modules nested, memory as a counter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.trace.table import Trace

Event = dict[str, Any]
PID = 1
MODULES = "modules"


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the trace, one event a line; the file opens at ui.perfetto.dev."""
    target = Path(path)
    try:
        with target.open("w", encoding="utf-8") as out:
            out.write(
                '{"displayTimeUnit":"ms","otherData":'
                + json.dumps({"title": trace.title, "notes": list(trace.notes)})
                + ',"traceEvents":[\n'
            )
            for i, event in enumerate(events(trace)):
                out.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
            out.write("\n]}\n")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def events(trace: Trace) -> Iterator[Event]:
    """Names of the lanes, then their spans, then modules and counters."""
    lanes = trace.lanes()
    threads = {lane: tid for tid, lane in enumerate(sorted(lanes, key=lambda lane: (lane != "host", lane)), start=1)}
    yield _meta("process_name", 0, trace.title)
    for lane, tid in (*threads.items(), (MODULES, len(threads) + 1)):
        yield _meta("thread_name", tid, lane)
        yield {"ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    for lane, tid in threads.items():
        yield from _spans(trace, lane, tid)
    if "device" in threads:
        yield from _modules(trace, len(threads) + 1)
    yield from _counters(trace)


def _meta(what: str, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": PID, "tid": tid, "name": what, "args": {"name": name}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(name: str, tid: int, start_ns: int, end_ns: int, **args: str) -> Event:
    """A complete event; Chrome's unit is the microsecond."""
    return {
        "ph": "X",
        "pid": PID,
        "tid": tid,
        "name": name,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {key: value for key, value in args.items() if value},
    }


def _spans(trace: Trace, lane: str, tid: int) -> Iterator[Event]:
    words = trace.words
    for i in trace.on(lane):
        start_s = float(trace.start_s[i])
        yield _slice(
            words[trace.name[i]],
            tid,
            _ns(start_s),
            _ns(start_s + float(trace.duration_s[i])),
            module=words[trace.module[i]],
            op=words[trace.op[i]],
            phase=words[trace.phase[i]],
        )


def _modules(trace: Trace, tid: int) -> Iterator[Event]:
    """The module hierarchy over the device's clock: a level opens with its first kernel and closes after its last."""
    opened: list[tuple[str, int]] = []
    last_ns = 0
    for i in trace.on("device"):
        path = trace.words[trace.module[i]].split(".") if trace.words[trace.module[i]] else []
        start_ns = _ns(float(trace.start_s[i]))
        kept = _common(path, opened)
        yield from _closed(opened, kept, last_ns, tid)
        opened += [(part, start_ns) for part in path[kept:]]
        last_ns = max(start_ns, _ns(float(trace.start_s[i]) + float(trace.duration_s[i])))
    yield from _closed(opened, 0, last_ns, tid)


def _common(path: list[str], opened: list[tuple[str, int]]) -> int:
    num = 0
    while num < len(path) and num < len(opened) and path[num] == opened[num][0]:
        num += 1
    return num


def _closed(opened: list[tuple[str, int]], kept: int, end_ns: int, tid: int) -> Iterator[Event]:
    while len(opened) > kept:
        full = ".".join(part for part, _ in opened)
        name, start_ns = opened.pop()
        yield _slice(name, tid, start_ns, end_ns, module=full)


def _counters(trace: Trace) -> Iterator[Event]:
    """Only changes are written: a counter holds until the next."""
    for name, counter in trace.counters.items():
        before = None
        for at_s, value in zip(counter.at_s.tolist(), counter.value.tolist(), strict=True):
            if value != before:
                yield {"ph": "C", "pid": PID, "name": name, "ts": _ns(at_s) / 1e3, "args": {name: value}}
            before = value
