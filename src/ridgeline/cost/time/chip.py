"""The physics of one GPU that the time models of GEMM and attention read, and the arrays they answer with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ridgeline.cost.time.lanes import Lanes
from ridgeline.errors import CostError, HardwareError
from ridgeline.hardware import Device

Floats = NDArray[np.float64]

COMPUTE_BOUND, MEMORY_BOUND, LATENCY_BOUND = 0, 1, 2
BOUND_NAMES = ("compute", "memory", "latency")


KIN = {"ampere-ga10x": "ampere", "turing": "ampere", "volta": "ampere", "pascal": "ampere", "blackwell-consumer": "ada"}


def related_archs(arch: str) -> tuple[str, ...]:
    """Architectures whose coefficients stand in for a missing one of ``arch``, closest first."""
    return (arch, *((KIN[arch],) if arch in KIN else ()), "generic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a GPU can do per second and hold, without opinion on how well software uses it."""

    name: str
    arch: str
    num_sms: int
    clock_hz: float
    dram_bytes_per_s: float
    l2_bytes: float
    l2_bytes_per_s: float
    smem_bytes: float
    tensor_flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    tdp_w: float
    idle_w: float
    origin: str = ""  # the device itself, or the one that an imagined device was made from

    def each(self, change: Callable[[Any], Any]) -> Chip:
        """The chip with ``change`` made to every number that may be one of many devices."""
        names = ("clock_hz", "dram_bytes_per_s", "l2_bytes", "l2_bytes_per_s", "smem_bytes", "vector_flops_per_s",
                 "tdp_w", "idle_w")  # fmt: skip
        peaks = {name: change(peak) for name, peak in self.tensor_flops_per_s.items()}
        sms = change(self.num_sms)
        return replace(self, tensor_flops_per_s=peaks, num_sms=int(sms) if isinstance(sms, float) else sms,
                       **{name: change(getattr(self, name)) for name in names})  # fmt: skip

    def along(self, dims: int) -> Chip:
        """The same numbers as arrays of so many dimensions, devices along the first; a single device as it is."""
        return self.each(
            lambda value: value.view(np.ndarray).reshape(-1, *[1] * (dims - 1)) if isinstance(value, Lanes) else value
        )

    def peak_flops_per_s(self, dtype: str) -> float:
        """The dense matrix peak for operands of ``dtype``; fp32 means full precision on the vector units."""
        if dtype == "fp32":
            return self.vector_flops_per_s
        peak = self.tensor_flops_per_s.get(dtype)
        if peak is None:
            known = ", ".join(sorted(self.tensor_flops_per_s))
            raise CostError(f"{self.name} has no matrix peak for {dtype}: its device file names {known} and fp32")
        return peak


@dataclass(frozen=True, slots=True)
class Timing:
    """One time model's answer for many problems: ``expected_s`` never lies below ``floor_s``."""

    expected_s: Floats
    floor_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats
    bound: NDArray[np.intp]
    num_kernels: NDArray[np.intp]


def timing(
    expected_s: Floats,
    floor_s: Floats,
    compute_s: Floats,
    memory_s: Floats,
    latency_s: Floats,
    second: NDArray[np.bool_] | None = None,
) -> Timing:
    """Bundle the parts, name the largest as the bound and lift the expectation to the floor.

    ``second`` says where another kernel follows the first, to add up what it left.
    """
    if len({len(part) for part in (expected_s, floor_s, compute_s, memory_s, latency_s)}) > 1:  # many chips
        expected_s, floor_s, compute_s, memory_s, latency_s = np.broadcast_arrays(
            expected_s, floor_s, compute_s, memory_s, latency_s
        )
    bound = np.array((compute_s, memory_s, latency_s)).argmax(axis=0)
    num = np.ones(len(expected_s), dtype=np.intp) if second is None else 1 + second.astype(np.intp)
    return Timing(np.maximum(expected_s, floor_s), floor_s, compute_s, memory_s, latency_s, bound, num)


def bound_of(timing: Timing) -> Any:
    """What limits the one problem that was timed: its name, or a number for each of many devices."""
    return BOUND_NAMES[int(timing.bound[0])] if len(timing.bound) == 1 else timing.bound


def columns(*values: ArrayLike) -> tuple[Floats, ...]:
    """The arguments as float arrays of one common length."""
    lengths = {len(value) if isinstance(value, list) else 0 for value in values}
    if len(lengths) == 1 and lengths != {0}:
        return tuple(np.array(values, dtype=np.float64))
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values))
    return tuple(arrays)


def chip_of(device: Device) -> Chip:
    """The physics of ``device``, all that the time models read of it."""
    # Peaks by dtype, with the device's own stand-ins; a dtype it cannot compute at all is left out
    peaks: dict[str, float] = {}
    for name in ("fp64", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"):
        with suppress(HardwareError):
            peaks[name] = device.peak_flops_per_s("tensor", name)
    return Chip(
        name=device.name, arch=device.arch, num_sms=device.num_cores, clock_hz=device.boost_hz,
        dram_bytes_per_s=device.dram.bandwidth_bytes_per_s, l2_bytes=device.l2.capacity_bytes,
        l2_bytes_per_s=device.l2.bandwidth_bytes_per_s, smem_bytes=device.shared.capacity_bytes,
        tensor_flops_per_s=peaks,
        vector_flops_per_s=device.peak_flops_per_s("vector", "fp32"), tdp_w=device.tdp_w, idle_w=device.idle_w,
        origin=device.parent or device.name,
    )  # fmt: skip
