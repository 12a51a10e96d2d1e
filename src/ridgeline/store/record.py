"""What the store keeps of one run of a verb: what it was about, its numbers, its document and where it was made."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def canonical(value: Any) -> str:
    """JSON with sorted keys and without spaces; what is not a number in JSON (nan, inf) becomes its name."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(found) for key, found in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(found) for found in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def digest(text: str | bytes) -> str:
    """32 hexadecimal digits of a content."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16).hexdigest()


def now() -> str:
    """UTC to the microsecond, so that text sorts as time does."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def installed() -> str:
    """The version of ridgeline: of the package as loaded, which no layer imports."""
    return str(sys.modules["ridgeline"].__version__)


@cache
def environment() -> dict[str, Any]:
    """What the numbers were made on: interpreter, platform and libraries; nothing that tells person or place."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count() or 0,
    }
    for name in ("numpy", "torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")  # asking a library that is not loaded costs seconds
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


@cache
def git_state(folder: str = ".") -> str:
    """Commit of the working directory, with ``+`` where files differ from it; empty outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run in SI units, with its 90 % interval where it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file that a run wrote or read, kept where it is: its path, size and content hash."""

    kind: str
    path: str
    num_bytes: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. Runs of the same ``thing`` are comparable: the same subject, settings and device."""

    kind: str  # predict, simulate, serve, profile, optimize, gate, calibrate, validate, benchmark, …
    subject: str  # model, script or trace
    metrics: tuple[Metric, ...]
    device: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    subject_hash: str = ""  # of the graph's content, where there is one: it tells that a model changed under its name
    measured: bool = False
    document: Any = None  # what --json prints
    artifacts: tuple[Artifact, ...] = ()
    at: str = field(default_factory=now)
    version: str = field(default_factory=installed)
    git: str = field(default_factory=git_state)
    environment: Mapping[str, Any] = field(default_factory=environment)
    stored: str = ""  # its id, of a record that was read from a store: its document is read apart

    @property
    def thing(self) -> str:
        """What was predicted or measured, without how: equal for a prediction and a measurement of it."""
        words = [
            f"{key}={canonical(value) if isinstance(value, (dict, list, tuple)) else value}"
            for key, value in sorted(self.settings.items())
            if value not in (None, "")
        ]
        return " ".join([self.subject, *words, *([f"on {self.device}"] if self.device else [])])

    @property
    def id(self) -> str:
        """Of everything in the record: the same record imported twice is one run."""
        if self.stored:
            return self.stored
        metrics = [[m.name, float(m.value), *(None if v is None else float(v) for v in (m.low, m.high)), m.basis]
                   for m in self.metrics]  # fmt: skip
        return digest(
            canonical(
                [self.kind, self.measured, self.thing, self.subject, self.settings, metrics, self.at, self.version,
                 self.git, self.environment, digest(canonical(self.document))]
            )
        )  # fmt: skip

    def value(self, name: str) -> float | None:
        return next((metric.value for metric in self.metrics if metric.name == name), None)


def artifact(kind: str, path: str | os.PathLike[str]) -> Artifact:
    """A file by reference; of a folder, its size and the hash of its list of files."""
    found = Path(path).resolve()
    if found.is_dir():
        sizes = {str(p.relative_to(found)): p.stat().st_size for p in sorted(found.rglob("*")) if p.is_file()}
        return Artifact(kind=kind, path=str(found), num_bytes=sum(sizes.values()), hash=digest(canonical(sizes)))
    with found.open("rb") as file:
        content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return Artifact(kind=kind, path=str(found), num_bytes=found.stat().st_size, hash=content)


def metrics_of(document: Any) -> tuple[Metric, ...]:
    """The numbers of a document: those at its top, and those one level below as ``ttft_s.p50``.

    Time of a step is ``step_s``, whoever made the document. ``interval_s`` belongs to it; ``intervals`` and ``low``
    and ``high`` beside a ``mean`` belong to what they stand with.
    """
    if not isinstance(document, Mapping):
        return ()
    basis, found = str(document.get("basis", "")), dict[str, Metric]()
    intervals = document.get("intervals") if isinstance(document.get("intervals"), Mapping) else {}
    for name, value in document.items():
        if isinstance(value, Mapping) and name not in ("intervals", "plan", "settings", "environment"):
            for inner, number in value.items():
                if _is_number(number) and inner not in ("low", "high"):
                    low, high = (value.get("low"), value.get("high")) if inner == "mean" else (None, None)
                    key = f"{name}.{inner}"
                    found[key] = Metric(name=key, value=number, low=low, high=high, basis=basis)
        elif _is_number(value):
            key = "step_s" if name == "expected_s" else name
            low, high = (intervals or {}).get(name) or (document.get("interval_s") if key == "step_s" else None) or (
                None, None)  # fmt: skip
            found[key] = Metric(name=key, value=value, low=low, high=high, basis=basis)
    return tuple(found.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
