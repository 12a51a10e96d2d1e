"""Fitted coefficients of a device, read from data/calibrations; a device without a file uses its family's defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost.call import Call, Coef, Family
from ridgeline.cost.unmeasured.architectures import STRANGERS, families_of
from ridgeline.cost.unmeasured.related_device import related_families
from ridgeline.errors import CalibrationError
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.resources import data_dir

TWINS = {"fp16": ("bf16",), "bf16": ("fp16",)}
"""Types that run on the same units at the same rate: one speaks for the other where that was not measured."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted for one device: coefficients by family, host costs, power, and how far predictions miss."""

    device: str
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host: Coef = field(default_factory=dict)
    power: Coef = field(default_factory=dict)
    intervals: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    basis: Basis = Basis.FITTED  # of results that use these coefficients; worse when fitted on another device

    def coef(self, family: Family, call: Call) -> tuple[Coef, Basis]:
        """Coefficients for a call: the family's defaults, replaced where this device was fitted."""
        found, basis = self.entry(family.name, call.dtype), self.basis
        if found is None:
            found, basis = self.entry(family.name, *TWINS.get(call.dtype, ())), max(basis, Basis.DATASHEET)
        return (family.defaults if found is None else {**family.defaults, **found["coef"]}), basis

    def entry(self, family: str, *keys: str) -> Mapping[str, Any] | None:
        """What was fitted for a family: under the first of ``keys`` that is known, else for all of its calls."""
        entries = self.families.get(family, {})
        for key in (*keys, "all"):
            if key in entries:
                found: Mapping[str, Any] = entries[key]
                return found
        return None

    def width(self, entry: Mapping[str, Any] | None) -> float | None:
        """log half-width that held 90 % of the held-out rows of an entry, where the fit recorded it."""
        quantiles = (entry or {}).get("heldout", {}).get("log_quantiles")
        return max(-quantiles["q05"], quantiles["q95"]) * 1.05 if quantiles else None

    def unseen_width(self, entry: Mapping[str, Any] | None, family: str, dtype: str) -> float | None:
        """The same of an entry that was judged on architectures left out: another device needs no widening."""
        found = entry or self.entry(family, *TWINS.get(dtype, ())) or {}
        return found["unseen"]["width"] if "unseen" in found else None


FOLDER = "RIDGELINE_CALIBRATIONS"


@lru_cache(maxsize=64)
def _load(name: str) -> Calibration | None:
    """Your own calibration (in the folder ``RIDGELINE_CALIBRATIONS`` names) before the one that ships."""
    folders = [Path(os.environ[FOLDER])] if os.environ.get(FOLDER) else []
    paths = [folder / f"{name}.json" for folder in (*folders, data_dir() / "calibrations")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    try:
        raw = json.loads(path.read_text())
        return Calibration(
            raw["device"],
            raw.get("families", {}),
            raw.get("host", {}),
            raw.get("power", {}),
            raw.get("intervals", {}),
            raw.get("source", ""),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"calibration file {path.name} is malformed ({error}): rerun `ridgeline calibrate`"
        ) from None


SIBLINGS = {
    "hopper": "h100-sxm",
    "blackwell": "b200",
    "ampere": "a100-sxm-80gb",
    "ada": "l40s",
}
"""Whose measured behavior stands in for devices of the same architecture that nobody measured."""


def calibration_of(device: Device) -> Calibration:
    """The device's own calibration, its parent's for an imagined device, a sibling's, or what architectures share."""
    own = None if device.is_imagined else _load(device.name)
    if own is not None:
        return own
    parent = _load(device.parent) if device.parent else None
    if parent is not None:
        return replace(parent, basis=Basis.ASSUMED)
    basis = Basis.ASSUMED if device.parent else Basis.DATASHEET
    if device.arch in STRANGERS:
        return Calibration("", families_of(device), basis=basis)
    donor = SIBLINGS.get(device.arch)
    sibling = _load(donor) if donor else None
    if donor is None or sibling is None:
        return Calibration("", basis=basis)
    return replace(sibling, families=related_families(sibling.families, device_named(donor), device), basis=basis)
