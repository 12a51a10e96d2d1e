"""Tables of device work by kernel, op, module or line: time, launches, Tensor Cores, floors and energy."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, nearest
from ridgeline.trace.kind import Kind
from ridgeline.trace.table import Index, Mask, Trace

#: Ops whose arithmetic Tensor Cores can do.
_ELIGIBLE = re.compile(
    r"(?:^|::|_|\b)(?:conv(?:olution|[123]d|_)\w*|\w*mm|matmul|linear|\w*dot_product_\w*attention\w*|lstm\w*|gru\w*|einsum"
    r"|bilinear|chain_matmul|multi_head_attention\w*|flash_attn\w*)$"
    r"|(?:Convolution|Mm|Addmm|Bmm|Baddbmm|Linear|Matmul|Attention|Rnn)\w*Backward",
    re.IGNORECASE,
)
_ELIGIBLE_KERNEL = re.compile(
    r"gemm|fprop|dgrad|wgrad|scudnn|cudnn.*conv|convolve|fmha|flash_|nvjet|_mm_", re.IGNORECASE
)
_TENSOR_CORE = re.compile(
    r"tensorop|[_s](?:884|1688|16816|16832|168128|168256)|[hiqbdfg]mma(?!_)|wgmma|tcgen05|umma|nvjet"
    r"|sm(?:7|8|9|10|12)\d?_xmma_\w*?(?:f16|bf16|tf32|e4m3|e5m2|i8)|flash_(?:fwd|bwd)|fmha|flash::|cutlass3x|sm90_gemm",
    re.IGNORECASE,
)
_NO_TENSOR_CORE = re.compile(
    r"simt|ffma|sgemm(?!.*tensorop)(?!.*1688)|scudnn|dgemm(?!.*tensorop)|gemv|cgemm|implicit_convolve", re.IGNORECASE
)
YES, NO, UNKNOWN = "yes", "no", "unknown"


def tensor_core(kernel: str) -> str:
    """Whether a kernel's name says that it uses Tensor Cores: yes, no or unknown."""
    if _TENSOR_CORE.search(kernel) and "ffma" not in kernel and "simt" not in kernel:
        return YES
    return NO if _NO_TENSOR_CORE.search(kernel) else UNKNOWN


@dataclass(frozen=True, slots=True)
class Work:
    """All device spans that share a name, op, module, line or phase."""

    key: str
    count: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    share_frac: float  # of all device time of the same sort
    eligible_s: float  # in ops that Tensor Cores could do
    tensor_core_s: float  # in kernels that use them
    launch_s: float  # spent by the host in their launch calls
    floor_s: float  # nan where no span has one
    expected_s: float
    energy_j: float
    flops: float

    @property
    def over_floor_s(self) -> float:
        """Seconds above the floor of the spans that have one; nan where none has."""
        return self.total_s - self.floor_s


def work_by(trace: Trace, column: str = "name", chosen: Mask | None = None) -> list[Work]:
    """Device work grouped by ``name``, ``op``, ``module``, ``source``, ``phase``, ``node`` …, the longest first."""
    known = ("name", "op", "module", "source", "phase", "lane", "node", "copy", "collective", "shapes")
    if column not in known:
        raise InputError(f"cannot group spans by {column!r}{nearest(column, known)}")
    rows = np.flatnonzero(trace.gpu if chosen is None else trace.gpu & chosen)
    if not len(rows):
        return []
    ids = (trace.optional(column) if column in ("node", "copy", "collective", "shapes") else getattr(trace, column))[
        rows
    ]
    different, inverse = np.unique(ids, return_inverse=True)
    duration = trace.duration_s[rows]
    sums = _sums(trace, rows, inverse, len(different))
    count = np.bincount(inverse, minlength=len(different))
    low, high = np.full(len(different), np.inf), np.zeros(len(different))
    np.minimum.at(low, inverse, duration)
    np.maximum.at(high, inverse, duration)
    total = sums["total_s"]
    whole = float(total.sum()) or 1.0
    table = [
        Work(
            key=trace.words[different[i]],
            count=int(count[i]),
            mean_s=float(total[i] / count[i]),
            min_s=float(low[i]),
            max_s=float(high[i]),
            share_frac=float(total[i] / whole),
            **{name: float(column[i]) for name, column in sums.items()},
        )
        for i in range(len(different))
    ]
    return sorted(table, key=lambda row: -row.total_s)


def _sums(trace: Trace, rows: Index, group: NDArray[np.intp], num: int) -> dict[str, NDArray[np.float64]]:
    duration = trace.duration_s[rows]
    eligible, used = eligibility(trace, rows)
    launch = trace.launch[rows]
    calls = np.where(launch >= 0, trace.duration_s[np.maximum(launch, 0)], 0.0)
    first = np.zeros(len(rows), dtype=np.bool_)
    first[np.unique(launch, return_index=True)[1]] = True  # a graph's one launch is counted once
    columns = {
        "total_s": duration,
        "eligible_s": np.where(eligible, duration, 0.0),
        "tensor_core_s": np.where(used, duration, 0.0),
        "launch_s": np.where(first, calls, 0.0),
    }
    found: dict[str, NDArray[np.float64]] = {
        name: np.asarray(np.bincount(group, values, num), dtype=np.float64) for name, values in columns.items()
    }
    for name in ("floor_s", "expected_s", "energy_j", "flops"):
        values = trace.optional(name)[rows]
        known = np.bincount(group, np.isfinite(values), num) > 0
        found[name] = np.where(known, np.bincount(group, np.nan_to_num(values), num), np.nan)
    return found


def eligibility(trace: Trace, rows: Index) -> tuple[Mask, Mask]:
    """(whether Tensor Cores could do it, whether they do) for some device spans.

    A kernel is eligible if an op around its launch is a matrix product or convolution, or if its own name says so.
    """
    by_name = _words(trace, trace.name[rows], _ELIGIBLE_KERNEL)
    launch = trace.launch[rows]
    linked = launch >= 0
    callers, inverse = np.unique(launch[linked], return_inverse=True)
    eligible = by_name.copy()
    eligible[linked] |= _inside(trace, callers, _words(trace, trace.name, _ELIGIBLE) & trace.of_kind(Kind.OP))[inverse]
    numbers = np.unique(trace.name[rows])
    uses = np.zeros(len(trace.words), dtype=np.bool_)
    uses[[n for n in numbers.tolist() if tensor_core(trace.words[n]) == YES]] = True
    kernels = trace.of_kind(Kind.KERNEL)[rows]
    used = np.asarray(uses[trace.name[rows]]) & kernels
    return (eligible & kernels) | used, used


def _words(trace: Trace, ids: NDArray[np.int32], pattern: re.Pattern[str]) -> Mask:
    numbers = np.unique(ids)
    hit = np.zeros(len(trace.words), dtype=np.bool_)
    hit[[n for n in numbers.tolist() if pattern.search(trace.words[n])]] = True
    return np.asarray(hit[ids])


def _inside(trace: Trace, rows: NDArray[np.int32], marked: Mask) -> Mask:
    """Whether a span, or one around it, is marked."""
    found = marked[rows].copy()
    at = trace.parent[rows]
    while (at >= 0).any():
        found |= (at >= 0) & marked[np.maximum(at, 0)]
        at = np.where((at >= 0) & ~found, trace.parent[np.maximum(at, 0)], -1)
    return found


@dataclass(frozen=True, slots=True)
class TensorCores:
    """How much of kernel time could run on Tensor Cores, and does."""

    kernel_s: float
    eligible_s: float
    used_s: float

    @property
    def eligible_frac(self) -> float:
        return self.eligible_s / self.kernel_s if self.kernel_s else 0.0

    @property
    def used_frac(self) -> float:
        """Of eligible time; kernels whose names say nothing count as not using them."""
        return self.used_s / self.eligible_s if self.eligible_s else 0.0


def tensor_cores(trace: Trace) -> TensorCores:
    """Kernel time that is eligible for Tensor Cores and that uses them."""
    rows = np.flatnonzero(trace.gpu & trace.of_kind(Kind.KERNEL))
    eligible, used = eligibility(trace, rows)
    duration = trace.duration_s[rows]
    return TensorCores(float(duration.sum()), float(duration[eligible].sum()), float(duration[used].sum()))


@dataclass(frozen=True, slots=True)
class Launches:
    """How device work was asked for."""

    num_linked: int
    num_unlinked: int
    num_calls: int  # one call may launch a whole graph
    call_s: float  # host seconds in launch calls
    median_call_s: float
    median_delay_s: float  # from the call's end to the kernel's start
    num_short: int  # kernels shorter than their own launch call
    short_s: float
    num_under_10us: int
    median_kernel_s: float
    mean_depth: float  # work waiting on the device, averaged over time
    max_depth: int
    starved_frac: float  # of the time in which nothing was queued behind what ran


def launches(trace: Trace) -> Launches:
    """Launch overhead, delays, short kernels and queue depth."""
    work = trace.gpu
    rows = np.flatnonzero(work & (trace.launch >= 0))
    calls, first = np.unique(trace.launch[rows], return_index=True)
    called = trace.duration_s[calls]
    kernel = trace.duration_s[rows]
    delay = (trace.start_ns[rows] - trace.end_ns[trace.launch[rows]])[first] / 1e9
    one_each = np.bincount(np.searchsorted(calls, trace.launch[rows]), minlength=len(calls)) == 1
    single = np.flatnonzero(one_each)
    short = kernel[first][single] < called[single]
    mean_depth, max_depth, starved = _depth(trace, rows)
    return Launches(
        num_linked=len(rows),
        num_unlinked=int(work.sum()) - len(rows),
        num_calls=len(calls),
        call_s=float(called.sum()),
        median_call_s=_median(called),
        median_delay_s=_median(np.maximum(delay, 0.0)),
        num_short=int(short.sum()),
        short_s=float(kernel[first][single][short].sum()),
        num_under_10us=int((trace.duration_s[work & trace.of_kind(Kind.KERNEL)] < 10e-6).sum()),
        median_kernel_s=_median(trace.duration_s[work & trace.of_kind(Kind.KERNEL)]),
        mean_depth=mean_depth,
        max_depth=max_depth,
        starved_frac=starved,
    )


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def queue_depth(trace: Trace, rank: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(times in seconds, number of device spans that are launched and have not started) after each change."""
    chosen = trace.gpu & (trace.launch >= 0)
    rows = np.flatnonzero(chosen if rank is None else chosen & (trace.rank == rank))
    at, depth = _changes(trace, rows)
    return at / 1e9, depth


def _changes(trace: Trace, rows: Index) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    asked = np.minimum(trace.start_ns[trace.launch[rows]], trace.start_ns[rows])
    at = np.concatenate((asked, trace.start_ns[rows]))
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(rows))
    order = np.lexsort((-change, at))
    return at[order], np.cumsum(change[order])


def _depth(trace: Trace, rows: Index) -> tuple[float, int, float]:
    if not len(rows):
        return float("nan"), 0, float("nan")
    at, depth = _changes(trace, rows)
    lasts = np.diff(at)
    whole = int(lasts.sum()) or 1
    return float((depth[:-1] * lasts).sum() / whole), int(depth.max()), float(lasts[depth[:-1] == 0].sum() / whole)


@dataclass(frozen=True, slots=True)
class Roof:
    """One group of kernels beside what the device allows and what was expected of it."""

    key: str
    count: int
    measured_s: float
    floor_s: float
    expected_s: float
    energy_j: float

    @property
    def times_floor(self) -> float:
        return self.measured_s / self.floor_s if self.floor_s else float("nan")


def against_floor(trace: Trace, column: str = "module") -> list[Roof]:
    """Groups that have a floor, by the seconds they lose to it; only spans that have one are counted."""
    known = np.isfinite(trace.optional("floor_s"))
    rows = [
        Roof(work.key, work.count, work.total_s, work.floor_s, work.expected_s, work.energy_j)
        for work in work_by(trace, column, known)
    ]
    return sorted(rows, key=lambda row: row.floor_s - row.measured_s)
