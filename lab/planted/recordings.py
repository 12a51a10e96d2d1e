"""Injected causes recorded on a device: what each cost, what its fix brought, and the traces of both, for replay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lab import ROOT
from ridgeline.errors import InputError, nearest
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
class InjectedCase:
    """A program with one injected cause, and the same program with the fix."""

    name: str
    cause: str
    change: str
    injected: Measured
    fixed: Measured
    files: Mapping[str, Path]
    of: str = ""  # a second fix: the program in which its cause was still found

    @property
    def gain_s(self) -> float:
        """What the fix really brought a step."""
        return self.injected.median_s - self.fixed.median_s

    @property
    def uncertainty_s(self) -> float:
        """Half the quartile ranges of both, added: two medians closer than this are the same."""
        return self.injected.spread_s + self.fixed.spread_s

    def trace(self, variant: str) -> Trace:
        """The recorded trace: ``planted`` (with the cause), ``fixed``, or ``stack`` (one step, with Python stacks)."""
        if variant not in self.files:
            raise InputError(f"no variant {variant!r} of the injected case {self.name}{nearest(variant, self.files)}")
        return _read(self.files[variant], self.fixed if variant == "fixed" else self.injected)


@dataclass(frozen=True, slots=True)
class ControlProgram:
    """A program without a cause."""

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


RECORDINGS = ROOT / "data" / "recordings"


def suite_folder(suite: str, device: str = "h200") -> Path:
    """Where the recordings of a suite are."""
    return RECORDINGS / device / suite


@cache
def injected_cases(folder: Path) -> tuple[InjectedCase, ...]:
    """Every case that was timed, in the order of the suite; of earlier suites few traces are kept."""
    return tuple(_case(row, folder) for row in _listing(folder).get("cases", ()))


@cache
def control_programs(folder: Path) -> tuple[ControlProgram, ...]:
    """Programs of a suite in which nothing was injected."""
    rows = _listing(folder).get("healthy", ())
    files = [(row, folder / f"{row['name']}.fixed.json.xz") for row in rows]
    return tuple(ControlProgram(row["name"], Measured(**row["fixed"]), file) for row, file in files if file.exists())


@cache
def second_fixes(folder: Path) -> tuple[InjectedCase, ...]:
    """What is found in fixed programs and controls, done and timed again; most have no traces of their own."""
    return tuple(replace(_case(row, folder), of=row["of"]) for row in _listing(folder).get("again", ()))


@cache
def suites(device: str = "h200") -> tuple[str, ...]:
    """Every suite that was recorded, by name."""
    return tuple(sorted(file.parent.name for file in (RECORDINGS / device).glob("*/cases.json")))


def _listing(folder: Path) -> dict[str, Any]:
    listing = folder / "cases.json"
    if not listing.exists():
        raise InputError(f"no suite is recorded in {folder}: run python -m lab.planted record on a GPU")
    found = json.loads(listing.read_text(encoding="utf-8"))
    return dict(found)


def _case(row: dict[str, Any], folder: Path) -> InjectedCase:
    injected, fixed = Measured(**row["planted"]), Measured(**row["fixed"])
    files = {variant: folder / f"{row['name']}.{variant}.json.xz" for variant in ("planted", "fixed", "stack")}
    present = {variant: file for variant, file in files.items() if file.exists()}
    return InjectedCase(row["name"], row["cause"], row["change"], injected, fixed, files=present)
