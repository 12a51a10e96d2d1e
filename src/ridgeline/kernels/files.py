"""Where kernels keep what they made: the cache folder, and files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``RIDGELINE_KERNEL_CACHE``, or the user's cache folder."""
    own = os.environ.get("RIDGELINE_KERNEL_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ridgeline" / "kernels"


def write_atomically(target: Path, made: Path) -> None:
    """Move a finished file into place: another process sees the old one or the new one, never a part."""
    made.replace(target)
