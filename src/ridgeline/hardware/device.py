"""A device as a value: peaks, memories, links, power and price, each number with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ridgeline.basis import Basis, worst
from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import HardwareError, nearest
from ridgeline.hardware.override import change
from ridgeline.hardware.substitute import substitute

UNITS = ("tensor", "vector")
MEMORIES = ("dram", "l2", "shared")
LINKS = ("scale_up", "pcie", "scale_out")


class Provenance(NamedTuple):
    """How far a number can be trusted, and who says so."""

    basis: Basis
    source: str


class Peak(NamedTuple):
    """The rate of a unit on a dtype, and the unit and dtype that really do the work when a substitute stands in."""

    flops_per_s: float
    basis: Basis
    source: str
    unit: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """One level of memory; capacity and bandwidth are of one instance (``shared`` has one on each core)."""

    name: str
    kind: str
    capacity_bytes: float
    bandwidth_bytes_per_s: float
    num_instances: int = 1

    @property
    def total_capacity_bytes(self) -> float:
        return self.capacity_bytes * self.num_instances

    @property
    def total_bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.num_instances


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way out of the device: bytes per second in each direction, and how many devices it joins."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    domain_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a kernel runs on. Peaks are dense, never the doubled figure for structured sparsity."""

    name: str
    title: str
    vendor: str
    arch: str
    kind: str
    release_year: int
    num_cores: int
    boost_hz: float
    base_hz: float
    tensor_hz: float  # the clock at which the tensor peaks are stated; on Hopper below the boost clock
    tdp_w: float
    idle_w: float
    price_usd_per_hour: float
    price_date: str
    dram: MemoryLevel
    l2: MemoryLevel  # the last level of on-chip memory that all cores share
    shared: MemoryLevel  # the memory of one core that a kernel blocks for
    peaks: Mapping[tuple[str, str], float] = field(hash=False, repr=False)
    links: Mapping[str, Link] = field(hash=False, repr=False)
    provenances: Mapping[str, Provenance] = field(hash=False, repr=False)
    parent: str | None = None
    _resolved: dict[tuple[str, str], Peak] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def basis(self) -> Basis:
        """The worst basis of any number of the device."""
        return worst(provenance.basis for provenance in self.provenances.values())

    @property
    def is_imagined(self) -> bool:
        return self.parent is not None

    def basis_of(self, *fields: str) -> Basis:
        """The worst basis of the fields a result was computed from."""
        return worst(self.provenance(name).basis for name in fields)

    def provenance(self, field: str) -> Provenance:
        """Where ``field`` (``tdp_w``, ``dram.bandwidth_bytes_per_s``, ``tensor.bf16``, …) comes from."""
        field = field.removeprefix("peaks.").removeprefix("links.").removeprefix("memory.")
        found = self.provenances.get(field)
        if found is not None:
            return found
        unit, _, name = field.partition(".")
        if unit in UNITS and name:
            peak = self.peak(unit, name)
            return Provenance(peak.basis, peak.source)
        raise HardwareError(f"{self.name} has no number {field!r}{nearest(field, self.provenances)}")

    def peak_flops_per_s(self, unit: str, dtype: str) -> float:
        """Dense operations per second of ``unit`` (``tensor`` or ``vector``) on ``dtype``; an FMA counts as two."""
        return self.peak(unit, dtype).flops_per_s

    def peak(self, unit: str, dtype: str) -> Peak:
        """The peak and its basis; what stands in for a missing one is in ``substitute.py`` and in the guide."""
        found = self._resolved.get((unit, dtype))
        if found is None:
            found = self._resolved[unit, dtype] = self._resolve(unit, dtype_named(dtype).name)
        return found

    def _resolve(self, unit: str, dtype: str) -> Peak:
        if unit not in UNITS:
            raise HardwareError(f"unknown unit {unit!r}: a peak belongs to 'tensor' (matrix) or 'vector'")
        if (unit, dtype) in self.peaks:
            return Peak(self.peaks[unit, dtype], *self.provenances[f"{unit}.{dtype}"], unit, dtype)
        stand_in = substitute(unit, dtype, self.peaks)
        if stand_in is None:
            has = ", ".join(f"{u}.{d}" for u, d in self.peaks)
            raise HardwareError(
                f"{self.name} cannot compute {dtype} on its {unit} units; it has {has}."
                f" Choose one of these dtypes, or imagine the peak: device('{self.name} {unit}.{dtype}=100TFLOP/s')"
            )
        rate = self.peaks[stand_in.unit, stand_in.dtype] * stand_in.factor
        source = f"no {unit} {dtype} peak: {stand_in.why}"
        return Peak(rate, Basis.ASSUMED, source, stand_in.unit, stand_in.dtype)

    def link(self, name: str) -> Link:
        """The link called ``name``: ``scale_up``, ``pcie`` or ``scale_out``."""
        if name not in self.links:
            has = ", ".join(self.links) or "none"
            raise HardwareError(f"{self.name} has no {name!r} link; it has {has}. Add one to its file in data/devices/")
        return self.links[name]

    def numbers(self) -> dict[str, float]:
        """Every number by its dotted name, the same names ``provenance`` answers to."""
        found: dict[str, float] = {
            name: getattr(self, name)
            for name in ("num_cores", "boost_hz", "base_hz", "tensor_hz", "tdp_w", "idle_w", "price_usd_per_hour")
        }
        found |= {f"{unit}.{dtype}": rate for (unit, dtype), rate in self.peaks.items()}
        for level in (self.dram, self.l2, self.shared):
            found[f"{level.name}.capacity_bytes"] = level.capacity_bytes
            found[f"{level.name}.bandwidth_bytes_per_s"] = level.bandwidth_bytes_per_s
        for link in self.links.values():
            found[f"{link.name}.bandwidth_bytes_per_s"] = link.bandwidth_bytes_per_s
            found[f"{link.name}.domain_size"] = link.domain_size
        return found

    def override(self, **changes: str | float) -> Device:
        """This device with some numbers changed: ``override(hbm_bandwidth="2x", sms=160)``."""
        made = change(self.name, self.numbers(), changes, ";" if self.is_imagined else "")
        if not made.reasons:
            return self
        imagined = {field: Provenance(Basis.ASSUMED, reason) for field, reason in made.reasons.items()}
        # The names of `device`, to assemble a changed one under
        identity = replace(
            Identity(
                name=self.name,
                title=self.title,
                vendor=self.vendor,
                arch=self.arch,
                kind=self.kind,
                release_year=self.release_year,
                price_date=self.price_date,
                parent=self.parent,
                memory_kinds={level.name: level.kind for level in (self.dram, self.l2, self.shared)},
                link_kinds={link.name: link.kind for link in self.links.values()},
            ),
            name=made.name,
            parent=self.parent or self.name,
        )
        return assemble(identity, made.numbers, {**self.provenances, **imagined})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a device is called, apart from its numbers."""

    name: str
    title: str
    vendor: str
    arch: str
    kind: str
    release_year: int
    price_date: str
    memory_kinds: Mapping[str, str]
    link_kinds: Mapping[str, str]
    parent: str | None = None


def assemble(identity: Identity, numbers: Mapping[str, float], provenances: Mapping[str, Provenance]) -> Device:
    """A device from its flat numbers; the inverse of ``Device.numbers``."""
    num_cores = int(numbers["num_cores"])
    levels = {
        name: MemoryLevel(
            name=name,
            kind=identity.memory_kinds[name],
            num_instances=num_cores if name == "shared" else 1,
            capacity_bytes=numbers[f"{name}.capacity_bytes"],
            bandwidth_bytes_per_s=numbers[f"{name}.bandwidth_bytes_per_s"],
        )
        for name in MEMORIES
    }
    return Device(
        name=identity.name, title=identity.title, vendor=identity.vendor, arch=identity.arch, kind=identity.kind,
        release_year=identity.release_year, price_date=identity.price_date, parent=identity.parent,
        num_cores=num_cores, boost_hz=numbers["boost_hz"], base_hz=numbers["base_hz"], tensor_hz=numbers["tensor_hz"],
        tdp_w=numbers["tdp_w"], idle_w=numbers["idle_w"], price_usd_per_hour=numbers["price_usd_per_hour"],
        dram=levels["dram"], l2=levels["l2"], shared=levels["shared"],
        peaks=_peaks(numbers), links={name: _link(name, kind, numbers) for name, kind in identity.link_kinds.items()},
        provenances=provenances,
    )  # fmt: skip


def _link(name: str, kind: str, numbers: Mapping[str, float]) -> Link:
    return Link(
        name=name, kind=kind, bandwidth_bytes_per_s=numbers[f"{name}.bandwidth_bytes_per_s"],
        domain_size=int(numbers[f"{name}.domain_size"]),
    )  # fmt: skip


def _peaks(numbers: Mapping[str, float]) -> dict[tuple[str, str], float]:
    split = ((name.partition("."), rate) for name, rate in numbers.items())
    return {(unit, dtype): rate for (unit, _, dtype), rate in split if unit in UNITS}
