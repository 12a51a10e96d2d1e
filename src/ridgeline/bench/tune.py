"""Tuning, when asked for: neighbors of the default launch configurations timed, the best kept in the tuning file."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from ridgeline.bench.race import Course, runner
from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, trials


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found for one kernel of one case."""

    kernel: str
    case: str
    default: str
    default_s: float
    best: str
    best_s: float
    num_tried: int
    kept: bool


def neighbors(config: Any) -> list[Any]:
    """Configurations that differ in warps, stages and programs; tiles stay, since the row decides them."""
    near = {
        "num_warps": lambda n: [n // 2, n, 2 * n],
        "num_stages": lambda n: [n - 1, n, n + 1],
        "programs_per_sm": lambda n: [n - 1, n, n + 1] if n else [0],
    }
    known = {f.name: getattr(config, f.name) for f in fields(config)}
    axes = {
        name: [v for v in near[name](known[name]) if v >= (name != "programs_per_sm")] for name in near if name in known
    }
    found = [replace(config, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return [made for made in found if getattr(made, "num_warps", 1) <= 32 and made != config]


def tune(name: str, of: Case, course: Course) -> list[Tuned]:
    """Tune every kernel of one case and write what is worth it to the tuning file."""
    trial = trials()[name][1]
    found: list[Tuned] = []
    for phase in trial.phases:
        build = _builder(trial, of, phase, course.device)
        with tuning.asked() as choices:
            build()()
        for kernel, sizes, default in {str(choice[:2]): choice for choice in choices}.values():
            found.append(_best(kernel, sizes, default, of, build, course))
    return found


def _builder(trial: Trial, of: Case, phase: str, device: torch.device) -> Callable[[], Callable[[], Any]]:
    """What makes a run anew, so that it plans anew; where a call changes its arguments, with state of its own."""
    generator = torch.Generator(device).manual_seed(0)
    laps = trial.laps
    if laps is not None:
        return lambda: laps(of, device, generator).runs["ridgeline"]
    return partial(runner, trial.call, trial.make(of, device, generator), phase, trial.constants)


def _best(kernel: str, sizes: dict[str, Any], default: Any, of: Case, build: Any, course: Course) -> Tuned:
    times: dict[Any, float] = {}
    for config in [default, *neighbors(default)]:
        with tuning.forced(kernel, config):
            try:
                times[config] = statistics.median(course.turns({"tuned": build()})["tuned"])
            except (KernelError, RuntimeError):  # too much shared memory, or too many registers: no candidate
                continue
    best = min(times, key=times.__getitem__)
    # A neighbor must be this many times faster than the default to replace it: less is noise
    kept = times[default] > 1.02 * times[best]
    if kept:
        tuning.record(kernel, sizes, best)
    return Tuned(kernel, str(of), str(default), times[default], str(best), times[best], len(times), kept)
