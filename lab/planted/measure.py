"""Runs cases one after another in a process of its own: their step times, or their traces."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import lab.planted.cases  # noqa: F401  registers them
from lab.planted.registry import CASES, Case, Program, Setting, running
from ridgeline.profiler.marks import collections_marked


def main() -> None:
    args = _arguments()
    setting = Setting(args.device, args.tiny)
    note = Notes(args.folder / f"{args.phase}.jsonl")
    _settle()
    for name in _awaited(args.after) if args.after else args.cases:
        note(case=name, event="began")
        try:
            note(case=name, event="done", **_one(args, setting, CASES[name]))
        except Exception as error:  # one broken case must not cost the others
            note(
                case=name,
                event="failed",
                error=f"{type(error).__name__}: {error}",
                where=traceback.format_exc()[-1500:],
            )
            return  # what it left on the device (a capture, a generator) would break those after it: a process anew
        _forget(setting)
    note(case="", event="end")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=("warm", "time", "trace"))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--after", type=Path, help="get ready, and begin when this file names the cases")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def _awaited(path: Path) -> list[str]:
    """The cases to do, once they are known; none if whoever knows has gone."""
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            return []
        time.sleep(0.05)
    return path.read_text().split()


class Notes:
    """A line of JSON for everything that happened, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, **facts: Any) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps({"at_s": time.time(), **facts}) + "\n")


def _one(args: argparse.Namespace, setting: Setting, case: Case) -> dict[str, Any]:
    began = time.perf_counter()
    found = {"warm": warmed, "time": times, "trace": traces}[args.phase](setting, case, args.folder)
    return found | {"case_s": time.perf_counter() - began}


def _settle() -> None:
    """Load what is loaded on first use, then take it out of the collector's sight: a long-running trainer's state."""
    import torch._dynamo

    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(1).add(1)
    gc.collect()
    gc.freeze()


def _forget(setting: Setting) -> None:
    gc.collect()
    gc.freeze()
    if setting.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _build(setting: Setting, case: Case, fixed: bool) -> Program:
    torch.manual_seed(0)
    return case.build(setting, fixed)


def warmed(setting: Setting, case: Case, folder: Path) -> dict[str, Any]:
    """The fixed program for two steps (or both), so that what it compiles lies in the cache."""
    for fixed in ((True, False) if case.both else (True,)) if case.compiles else ():
        program = _build(setting, case, fixed)
        with running([program]), program.scope():
            for _ in range(2):
                program.step()
            setting.synchronize()
    return {}


# ---------------------------------------------------------------- step times, nothing attached


def times(setting: Setting, case: Case, folder: Path) -> dict[str, Any]:
    """Step times of both programs, in turns, with the board's energy beside them."""
    board = _board() if setting.cuda else None
    found: dict[str, dict[str, Any]] = {
        v: {"step_s": [], "mean_s": [], "energy_j": [], "clock_hz": []} for v in case.variants
    }
    if case.rounds == 1:  # what one program leaves in the process would burden the other
        for variant in case.variants:
            _in_turns(setting, case, {variant: _build(setting, case, variant == "fixed")}, board, found)
            _forget(setting)
    else:
        _in_turns(setting, case, {v: _build(setting, case, v == "fixed") for v in case.variants}, board, found)
    for facts in found.values():
        facts |= _summary(facts["step_s"])
    return {"cause": case.cause, "change": case.change, "traced": case.traced, **found}


def _in_turns(setting: Setting, case: Case, programs: dict[str, Program], board: Any, found: dict[str, Any]) -> None:
    with running(list(programs.values())):
        for turn in range(case.rounds):
            for variant, program in programs.items():
                count = case.planted_steps if variant == "planted" and case.planted_steps else case.steps
                with program.scope():
                    _round(setting, program, case.warmup if not turn else 2, count, board, found[variant])


def _round(setting: Setting, program: Program, warmup: int, count: int, board: Any, into: dict[str, Any]) -> None:
    for _ in range(warmup):
        program.step()
    setting.synchronize()
    marks = [_mark(setting)]
    energy, began = board.energy_j() if board else float("nan"), time.perf_counter()
    for i in range(count):
        program.step()
        marks.append(_mark(setting))
        if board and i == count // 2:
            into["clock_hz"].append(board.clock_hz())
    setting.synchronize()
    into["mean_s"].append((time.perf_counter() - began) / count)
    into["energy_j"].append(((board.energy_j() - energy) / count) if board else None)
    into["step_s"] += [_between(setting, a, b) for a, b in pairwise(marks)]


def _mark(setting: Setting) -> Any:
    """A moment on the device's clock, taken without waiting for it."""
    if not setting.cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(setting: Setting, a: Any, b: Any) -> float:
    return a.elapsed_time(b) * 1e-3 if setting.cuda else b - a


def _summary(step_s: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(step_s, n=4)
    return {"median_s": middle, "low_s": low, "high_s": high, "num": len(step_s)}


def _board() -> Any:
    try:
        from ridgeline.bench.power import Board

        return Board()
    except Exception:
        return None


# ---------------------------------------------------------------- traces


def traces(setting: Setting, case: Case, folder: Path) -> dict[str, Any]:
    """Profiles of both programs under one schedule, and of the planted one with its Python stack."""
    found: dict[str, Any] = {}
    for variant in case.variants:
        program = _build(setting, case, variant == "fixed")
        with running([program]), program.scope():
            for _ in range(max(3, case.warmup)):
                program.step()
            setting.synchronize()
            found[variant] = _profile(setting, program, folder / f"{case.name}.{variant}.json", active=2)
            if case.stack and variant == case.variants[0]:
                found["stack"] = _profile(setting, program, folder / f"{case.name}.stack.json", active=1, stack=True)
                if case.name == "fp32_logits":
                    _memory_history(setting, program, folder / "memory_snapshot.pickle")
            if case.plain:
                kind = "plain" if variant == "fixed" else "planted-plain"
                found[kind] = _profile_plainly(setting, program, folder / f"{case.name}.{kind}.json")
            found[variant]["facts"] = program.facts | _host_facts() | _memory_facts(setting)
        del program
        _forget(setting)
    return found


def _profile(setting: Setting, program: Program, path: Path, active: int, stack: bool = False) -> dict[str, Any]:
    """Warm-up of one step under the profiler, then ``active`` marked steps, the device idle at their start."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.cuda else [])
    plan = schedule(wait=0, warmup=1, active=active, repeat=1)
    marks = nullcontext() if stack else collections_marked()  # the stack's tracer must not meet code inside one
    with (
        marks,
        profile(
            activities=activities, schedule=plan, record_shapes=True, with_stack=stack, on_trace_ready=_saved(path)
        ) as recorder,
    ):
        program.step()
        setting.synchronize()
        recorder.step()
        began = time.perf_counter()
        for i in range(active):
            program.step()
            if i == active - 1:
                setting.synchronize()
                wall_s = time.perf_counter() - began
            recorder.step()
    return {"file": path.name, "profiled_mean_s": wall_s / active}


def _profile_plainly(setting: Setting, program: Program, path: Path, num: int = 3) -> dict[str, Any]:
    """As most people record: a few steps inside of a profiler, and nothing else asked of it."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.cuda else [])
    with profile(activities=activities) as recorder:
        began = time.perf_counter()
        for _ in range(num):
            program.step()
        setting.synchronize()
        wall_s = time.perf_counter() - began
    _saved(path)(recorder)
    return {"file": path.name, "profiled_mean_s": wall_s / num}


def _saved(path: Path) -> Callable[[Any], None]:
    def save(recorder: Any) -> None:
        partial = path.with_suffix(".part")
        recorder.export_chrome_trace(str(partial))
        partial.rename(path)

    return save


def _host_facts() -> dict[str, Any]:
    return {"num_cores": os.cpu_count(), "num_usable_cores": len(os.sched_getaffinity(0))}


def _memory_facts(setting: Setting) -> dict[str, Any]:
    if not setting.cuda:
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
    }


def _memory_history(setting: Setting, program: Program, path: Path) -> None:
    if not setting.cuda:
        return
    torch.cuda.memory._record_memory_history(max_entries=4000, stacks="python")
    program.step()
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


if __name__ == "__main__":
    main()
