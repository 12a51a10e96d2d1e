"""What a published row ran: a network of the zoo with its sizes, on so many devices, under which software."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ridgeline.errors import InputError
from ridgeline.hardware import cluster, device
from ridgeline.models import build
from ridgeline.sim.collectives import collective_s
from ridgeline.sim.stack import Fitted, Load, Reach, load_of, reach_of, spread_interval, step_s
from ridgeline.validation.publications import publications
from ridgeline.validation.spelling import catalog_name


def device_of(text: str, file: str) -> str:
    """The device a free description means."""
    name = catalog_name(text, file)
    if name is None or device(name).kind != "gpu":
        raise InputError(f"no device of the catalog is named in {text!r}")
    return name


def count_of(text: str) -> float:
    """``'64k'`` → 65536, ``'1,024'`` → 1024; anything that is no usable count is refused."""
    plain = text.strip().lower().replace(",", "")
    scale = 1024.0 if plain.endswith("k") else 1.0
    try:
        value = float(plain.removesuffix("k")) * scale
    except ValueError:
        raise InputError(f"the batch cannot be read: {text!r}") from None
    if not 0.0 < value <= 1e8:
        raise InputError(f"the batch cannot be {text!r}")
    return value


def family_of(name: str) -> str:
    """The device whose coefficients one shares."""
    return str(publications("devices")["family"].choose({"device": name}).get("family", name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: ``items`` are what the row counts (images, sequences, tokens), of all ranks together."""

    stack: str
    device: str
    network: str
    batch: int
    precision: str  # fp16, tf32, fp32, int8 or fp8
    mode: str
    items: float
    options: tuple[tuple[str, Any], ...] = ()
    factor: float = 1.0  # work of a step relative to one pass of the graph: windows of a volume, denoising steps
    passes: float = 1.0  # passes of the graph in a step, each with its own launches
    ranks: int = 1
    gradient_bytes: float = 0.0  # all-reduced once every ``accumulation`` steps
    accumulation: int = 1
    exchange_bytes: float = 0.0  # looked-up rows that change hands on the way forward, and their gradients back
    tensor_ranks: int = 1
    system: str = ""  # a cluster description for the exchange of gradients

    @property
    def load(self) -> Load:
        graph_precision = self.precision if self.precision in ("fp32", "tf32") else "fp16"
        return _load(self.network, self.batch, graph_precision, self.mode, self.options)

    def lookups_s(self) -> float:
        """Rows of tables that are split over ranks travel to the samples that need them, and gradients back."""
        if self.ranks == 1 or not self.exchange_bytes:
            return 0.0
        return 2 * _exchange_s(self.system, self.ranks, self.exchange_bytes, "all_to_all")

    def comm_s(self) -> float:
        """The exchange of gradients, as far as it belongs to one step."""
        if self.ranks == 1 or not self.gradient_bytes:
            return 0.0
        return _exchange_s(self.system, self.ranks, self.gradient_bytes) / self.accumulation

    def reduce_s(self) -> float:
        """All-reduces of activations between tensor-parallel ranks, two a layer."""
        if self.tensor_ranks == 1:
            return 0.0
        sizes = dict(self.options)
        num_bytes = self.batch * sizes["seq"] * sizes["width"] * 2.0
        return float(2 * sizes["layers"] * _exchange_s(self.system, self.tensor_ranks, num_bytes))


@lru_cache(maxsize=4096)
def _exchange_s(system: str, ranks: int, num_bytes: float, kind: str = "all_reduce") -> float:
    place = cluster(system)
    return collective_s(kind, num_bytes, place.group(ranks), place).expected_s


@lru_cache(maxsize=4096)
def _load(network: str, batch: int, precision: str, mode: str, options: tuple[tuple[str, Any], ...]) -> Load:
    known: Mapping[str, Any] = {key: value for key, value in options if key not in ("layers", "width")}
    optimizer = "none" if network.startswith("dlrm") else "adamw_fused"  # rows of huge tables are updated sparsely
    return load_of(build(network, batch=batch, mode=mode, precision=precision, optimizer=optimizer, **known))


def predicted_s(work: Workload, reach: Reach) -> float:
    """Seconds of one step with these coefficients."""
    load = work.load
    if work.factor != 1.0:
        load = load.scaled(work.factor)
    if work.tensor_ranks > 1:
        load = load.split(work.tensor_ranks)
    once = step_s(load, device(work.device), work.precision, reach, work.comm_s() + work.lookups_s(), work.ranks)
    return (once - reach.step_s) * work.passes + reach.step_s + work.reduce_s()


def answer(work: Workload) -> tuple[float, float, float]:
    """Expected seconds of one step and their 90 % interval."""
    fitted: Fitted = reach_of(work.stack, family_of(work.device))
    seconds = predicted_s(work, fitted.reach)
    return seconds, *spread_interval(seconds, fitted.spread_frac)
