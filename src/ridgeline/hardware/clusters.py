"""Finding a cluster by what a person types: a device or a host, how many, and changes to imagine another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError, nearest
from ridgeline.hardware.catalog import device as device_named
from ridgeline.hardware.catalog import devices
from ridgeline.hardware.cluster import Cluster
from ridgeline.hardware.device import Device, Provenance
from ridgeline.hardware.quantity import COUNT, factor_of
from ridgeline.hardware.system import System, dimension_of, load_system
from ridgeline.resources import data_dir

_SYNONYMS = {
    "host.num_devices": "devices_per_host gpus_per_host gpus_per_node devices_per_node host_devices",
    "host.num_cpu_sockets": "cpu_sockets sockets",
    "host.pcie_generation": "pcie_generation pcie_gen",
    "host.power_w": "host_power",
    "scale_up.bandwidth_bytes_per_s": "scaleup scale_up nvlink link xgmi ici nvlink_bandwidth scale_up_bandwidth"
    " link_bandwidth",
    "scale_up.domain_size": "domain scale_up_domain nvlink_domain link_domain",
    "scale_up.latency_s": "scaleup_latency scale_up_latency nvlink_latency link_latency",
    "scale_up.reduces_in_switch": "nvls scale_up_reduction",
    "scale_out.nic_bandwidth_bytes_per_s": "scaleout scale_out nic network nic_bandwidth scale_out_bandwidth"
    " network_bandwidth",
    "scale_out.num_nics": "nics nics_per_host num_nics",
    "scale_out.latency_s": "scaleout_latency scale_out_latency network_latency nic_latency",
    "scale_out.num_rails": "rails num_rails",
    "scale_out.num_levels": "levels tree_levels fat_tree_levels",
    "scale_out.oversubscription": "oversubscription oversub taper",
    "scale_out.reduces_in_switch": "sharp scale_out_reduction",
}
FIELD_OF = {word: name for name, words in _SYNONYMS.items() for word in (name, *words.split())}
_KIND_KEYS = {"scale_up_kind": "scale_up", "scale_out_kind": "scale_out", "fabric": "scale_out", "topology": "topology"}
_COUNT = re.compile(r"^\s*([^*=]+?)\s*\*\s*(\S+)\s*(.*)$", re.DOTALL)
_GIGABIT = re.compile(r"^([\d.]+)\s*([kMGT])b(?:/s|ps|it|it/s)?$")
_GENERIC = Provenance(Basis.ASSUMED, "generic host around a device without a cluster file of its own")


def cluster(description: str | Cluster | Device) -> Cluster:
    """The cluster described: ``'h100-sxm*1024 scaleout=400Gb oversubscription=2'``, ``'dgx-h100*128'``, ``'h200'``."""
    if isinstance(description, Cluster):
        return description
    if isinstance(description, Device):
        return cluster_of(description, 1)
    return _described(description)


def cluster_of(device: Device, num_devices: int) -> Cluster:
    """``num_devices`` of a device, real or imagined, in its usual hosts."""
    return _usual_system(device).cluster(f"{device.name}*{num_devices}", device, num_devices, device.parent)


def systems() -> tuple[str, ...]:
    """The names of every kind of host or pod that has a file, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


@lru_cache(maxsize=256)
def _described(description: str) -> Cluster:
    name, count, changes = _split(description)
    ours, kinds, theirs = _sorted_changes(changes)
    system, device = _system_and_device(name, theirs)
    numbers = {field: _value(system, field, key, text) for field, (key, text) in ours.items()}
    chosen = system.changed({field: (value, _written(ours[field])) for field, value in numbers.items()}, kinds)
    num_devices = count * (system.counted_in if name in systems() else 1)
    parent = f"{name}*{count}" if changes else None
    shown = " ".join([f"{name}*{count}", *(f"{key}={value}" for key, value in changes.items())])
    return chosen.cluster(shown, device, num_devices, parent)


def _written(change: tuple[str, str]) -> str:
    return f"{change[0]}={change[1]}"


def _split(text: str) -> tuple[str, int, dict[str, str]]:
    """``'h100-sxm*16 scaleout=400Gb'`` → name, count, changes; without a star the count is one."""
    match = _COUNT.match(text)
    head, rest = (match.group(1), match.group(3)) if match else (text.partition("=")[0], "")
    number = match.group(2) if match else "1"
    if not match and "=" in text:
        words = re.sub(r"\s*=\s*", "=", text).split()
        head = " ".join(word for word in words if "=" not in word)
        rest = " ".join(word for word in words if "=" in word)
    name = re.sub(r"[\s_-]+", "-", head.strip().lower()).strip("-")
    if not name:
        raise HardwareError(f"cannot read {text!r}: write a device or host and how many, such as 'h100-sxm*1024'")
    value = COUNT.read(number.replace(",", ""), f"the number of devices in {text!r}")
    return name, int(value), _pairs(rest, text)


def _pairs(rest: str, text: str) -> dict[str, str]:
    changes: dict[str, str] = {}
    for word in re.sub(r"\s*=\s*", "=", rest.replace(",", " ")).split():
        key, equals, value = word.partition("=")
        key = key.strip().lower().replace("-", "_")
        if not equals or not key or not value or key in changes:
            raise HardwareError(f"cannot read {word!r} in {text!r}: write each change once, such as scaleout=400Gb")
        changes[key] = value
    return changes


def _sorted_changes(
    changes: Mapping[str, str],
) -> tuple[dict[str, tuple[str, str]], dict[str, str], dict[str, str]]:
    """Changes of the cluster's numbers by field, of its kinds, and those left for the device."""
    ours, kinds, theirs = dict[str, tuple[str, str]](), dict[str, str](), dict[str, str]()
    for key, value in changes.items():
        if key in _KIND_KEYS:
            kinds[_KIND_KEYS[key]] = value.lower()
        elif key in FIELD_OF:
            field = FIELD_OF[key]
            if field in ours:
                raise HardwareError(f"{ours[field][0]}= and {key}= both change {field}; give it once")
            ours[field] = key, value
        else:
            theirs[key] = value
    return ours, kinds, theirs


def _value(system: System, field: str, key: str, text: str) -> float:
    where, dimension, factor = f"{system.name} with {key}={text}", dimension_of(field), factor_of(text)
    if factor is not None:
        scaled = system.numbers[field] * factor
        return dimension.check(max(1, round(scaled)) if dimension.whole else scaled, where, text)
    return dimension.read(_GIGABIT.sub(r"\1\2bit/s", text), where)


def _system_and_device(name: str, changes: Mapping[str, str]) -> tuple[System, Device]:
    if name in systems():
        system = _system(name)
        device = device_named(system.device)
    else:
        device = _device_or_complaint(name)
        system = _usual_system(device)
    try:
        return system, device.override(**changes) if changes else device
    except HardwareError as error:
        unknown = next((key for key in changes if f"unknown override {key!r}" in str(error)), None)
        if unknown is None:
            raise
        raise HardwareError(f"unknown change {unknown!r}{nearest(unknown, [*FIELD_OF, *_KIND_KEYS])}") from error


def _device_or_complaint(name: str) -> Device:
    try:
        return device_named(name)
    except HardwareError as error:
        raise HardwareError(f"unknown device or host {name!r}{nearest(name, [*systems(), *devices()])}") from error


def _usual_system(device: Device) -> System:
    wanted = device.parent or device.name
    return next((found for found in map(_system, systems()) if wanted in found.usual_for), None) or _generic(device)


def _generic(device: Device) -> System:
    """A host for a device that no file claims: its own links, eight to a host, one NIC of its usual speed for each."""
    up, pcie, out = (device.links.get(name) for name in ("scale_up", "pcie", "scale_out"))
    domain = up.domain_size if up is not None else 8
    size = min(8, domain) if up is not None else 8
    generation = re.search(r"PCIe (\d)", pcie.kind) if pcie is not None else None
    numbers = {
        "host.num_devices": size, "host.num_cpu_sockets": 2,
        "host.pcie_generation": int(generation.group(1)) if generation else 4,
        "host.power_w": 100.0 * size,
        "scale_up.bandwidth_bytes_per_s": up.bandwidth_bytes_per_s if up is not None
        else pcie.bandwidth_bytes_per_s if pcie is not None else 16e9,
        "scale_up.domain_size": domain, "scale_up.latency_s": 1e-6, "scale_up.reduces_in_switch": 0,
        "scale_out.num_nics": size, "scale_out.num_rails": size, "scale_out.num_levels": 3,
        "scale_out.nic_bandwidth_bytes_per_s": out.bandwidth_bytes_per_s if out is not None else 12.5e9,
        "scale_out.latency_s": 5e-6, "scale_out.oversubscription": 1, "scale_out.reduces_in_switch": 0,
    }  # fmt: skip
    topology = "pcie" if up is None else _topology(up.kind)
    kind = f"pcie{int(numbers['host.pcie_generation'])}" if up is None else _technology(up.kind)
    return System(
        name="generic", title=f"generic host with {device.title}", device=device.name, usual_for=(), counted_in=size,
        scale_up_kind=kind, topology=topology, scale_out_kind="infiniband",
        numbers={name: float(value) for name, value in numbers.items()},
        provenances=dict.fromkeys(numbers, _GENERIC),
    )  # fmt: skip


def _topology(kind: str) -> str:
    lowered = kind.lower()
    if "torus" in lowered:
        return "torus3d" if "3d" in lowered else "torus2d"
    return "mesh" if "xgmi" in lowered or "infinity" in lowered else "switch"


def _technology(kind: str) -> str:
    """``'NVLink 4'`` → nvlink4, ``'XGMI'`` → xgmi, ``'ICI 2D torus, 4 links'`` → ici."""
    match = re.match(r"([a-z]+)[\s-]*(\d?)", kind.lower())
    return f"{match.group(1)}{match.group(2) if 'nvlink' in match.group(1) else ''}" if match else "link"


@cache
def _system(name: str) -> System:
    return load_system(_folder() / f"{name}.toml")


def _folder() -> Path:
    return data_dir() / "clusters"
