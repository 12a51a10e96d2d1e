"""Where kernels keep what they made: the cache folder, files that are there whole or not at all, their extensions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from pathlib import Path
from typing import Any


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


def extension(name: str, path: Path) -> Any:
    """The extension module of this name in a file, wherever that lies; ImportError where it does not fit."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module")
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made
