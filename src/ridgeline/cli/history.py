"""``ridgeline history``: what is kept, and one number of one thing over time with its changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ridgeline.cli.draw import DIM, add_rows, console, percent, print_json, shortened, table
from ridgeline.cli.gate import fraction
from ridgeline.errors import InputError, nearest
from ridgeline.store.record import Record
from ridgeline.store.series import Series, series_of
from ridgeline.store.store import Store
from ridgeline.units import show_bytes, show_seconds

HIGHER_IS_BETTER = ("per_s", "_per_user", "mfu_frac", "good_frac", "speedup", "goodput")
REGRESSED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything that was asked for on the command line."""

    subject: str | None
    metric: str
    device: str
    kind: str
    max_regression: str
    top: int
    url: str | None
    json: bool


def show_history(asked: Asked) -> int:
    """The exit code: 1 where the newest change of any thing is a regression by more than allowed."""
    with Store(asked.url) as store:
        if asked.subject is None:
            return _list(store, asked)
        records = store.runs(subject=asked.subject, device=asked.device, kind=asked.kind)
        if not records:
            known = {subject for _, subject, *_ in store.things()}
            raise InputError(f"nothing of {asked.subject!r} is in {store.name}{nearest(asked.subject, known)}")
        metric = asked.metric or ("step_s" if any(r.value("step_s") is not None for r in records) else "")
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            if record.value(metric) is not None:
                groups.setdefault((record.kind, record.thing), []).append(record)
        if not groups:
            names = {m.name for record in records for m in record.metrics}
            what = f"metric {metric!r}" if metric else "metric named"
            raise InputError(f"no {what} of {asked.subject!r}{nearest(metric, names)}: choose one with --metric")
        allowed, failed, documents = fraction(asked.max_regression), False, list[dict[str, Any]]()
        for (kind, thing), found in groups.items():
            series = series_of([record.value(metric) or 0.0 for record in found])
            worse = series.regressed(allowed, higher_is_worse=not any(w in metric for w in HIGHER_IS_BETTER))
            failed |= worse
            if asked.json:
                documents.append(_document(kind, thing, metric, found, series, worse))
            else:
                _show(kind, thing, metric, found[-asked.top :], series, worse, len(found))
        if asked.json:
            print_json({"series": documents, "regressed": failed})
    return REGRESSED if failed else 0


def _list(store: Store, asked: Asked) -> int:
    things = [row for row in store.things() if not asked.kind or row[3] == asked.kind]
    if asked.json:
        names = ("thing", "subject", "device", "kind", "runs", "newest")
        print_json({"store": store.name, "things": [dict(zip(names, row, strict=True)) for row in things]})
        return 0
    out = console()
    sides = ("left", "left", "left", "right", "left")
    made = table("Kept", *zip(("subject", "device", "kind", "runs", "newest"), sides, strict=True))
    rows = [[r[1], r[2], r[3], f"{r[4]:,}", r[5][:16]] for r in things[: asked.top]]
    add_rows(made, rows, out.width, shortened)
    out.print(made if things else f"nothing is kept yet in {store.name}: give a verb --store, or set RIDGELINE_STORE")
    if len(things) > asked.top:
        out.print(Text(f"… and {len(things) - asked.top} more; --top shows them", style=DIM))
    return 0


def _document(
    kind: str, thing: str, metric: str, records: Sequence[Record], series: Series, worse: bool
) -> dict[str, Any]:
    return {
        "kind": kind, "thing": thing, "metric": metric, "noise_frac": series.noise, "change": series.change,
        "regressed": worse,
        "levels": [{"start": v.start, "stop": v.stop, "median": v.median} for v in series.levels],
        "runs": [{"id": r.id, "at": r.at, "value": r.value(metric), "version": r.version, "git": r.git}
                 for r in records],
    }  # fmt: skip


def shown_value(metric: str, value: float | None) -> str:
    """A number of a metric in the unit its name says."""
    if value is None:
        return "–"
    plain = metric.partition(".")[0]
    if plain.endswith("_s") and not plain.endswith("per_s"):
        return show_seconds(value)
    return show_bytes(value) if plain.endswith("_bytes") else f"{value:,.4g}"


def _show(
    kind: str, thing: str, metric: str, records: Sequence[Record], series: Series, worse: bool, num: int
) -> None:
    out = console()
    out.print(Text(f"{kind}  {thing}", style="bold"))
    made = table(metric, ("run", "left"), ("at", "left"), ("git", "left"), ("value", "right"), ("change", "right"))
    first = num - len(records)
    starts = {level.start: level for level in series.levels[1:]}
    hashes = [record.subject_hash for record in records]
    for at, record in enumerate(records):
        value, marks = record.value(metric), list[str]()
        before = records[at - 1].value(metric) if at else None
        shown = Text(f"{value / before - 1:+.1%}" if value and before else "", style=DIM)
        if first + at in starts:
            marks.append("changed beyond the noise")
        if at and hashes[at] != hashes[at - 1]:
            marks.append("the model itself changed")
        if marks:
            shown = Text.assemble(shown, (f" {', '.join(marks)}", "bold"))
        made.add_row(record.id[:10], record.at[:16], record.git or "–", shown_value(metric, value), shown)
    out.print(made)
    noise = f"a run scatters by {percent(series.noise)}" if num > 3 else "too few runs to know their noise"
    word = "no change"
    if len(series.levels) > 1:
        moved = f"{series.change - 1:+.1%} at the last of {len(series.levels) - 1}"
        word = f"{'REGRESSED' if worse else 'changed'}: {moved}"
    out.print(Text(f"{word}; {noise}", style="bold red" if worse else DIM))
