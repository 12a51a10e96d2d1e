"""``ridgeline compare A B C``: stored runs side by side, with the ratio to the first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ridgeline.cli.draw import DIM, console, print_json, table
from ridgeline.cli.history import shown_value
from ridgeline.errors import InputError
from ridgeline.store.record import Record
from ridgeline.store.store import Store


def compare_and_show(names: Sequence[str], metrics: Sequence[str], url: str | None, json: bool) -> None:
    """Runs by id, tag, or subject (its newest run)."""
    if len(names) < 2:
        raise InputError("give two runs or more: ids that `ridgeline history` lists, tags, or subjects")
    with Store(url) as store:
        records = [_run(store, name) for name in names]
    shared = [m.name for m in records[0].metrics if all(r.value(m.name) is not None for r in records[1:])]
    chosen = list(metrics) or shared
    for name in chosen:
        if name not in shared:
            raise InputError(f"not every run has {name!r}; all have: {', '.join(shared) or 'nothing in common'}")
    if json:
        print_json({"runs": [_document(record, chosen) for record in records]})
        return
    out = console()
    for label, record in zip(_labels(len(records)), records, strict=True):
        how = "measured" if record.measured else record.kind
        out.print(Text(f"{label}  {record.id[:10]}  {how}  {record.at[:16]}  {record.thing}", style=DIM))
    made = table("Compared", ("", "left"), *((label, "right") for label in _labels(len(records))))
    for name in chosen:
        first = records[0].value(name)
        cells = [shown_value(name, first)]
        for record in records[1:]:
            value = record.value(name)
            ratio = f" {value / first:.3f}×" if value is not None and first else ""
            cells.append(f"{shown_value(name, value)}{ratio}")
        made.add_row(name, *cells)
    out.print(made if chosen else "these runs have no number in common")


def _run(store: Store, name: str) -> Record:
    found = store.runs(subject=name, limit=1)
    return found[0] if found else store.run(name)


def _labels(num: int) -> list[str]:
    return [chr(ord("A") + at) if at < 26 else str(at + 1) for at in range(num)]


def _document(record: Record, names: Sequence[str]) -> dict[str, object]:
    return {
        "id": record.id, "kind": record.kind, "thing": record.thing, "at": record.at, "measured": record.measured,
        "metrics": {name: record.value(name) for name in names},
    }  # fmt: skip
