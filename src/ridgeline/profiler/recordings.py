"""Planted causes recorded on a device: what each cost, what its fix brought, and the traces of both, for replay."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError, nearest
from ridgeline.resources import data_dir
from ridgeline.trace import Trace, read


@dataclass(frozen=True, slots=True)
class Measured:
    """Step times without a profiler: the median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    num: int

    @property
    def spread_s(self) -> float:
        return (self.high_s - self.low_s) / 2


@dataclass(frozen=True, slots=True)
class Planted:
    """A program with one planted cause, and the same program with the fix."""

    name: str
    cause: str
    change: str
    planted: Measured
    fixed: Measured
    files: Mapping[str, Path]
    of: str = ""  # a second fix: the program in which its cause was still found

    @property
    def gain_s(self) -> float:
        """What the fix really brought a step."""
        return self.planted.median_s - self.fixed.median_s

    @property
    def uncertainty_s(self) -> float:
        """Half the quartile ranges of both, added: two medians closer than this are the same."""
        return self.planted.spread_s + self.fixed.spread_s

    def trace(self, variant: str) -> Trace:
        """The recorded trace: ``planted``, ``fixed``, or ``stack`` (planted, one step, with the Python stack)."""
        if variant not in self.files:
            raise InputError(f"no variant {variant!r} of the planted case {self.name}{nearest(variant, self.files)}")
        return _read(self.files[variant], self.fixed if variant == "fixed" else self.planted)


@dataclass(frozen=True, slots=True)
class Healthy:
    """A program without a planted cause."""

    name: str
    measured: Measured
    file: Path

    def trace(self) -> Trace:
        return _read(self.file, self.measured)


def _read(file: Path, measured: Measured) -> Trace:
    """A recorded trace; how much its steps vary is noted in it if the recording did not."""
    trace = read(file, cache=False)
    facts = {"unprofiled_spread_s": measured.spread_s, **trace.meta.get("ridgeline", {})}
    return replace(trace, meta={**trace.meta, "ridgeline": facts})


def planted_folder(device: str = "h200", suite: str = "planted") -> Path:
    """Where the recordings are; the variable RIDGELINE_PLANTED names another folder of the same form."""
    given = os.environ.get("RIDGELINE_PLANTED")
    return Path(given) if given and suite == "planted" else data_dir() / "recordings" / device / suite


@cache
def planted_cases(folder: Path | None = None) -> tuple[Planted, ...]:
    """Every case that was recorded, in the order of the suite."""
    where = folder or planted_folder()
    return tuple(_case(row, where) for row in _listing(where).get("cases", ()))


@cache
def healthy_programs(folder: Path) -> tuple[Healthy, ...]:
    """Programs of a suite in which nothing was planted."""
    rows = _listing(folder).get("healthy", ())
    return tuple(
        Healthy(row["name"], Measured(**row["fixed"]), folder / f"{row['name']}.fixed.json.xz") for row in rows
    )


@cache
def second_fixes(folder: Path, *traced: Path) -> tuple[Planted, ...]:
    """What is still found in fixed and healthy programs of other suites, done: with traces of their own, or those."""
    return tuple(_second(row, folder, traced) for row in _listing(folder).get("again", ()))


def _second(row: dict[str, Any], folder: Path, traced: tuple[Path, ...]) -> Planted:
    case = replace(_case(row, folder), of=row["of"])
    return case if case.files else replace(case, files={"planted": _first_with(f"{row['of']}.fixed.json.xz", traced)})


def _first_with(name: str, folders: tuple[Path, ...]) -> Path:
    found = next((folder / name for folder in folders if (folder / name).exists()), None)
    if found is None:
        raise InputError(f"no {name} in {', '.join(map(str, folders))}: give the folders of the suites it is of")
    return found


def _listing(folder: Path) -> dict[str, Any]:
    listing = folder / "cases.json"
    if not listing.exists():
        raise InputError(f"no planted causes are recorded in {folder}: benchmarks/planted/run.py records them on a GPU")
    found = json.loads(listing.read_text(encoding="utf-8"))
    return dict(found)


def _case(row: dict[str, Any], folder: Path) -> Planted:
    planted, fixed = Measured(**row["planted"]), Measured(**row["fixed"])
    files = {variant: folder / f"{row['name']}.{variant}.json.xz" for variant in ("planted", "fixed", "stack")}
    present = {variant: file for variant, file in files.items() if file.exists()}
    return Planted(row["name"], row["cause"], row["change"], planted, fixed, files=present)
