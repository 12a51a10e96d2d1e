"""``ridgeline validate``: predictions of operators beside a person's measurements, with the error by kind."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from ridgeline.cli import draw
from ridgeline.cost.check import Check, CheckedRow, Score
from ridgeline.journeys import validate
from ridgeline.units import show_seconds


def validate_and_show(path: Path, on: str, worst: int, as_json: bool, against: str | None, keep: bool) -> None:
    """Print the scores, the worst cases and what was left out."""
    from ridgeline.sim.published.registry import published_kind

    if published_kind(path) is not None:
        from ridgeline.cli.published import published_and_show

        published_and_show(path, worst, as_json, against, keep)
        return
    check = validate(path, on)
    if as_json:
        draw.print_json(check.to_dict())
    else:
        _show(check, worst)


def _show(check: Check, worst: int) -> None:
    out = draw.console()
    made = draw.table(
        f"Predicted against measured on {check.device}",
        ("kind", "left"),
        ("n", "right"),
        ("mean error", "right"),
        ("median", "right"),
        ("bias", "right"),
        ("inside 90 %", "right"),
    )
    for kind, found in check.by().items():
        made.add_row(kind, *_score_cells(found))
    made.add_section()
    made.add_row(Text("all", style="bold"), *_score_cells(check.all))
    out.print(made)
    if worst:
        out.print()
        out.print(_worst_table(check.worst(worst)))
    if check.skipped:
        out.print(f"\n{len(check.skipped)} rows could not be used:", style="yellow")
        for row in check.skipped[: max(worst, 5)]:
            out.print(Text(f"  line {row.line}: {row.reason}"))
        if len(check.skipped) > max(worst, 5):
            out.print(f"  … and {len(check.skipped) - max(worst, 5)} more; --json lists them all", style=draw.DIM)


def _score_cells(found: Score) -> list[Text | str]:
    inside = Text(f"{found.coverage:.0%}", style="green" if 0.85 <= found.coverage <= 0.95 else "yellow")
    return [f"{found.n:,}", _error(found.mape), f"{found.median_ape:.1%}", f"{found.bias:+.1%}", inside]


def _error(value: float) -> Text:
    return Text(f"{value:.1%}", style="green" if value <= 0.06 else "yellow" if value <= 0.12 else "red")


def _worst_table(rows: list[CheckedRow]) -> Table:
    made = draw.table(
        "Worst",
        ("line", "right"),
        ("kind", "left"),
        ("dtype", "left"),
        ("by", "left"),
        ("shape", "left"),
        ("measured", "right"),
        ("predicted", "right"),
        ("error", "right"),
    )
    made.columns[4].no_wrap = False
    for row in rows:
        kind = row.kind if row.phase == "fwd" else f"{row.kind} {row.phase}"
        made.add_row(
            str(row.line),
            kind,
            row.dtype,
            row.library,
            row.shape.replace(";", " "),
            show_seconds(row.measured_s),
            show_seconds(row.predicted_s),
            f"{row.predicted_s / row.measured_s - 1.0:+.0%}",
        )
    return made
