"""A trace as one file of columns, opened by mapping it: a million spans in milliseconds, nothing unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import InputError
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import COLUMNS, LINK_COLUMNS, VOCABULARY, WORD_COLUMNS, Column, Counter, Trace

MAGIC = b"RIDGELINE-TRACE-1\n"
_ALIGN = 64


def save(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the trace; a reader sees the old file or the new one, never half of it."""
    target = Path(path)
    arrays = dict(_arrays(trace))
    head = json.dumps(
        {
            "title": trace.title,
            "words": trace.words,
            "notes": trace.notes,
            "meta": trace.meta,
            "origin_ns": trace.origin_ns,
            "counters": list(trace.counters),
            "columns": [(name, str(column.dtype), column.shape) for name, column in arrays.items()],
        }
    ).encode()
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".rl-", delete=False) as out:
            out.write(MAGIC + len(head).to_bytes(8, "little") + head)
            for column in arrays.values():
                out.write(b"\0" * (-out.tell() % _ALIGN))
                out.write(np.ascontiguousarray(column).data)
        os.replace(out.name, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def load(path: str | os.PathLike[str]) -> Trace:
    """A trace written by :func:`save`; its columns stay on disk until they are used."""
    target = Path(path)
    try:
        with target.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise InputError(f"{target} is not a saved trace of this version: read the original file again")
            length = int.from_bytes(file.read(8), "little")
            head: Any = json.loads(file.read(length)) if length < target.stat().st_size else None
        mapped = np.memmap(target, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {target}: {error}") from error
    try:
        at = len(MAGIC) + 8 + length
        found: dict[str, Column] = {}
        for name, kind, shape in head["columns"]:
            if (
                kind not in {"int8", "int32", "int64", "float64"}
                or len(shape) not in (1, 2)
                or any(not isinstance(n, int) or n < 0 for n in shape)
            ):
                raise ValueError(f"column {name!r} of type {kind}")
            at += -at % _ALIGN
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
            if at + size > len(mapped):
                raise ValueError(f"column {name!r} is cut off")
            found[name] = mapped[at : at + size].view(kind).reshape(shape)
            at += size
        own = {name: found[name] for name in COLUMNS}
        num, words = len(own["start_s"]), tuple(map(str, head["words"]))
        extra = {name[6:]: column for name, column in found.items() if name.startswith("extra ")}
        if any(len(column) != num for column in (*own.values(), *extra.values())):
            raise ValueError("columns of different lengths")
        texts = [own[name] for name in WORD_COLUMNS] + [extra[name] for name in extra if VOCABULARY[name] is str]
        for numbers, limit in [(column, len(words)) for column in texts] + [(own[name], num) for name in LINK_COLUMNS]:
            if num and (int(numbers.min()) < -1 or int(numbers.max()) >= limit):
                raise ValueError("a number points outside")
        times = own["start_s"], own["duration_s"]
        # max s
        if not all(np.isfinite(column).all() and (np.abs(column) < 2e9).all() for column in times):
            raise ValueError("a time that is none")
        if num and ((own["duration_s"] < 0).any() or int(own["kind"].min()) < 0 or int(own["kind"].max()) > max(Kind)):
            raise ValueError("a duration or kind that is none")
        if _has_circle(own["parent"]):
            raise ValueError("spans that enclose one another")
        counters = {name: Counter(found[f"at {name}"], found[f"value {name}"]) for name in head["counters"]}
        return Trace(
            str(head["title"]),
            words,
            **own,
            extra=extra,
            counters=counters,
            notes=tuple(map(str, head["notes"])),
            meta=dict(head["meta"]),
            origin_ns=int(head["origin_ns"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{target} is damaged ({error}): delete it and read the original file again") from error


def _arrays(trace: Trace) -> Iterator[tuple[str, Column]]:
    for name in COLUMNS:
        yield name, getattr(trace, name)
    for name, column in trace.extra.items():
        yield f"extra {name}", column
    for name, counter in trace.counters.items():
        yield f"at {name}", counter.at_s
        yield f"value {name}", counter.value


def _has_circle(parent: Column) -> bool:
    """Whether some span lies inside itself: twice as far up in every round, all others have reached the top."""
    above = parent
    for _ in range(len(parent).bit_length() + 1):
        if not (above >= 0).any():
            return False
        above = np.where(above >= 0, above[np.maximum(above, 0)], -1)
    return bool((above >= 0).any())
