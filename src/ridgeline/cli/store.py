"""``ridgeline store``: make, migrate, check, fill, empty and tidy the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ridgeline.cli.draw import DIM, console, print_json
from ridgeline.cli.keep import graph_settings
from ridgeline.errors import InputError, nearest
from ridgeline.hardware import device as device_named
from ridgeline.models import build
from ridgeline.store import transfer
from ridgeline.store.record import Metric, Record, metrics_of
from ridgeline.store.store import Store

ACTIONS = ("init", "migrate", "check", "import", "export", "gc", "tag", "show")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything that was asked for on the command line."""

    action: str
    words: tuple[str, ...]
    url: str | None
    parquet: Path | None
    csv: Path | None
    lines: Path | None
    json: bool


def run_action(asked: Asked) -> int:
    """The exit code: 1 where a check found something."""
    if asked.action not in ACTIONS:
        raise InputError(f"store has no action {asked.action!r}{nearest(asked.action, ACTIONS)}")
    with Store(asked.url, migrate=asked.action not in ("init", "migrate")) as store:
        made, code = {"import": _import, "export": _export, "check": _check, "tag": _tag}.get(
            asked.action, _upkeep
        )(store, asked)  # fmt: skip
        if asked.json:
            print_json({"store": store.name, **made})
        else:
            out = console()
            for line in made.pop("lines", []):
                out.print(line)
            if made:
                out.print(Text(", ".join(f"{name} {value}" for name, value in made.items()), style=DIM))
            out.print(Text(f"store: {store.name}", style=DIM))
    return code


def _upkeep(store: Store, asked: Asked) -> tuple[dict[str, Any], int]:
    if asked.action in ("init", "migrate"):
        before, after = store.database.migrate()
        return {"lines": [f"schema {before} → {after}" if before != after else f"schema {after} already"]}, 0
    if asked.action == "gc":
        return {f"{name}s removed": num for name, num in store.collect().items()}, 0
    return dict(store.counts()), 0


def _check(store: Store, asked: Asked) -> tuple[dict[str, Any], int]:
    wrong = store.check()
    found: dict[str, Any] = {**store.counts(), "wrong": wrong} if asked.json else dict(store.counts())
    return {"lines": [*wrong, "nothing is wrong" if not wrong else f"{len(wrong)} wrong"], **found}, int(bool(wrong))


def _tag(store: Store, asked: Asked) -> tuple[dict[str, Any], int]:
    if len(asked.words) != 2:
        raise InputError("give a run and a name: `ridgeline store tag 3fa9c1 main`")
    run = store.run(asked.words[0])
    store.tag(asked.words[1], run.id)
    return {"lines": [f"{asked.words[1]} is run {run.id[:10]}: {run.thing}"]}, 0


def _import(store: Store, asked: Asked) -> tuple[dict[str, Any], int]:
    if not asked.words:
        raise InputError("say what to import: an export (.jsonl), kept validations, or measurements as JSON")
    added = known = 0
    for word in asked.words:
        new, old = transfer.import_lines(store, Path(word), measurement)
        added, known = added + new, known + old
    return {"added": added, "there already": known}, 0


def _export(store: Store, asked: Asked) -> tuple[dict[str, Any], int]:
    made = list[str]()
    if asked.lines:
        made.append(f"{asked.lines}: {transfer.export_lines(store, asked.lines)} runs and studies")
    for folder, kind in ((asked.parquet, "parquet"), (asked.csv, "csv")):
        if folder:
            made += [str(path) for path in transfer.export_tables(store, folder, kind)]
    if not made:
        raise InputError("say where to: --lines FILE (everything), --parquet DIR or --csv DIR (tables)")
    return {"lines": made}, 0


def measurement(line: Mapping[str, Any]) -> Record:
    """A measurement of yours: ``{"model": "llama3-8b", "mode": "decode", "batch": 8, "on": "h200", "execution":
    "cudagraph", "step_s": 0.0051}``, comparable with what ``predict`` says of the same."""
    known = {"model", "on", "execution", "at", "kind", "metrics", "environment", "note"}
    if "model" not in line:
        raise InputError(f"a measurement names its model; found only {', '.join(sorted(line))}")
    numbers = dict(line.get("metrics") or {})
    options = {}
    for key, value in line.items():
        if key.endswith(("_s", "_j", "_w", "_bytes", "_usd", "_frac", "_per_s")) and key not in known:
            numbers[key] = value
        elif key not in known:
            options[key] = value
    if not numbers:
        raise InputError('a measurement has a number with its unit in the name, such as "step_s": 0.0123')
    metrics = metrics_of({**numbers, "basis": "measured"})
    found: dict[str, Any] = {
        "kind": line.get("kind", "measurement"), "subject": str(line["model"]), "measured": True,
        "document": dict(line),
        "metrics": tuple(Metric(name=m.name, value=m.value, low=m.low, high=m.high, basis="measured") for m in metrics),
        "device": device_named(str(line["on"])).name if "on" in line else "",
        "environment": line.get("environment", {}), "git": "",
    }  # fmt: skip
    if "at" in line:
        found["at"] = str(line["at"])
    execution = str(line.get("execution", "eager"))
    if str(line["model"]).endswith(".py") or ":" in str(line["model"]):
        return Record(**found, settings={**options, "execution": execution})
    graph = build(str(line["model"]), **options)
    return Record(**found, settings=graph_settings(graph, options, execution), subject_hash=graph.content_hash)
