"""Bytes of a file a person handed over, unpacked if packed, never more than a bound."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from ridgeline.errors import InputError


def read_bytes(path: str | os.PathLike[str], max_bytes: int = (4 << 30)) -> bytes:
    """The file's content; a gzip is unpacked, and one cut short gives what can be read."""
    source = Path(path)
    try:
        with source.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        if not packed and source.stat().st_size > max_bytes:
            raise _too_large(source, max_bytes)
        return _unpacked(source, max_bytes) if packed else source.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from error


def _unpacked(source: Path, max_bytes: int) -> bytes:
    parts, total = list[bytes](), 0
    with gzip.open(source, "rb") as file:
        try:
            # chunk bytes
            while chunk := file.read(1 << 20):
                total += len(chunk)
                if total > max_bytes:
                    raise _too_large(source, max_bytes)
                parts.append(chunk)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            if not parts:
                raise InputError(f"{source} is a damaged gzip file: nothing of it can be unpacked") from None
    return b"".join(parts)


def _too_large(source: Path, max_bytes: int) -> InputError:
    return InputError(f"{source} is larger than {max_bytes >> 20:,} MiB: record fewer steps, or fewer entries")


def head_of(path: str | os.PathLike[str], num: int = 512) -> bytes:
    """The first bytes of the content, unpacked if packed; empty where nothing can be read."""
    try:
        with Path(path).open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                return file.read(num)
        with gzip.open(path, "rb") as file:
            return file.read(num)
    except (OSError, EOFError, zlib.error):
        return b""
