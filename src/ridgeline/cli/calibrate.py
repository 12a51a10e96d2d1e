"""``ridgeline calibrate``: measure what the cost model needs on this machine's GPU."""

from __future__ import annotations

import time
from pathlib import Path

from ridgeline.errors import CalibrationError, InputError, MissingExtra


def record_all(out: Path, budget_s: float, seed: int) -> None:
    """Record host costs, sustained power and operators into a folder, saying how far it is."""
    gpu = _gpu_name()
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
    print(
        "to fit coefficients: keep the folder as data/recordings/NAME in a checkout and run benchmarks/fit_*.py there "
        "(such as `python benchmarks/fit_gemm.py --device NAME --write`); "
        "predictions on NAME then use data/calibrations/NAME.json"
    )


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
