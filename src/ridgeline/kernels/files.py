"""Where kernels keep what they made: the cache folder, files that are there whole or not at all, native libraries."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import stat
import warnings
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


def private_folder(folder: Path) -> Path:
    """The folder, made if it is not there, and writable by nobody else; an OSError where it belongs to another user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if hasattr(os, "getuid") and found.st_uid == os.getuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    _check_private(folder)
    return folder


def _check_private(path: Path) -> None:
    """An OSError with the remedy, unless the user (or root) owns a path and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} may be written to by other users: chown it to yourself and chmod go-w it, or "
                              "point RIDGELINE_KERNEL_CACHE at a folder of your own")  # fmt: skip


def install_library(target: Path, made: Path) -> None:
    """Moves a library that was built into place, with its hash beside it, by which it is checked whenever it loads."""
    made.chmod(0o700)
    digest = made.with_suffix(".digest")
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
    digest.chmod(0o600)
    write_atomically(_digest_of(target), digest)
    write_atomically(target, made)


def check_library(path: Path) -> None:
    """An OSError unless a library lies in a private folder and holds what was built; a broken one is built anew."""
    for each in (path.parent, path, _digest_of(path)):
        _check_private(each)
    if hashlib.sha256(path.read_bytes()).hexdigest() != _digest_of(path).read_text():
        raise OSError(f"{path} is not what was built: delete it, and it is built again")


def is_installed(path: Path) -> bool:
    """Whether a library is there and passes its check; one that does not is built over."""
    try:
        check_library(path)
    except OSError:
        return False
    return True


def _digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def extension(name: str, path: Path) -> Any:
    """The extension module of this name in a file, wherever that lies; ImportError where it does not fit or is not
    trusted."""
    try:
        check_library(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            warnings.warn(f"not loaded: {error}", stacklevel=2)
        raise ImportError(str(error)) from error
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module")
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made
