"""Into and out of the store: JSON lines that hold everything, Parquet and CSV for other tools."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import InputError, MissingExtra
from ridgeline.store.database import StoreError
from ridgeline.store.record import Artifact, Metric, Record
from ridgeline.store.store import Columns, Store, StudyRow

FORMAT = 1


def export_lines(store: Store, path: Path) -> int:
    """Everything in the store as JSON lines that ``import_lines`` reads back; the number of runs and studies."""
    num = 0
    with _written(path) as file:
        for record in store.runs():
            line = {**asdict(record), "document": store.document(record.id), "id": record.id}
            line.pop("stored")
            file.write(json.dumps({"format": FORMAT, "run": line}, separators=(",", ":")) + "\n")
            num += 1
        for name, run in store.tags().items():
            file.write(json.dumps({"format": FORMAT, "tag": name, "run_id": run}) + "\n")
        for study in store.studies():
            file.write(json.dumps({"format": FORMAT, "study": asdict(study)}, separators=(",", ":")) + "\n")
            for number in sorted(store.chunk_numbers(study.id)):
                body = _chunk_body(store, study.id, number)
                chunk = {"study": study.id, "number": number, "body": base64.b64encode(body).decode()}
                file.write(json.dumps({"format": FORMAT, "chunk": chunk}) + "\n")
            num += 1
    return num


def _chunk_body(store: Store, study: str, number: int) -> bytes:
    return bytes(store.database.execute("SELECT body FROM chunk WHERE study = ? AND number = ?", (study, number))[0][0])


def import_lines(store: Store, path: Path, record_of: Callable[[Mapping[str, Any]], Record]) -> tuple[int, int]:
    """(added, there already) of a file of JSON lines: an export, kept validations, or measurements of yours.

    ``record_of`` makes a record of a measurement written by hand. Nothing is added when a line cannot be read.
    """
    added = known = 0
    with store.database.transaction():
        for number, line in _lines(path):
            where = f"{path}, line {number}"
            try:
                if "run" in line:
                    new = store.add(_record(line["run"]))
                elif "study" in line:
                    new = _add_study(store, line["study"])
                elif "chunk" in line:
                    _add_chunk(store, line["chunk"], where)
                    continue
                elif "tag" in line:
                    store.tag(line["tag"], line["run_id"])
                    continue
                elif {"name", "digest", "rows"} <= line.keys():
                    new = store.add(_validation(line))
                else:
                    new = store.add(record_of(line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InputError(
                    f"{where}: not a record ({type(error).__name__}: {error}); nothing was imported"
                ) from error
            added, known = added + new, known + (not new)
    return added, known


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    try:
        whole = json.loads(text)  # one document, or a list of them
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found.append(json.loads(line) if line.strip() else {})
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error}); nothing was imported") from error
    for number, line in enumerate(found, 1):
        if line == {}:
            continue
        if not isinstance(line, dict):
            raise InputError(f"{path}, record {number}: expected an object, found {type(line).__name__}")
        yield number, line


def _record(line: Mapping[str, Any]) -> Record:
    fields = dict(line)
    stated = fields.pop("id", "")
    fields["metrics"] = tuple(Metric(**metric) for metric in fields["metrics"])
    fields["artifacts"] = tuple(Artifact(**found) for found in fields.get("artifacts", ()))
    record = Record(**fields)
    if stated and record.id != stated:
        raise ValueError(f"the content of run {stated[:10]} does not have its id")
    return record


def _add_study(store: Store, line: Mapping[str, Any]) -> bool:
    if any(row.id == line["id"] for row in store.studies()):
        return False
    found = store.add_study(line["name"], line["spec"], line["code"], line["columns"], num_chunks=line["num_chunks"],
                            num_points=line["num_points"])  # fmt: skip
    if found.id != line["id"]:
        raise ValueError(f"the content of study {line['name']!r} does not have its id")
    store.set_state(found.id, line["state"])
    return True


def _add_chunk(store: Store, line: Mapping[str, Any], where: str) -> None:
    from ridgeline.store.store import unpack

    try:
        store.add_chunk(line["study"], int(line["number"]), unpack(base64.b64decode(line["body"])))
    except StoreError as error:
        raise InputError(f"{where}: {error}; nothing was imported") from error


def _validation(line: Mapping[str, Any]) -> Record:
    """A line of a validation kept as JSON lines: its error over all rows."""
    rows = {key: (float(pair[0]), float(pair[1])) for key, pair in line["rows"].items()}
    errors = [abs(predicted / measured - 1.0) for measured, predicted in rows.values() if measured]
    metrics = (Metric(name="mape_frac", value=float(np.mean(errors))), Metric(name="num_rows", value=len(rows)))
    return Record(
        kind="validate", subject=line["name"], metrics=metrics, measured=True, at=line["at"], git="", environment={},
        version=line["version"], document={"digest": line["digest"], "rows": line["rows"]},
    )  # fmt: skip


def export_tables(store: Store, folder: Path, kind: str) -> list[Path]:
    """Runs, metrics and every study as a file each; ``kind`` is parquet or csv."""
    records = store.runs()
    runs = {
        name: np.array([str(getattr(record, name)) for record in records], dtype=str)
        for name in ("id", "kind", "measured", "thing", "subject", "device", "settings", "at", "version", "git")
    }
    flat = [(record.id, metric) for record in records for metric in record.metrics]
    metrics: Columns = {
        "run": np.array([run for run, _ in flat], dtype=str),
        "name": np.array([metric.name for _, metric in flat], dtype=str),
        "value": np.array([metric.value for _, metric in flat], dtype=float),
        "low": np.array([np.nan if m.low is None else m.low for _, m in flat], dtype=float),
        "high": np.array([np.nan if m.high is None else m.high for _, m in flat], dtype=float),
        "basis": np.array([metric.basis for _, metric in flat], dtype=str),
    }
    made = [write_table(runs, folder / f"runs.{kind}", kind), write_table(metrics, folder / f"metrics.{kind}", kind)]
    for study in store.studies():
        made.append(export_study(store, study, folder / f"study-{_file_name(study)}.{kind}", kind))
    return made


def export_study(store: Store, study: StudyRow, path: Path, kind: str = "") -> Path:
    """The points of one study as a file."""
    return write_table(store.table(study.id), path, kind or path.suffix.lstrip("."))


def _file_name(study: StudyRow) -> str:
    return f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in study.name)[:60]}-{study.id[:8]}"


def write_table(columns: Columns, path: Path, kind: str) -> Path:
    """A Parquet or CSV file of columns."""
    if kind == "parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingExtra("pyarrow", "fit", "writing Parquet") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(dict(columns)), path, compression="zstd")
        return path
    if kind != "csv":
        raise InputError(f"cannot write {kind!r} to {path}: parquet or csv")
    names = list(columns)
    with _written(path) as file:
        out = csv.writer(file)
        out.writerow([defused(name) for name in names])
        num = len(columns[names[0]]) if names else 0
        for start in range(0, num, 65536):
            parts = [columns[name][start : start + 65536].tolist() for name in names]
            out.writerows([defused(cell) if isinstance(cell, str) else cell for cell in row] for row in zip(*parts))
    return path


def defused(text: str) -> str:
    """Text that a spreadsheet shows instead of computing: a quote before what would begin a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else text


def _written(path: Path) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
