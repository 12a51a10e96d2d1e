"""Protobuf wire format, read from a memory map: fields by number, nothing copied, nothing trusted."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

import numpy as np

from ridgeline.errors import ModelFileError

MAX_FIELDS = 2_000_000
"""Fields of one message that are kept: the largest exports have some 100,000 nodes."""

Fields = dict[int, list[Any]]


def read_varint(view: memoryview, at: int, where: str) -> tuple[int, int]:
    """The integer at ``at`` and the position after it."""
    value = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise ModelFileError(f"{where}: the file ends inside a number, or is not protobuf: copy or export it again")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7


def fields(view: memoryview, where: str, wanted: Collection[int] | None = None) -> Fields:
    """Every wanted field of a message, in order: integers for numbers (fixed ones as raw bytes), views for the rest."""
    found: Fields = {}
    at, end, num = 0, len(view), 0
    while at < end:
        tag, at = read_varint(view, at, where)
        value: Any
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = read_varint(view, at, where)
        elif kind == 2:
            size, at = read_varint(view, at, where)
            value, at = view[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = view[at : at + size], at + size
        else:
            raise ModelFileError(f"{where}: field {number} has wire type {kind}, which no such file holds: "
                                 "it is damaged or of another format")  # fmt: skip
        if at > end or number == 0:
            raise ModelFileError(f"{where}: field {number} reaches past the end: the file is cut short or damaged")
        if wanted is None or number in wanted:
            num += 1
            if num > MAX_FIELDS:
                raise ModelFileError(f"{where}: more than {MAX_FIELDS:,} fields in one message: no model has that many")
            found.setdefault(number, []).append(value)
    return found


def text(found: Fields, number: int, default: str = "") -> str:
    """A string field; bytes that are not UTF-8 are replaced, not fatal."""
    values = found.get(number)
    if not values:
        return default
    return bytes(values[-1]).decode("utf-8", "replace") if isinstance(values[-1], memoryview) else default


def integer(found: Fields, number: int, default: int = 0) -> int:
    """A signed 64-bit field."""
    values = found.get(number)
    if not values or not isinstance(values[-1], int):
        return default
    return signed(values[-1])


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def floats(found: Fields, number: int, code: str = "<f") -> list[float]:
    """A repeated fixed-width field, packed or not."""
    size = struct.calcsize(code)
    out: list[float] = []
    for value in found.get(number, ()):
        if isinstance(value, memoryview):
            whole = len(value) - len(value) % size
            out.extend(np.frombuffer(value[:whole], dtype=code.replace("f", "f4").replace("d", "f8")).tolist())
    return out


def integers(found: Fields, number: int, where: str) -> list[int]:
    """A repeated varint field, packed or not, as signed 64-bit integers."""
    out: list[int] = []
    for value in found.get(number, ()):
        if isinstance(value, int):
            out.append(signed(value))
        else:
            out.extend(unpacked(value, where).tolist())
    return out


def unpacked(view: memoryview, where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Packed varints as int64, decoded by whole arrays: a weight may be millions of them."""
    raw = np.frombuffer(view, dtype=np.uint8)
    if raw.size == 0:
        return np.zeros(0, dtype=np.int64)
    last = np.flatnonzero(raw < 0x80)
    if last.size == 0 or last[-1] != raw.size - 1:
        raise ModelFileError(f"{where}: packed numbers end inside one: the file is cut short or damaged")
    first = np.concatenate([[0], last[:-1] + 1])
    if int((last - first).max()) > 9:
        raise ModelFileError(f"{where}: a packed number is longer than 64 bits: the file is damaged")
    values = np.zeros(last.size, dtype=np.uint64)
    for byte in range(int((last - first).max()) + 1):
        inside = first + byte <= last
        chunk = raw[np.minimum(first + byte, last)].astype(np.uint64) & np.uint64(0x7F)
        values |= np.where(inside, chunk << np.uint64(7 * byte), np.uint64(0))
    return values.view(np.int64)
