"""System files: one TOML file a kind of host or pod, every number a pair of a value with its unit and its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError, nearest
from ridgeline.hardware.cluster import TOPOLOGIES, Cluster, Host, ScaleOut, ScaleUp
from ridgeline.hardware.device import Device, Provenance
from ridgeline.hardware.quantity import BANDWIDTH, COUNT, POWER, Dimension

LATENCY = Dimension("a latency in seconds", "2us", ("s",), 1e-9, 1.0)
OVERSUBSCRIPTION = Dimension("an oversubscription of 1 or more", "2", (), 1.0, 1e3)
FLAG = Dimension("0 or 1", "1", (), 0, 1, whole=True)
NUM_NICS = Dimension("a count of NICs", "8", (), 0, 1e3, whole=True)

SCHEMA: Mapping[str, Mapping[str, tuple[str, Dimension]]] = {
    "host": {
        "devices": ("num_devices", COUNT),
        "cpu_sockets": ("num_cpu_sockets", COUNT),
        "pcie_generation": ("pcie_generation", COUNT),
        "power": ("power_w", POWER),
    },
    "scale_up": {
        "bandwidth": ("bandwidth_bytes_per_s", BANDWIDTH),
        "domain": ("domain_size", COUNT),
        "latency": ("latency_s", LATENCY),
        "reduces_in_switch": ("reduces_in_switch", FLAG),
    },
    "scale_out": {
        "nics": ("num_nics", NUM_NICS),
        "bandwidth": ("nic_bandwidth_bytes_per_s", BANDWIDTH),
        "latency": ("latency_s", LATENCY),
        "rails": ("num_rails", COUNT),
        "levels": ("num_levels", COUNT),
        "oversubscription": ("oversubscription", OVERSUBSCRIPTION),
        "reduces_in_switch": ("reduces_in_switch", FLAG),
    },
}
_TEXTS = ("title", "device")
_DIMENSION_OF = {f"{table}.{name}": dim for table, rows in SCHEMA.items() for name, dim in rows.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A kind of host or pod, before it is known how many there are."""

    name: str
    title: str
    device: str
    usual_for: tuple[str, ...]  # devices that are taken to sit in this system when only they are named
    counted_in: int  # devices that one of these means: 'dgx-h100*2' is 16 GPUs, 'gb200-nvl72*2' is 144
    scale_up_kind: str
    topology: str
    scale_out_kind: str
    numbers: Mapping[str, float]
    provenances: Mapping[str, Provenance]

    def cluster(self, name: str, device: Device, num_devices: int, parent: str | None = None) -> Cluster:
        """``num_devices`` of these as a cluster."""
        host, up, out = (
            {key: self.numbers[f"{table}.{key}"] for key, _ in rows.values()} for table, rows in SCHEMA.items()
        )
        return Cluster(
            name=name, title=self.title, system=self.name, device=device, num_devices=num_devices, parent=parent,
            host=Host(num_devices=int(host["num_devices"]), num_cpu_sockets=int(host["num_cpu_sockets"]),
                      pcie_generation=int(host["pcie_generation"]), power_w=host["power_w"]),
            scale_up=ScaleUp(kind=self.scale_up_kind, topology=self.topology, latency_s=up["latency_s"],
                             bandwidth_bytes_per_s=up["bandwidth_bytes_per_s"], domain_size=int(up["domain_size"]),
                             reduces_in_switch=bool(up["reduces_in_switch"])),
            scale_out=ScaleOut(kind=self.scale_out_kind, num_nics=int(out["num_nics"]), latency_s=out["latency_s"],
                               nic_bandwidth_bytes_per_s=out["nic_bandwidth_bytes_per_s"],
                               num_rails=int(out["num_rails"]), num_levels=int(out["num_levels"]),
                               oversubscription=out["oversubscription"],
                               reduces_in_switch=bool(out["reduces_in_switch"])),
            provenances=self.provenances,
        )  # fmt: skip

    def changed(self, changes: Mapping[str, tuple[float, str]], kinds: Mapping[str, str]) -> System:
        """This system with numbers (value, as written) and kinds replaced; what follows from them follows."""
        numbers = dict(self.numbers) | {name: value for name, (value, _) in changes.items()}
        if "scale_out.num_nics" in changes and "scale_out.num_rails" not in changes:
            numbers["scale_out.num_rails"] = max(1.0, numbers["scale_out.num_nics"])
        imagined = {name: Provenance(Basis.ASSUMED, f"imagined: {text}") for name, (_, text) in changes.items()}
        return replace(
            self, numbers=numbers, provenances={**self.provenances, **imagined},
            scale_up_kind=kinds.get("scale_up", self.scale_up_kind), topology=kinds.get("topology", self.topology),
            scale_out_kind=kinds.get("scale_out", self.scale_out_kind),
        )  # fmt: skip


def dimension_of(name: str) -> Dimension:
    return _DIMENSION_OF[name]


def load_system(path: Path) -> System:
    """The system that ``path`` describes, or an error that names the file, the field and the fix."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path.name}: not valid TOML: {error}; fix the line it names") from error
    return _Reader(path.name, tables).system()


class _Reader:
    """Reads one parsed file; keeps its name and sources for the complaints."""

    def __init__(self, file: str, tables: Mapping[str, Any]) -> None:
        self._file, self._tables = file, tables
        known = (*_TEXTS, "usual_for", "counted_in", "sources", *SCHEMA)
        for key in tables:
            if key not in known:
                raise self._error(key, f"is not a field of a cluster file{nearest(key, known)}")
        self._sources = {key: self._source(key, entry) for key, entry in tables.get("sources", {}).items()}

    def system(self) -> System:
        tables, found = self._tables, dict[str, tuple[float, Provenance]]()
        for table, rows in SCHEMA.items():
            self._table(table, tables.get(table), rows, found)
        numbers = {name: value for name, (value, _) in found.items()}
        title, device = (self._text(tables, key, key) for key in _TEXTS)
        topology = self._text(tables["scale_up"], "topology", "scale_up.topology")
        if topology not in TOPOLOGIES:
            raise self._error("scale_up.topology", f"{topology!r} is not one of {', '.join(TOPOLOGIES)}")
        return System(
            name=self._file.removesuffix(".toml"), title=title, device=device, topology=topology,
            usual_for=tuple(tables.get("usual_for", ())), numbers=numbers,
            counted_in=int(tables.get("counted_in", numbers["host.num_devices"])),
            scale_up_kind=self._text(tables["scale_up"], "kind", "scale_up.kind"),
            scale_out_kind=self._text(tables["scale_out"], "kind", "scale_out.kind"),
            provenances={name: provenance for name, (_, provenance) in found.items()},
        )  # fmt: skip

    def _table(
        self,
        table: str,
        entries: object,
        rows: Mapping[str, tuple[str, Dimension]],
        found: dict[str, tuple[float, Provenance]],
    ) -> None:
        if not isinstance(entries, Mapping):
            raise self._error(table, f"is missing; add a table [{table}]")
        for key in entries:
            if key not in rows and key not in ("kind", "topology"):
                raise self._error(f"{table}.{key}", f"is not a field of a cluster file{nearest(key, rows)}")
        for key, (name, dimension) in rows.items():
            if key not in entries:
                raise self._error(f"{table}.{key}", f'is missing; add {key} = ["{dimension.example}", "SOURCE"]')
            found[f"{table}.{name}"] = self._number(entries[key], dimension, f"{table}.{key}")

    def _number(self, entry: object, dimension: Dimension, where: str) -> tuple[float, Provenance]:
        match entry:
            case [value, str(key)] if key in self._sources:
                read = dimension.read(value, f"{self._file}: {where}", unit_required=True)
                return read, self._sources[key]
            case [_, key]:
                raise self._error(where, f"source {key!r} is not in [sources]{nearest(str(key), self._sources)}")
        raise self._error(where, f'a number needs its source: write ["{dimension.example}", "SOURCE"]')

    def _source(self, key: str, entry: object) -> Provenance:
        match entry:
            case [str(basis), str(text)] if basis.upper() in Basis.__members__ and text.strip():
                return Provenance(Basis.parse(basis), text)
        raise self._error(f"sources.{key}", 'must be a pair such as ["datasheet", "who says so"]')

    def _text(self, table: Mapping[str, Any], key: str, where: str) -> str:
        text = table.get(key)
        if not isinstance(text, str) or not text.strip():
            raise self._error(where, f'must be text, such as {key} = "…", found {text!r}')
        return text

    def _error(self, field: str, complaint: str) -> HardwareError:
        return HardwareError(f"{self._file}: {field}: {complaint}")
