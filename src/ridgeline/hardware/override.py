"""Devices that do not exist: a known one with some of its numbers changed, and everything that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import GraphError, HardwareError, nearest
from ridgeline.hardware.quantity import BANDWIDTH, BYTES, CLOCK, COUNT, POWER, PRICE, RATE, Dimension, factor_of

_SYNONYMS = {
    "num_cores": "num_cores sms sm cores cus cu num_sms",
    "boost_hz": "boost_hz clock boost boost_clock frequency",
    "base_hz": "base_hz base_clock",
    "tdp_w": "tdp_w tdp power power_limit",
    "idle_w": "idle_w idle idle_power",
    "price_usd_per_hour": "price_usd_per_hour price price_per_hour cost_per_hour",
    "dram.capacity_bytes": "memory hbm dram memory_capacity hbm_capacity dram_capacity vram",
    "dram.bandwidth_bytes_per_s": "hbm_bandwidth dram_bandwidth memory_bandwidth hbm_bw dram_bw mem_bw",
    "l2.capacity_bytes": "l2 llc l2_capacity llc_capacity l2_size cache",
    "l2.bandwidth_bytes_per_s": "l2_bandwidth llc_bandwidth l2_bw cache_bandwidth",
    "shared.capacity_bytes": "shared smem shared_memory lds l1 shared_capacity",
    "shared.bandwidth_bytes_per_s": "shared_bandwidth smem_bandwidth lds_bandwidth l1_bandwidth",
    "scale_up.bandwidth_bytes_per_s": "link link_bandwidth nvlink nvlink_bandwidth scale_up scale_up_bandwidth"
    " xgmi xgmi_bandwidth ici ici_bandwidth",
    "scale_up.domain_size": "link_domain nvlink_domain scale_up_domain domain_size",
    "pcie.bandwidth_bytes_per_s": "pcie pcie_bandwidth",
    "scale_out.bandwidth_bytes_per_s": "scale_out scale_out_bandwidth network network_bandwidth nic",
}
FIELD_OF = {synonym: field for field, words in _SYNONYMS.items() for synonym in (field, *words.split())}
_DIMENSIONS = {
    "num_cores": COUNT, "domain_size": COUNT, "boost_hz": CLOCK, "base_hz": CLOCK, "tdp_w": POWER, "idle_w": POWER,
    "price_usd_per_hour": PRICE, "capacity_bytes": BYTES, "bandwidth_bytes_per_s": BANDWIDTH,
}  # fmt: skip
# Besides every peak; what one core owns grows with the clock alone.
SCALES_WITH_CORES = ("l2.bandwidth_bytes_per_s",)


@dataclass(frozen=True, slots=True)
class Change:
    """The numbers of a device that does not exist, what to call it, and why each changed number changed."""

    name: str
    numbers: dict[str, float]
    reasons: dict[str, str]


def change(name: str, numbers: Mapping[str, float], wanted: Mapping[str, str | float], separator: str) -> Change:
    """The device ``name`` with what is ``wanted`` and all that follows from it; no reasons when nothing changes."""
    asked = _asked(name, numbers, wanted)
    changed = dict(numbers) | {field: value for field, (value, _) in asked.items()}
    _scale(numbers, changed, frozenset(asked))
    if changed == numbers:
        return Change(name, changed, {})
    new_name = f"{name}{separator} {' '.join(text for _, text in asked.values())}"
    # Refuse combinations that no device can have
    idle_w, tdp_w = changed["idle_w"], changed["tdp_w"]
    if idle_w >= tdp_w:
        raise HardwareError(
            f"{new_name}: idle power {idle_w:g} W must be below TDP {tdp_w:g} W; raise tdp= or lower idle="
        )
    if changed["l2.capacity_bytes"] >= changed["dram.capacity_bytes"]:
        raise HardwareError(f"{new_name}: the l2 would hold more than the whole memory; raise memory= or lower l2=")
    if changed["base_hz"] > changed["boost_hz"]:
        raise HardwareError(f"{new_name}: the base clock is above the boost clock; raise clock= or lower base_clock=")
    reasons = {field: f"imagined: {text}" for field, (_, text) in asked.items()}
    causes = " ".join(asked[field][1] for field in ("num_cores", "boost_hz") if field in asked)
    scaled = (field for field in changed if field not in asked and changed[field] != numbers[field])
    return Change(new_name, changed, (reasons | dict.fromkeys(scaled, f"imagined: scaled with {causes}")))


def _asked(name: str, numbers: Mapping[str, float], wanted: Mapping[str, str | float]) -> dict[str, tuple[float, str]]:
    """The changed fields: new value, and the change as it will show in the name."""
    asked = dict[str, tuple[float, str]]()
    for key, value in wanted.items():
        field = field_of(key)
        where = f"{name} with {key}={value}"
        if field in asked:
            raise HardwareError(f"{where}: {asked[field][1]!r} already changes {field}; give it once")
        shown = value.replace(" ", "") if isinstance(value, str) else repr(value)
        asked[field] = read_value(numbers, field, value, where), f"{_word(key)}={shown}"
    return asked


def _word(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def field_of(key: str) -> str:
    """The number that ``key`` names; ``bf16`` alone is the tensor peak."""
    word = _word(key)
    if word in FIELD_OF:
        return FIELD_OF[word]
    unit, _, name = word.replace("__", ".").rpartition(".")
    if unit in ("", "tensor", "vector"):
        try:
            return f"{unit or 'tensor'}.{dtype_named(name).name}"
        except GraphError:
            pass
    known = [synonym for synonym in FIELD_OF if "." not in synonym]
    raise HardwareError(f"unknown override {key!r}{nearest(word, [*known, 'bf16', 'tensor.bf16', 'vector.fp32'])}")


def dimension_of(field: str) -> Dimension:
    """What kind of quantity a number is."""
    return RATE if field.startswith(("tensor.", "vector.")) else _DIMENSIONS[field.rpartition(".")[2]]


def read_value(numbers: Mapping[str, float], field: str, value: str | float, where: str) -> float:
    dimension, factor = dimension_of(field), factor_of(value)
    if factor is None:
        if field not in numbers and dimension is not RATE:
            raise HardwareError(f"{where}: the device has no {field} to change; start from a device that has one")
        return dimension.read(value, where)
    if field not in numbers:
        raise HardwareError(f"{where}: there is no {field} to multiply; give a value such as {dimension.example}")
    scaled = numbers[field] * factor
    if dimension.whole and factor > 0:
        scaled = max(1, round(scaled))
    return dimension.check(scaled, where, value)


def _scale(before: Mapping[str, float], after: dict[str, float], pinned: frozenset[str]) -> None:
    """Let peaks and on-chip bandwidths follow the core count and the clock, except what was itself overridden."""
    cores, clock = after["num_cores"] / before["num_cores"], after["boost_hz"] / before["boost_hz"]
    for field in before.keys() - pinned:
        is_peak = field.startswith(("tensor.", "vector."))
        if is_peak or field in SCALES_WITH_CORES:
            after[field] *= cores
        if is_peak or field in ("l2.bandwidth_bytes_per_s", "shared.bandwidth_bytes_per_s", "base_hz", "tensor_hz"):
            after[field] *= clock
