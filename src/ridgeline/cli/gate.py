"""``ridgeline gate``: fails a build when runs are slower than the baseline by more than allowed, and says why."""

from __future__ import annotations

import re
from pathlib import Path

from rich.text import Text

from ridgeline.api import gate
from ridgeline.cli.diff import changes_table
from ridgeline.cli.draw import DIM, console, hanging, percent, print_json
from ridgeline.errors import InputError
from ridgeline.findings.regression import Gate

PASSED, REGRESSED = 0, 1


def gate_and_show(baseline: Path, runs: Path, max_regression: str, json: bool) -> int:
    """The exit code: 0 passed, 1 regressed."""
    found = gate(baseline, runs, fraction(max_regression))
    if json:
        print_json(found.to_dict())
    else:
        show(found)
    return REGRESSED if found.failed else PASSED


def fraction(text: str) -> float:
    """``3%`` and ``0.03`` are the same."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if not match:
        raise InputError(f"--max-regression {text!r} is no share: write 3% or 0.03")
    value = float(match.group(1))
    found = value / 100 if match.group(2) else value
    if found >= 1:
        raise InputError(f"--max-regression {text!r} allows twice the time: write 3% or 0.03")
    return found


def _runs(num: int) -> str:
    return "1 run" if num == 1 else f"{num} runs"


def show(found: Gate) -> None:
    out, v = console(), found.verdict
    out.print(
        Text(
            found.message,
            style={
                "regression": "bold red",
                "inconclusive": "bold yellow",
                "ok": "bold green",
                "improvement": "bold green",
            }[v.verdict],
        )
    )
    sides = f"{_runs(v.num_baseline)} of the baseline, {_runs(v.num_runs)} judged"
    chance = f"p = {v.p_slower:.2g} that runs no slower than the baseline look like this by chance"
    out.print(Text(f"{sides}; a run scatters by {percent(v.noise_frac)}; {chance}", style=DIM))
    for note in v.notes:
        out.print(hanging("· ", Text(note, style=DIM)))
    if found.causes and v.verdict != "ok":
        out.print()
        changes_table(list(found.causes), "What changed most")
