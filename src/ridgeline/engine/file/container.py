"""The container of an engine: a zip whose members are stored uncompressed, aligned to 64 bytes, and mapped into memory.

Any zip tool lists and unpacks it. Written twice from the same members, the bytes are the same: members are in order of
name and carry no time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.errors import EngineError

ALIGNMENT = 64
MANIFEST = "manifest.json"
MAX_MEMBERS = 256
MAX_JSON_BYTES = 1 << 28
MAX_NESTING = 64
_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)?\.[a-z]+")
_BOUNDARY = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def to_json(value: Any) -> bytes:
    """The one text of a value: keys in order, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def from_json(data: bytes | memoryview, what: str) -> Any:
    """JSON of somebody else's: bounded in size and depth, no key twice, no NaN."""
    if len(data) > MAX_JSON_BYTES:
        raise EngineError(f"{what} has {len(data):,} bytes of JSON; {MAX_JSON_BYTES:,} are the most")
    text = bytes(data)
    depth = most = 0
    for found in _BOUNDARY.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        most = max(most, depth)
    if most > MAX_NESTING:
        raise EngineError(f"{what} is nested {most} deep; {MAX_NESTING} is the most")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{what} is not JSON: {ascii(str(error))[1:-1]}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def write(path: str | os.PathLike[str], members: Mapping[str, bytes | memoryview | list[Any]]) -> str:
    """Write members and return the SHA-256 of the file. A member is bytes, or a list of buffers that follow each other.

    The file appears under its name when it is complete.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name in sorted(members):
                    _write_member(archive, file, name, members[name])
        digest = sha256_of_file(part)
        part.replace(target)
    except OSError as error:
        raise EngineError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return digest


def _write_member(archive: zipfile.ZipFile, file: Any, name: str, data: bytes | memoryview | list[Any]) -> None:
    parts = data if isinstance(data, list) else [data]
    size = sum(memoryview(part).nbytes for part in parts)
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system, info.external_attr, info.file_size = 3, 0o644 << 16, size
    large = size >= 1 << 31
    # An extra field (id 0x5247) of zeros moves the data to the next multiple of 64
    start = file.tell() + 30 + len(name) + 4 + (20 if large else 0)
    info.extra = struct.pack("<HH", 0x5247, -start % ALIGNMENT) + bytes(-start % ALIGNMENT)
    with archive.open(info, "w", force_zip64=large) as member:
        for part in parts:
            member.write(part)
    info.extra = b""  # the directory needs no padding


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Container:
    """An engine file that is mapped into memory, and where its members lie."""

    path: str
    data: memoryview
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Container:
        where = os.fspath(path)
        try:
            with open(where, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if file.read(4) != b"PK\x03\x04":
                    raise EngineError(f"{where} is not an engine: it does not begin as one (build one with rl.build)")
                # A private mapping: nothing that is written to it reaches the file
                data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
                return cls(where, data, _places(file, size, where))
        except OSError as error:
            raise EngineError(f"cannot read {where}: {error.strerror or error}") from error

    def member(self, name: str) -> memoryview:
        if name not in self.places:
            raise EngineError(f"{self.path} has no {name}: it is not a complete engine")
        start, size = self.places[name]
        return self.data[start : start + size]

    def json(self, name: str) -> Any:
        return from_json(self.member(name), f"{self.path}: {name}")

    def __contains__(self, name: str) -> bool:
        return name in self.places


def _places(file: Any, size: int, where: str) -> dict[str, tuple[int, int]]:
    """Where members lie. Everything that a reader could trip over is refused: compression (and with it, bombs), links,
    folders, names that leave the folder, names that stand twice, members that overlap or end behind the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (
        zipfile.BadZipFile,
        ValueError,
        OverflowError,
        struct.error,
        UnicodeDecodeError,
        NotImplementedError,
    ) as error:
        raise EngineError(f"{where} is not an engine: {ascii(str(error))[1:-1]}") from None
    if len(infos) > MAX_MEMBERS:
        raise EngineError(f"{where} has {len(infos):,} members; {MAX_MEMBERS} are the most")
    found: dict[str, tuple[int, int]] = {}
    taken: list[tuple[int, int, str]] = []
    for info in infos:
        name = info.orig_filename
        shown = ascii(name)[:60]
        if not _NAME.fullmatch(name) or name in found:
            raise EngineError(f"{where}: member {shown} has a name that engines do not have, or stands twice")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & ~0x800:
            raise EngineError(f"{where}: member {shown} is compressed or encrypted, which engines are not")
        if (info.external_attr >> 16) & 0o170000 not in (0, 0o100000):
            raise EngineError(f"{where}: member {shown} is a link or a folder, which engines do not hold")
        file.seek(info.header_offset)
        header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise EngineError(f"{where}: member {shown} is not where the directory says")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if info.header_offset < 0 or start % ALIGNMENT or start + info.file_size > size:
            raise EngineError(f"{where}: member {shown} is not aligned, or ends behind the file")
        found[name] = (start, info.file_size)
        taken.append((info.header_offset, start + info.file_size, name))
    taken.sort()
    for (_, end, _), (begin, _, name) in pairwise(taken):
        if begin < end:
            raise EngineError(f"{where}: member {ascii(name)[:60]} overlaps the one before it")
    if MANIFEST not in found:
        raise EngineError(f"{where} is not an engine: it has no {MANIFEST}")
    return found
