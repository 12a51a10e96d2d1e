"""The events of a Chrome trace file in batches: cut between events, so that damage costs only what it touches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.trace.blocks import Blocks
from ridgeline.trace.columns import instants_ns
from ridgeline.trace.decode import Decode, DecodeError, decoder

_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*")')
_CLOSING = re.compile(rb"\}\s*,?\s*(?=\]\s*(?:,\s*\"|\}?\s*$))")
_COUNTER = re.compile(rb'"ph"\s*:\s*"C"')
_DECIMALS = re.compile(rb'"ts"\s*:\s*(\d{13,})\.\d')
_MAX_CARRY_BYTES = 256 << 20
#: From 2^43 µs on, a float no longer holds nanoseconds: the text is read instead.
_FLOAT_LIMIT_US = 2**43
_LIMIT_DIGITS = len(str(_FLOAT_LIMIT_US))


@dataclass(slots=True)
class Document:
    """What surrounds the events, and what was lost of them."""

    head: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # (ns, value)
    exact: bool = False  # ``ts`` comes as text
    num_lost: int = 0
    linked: bool = False  # launches carry correlations: flows need not be read any more
    closed: bool = False  # the end of the list was seen
    note: str = ""  # what of the file is not read
    truncated: str = ""  # why the file ends early, if it does

    @property
    def own(self) -> dict[str, Any] | None:
        """What our own writer says of the file; None for anyone else's."""
        other = self.head.get("otherData")
        found = other.get("ridgeline") if isinstance(other, dict) else None
        return found if isinstance(found, dict) else None

    def lose(self, count: int = 1) -> None:
        self.num_lost += count


def event_batches(path: Path, blocks: Blocks, document: Document, *, fast: bool = True) -> Iterator[list[Any]]:
    """Lists of events, in the file's order; fills ``document`` on the way."""
    stream = iter(blocks)
    buffer = _opened(path, stream, document)
    document.exact = _needs_text(buffer)
    own = document.own is not None
    decode = decoder(exact=document.exact, fast=fast, own=own)
    pieces, held, flows = [buffer], len(buffer), True
    for block in stream:
        cut = _last_boundary(block)
        if cut:
            yield from _batch(b"".join((b"[", *pieces, memoryview(block)[: cut[0]], b"]")), decode, document)
            if document.linked and flows:
                decode, flows = decoder(exact=document.exact, fast=fast, own=own, flows=False), False
            pieces = [block[cut[1] :]]
            held = len(pieces[0])
        else:
            pieces.append(block)
            held += len(block)
            if held > _MAX_CARRY_BYTES:
                raise InputError(f"{path}: no end of an event within {_MAX_CARRY_BYTES >> 20} MiB: this is not a trace")
    document.truncated, document.note = blocks.broken, blocks.note
    yield from _last(b"".join(pieces), decode, document)


def _opened(path: Path, stream: Iterator[bytes], document: Document) -> bytes:
    """Reads up to the first event; what comes before it becomes the document's head."""
    buffer = b""
    for block in stream:
        buffer += block
        start = buffer[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(b"["):
            return buffer[buffer.index(b"[") + 1 :]
        found = _OPENING.search(buffer)
        if found:
            document.head = _head(buffer[: found.start()] + b'"traceEvents":[]}', document)
            return buffer[found.end() :]
        # max head bytes
        if len(buffer) > 64 << 20:
            break
    raise InputError(f"{path}: no list of trace events in it{_hint(buffer)}")


def _head(text: bytes, document: Document) -> dict[str, Any]:
    try:
        found = json.JSONDecoder(strict=False).decode(text.decode("utf-8", "replace").lstrip("\ufeff"))
    except (ValueError, RecursionError):
        document.lose()
        return {}
    return {key: value for key, value in found.items() if key != "traceEvents"} if isinstance(found, dict) else {}


def _hint(buffer: bytes) -> str:
    if not buffer.strip():
        return ": the file is empty"
    if buffer.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ": it is UTF-16 text; a trace is UTF-8 (iconv -f UTF-16 -t UTF-8)"
    try:
        found = json.loads(buffer)
    except (ValueError, RecursionError):
        return '; a Chrome trace is JSON with a list "traceEvents", or a list of events'
    keys = ", ".join(sorted(map(str, found))[:8]) if isinstance(found, dict) else type(found).__name__
    return f"; it holds {keys or 'nothing'}"


def _needs_text(buffer: bytes) -> bool:
    found = _DECIMALS.search(buffer, 0, 1 << 20)
    if found is None:
        return False
    digits = found.group(1).lstrip(b"0")  # of a damaged file there may be thousands
    return len(digits) > _LIMIT_DIGITS or int(digits or b"0") >= _FLOAT_LIMIT_US


def _last_boundary(buffer: bytes) -> tuple[int, int] | None:
    """(end of the last complete event, start of the next), looking backward for ``}, {"``."""
    at = len(buffer)
    low = max(0, len(buffer) - (4 << 20))
    while (at := buffer.rfind(b"{", low, at)) > 0:
        before = buffer[max(0, at - 64) : at].rstrip()
        if (
            before.endswith(b",")
            and before[:-1].rstrip().endswith(b"}")
            and buffer[at + 1 : at + 64].lstrip()[:1] == b'"'
        ):
            comma = buffer.rfind(b",", 0, at)
            return comma, at
    return None


def _batch(text: bytes, decode: Decode, document: Document) -> Iterator[list[Any]]:
    """The events of a list that was cut between two of them."""
    _count(text, document)
    try:
        yield decode(text)
    except DecodeError:
        yield from _walk(text[1:-1], document, at_end=False)


def _last(text: bytes, decode: Decode, document: Document) -> Iterator[list[Any]]:
    """The end of the list and what comes after it."""
    _count(text, document)
    for found in list(_closings(text))[:4]:
        tail = text[found + 1 :].strip()
        head = _tail(tail)
        if head is None:
            continue
        try:
            batch = decode(b"[" + text[:found].rstrip().rstrip(b",") + b"]")
        except DecodeError:
            continue
        document.head |= head
        yield batch
        return
    yield from _walk(text, document, at_end=True)


def _count(text: bytes, document: Document) -> None:
    """Counter samples, whose arguments may have any name: looked for in the text, since most files have none."""
    for found in _COUNTER.finditer(text) if b'"C"' in text else ():
        begin, end = text.rfind(b"{", 0, found.start()), text.find(b"}", found.end())
        for _ in range(2):  # the sample's own brace comes after that of its arguments
            try:
                event = json.loads(text[begin : end + 1])
            except (ValueError, RecursionError):
                end = text.find(b"}", end + 1)
                continue
            _sample(event, document)
            break


def _sample(event: dict[str, Any], document: Document) -> None:
    args, name = event.get("args"), str(event.get("name"))
    if not isinstance(args, dict):
        return
    for key, value in args.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            at = int(instants_ns([str(event.get("ts"))], exact=True)[0])
            full = name if key == name or len(args) == 1 else f"{name} {key}"
            document.counters.setdefault(full, []).append((at, float(value)))


def _closings(text: bytes) -> Iterator[int]:
    """Where the list of events may end: a bracket after an event, or at once."""
    if text.lstrip()[:1] == b"]":
        yield text.index(b"]")
    for found in _CLOSING.finditer(text):
        yield text.index(b"]", found.end() - 1)


def _tail(text: bytes) -> dict[str, Any] | None:
    """What follows the list of events, as an object; None if it is not the rest of one."""
    if not text:
        return {}
    try:
        found = json.JSONDecoder(strict=False).decode('{"":0' + text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return {key: value for key, value in found.items() if key} if isinstance(found, dict) else None


def _walk(text: bytes, document: Document, *, at_end: bool) -> Iterator[list[Any]]:
    """Event by event, over whatever is broken; slow, and only where it must be."""
    decode = decoder(exact=document.exact, fast=False, own=document.own is not None)
    edges = [0]
    batch: list[Any] = []
    for found in _BOUNDARY.finditer(text):
        edges.append(found.end())
    edges.append(len(text))
    for i, (start, end) in enumerate(pairwise(edges)):
        piece = text[start:end].rstrip().rstrip(b",")
        if not piece.strip():
            continue
        try:
            batch += decode(b"[" + piece + b"]")
        except DecodeError:
            batch += _mended(piece, decode, document, last=at_end and i == len(edges) - 2)
    if at_end and not document.closed:
        document.truncated = document.truncated or "the list of events is not closed"
    yield batch


def _mended(piece: bytes, decode: Decode, document: Document, *, last: bool) -> list[Any]:
    """What can be had of a piece between two boundaries: the event before the list's end, or nothing."""
    if last:
        for found in reversed([m.start() for m in re.finditer(rb"\]", piece)][-64:]):
            head = _tail(piece[found + 1 :].strip())
            if head is None:
                continue
            try:
                events = decode(b"[" + piece[:found] + b"]")
            except DecodeError:
                continue
            document.head |= head
            document.closed = True
            return events
        document.truncated = document.truncated or "the file ends in the middle of an event"
    document.lose()
    return []
