"""Power, clocks and temperature of the board, sampled beside a run by a thread of their own."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ridgeline.bench.power import Board
from ridgeline.errors import RidgelineError

Sample = dict[str, float]
_SMI_FIELDS = {
    "power.draw": ("power_w", 1.0),
    "clocks.sm": ("clock_hz", 1e6),
    "clocks.mem": ("dram_hz", 1e6),
    "temperature.gpu": ("temperature_c", 1.0),
}


@dataclass(slots=True)
class Samples:
    """Moments (Unix nanoseconds) and what was read then."""

    source: str
    at_ns: list[int] = field(default_factory=list)
    values: list[Sample] = field(default_factory=list)

    def columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """One column a quantity; readings the board refused are left out."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for at_ns, sample in zip(self.at_ns, self.values, strict=True):
            for name, value in sample.items():
                if value == value:
                    times, values = found.setdefault(name, ([], []))
                    times.append(at_ns)
                    values.append(value)
        return found


class Sampler:
    """Reads the board until stopped: NVML if the driver is there, else nvidia-smi, else nothing, and says which."""

    def __init__(self, index: int = 0, period_s: float = 0.02) -> None:
        self.read, source = reader(index)
        self.samples = Samples(source)
        self.period_s = period_s if source == "NVML" else max(period_s, 0.25)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.read is not None and self._thread is None:
            self._thread = threading.Thread(target=self._loop, args=(self.read,), name="ridgeline power", daemon=True)
            self._thread.start()

    def stop(self) -> Samples:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        return self.samples

    def _loop(self, read: Callable[[], Sample]) -> None:
        while not self._stop.is_set():
            value = read()
            self.samples.at_ns.append(time.time_ns())
            self.samples.values.append(value)
            self._stop.wait(self.period_s)


def reader(index: int) -> tuple[Callable[[], Sample] | None, str]:
    """How the board can be read here."""
    try:
        board = Board(index)
        if board.power_w() == board.power_w():
            return lambda: {
                "power_w": board.power_w(),
                "clock_hz": board.clock_hz(1),
                "dram_hz": board.clock_hz(2),
                "temperature_c": board.temperature_c(),
            }, "NVML"
    except (RidgelineError, OSError, AttributeError):
        pass
    if shutil.which("nvidia-smi") and _from_smi(index):
        return lambda: _from_smi(index), "nvidia-smi"
    return None, "none: no NVIDIA driver answers, so power and clocks are not in the trace"


def _from_smi(index: int) -> Sample:
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_smi(done.stdout) if done.returncode == 0 else {}


def parse_smi(text: str) -> Sample:
    """One line of nvidia-smi's numbers; what is not supported there is not a number here either."""
    found: Sample = {}
    for (name, scale), word in zip(_SMI_FIELDS.values(), text.strip().split(","), strict=False):
        try:
            found[name] = float(word) * scale
        except ValueError:
            continue
    return found
