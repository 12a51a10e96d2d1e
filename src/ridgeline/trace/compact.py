"""Trace events stored by column: a quarter of the size of packed JSON, and the same events when read back."""

from __future__ import annotations

import json
import lzma
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.trace.kineto import read_kineto
from ridgeline.trace.table import Trace

Event = dict[str, Any]
FORM = "ridgeline columns 1"
MAGIC = b"\xfd7zXZ\x00"
_TIMES = ("ts", "dur")
MAX_BYTES = 1 << 29
"""Of a trace unpacked: recordings of a few steps have a hundredth of it."""
_SERIALS = ("id", *(f"args.{name}" for name in ("External id", "correlation", "Sequence number", "Python id")))


def packed(head: dict[str, Any], events: list[Event]) -> bytes:
    """A Chrome trace's head and events as columns, xz around them; times keep their nanoseconds."""
    document = {
        "form": FORM,
        "head": head,
        **_columns(
            [
                (
                    {k: v for k, v in event.items() if k != "args"}
                    | {f"args.{k}": v for k, v in event.get("args", {}).items()}
                )
                for event in events
            ]
        ),
    }
    return lzma.compress(json.dumps(document, separators=(",", ":")).encode(), preset=6)


def unpacked(data: bytes, where: str) -> dict[str, Any]:
    """The Chrome trace again: its head and ``traceEvents``, metadata first, then by time."""
    try:
        document = json.loads(_decompressed(data, where))
    except (lzma.LZMAError, ValueError, EOFError) as error:
        raise InputError(f"{where} is no trace stored by column: {error}") from None
    if not isinstance(document, dict) or document.get("form") != FORM:
        raise InputError(f"{where} is no trace stored by column: it does not say {FORM!r}")
    try:
        words = [json.loads(word) for word in document["words"]]
        found = []
        for table in document["tables"]:
            found += _nested({field: _values(field, column, words) for field, column in table.items()})
        return {**document["head"], "traceEvents": sorted(found, key=_order)}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise InputError(f"{where} is damaged: its columns do not fit together ({error!r}); copy it again") from None


def _decompressed(data: bytes, where: str) -> bytes:
    """What is inside, if it is not more than a trace can be."""
    reader = lzma.LZMADecompressor()
    found = reader.decompress(data, MAX_BYTES)
    if not reader.eof and not reader.needs_input:
        raise InputError(f"{where} holds more than {MAX_BYTES >> 20} MiB: record fewer steps")
    if not reader.eof:
        raise InputError(f"{where} is incomplete: its end is missing; copy it again")
    return found


def read_compact(path: Path, *, rank: int | None = None) -> Trace:
    """A trace stored by column, through the reader that its events came for."""
    document = unpacked(path.read_bytes(), str(path))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"{path.stem}.json"
        copy.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        trace = read_kineto(copy, rank=rank)
    return replace(trace, title=path.name, meta={**trace.meta, "source_file": path.name})


def _columns(events: list[Event]) -> dict[str, Any]:
    """A table for each kind of event (by the fields it has); times in whole ns, serials as differences, words once."""
    kinds: dict[tuple[str, ...], list[Event]] = {}
    for event in sorted(events, key=_order):
        kinds.setdefault((event["ph"], str(event.get("cat")), *sorted(event)), []).append(event)
    words: dict[str, int] = {}
    tables = [{field: _column(field, rows, words) for field in sorted(rows[0])} for rows in kinds.values()]
    return {"words": list(words), "tables": tables}


def _order(event: Event) -> tuple[bool, float]:
    return event["ph"] != "M", event.get("ts", 0)


def _column(field: str, rows: list[Event], words: dict[str, int]) -> list[Any]:
    if field in _TIMES:
        whole = [round(row[field] * 1000) for row in rows]
        return _differences(whole) if field == "ts" else whole
    if field in _SERIALS and all(type(row[field]) is int for row in rows):
        return ["d", *_differences([row[field] for row in rows])]
    return ["w", *(words.setdefault(json.dumps(row[field], separators=(",", ":")), len(words)) for row in rows)]


def _differences(values: list[int]) -> list[int]:
    return [after - before for before, after in zip([0, *values], values, strict=False)]


def _sums(values: list[int]) -> list[int]:
    total, found = 0, []
    for value in values:
        total += value
        found.append(total)
    return found


def _values(field: str, column: list[Any], words: list[Any]) -> list[Any]:
    if field in _TIMES:
        return [ns / 1000 for ns in (_sums(column) if field == "ts" else column)]
    return list(_sums(column[1:])) if column[0] == "d" else [words[number] for number in column[1:]]


def _nested(columns: dict[str, list[Any]]) -> list[Event]:
    """A row for each event, its arguments one level down."""
    outer = {field: values for field, values in columns.items() if not field.startswith("args.")}
    inner = {field[5:]: values for field, values in columns.items() if field.startswith("args.")}
    events = [dict(zip(outer, row, strict=True)) for row in zip(*outer.values(), strict=True)]
    if inner:
        for event, row in zip(events, zip(*inner.values(), strict=True), strict=True):
            event["args"] = dict(zip(inner, row, strict=True))
    return events
