"""Several ways to compute one thing: timed when a shape is first seen on a device, the fastest taken from then on."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Way = Callable[[], Tensor]
ROUNDS, MOST_S = 5, 0.3
"""Rounds in which every way has its turn, and the seconds after which no further round begins."""
CYCLES_PER_S, START_TIMES = 2.0e9, 1.5
LEAST_START_S, MOST_START_S = 2e-5, 2e-3
"""What a device counts a second, at most, and how many times the host's own time it waits, within limits."""
MARGIN = 1.01
"""How much faster than the first way another must be: the first is the library's, which needs no explanation."""


class Contest:
    """Winners by problem. Where nothing may be timed (a graph is being recorded, no device) the first way is taken."""

    def __init__(self) -> None:
        self.won: dict[Hashable, str] = {}
        self.seconds: dict[Hashable, dict[str, float]] = {}

    def run(self, key: Hashable, ways: Mapping[str, Way], device: torch.device) -> Tensor:
        """The result, by the way that won for this key."""
        first = next(iter(ways))
        name = self.won.get(key)
        if name is None and len(ways) > 1 and may_time(device):
            self.seconds[key] = found = timed(ways, device)
            best = min(found, key=lambda each: found[each], default=first)
            name = best if found.get(first, float("inf")) > MARGIN * found.get(best, float("inf")) else first
            self.won[key] = name
        return ways[name if name is not None and name in ways else first]()


def prepared(plans: Iterable[Callable[[], Any]]) -> None:
    """Launches planned beside each other, whose kernels are compiled on the way: most of it is not done in Python.

    What cannot be planned is told when it is run.
    """

    def plan(made: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            made()

    wanted = list(plans)
    if len(wanted) > 1:
        with ThreadPoolExecutor(max(2, min(len(wanted), os.cpu_count() or 1))) as pool:
            list(pool.map(plan, wanted))


def may_time(device: torch.device) -> bool:
    """Whether kernels can be started and waited for here and now: the device is asked, not what a model is told."""
    return device.type == "cuda" and not torch._C._cuda_isCurrentStreamCapturing()


def timed(ways: Mapping[str, Way], device: torch.device) -> dict[str, float]:
    """Median seconds of every way that runs; what cannot run is left out."""
    return raced(runnable(ways, device), device)


def runnable(ways: Mapping[str, Way], device: torch.device) -> dict[str, Way]:
    """The ways that run, each run once: what is compiled for them is compiled."""
    found: dict[str, Way] = {}
    for name, way in ways.items():
        try:
            way()
            torch.cuda.synchronize(device)
            found[name] = way
        except Exception:  # too large a tile, no engine, no memory: another way is there
            continue
    return found


def raced(ways: Mapping[str, Way], device: torch.device) -> dict[str, float]:
    """Median seconds of every way, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    spent_s = 0.0
    for _ in range(ROUNDS):
        for name, way in ways.items():
            samples[name].append(_seconds(way, device))
            spent_s += samples[name][-1]
        if spent_s > MOST_S:
            break
    return {name: statistics.median(found) for name, found in samples.items()}


def _seconds(way: Way, device: torch.device) -> float:
    """Seconds that the device takes for a call, whatever the host takes to start it.

    The device is kept busy until the host has put all of the call into its queue: calls are recorded, and a way of
    three short kernels took 57 µs for 20 of them here, so that whoever had the fewest launches won (H200).
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream: Any = torch.cuda.current_stream(device)
    began = time.perf_counter()
    way()
    torch.cuda._sleep(_head_start(time.perf_counter() - began))
    start.record(stream)
    way()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _head_start(host_s: float) -> int:
    """Cycles to wait for a host that took so long for the same call."""
    return int(CYCLES_PER_S * (LEAST_START_S + min(MOST_START_S, START_TIMES * host_s)))
