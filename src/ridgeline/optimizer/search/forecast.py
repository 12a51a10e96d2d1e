"""The cost model's forecast before anything is measured: floor, host time, and expected gain by execution."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ridgeline.cost.estimate import estimate
from ridgeline.cost.prediction import Prediction
from ridgeline.engine.example_inputs import Inputs
from ridgeline.errors import RidgelineError
from ridgeline.hardware import Device
from ridgeline.optimizer.search.blocks import ATTENTION, CONVOLUTIONS, PRODUCTS, REST

MATRIX_OPS = ("mm", "bmm", "addmm", "matmul", "linear", "baddbmm", "conv")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds by execution, the floor, and kernels and host time of an eager step."""

    device: str
    floor_s: float
    expected_s: dict[str, float]
    busy_s: float
    host_s: float
    num_kernels: int
    matrix_frac: float
    slowest: tuple[tuple[str, float, float], ...]  # op, expected and floor seconds, largest gap first
    spent_s: float
    floors: tuple[tuple[str, str, float], ...] = ()  # module, kind of kernel, floor seconds
    num_seen: int | None = None  # kernels, at most five per call: what determines compile time

    @property
    def host_bound(self) -> bool:
        """Whether eager's host time exceeds its device time."""
        return self.host_s > self.busy_s

    def gain(self, execution: str) -> float:
        return self.expected_s["eager"] / self.expected_s[execution] if execution in self.expected_s else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "floors"}


def known_device(device: torch.device) -> Device | None:
    """The description of a CUDA device, if there is one."""
    if device.type != "cuda":
        return None
    from ridgeline.profiler.floors import device_called

    return device_called(torch.cuda.get_device_name(device))


def forecast(
    model: nn.Module, inputs: Inputs, mode: str, loss: Callable[..., Any] | None, device: Device
) -> Forecast | str:
    """Capture and price the model; returns the reason if that fails."""
    from ridgeline.capture import capture

    began = time.perf_counter()
    try:
        graph = capture(model, inputs.args, dict(inputs.kwargs), mode, optimizer=None, loss=loss)
        found = {name: estimate(graph, device, name) for name in ("eager", "cudagraph", "compiled")}
    except Exception as error:  # a model that cannot be captured or priced can still be measured
        kind = "" if isinstance(error, RidgelineError) else f"{type(error).__name__}: "
        return f"not priced: {kind}{str(error).splitlines()[0][:200] if str(error) else ''}"
    eager = found["eager"]
    by_op = eager.by("op")
    total_s = sum(row["expected_s"] for row in by_op) or 1.0
    matrix_s = sum(row["expected_s"] for row in by_op if any(word in str(row["op"]) for word in MATRIX_OPS))
    gaps = sorted(by_op, key=lambda row: row["floor_s"] - row["expected_s"])
    return Forecast(
        device.name, eager.floor_s, {name: made.expected_s for name, made in found.items()}, eager.busy_s, eager.host_s,
        eager.num_kernels, matrix_s / total_s,
        tuple((str(row["op"]), row["expected_s"], row["floor_s"]) for row in gaps[:5]), time.perf_counter() - began,
        # At most five kernels per call: a transposed convolution in pieces launches thousands (2,111 in one forecast,
        # which priced a single layer at 101 s), and is one call for a compiler.
        _floors(eager), sum(min(row.num_kernels, 5 * row.times) for row in eager.rows()),
    )  # fmt: skip


def _floors(found: Prediction) -> tuple[tuple[str, str, float], ...]:
    """Floors by module and kind of kernel."""
    sums: dict[tuple[str, str], float] = {}
    for row in found.rows():
        key = (row.module, _kind(row.op))
        sums[key] = sums.get(key, 0.0) + row.floor_s
    return tuple((module, kind, seconds) for (module, kind), seconds in sums.items() if seconds > 0)


def _kind(op: str) -> str:
    if "attention" in op:
        return ATTENTION
    if "conv" in op:
        return CONVOLUTIONS
    return PRODUCTS if any(word in op for word in MATRIX_OPS) else REST
