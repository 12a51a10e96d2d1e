"""Board power and clocks through NVML, with nothing but ctypes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import MissingExtra


class Board:
    """One GPU's power meter."""

    def __init__(self, index: int = 0) -> None:
        try:
            self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise MissingExtra("NVIDIA's driver (libnvidia-ml.so.1)", "torch", "measuring power") from None
        self.lib.nvmlInit_v2()
        self.handle = ctypes.c_void_p()
        self.lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle))

    def energy_j(self) -> float:
        """Joules since the driver was loaded."""
        value = ctypes.c_ulonglong()
        if self.lib.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(value)):
            return float("nan")
        return value.value * 1e-3

    def power_w(self) -> float:
        value = ctypes.c_uint()
        return (
            float("nan") if self.lib.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(value)) else value.value * 1e-3
        )

    def limit_w(self) -> float:
        value = ctypes.c_uint()
        failed = self.lib.nvmlDeviceGetEnforcedPowerLimit(self.handle, ctypes.byref(value))
        return float("nan") if failed else value.value * 1e-3

    def clock_hz(self, which: int = 1) -> float:
        """Current clock; 1 is the SMs, 2 the memory."""
        value = ctypes.c_uint()
        return (
            float("nan")
            if self.lib.nvmlDeviceGetClockInfo(self.handle, which, ctypes.byref(value))
            else value.value * 1e6
        )

    def temperature_c(self) -> float:
        """Of the chip's core."""
        value = ctypes.c_uint()
        failed = self.lib.nvmlDeviceGetTemperature(self.handle, 0, ctypes.byref(value))
        return float("nan") if failed else float(value.value)


@dataclass(frozen=True, slots=True)
class Loop:
    """A sustained run: seconds an iteration, mean board power and SM clock."""

    iteration_s: float
    power_w: float
    clock_hz: float
    num: int


def sustained(run: Callable[[], Any], board: Board, seconds: float, settle_s: float = 0.4) -> Loop:
    """Run back to back; the first ``settle_s`` bring clock and temperature to where they stay."""
    import torch

    _loop(run, settle_s)
    energy, began, clocks, num = board.energy_j(), time.perf_counter(), [], 0
    while (elapsed := time.perf_counter() - began) < seconds:
        num += _loop(run, min(0.1, seconds - elapsed))
        clocks.append(board.clock_hz())
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    return Loop(elapsed / num, (board.energy_j() - energy) / elapsed, sum(clocks) / len(clocks), num)


def _loop(run: Callable[[], Any], seconds: float) -> int:
    import torch

    began, num = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            run()
        num += 4
        torch.cuda.synchronize() if num % 16 == 0 else None
    torch.cuda.synchronize()
    return num
