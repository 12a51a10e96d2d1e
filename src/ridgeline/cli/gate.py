"""``ridgeline gate``: fails a build when runs are slower than the baseline by more than allowed, and says why."""

from __future__ import annotations

import re
import sys
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from ridgeline.api import gate
from ridgeline.cli.diff import changes_table
from ridgeline.cli.draw import DIM, console, hanging, percent, print_json
from ridgeline.cli.keep import chosen, keep
from ridgeline.errors import InputError
from ridgeline.findings.regression import Gate
from ridgeline.web import compare

PASSED, REGRESSED = 0, 1


def gate_and_show(
    baseline: Path, runs: Path, max_regression: str, json: bool, html: Path | None = None, markdown: Path | None = None
) -> int:
    """The exit code: 0 passed, 1 regressed."""
    with TemporaryDirectory() as folder:
        found = gate(_baseline(baseline, Path(folder)), runs, fraction(max_regression))
    for path, write in ((html, compare.gate_page), (markdown, compare.gate_markdown)):
        if path is not None:
            print(f"report: {compare.write_text(write(found), path)}", file=sys.stderr)
    if json:
        print_json(found.to_dict())
    else:
        show(found)
    keep("gate", runs.name, lambda: {**found.to_dict(), "step_times_s": _step_times(runs)}, measured=True,
         quiet=json)  # fmt: skip
    return REGRESSED if found.failed else PASSED


def _baseline(baseline: Path, folder: Path) -> Path:
    """The path itself, or for ``store:NAME`` the step times of that run (or of the five newest of that subject)."""
    if not str(baseline).startswith("store:"):
        return baseline
    from ridgeline.store.store import Store

    name = str(baseline).removeprefix("store:")
    with Store(chosen()) as store:
        records = store.runs(subject=name, measured=True, limit=5) or [store.run(name)]
        times: dict[str, list[float]] = {}
        for record in records:
            document = store.document(record.id)
            steps = [step["total_s"] for step in document.get("steps", ()) if isinstance(step, dict)]
            times |= document.get("step_times_s") or ({record.id: steps} if steps else {})
    if not times:
        raise InputError(f"{name!r} in the store has no step times: keep a profile or a gate with --store")
    (folder / "baseline.json").write_text(dumps(times))
    return folder / "baseline.json"


def _step_times(runs: Path) -> dict[str, list[float]]:
    """What was judged, so that it can be the baseline of later runs."""
    from ridgeline.findings.regression import runs_of

    return {run.name: list(run.steps_s) for run in runs_of(runs)}


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
