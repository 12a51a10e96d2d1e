"""``ridgeline profile``: run a person's script, record its steady steps, and show where the device's time went."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ridgeline.api import profile
from ridgeline.cli import draw
from ridgeline.cli.keep import keep
from ridgeline.cli.source import dims_of, is_model_file, made_by
from ridgeline.errors import MissingExtra
from ridgeline.trace import Kind, Trace, steps
from ridgeline.units import show_seconds

WHOLE = "nothing: the program is recorded whole"


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that was asked for on the command line."""

    target: str
    args: tuple[str, ...]
    module: bool
    out: Path
    step_on: str
    options: Mapping[str, Any]
    top: int
    json: bool
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpRow:
    """All spans of one op in one module: how often, and measured beside expected and floor where these are known."""

    op: str
    module: str
    source: str
    num: int
    measured_s: float
    expected_s: float | None
    floor_s: float | None


def profile_and_show(asked: Asked) -> int:
    """Print what was recorded; the exit code is the script's own."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("PyTorch", "torch", "profile")
    from ridgeline.profiler.script import Ended, run_model, run_script

    run = profile(out=asked.out, **asked.options)
    if not asked.module and not asked.target.endswith(".py") and is_model_file(asked.target):
        behind = [text for name, text in pairwise(asked.args) if name == "--dim"]
        run_model(*made_by(asked.target, dims_of([*asked.dims, *behind])), run)
        ended = Ended(0, "", "calls of the model")
    else:
        ended = run_script(asked.target, asked.args, run, module=asked.module, step_on=asked.step_on)
    if ended.failure:
        print(ended.failure, file=sys.stderr, end="" if ended.failure.endswith("\n") else "\n")
    if ended.failure and not ended.counted:
        return ended.code
    trace = run.trace
    rows = op_rows(trace)
    if asked.json:
        draw.print_json(_document(trace, rows, asked, ended.counted))
    else:
        _show(trace, rows[: asked.top], asked, ended.counted)
    made = _document(trace, rows, asked, ended.counted)
    times = [step["total_s"] for step in made["steps"] if step["number"] >= 0]
    step_s = {"step_s": float(np.median(times)), "interval_s": [min(times), max(times)]} if times else {}
    keep("profile", asked.target, lambda: {**made, **step_s}, measured=True, settings={"args": " ".join(asked.args)},
         device=str(made["facts"].get("device", "")), files=[("trace", asked.out)])  # fmt: skip
    return ended.code


def op_rows(trace: Trace) -> list[OpRow]:
    """Device work by op and module, longest first; without a device, ops of the host by the time that is their own."""
    chosen, spent_s = np.flatnonzero(trace.gpu), trace.duration_s
    if not len(chosen):
        chosen, spent_s = np.flatnonzero(trace.of_kind(Kind.OP)), _own_s(trace)
    floor, expected = trace.optional("floor_s"), trace.optional("expected_s")
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in chosen.tolist():
        name = trace.words[trace.op[row]] or trace.words[trace.name[row]]
        groups.setdefault((name, trace.words[trace.module[row]], trace.words[trace.source[row]]), []).append(row)
    made = [
        OpRow(*key, len(rows), float(spent_s[rows].sum()), _sum(expected[rows]), _sum(floor[rows]))
        for key, rows in groups.items()
    ]
    return sorted(made, key=lambda row: -row.measured_s)


def _own_s(trace: Trace) -> Any:
    """Time of each span outside of the ops directly inside it."""
    inner = np.flatnonzero(trace.of_kind(Kind.OP) & (trace.parent >= 0))
    within = np.bincount(trace.parent[inner], weights=trace.duration_s[inner], minlength=len(trace))
    return np.maximum(trace.duration_s - within, 0.0)


def _sum(values: Any) -> float | None:
    """Known only where every span's is."""
    return None if np.isnan(values).any() else float(values.sum())


def _document(trace: Trace, rows: list[OpRow], asked: Asked, counted: str) -> dict[str, Any]:
    facts = {key: value for key, value in trace.meta.get("ridgeline", {}).items() if key != "notes"}
    return {
        "file": str(asked.out),
        "counted": counted or WHOLE,
        "facts": facts,
        "notes": list(trace.notes),
        "steps": [{"number": step.number, "total_s": step.total_s, "gpu_frac": step.gpu_frac} for step in steps(trace)],
        "counters": {name: float(counter.value.mean()) for name, counter in trace.counters.items()},
        "ops": [asdict(row) for row in rows],
    }


def _show(trace: Trace, rows: list[OpRow], asked: Asked, counted: str) -> None:
    out = draw.console()
    found = [step for step in steps(trace) if step.number >= 0]
    on = "device" if trace.gpu.any() else "host"
    total_s = sum(step.total_s for step in found) or trace.end_s
    num = f"{len(found)} step{'' if len(found) == 1 else 's'}"
    out.print(Text(f"{asked.target}: {num} recorded, counted by {counted or WHOLE}", style="bold"))
    for step in found:
        busy = f", {draw.percent(step.gpu_frac)} with a kernel running" if on == "device" else ""
        out.print(f"  step {step.number}: {show_seconds(step.total_s)}{busy}")
    out.print(_table(rows, on, total_s) if rows else "no op was recorded: the program called none of PyTorch's")
    for note in trace.notes:
        out.print(draw.hanging("· ", Text(note, style=draw.DIM)))
    out.print(f"\ntrace: {asked.out}; ui.perfetto.dev opens it, and `ridgeline explain` says why and what to do")


def _table(rows: list[OpRow], on: str, total_s: float) -> Table:
    """Columns that nothing is known for are left out."""
    cells: dict[str, list[str | Text]] = {
        "op": [row.op for row in rows],
        "module": [row.module for row in rows],
        "line": [row.source for row in rows],
        "n": [f"{row.num:,}" for row in rows],
        "measured": [show_seconds(row.measured_s) for row in rows],
        "share": [draw.percent(row.measured_s / total_s if total_s > 0 else 0.0) for row in rows],
        "expected": ["" if row.expected_s is None else show_seconds(row.expected_s) for row in rows],
        "of floor": ["" if row.floor_s is None else draw.ratio(row.measured_s, row.floor_s) for row in rows],
    }
    kept = [name for name in cells if any(cells[name])] or ["op"]
    sides = ["left" if name in ("op", "module", "line") else "right" for name in kept]
    made = draw.table(f"Where the {on}'s time went", *zip(kept, sides, strict=True))
    for row in zip(*(cells[name] for name in kept), strict=True):
        made.add_row(*row)
    return made
