"""How fast an engine answers: latencies with their spread, throughput, and what of it is Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.units import show_seconds

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of single calls, one after another."""

    num: int
    min_s: float
    mean_s: float
    median_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float
    enqueue_s: float  # median until the call returns, before the device is done
    batch: int

    @property
    def per_s(self) -> float:
        """Queries a second, one call after another."""
        return 1 / self.mean_s

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "queries_per_s": self.per_s, "samples_per_s": self.per_s * self.batch}

    def __str__(self) -> str:
        parts = [(n, getattr(self, f"{n}_s")) for n in ("min", "mean", "median", "p90", "p95", "p99", "max", "enqueue")]
        times = ", ".join(f"{name} {show_seconds(value)}" for name, value in parts)
        return f"{self.num} calls: {times}; {self.per_s:,.0f} queries/s, {self.per_s * self.batch:,.0f} samples/s"


def bench(
    engine: Engine, inputs: list[torch.Tensor], *, iterations: int = 10, duration_s: float = 3.0, warmup_s: float = 0.2,
    clock: Callable[[], float] = time.perf_counter,
) -> Latencies:  # fmt: skip
    """Call the engine at least ``iterations`` times and for ``duration_s``, after a warm-up."""
    cuda = engine.device.type == "cuda"

    def once() -> tuple[float, float]:
        began = clock()
        engine.on_inputs(inputs)
        issued = clock()
        if cuda:
            torch.cuda.synchronize(engine.device)
        return clock() - began, issued - began

    until = clock() + warmup_s
    once()
    while clock() < until:
        once()
    took, enqueued = list[float](), list[float]()
    until = clock() + duration_s
    while len(took) < iterations or clock() < until:
        total, issued = once()
        took.append(total)
        enqueued.append(issued)
    took.sort()
    enqueued.sort()
    at = lambda share: took[min(len(took) - 1, int(share * len(took)))]
    batch = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
    return Latencies(len(took), took[0], sum(took) / len(took), at(0.5), at(0.9), at(0.95), at(0.99), took[-1],
                     enqueued[len(enqueued) // 2], batch)  # fmt: skip
