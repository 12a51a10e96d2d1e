"""A kernel call: the unit the time models price, the calibration measures and ``validate`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ridgeline.cost.time.chip import Chip
from ridgeline.errors import CostError, nearest

Coef = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Call:
    """One library call as the library sees it: ``gemm`` of bf16 by cuBLAS with m, n, k.

    ``shape`` is a tuple of (name, number) pairs so that a call is hashable and prices are remembered.
    """

    kind: str
    dtype: str
    phase: str = "fwd"
    library: str = "aten"
    shape: tuple[tuple[str, Any], ...] = ()  # whole numbers, but for a layout's name and instructions per element
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Prices are looked up by the call, again and again: it is hashed once."""
        object.__setattr__(self, "_hash", hash((self.kind, self.dtype, self.phase, self.library, self.shape)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Call) and self._hash == other._hash and self.shape == other.shape
            and self.kind == other.kind and self.dtype == other.dtype and self.phase == other.phase
            and self.library == other.library
        )  # fmt: skip

    def __reduce__(self) -> tuple[type[Call], tuple[Any, ...]]:
        return Call, (self.kind, self.dtype, self.phase, self.library, self.shape)  # another process hashes otherwise

    def dims(self) -> dict[str, Any]:
        return dict(self.shape)


def call(kind: str, dtype: str, phase: str = "fwd", library: str = "aten", **shape: Any) -> Call:
    """A call with its dimensions given by name."""
    return Call(kind, dtype, phase, library, tuple(shape.items()))


class Time(NamedTuple):
    """What a call takes on a device.

    ``busy_s`` is how long its kernels keep the device, ``floor_s`` the speed of light (never above a measurement),
    ``bound`` what limits it: compute, memory, cache, latency, or an instruction unit by name. Kernels that run beside
    each other have durations that add up to ``beside`` times as much.
    """

    busy_s: float
    floor_s: float
    bound: str
    num_kernels: int = 1
    beside: float = 1.0


Selection = Callable[[Coef, str], dict[str, float]]


def selection(choose: Selection) -> Selection:
    """Remember what is chosen from a set of coefficients, by the set itself: hashing hundreds of them costs more."""
    known: dict[tuple[int, str], tuple[Coef, dict[str, float]]] = {}

    def chosen(coef: Coef, group: str) -> dict[str, float]:
        found = known.get((id(coef), group))
        if found is None or found[0] is not coef:
            if len(known) >= 512:  # max selections
                known.clear()
            found = known[id(coef), group] = coef, choose(coef, group)  # kept alive, so that its id stays its own
        return found[1]

    return chosen


Model = Callable[[Call, Chip, Coef, float], Time]
"""(call, chip, coefficients of the family, share of the input bytes already in L2) → Time."""


@dataclass(frozen=True, slots=True)
class Family:
    """Calls that one mechanism prices, with the coefficients a calibration may replace."""

    name: str
    model: Model
    defaults: Coef


_FAMILY_OF_KIND: dict[str, Family] = {}


def family(name: str, kinds: str, defaults: Coef) -> Callable[[Model], Model]:
    """Register a time model for the kinds (space-separated) it prices; a kind has one model."""

    def register(model: Model) -> Model:
        made = Family(name, model, defaults)
        for kind in kinds.split():
            if kind in _FAMILY_OF_KIND:
                raise CostError(f"kind {kind!r} has two time models: {_FAMILY_OF_KIND[kind].name} and {name}")
            _FAMILY_OF_KIND[kind] = made
        return model

    return register


def family_of(kind: str) -> Family:
    if kind not in _FAMILY_OF_KIND:
        raise CostError(f"no time model for operator kind {kind!r}{nearest(kind, _FAMILY_OF_KIND)}")
    return _FAMILY_OF_KIND[kind]


def kinds() -> list[str]:
    return sorted(_FAMILY_OF_KIND)


ITEMSIZE = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp8_e5m2": 1.0, "int64": 8.0,
            "int32": 4.0, "int16": 2.0, "int8": 1.0, "uint8": 1.0, "bool": 1.0, "fp4": 0.5, "int4": 0.5, "fp6": 0.75,
            "complex64": 8.0, "complex128": 16.0}  # fmt: skip


def memory_floor_s(chip: Chip, read_bytes: float, written_bytes: float, warm_frac: float) -> float:
    """No kernel moves its bytes faster than this: cold reads from DRAM, everything through L2.

    Writes may still sit in the L2 when the kernel ends, so only what exceeds its capacity must reach DRAM.
    """
    dram_bytes = read_bytes * (1.0 - warm_frac) + max(0.0, written_bytes - chip.l2_bytes)
    return max(dram_bytes / chip.dram_bytes_per_s, (read_bytes + written_bytes) / chip.l2_bytes_per_s)
