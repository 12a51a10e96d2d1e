"""Device files: one TOML file a device, every number a pair of a value with its unit and the source it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.basis import Basis
from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import GraphError, HardwareError, nearest
from ridgeline.hardware.device import LINKS, MEMORIES, UNITS, Device, Identity, Provenance, assemble
from ridgeline.hardware.quantity import BANDWIDTH, BYTES, CLOCK, COUNT, POWER, PRICE, RATE, Dimension

KINDS = ("gpu", "cpu", "tpu", "accelerator")
_TEXTS = ("title", "vendor", "arch", "kind")
_TABLES = ("sources", "chip", *UNITS, "memory", "links")
_Schema = Mapping[str, tuple[str, Dimension]]
_CHIP: _Schema = {
    "cores": ("num_cores", COUNT),
    "boost_clock": ("boost_hz", CLOCK),
    "base_clock": ("base_hz", CLOCK),
    "tensor_clock": ("tensor_hz", CLOCK),
    "tdp": ("tdp_w", POWER),
    "idle": ("idle_w", POWER),
    "price_per_hour": ("price_usd_per_hour", PRICE),
}
_MEMORY: _Schema = {"capacity": ("capacity_bytes", BYTES), "bandwidth": ("bandwidth_bytes_per_s", BANDWIDTH)}
_LINK: _Schema = {"bandwidth": ("bandwidth_bytes_per_s", BANDWIDTH), "domain_size": ("domain_size", COUNT)}


@dataclass(frozen=True, slots=True)
class _Number:
    """One entry of a file on its way into the device."""

    field: str
    value: float
    provenance: Provenance


def load_device(path: Path) -> Device:
    """The device that ``path`` describes, or an error that names the file, the field and the fix."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path.name}: not valid TOML: {error}; fix the line it names") from error
    return _Reader(path.name, tables).device()


class _Reader:
    """Reads one parsed file; keeps its name and sources for the complaints."""

    def __init__(self, file: str, tables: Mapping[str, Any]) -> None:
        self._file = file
        self._tables = tables
        self._only(tables, (*_TEXTS, "release_year", "price_date", *_TABLES), "")
        self._sources = {key: self._source(key, entry) for key, entry in self._table(tables, "sources").items()}

    def device(self) -> Device:
        found = {number.field: number for number in self._numbers()}
        if "tensor_hz" not in found:  # the common case: peaks are stated at the boost clock
            boost = found["boost_hz"]
            found["tensor_hz"] = _Number("tensor_hz", boost.value, boost.provenance)
        if "vector.fp32" not in found:
            raise self._error("vector.fp32", 'is missing; add a table [vector] with fp32 = ["67TFLOP/s", "SOURCE"]')
        numbers = {field: number.value for field, number in found.items()}
        return assemble(self._identity(), numbers, {field: number.provenance for field, number in found.items()})

    def _numbers(self) -> Iterator[_Number]:
        tables = self._tables
        yield from self._fields(self._table(tables, "chip"), _CHIP, "chip", "")
        for unit in UNITS:
            yield from self._peaks(unit, tables.get(unit, {}))
        memory = self._table(tables, "memory")
        self._only(memory, MEMORIES, "memory.")
        for name in MEMORIES:
            yield from self._fields(self._table(memory, name, "memory."), _MEMORY, f"memory.{name}", f"{name}.", "kind")
        links = tables.get("links", {})
        self._only(links, LINKS, "links.")
        for name, link in links.items():
            yield from self._fields(link, _LINK, f"links.{name}", f"{name}.", "kind")

    def _fields(
        self, table: Mapping[str, Any], schema: _Schema, where: str, prefix: str, *texts: str
    ) -> Iterator[_Number]:
        self._only(table, (*schema, *texts), f"{where}.")
        for key, (field, dimension) in schema.items():
            if key in table:
                yield self._number(table[key], dimension, f"{where}.{key}", prefix + field)
            elif key not in {"tensor_clock"}:
                raise self._error(f"{where}.{key}", f'is missing; add {key} = ["{dimension.example}", "SOURCE"]')

    def _peaks(self, unit: str, table: Mapping[str, Any]) -> Iterator[_Number]:
        for key, entry in table.items():
            try:
                known = dtype_named(key).name == key
            except GraphError as error:
                raise self._error(f"{unit}.{key}", str(error)) from error
            if not known:
                raise self._error(f"{unit}.{key}", f"write the dtype as {dtype_named(key).name!r}")
            yield self._number(entry, RATE, f"{unit}.{key}", f"{unit}.{key}")

    def _number(self, entry: object, dimension: Dimension, where: str, field: str) -> _Number:
        if not isinstance(entry, list) or len(entry) != 2:
            name = where.rpartition(".")[2]
            raise self._error(where, f'a number needs its source: write {name} = ["{dimension.example}", "SOURCE"]')
        value, key = entry
        if key not in self._sources:
            raise self._error(where, f"source {key!r} is not in [sources]{nearest(str(key), self._sources)}")
        return _Number(field, dimension.read(value, f"{self._file}: {where}", unit_required=True), self._sources[key])

    def _source(self, key: str, entry: object) -> Provenance:
        match entry:
            case [str(basis), str(text)] if basis.upper() in Basis.__members__ and text.strip():
                return Provenance(Basis.parse(basis), text)
        bases = "|".join(str(basis) for basis in Basis)
        raise self._error(f"sources.{key}", f'must be a pair such as ["datasheet", "who says so"]; a basis is {bases}')

    def _identity(self) -> Identity:
        tables, links = self._tables, self._tables.get("links", {})
        title, vendor, arch, kind = (self._text(tables, key) for key in _TEXTS)
        if kind not in KINDS:
            raise self._error("kind", f"{kind!r} is not one of {', '.join(KINDS)}")
        year = tables.get("release_year")
        if type(year) is not int or not 2000 <= year <= 2100:
            raise self._error("release_year", f"must be a year such as 2024, found {year!r}")
        return Identity(
            name=self._file.removesuffix(".toml"), title=title, vendor=vendor, arch=arch, kind=kind, release_year=year,
            price_date=self._text(tables, "price_date"),
            memory_kinds={name: self._text(tables["memory"][name], "kind", f"memory.{name}.") for name in MEMORIES},
            link_kinds={name: self._text(link, "kind", f"links.{name}.") for name, link in links.items()},
        )  # fmt: skip

    def _text(self, table: Mapping[str, Any], key: str, where: str = "") -> str:
        text = table.get(key)
        if not isinstance(text, str) or not text.strip():
            raise self._error(where + key, f'must be text, such as {key} = "…", found {text!r}')
        return text

    def _table(self, tables: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
        table = tables.get(key)
        if not isinstance(table, dict):
            raise self._error(where + key, f"is missing; add a table [{where}{key}]")
        return table

    def _only(self, table: object, known: tuple[str, ...], where: str) -> None:
        if not isinstance(table, Mapping):
            raise self._error(where.removesuffix("."), f"must be a table, found {table!r}")
        for key in table:
            if key not in known:
                raise self._error(f"{where}{key}", f"is not a field of a device file{nearest(key, known)}")

    def _error(self, field: str, complaint: str) -> HardwareError:
        return HardwareError(f"{self._file}: {field}: {complaint}")
