"""``ridgeline calibrate``: measure what the cost model needs on this machine's GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ridgeline.cli.keep import keep
from ridgeline.cost.calibration import FOLDER
from ridgeline.errors import CalibrationError, InputError, MissingExtra
from ridgeline.hardware import device


def record_all(out: Path, budget_s: float, seed: int, device_name: str | None) -> None:
    """Record host costs, sustained power and operators into a folder, saying how far it is."""
    gpu = _gpu_name()
    device_name = device(device_name or gpu).name  # an unknown name is told before minutes are spent
    from ridgeline.bench.record import record_host, record_operators, record_power

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from error
    began = time.perf_counter()
    _say(f"{gpu}: host costs", began)
    record_host(out / "host.json")
    _say("power while looping", began)
    record_power(out / "power.json")
    _say("operators", began)
    num = record_operators(
        out / f"operators_seed{seed}.jsonl.gz", seed, budget_s, progress=lambda text: _say(text, began)
    )
    _say(f"{num} operators, host costs and power recorded in {out}", began)
    fit(out, device_name, began)


def fit(folder: Path, device_name: str, began: float) -> None:
    """Fit what was recorded and write the calibration beside it."""
    from ridgeline.bench.fitting import calibrate

    made = calibrate(device(device_name), folder, lambda text: _say(text, began))
    path = folder / f"{made['device']}.json"
    path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    keep("calibrate", made["device"], lambda: made, device=made["device"], measured=True, files=[("calibration", path)])
    _say(f"calibration written to {path}; to use it: export {FOLDER}={folder}", began)


def _gpu_name() -> str:
    """The GPU that will be measured, or an error that says where to go."""
    from ridgeline.bench.environment import environment

    try:
        found = environment()
    except ImportError as error:
        raise MissingExtra("PyTorch", "torch", "calibrating") from error
    if "device" not in found:
        raise CalibrationError(
            "no CUDA device here: run `ridgeline calibrate` on the machine whose GPU is to be measured"
        )
    return str(found["device"])


def _say(text: str, began: float) -> None:
    print(f"[{time.perf_counter() - began:5.0f} s] {text}", flush=True)
