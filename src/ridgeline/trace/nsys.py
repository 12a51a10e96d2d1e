"""SQLite exports of Nsight Systems into the span table, of any version: what a table lacks is absent, not zero."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError
from ridgeline.trace.columns import MAX_NS, Ints, Words, ints
from ridgeline.trace.dialect import kind_of
from ridgeline.trace.kind import Kind
from ridgeline.trace.link import Rows, link
from ridgeline.trace.table import Column, Trace, from_columns

_MAX_ROWS = 50_000_000
_OP = re.compile(r"^(?:aten|c10d|c10|prims|torch\w*|nvfuser|quantized|fbgemm|flash_attn|xformers|vllm)::")
_SUFFIX = re.compile(r",\s*(?:seq|op_id|sizes|seq_ids|input_op_ids)\s*=.*$", re.DOTALL)
_COPY_WORDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
}  # fmt: skip
_MEMORY_WORDS = {0: "pageable", 1: "pinned"}
#: Synchronization types of CUPTI.
_SYNC_WORDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}


@dataclass(slots=True)
class _Export:
    """An open export: its tables, their columns, and its strings."""

    connection: sqlite3.Connection
    columns: dict[str, dict[str, str]]  # table → lower-case name → name
    strings: dict[int, str] = field(default_factory=dict)

    def rows(self, table: str, wanted: Mapping[str, int | str | None]) -> dict[str, list[Any]] | None:
        """Columns of a table, each with a value for where it is missing; None if there is no such table."""
        known = self.columns.get(table.lower())
        if known is None:
            return None
        terms = [f'"{known[name.lower()]}"' if name.lower() in known else "NULL" for name in wanted]
        found = self.connection.execute(f'SELECT {", ".join(terms)} FROM "{table}" LIMIT {_MAX_ROWS}').fetchall()
        by_column = list(zip(*found, strict=True)) if found else [()] * len(terms)
        return {
            name: [otherwise if value is None else value for value in values]
            for (name, otherwise), values in zip(wanted.items(), by_column, strict=True)
        }

    def named(self, numbers: list[Any]) -> list[str]:
        """Strings by their numbers; old exports have the text itself."""
        return [number if isinstance(number, str) else self.strings.get(number, "") for number in numbers]


@dataclass(slots=True)
class _Gathered:
    words: Words = field(default_factory=Words)
    columns: dict[str, list[Column]] = field(default_factory=dict)
    num_rows: int = 0

    def add(self, num: int, **columns: Any) -> None:
        """Rows of one sort; columns not given are filled with -1 (words with 0)."""
        for name in _COLUMNS:
            values = columns.get(name)
            column = np.full(num, _COLUMNS[name], dtype=np.int64) if values is None else ints(values, _COLUMNS[name])
            self.columns.setdefault(name, []).append(column)
        self.num_rows += num

    def column(self, name: str) -> Ints:
        return np.concatenate(self.columns[name]) if self.columns.get(name) else np.zeros(0, dtype=np.int64)


_COLUMNS = {
    "name": 0, "start": 0, "end": 0, "kind": 0, "thread": -1, "device": -1, "stream": -1, "correlation": -1, "pid": -1,
    "bytes": -1, "copy": 0, "graph_node": -1, "registers": -1, "shared_bytes": -1, "wait_event": -1,
    "gridX": -1, "gridY": -1, "gridZ": -1, "blockX": -1, "blockY": -1, "blockZ": -1, "sequence": -1, "shapes": 0,
}  # fmt: skip


def read_nsys(path: Path) -> Trace:
    """An export of ``nsys export --type sqlite`` with kernels, copies, API calls and NVTX ranges linked."""
    try:
        with closing(_open(path)) as connection:
            # Plain tables and their columns; views and virtual tables are not looked at
            found = {}
            tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
            for name, sql in tables:
                if '"' in name or str(sql or "").lstrip().upper().startswith("CREATE VIRTUAL"):
                    continue
                columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')]
                found[name.lower()] = {column.lower(): column for column in columns if '"' not in column}
            export = _Export(connection, found)
            if not any(table.startswith(("cupti_activity", "nvtx_events", "stringids")) for table in export.columns):
                known = ", ".join(sorted(export.columns)[:6]) or "nothing"
                raise InputError(f"{path} is a database, but not an export of Nsight Systems; it holds {known}")
            strings = export.rows("StringIds", {"id": -1, "value": ""}) or {"id": [], "value": []}
            export.strings = dict(zip(strings["id"], map(str, strings["value"]), strict=True))
            gathered = _Gathered()
            _kernels(export, gathered)
            _copies(export, gathered)
            _memsets(export, gathered)
            _calls(export, gathered)
            _ranges(export, gathered)
            wanted = {
                "start": 0,
                "end": 0,
                "deviceId": 0,
                "streamId": 0,
                "correlationId": -1,
                "globalPid": -1,
                "syncType": 0,
                "eventId": -1,
            }
            rows = export.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", wanted)
            if rows and rows["start"]:
                names = [_SYNC_WORDS.get(kind, "Sync") for kind in rows["syncType"]]
                gathered.add(
                    len(names),
                    **_placed(rows),
                    name=gathered.words.ids(names).tolist(),
                    kind=[int(Kind.SYNC)] * len(names),
                    wait_event=rows["eventId"],
                )
            return _built(path, export, gathered)
    except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as an export of Nsight Systems ({error}): export it again with "
            "nsys export --type sqlite"
        ) from error


def _open(path: Path) -> sqlite3.Connection:
    """Read-only, with a deadline: a file from elsewhere decides nothing."""
    from urllib.parse import quote

    quoted = quote(str(path.resolve()))
    connection = sqlite3.connect(f"file:{quoted}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    deadline = time.monotonic() + 300.0  # max seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), 100_000)
    return connection


def _kernels(export: _Export, gathered: _Gathered) -> None:
    wanted = {"start": 0, "end": 0, "deviceId": 0, "streamId": 0, "correlationId": -1, "globalPid": -1,
              "demangledName": -1, "shortName": -1, "gridX": -1, "gridY": -1, "gridZ": -1, "blockX": -1, "blockY": -1,
              "blockZ": -1, "registersPerThread": -1, "staticSharedMemory": 0, "dynamicSharedMemory": 0,
              "graphNodeId": -1}  # fmt: skip
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"):
        rows = export.rows(table, wanted)
        if not rows or not rows["start"]:
            continue
        names = export.named(rows["demangledName"])
        short = export.named(rows["shortName"])
        names = [long or brief for long, brief in zip(names, short, strict=True)]
        shared = ints(rows["staticSharedMemory"], 0) + ints(rows["dynamicSharedMemory"], 0)
        gathered.add(
            len(names),
            **_placed(rows),
            name=gathered.words.ids(names).tolist(),
            kind=_kinds(names),
            registers=rows["registersPerThread"],
            shared_bytes=shared.tolist(),
            graph_node=rows["graphNodeId"],
            **{size: rows[size] for size in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")},
        )


def _kinds(names: list[str]) -> list[int]:
    known = {name: int(kind_of("kernel", name, on_device=True)) for name in set(names)}
    return [known[name] for name in names]


def _placed(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Times, place and link of device rows."""
    return {
        "start": rows["start"],
        "end": rows["end"],
        "device": rows["deviceId"],
        "stream": rows["streamId"],
        "correlation": rows["correlationId"],
        "pid": [_pid(number) for number in rows["globalPid"]],
    }


def _pid(number: Any) -> int:
    """The process in a serialized id: 24 bits above the thread's 24."""
    return (number >> 24) & 0xFFFFFF if isinstance(number, int) and number >= 0 else -1


def _copies(export: _Export, gathered: _Gathered) -> None:
    wanted = {"start": 0, "end": 0, "deviceId": 0, "streamId": 0, "correlationId": -1, "globalPid": -1, "bytes": -1,
              "copyKind": 0, "srcKind": -1, "dstKind": -1, "graphNodeId": -1}  # fmt: skip
    for table in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMCPY2"):
        rows = export.rows(table, wanted)
        if not rows or not rows["start"]:
            continue
        kinds = [_copy(*row) for row in zip(rows["copyKind"], rows["srcKind"], rows["dstKind"], strict=True)]
        gathered.add(
            len(kinds),
            **_placed(rows),
            name=gathered.words.ids([f"Memcpy {kind}".strip() for kind in kinds]).tolist(),
            kind=[int(Kind.MEMCPY)] * len(kinds),
            copy=gathered.words.ids(kinds).tolist(),
            bytes=rows["bytes"],
            graph_node=rows["graphNodeId"],
        )


def _copy(kind: Any, source: Any, target: Any) -> str:
    """Direction, and the host's memory: that of the source when it is the host, else the target's."""
    direction = _COPY_WORDS.get(kind, "")
    host = source if direction.startswith("H") else target if direction.endswith("H") else -1
    return f"{direction} {_MEMORY_WORDS.get(host, '')}".strip()


def _memsets(export: _Export, gathered: _Gathered) -> None:
    wanted = {"start": 0, "end": 0, "deviceId": 0, "streamId": 0, "correlationId": -1, "globalPid": -1, "bytes": -1,
              "graphNodeId": -1}  # fmt: skip
    rows = export.rows("CUPTI_ACTIVITY_KIND_MEMSET", wanted)
    if rows and rows["start"]:
        num = len(rows["start"])
        gathered.add(
            num,
            **_placed(rows),
            name=[gathered.words["Memset"]] * num,
            kind=[int(Kind.MEMSET)] * num,
            bytes=rows["bytes"],
            graph_node=rows["graphNodeId"],
        )


_VERSION = re.compile(r"_v\d+(?:_ptsz|_ptds)?$|_ptsz$|_ptds$")


def _calls(export: _Export, gathered: _Gathered) -> None:
    wanted = {"start": 0, "end": 0, "globalTid": -1, "correlationId": -1, "nameId": -1}
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
        rows = export.rows(table, wanted)
        if rows and rows["start"]:
            names = [_VERSION.sub("", name) for name in export.named(rows["nameId"])]
            gathered.add(
                len(names),
                **_threaded(rows),
                name=gathered.words.ids(names).tolist(),
                kind=[int(Kind.RUNTIME)] * len(names),
                correlation=rows["correlationId"],
            )


def _threaded(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        "start": rows["start"],
        "end": rows["end"],
        "thread": [number if isinstance(number, int) and number >= 0 else 0 for number in rows["globalTid"]],
        "pid": [_pid(number) for number in rows["globalTid"]],
    }


def _ranges(export: _Export, gathered: _Gathered) -> None:
    """NVTX ranges; those that PyTorch emits for ops are ops, with their shapes and sequence numbers."""
    wanted = {"start": 0, "end": None, "globalTid": -1, "eventType": 59, "text": None, "textId": -1}
    rows = export.rows("NVTX_EVENTS", wanted)
    if not rows:
        return
    # push-pop and start-end ranges, and those of other languages
    kept = [i for i, end in enumerate(rows["end"]) if end is not None and rows["eventType"][i] in (59, 60, 70, 71)]
    if not kept:
        return
    rows = {name: [values[i] for i in kept] for name, values in rows.items()}
    texts = [text or named for text, named in zip(rows["text"], export.named(rows["textId"]), strict=True)]
    names = [_SUFFIX.sub("", text) for text in texts]
    kinds = {name: int(Kind.OP if _OP.match(name) else kind_of("nvtx", name, on_device=False)) for name in set(names)}
    gathered.add(
        len(names),
        **_threaded(rows),
        name=gathered.words.ids(names).tolist(),
        kind=[kinds[name] for name in names],
        sequence=[_sequence(text) for text in texts],
        shapes=gathered.words.ids([_shapes(text) for text in texts]).tolist(),
    )


_SEQUENCE = re.compile(r"\bseq\s*=\s*(\d+)")
_SIZES = re.compile(r"\bsizes\s*=\s*(\[.*\])")


def _sequence(text: str) -> int:
    found = _SEQUENCE.search(text)
    return int(found.group(1)) if found else -1


def _shapes(text: str) -> str:
    found = _SIZES.search(text)
    return found.group(1) if found else ""


def _built(path: Path, export: _Export, gathered: _Gathered) -> Trace:
    # Threads numbered from 0, with their names
    raw = gathered.column("thread")
    names = export.rows("ThreadNames", {"globalTid": -1, "nameId": -1}) or {"globalTid": [], "nameId": []}
    known = dict(zip(names["globalTid"], export.named(names["nameId"]), strict=True))
    found = np.unique(raw[raw >= 0])
    number = np.where(raw >= 0, np.searchsorted(found, raw), -1).astype(np.int32)
    threads = [
        {"pid": str(_pid(t)), "tid": str(t & 0xFFFFFF), "name": known.get(t) or f"thread {t & 0xFFFFFF}"}
        for t in found.tolist()
    ]
    thread, threads = number, threads
    start, end = (np.clip(gathered.column(name), -MAX_NS, MAX_NS) for name in ("start", "end"))
    absent, zeros = np.full(gathered.num_rows, -1, np.int64), np.zeros(gathered.num_rows, dtype=np.int32)
    rows = Rows(
        words=gathered.words,
        start=start,
        end=np.maximum(start, end),
        kind=gathered.column("kind").astype(np.int8),
        name=gathered.column("name").astype(np.int32),
        thread=thread,
        device=_narrow(gathered.column("device")),
        stream=_narrow(gathered.column("stream")),
        correlation=_unique_correlation(gathered),
        external=absent,
        sequence=gathered.column("sequence"),
        forward_thread=absent,
        module=zeros.copy(),
        op=zeros.copy(),
        phase=zeros.copy(),
        source=zeros.copy(),
        step=absent.astype(np.int32),
        launch=absent.astype(np.int32),
        clock_ns=1,
    )
    stacks = link(rows)
    lane = np.zeros(len(rows.start), dtype=np.int32)
    labels = [f"{t['name']} ({t['tid']})" if not t["name"].endswith(t["tid"]) else t["name"] for t in threads]
    on_host = rows.thread >= 0
    lane[on_host] = np.array([rows.words[label] for label in labels] or [0], dtype=np.int32)[rows.thread[on_host]]
    for device, stream in _pairs(rows):
        chosen = (rows.device == device) & (rows.stream == stream) & ~on_host
        lane[chosen] = rows.words[f"GPU {device} stream {stream}"]
    origin = int(start.min()) if len(start) else 0
    began = export.rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 0, "systemClockNs": 0})
    offset = began["utcEpochNs"][0] - began["systemClockNs"][0] if began and began["utcEpochNs"] else 0
    return from_columns(
        path.name,
        rows.words.frozen(),
        name=rows.name,
        start_s=(rows.start - origin) / 1e9,
        duration_s=(rows.end - rows.start) / 1e9,
        lane=lane,
        module=rows.module,
        op=rows.op,
        phase=rows.phase,
        source=rows.source,
        kind=rows.kind,
        device=rows.device,
        stream=rows.stream,
        thread=rows.thread,
        launch=rows.launch,
        parent=stacks.parent,
        step=rows.step,
        extra=_extra(gathered),
        meta=_meta(path, export, threads),
        origin_ns=origin + (offset if isinstance(offset, int) and abs(offset + origin) < MAX_NS else 0),
    )


def _narrow(column: Ints) -> NDArray[np.int32]:
    return np.clip(column, -1, 2**31 - 1).astype(np.int32)


def _unique_correlation(gathered: _Gathered) -> Ints:
    """Correlations are a process's own: two processes use the same numbers."""
    correlation, pid = gathered.column("correlation"), gathered.column("pid")
    if len(np.unique(pid[correlation >= 0])) <= 1:
        return correlation
    return np.where(correlation >= 0, correlation + (np.maximum(pid, 0) << 32), -1)


def _pairs(rows: Rows) -> Iterator[tuple[int, int]]:
    on_device = rows.thread < 0
    code = rows.device[on_device].astype(np.int64) * 2**32 + rows.stream[on_device]
    for value in np.unique(code).tolist():
        yield value >> 32, value & (2**32 - 1)


def _extra(gathered: _Gathered) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name in ("bytes", "graph_node", "correlation", "sequence", "wait_event"):
        column = gathered.column(name)
        if (column >= 0).any():
            found[name] = column
    for name in ("registers", "shared_bytes"):
        found[name] = _narrow(gathered.column(name))
    for name in ("copy", "shapes"):
        found[name] = gathered.column(name).astype(np.int32)
    for size in ("grid", "block"):
        found[size] = np.stack([_narrow(gathered.column(size + axis)) for axis in "XYZ"], axis=1)
    return found


def _meta(path: Path, export: _Export, threads: list[dict[str, Any]]) -> dict[str, Any]:
    versions = export.rows("META_DATA_EXPORT", {"name": "", "value": ""}) or {"name": [], "value": []}
    known = dict(zip(versions["name"], versions["value"], strict=True))
    return {
        "format": "nsys",
        "source_file": path.name,
        "clock_ns": 1,
        "threads": threads,
        "truncated": "",
        "num_lost": 0,
        "recorded": {
            "nvtx": "nvtx_events" in export.columns,
            "runtime": "cupti_activity_kind_runtime" in export.columns,
        },
        "versions": {key: known[key] for key in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION") if key in known},
        "devices": list(_devices(export)),
    }


def _devices(export: _Export) -> Iterator[dict[str, Any]]:
    numbers = ("totalMemory", "computeMajor", "computeMinor", "smMajor", "smMinor", "smCount", "memoryBandwidth")
    wanted: dict[str, int | str | None] = {"id": 0, "name": "", **dict.fromkeys(numbers, -1)}
    for table in ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU"):
        rows = export.rows(table, wanted)
        for row in zip(*rows.values(), strict=True) if rows else ():
            facts = dict(zip(wanted, row, strict=True))
            known = {key: value for key, value in facts.items() if value not in (-1, "")}
            for new, old in (("computeMajor", "smMajor"), ("computeMinor", "smMinor"), ("numSms", "smCount")):
                if old in known:
                    known.setdefault(new, known[old])
            yield known
        if rows and rows["id"]:
            return
