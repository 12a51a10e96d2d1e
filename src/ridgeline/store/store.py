"""The store: runs of every verb with their numbers, studies in column chunks, traces by reference."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import nearest
from ridgeline.store.database import Database, StoreError, opened, shown, url_of
from ridgeline.store.record import Artifact, Metric, Record, canonical, digest, environment, git_state, installed, now
from ridgeline.store.schema import TABLES, VERSION

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """A study as it is kept; its points are in chunks."""

    id: str
    name: str
    spec: Mapping[str, Any]
    spec_hash: str
    code: str  # which version of the models evaluated it: points of two never mix
    columns: tuple[str, ...]
    num_chunks: int  # planned; 0 where the sampler decides as it goes
    num_points: int
    state: str  # running, done or stopped
    at: str
    version: str
    git: str


class Store:
    """An open store; a context manager."""

    def __init__(self, url: str | os.PathLike[str] | None = None, *, migrate: bool = True) -> None:
        self.database: Database = opened(url_of(url))
        try:
            if migrate:
                self.database.ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Address without a password."""
        return shown(self.database.url)

    def close(self) -> None:
        self.database.close()

    # Runs

    def add(self, record: Record) -> bool:
        """Keep a run; False when it is there already."""
        db = self.database
        with db.transaction():
            if db.execute("SELECT 1 FROM run WHERE id = ?", (record.id,)):
                return False
            facts, body = canonical(record.environment), canonical(record.document)
            self._once("environment", "facts", digest(facts), facts)
            self._once("document", "body", digest(body), zlib.compress(body.encode(), 6))
            db.execute(
                "INSERT INTO run (id, kind, measured, thing, subject, device, settings, subject_hash, at, version, git,"
                " environment, document) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (record.id, record.kind, int(record.measured), record.thing, record.subject, record.device,
                 canonical(record.settings), record.subject_hash, record.at, record.version, record.git, digest(facts),
                 digest(body)),
            )  # fmt: skip
            db.execute_many(
                "INSERT INTO metric (run, name, value, low, high, basis) VALUES (?, ?, ?, ?, ?, ?)",
                [(record.id, m.name, float(m.value), m.low, m.high, m.basis) for m in record.metrics],
            )
            db.execute_many(
                "INSERT INTO artifact (run, kind, path, num_bytes, hash) VALUES (?, ?, ?, ?, ?)",
                [(record.id, a.kind, a.path, a.num_bytes, a.hash) for a in record.artifacts],
            )
        return True

    def _once(self, table: str, column: str, key: str, value: str | bytes) -> None:
        self.database.execute(
            f"INSERT INTO {table} (hash, {column}) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING", (key, value)
        )

    def runs(
        self,
        *,
        thing: str = "",
        subject: str = "",
        kind: str = "",
        device: str = "",
        measured: bool | None = None,
        limit: int = 0,
    ) -> list[Record]:
        """Runs that match, oldest first; of ``limit``, the newest. Documents are read with ``document``."""
        wanted = {"thing": thing, "subject": subject, "kind": kind, "device": device}
        clauses = [f"{column} = ?" for column, value in wanted.items() if value]
        values: list[Any] = [value for value in wanted.values() if value]
        if measured is not None:
            clauses.append("measured = ?")
            values.append(int(measured))
        return self._records(" AND ".join(clauses), values, limit)

    def _records(self, where: str, values: Sequence[Any], limit: int = 0) -> list[Record]:
        tail = f" LIMIT {int(limit)}" if limit else ""
        rows = self.database.execute(
            "SELECT r.id, kind, measured, subject, device, settings, subject_hash, at, version, git, e.facts FROM run r"
            " JOIN environment e ON e.hash = r.environment"
            f"{f' WHERE {where}' if where else ''} ORDER BY at DESC, r.id DESC{tail}",
            values,
        )
        metrics, artifacts = dict[str, list[Metric]](), dict[str, list[Artifact]]()
        for start in range(0, len(rows), 500):
            ids = [row[0] for row in rows[start : start + 500]]
            among = f"run IN ({', '.join('?' * len(ids))})"
            for run, name, value, low, high, basis in self.database.execute(
                f"SELECT run, name, value, low, high, basis FROM metric WHERE {among} ORDER BY run, name", ids
            ):
                metrics.setdefault(run, []).append(Metric(name=name, value=value, low=low, high=high, basis=basis))
            for run, kind, path, num_bytes, content in self.database.execute(
                f"SELECT run, kind, path, num_bytes, hash FROM artifact WHERE {among} ORDER BY run, kind, path", ids
            ):
                artifacts.setdefault(run, []).append(Artifact(kind=kind, path=path, num_bytes=num_bytes, hash=content))
        return [
            Record(
                stored=run, kind=kind, subject=subject, device=device, settings=json.loads(settings), at=at,
                version=version, subject_hash=subject_hash, measured=bool(measured), git=git,
                environment=json.loads(facts), metrics=tuple(metrics.get(run, ())),
                artifacts=tuple(artifacts.get(run, ())),
            )
            for run, kind, measured, subject, device, settings, subject_hash, at, version, git, facts in reversed(rows)
        ]  # fmt: skip

    def run(self, prefix: str) -> Record:
        """The run of this tag, or whose id begins so."""
        tagged = self.database.execute("SELECT run FROM tag WHERE name = ?", (prefix,))
        start = tagged[0][0] if tagged else prefix
        if not start or set(start) - set("0123456789abcdef"):
            raise StoreError(f"no run {prefix!r} in {self.name}: `ridgeline history` lists ids, `store tag` names them")
        found = self._records("r.id >= ? AND r.id <= ?", (start, f"{start}g"))
        if len(found) != 1:
            what = "no run" if not found else f"{len(found)} runs"
            raise StoreError(f"{what} {prefix!r} in {self.name}: give more of an id that `ridgeline history` lists")
        return found[0]

    def document(self, run: str) -> Any:
        """What ``--json`` printed when the run was made."""
        rows = self.database.execute(
            "SELECT body FROM document d JOIN run r ON r.document = d.hash WHERE r.id = ?", (run,)
        )
        return json.loads(zlib.decompress(rows[0][0])) if rows else None

    def measurement(self, thing: str, metric: str) -> tuple[Record, Metric] | None:
        """The newest measurement of the same thing that has the metric."""
        rows = self.database.execute(
            "SELECT r.id FROM run r JOIN metric m ON m.run = r.id WHERE r.thing = ? AND r.measured = 1 AND m.name = ?"
            " ORDER BY r.at DESC, r.id DESC LIMIT 1",
            (thing, metric),
        )
        if not rows:
            return None
        record = self._records("r.id = ?", rows[0])[0]
        return record, next(found for found in record.metrics if found.name == metric)

    def things(self) -> list[tuple[str, str, str, str, int, str]]:
        """(thing, subject, device, kind, number of runs, newest) of everything that was kept, newest first."""
        return [
            (thing, subject, device, kind, int(num), at)
            for thing, subject, device, kind, num, at in self.database.execute(
                "SELECT thing, MIN(subject), MIN(device), kind, COUNT(*), MAX(at) FROM run GROUP BY thing, kind"
                " ORDER BY MAX(at) DESC"
            )
        ]

    def tag(self, name: str, run: str) -> None:
        """Give a run a name, as a gate's baseline has; the name moves when it is given again."""
        if not name or not set(name) - set("0123456789abcdef"):
            raise StoreError(f"tag {name!r}: a name must have a letter that no id has")
        with self.database.transaction():
            self.database.execute("DELETE FROM tag WHERE name = ?", (name,))
            self.database.execute("INSERT INTO tag (name, run) VALUES (?, ?)", (name, run))

    def tags(self) -> dict[str, str]:
        return dict(self.database.execute("SELECT name, run FROM tag ORDER BY name"))

    # Studies

    def add_study(self, name: str, spec: Mapping[str, Any], code: str, columns: Sequence[str], *, num_chunks: int,
                  num_points: int) -> StudyRow:  # fmt: skip
        """A study that begins; the same spec under the same code is the study that is there already."""
        text, facts = canonical(spec), canonical(environment())
        spec_hash = digest(text)
        key = digest(f"{name}\n{spec_hash}\n{code}")
        with self.database.transaction():
            self._once("environment", "facts", digest(facts), facts)
            self.database.execute(
                "INSERT INTO study (id, name, spec, spec_hash, code, columns, num_chunks, num_points, state, at,"
                " version, git, environment) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO NOTHING",
                (key, name, text, spec_hash, code, canonical(list(columns)), num_chunks, num_points, "running", now(),
                 installed(), git_state(), digest(facts)),
            )  # fmt: skip
        return self.study(key)

    def studies(self, name: str = "") -> list[StudyRow]:
        """Studies, oldest first."""
        rows = self.database.execute(
            "SELECT id, name, spec, spec_hash, code, columns, num_chunks, num_points, state, at, version, git"
            " FROM study" + (" WHERE name = ?" if name else "") + " ORDER BY at, id", (name,) if name else (),
        )  # fmt: skip
        return [
            StudyRow(
                id=row[0], name=row[1], spec=json.loads(row[2]), spec_hash=row[3], code=row[4],
                columns=tuple(json.loads(row[5])), num_chunks=int(row[6]), num_points=int(row[7]), state=row[8],
                at=row[9], version=row[10], git=row[11],
            )
            for row in rows
        ]  # fmt: skip

    def study(self, name: str) -> StudyRow:
        """The newest study of this name, or the one whose id begins so."""
        kept = self.studies()
        named = [row for row in kept if row.name == name] or [row for row in kept if name and row.id.startswith(name)]
        if not named:
            raise StoreError(f"no study {name!r} in {self.name}{nearest(name, {row.name for row in kept})}")
        return named[-1]

    def set_state(self, study: str, state: str, num_points: int | None = None) -> None:
        with self.database.transaction():
            self.database.execute("UPDATE study SET state = ? WHERE id = ?", (state, study))
            if num_points is not None:
                self.database.execute("UPDATE study SET num_points = ? WHERE id = ?", (num_points, study))

    def add_chunk(self, study: str, number: int, columns: Columns) -> bool:
        """Keep a chunk of points, all of it or nothing; False when it is there already."""
        body = pack(columns)
        count = len(next(iter(columns.values()))) if columns else 0
        with self.database.transaction():
            if self.database.execute("SELECT 1 FROM chunk WHERE study = ? AND number = ?", (study, number)):
                return False
            self.database.execute(
                "INSERT INTO chunk (study, number, num_points, hash, at, body) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (study, number) DO NOTHING",
                (study, number, count, digest(body), now(), body),
            )
        return True

    def chunk_numbers(self, study: str) -> set[int]:
        rows = self.database.execute("SELECT number FROM chunk WHERE study = ?", (study,))
        return {int(number) for (number,) in rows}

    def chunks(self, study: str, wanted: Sequence[str] = ()) -> Iterator[tuple[int, Columns]]:
        """(number, columns) in the order of their numbers; one chunk is read at a time."""
        for number, body in self.bodies(study):
            yield number, unpack(body, wanted)

    def bodies(self, study: str, known: Collection[int] = ()) -> Iterator[tuple[int, bytes]]:
        """(number, packed columns) of the chunks that are not ``known``, in the order of their numbers."""
        for number in sorted(self.chunk_numbers(study).difference(known)):
            rows = self.database.execute("SELECT body FROM chunk WHERE study = ? AND number = ?", (study, number))
            if rows:
                yield number, bytes(rows[0][0])

    def table(self, study: str, wanted: Sequence[str] = ()) -> Columns:
        """All points of a study by column."""
        parts: dict[str, list[NDArray[Any]]] = {}
        for _, columns in self.chunks(study, wanted):
            for name, values in columns.items():
                parts.setdefault(name, []).append(values)
        return {name: np.concatenate(found) for name, found in parts.items()}

    def remove_study(self, study: str) -> None:
        with self.database.transaction():
            self.database.execute("DELETE FROM chunk WHERE study = ?", (study,))
            self.database.execute("DELETE FROM study WHERE id = ?", (study,))

    # Upkeep

    def check(self) -> list[str]:
        """What is wrong: damaged pages, chunks and artifacts whose content does not have their hash, lost rows."""
        db, wrong = self.database, list[str]()
        if not hasattr(db, "driver"):
            wrong += [str(text) for (text,) in db.execute("PRAGMA integrity_check") if text != "ok"]
        for study, number, stated in db.execute("SELECT study, number, hash FROM chunk ORDER BY study, number"):
            body = db.execute("SELECT body FROM chunk WHERE study = ? AND number = ?", (study, number))[0][0]
            if digest(bytes(body)) != stated:
                wrong.append(f"chunk {number} of study {study} does not have its hash")
        for run, path, num_bytes in db.execute("SELECT run, path, num_bytes FROM artifact ORDER BY path"):
            file = Path(path)
            if not file.exists():
                wrong.append(f"{path} of run {run[:10]} is gone")
            elif file.is_file() and file.stat().st_size != num_bytes:
                wrong.append(f"{path} of run {run[:10]} was changed: {file.stat().st_size:,} bytes, not {num_bytes:,}")
        for (run,) in db.execute("SELECT id FROM run WHERE document NOT IN (SELECT hash FROM document)"):
            wrong.append(f"run {run[:10]} has lost its document")
        return wrong

    def collect(self) -> dict[str, int]:
        """Remove documents and environments nobody refers to and chunks of removed studies, and give space back."""
        db, removed = self.database, dict[str, int]()
        unused = {
            "chunk": "study NOT IN (SELECT id FROM study)",
            "document": "hash NOT IN (SELECT document FROM run)",
            "environment": "hash NOT IN (SELECT environment FROM run) AND hash NOT IN (SELECT environment FROM study)",
        }
        with db.transaction():
            for table, where in unused.items():
                removed[table] = int(db.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}")[0][0])
                db.execute(f"DELETE FROM {table} WHERE {where}")
        db.execute("VACUUM")
        return removed

    def counts(self) -> dict[str, int]:
        """Rows of every table, and the version of the schema."""
        found = {name: int(self.database.execute(f"SELECT COUNT(*) FROM {name}")[0][0]) for name in TABLES}
        return {"schema": VERSION, **found}


def pack(columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Columns as bytes: a line of JSON that says names, types and lengths, then each column, little-endian, deflated.

    Text is kept as the distinct words and a number for each row.
    """
    heads, bodies = list[dict[str, Any]](), list[bytes]()
    for name, values in columns.items():
        head: dict[str, Any] = {"name": name, "rows": len(values)}
        if values.dtype.kind in "UO":
            words, values = np.unique(values.astype(str), return_inverse=True)
            head["words"] = words.tolist()
            values = values.astype(np.min_scalar_type(max(0, len(words) - 1)))
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        distinct = np.unique(values) if len(values) > 256 and values.dtype.itemsize > 2 else values
        if len(distinct) <= 256 < len(values) and "words" not in head and np.isfinite(distinct).all():
            head["values"], values = distinct.tolist(), np.searchsorted(distinct, values).astype(np.uint8)
            head["of"] = distinct.dtype.str
        body = zlib.compress(values.tobytes(), 1)
        heads.append({**head, "type": values.dtype.str, "bytes": len(body)})
        bodies.append(body)
    return canonical(heads).encode() + b"\n" + b"".join(bodies)


def unpack(body: bytes, wanted: Sequence[str] = ()) -> Columns:
    """The columns that ``pack`` wrote; those ``wanted`` alone, where given."""
    return {
        name: values if words is None else np.array(words, dtype=str)[values]
        for name, (values, words) in coded(body, wanted).items()
    }


def coded(body: bytes, wanted: Sequence[str] = ()) -> dict[str, tuple[NDArray[Any], list[str] | None]]:
    """The columns that ``pack`` wrote, text as numbers of its distinct words."""
    head, _, rest = body.partition(b"\n")
    found, start = dict[str, tuple[NDArray[Any], list[str] | None]](), 0
    for column in json.loads(head):
        part, start = rest[start : start + column["bytes"]], start + column["bytes"]
        if wanted and column["name"] not in wanted:
            continue
        values = np.frombuffer(zlib.decompress(part), dtype=np.dtype(column["type"]))
        if "values" in column:
            values = np.array(column["values"], dtype=np.dtype(column["of"]))[values]
        found[column["name"]] = values, column.get("words")
    return found
