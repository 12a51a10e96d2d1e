"""Software generations: how much of a device a training framework of its time reaches, in a few fitted numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost.interval import WIDER
from ridgeline.errors import InputError, nearest
from ridgeline.hardware import Device
from ridgeline.resources import data_dir

PLAIN = "plain"
NEUTRAL: Mapping[str, float] = {
    "matrix": 1.0,  # time of matrix products of 16 bits and more over the cost model's
    "fp8": 1.0,  # of products in eight bits
    "fp4": 1.0,  # of products in four
    "grouped": 1.0,  # of grouped products (experts)
    "attention": 1.0,
    "memory": 1.0,  # of memory-bound kernels
    "up": 1.0,  # time of collectives inside a scale-up domain, over the collectives' model
    "out": 1.0,  # and of those that cross the network
    "host": 1.0,  # host seconds of launches over the model's
    "interference": 0.12,  # compute lost per second of communication beside it (assumed: 16 of 132 SMs move data)
    "tp_hidden": 0.6,  # share of tensor-parallel communication that an overlapping GEMM hides
    "ep_hidden": 0.7,  # share of expert communication hidden when overlap is asked for
    "grads_hidden": 0.9,  # share of gradient and parameter traffic that can run beside compute
    "expert_s": 0.0,  # host seconds of one expert's product where kernels are launched expert by expert
    "route_s": 0.0,  # a layer of experts whose sizes the host must learn before it can go on, each pass
    "layer_s": 0.0,  # a layer's forward or backward beyond its kernels: launches, waits, allocator
    "micro_s": 0.0,  # a micro-batch's: data, schedule, loss bookkeeping
    "step_s": 0.0,  # a step's: data loader, logging, grad norm, barriers
    "straggle": 0.0,  # longer step per doubling of the ranks beyond one host
    "spread": 0.15,  # log half-width of the 90 % interval that the software adds
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One framework generation on one device, with where its numbers come from."""

    name: str
    title: str
    device: str
    basis: Basis
    source: str
    coef: Mapping[str, float] = field(hash=False)
    choices: Mapping[str, str] = field(hash=False, default_factory=dict)  # of a plan, where nobody says otherwise

    def __getitem__(self, name: str) -> float:
        return self.coef[name]


@cache
def _files() -> Mapping[str, Any]:
    folder = data_dir() / "generations"
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def stacks() -> list[str]:
    """Names of the known generations, the plain one included."""
    return [PLAIN, *_files()]


def stack_of(name: str, device: Device) -> Stack:
    """The generation ``name`` on ``device``.

    A device it was never seen on takes what the fit says of its architecture, from the generation's relatives there
    and its own rows elsewhere; one of an unknown architecture takes those of the nearest device. Both are assumed.
    """
    if name == PLAIN:
        return Stack(name=PLAIN, title="the cost model as it is", device=device.name, basis=Basis.MEASURED,
                     source="no software beyond PyTorch's own kernels", coef=NEUTRAL)  # fmt: skip
    files = _files()
    if name not in files:
        raise InputError(f"unknown training stack {name!r}{nearest(name, stacks())}")
    entry = files[name]
    fitted: Mapping[str, Mapping[str, float]] = entry["devices"]
    own = device.parent or device.name
    basis = Basis.FITTED if own in fitted and device.parent is None else Basis.ASSUMED
    relatives: Mapping[str, float] | None = entry.get("architectures", {}).get(family_of(device))
    key = own if own in fitted or relatives else _kin(device, fitted)
    coef = {**NEUTRAL, **(fitted.get(key) or relatives or {})}
    if basis is Basis.ASSUMED and key in fitted:  # another device's; what an architecture's holds was counted
        coef["spread"] *= WIDER[basis]
    return Stack(name=name, title=entry["title"], device=key, basis=basis, source=entry["source"],
                 coef=coef, choices=_choices(entry, device))  # fmt: skip


def family_of(device: Device) -> str:
    """The architectures that coefficients are shared by: NVIDIA's each for itself, AMD's for computing together."""
    return "cdna" if device.arch.startswith("cdna") else device.arch


def _choices(entry: Mapping[str, Any], device: Device) -> dict[str, str]:
    """How the generation runs things: kernels fused or not, attention's library (older devices know only one)."""
    found = dict(entry.get("plan", {}))
    if device.arch in ("ampere", "volta", "ada", "turing") and found.get("attention") == "cudnn":
        found["attention"] = "fa2"
    return found


def _kin(device: Device, fitted: Mapping[str, Mapping[str, float]]) -> str:
    """The fitted device of the same architecture, else the first."""
    from ridgeline.hardware import device as device_named

    for name in fitted:
        if device_named(name).arch == device.arch:
            return name
    return next(iter(fitted), "")


def default_stack(device: Device, world: int, precision: str = "bf16") -> str:
    """What one would train with on this device: the newest generation that was fitted on it in this precision.

    A single device runs the framework's plain kernels.
    """
    if world == 1:
        return PLAIN
    own = _seen(device)
    # Published runs in a precision from which a generation is trusted with it
    found = [(_rows(entry, own, precision) >= 6, bool(entry["devices"].get(own)), entry.get("year", 0), name)
             for name, entry in _files().items() if entry.get("default", True)]  # fmt: skip
    return max(found)[-1] if found else PLAIN


def _seen(device: Device) -> str:
    """The device itself where some generation was fitted on it, else one of its architecture that was."""
    own = device.parent or device.name
    known: dict[str, Mapping[str, float]] = {}
    for entry in _files().values():
        known |= entry["devices"] if entry.get("default", True) else {}
    return own if own in known else _kin(device, known)


def _rows(entry: Mapping[str, Any], device: str, precision: str) -> int:
    """Runs the fit saw on the device; narrow formats count for each other, and so do wide ones."""
    narrow = precision in ("fp8", "mxfp8", "nvfp4")
    seen: Mapping[str, int] = entry.get("rows", {}).get(device, {})
    return sum(num for name, num in seen.items() if (name in ("fp8", "mxfp8", "nvfp4")) == narrow)
