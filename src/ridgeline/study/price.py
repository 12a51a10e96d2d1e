"""What a chip costs: die area, yield, bill of materials, dollars an hour and carbon, each number with its interval.

Every function takes numbers or arrays: of one device under many draws of the assumptions, or of many devices under
the stated ones. Assumptions are data (`data/costs`), each with interval, basis, date and source.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, nearest
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.resources import data_dir

PRICED_AS = ("vendor-price", "cost-plus", "internal")
DRAWS = 2048
HOURS_A_YEAR = 8766.0


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that was assumed, with its 90 % interval and where it comes from."""

    name: str
    value: float
    low: float
    high: float
    basis: str
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Die:
    """What is on a device's silicon: all cores and caches, enabled or not."""

    name: str
    node: str
    dies: int
    cores: float
    l2_mb: float
    stacks: float
    registers_kb: float
    l1_kb: float
    published_mm2: float | None
    source: str
    vendor: str = "nvidia"
    bus_bits: float = 0.0
    special: Mapping[str, float] | None = None  # measured areas of this die that take the place of the common ones


@cache
def assumptions() -> dict[str, Assumption]:
    """Every assumption by name; those of a process node as ``n5.wafer_usd``."""
    table = tomllib.loads((data_dir() / "costs" / "assumptions.toml").read_text(encoding="utf-8"))
    found = dict[str, Assumption]()
    for section, entries in table.items():
        for name, entry in entries.items():
            if section == "node":
                found |= {f"{name}.{key}": Assumption(f"{name}.{key}", *numbers) for key, numbers in entry.items()}
            else:
                found[name] = Assumption(name, *entry)
    return found


@cache
def assumption_names() -> tuple[str, ...]:
    """Names that a study may vary and a person may set; of a node's numbers without the node."""
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in assumptions()))


@cache
def dies() -> dict[str, Die]:
    """Dies by the device that has them."""
    table = tomllib.loads((data_dir() / "costs" / "dies.toml").read_text(encoding="utf-8"))
    found = dict[str, Die]()
    for name, entry in table.items():
        special = {key: float(entry[key]) for key in ("hbm_phy_mm2", "hbm_control_mtr", "link_mm2", "other_mm2")
                   if key in entry}  # fmt: skip
        area, source = entry["published_mm2"]
        die = Die(name, entry["node"], entry["dies"], entry["cores"], entry["l2_mb"], entry["stacks"],
                  entry["registers_kb"], entry["l1_kb"], area, source, entry.get("vendor", "nvidia"),
                  entry.get("bus_bits", 0.0), special)  # fmt: skip
        found |= dict.fromkeys(entry["devices"], die)
    return found


def die_of(device: Device) -> Die:
    """The die of a device or of the one it was imagined from; of others, one guessed from its year and numbers."""
    found = dies().get(device.parent or device.name)
    if found is not None:
        return found
    node = "n12" if device.release_year < 2020 else "n7" if device.release_year < 2022 else "n5"
    stacks = math.ceil(device.dram.capacity_bytes / 24e9) if device.dram.kind.upper().startswith("HBM") else 0
    vendor = "amd" if device.vendor.lower() == "amd" else "nvidia"
    return Die("guessed", node, 1, device.num_cores * 1.08, device.l2.capacity_bytes / 2**20 * 1.08, stacks,
               512.0 if vendor == "amd" else 256.0, device.shared.capacity_bytes / 1024, None,
               "guessed from year, cores and memory", vendor, 0.0 if stacks else 384.0)  # fmt: skip


class Bill:
    """The price of a device, or of many with their ``numbers`` as arrays, under ``given`` values of assumptions."""

    def __init__(self, device: Device, numbers: Mapping[str, Any] | None = None, given: Mapping[str, Any] | None = None,
                 as_: str = "vendor-price") -> None:  # fmt: skip
        if as_ not in PRICED_AS:
            raise InputError(f"a chip is not priced as {as_!r}{nearest(as_, PRICED_AS)}")
        self.device, self.die, self.as_ = device, die_of(device), as_
        self.numbers: Mapping[str, Any] = numbers or device.numbers()
        self.given = dict(given or {})
        for name in self.given:
            if name not in assumption_names() and name not in assumptions():
                raise InputError(f"no assumption {name!r}{nearest(name, assumption_names())}")
        real = device_named(device.parent) if device.parent else device
        self.base = real.numbers()

    def of(self, name: str) -> Any:
        """An assumption: as given, else its value."""
        if name in self.given:
            return self.given[name]
        plain = name.rpartition(".")[2]
        return self.given[plain] if plain in self.given else assumptions()[name].value

    def node(self, name: str) -> Any:
        return self.of(f"{self.die.node}.{name}")

    def _part(self, name: str) -> Any:
        return (self.die.special or {}).get(name, self.of(name))

    def _scaled(self, field: str) -> Any:
        """How many times the real device's number this one has."""
        return self.numbers[field] / self.base[field]

    @property
    def cores(self) -> Any:
        """Cores on the silicon, spares included in the proportion of the real device."""
        return np.round(self.die.cores * self._scaled("num_cores"))

    @property
    def stacks(self) -> Any:
        """Stacks of HBM: as the bandwidth asks, or the capacity where that asks for more."""
        bandwidth, capacity = self._scaled("dram.bandwidth_bytes_per_s"), self._scaled("dram.capacity_bytes")
        return self.die.stacks * np.maximum(bandwidth, np.minimum(capacity, 1.0))

    def _fma(self, bits: int) -> Any:
        """Transistors in millions of a multiply-add unit by its mantissa's bits."""
        return self.of("fma64_mtr") * (bits / 52) ** 2

    def parts_mm2(self) -> dict[str, Any]:
        """Area of all dies together by part."""
        per_clock = {
            name: self.numbers[name] / (2 * self.numbers["num_cores"] * self.numbers["boost_hz"])
            for name in ("tensor.fp16", "tensor.fp64", "vector.fp64", "vector.fp32")
            if name in self.numbers
        }
        none = 0.0 * self.numbers["num_cores"]
        double = np.maximum(per_clock.get("tensor.fp64", none), per_clock.get("vector.fp64", none))
        lanes = per_clock["vector.fp32"]
        control = self.of(f"lane_control_mtr_{self.die.vendor}")
        schedulers = 128 if self.die.vendor == "nvidia" else 64  # lanes that are scheduled in a core
        logic = (per_clock.get("tensor.fp16", none) * self._fma(10) + double * self._fma(52)
                 + lanes * self._fma(23) + 64 * self.of("int32_mtr") + schedulers * control)  # fmt: skip
        density, bit = self.node("mtr_per_mm2"), self.node("bit_mm2")
        l1_kb = self.die.l1_kb * self._scaled("shared.capacity_bytes")
        core_sram = (l1_kb + self.die.registers_kb) * 8192 * bit / self.of("core_sram_frac")
        stacks, l2_mb = self.stacks, self.die.l2_mb * self._scaled("l2.capacity_bytes")
        link = self.numbers.get("scale_up.bandwidth_bytes_per_s", none) / 1e9
        special = self.die.special or {}
        link_mm2 = (
            special["link_mm2"] * self._scaled("scale_up.bandwidth_bytes_per_s")
            if "link_mm2" in special
            else link * self.of("link_mm2_per_gb_s")
        )
        gddr = self.die.bus_bits / 128 * self._scaled("dram.bandwidth_bytes_per_s") * self.of("gddr_phy_mm2")
        return {
            "cores": self.cores * (logic / density + core_sram),
            "interconnect": self.cores * self.of(f"crossbar_mtr_{self.die.vendor}") / density,
            "L2": l2_mb * 2**23 * bit / self.node("sram_frac"),
            "memory interface": stacks * (self._part("hbm_phy_mm2") + self._part("hbm_control_mtr") / density) + gddr,
            "links": link_mm2 + 16 * self.of("pcie_mm2_per_lane"),
            "other": self._part("other_mm2") * (1.0 if self.die.dies == 1 or "other_mm2" in special else 1.5),
        }  # fmt: skip

    def area_mm2(self) -> Any:
        """Area of all dies together: the published one, and what the parts change from it."""
        total: Any = sum(self.parts_mm2().values())
        if self.die.published_mm2 is not None:
            real = sum(Bill(self.device, self.base, self.given, self.as_).parts_mm2().values())
            total = self.die.published_mm2 * total / real
        return np.where(self.num_dies(total) > self.die.dies, total * (1 + self.of("die_to_die_frac")), total)

    def num_dies(self, total_mm2: Any) -> Any:
        """As many as the real device has, and more where one would be larger than a lithography field."""
        return np.maximum(self.die.dies, np.ceil(total_mm2 / self.of("reticle_mm2")))

    def die_yield(self, area_mm2: Any, num_dies: Any) -> Any:
        """Share of dies that work with as many bad cores as there are spare; caches are repaired.

        Defects are negative binomial. One in a core costs the core, one in a cache is repaired, any other the die.
        """
        parts = self.parts_mm2()
        total, cores = sum(parts.values()), parts["cores"]
        spare = np.maximum(0, np.floor((self.cores - self.numbers["num_cores"]) / num_dies))
        density, alpha = self.of("defects_per_cm2") / 100.0, self.of("cluster_alpha")
        die = area_mm2 / num_dies
        in_cores, elsewhere = density * die * cores / total, density * die * (1 - (cores + parts["L2"]) / total)
        whole = alpha + in_cores + elsewhere
        found = np.zeros(np.broadcast(np.asarray(in_cores), np.asarray(spare)).shape)
        term: Any = 1.0
        for bad in range(int(np.max(spare)) + 1):
            found = found + np.where(bad <= spare, term, 0.0)
            term = term * (alpha + bad) / (bad + 1) * in_cores / whole
        return found * (alpha / whole) ** alpha

    def dies_a_wafer(self, die_mm2: Any) -> Any:
        """Whole dies on a wafer of 300 mm."""
        return math.pi * 150.0**2 / die_mm2 - math.pi * 300.0 / np.sqrt(2 * die_mm2)

    def silicon_usd(self) -> Any:
        area = self.area_mm2()
        num = self.num_dies(area)
        good = self.dies_a_wafer(area / num) * self.die_yield(area, num)
        return num * self.node("wafer_usd") / good

    def materials_usd(self) -> dict[str, Any]:
        """The bill of materials by item."""
        capacity_gb = self.numbers["dram.capacity_bytes"] / 1e9
        silicon = self.silicon_usd()
        if self.die.stacks:
            memory = capacity_gb * self.of("hbm_usd_per_gb")
            carried = self.area_mm2() + self.stacks * self.of("hbm_stack_mm2")
            package = carried * self.of("interposer_margin") * self.of("interposer_usd_per_mm2")
        else:
            memory, package = capacity_gb * self.of("other_dram_usd_per_gb"), 60.0 + 0.0 * silicon
        together = silicon + memory + package if self.die.stacks else silicon + package
        lost = together * (1 / (self.of("assembly_yield_frac") if self.die.stacks else 0.98) - 1)
        return {"logic": silicon, "memory": memory, "package": package, "lost in assembly": lost,
                "board and test": self.of("board_and_test_usd") + 0.0 * silicon}  # fmt: skip

    def unit_usd(self) -> Any:
        """What a buyer pays."""
        margin = {"vendor-price": self.of("margin"), "cost-plus": self.of("cost_plus_margin"), "internal": 0.0}
        return sum(self.materials_usd().values()) / (1 - margin[self.as_])

    def hour_usd(self) -> dict[str, Any]:
        """Dollars for an hour that is used, by item."""
        device = self.unit_usd()
        system = self.of("server_usd_per_device") + 0.0 * device
        network = (device + system) * self.of("network_frac")
        hours = self.of("life_years") * HOURS_A_YEAR * self.of("utilization")
        kept = 1 - self.of("residual_frac") + self.of("capital_per_year_frac") * self.of("life_years") / 2
        kw = self.numbers["tdp_w"] / 1000 * (1 + self.of("server_power_frac"))
        used = self.of("utilization")
        return {
            "device": device * kept / hours,
            "server and network": (system + network) * kept / hours,
            "electricity": kw * self.of("pue") * self.of("electricity_usd_per_kwh"),
            "facility": kw * self.of("facility_usd_per_kw_month") * 12 / HOURS_A_YEAR / used,
            "people": self.of("people_usd_per_device_hour") + 0.0 * device,
        }

    def embodied_kg(self) -> dict[str, Any]:
        """Kilograms of CO2-equivalent that making it and its share of a server emitted, by item."""
        area = self.area_mm2()
        num = self.num_dies(area)
        wafers_cm2 = area / 100 / self.die_yield(area, num)
        memory = self.of("hbm_kg_per_gb") if self.die.stacks else assumptions()["hbm_kg_per_gb"].low
        return {
            "logic": wafers_cm2 * self.node("embodied_kg_per_cm2"),
            "memory": self.numbers["dram.capacity_bytes"] / 1e9 * memory,
            "package and board": self.of("package_kg") + 0.0 * area,
            "share of the server": self.of("server_kg_per_device") + 0.0 * area,
        }

    def grams_an_hour(self, power_w: Any = None) -> dict[str, Any]:
        """Grams of CO2-equivalent for an hour that is used: embodied, spread over its life, and operation."""
        kw = (self.numbers["tdp_w"] if power_w is None else power_w) / 1000 * (1 + self.of("server_power_frac"))
        hours = self.of("life_years") * HOURS_A_YEAR * self.of("utilization")
        return {"embodied": sum(self.embodied_kg().values()) * 1000 / hours,
                "operation": kw * self.of("pue") * self.of("carbon_g_per_kwh")}  # fmt: skip

    def totals(self) -> dict[str, Any]:
        """The figures that stand for the whole."""
        area = self.area_mm2()
        num = self.num_dies(area)
        return {
            "area_mm2": area, "yield_frac": self.die_yield(area, num),
            "materials_usd": sum(self.materials_usd().values()), "unit_usd": self.unit_usd(),
            "usd_per_hour": sum(self.hour_usd().values()),
            "embodied_kg": sum(self.embodied_kg().values()), "g_per_hour": sum(self.grams_an_hour().values()),
        }  # fmt: skip


def drawn(device: Device, given: Mapping[str, Any] | None = None, as_: str = "vendor-price", seed: int = 0) -> Bill:
    """The bill under draws of every assumption that is not given, from triangles with 90 % between low and high."""
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    fixed = dict(given or {})
    for name, found in assumptions().items():
        unit = draw.random(DRAWS)  # drawn for every name, so that setting one moves no other
        if name not in fixed and name.rpartition(".")[2] not in fixed:
            values[name] = _triangular(unit, found)
    return Bill(device, {k: np.float64(v) for k, v in device.numbers().items()}, {**values, **fixed}, as_)


def _triangular(unit: NDArray[np.float64], found: Assumption) -> NDArray[np.float64]:
    """A triangle whose middle 90 % lies about between low and high."""
    low, high, mode = found.low, found.high, found.value
    if high <= low:
        return np.full_like(unit, mode)
    low, high = mode - (mode - low) * 1.25, mode + (high - mode) * 1.25
    low = max(low, 0.05 * mode)  # nothing here is negative
    cut = (mode - low) / (high - low)
    return np.where(unit < cut, low + np.sqrt(unit * (high - low) * (mode - low)),
                    high - np.sqrt((1 - unit) * (high - low) * (high - mode)))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its 90 % interval."""

    value: float
    low: float
    high: float


def figures(values: Mapping[str, Any], draws: Mapping[str, Any]) -> dict[str, Figure]:
    """Each value with the interval of its draws."""
    return {
        name: Figure(float(value), *(float(v) for v in np.percentile(np.broadcast_to(draws[name], DRAWS), (5, 95))))
        for name, value in values.items()
    }


def matters(device: Device, of: str, given: Mapping[str, Any] | None = None, as_: str = "vendor-price") -> list[
    tuple[Assumption, float, float]
]:  # fmt: skip
    """How far a total moves when one assumption goes from its low to its high end, the largest move first."""
    fixed, found = dict(given or {}), list[tuple[Assumption, float, float]]()
    die = die_of(device)
    for name, assumption in assumptions().items():
        if name in fixed or name.rpartition(".")[2] in fixed or ("." in name and not name.startswith(die.node)):
            continue
        ends = [float(Bill(device, None, {**fixed, name: end}, as_).totals()[of])
                for end in (assumption.low, assumption.high)]  # fmt: skip
        found.append((assumption, ends[0], ends[1]))
    return sorted(found, key=lambda row: -abs(row[2] - row[1]))
