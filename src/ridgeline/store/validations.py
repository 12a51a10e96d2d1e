"""Validations kept as JSON lines: every run's predictions by row, so that a change shows what got better or worse."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The predictions of one validation: (measured, predicted) of every row by its key."""

    name: str  # of the file that was judged
    at: str  # UTC, ISO 8601
    version: str
    rows: Mapping[str, tuple[float, float]]

    @property
    def digest(self) -> str:
        """The same rows and predictions have the same digest, whenever they were made."""
        text = json.dumps({key: list(pair) for key, pair in sorted(self.rows.items())}, separators=(",", ":"))
        return hashlib.sha256(f"{self.name}\n{text}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row whose prediction moved: its absolute percentage error before and after."""

    key: str
    before: float
    after: float

    @property
    def better(self) -> bool:
        return self.after < self.before


def run_of(name: str, version: str, rows: Mapping[str, tuple[float, float]]) -> Run:
    """A run made now."""
    return Run(name=name, at=datetime.now(UTC).isoformat(timespec="seconds"), version=version, rows=rows)


def home() -> Path:
    """Where records are kept: ``$RIDGELINE_HOME``, else ``ridgeline`` in the user's data folder."""
    if "RIDGELINE_HOME" in os.environ:
        return Path(os.environ["RIDGELINE_HOME"])
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share")) / "ridgeline"


def append(run: Run, folder: Path | None = None) -> bool:
    """Keep ``run`` at the end of the file of its name; False when the newest record says the same already."""
    path = _path(run.name, folder)
    newest = last(run.name, folder)
    if newest is not None and newest.digest == run.digest:
        return False
    record = {"name": run.name, "at": run.at, "version": run.version, "digest": run.digest,
              "rows": {key: list(pair) for key, pair in run.rows.items()}}  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot keep the results in {path}: {error.strerror}; set RIDGELINE_HOME or use --no-store"
        ) from error
    return True


def runs(name: str, folder: Path | None = None) -> list[Run]:
    """Every kept run of ``name``, oldest first."""
    path = _path(name, folder)
    if not path.is_file():
        return []
    return list(_read(path))


def last(name: str, folder: Path | None = None) -> Run | None:
    """The newest kept run of ``name``."""
    kept = runs(name, folder)
    return kept[-1] if kept else None


def changes(before: Run, after: Run, least: float = 1e-4) -> list[Change]:
    """Rows present in both whose error moved by more than ``least``, the largest move first."""
    moved = list[Change]()
    for key in before.rows.keys() & after.rows.keys():
        change = Change(key=key, before=_ape(before.rows[key]), after=_ape(after.rows[key]))
        if abs(change.after - change.before) > least:
            moved.append(change)
    return sorted(moved, key=lambda change: (-abs(change.after - change.before), change.key))


def _ape(pair: tuple[float, float]) -> float:
    measured, predicted = pair
    return abs(predicted / measured - 1.0)


def _path(name: str, folder: Path | None) -> Path:
    plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    return (folder or home() / "validations") / f"{plain}.jsonl"


def _read(path: Path) -> Iterator[Run]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            rows = {key: (float(pair[0]), float(pair[1])) for key, pair in record["rows"].items()}
            yield Run(name=record["name"], at=record["at"], version=record["version"], rows=rows)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{path}, line {number}: not a record of a validation ({error}); remove it") from error
