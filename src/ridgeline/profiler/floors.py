"""Every kernel's floor and expected time beside its measured one, from the ops a trace recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.cost.estimate import L2_KEPT_FRAC
from ridgeline.cost.lower.eager import lower
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.work import Site, work_of
from ridgeline.errors import RidgelineError
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.profiler.ops import copied, known, site_of
from ridgeline.trace import Kind, Trace

Index = NDArray[np.intp]
Seconds = NDArray[np.float64]
#: Parts of kernel names that say a product of fp32 numbers was done in TF32.
_TF32 = ("tf32", "_s1688", "s16816gemm_tf32", "nvjet_sss", "nvjet_tss", "_stss_", "tensorop_s16")
#: A model's number in a name that has more to say (``Tesla V100-DGXS-32GB``).
_MODEL = re.compile(r"\b(?:[PVAHBTL]\d{1,3}[GS]?|GB?[BH]?\d{3}|MI\d{3}[AX]?|RTX \d{4})\b", re.IGNORECASE)
BOUNDS = ("", "compute", "memory", "cache", "latency", "issue", "free")
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_SPELLED = {"BFloat16": "bf16", "Half": "fp16", "<float": "fp32", "<double": "fp64"}


@dataclass(frozen=True, slots=True)
class Priced:
    """What one op should take: the speed of light, and what the cost model expects."""

    floor_s: float
    expected_s: float
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    bound: str = ""  # of the part with the highest floor


@dataclass(frozen=True, slots=True)
class Columns:
    """What is written beside every span: prices, and the work they are prices of."""

    floor_s: Seconds
    expected_s: Seconds
    flops: Seconds
    read_bytes: NDArray[np.int64]
    written_bytes: NDArray[np.int64]
    bound: NDArray[np.int32]  # in BOUNDS

    @classmethod
    def empty(cls, num: int) -> Columns:
        floor_s, expected_s, flops = (np.full(num, np.nan) for _ in range(3))
        read_bytes, written_bytes = (np.full(num, -1, dtype=np.int64) for _ in range(2))
        return cls(floor_s, expected_s, flops, read_bytes, written_bytes, np.zeros(num, dtype=np.int32))

    def fill(self, rows: Any, priced: Priced, weight: Any = 1.0) -> None:
        """Share what was priced among rows by weight."""
        self.floor_s[rows], self.expected_s[rows] = priced.floor_s * weight, priced.expected_s * weight
        self.flops[rows] = priced.flops * weight
        self.read_bytes[rows] = np.rint(priced.read_bytes * weight)
        self.written_bytes[rows] = np.rint(priced.written_bytes * weight)
        self.bound[rows] = BOUNDS.index(priced.bound)

    def beside(self, trace: Trace) -> Trace:
        words = (*trace.words, *(name for name in BOUNDS if name not in trace.words))
        numbers = np.array([words.index(name) for name in BOUNDS], dtype=np.int32)
        columns = {name: getattr(self, name) for name in self.__slots__ if name != "bound"}
        return trace.with_columns(**columns).with_more_words(words).with_columns(bound=numbers[self.bound])


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the device's work could be priced."""

    num_kernels: int
    num_priced: int
    busy_s: float
    priced_s: float
    unknown: tuple[tuple[str, float], ...]  # ops without a price, by measured seconds

    @property
    def frac(self) -> float:
        """Share of measured time that has a floor."""
        return self.priced_s / self.busy_s if self.busy_s > 0 else 0.0


def device_of(trace: Trace) -> Device | None:
    """The device a trace was recorded on, if it says so and we know it."""
    for properties in trace.meta.get("devices") or ():
        found = device_called(str(properties.get("name", "")) if isinstance(properties, dict) else str(properties))
        if found is not None:
            return found
    return None


def device_called(name: str) -> Device | None:
    """The device a driver calls by this name, if we know it."""
    for guess in (name, *_MODEL.findall(name)):
        try:
            return device_named(guess)
        except RidgelineError:
            continue
    return None


def with_floors(trace: Trace, on: Device | str | None = None, rows: Index | None = None) -> tuple[Trace, Coverage]:
    """The trace with ``floor_s``, ``expected_s`` and the work (``flops``, ``read_bytes``, ``written_bytes``) of every
    kernel whose op was recorded with its shapes; of the device spans ``rows`` alone, where they are given.

    An op that launched several kernels is priced as one; its floor, expectation and work are shared among them by
    their measured time. The floor assumes that everything that can be in the L2 is there.
    """
    device = device_named(on) if isinstance(on, str) else on or device_of(trace)
    works = np.flatnonzero(trace.gpu) if rows is None else rows[trace.gpu[rows]]
    columns = Columns.empty(len(trace))
    if device is not None and len(works):
        prices = _Prices(pricer_of(device))
        _price_ops(trace, works, prices, columns)
        sizes, copies = trace.optional("bytes"), trace.optional("copy")
        for row in works[trace.of_kind(Kind.MEMCPY)[works]].tolist():
            words = trace.words[copies[row]]
            if sizes[row] > 0 and ("HtoD" in words or "DtoH" in words):
                priced = prices.copy(int(sizes[row]), pinned="pinned" in words.lower())
                if priced is not None:
                    columns.fill(row, priced)
    return columns.beside(trace), _coverage(trace, works, columns.floor_s)


def _price_ops(trace: Trace, works: Index, prices: _Prices, columns: Columns) -> None:
    """Kernels of each op: one price for all calls that agree in name, shapes, arguments and kernels."""
    caller = priced_ops(trace, works)
    kept = (caller >= 0) & trace.of_kind(Kind.KERNEL, Kind.MEMSET)[works]
    rows, caller = works[kept], caller[kept]
    if not len(rows):
        return
    order = np.lexsort((trace.name[rows], caller))
    rows, caller = rows[order], caller[order]
    calls, first, call = np.unique(caller, return_index=True, return_inverse=True)
    # The kernels of a call as one number: two calls with the same kernels have the same
    mixed = (trace.name[rows].astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    kernels = np.add.reduceat(mixed ^ (mixed >> np.uint64(29)), first).astype(np.int64)
    said = [trace.optional(name)[calls].astype(np.int64) for name in ("shapes", "dtypes", "strides", "concrete")]
    code = np.stack([trace.name[calls].astype(np.int64), *said, kernels], axis=1)
    _, example, kind = np.unique(code, axis=0, return_index=True, return_inverse=True)
    edges = np.append(first, len(rows))
    found = [
        prices.op(trace, int(calls[i]), [trace.words[trace.name[row]] for row in rows[edges[i] : edges[i + 1]]])
        for i in example.tolist()
    ]
    spent = trace.duration_s[rows]
    whole, num = np.bincount(call, spent), np.bincount(call)
    weight = np.where(whole[call] > 0, spent / np.where(whole[call] > 0, whole[call], 1.0), 1.0 / num[call])
    which = kind.reshape(-1)[call]
    has = np.array([one is not None for one in found], dtype=np.bool_)[which]
    bounds = np.array([0 if one is None else BOUNDS.index(one.bound) for one in found], dtype=np.int32)[which]
    columns.bound[rows[has]] = bounds[has]
    for name in ("floor_s", "expected_s", "flops", "read_bytes", "written_bytes"):
        each = np.array([0.0 if one is None else getattr(one, name) for one in found])[which] * weight
        column = getattr(columns, name)
        column[rows[has]] = each[has] if column.dtype.kind == "f" else np.rint(each[has])


def priced_ops(trace: Trace, works: Index) -> Index:
    """The innermost op around each launch, if there is a rule for it and its shapes were recorded; else -1."""
    good = trace.of_kind(Kind.OP) & (trace.optional("shapes") > 0)
    is_known = np.fromiter((known(word) for word in trace.words), dtype=np.bool_, count=len(trace.words))
    at = trace.launch[works].astype(np.int64)
    found = np.full(len(works), -1, dtype=np.int64)
    # depth
    for _ in range(24):
        walking = (at >= 0) & (found < 0)
        if not walking.any():
            break
        hit = walking & good[np.maximum(at, 0)]
        found[hit] = at[hit]
        at = np.where(walking & ~hit, trace.parent[np.maximum(at, 0)], -1)
    return np.where((found >= 0) & is_known[trace.name[np.maximum(found, 0)]], found, -1).astype(np.intp)


class _Prices:
    """Prices of recorded ops on one device, each different one once."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.copies: dict[tuple[int, bool], Priced | None] = {}
        self.kept: dict[tuple[Any, ...], Priced | None] = {}

    def op(self, trace: Trace, row: int, kernels: Iterable[str]) -> Priced | None:
        columns = [trace.words[trace.optional(name)[row]] for name in ("shapes", "dtypes", "strides", "concrete")]
        names = list(kernels)
        in_tf32 = any(part in name for name in names for part in _TF32)
        in_lists = next((found for found in map(element_of, names) if found), "")
        key = (trace.words[trace.name[row]], *columns, in_tf32, in_lists)
        if key not in self.kept:
            site = site_of(key[0], *columns, in_lists)
            self.kept[key] = None if site is None else self.site(site, in_tf32=in_tf32)
        return self.kept[key]

    def copy(self, num_bytes: int, *, pinned: bool) -> Priced | None:
        """A copy over the host link."""
        if (num_bytes, pinned) not in self.copies:
            self.copies[num_bytes, pinned] = self.site(copied(num_bytes, pinned=pinned))
        return self.copies[num_bytes, pinned]

    def site(self, site: Site, *, in_tf32: bool = False) -> Priced | None:
        try:
            calls = lower(site, self.pricer.device.arch)
        except (RidgelineError, KeyError, IndexError, ValueError, ZeroDivisionError):
            return None
        read = max(site.read_bytes, 1.0)
        could = min(1.0, self.pricer.chip.l2_bytes / read)
        likely = min(1.0, L2_KEPT_FRAC * self.pricer.chip.l2_bytes / read)
        floor_s = expected_s = most_s = 0.0
        bound = ""
        for one in calls:
            if in_tf32 and one.kind in ("gemm", "bmm") and one.dtype == "fp32":
                one = type(one)(one.kind, "tf32", one.phase, one.library, one.shape)
            try:
                time = self.pricer.price(one, could, flushed=False).time
                floor_s += time.floor_s
                if time.floor_s >= most_s and time.bound in BOUNDS:
                    most_s, bound = time.floor_s, time.bound
                expected_s += self.pricer.price(one, likely, flushed=False).time.busy_s
            except (RidgelineError, KeyError, ValueError, ZeroDivisionError):
                return None
        return Priced(floor_s, expected_s, *_work(site), bound) if calls else None


def _work(site: Site) -> tuple[float, float, float]:
    """Flops, bytes read and bytes written, as far as there is a rule."""
    try:
        work = work_of(site)
    except (RidgelineError, KeyError, IndexError, ValueError, ZeroDivisionError):
        return 0.0, site.read_bytes, site.written_bytes
    return float(work.flops), float(work.read_bytes), float(work.written_bytes)


def element_of(kernel: str) -> str:
    """The element type a kernel over a list of tensors was compiled for, from its name."""
    opaque = _OPAQUE.search(kernel)
    if opaque:
        return {1: "uint8", 2: "bf16", 4: "fp32", 8: "int64"}.get(int(opaque.group(1)), "")
    return next((ours for theirs, ours in _SPELLED.items() if theirs in kernel), "")


def _coverage(trace: Trace, works: Index, floor: Seconds) -> Coverage:
    priced = ~np.isnan(floor[works])
    spent = trace.duration_s[works]
    lost = works[~priced]
    words, inverse = np.unique(np.where(trace.op[lost] > 0, trace.op[lost], trace.name[lost]), return_inverse=True)
    sums = np.bincount(inverse, spent[~priced], len(words))
    worst = [(trace.words[words[i]], float(sums[i])) for i in np.argsort(-sums, kind="stable")]
    return Coverage(len(works), int(priced.sum()), float(spent.sum()), float(spent[priced].sum()), tuple(worst))
