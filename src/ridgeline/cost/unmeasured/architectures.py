"""Coefficients for architectures that nobody measured: what measured ones have in common, in a device's own units.

Four architectures were measured (Ampere, Ada, Hopper, Blackwell). A coefficient of one nobody measured is the common
value, moved by what the generation of matrix instructions changes, times a unit that its datasheet and its library
tell: latencies are clocks, power follows peak over budget, launches are counted. ``lab/fit/unmeasured.py`` fits
the common values and judges them on each architecture in turn, left out of its own fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from ridgeline.cost.time.attention.tiles import LIBRARIES
from ridgeline.cost.time.chip import chip_of
from ridgeline.cost.time.serving import ONE_L2
from ridgeline.cost.unmeasured.related_device import bytes_per_clock, flops_per_j
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.resources import data_dir

FILE = "unmeasured_architectures.json"
STRANGERS = ("volta", "turing", "ampere-ga10x", "blackwell-consumer")
"""Architectures without a closer relative than another one. Published products, of which none was fitted: on a
V100 11.1 % off by the nearest measured device and 10.9 this way, on a T4 14.5 and 13.0, on an A40 7.0 and 6.3."""
REFERENCE = "h100-sxm"
"""The device whose units common values are in."""
ASYNCHRONOUS = ("hopper", "blackwell")
"""Where matrix instructions read shared memory by themselves; elsewhere warps wait for operands in registers."""
PACED = frozenset({"launch_s", "fanout_s", "gap_s", "split_s", "splitk_s", "split_each_s", "quantize_launch_s",
                   "scan_s", "regroup_s"})  # fmt: skip
"""Latencies of so many clocks."""
LAUNCHES = {"fa2_paged": 2 / 3}
"""Kernels of a prefill call over three: the write into the cache, a scheduler or a second copy, and attention.
FlashAttention-2 has no scheduler."""
NO_CLUSTERS_FRAC = 0.75
"""Share of an operand's trip through L2 that multicast saves a square tile, lost where there are no clusters."""
PREFILL, DECODE = "fa2_paged", "fa2_decode"
"""What serving frameworks run where kernels need no newer instructions."""
_TILE_DIM, _TILE_ROWS = 128, 128


def side_of(arch: str) -> float:
    """The sign of the contrast between generations of matrix instructions."""
    return -1.0 if arch in ASYNCHRONOUS else 1.0


def unit_of(name: str, device: Device, library: str) -> float:
    """What one of a coefficient's common units is on the device, by its datasheet and what its library does."""
    by_library = _by_library(name, device.arch, library)
    reference = device_named(REFERENCE)
    if name in PACED:
        return by_library * reference.boost_hz / device.boost_hz
    if name == "power_frac":
        return flops_per_j(device) / flops_per_j(reference)
    if name == "load_frac":  # kernels keep an SM's loads in flight for its share of the DRAM
        return max(1.0, bytes_per_clock(device) / bytes_per_clock(reference))
    if name == "io_held_frac":  # of two halves of an L2 each has its own copy of what both read
        return 2.0 if device.arch in ONE_L2 else 1.0
    return by_library


def _by_library(name: str, arch: str, library: str) -> float:
    if name == "launch_s":
        return LAUNCHES.get(library, 1.0)
    if name == "row_s":  # a tile has as many warps as its rows need
        return _TILE_ROWS / _tile_rows(library)
    if name == "scan_s":  # the scheduler kernel of FlashAttention-3
        return float(library == "decode" and arch == "hopper")
    if name == "regroup_s":  # FlashAttention-2 copies grouped queries, and their results back
        return float(library == "fa2_decode")
    if name == "split_s":  # the first never splits keys over prefill, the second combines without another kernel
        return 1e3 if library == "fa2_paged" else 0.5 if library.startswith("trtllm") else 1.0
    if name == "l2_frac" and library == "cutlass":
        return 1.0 if arch in ASYNCHRONOUS else NO_CLUSTERS_FRAC
    return 1.0


def _tile_rows(library: str) -> int:
    found = LIBRARIES.get(library)
    if found is None or found.streams:
        return _TILE_ROWS
    return next(rows for dim, (rows, _) in sorted(found.tiles.items()) if dim >= _TILE_DIM)


def tensor_limit(device: Device) -> float:
    """What matrix units do at the boost clock over the datasheet's peak, which is of a lower clock on some boards."""
    chip = chip_of(device)
    per_clock = chip.peak_flops_per_s("fp16") / (chip.num_sms * chip.clock_hz)
    return max(1.0, float(2 ** round(math.log2(per_clock)) / per_clock))


def coefficients(shared: Mapping[str, Any], device: Device, library: str) -> dict[str, float]:
    """Common values, moved to the device's side of the contrast, in its units."""
    side, contrast = side_of(device.arch), shared["contrast"]
    found = {
        name: value * math.exp(side * contrast.get(name, 0.0)) * unit_of(name, device, library)
        for name, value in shared["common"].items()
    }
    if "tensor_frac" in found:
        found["tensor_frac"] = min(found["tensor_frac"], tensor_limit(device))
    return found


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = json.loads((data_dir() / FILE).read_text())["families"]
    return table


def library_of(family: str, key: str) -> str:
    """What runs a call where nothing newer does."""
    if family == "gemm":
        return "cutlass" if key == "fp8" else "cublas"
    return DECODE if key.startswith("decode") else PREFILL


@lru_cache(maxsize=32)
def families_of(device: Device) -> dict[str, dict[str, Any]]:
    """Entries as a calibration has them, for a device of an architecture that nobody measured."""
    known = {*chip_of(device).tensor_flops_per_s, *_table()["attention"]}
    return {
        family: {
            key: entry_of(shared, device, library_of(family, key)) for key, shared in entries.items() if key in known
        }
        for family, entries in _table().items()
    }


def entry_of(shared: Mapping[str, Any], device: Device, library: str) -> dict[str, Any]:
    """One calibration entry; its widths are of architectures left out, as this device's is."""
    values, harness = coefficients(shared, device, library), shared["protocol"]
    return {
        "library": library, "unseen": shared["unseen"],
        "coef": {name: value for name, value in values.items() if name not in harness},
        "protocol": {name: values[name] for name in harness},
    }  # fmt: skip
