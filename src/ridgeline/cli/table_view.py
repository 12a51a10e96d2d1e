"""A table of a trace in a terminal, and as a CSV file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.text import Text

from ridgeline.cli.draw import DIM, clipped, console, hanging, percent, print_json, shortened, table
from ridgeline.errors import InputError
from ridgeline.trace.analyses.table import Table, Value
from ridgeline.units import show_bytes


def show_table(found: Table, top: int | None, json: bool, csv: Path | None) -> None:
    """The first rows, or all of them as JSON or CSV."""
    cut = found if top is None else found.top(top)
    if csv is not None:
        try:
            csv.write_text(cut.to_csv(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {csv}: {error.strerror}; choose a folder you may write to") from error
        print(f"{len(cut):,} rows: {csv}", file=sys.stderr)
    if json:
        print_json(cut.to_dict())
    elif csv is None:
        _show(found, 30 if top is None else top)


def _show(found: Table, top: int) -> None:
    out, cut = console(), found.top(top)
    if not len(cut):
        out.print(Text(f"{found.name}: none in this trace{f' ({found.note})' if found.note else ''}", style=DIM))
        return
    kept = [i for i, name in enumerate(cut.columns) if any(_text(name, row[i], 60) for row in cut.rows)]
    names = [i for i in kept if any(isinstance(row[i], str) for row in cut.rows)]
    numbers = sum(max(len(_heading(cut.columns[i])), *(len(_text(cut.columns[i], row[i], 60)) for row in cut.rows)) + 2
                  for i in kept if i not in names)  # fmt: skip
    room = max(14, (out.width - numbers) // max(1, len(names)) - 2)
    made = table(found.name, *((_heading(cut.columns[i]), "left" if i in names else "right") for i in kept))
    for row in cut.rows:
        made.add_row(*(_text(cut.columns[i], row[i], room) for i in kept))
    out.print(made)
    if len(found) > top:
        out.print(Text(f"{len(found) - top:,} more rows with --top {len(found)} or --csv", style=DIM))
    if found.note:
        out.print(hanging("· ", Text(found.note, style=DIM)))


def _heading(column: str) -> str:
    """``total_ms`` as ``total ms``; units that the cells show are left out."""
    for ending in ("_bytes_per_s", "_frac"):
        column = column.removesuffix(ending)
    return column.replace("_", " ")


def _text(column: str, value: Value, room: int) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, str):
        return shortened(value, room) if column in ("module", "source") else clipped(value, room)
    if column.endswith("_frac"):
        return percent(value)
    if column.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if column.endswith("bytes"):
        return show_bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.1f}"
