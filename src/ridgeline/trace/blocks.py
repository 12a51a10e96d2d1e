"""A trace file as blocks of bytes, whatever it is wrapped in, never more than a block at a time in memory."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from ridgeline.errors import InputError

BLOCK_BYTES = 8 << 20
_GZIP, _ZIP, _SQLITE = b"\x1f\x8b", b"PK\x03\x04", b"SQLite format 3\x00"
_DAMAGE = (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError)


class Reader(Protocol):
    """Anything that gives bytes."""

    def read(self, size: int, /) -> bytes: ...


class Gunzip:
    """Unpacks gzip as far as it goes: what comes before the damage is given out, and then the damage is raised."""

    def __init__(self, packed: Reader) -> None:
        self._packed = packed
        self._inflate = zlib.decompressobj(31)
        self._rest = b""
        self._damage: Exception | None = None

    def read(self, size: int, /) -> bytes:
        found = bytearray()
        while len(found) < size and self._damage is None:
            piece = self._piece(size - len(found))
            if piece is None:
                break
            found += piece
        if not found and self._damage is not None:
            raise self._damage
        return bytes(found)

    def _piece(self, limit: int) -> bytes | None:
        """The next bytes, perhaps none; None at the end."""
        try:
            if not self._rest:
                self._rest = self._packed.read(1 << 20)
                if not self._rest:
                    if not self._inflate.eof:
                        self._damage = EOFError("the end is missing")
                    return None
            if self._inflate.eof:  # another member follows
                self._inflate = zlib.decompressobj(31)
            piece = self._inflate.decompress(self._rest, limit)
            self._rest = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            return piece
        except _DAMAGE as error:
            self._damage = error
            return None


@dataclass(slots=True)
class Blocks:
    """Iterates over a file's contents; ``broken`` says why it ended early, if it did."""

    handle: Reader
    broken: str = ""
    num_bytes: int = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                block = self.handle.read(BLOCK_BYTES)
            except _DAMAGE as error:
                self.broken = f"the compressed file breaks off after {self.num_bytes:,} bytes ({error})"
                return
            if not block:
                return
            self.num_bytes += len(block)
            yield block


def wrapping(path: Path) -> str:
    """``gzip``, ``zip``, ``sqlite`` or ``plain``, by the file's first bytes, whatever it is called."""
    with _opened(path) as file:
        first = file.read(16)
    if first.startswith(_GZIP):
        return "gzip"
    if first.startswith(_ZIP):
        return "zip"
    return "sqlite" if first == _SQLITE else "plain"


@contextmanager
def blocks_of(path: Path) -> Iterator[Blocks]:
    """The file's contents, unwrapped."""
    kind = wrapping(path)
    with _opened(path) as file:
        if kind == "gzip":
            yield Blocks(Gunzip(file))
        elif kind == "zip":
            with _member(path, file) as member:
                yield Blocks(member)
        else:
            yield Blocks(file)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _member(path: Path, file: IO[bytes]) -> Iterator[Reader]:
    """The largest JSON file of an archive."""
    try:
        archive = zipfile.ZipFile(file)
        members = [m for m in archive.infolist() if not m.is_dir()]
        wanted = [m for m in members if m.filename.endswith((".json", ".json.gz"))] or members
        if not wanted:
            raise InputError(f"{path} is an empty archive: there is no trace in it")
        largest = max(wanted, key=lambda m: m.file_size)
        with archive.open(largest) as inner:
            if largest.filename.endswith(".gz"):
                yield Gunzip(inner)
            else:
                yield inner
    except _DAMAGE as error:
        raise InputError(f"{path} is not a zip archive that can be read: {error}") from error
