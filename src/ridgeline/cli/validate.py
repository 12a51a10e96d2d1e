"""``ridgeline validate``: predictions of operators beside a person's measurements, with the error by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ridgeline.api import validate, validate_published
from ridgeline.cli import draw
from ridgeline.cli.keep import keep as keep_run
from ridgeline.errors import InputError, RidgelineError
from ridgeline.units import show_seconds
from ridgeline.validation.operators import CheckedRow, Score


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for on the command line, for every file alike."""

    on: str
    worst: int
    as_json: bool
    against: str | None
    keep: bool


def validate_files(paths: Sequence[Path], wish: Wish) -> int:
    """One file in full; of several a line each. The number of files that could not be compared with anything."""
    if len(paths) == 1:
        validate_and_show(paths[0], wish.on, wish.worst, wish.as_json, wish.against, wish.keep)
        return 0
    if wish.against:
        raise InputError("--against lists what changed in one file: name one")
    found: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for path in paths:
        try:
            found[str(path)] = _checked(path, wish)
        except RidgelineError as error:
            refused[str(path)] = str(error)
    if wish.as_json:
        draw.print_json({"files": found, "refused": refused})
    else:
        out = draw.console()
        made = draw.table(
            "Predicted against measured",
            ("file", "left"),
            ("n", "right"),
            ("mean error", "right"),
            ("median", "right"),
            ("bias", "right"),
            ("inside 90 %", "right"),
            ("not used", "right"),
        )
        for name, check in found.items():
            scores = check["all"]
            cells = _score_cells(Score(**scores)) if scores else ["0", "–", "–", "–", "–"]
            made.add_row(Path(name).name, *cells, f"{len(check.get('unused', check.get('skipped', []))):,}")
        out.print(made)
        for name, why in refused.items():
            out.print(Text(why if name in why else f"{name}: {why}", style="yellow"))
        out.print("name one file for its sources and its worst rows", style=draw.DIM)
    return len(refused)


def _checked(path: Path, wish: Wish) -> dict[str, Any]:
    from ridgeline.validation.registry import published_kind

    if published_kind(path) is None:
        return validate(path, wish.on).to_dict()
    return validate_published(path, keep=wish.keep)[0].to_dict()


def validate_and_show(path: Path, on: str, worst: int, as_json: bool, against: str | None, keep: bool) -> None:
    """Print the scores, the worst cases and what was left out."""
    from ridgeline.validation.registry import published_kind

    if published_kind(path) is not None:
        from ridgeline.cli.published import published_and_show

        published_and_show(path, worst, as_json, against, keep)
        return
    check = validate(path, on)
    keep_run("validate", path.name, check.to_dict, device=check.device, measured=True, files=[("measurements", path)])
    if as_json:
        draw.print_json(check.to_dict())
    else:
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
    return [
        f"{found.n:,}",
        Text(f"{found.mape:.1%}", style="green" if found.mape <= 0.06 else "yellow" if found.mape <= 0.12 else "red"),
        f"{found.median_ape:.1%}",
        f"{found.bias:+.1%}",
        inside,
    ]


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
