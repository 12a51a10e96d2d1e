"""What was read once is not read again: traces kept by the contents of their file, in a folder that stays small."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ridgeline.errors import InputError
from ridgeline.trace.archive import load, save
from ridgeline.trace.table import Trace

#: Part of every key: a reader that answers differently must not find the old answers.
READER_VERSION = 4
MAX_BYTES = 8 << 30
#: Smaller files are read faster than their cache is written.
MIN_BYTES = 4 << 20


def folder() -> Path:
    """``$RIDGELINE_CACHE``, or ``ridgeline`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("RIDGELINE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"


def key_of(path: Path, variant: str = "") -> str:
    """A name for the file's contents, and for how they are read."""
    digest = hashlib.sha256(f"{READER_VERSION} {variant} {path.name} ".encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:40]


def cached(path: Path, read: Callable[[], Trace], variant: str = "") -> Trace:
    """The trace from the cache, or read and kept there; a cache that cannot be written is no error."""
    if path.stat().st_size < MIN_BYTES or os.environ.get("RIDGELINE_CACHE") == "off":
        return read()
    kept = folder() / "traces" / f"{key_of(path, variant)}.trace"
    if kept.exists():
        try:
            trace = load(kept)
            kept.touch()
            return trace
        except (InputError, OSError):
            pass  # damaged or of another version: read again
    trace = read()
    with contextlib.suppress(OSError, InputError, TypeError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        save(trace, kept)
        # The oldest go first
        files = sorted(((f.stat().st_mtime, f.stat().st_size, f) for f in kept.parent.glob("*.trace")), reverse=True)
        total = 0
        for _, size, file in files:
            total += size
            if total > MAX_BYTES:
                file.unlink(missing_ok=True)
    return trace
