"""Profiles of JAX, TensorFlow and PyTorch/XLA (``.xplane.pb``): planes of lines of events, read without a library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Trace, TraceBuilder

_DEVICE = re.compile(r"/device:(?:GPU|TPU|CUSTOM)\D*(\d+)", re.IGNORECASE)
_COPY = re.compile(r"memcpy|MemcpyD2|MemcpyH2|copy-(?:start|done)", re.IGNORECASE)
_STREAM = re.compile(r"stream.*?(\d+)", re.IGNORECASE)
_RUNTIME = re.compile(r"^(?:cu[A-Z]|cuda[A-Z]|hip[A-Z])")
_COMMUNICATION = re.compile(r"nccl|rccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective-permute", re.I)
#: Lines of a device that repeat what its streams say, by op, module or step.
_REPEATED = ("xla modules", "xla ops", "framework ops", "framework name scope", "source code", "tensorflow", "steps",
             "scope")  # fmt: skip


def read_xplane(path: Path) -> Trace:
    """One file; several hosts of a run write one each."""
    made = TraceBuilder(path.name)
    names = []
    try:
        planes = [plane for number, plane in _fields(path.read_bytes()) if number == 1]
        for rank, plane in enumerate(planes):
            names.append(_plane(made, plane, rank))
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no XSpace protocol buffer, or it is cut off: record it again") from error
    devices = [{"name": name} for name in names if name and _DEVICE.search(name)]
    made.describe(format="xplane", source_file=path.name, devices=devices)
    return made.build()


def _plane(made: TraceBuilder, data: bytes, number: int) -> str:
    """A device, or the threads of the host."""
    name, lines, events = "", list[bytes](), dict[int, str]()
    for field, value in _fields(data):
        if field == 2:
            name = _text(value)
        elif field == 3:
            lines.append(value)
        elif field == 4:
            key, called = _entry(value)
            events[key] = called
    device = _DEVICE.search(name)
    if device is None and "/host:CPU" not in name and "/host:python" not in name.lower():
        return name
    rows = [_line(line) for line in lines]
    streams = any(_STREAM.search(label) for label, _, _ in rows)
    for thread, (label, start_ns, spans) in enumerate(rows):
        if device is not None and streams and not _STREAM.search(label):
            continue
        if device is not None and not streams and label.lower() in _REPEATED[:1] + _REPEATED[2:]:
            continue
        for meta, offset_ps, duration_ps in spans:
            text = events.get(meta, "") or f"event {meta}"
            at_s, lasts_s = start_ns / 1e9 + offset_ps / 1e12, duration_ps / 1e12
            if device is not None:
                stream = _STREAM.search(label)
                made.add(text, f"{name} {label}", at_s, lasts_s, kind=_device_kind(text), device=int(device.group(1)),
                         stream=int(stream.group(1)) if stream else thread)  # fmt: skip
            else:
                made.add(text, f"host {label}", at_s, lasts_s, kind=_host_kind(text), device=-1, stream=-1,
                         thread=number * 10_000 + thread)  # fmt: skip
    return name


def _device_kind(name: str) -> Kind:
    if _COPY.search(name):
        return Kind.MEMCPY
    return Kind.COMMUNICATION if _COMMUNICATION.search(name) else Kind.KERNEL


def _host_kind(name: str) -> Kind:
    if _RUNTIME.search(name):
        return Kind.RUNTIME
    return Kind.PYTHON if name.startswith("$") else Kind.OP


def _line(data: bytes) -> tuple[str, int, list[tuple[int, int, int]]]:
    """(name, start in nanoseconds, events as (metadata, offset, duration) in picoseconds)."""
    name, shown, start_ns, spans = "", "", 0, []
    for field, value in _fields(data):
        if field == 2:
            name = _text(value)
        elif field == 11:
            shown = _text(value)
        elif field == 3:
            start_ns = int(value)
        elif field == 4:
            numbers = {1: 0, 2: 0, 3: 0}
            for inner, number in _fields(value):
                if inner in numbers:
                    numbers[inner] = int(number)
            spans.append((numbers[1], numbers[2], numbers[3]))
    return shown or name, start_ns, spans


def _entry(data: bytes) -> tuple[int, str]:
    """A map's key, and the name in its value."""
    key, name = 0, ""
    for field, value in _fields(data):
        if field == 1:
            key = int(value)
        elif field == 2:
            found = {inner: text for inner, text in _fields(value) if inner in (2, 4)}
            name = _text(found.get(4) or found.get(2) or b"")
    return key, name


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace") if not isinstance(value, int) else ""


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers for varints, bytes for what has a length."""
    view, at, size = memoryview(data), 0, len(data)
    while at < size:
        tag, at = _varint(view, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(view, at)
            yield tag >> 3, value
        elif kind == 2:
            length, at = _varint(view, at)
            if at + length > size:
                raise IndexError
            yield tag >> 3, view[at : at + length]
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(kind)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")
