"""Timing on the device: events around cold and warm runs, and kernels by name from the profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
MARK = "spin_kernel"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median, spread (10th to 90th percentile) and number of repetitions of one measurement."""

    median_s: float
    low_s: float
    high_s: float
    num: int


class Clock:
    """Measures callables on the current CUDA device as ``triton.testing.do_bench`` does: by events, with a cold L2."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def cold(self, run: Callable[[], Any], warmup_s: float, rep_s: float, max_num: int = 100) -> Timing:
        """Event time with the L2 flushed before every repetition."""
        return self._timed(run, warmup_s, rep_s, max_num, self.flush.zero_)

    def warm(self, run: Callable[[], Any], warmup_s: float, rep_s: float, max_num: int = 100) -> Timing:
        """Event time with inputs as the previous repetition left them."""
        return self._timed(run, warmup_s, rep_s, max_num, lambda: torch.cuda._sleep(150_000))

    def _timed(
        self, run: Callable[[], Any], warmup_s: float, rep_s: float, max_num: int, between: Callable[[], Any]
    ) -> Timing:
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once_s = max(time.perf_counter() - began, 1e-5)
        for _ in range(max(1, min(50, int(warmup_s / once_s)))):
            run()
        num = max(5, min(max_num, int(rep_s / once_s)))
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num)]
        for start, end in pairs:
            between()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return _summary([start.elapsed_time(end) * 1e-3 for start, end in pairs])

def _summary(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    return Timing(
        statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(ordered)
    )


def host_time(run: Callable[[], Any], num: int = 300) -> float:
    """Median host seconds a call takes to return, the device kept far from full."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    samples = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(num // 7 + 1):
            run()
        samples.append((time.perf_counter() - began) / (num // 7 + 1))
        torch.cuda.synchronize()
    return statistics.median(samples)


def kernels_of(runs: Iterable[Callable[[], Any]]) -> list[list[tuple[str, float]]]:
    """Device kernels (name, seconds) each callable launched, told apart by marker kernels around them.

    ``runs`` may prepare the next callable (inputs, cache state) while it is asked for it: that is not recorded.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for run in runs:
            torch.cuda._sleep(100)
            run()
            torch.cuda._sleep(100)
        torch.cuda.synchronize()
    return split_by_marks(device_events(prof))


def device_events(prof: Any) -> list[tuple[int, str, float]]:
    """(start in ns, name, seconds) of everything that ran on the device, in order."""
    from torch.autograd import DeviceType

    events = [
        (e.start_ns(), e.name(), e.duration_ns() * 1e-9)
        for e in prof.profiler.kineto_results.events()
        if e.device_type() == DeviceType.CUDA
    ]
    return sorted(events)


def split_by_marks(events: list[tuple[int, str, float]]) -> list[list[tuple[str, float]]]:
    """Stretches between an opening and a closing marker; what runs outside them (flushes) is dropped."""
    stretches: list[list[tuple[str, float]]] = []
    inside = False
    for _, name, seconds in events:
        if MARK in name:
            inside = not inside
            if inside:
                stretches.append([])
        elif inside:
            stretches[-1].append((name, seconds))
    return stretches
