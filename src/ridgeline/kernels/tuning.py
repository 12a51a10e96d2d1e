"""Launch configurations: the analytical default of each op, unless a tuning file or a caller says otherwise.

Nothing here measures. ``ridgeline.bench.tune`` does, when asked, and writes the file that is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.errors import KernelError
from ridgeline.kernels.files import cache_folder, write_atomically
from ridgeline.kernels.launcher import forget_plans

Config = TypeVar("Config")
_forced: dict[str, Any] = {}
_asked: list[tuple[str, dict[str, Any], Any]] | None = None


def choose(kernel: str, sizes: Mapping[str, Any], default: Config) -> Config:
    """The configuration to launch: forced by a caller, else tuned for these sizes, else the default."""
    if _asked is not None:
        _asked.append((kernel, dict(sizes), default))
    if kernel in _forced:
        return _forced[kernel]
    tuned = _tuned(tuning_file()).get(_key(kernel, sizes))
    if tuned is None:
        return default
    check_fields(default, tuned)
    return replace(default, **tuned)  # type: ignore[type-var]


@contextmanager
def forced(kernel: str, config: Any) -> Iterator[None]:
    """Inside, a kernel runs with this configuration whatever the shape: for sweeps and for the curious."""
    _forced[kernel] = config
    forget_plans()
    try:
        yield
    finally:
        del _forced[kernel]
        forget_plans()


@contextmanager
def asked() -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """Inside, every choice is noted: (kernel, sizes, default)."""
    global _asked
    forget_plans()
    _asked = []
    try:
        yield _asked
    finally:
        _asked = None


def tuning_file() -> Path:
    """``RIDGELINE_KERNEL_TUNING``, or a file in the cache folder; it need not exist."""
    own = os.environ.get("RIDGELINE_KERNEL_TUNING")
    return Path(own) if own else cache_folder() / "tuning.json"


def record(kernel: str, sizes: Mapping[str, Any], config: Any) -> Path:
    """Keep a configuration for these sizes in the tuning file, beside those that are there."""
    path = tuning_file()
    known = dict(_tuned(path)) | {_key(kernel, sizes): asdict(config)}
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}.tmp")
    made.write_text(json.dumps(known, indent=1, sort_keys=True))
    write_atomically(path, made)
    _tuned.cache_clear()
    forget_plans()
    return path


def _key(kernel: str, sizes: Mapping[str, Any]) -> str:
    return " ".join([kernel, *(f"{name}={value}" for name, value in sizes.items())])


@cache
def _tuned(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(key): dict(value) for key, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise KernelError(f"tuning file {path} cannot be read ({error}): delete it and tune again") from None


def check_fields(config: Any, known: Mapping[str, Any]) -> None:
    """Refuse a tuned value that the configuration does not have."""
    strange = set(known) - {f.name for f in fields(config)}
    if strange:
        raise KernelError(f"tuned values {sorted(strange)} are unknown to {type(config).__name__}: tune again")
