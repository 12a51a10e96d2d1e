"""A trace file as blocks of bytes, whatever it is wrapped in, never more than a block at a time in memory."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ridgeline.errors import InputError

BLOCK_BYTES = 8 << 20
_GZIP, _ZIP, _SQLITE = b"\x1f\x8b", b"PK\x03\x04", b"SQLite format 3\x00"
_DAMAGE = (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError)


@dataclass(slots=True)
class Blocks:
    """Iterates over a file's contents; ``broken`` says why it ended early, if it did."""

    handle: IO[bytes]
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
            with gzip.GzipFile(fileobj=file) as inner:
                yield Blocks(cast(IO[bytes], inner))
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
def _member(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
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
                with gzip.GzipFile(fileobj=inner) as unwrapped:
                    yield cast(IO[bytes], unwrapped)
            else:
                yield inner
    except _DAMAGE as error:
        raise InputError(f"{path} is not a zip archive that can be read: {error}") from error
