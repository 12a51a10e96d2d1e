"""Planted causes recorded on a device: what each cost, what its fix brought, and the traces of both, for replay."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError, nearest
from ridgeline.resources import data_dir
from ridgeline.trace import Trace, read

VARIANTS = ("planted", "fixed", "stack")


@dataclass(frozen=True, slots=True)
class Measured:
    """Step times without a profiler: the median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    num: int


@dataclass(frozen=True, slots=True)
class Planted:
    """A program with one planted cause, and the same program with the fix."""

    name: str
    cause: str
    change: str
    planted: Measured
    fixed: Measured
    folder: Path

    @property
    def gain_s(self) -> float:
        """What the fix really brought a step."""
        return self.planted.median_s - self.fixed.median_s

    @property
    def uncertainty_s(self) -> float:
        """Half the quartile ranges of both, added: two medians closer than this are the same."""
        spread = [(step.high_s - step.low_s) / 2 for step in (self.planted, self.fixed)]
        return sum(spread)

    def trace(self, variant: str) -> Trace:
        """The recorded trace: ``planted``, ``fixed``, or ``stack`` (planted, one step, with the Python stack)."""
        if variant not in VARIANTS:
            raise InputError(f"no variant {variant!r} of a planted case{nearest(variant, VARIANTS)}")
        trace = read(self.folder / f"{self.name}.{variant}.json.xz", cache=False)
        measured = self.fixed if variant == "fixed" else self.planted
        facts = {"unprofiled_spread_s": (measured.high_s - measured.low_s) / 2, **trace.meta.get("ridgeline", {})}
        return replace(trace, meta={**trace.meta, "ridgeline": facts})


def planted_folder(device: str = "h200") -> Path:
    """Where the recordings are; the variable RIDGELINE_PLANTED names another folder of the same form."""
    given = os.environ.get("RIDGELINE_PLANTED")
    return Path(given) if given else data_dir() / "recordings" / device / "planted"


@cache
def planted_cases(folder: Path | None = None) -> tuple[Planted, ...]:
    """Every case that was recorded, in the order of the suite."""
    where = folder or planted_folder()
    listing = where / "cases.json"
    if not listing.exists():
        raise InputError(f"no planted causes are recorded in {where}: benchmarks/planted/run.py records them on a GPU")
    document = json.loads(listing.read_text(encoding="utf-8"))
    return tuple(_case(row, where) for row in document["cases"])


def _case(row: dict[str, Any], folder: Path) -> Planted:
    steps = {variant: Measured(**row[variant]) for variant in ("planted", "fixed")}
    return Planted(row["name"], row["cause"], row["change"], **steps, folder=folder)
