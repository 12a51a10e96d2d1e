"""Kineto traces made small: what no analysis reads is dropped, the rest is stored by column and packed with xz."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

Event = dict[str, Any]
KEPT_ARGS = (
    "External id",
    "correlation",
    "stream",
    "device",
    "grid",
    "block",
    "registers per thread",
    "shared memory",
    "bytes",
    "memory bandwidth (GB/s)",
    "est. achieved occupancy %",
    "Sequence number",
    "Fwd thread id",
    "Input Dims",
    "Input type",
    "Input Strides",
    "Concrete Inputs",
    "Python id",
    "Python parent id",
    "Python module id",
    "context",
    "cuda_sync_kind",
    "name",
    "labels",
    "sort_index",
    "kernel_file",
    "kernel_backend",
)
KEPT_FRAMES = (
    *("cases.py(", "nets.py(", "dataloader.py(", "optimizer.py(", "eval_frame.py(", "checkpoint.py("),
    *("nn.Module: ", "torch_dynamo_resume", "synchronize", "empty_cache", "print", "fsync", "collect"),
    *(f"<built-in method {name} of" for name in ("item", "cpu", "to", "tolist", "numpy", "flush", "write")),
)
FORM = "ridgeline columns 1"
TIMES = ("ts", "dur")
SERIALS = (
    "args.External id",
    "args.correlation",
    "args.Sequence number",
    "id",
    "args.Python id",
    "args.Python parent id",
)


def shrink(source: Path, target: Path, facts: dict[str, Any]) -> int:
    """Write the reduced trace; the number of bytes written."""
    with source.open(encoding="utf-8") as file:
        trace = json.load(file)
    events = [_small(e) for e in trace["traceEvents"] if _wanted(e)]
    head = {k: v for k, v in trace.items() if k not in ("traceEvents", "traceName", "distributedInfo")}
    packed = columns(events) | {"head": head | {"ridgeline": facts}}
    target.write_bytes(lzma.compress(json.dumps(packed, separators=(",", ":")).encode(), preset=6))
    return target.stat().st_size


def restore(packed: bytes) -> dict[str, Any]:
    """The Kineto document again, from the bytes of a shrunken file."""
    found = json.loads(lzma.decompress(packed))
    if found.get("form") != FORM:
        raise ValueError(f"not a trace stored by column: form is {found.get('form')!r}, wanted {FORM!r}")
    return found["head"] | {"traceEvents": events_of(found)}


def _wanted(event: Event) -> bool:
    kind, category = event.get("ph"), event.get("cat", "")
    if kind == "M":
        return True
    if kind in ("s", "f"):
        return str(category) == "fwdbwd"
    if kind != "X":
        return False
    return category != "python_function" or any(part in str(event["name"]) for part in KEPT_FRAMES)


def _small(event: Event) -> Event:
    small = {k: v for k, v in event.items() if k in ("ph", "cat", "name", "pid", "tid", "id", "bp", "ts", "dur")}
    if event["ph"] == "M":
        small.pop("ts", None)
    small |= {f"args.{k}": v for k, v in event.get("args", {}).items() if k in KEPT_ARGS}
    if str(small.get("cat", "")) == "python_function" and "/" in small["name"]:
        small["name"] = _relative(small["name"])
    return small


def _relative(frame: str) -> str:
    """Frames name files from the repository or the package on, not from the machine's root."""
    for root in ("site-packages/", "dist-packages/"):
        if root in frame:
            return frame.split(root, 1)[1]
    return frame


def columns(events: list[Event]) -> dict[str, Any]:
    """Events by kind (the fields they have), each field a column; clocks in whole ns, differences, words by number."""
    kinds: dict[tuple[str, ...], list[Event]] = {}
    order = sorted(events, key=lambda e: (e.get("ph") != "M", e.get("ts", 0)))
    for event in order:
        kinds.setdefault((event["ph"], str(event.get("cat")), *sorted(event)), []).append(event)
    words: dict[str, int] = {}
    tables = [{field: _column(field, rows, words) for field in sorted(rows[0])} for rows in kinds.values()]
    return {"form": FORM, "words": list(words), "tables": tables}


def _column(field: str, rows: list[Event], words: dict[str, int]) -> list[Any]:
    if field in TIMES:
        return (
            _differences([round(row[field] * 1000) for row in rows])
            if field == "ts"
            else [round(row[field] * 1000) for row in rows]
        )
    if field in SERIALS and all(isinstance(row[field], int) for row in rows):
        return ["d", *_differences([row[field] for row in rows])]
    return ["w", *(words.setdefault(json.dumps(row[field], separators=(",", ":")), len(words)) for row in rows)]


def _differences(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _sums(values: list[int]) -> list[int]:
    total, out = 0, []
    for value in values:
        out.append(total := total + value)
    return out


def events_of(packed: dict[str, Any]) -> list[Event]:
    words = [json.loads(word) for word in packed["words"]]
    found = []
    for table in packed["tables"]:
        values = {field: _values(field, column, words) for field, column in table.items()}
        for row in zip(*values.values(), strict=True):
            found.append(_nested(dict(zip(values, row, strict=True))))
    return sorted(found, key=lambda e: (e["ph"] != "M", e.get("ts", 0)))


def _values(field: str, column: list[Any], words: list[Any]) -> list[Any]:
    if field in TIMES:
        return [ns / 1000 for ns in (_sums(column) if field == "ts" else column)]
    return _sums(column[1:]) if column[0] == "d" else [words[i] for i in column[1:]]


def _nested(flat: Event) -> Event:
    event = {k: v for k, v in flat.items() if not k.startswith("args.")}
    args = {k[5:]: v for k, v in flat.items() if k.startswith("args.")}
    return event | ({"args": args} if args else {})
