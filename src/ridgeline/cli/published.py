"""``ridgeline validate`` on a published file: error by source, the worst rows, what could not be used, what changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ridgeline.api import validate_published
from ridgeline.cli import draw
from ridgeline.errors import InputError
from ridgeline.store.validations import Change, Run, changes, runs
from ridgeline.units import show_seconds
from ridgeline.validation.operators import Score
from ridgeline.validation.verdict import PublishedCheck, Unused


def published_and_show(path: Path, worst: int, as_json: bool, against: str | None, keep: bool) -> None:
    """Judge the file and print the verdicts, as tables or as JSON."""
    check, run, before = validate_published(path, keep=keep)
    before = _earlier(check.name, against, run, before)
    moved = changes(before, run) if before is not None else []
    if as_json:
        draw.print_json(check.to_dict() | _changes_dict(before, moved))
        return
    out = draw.console()
    out.print(_scores(check))
    if worst and check.rows:
        out.print()
        rows = check.worst(worst)
        made = draw.table(
            "Worst",
            ("line", "right"),
            ("what", "left"),
            ("metric", "left"),
            ("published", "right"),
            ("predicted", "right"),
            ("error", "right"),
        )
        made.columns[1].no_wrap = False
        for row in rows:
            shown = (_value(row.measured, row.unit), _value(row.predicted, row.unit))
            made.add_row(str(row.row), row.what, row.metric, *shown, f"{row.error:+.0%}")
        out.print(made)
    _show_unused(check.unused, max(worst, 5))
    _show_changes(before, moved, check, max(worst, 10) if against else 0)


def _earlier(name: str, against: str | None, run: Run, before: Run | None) -> Run | None:
    """The run to compare with: the last one, or the one that ``against`` dates."""
    if against is None or against.lower() == "last":
        return before
    kept = [found for found in runs(name) if found.at.startswith(against) and found.at != run.at]
    if not kept:
        dates = ", ".join(found.at for found in runs(name)[-5:]) or "none"
        raise InputError(f"no kept validation of {name} from {against!r}; the newest are {dates}")
    return kept[-1]


def _changes_dict(before: Run | None, moved: Sequence[Change]) -> dict[str, Any]:
    if before is None:
        return {}
    rows = [{"key": change.key, "before": change.before, "after": change.after} for change in moved]
    return {"against": {"at": before.at, "version": before.version, "changed": rows}}


def _scores(check: PublishedCheck) -> Table:
    made = draw.table(
        f"Predicted against published: {check.name}",
        ("source", "left"),
        ("n", "right"),
        ("mean error", "right"),
        ("median", "right"),
        ("bias", "right"),
        ("inside 90 %", "right"),
    )
    made.columns[0].no_wrap, made.columns[0].overflow = False, "fold"
    for source, found in check.by().items():
        # The address without its host and without the hash of the commit; --json has it whole
        made.add_row(re.sub(r"@[0-9a-f]{7,40}", "", source.removeprefix("github:")), *_cells(found))
    metrics = check.by("metric")
    if len(metrics) > 1:
        made.add_section()
        for metric, found in metrics.items():
            made.add_row(Text(metric, style="italic"), *_cells(found))
    made.add_section()
    if check.all is not None:
        made.add_row(Text("all", style="bold"), *_cells(check.all))
    return made


def _cells(found: Score) -> list[Text | str]:
    style = "green" if found.mape <= 0.10 else "yellow" if found.mape <= 0.15 else "red"
    inside = Text(f"{found.coverage:.0%}", style="green" if found.coverage >= 0.85 else "yellow")
    mean = Text(f"{found.mape:.1%}", style=style)
    return [f"{found.n:,}", mean, f"{found.median_ape:.1%}", f"{found.bias:+.1%}", inside]


def _value(value: float, unit: str) -> str:
    return show_seconds(value) if unit == "s" else f"{value:.4g} {unit}"


def _show_unused(unused: Sequence[Unused], most: int) -> None:
    if not unused:
        return
    out, reasons = draw.console(), Counter(row.why for row in unused)
    out.print(f"\n{len(unused)} rows could not be used:", style="yellow")
    for why, count in reasons.most_common(most):
        lines = [row.row for row in unused if row.why == why]
        shown = ", ".join(map(str, lines[:4])) + (", …" if len(lines) > 4 else "")
        out.print(Text(f"  {count:>4} × {why} (line {shown})"))
    if len(reasons) > most:
        out.print(f"  … and {len(reasons) - most} more reasons; --json lists every row", style=draw.DIM)


def _show_changes(before: Run | None, moved: Sequence[Change], check: PublishedCheck, most: int) -> None:
    if before is None:
        return
    out, better = draw.console(), sum(change.better for change in moved)
    out.print(f"\nSince {before.at}: {better} rows better, {len(moved) - better} worse", style=draw.DIM)
    if not most or not moved:
        return
    what = {row.key: row for row in check.rows}
    made = draw.table("Changed", ("line", "right"), ("what", "left"), ("before", "right"), ("now", "right"))
    made.columns[1].no_wrap = False
    for change in moved[:most]:
        row = what[change.key]
        style = "green" if change.better else "red"
        made.add_row(str(row.row), row.what, f"{change.before:.1%}", Text(f"{change.after:.1%}", style=style))
    out.print(made)
    if len(moved) > most:
        out.print(f"  … and {len(moved) - most} more; --json lists them all", style=draw.DIM)
